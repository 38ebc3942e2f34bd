"""Beam search and fill-in-the-middle over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.byte_tokenizer import CONTROL, byte_tokenizer, write_tokenizer
from helpers.checkpoints import VOCAB
from helpers.dialects import fold_lines
from helpers.server import ENDLESS, LiveServer, request_bytes, served_folder, serving
from quire import LLM, BeamSearchParams

SEARCH: dict[str, Any] = {"use_beam_search": True, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def infilling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A model whose tokenizer has StarCoder's tokens."""
    folder = served_folder(tmp_path_factory.mktemp("infilling") / "model")
    markers = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    write_tokenizer(folder, byte_tokenizer(*markers, most=VOCAB - len(CONTROL) - len(markers)))
    with serving(folder) as live:
        yield live


def test_answers_are_those_of_the_python_api(server: LiveServer, folder: Path) -> None:
    with LLM(folder, progress=False, max_model_len=200) as llm:
        found = llm.beam_search(
            ["Hello", "Bye"], BeamSearchParams(4, 12, ignore_eos=True, length_penalty=0.5)
        )
    asked = SEARCH | {"n": 2, "beam_width": 4, "length_penalty": 0.5, "return_token_ids": True}
    body = server.complete(["Hello", "Bye"], logprobs=1, **asked).json
    expected = [beam.tokens for output in found for beam in output.sequences[:2]]
    assert [one["prompt_token_ids"] + one["token_ids"] for one in body["choices"]] == expected
    assert [one["index"] for one in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["completion_tokens"] == 4 * 12
    best = found[0].sequences[0]
    assert sum(body["choices"][0]["logprobs"]["token_logprobs"]) == pytest.approx(best.cum_logprob)
    assert all(len(top) <= 2 for top in body["choices"][0]["logprobs"]["top_logprobs"])
    for same in (
        {"best_of": 4},
        {"beam_width": 4, "best_of": 3},
        {"beam_width": 4, "temperature": 0, "seed": 3},
    ):
        asked = SEARCH | {"n": 2, "length_penalty": 0.5, "return_token_ids": True} | same
        again = server.complete("Hello", **asked).json["choices"]
        assert [one["prompt_token_ids"] + one["token_ids"] for one in again] == expected[:2]
    server.wait(server.idle)


def test_chats_are_searched_too(server: LiveServer) -> None:
    body = server.chat(n=3, early_stopping="never", **SEARCH).json
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert len(set(texts)) == 3
    assert server.chat(n=3, early_stopping="never", **SEARCH).json["choices"] == body["choices"]


@pytest.mark.parametrize(
    ("fields", "code", "name"),
    [
        ({"stream": True}, "unsupported_parameter", "stream"),
        ({"beam_width": 33}, "invalid_value", "beam_width"),
        ({"beam_width": 2, "n": 3}, "invalid_value", "n"),
        ({"length_penalty": 11}, "invalid_value", "length_penalty"),
        ({"early_stopping": "yes"}, "invalid_value", "early_stopping"),
        ({"stop": "a"}, "invalid_value", "stop"),
        ({"top_p": 0.5}, "invalid_value", "top_p"),
        ({"temperature": 0.7}, "invalid_value", "temperature"),
        ({"response_format": {"type": "json_object"}}, "invalid_value", "structured"),
        ({"use_beam_search": False, "length_penalty": 2}, "unsupported_parameter", "length_penalty"),
        ({"use_beam_search": None, "early_stopping": True}, "unsupported_parameter", "early_stopping"),
        ({"use_beam_search": False, "beam_width": 2}, "unsupported_parameter", "beam_width"),
    ],
)
def test_what_a_beam_search_has_not_is_refused(
    server: LiveServer, fields: dict[str, Any], code: str, name: str
) -> None:
    server.chat(**SEARCH | fields).error(400, code, name)
    server.complete(**SEARCH | fields).error(400, code, name)


def test_values_that_change_nothing_pass_without_a_search(server: LiveServer) -> None:
    assert server.complete(use_beam_search=False, length_penalty=1, early_stopping=False).status == 200


def test_a_client_that_leaves_frees_all_blocks(folder: Path) -> None:
    with serving(folder, engine=ENDLESS) as live:
        with live.connect() as connection:
            body = SEARCH | {"prompt": "Hello", "n": 4, "max_tokens": 60_000}
            connection.sendall(request_bytes("/v1/completions", body))
            live.wait(lambda: live.engine.stats.running == 4)
        live.wait(live.idle)


def test_ollamas_suffix_is_the_same_prompt(infilling: LiveServer) -> None:
    asked = {"prompt": "def f(", "suffix": "):", "options": {"num_predict": 6, "temperature": 0}}
    whole = infilling.post("/api/generate", {**asked, "stream": False}).json
    same = infilling.complete("def f(", suffix="):", max_tokens=6, temperature=0).json
    assert whole["response"] == same["choices"][0]["text"]
    assert whole["prompt_eval_count"] == same["usage"]["prompt_tokens"]
    assert fold_lines(infilling.post("/api/generate", asked).body)["response"] == whole["response"]
    assert infilling.post("/api/generate", {**asked, "prompt": "", "stream": False}).status == 200
    for fields, name in (
        ({"system": "x"}, "system: "),
        ({"think": True}, "think: "),
        ({"suffix": "x" * 10_000}, "suffix: "),
    ):
        refused = infilling.post("/api/generate", asked | fields)
        assert (refused.status, refused.json["error"][: len(name)]) == (400, name)


def test_a_suffix_is_put_around_the_middle(infilling: LiveServer) -> None:
    body = infilling.complete("def f(", suffix="):", max_tokens=4, return_token_ids=True, temperature=0).json
    tokens = infilling.post("/tokenize", {"prompt": "<fim_prefix>def f(<fim_suffix>):<fim_middle>"}).json[
        "tokens"
    ]
    assert body["choices"][0]["prompt_token_ids"] == tokens
    plain = infilling.complete(tokens, max_tokens=4, return_token_ids=True, temperature=0).json
    assert body["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    several = infilling.complete(["a", "b"], suffix="c", max_tokens=1, return_token_ids=True).json["choices"]
    assert len({tuple(choice["prompt_token_ids"]) for choice in several}) == 2
    assert infilling.complete("a", suffix="", max_tokens=1, echo=True).json["choices"][0]["text"][0] == "a"


def test_the_middle_ends_at_a_token_of_the_format(infilling: LiveServer) -> None:
    """Whatever the model says: only the format's tokens may be sampled."""
    ids = infilling.post("/tokenize", {"prompt": "<fim_prefix><fim_suffix><fim_middle>"}).json["tokens"]
    asked: dict[str, Any] = {"allowed_token_ids": ids, "max_tokens": 5}
    body = infilling.complete("a", suffix="b", **asked).json["choices"][0]
    assert (body["text"], body["finish_reason"]) == ("", "stop")
    assert body["stop_reason"] in ids
    assert (
        infilling.complete("a", suffix="b", ignore_eos=True, **asked).json["choices"][0]["finish_reason"]
        == "length"
    )


@pytest.mark.parametrize(
    ("fields", "code", "name"),
    [
        ({"prompt": [5, 6]}, "unsupported_parameter", "suffix"),
        ({"prompt": [[5], [6]]}, "unsupported_parameter", "suffix"),
        ({"echo": True}, "unsupported_parameter", "echo"),
        ({"suffix": "x" * 196}, "context_length_exceeded", "prompt"),
        ({"suffix": "x" * 10_000}, "context_length_exceeded", "suffix"),
    ],
)
def test_what_cannot_be_filled_in_is_refused(
    infilling: LiveServer, fields: dict[str, Any], code: str, name: str
) -> None:
    infilling.post("/v1/completions", {"prompt": "a", "suffix": "b"} | fields).error(400, code, name)
