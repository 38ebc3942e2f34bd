"""The loss of formats on the bundled model: texts that it knows, its own texts, and a quantized cache with float
weights.
"""

from __future__ import annotations

import pytest

from helpers.memory import memory_for
from quire import LLM, SamplingParams
from quire.config.schema import EngineConfig
from quire.engine.build.opening import Model, open_model
from quire.offline.quality import OWN_TEXT, Quality, measure
from quire.offline.texts import TEXT

ASKED = "<|im_start|>user\nExplain FlashAttention.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def model() -> Model:
    return open_model("quire-mini")


@pytest.fixture(scope="module")
def known() -> list[int]:
    """Two chats with the model's own answers, whatever it answers."""
    ids: list[int] = []
    with LLM("quire-mini", dtype="float32", progress=False, memory=memory_for(2**29)) as llm:
        for text in ("What is TTFT?", "Tell me a short story."):
            (output,) = llm.chat(
                [{"role": "user", "content": text}], SamplingParams(temperature=0.0, max_tokens=60)
            )
            ids += [*output.prompt_token_ids, *output.outputs[0].token_ids]
    return ids


@pytest.fixture(scope="module")
def found(model: Model, known: list[int]) -> Quality:
    assert model.tokenizer is not None
    encode = model.tokenizer.encode
    texts = {"known": known, "unknown": encode(TEXT[:800])}
    return measure(model, EngineConfig(threads=1), texts, [encode(ASKED)])


def test_a_text_is_known_or_not(found: Quality) -> None:
    """What the model says itself it knows; prose it does not, and no perplexity of it is given."""
    known = {text.name: text.known for text in found.texts}
    assert known == {"known": True, "unknown": False, OWN_TEXT: True}
    assert {text.name: text.perplexity for text in found.texts}[OWN_TEXT] < 10
    for form in found.formats:
        assert [text.perplexity is None for text in form.texts] == [False, True, False]


def test_int8_is_near_and_the_cache_has_a_cost(found: Quality) -> None:
    """int8 weights change predictions less than a twentieth as much as int4; an int8 cache shows with float weights."""
    int8, int4, cache = ({text.text: text for text in form.texts}["known"] for form in found.formats)
    assert [form.kv for form in found.formats] == ["bf16", "bf16", "i8"]
    assert 0 < 20 * int8.kl_mean < int4.kl_mean
    assert 0 < cache.kl_mean < int4.kl_mean


def test_formats_that_are_asked_for(model: Model, known: list[int]) -> None:
    """Weights, cache, and both together, each compared with the same reference."""
    asked = EngineConfig(threads=1, quantization="int8", kv_cache_dtype="int8", quantization_group_size=32)
    found = measure(model, asked, {"known": known}, [])
    kinds = [(form.quantization, form.group_size, form.kv) for form in found.formats]
    assert kinds == [("int8", 32, "bf16"), ("none", None, "i8"), ("int8", 32, "i8")]
