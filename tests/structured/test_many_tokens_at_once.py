"""Several tokens in one event give the output that they give one by one, stop strings and all."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from helpers.grammars import tiny_tokenizer
from quire.engine.front.output import OutputBuilder
from quire.logprobs import LogprobTable, TokenLogprob
from quire.types import FinishReason, Request, SamplingParams, SeqEvent, TokenIds


def built(
    sizes: Iterator[int], tokens: list[int], params: SamplingParams, *, plain: bool
) -> tuple[object, ...]:
    """The output after events of these sizes, the last of which ends it by length."""
    request = Request(request_id="r", prompt_token_ids=TokenIds([7]), params=params)
    builder = OutputBuilder(request, None, tiny_tokenizer(), lambda index: None)
    text, at = "", 0
    while at < len(tokens):
        new = tokens[at : at + next(sizes)]
        at += len(new)
        reason = FinishReason.LENGTH if at == len(tokens) else None
        if plain and reason is None:
            delta = builder.grow(0, new, 0.0)
        else:
            logprobs = LogprobTable.of([TokenLogprob(token, -1.0, 1)] for token in new)
            delta = builder.apply(SeqEvent("r", 0, new, logprobs, None, reason), 0.0)
        if delta is not None:
            text += delta.text
    output = builder.output.outputs[0]
    assert text == output.text
    assert plain or (output.logprobs is not None and len(output.logprobs) == len(output.token_ids))
    return (
        output.text,
        output.token_ids,
        output.finish_reason,
        output.stop_reason,
        builder.output.usage,
    )


@pytest.mark.parametrize("plain", [True, False])
def test_events_may_be_of_any_size(plain: bool) -> None:
    rng = random.Random(0)
    matched = 0
    for _ in range(150):
        tokens = [rng.choice([5, 7, 33, 34, 52, 54, 55, 60, 61, 62]) for _ in range(12)]
        whole = tiny_tokenizer().decode(tokens)
        cut = rng.randrange(len(whole) - 3)
        params = SamplingParams(
            max_tokens=12, stop=[whole[cut : cut + rng.randint(1, 3)], "zz"], min_tokens=rng.choice([0, 0, 4]),
            logprobs=0, include_stop_str_in_output=rng.random() < 0.3,
        )  # fmt: skip
        alone = built(iter(lambda: 1, 0), tokens, params, plain=plain)
        at_once = built(iter(lambda: rng.randint(1, 6), 0), tokens, params, plain=plain)
        assert at_once == alone
        matched += alone[2] is FinishReason.STOP
    assert matched > 50
