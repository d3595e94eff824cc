"""The demo's page in a real browser."""

import pytest

from fedstrata.experiments.registry import find
from fedstrata.experiments.runner import prepare, run_experiment

from ..report.test_browser import BROWSER, visit


@pytest.mark.skipif(BROWSER is None, reason="no browser on the PATH")
def test_the_demos_page_works_offline(tmp_path):
    page = run_experiment(prepare(find("demo"), quick=True), tmp_path / "demo", progress=False)
    seen = visit(page, tmp_path)
    assert seen.console == []
    assert seen.requests == []
    assert seen.dom.count('class="main-svg"') >= len(find("demo").plots)
