"""TGI's API over HTTP: its fields, its events, its errors. Examples are those of its documentation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.dialects import fold_tokens
from helpers.scripted import Script, scripted_folder
from helpers.server import LiveServer, Reply, serving

SAID = "Just text: 你好 🌍."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = scripted_folder(tmp_path_factory.mktemp("scripted") / "model")
    script = Script(folder)
    script.says("plain", SAID)
    with script.played(), serving(folder, {"max_model_len": 512}, served_model_name=("tiny",)) as live:
        yield live


def ask(server: LiveServer, path: str = "/generate", inputs: str = "plain", **parameters: Any) -> Reply:
    return server.post(path, {"inputs": inputs, "parameters": parameters})


def error(reply: Reply, status: int, kind: str, text: str) -> None:
    assert reply.status == status, reply.text
    assert reply.json.keys() == {"error", "error_type"}
    assert reply.json["error_type"] == kind
    assert text in reply.json["error"]


def test_details_of_an_answer(server: LiveServer) -> None:
    """The object of the documentation: its fields, and nothing else."""
    found = ask(server, details=True, decoder_input_details=True, top_n_tokens=2).json
    assert found.keys() == {"generated_text", "details"}
    assert found["generated_text"] == SAID
    details = found["details"]
    assert details.keys() == {
        "finish_reason", "generated_tokens", "seed", "prefill", "tokens", "top_tokens",
    }  # fmt: skip
    assert (details["finish_reason"], details["seed"]) == ("eos_token", None)
    assert details["generated_tokens"] == len(details["tokens"]) == len(SAID.encode()) + 1
    assert "".join(token["text"] for token in details["tokens"] if not token["special"]) == SAID
    end = details["tokens"][-1]
    assert end["special"]
    assert end.keys() == {"id", "text", "logprob", "special"}
    assert [len(top) for top in details["top_tokens"]] == [2] * details["generated_tokens"]
    first, *rest = details["prefill"]
    assert (first.keys(), first["logprob"]) == ({"id", "text", "logprob"}, None)
    assert "".join(token["text"] for token in details["prefill"]).endswith("plain")
    assert all(token["logprob"] <= 0 for token in [*rest, *details["tokens"]])


def test_whole_and_streamed(server: LiveServer) -> None:
    for parameters in ({}, {"max_new_tokens": 5}, {"stop": ["text"], "top_n_tokens": 1}):
        whole = ask(server, details=True, return_full_text=True, **parameters).json
        reply = ask(server, "/generate_stream", details=True, return_full_text=True, **parameters)
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert fold_tokens(reply.body) == whole
        assert whole["generated_text"].startswith("plain")


def test_how_answers_end(server: LiveServer) -> None:
    cut = ask(server, details=True, max_new_tokens=3).json
    assert (cut["generated_text"], cut["details"]["finish_reason"]) == ("Jus", "length")
    stopped = ask(server, details=True, stop=["text"]).json
    assert (stopped["generated_text"], stopped["details"]["finish_reason"]) == ("Just text", "stop_sequence")


def test_the_older_route(server: LiveServer) -> None:
    """A list of one answer, or a stream."""
    body = {"inputs": "plain", "parameters": {"max_new_tokens": 4}}
    (answer,) = server.post("/", body).json
    assert answer == {"generated_text": "Just"}
    events = server.post("/", body | {"stream": True}).body.decode().split("\n\n")[:-1]
    assert json.loads(events[-1].removeprefix("data:"))["generated_text"] == "Just"
    assert server.post("/", {"inputs": "plain"}).json[0]["generated_text"].encode()


def test_seeds(server: LiveServer) -> None:
    """A drawn answer has its seed, with which it comes again."""
    drawn = ask(server, inputs="other", details=True, do_sample=True, max_new_tokens=8).json
    seed = drawn["details"]["seed"]
    assert isinstance(seed, int)
    again = ask(server, inputs="other", details=True, do_sample=True, max_new_tokens=8, seed=seed).json
    assert again == drawn
    best = ask(
        server, inputs="other", details=True, temperature=1.5, best_of=3, max_new_tokens=4, seed=1
    ).json
    others = best["details"]["best_of_sequences"]
    assert [len(other["tokens"]) for other in others] == [4, 4]
    means = [sum(t["logprob"] for t in one["tokens"]) for one in (best["details"], *others)]
    assert means == sorted(means, reverse=True)


def test_grammars(server: LiveServer) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    grammars: list[dict[str, Any]] = [
        {"type": "json", "value": schema}, {"type": "json_object", "value": json.dumps(schema)},
        {"type": "json_schema", "value": {"name": "a", "schema": schema}},
    ]  # fmt: skip
    for grammar in grammars:
        reply = ask(server, inputs="x", grammar=grammar, max_new_tokens=200)
        assert json.loads(reply.json["generated_text"]) == {"a": 1}
    regex = ask(server, inputs="x", grammar={"type": "regex", "value": "(ab){2}"})
    assert regex.json["generated_text"] == "abab"
    bad = ask(server, grammar={"type": "regex", "value": "("})
    error(bad, 422, "validation", "parameters.grammar.value: ")
    error(ask(server, grammar={"type": "lark", "value": "x"}), 422, "validation", "parameters.grammar")


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"typical_p": 2.0}, "parameters.typical_p: "),
        ({"watermark": True}, "parameters.watermark: must be false"),
        ({"truncate": 2}, "parameters.truncate: 2 is below the "),
        ({"best_of": 0}, "parameters.best_of: "),
        ({"max_new_tokens": 0}, "parameters.max_new_tokens: "),
        ({"max_new_tokens": 9999}, "parameters.max_new_tokens: "),
        ({"repetition_penalty": 0}, "parameters.repetition_penalty: "),
        ({"top_n_tokens": 1000}, "parameters.top_n_tokens: "),
        ({"stop": [""]}, "parameters.stop"),
        ({"temprature": 1}, "temprature"),
        ({"temperature": "hot"}, "parameters.temperature: "),
    ],
)
def test_errors_name_the_field(server: LiveServer, parameters: dict[str, Any], text: str) -> None:
    error(ask(server, **parameters), 422, "validation", text)
    error(ask(server, "/generate_stream", **parameters), 422, "validation", text)


def test_errors_of_requests(server: LiveServer) -> None:
    error(server.post("/generate_stream", {"input": "x"}), 422, "validation", "inputs")
    error(server.post("/", {"inputs": ""}), 422, "validation", "inputs: has no tokens")
    error(server.request("GET", "/generate_stream"), 405, "validation", "use OPTIONS, POST")
    error(ask(server, best_of=2), 422, "validation", "parameters.best_of: needs do_sample")
    stream = ask(server, "/generate_stream", best_of=2)
    error(stream, 422, "validation", "parameters.best_of: not supported in a stream")
    stream = ask(server, "/generate_stream", decoder_input_details=True)
    error(stream, 422, "validation", "decoder_input_details: not supported in a stream")
    assert ask(server, truncate=100, typical_p=1.0, watermark=False).status == 200


def test_one_path_for_two_apis(server: LiveServer) -> None:
    """The field with the prompt says whose a body is; without one, the error names those of both."""
    assert ask(server).json.keys() == {"generated_text"}
    assert server.post("/generate", {"text": "plain"}).json["text"] == SAID
    for body in ({}, {"inputs": "a", "text": "b"}):
        reply = server.post("/generate", body)
        assert reply.status in {400, 422}
        assert "tgi: inputs" in reply.text
        assert "sglang: text or input_ids" in reply.text
    assert "anyOf" in json.dumps(server.get("/openapi.json").json["paths"]["/generate"])


def test_info(server: LiveServer) -> None:
    found = server.get("/info").json
    assert (found["model_id"], found["model_pipeline_tag"]) == ("tiny", "text-generation")
    assert (found["max_input_tokens"], found["max_total_tokens"]) == (511, 512)
