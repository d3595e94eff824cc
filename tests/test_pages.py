"""The pages on models show what runs: every section's code, after the page's first lines."""

import re
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import pytest

DOCS = Path(__file__).parents[1] / "docs"
NEEDS = {"Flax NNX": "flax", "Flax linen": "flax", "Haiku": "haiku", "Equinox": "equinox"}


def sections(page):
    """Title → the code of a section; what stands before the first title is ``""``."""
    parts = re.split(r"^## (.+)$", (DOCS / page).read_text("utf-8"), flags=re.MULTILINE)
    titles = ["", *parts[1::2]]
    blocks = ["\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)) for text in parts[::2]]
    return dict(zip(titles, blocks, strict=True))


MODELS, TORCH = sections("models.md"), sections("pytorch.md")


def need(package):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'fedstrata[test]'")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # other packages' warnings are not ours to heed
@pytest.mark.parametrize("title", [title for title, code in MODELS.items() if title and code])
def test_models_of_every_library_learn(title):
    need(NEEDS.get(title, "jax"))
    names = {}
    exec(compile(MODELS[""] + MODELS[title], f"models.md, {title}", "exec"), names)
    losses = names["result"].history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    if title == "Equinox":
        again = jax.vmap(names["again"])(names["data"].test["x"])
        np.testing.assert_allclose(again, names["scores"], rtol=1e-6)
    if title.startswith("None"):
        assert names["accuracy"] == pytest.approx(np.mean(names["labels"] == names["data"].test["y"]))
        assert names["accuracy"] > 0.8
        assert names["tuned"].history["upper"][-1] < names["tuned"].history["upper"][0]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_page_for_pytorch_users_runs():
    need("torch")
    names = {}
    for title, code in TORCH.items():
        exec(compile(code, f"pytorch.md, {title}", "exec"), names)
    assert names["accuracy"] > 0.8
    assert names["again"].history["loss"][-1] < names["again"].history["loss"][0]


def test_every_library_has_its_section():
    assert {"Plain JAX", "PyTorch", *NEEDS} < MODELS.keys()
