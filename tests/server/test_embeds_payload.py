"""prompt_embeds of completions: rows as safetensors in base64, refused with field and limit before they are decoded."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save
from safetensors.torch import load_file

from helpers.server import LiveServer, serving

ASKED = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def taking(folder: Path) -> Iterator[LiveServer]:
    with serving(folder, engine={"enable_prompt_embeds": True, "dtype": "float32"}) as live:
        yield live


@pytest.fixture(scope="module")
def table(folder: Path) -> np.ndarray:
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"].float().numpy()


def payload(rows: np.ndarray, **more: np.ndarray) -> str:
    return base64.b64encode(save({"prompt_embeds": np.ascontiguousarray(rows), **more})).decode()


def made(header: object, body: bytes) -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return base64.b64encode(len(text).to_bytes(8, "little") + text + body).decode()


def ask(live: LiveServer, embeds: object, **more: object) -> Any:
    return live.post("/v1/completions", {"prompt_embeds": embeds, **ASKED, **more})


def test_rows_of_the_table_are_its_ids(taking: LiveServer, table: np.ndarray) -> None:
    ids = [[5, 9, 70, 33, 8, 41], [7, 7, 20]]
    by_ids = taking.post("/v1/completions", {"prompt": ids, **ASKED}).json
    by_rows = ask(taking, [payload(table[one]) for one in ids])
    assert by_rows.status == 200, by_rows.text
    assert [c["text"] for c in by_rows.json["choices"]] == [c["text"] for c in by_ids["choices"]]
    assert by_rows.json["usage"]["prompt_tokens"] == 9
    half = payload(table[ids[0]].astype(np.float16))
    bits = np.ascontiguousarray(table[ids[0]]).view(np.uint32) >> 16
    header = {"x": {"dtype": "BF16", "shape": [6, 64], "data_offsets": [0, 768]}, "__metadata__": {"a": "b"}}
    for embeds in (half, made(header, bits.astype(np.uint16).tobytes())):
        assert ask(taking, embeds, logprobs=1).status == 200
    streamed = ask(taking, payload(table[ids[0]]), stream=True).events
    assert "".join(c["choices"][0]["text"] for c in streamed[:-1]) == by_ids["choices"][0]["text"]


ROW = {"dtype": "F32", "shape": [1, 64], "data_offsets": [0, 256]}
BODY = bytes(256)


@pytest.mark.parametrize(
    ("embeds", "message"),
    [
        ("!!", "is not base64"),
        ("", "is not safetensors"),
        ([], "is empty"),
        (base64.b64encode(b"\x80\x04pickle.").decode(), "is not safetensors"),
        (base64.b64encode((2**60).to_bytes(8, "little") + b"{}").decode(), "is not safetensors"),
        (made(b"{" * 4000, b""), "the header is not JSON"),
        (made([], BODY), "has 0 tensors"),
        (made({"a": ROW, "b": ROW}, BODY), "has 2 tensors"),
        (made({"a": 3}, BODY), "has 1 tensors"),
        (made({"a": {**ROW, "dtype": "I32"}}, BODY), "I32 is not one of F32, BF16, F16"),
        (made({"a": {**ROW, "dtype": ["F32"]}}, BODY), "is not one of"),
        (made({"a": {**ROW, "shape": [1, True]}}, BODY), "the shape is not"),
        (made({"a": {**ROW, "shape": [10**18, 64]}}, BODY), "do not fit in the context"),
        (made({"a": {**ROW, "shape": [-1, 64]}}, BODY), "is not [tokens, 64]"),
        (made({"a": {**ROW, "shape": [1, 63]}}, BODY), "is not [tokens, 64]"),
        (made({"a": {**ROW, "data_offsets": [0, 260]}}, BODY), "holds 256 bytes"),
        (made({"a": ROW}, BODY[:-1]), "holds 255 bytes"),
        (made({"a": ROW}, BODY[:-4] + np.float32(np.nan).tobytes()), "holds NaN or infinity"),
        ("A" * 80_000, "are over what 199 tokens of 64 float32 take"),
    ],
)  # fmt: skip
def test_bad_payloads(taking: LiveServer, embeds: object, message: str) -> None:
    reply = ask(taking, embeds)
    assert reply.status == 400, reply.text
    assert reply.json["error"]["param"] == "prompt_embeds"
    assert message in reply.json["error"]["message"]


def test_what_does_not_go_with_rows(taking: LiveServer, server: LiveServer) -> None:
    rows = payload(np.ones((3, 64), np.float32))
    for more, field in (
        ({"prompt": "Hello"}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"dry_multiplier": 1.0}, "dry_multiplier"),
        ({"use_beam_search": True}, "use_beam_search"),
    ):
        reply = ask(taking, rows, **more)
        assert (reply.status, reply.json["error"]["param"]) == (400, field), reply.text
    off = ask(server, rows)
    assert off.status == 400
    assert "--enable-prompt-embeds" in off.json["error"]["message"]
    server.post("/v1/completions", {"max_tokens": 3}).error(400, None, "prompt")
