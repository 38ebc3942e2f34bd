"""The rarer samplers as fields of both routes: they have an effect, and the same one each time."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.server import LiveServer

LLAMA_CPP: dict[str, Any] = {
    "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    "top_k": 40, "top_p": 0.95, "min_p": 0.05, "typical_p": 0.9, "top_n_sigma": 3.0, "min_keep": 1,
    "xtc_probability": 0.5, "xtc_threshold": 0.1, "dynatemp_range": 0.2, "dynatemp_exponent": 1.5,
    "dry_multiplier": 0.8, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n", ":"], "repeat_last_n": 64, "repetition_penalty": 1.1, "bad_words": ["xyz"],
}  # fmt: skip
MIROSTAT = {"mirostat": 1, "mirostat_tau": 4.0, "mirostat_eta": 0.2}
GUIDED = {"guidance_scale": 1.8, "negative_prompt": "Good morning", "watermark_delta": 2.0, "n": 2}


@pytest.mark.parametrize(
    "fields", [LLAMA_CPP, MIROSTAT, GUIDED, {"dry_multiplier": 1.0, "dry_sequence_breakers": []}]
)
def test_both_routes_take_them(server: LiveServer, fields: dict[str, Any]) -> None:
    asked = {"max_tokens": 24, "seed": 4, "ignore_eos": True, **fields}
    for ask in (lambda: server.chat(**asked), lambda: server.complete("Hello", **asked)):
        first, again = ask(), ask()
        assert first.status == 200, first.text
        assert first.json["choices"] == again.json["choices"]


def test_a_bias_by_text(server: LiveServer) -> None:
    reply = server.complete("Hello", max_tokens=4, temperature=0, ignore_eos=True, logit_bias={"z": 100})
    assert reply.json["choices"][0]["text"] == "zzzz"
    banned = server.complete(
        "Hello", max_tokens=4, temperature=0, ignore_eos=True, logit_bias={"z": 100}, bad_words=["zz"]
    )
    assert "zz" not in banned.json["choices"][0]["text"]


def test_what_turns_them_off_changes_nothing(server: LiveServer) -> None:
    off = {"typical_p": 1.0, "mirostat": 0, "xtc_probability": 0, "dry_multiplier": 0, "top_n_sigma": -1,
           "dynatemp_range": 0, "min_keep": 0, "bad_words": [], "watermark": False, "repeat_last_n": -1}  # fmt: skip
    asked = {"max_tokens": 12, "seed": 4, "temperature": 0.9}
    assert server.chat(**asked).json["choices"] == server.chat(**asked, **off).json["choices"]
    server.chat(watermark=True).error(400, "unsupported_parameter", "watermark")


def test_a_negative_prompt(server: LiveServer) -> None:
    asked = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "guidance_scale": 2.0}
    ids = server.post("/tokenize", {"prompt": "Good morning"}).json["tokens"]
    texts = [
        server.complete("Hello", **(asked | more)).json["choices"][0]["text"]
        for more in (
            {"negative_prompt": "Good morning"},
            {"negative_prompt_ids": ids},
            {},
            {"guidance_scale": 1},
        )
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
    for more, field in (
        ({"negative_prompt": "a", "negative_prompt_ids": ids}, "negative_prompt_ids"),
        ({"negative_prompt": "a", "guidance_scale": 1}, "negative_prompt"),
        ({"negative_prompt_ids": [10**6]}, "negative_prompt_ids"),
        ({"negative_prompt": "a", "use_beam_search": True}, "use_beam_search"),
    ):
        reply = server.complete("Hello", **(asked | more))
        assert reply.status == 400, reply.text
        assert reply.json["error"]["param"] == field
