"""What drafts of the shipped model are trained on, and how often they are right."""

from __future__ import annotations

from tools.default_model.acceptance import acceptance
from tools.default_model.corpus.draw import Split
from tools.default_model.said import answered, prompts

from quire.loader import shipped_models


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
    assert found.tokens > 1.5
