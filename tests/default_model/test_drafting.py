"""What drafts of the shipped model are trained on, and how often they are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tools.default_model.acceptance import acceptance
from tools.default_model.corpus.draw import Split
from tools.default_model.said import answered, prompts

from quire.loader import shipped_models
from quire.train.training import TrainingOptions, train_draft

FLOOR = 1.5  # tokens a step
# Some minutes of training: steps, learning rate, and texts in a step.
TRAINED = {
    "eagle3": (200, 0.004, 8),
    "eagle": (150, 0.004, 8),
    "medusa": (500, 0.01, 16),
    "draft_model": (300, 0.005, 8),
}


def test_the_text_is_what_the_model_says_to_prompts_of_one_split() -> None:
    asked = prompts(Split.EVAL, 12)
    assert asked == prompts(Split.EVAL, 12) != prompts(Split.TRAIN, 12)
    for ask, text in zip(asked, answered(shipped_models()["quire-mini"], asked, 1), strict=True):
        assert text.startswith(ask)
        said = text.removeprefix(ask).removesuffix("<|im_end|><|endoftext|>")
        assert said
        assert "<|im_end|>" not in said


def test_the_shipped_draft_is_often_right() -> None:
    found = acceptance(
        "quire-mini", '{"method": "draft_model", "model": "quire-mini-draft"}', 2, prompts(Split.EVAL, 12), 1
    )
    assert len(found.rates) == 2
    assert found.tokens > FLOOR


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the model says to prompts of the training split."""
    file = tmp_path_factory.mktemp("said") / "said.txt"
    file.write_text("".join(answered(shipped_models()["quire-mini"], prompts(Split.TRAIN, 4000), None)))
    return file


@pytest.mark.speculation
@pytest.mark.parametrize("method", TRAINED)
def test_a_trained_draft_is_often_right(method: str, said: Path, tmp_path: Path) -> None:
    """On text that was held out, and in the engine, on answers to prompts of the other split, as trees of 8 drafts. A
    draft that has learned nothing is under the floor."""
    steps, rate, texts = TRAINED[method]
    options = TrainingOptions(method=method, steps=steps, learning_rate=rate, batch_size=texts)
    before, after = train_draft("quire-mini", [said], tmp_path, options, print)
    assert before.tokens < FLOOR < after.tokens
    config = json.dumps({"method": method, "model": str(tmp_path)})
    assert acceptance("quire-mini", config, 8, prompts(Split.EVAL, 100), None).tokens > FLOOR
