"""Answers to questions that were nearly asked before: which they are, whose they are, and in which form."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from helpers.answering import Chats, Vectors, answering
from helpers.pooling_folders import pooling_folder
from helpers.process import until
from helpers.routed import Routed, routed
from helpers.server import GUARD, Reply, serving

FIRST, NEAR = "please tell me what is the capital of france", "please say me what is the capital of france"
FAR = "please sing a song about rain in the mountains"
ON = {"temperature": 0, "model": "m"}


@contextmanager
def cached(options: str = "", **serving: Any) -> Iterator[tuple[Routed, Chats, Vectors]]:
    """A router with a semantic cache, a server that chats, and one that gives vectors."""
    chats, vectors = Chats(), Vectors()
    with ExitStack() as stack:
        url, of_vectors = (stack.enter_context(answering(each.answer)) for each in (chats, vectors))
        given = f"url={of_vectors},threshold=0.8,size=4MiB,timeout={GUARD}{options}"
        router = stack.enter_context(routed(urls=[url], serving=serving, semantic_cache=given))
        until(lambda: router.backends.all[0].healthy)
        yield router, chats, vectors


def ask(router: Routed, text: str, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
    body = {"messages": [{"role": "user", "content": text}], **ON, **fields}
    return router.request("POST", "/v1/chat/completions", body, headers)


def said(reply: Reply) -> str:
    """The text of an answer of either form."""
    assert reply.status == 200, reply.text
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return str(reply.json["choices"][0]["message"]["content"])
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    made = [json.loads(each[6:]) for each in events[:-2]]
    return "".join(choice["delta"].get("content") or "" for each in made for choice in each["choices"])


def how(reply: Reply) -> str:
    return str(reply.headers.get("x-quire-semantic-cache", ""))


def test_a_question_in_other_words_gets_the_answer_that_was_given() -> None:
    with cached() as (router, chats, _):
        first, near, far = (ask(router, text) for text in (FIRST, NEAR, FAR))
        assert [how(each) for each in (first, near, far)] == ["miss", "hit", "miss"]
        assert (said(first), said(near), said(far)) == ("Answer 1", "Answer 1", "Answer 2")
        assert near.headers["x-quire-semantic-similarity"] == "0.8889"
        assert "x-quire-semantic-similarity" not in first.headers
        assert near.json["id"] != first.json["id"]
        assert near.json["usage"] == first.json["usage"]
        assert len(chats.seen) == 2
        text = router.request("GET", "/metrics").text
        assert 'quire_router_semantic_requests_total{outcome="hit"} 1.0' in text
        assert 'quire_router_semantic_requests_total{outcome="miss"} 2.0' in text
        assert "quire_router_semantic_answers 2.0" in text


def test_without_the_option_nothing_is_kept() -> None:
    chats = Chats()
    with answering(chats.answer) as url, routed(urls=[url]) as router:
        until(lambda: router.backends.all[0].healthy)
        assert {how(ask(router, FIRST)) for _ in range(2)} == {""}
        assert len(chats.seen) == 2
        assert "quire_router_semantic" not in router.request("GET", "/metrics").text


OTHERS: tuple[dict[str, Any], ...] = (
    {"model": "other"}, {"max_tokens": 7}, {"top_p": 0.5}, {"user": "ann"}, {"cache_salt": "x"},
    {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"response_format": {"type": "json_object"}},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": FIRST}]},
    {"messages": [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": FIRST}
    ]},
    {"messages": [{"role": "user", "content": f"{FIRST} 7"}]},
    {"messages": [{"role": "user", "content": FIRST, "name": "bob"}]},
)  # fmt: skip


def test_everything_else_has_to_be_equal() -> None:
    """Each of them has its own answer, which then is found again."""
    with cached() as (router, chats, _):
        assert said(ask(router, FIRST)) == "Answer 1"
        assert how(ask(router, FIRST)) == "hit", "it is there"
        for fields in OTHERS:
            assert [how(ask(router, FIRST, **fields)) for _ in range(2)] == ["miss", "hit"], fields
        assert len(chats.seen) == 1 + len(OTHERS)


def test_tenants_do_not_see_each_others_answers(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    keys = {name: f"sha256:{hashlib.sha256(name.encode()).hexdigest()}" for name in ("a1", "a2", "b1")}
    file.write_text(
        f'[tenants.ann]\nkeys = ["{keys["a1"]}", "{keys["a2"]}"]\n[tenants.bob]\nkeys = ["{keys["b1"]}"]\n'
    )
    with cached(tenants=str(file)) as (router, _, _):
        found = [ask(router, FIRST, {"authorization": f"Bearer {key}"}) for key in ("a1", "b1", "a2", "b1")]
        assert [(how(each), said(each)) for each in found] == [
            ("miss", "Answer 1"), ("miss", "Answer 2"), ("hit", "Answer 1"), ("hit", "Answer 2")
        ]  # fmt: skip


def test_where_servers_know_the_keys_each_key_is_a_tenant() -> None:
    with cached() as (router, _, _):
        by = [{"authorization": "Bearer a"}, {"authorization": "Bearer b"}, {"x-api-key": "a"}, {}]
        assert [how(ask(router, FIRST, each)) for each in (*by, *by)] == ["miss"] * 4 + ["hit"] * 4


def test_a_client_refuses() -> None:
    with cached() as (router, chats, vectors):
        ask(router, FIRST)
        fresh = ask(router, FIRST, {"cache-control": "no-cache"})
        assert (how(fresh), said(fresh)) == ("refused", "Answer 2")
        assert said(ask(router, FIRST)) == "Answer 2", "it replaced the other one"
        before = len(vectors.asked)
        private = ask(router, FAR, {"cache-control": "private, no-store"})
        assert (how(private), said(private)) == ("", "Answer 3")
        assert len(vectors.asked) == before, "its text went nowhere"
        assert said(ask(router, FAR)) == "Answer 4", "it was not kept"
        assert len(chats.seen) == 4


def test_streams_and_objects_are_forms_of_one_answer() -> None:
    usage = {"include_usage": True}
    with cached() as (router, chats, _):
        made = ask(router, FIRST, stream=True, stream_options=usage)
        assert [how(made), said(made)] == ["miss", "Answer 1"]
        whole, again = ask(router, NEAR), ask(router, NEAR, stream=True)
        assert [how(whole), said(whole), how(again), said(again)] == ["hit", "Answer 1", "hit", "Answer 1"]
        assert whole.json["usage"]["total_tokens"] == 5
        assert '"usage"' not in again.text
        assert '"total_tokens":5' in ask(router, NEAR, stream=True, stream_options=usage).text
        ask(router, FAR, stream=True)
        assert how(ask(router, FAR, stream=True)) == "hit"
        assert how(ask(router, FAR)) == "miss", "its usage is not known"
        assert len(chats.seen) == 3


def test_what_is_no_complete_text_is_not_kept() -> None:
    with cached() as (router, chats, _):
        for stream in (False, True):
            chats.finish, chats.more = "length", {}
            assert [how(ask(router, FIRST, stream=stream)) for _ in range(2)] == ["miss"] * 2
            chats.finish, chats.more = "stop", {"tool_calls": [{"index": 0, "id": "c", "function": {}}]}
            assert [how(ask(router, FIRST, stream=stream)) for _ in range(2)] == ["miss"] * 2
        chats.more = {}
        assert [how(ask(router, FIRST)) for _ in range(2)] == ["miss", "hit"]


def test_other_weights_end_the_answers_of_the_old_ones() -> None:
    with cached() as (router, chats, _):
        ask(router, FIRST)
        chats.weights = "w2"
        ask(router, FAR)
        assert how(ask(router, FIRST)) == "miss"
        assert how(ask(router, FIRST)) == "hit"


def test_without_vectors_servers_answer() -> None:
    with cached() as (router, _, vectors):
        ask(router, FIRST)
        vectors.status = 500
        assert [how(ask(router, FIRST)) for _ in range(3)] == ["failed"] * 3
        vectors.status = 200
        until(lambda: how(ask(router, FIRST)) == "hit")
        vectors.status = 400
        assert how(ask(router, FIRST)) == "ineligible", "the text is too long for it"
        vectors.status, vectors.model = 200, "another"
        assert how(ask(router, FIRST)) == "miss", "vectors of another model are others"
        assert how(ask(router, FIRST)) == "hit"


def test_vectors_of_quire(tmp_path: Path) -> None:
    """The server of embeddings is Quire's own, with a tiny model: equal texts have equal vectors, long ones none."""
    folder, _ = pooling_folder("bert", tmp_path)
    chats = Chats()
    with serving(folder, {"max_model_len": 32}) as vectors, answering(chats.answer) as url:
        given = f"url=http://127.0.0.1:{vectors.port},timeout={GUARD}"
        with routed(urls=[url], semantic_cache=given) as router:
            until(lambda: router.backends.all[0].healthy)
            found = [ask(router, "why is it so"), ask(router, "why is it so", stream=True)]
            assert [(how(each), said(each)) for each in found] == [("miss", "Answer 1"), ("hit", "Answer 1")]
            assert found[1].headers["x-quire-semantic-similarity"] == "1.0000"
            assert [how(ask(router, "word " * 40)) for _ in range(2)] == ["ineligible"] * 2
            assert how(ask(router, "why is it so")) == "hit", "a text that is too long is no failure"
