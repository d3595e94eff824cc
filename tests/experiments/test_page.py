"""The demo's page in a real browser."""

import pytest

from fedstrata.lab.experiments.registry import find
from fedstrata.lab.experiments.runner import prepare, run_experiment

from ..report.chromium import ABSENT, FOUND, Chromium


@pytest.mark.long
@pytest.mark.skipif(FOUND is None, reason=ABSENT)
def test_the_demos_page_works_offline(tmp_path):
    file = run_experiment(prepare(find("demo"), quick=True), tmp_path / "demo", progress=False)
    with Chromium(tmp_path / "profile") as browser:
        page = browser.open(file.as_uri())
        page.wait("document.documentElement.classList.contains('ready')")
        assert page("document.querySelectorAll('.main-svg').length") >= len(find("demo").plots)
        assert page("document.querySelectorAll('.client').length") == 4  # the split is drawn
        assert (page.complaints, page.requests) == ([], [])
