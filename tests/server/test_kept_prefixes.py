"""session_id, prompt_cache_retention, cache_control and max_cost; hits inside of blocks on a real model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.memory import memory_for
from helpers.server import LiveServer, serving
from quire import LLM, SamplingParams


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with serving(folder, {"num_kv_blocks": 64, "max_model_len": 512, "cache_policy": "lfu"}) as live:
        yield live


def cached(server: LiveServer, prompt: list[int], **fields: Any) -> int:
    reply = server.complete(prompt, max_tokens=1, **fields)
    assert reply.status == 200, reply.text
    found: int = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.mark.parametrize(
    ("mark", "fields"),
    [
        (40, {"session_id": "a conversation"}), (50, {"prompt_cache_retention": "24h"}),
        (60, {"cache_control": {"type": "ephemeral"}}), (70, {"cache_control": {"type": "ephemeral", "ttl": "1h"}}),
    ],
)  # fmt: skip
def test_what_a_request_asks_to_keep_outlives_a_scan(
    server: LiveServer, mark: int, fields: dict[str, Any]
) -> None:
    kept, plain = [mark, *range(2, 81)], [mark + 1, *range(2, 81)]
    assert cached(server, kept, **fields) == 0
    assert cached(server, plain) == 0
    for index in range(30):
        cached(server, [3 + index, 7, mark, *range(2, 60)])
    assert cached(server, kept) >= 64
    assert cached(server, plain) < 64


def test_messages_of_anthropic_keep_what_is_marked(server: LiveServer) -> None:
    pinned = server.metric("quire_kv_blocks_pinned")
    text = {"type": "text", "text": "Long. " * 40, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": [text]}], "model": None}
    model = server.get("/v1/models").json["data"][0]["id"]
    assert server.post("/v1/messages", body | {"model": model}).status == 200
    server.wait(lambda: server.metric("quire_kv_blocks_pinned") > pinned)


def test_a_cost_bounds_the_answer(server: LiveServer) -> None:
    reply = server.complete([1, 2, 3, 4], max_tokens=50, ignore_eos=True, max_cost=15)
    assert reply.json["usage"]["completion_tokens"] == 5  # 4 + 2 * 5 <= 15
    assert reply.json["choices"][0]["finish_reason"] == "length"
    server.complete([1, 2, 3, 4], max_cost=5).error(400, "invalid_value", "max_cost")
    assert server.complete([1, 2, 3, 4], max_cost=6, ignore_eos=True).json["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("kv", ["auto", "int8", "fp8", "int4", "kivi4"])
def test_a_hit_inside_of_a_block_gives_the_same_bits(folder: Path, kv: str) -> None:
    """Against an engine without a cache; log-probabilities are equal to the last bit."""
    params = SamplingParams(max_tokens=8, logprobs=3, temperature=0, ignore_eos=True)
    base, options = [5 + i % 90 for i in range(120)], {"kv_cache_dtype": kv, "kv_cache_quality": "force"}
    asked = [[*base[:end], 100, 101] for end in (40, 41, 55, 63, 90, 119)]
    found = []
    for caching in (False, True):
        with LLM(
            folder, memory=memory_for(2**29), max_model_len=256, enable_prefix_caching=caching, **options
        ) as llm:
            llm.generate([base], params)
            outs = [llm.generate([one], params)[0] for one in asked]
            found.append([(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outs])
            cached_tokens = [out.usage.cached_tokens for out in outs]
    assert str(found[0]) == str(found[1])
    if kv != "kivi4":  # its latest tokens are in a window of their own
        assert sum(tokens % 16 for tokens in cached_tokens) > 20
    else:
        assert all(tokens % 32 == 0 for tokens in cached_tokens)
