"""The routes for vectors, scores and labels: shapes, what they refuse, and the openai client."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from helpers.encoders import TinyEncoder
from helpers.memory import memory_for
from helpers.pooling_folders import pooling_folder
from helpers.server import LiveServer, serving


def engine() -> dict[str, Any]:
    """Options of the server's engine."""
    memory = memory_for(2**29)
    return {"max_model_len": 48, "memory": memory, "max_num_seqs": 8, "max_num_batched_tokens": 96}


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder, _ = pooling_folder("bert", tmp_path_factory.mktemp("vectors"), prompts={"query": "find: "})
    with serving(folder, engine(), served_model_name=("tiny",)) as live:
        yield live


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = TinyEncoder("bert-score", "BertForSequenceClassification", "BertConfig", {"num_labels": 1})
    folder: Path = pooling_folder(model, tmp_path_factory.mktemp("labels"))[0]
    with serving(folder, engine(), served_model_name=("tiny",)) as live:
        yield live


def numbers(server: LiveServer, **body: Any) -> np.ndarray:
    reply = server.post("/v1/embeddings", body)
    assert reply.status == 200, reply.json
    return np.array([item["embedding"] for item in reply.json["data"]], np.float32)


def test_every_form_of_input_gives_the_same_vectors(vectors: LiveServer) -> None:
    reply = vectors.post("/v1/embeddings", {"model": "tiny", "input": ["a b", "c"], "user": "me"})
    assert reply.json["object"] == "list"
    assert reply.json["model"] == "tiny"
    assert reply.json["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [(item["object"], item["index"]) for item in reply.json["data"]] == [
        ("embedding", 0),
        ("embedding", 1),
    ]
    one, other = numbers(vectors, input=["a b", "c"])
    ids = [2, 5, 6, 3]
    for same in ("a b", ["a b"], ids, [ids]):
        assert np.array_equal(numbers(vectors, input=same), [one])
    assert np.array_equal(
        numbers(vectors, input="find: a b"), numbers(vectors, input="a b", prompt_name="query")
    )
    assert np.linalg.norm(other) == pytest.approx(1.0, abs=1e-6)
    short = numbers(vectors, input="a b", dimensions=4)[0]
    assert np.allclose(short, one[:4] / np.linalg.norm(one[:4]), atol=1e-6)


def test_the_openai_client_reads_both_formats(vectors: LiveServer) -> None:
    host, port = vectors.address
    with openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0) as client:
        packed = client.embeddings.create(
            model="tiny", input=["a b", "c d"]
        )  # base64 unless it is asked otherwise
        plain = client.embeddings.create(
            model="tiny", input=["a b", "c d"], encoding_format="float", dimensions=48
        )
        assert np.array_equal(np.float32([each.embedding for each in packed.data]),
                              np.float32([each.embedding for each in plain.data]))  # fmt: skip
        with pytest.raises(openai.BadRequestError, match="dimensions: 49 is not in"):
            client.embeddings.create(model="tiny", input="a", dimensions=49)


def test_many_texts_from_many_clients_have_the_bits_of_each_alone(vectors: LiveServer) -> None:
    texts = [f"{'a ' * (n % 17)}{chr(97 + n % 26)}" for n in range(300)]
    found: dict[int, np.ndarray] = {}
    work = [
        threading.Thread(target=lambda n=n: found.update({n: numbers(vectors, input=texts[n:])}))
        for n in (0, 100)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert np.array_equal(found[0][100:], found[100])
    assert all(np.array_equal(numbers(vectors, input=texts[n])[0], found[0][n]) for n in (0, 5, 299))


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/embeddings", {"input": ""}, "input", "a text is empty"),
        ("/v1/embeddings", {"input": []}, "input", "is empty"),
        ("/v1/embeddings", {"input": [[]]}, "input", "has no tokens"),
        ("/v1/embeddings", {"input": ["a", 3]}, "input", "mixes strings, token ids and lists"),
        ("/v1/embeddings", {"input": [3, 128]}, "input", "128 is not a token id below the vocabulary size 128"),
        ("/v1/embeddings", {"input": "a " * 60}, "input", "62 tokens are over the limit of 48 tokens for a text"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "has 2049 texts, not 1 to 2048"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "0 is not in [1, 48], the vector's length"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "hex"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "x"}, "prompt_name", "is not a prompt of this model"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "leave no room"),
        ("/v1/embeddings", {}, "input", "input"),
        ("/classify", {"input": "a"}, "model", "this model is for the task embed, not classify or score"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1", "2 texts are neither 1 nor the 3"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2", "has 0 texts"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "has 0 texts"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", ">= 1"),
        ("/v1/completions", {"prompt": "a"}, "model", "this model is for the task embed, and generates no text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "model", "generates no text"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(
    vectors: LiveServer, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    reply = vectors.post(path, body)
    error = reply.json["error"]
    assert (reply.status, error["param"]) == (400, param)
    assert message in error["message"]


def test_a_generating_model_refuses_to_embed(server: LiveServer) -> None:
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/rerank", {"query": "a", "documents": ["b"]})):
        reply = server.post(path, body)
        assert reply.status == 400
        assert reply.json["error"]["message"] == (
            "model: this model generates text; to embed texts with it, start it with --task embed"
        )


def test_vectors_compare_texts(vectors: LiveServer) -> None:
    one, other = numbers(vectors, input=["a b", "c d"])
    scores = vectors.post("/score", {"text_1": "a b", "text_2": ["c d", "a b"]}).json
    assert [item["score"] for item in scores["data"]] == pytest.approx([float(one @ other), 1.0], abs=1e-6)
    raw = vectors.post("/pooling", {"input": "a b", "encoding_format": "base64"}).json["data"][0]["data"]
    assert np.array_equal(np.frombuffer(base64.b64decode(raw), "<f4"), one)


def test_documents_are_ranked(labels: LiveServer) -> None:
    documents = ["c d", {"text": "e f g"}, "h"]
    scores = labels.post("/v1/score", {"text_1": "a b", "text_2": ["c d", "e f g", "h"]}).json["data"]
    ranked = labels.post("/v2/rerank", {"query": "a b", "documents": documents}).json
    assert ranked["usage"]["total_tokens"] == 7 + 8 + 6
    wanted = sorted(((item["score"], item["index"]) for item in scores), reverse=True)
    assert [(item["relevance_score"], item["index"]) for item in ranked["results"]] == wanted
    assert ranked["results"][0]["document"]["text"] in {"c d", "e f g", "h"}
    best = labels.post(
        "/rerank", {"query": "a b", "documents": documents, "top_n": 1, "return_documents": False}
    ).json
    assert best["results"] == [{"index": wanted[0][1], "relevance_score": wanted[0][0]}]


def test_labels_have_names_and_probabilities(labels: LiveServer) -> None:
    body = labels.post("/classify", {"input": ["a b", "c"]}).json
    assert [(item["label"], item["num_classes"]) for item in body["data"]] == [("LABEL_0", 1)] * 2
    logits = labels.post("/pooling", {"input": ["a b", "c"]}).json["data"]
    for item, logit in zip(body["data"], logits, strict=True):
        assert item["probs"][0] == pytest.approx(1 / (1 + np.exp(-logit["data"][0])), abs=1e-6)


def test_ollamas_forms(vectors: LiveServer) -> None:
    """Examples of its documentation; nothing is cut unless the client asks for it."""
    found = vectors.post(
        "/api/embed", {"model": "tiny:latest", "input": ["a b", "c"], "options": {"num_ctx": None}}
    ).json
    assert found.keys() == {"model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"}
    assert (found["model"], found["prompt_eval_count"], found["load_duration"]) == ("tiny:latest", 7, 0)
    assert found["total_duration"] > 0
    ours = numbers(vectors, input=["a b", "c"], normalize=True)
    assert np.array_equal(np.array(found["embeddings"], np.float32), ours)
    (short,) = vectors.post("/api/embed", {"input": "a b", "dimensions": 4}).json["embeddings"]
    assert len(short) == 4
    older = vectors.post("/api/embeddings", {"model": "tiny", "prompt": "a b"}).json
    assert np.array_equal(
        np.array([older["embedding"]], np.float32), numbers(vectors, input="a b", normalize=False)
    )
    assert vectors.post("/api/embed", {"input": ""}).json["embeddings"] == []
    assert vectors.post("/api/embed", {"input": "a " * 100, "truncate": True}).json["prompt_eval_count"] == 48
    for path, body, text in (
        ("/api/embed", {"input": "a " * 100}, "input"),
        ("/api/embed", {"input": "a " * 100, "truncate": False}, "input"),
        ("/api/embeddings", {"prompt": "a " * 100}, "prompt: "),
        ("/api/embed", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/api/embed", {"input": "a", "options": {"temperature": 1}}, "options.temperature: "),
        ("/api/embed", {"input": "a", "keep_alive": 0}, "keep_alive: "),
    ):
        reply = vectors.post(path, body)
        assert (reply.status, reply.json.keys()) == (400, {"error"}), body
        assert text in reply.json["error"]
    assert vectors.post("/api/show", {"model": "tiny"}).json["capabilities"] == ["embedding"]
