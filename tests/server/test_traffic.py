"""Traffic rules: aliases, splits, shadows and fallbacks, with requests that are only names and keys."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.routing.traffic import Failure, Fallback, TrafficRoute, TrafficRule, TrafficRules, failure_of
from quire.server.fleet.fleet import Fleet
from quire.server.fleet.passing import Passing
from quire.server.fleet.shadows import ShadowReport, text_of

MODELS = ("a", "b", "c")


def split(**weights: float) -> TrafficRule:
    return TrafficRule(tuple(weights.items()))


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("share", [0.5, 0.1, 0.03])
def test_a_split_is_within_one_percent(share: float, keyed: bool) -> None:
    rules = TrafficRules({"x": split(a=share, b=1 - share)}, MODELS)
    found = Counter(rules.route("x", f"user {n}" if keyed else "").target for n in range(10_000))
    assert abs(found["a"] / 10_000 - share) < 0.01
    assert found["a"] + found["b"] == 10_000


def test_a_key_stays_where_it_is_and_few_move_with_the_weights() -> None:
    before, after = (TrafficRules({"x": split(a=w, b=1 - w)}, MODELS) for w in (0.5, 0.6))
    keys = [f"user {n}" for n in range(2000)]
    first = [before.route("x", key).target for key in keys]
    assert first == [before.route("x", key).target for key in keys]
    moved = [(one, after.route("x", key).target) for one, key in zip(first, keys, strict=True)]
    changed = [pair for pair in moved if pair[0] != pair[1]]
    assert set(changed) == {("b", "a")}
    assert 0.08 < len(changed) / 2000 < 0.12
    assert {before.route("x", "one").target for _ in range(100)} == {before.route("x", "one").target}
    assert len({before.route("x").target for _ in range(10)}) == 2  # without a key it is not so


def test_chains_of_names_and_their_fallbacks() -> None:
    rules = TrafficRules(
        {
            "x": TrafficRule((("y", 1.0),), (Fallback("c", frozenset({Failure.DEADLINE})),)),
            "y": TrafficRule((("a", 1.0),), (Fallback("z", frozenset({Failure.OVERLOAD, Failure.ERROR})),)),
            "z": split(b=1.0, c=0.0),
        },
        MODELS,
    )
    route = rules.route("x")
    assert route.target == "a"
    after = {failure: route.after(failure, {"a"}) for failure in Failure}
    assert {failure: found and found.target for failure, found in after.items()} == {
        Failure.ERROR: "b", Failure.OVERLOAD: "b", Failure.DEADLINE: "c",
    }  # fmt: skip
    assert route.after(Failure.ERROR, {"a", "b"}) is None
    assert rules.route("a") == TrafficRoute("a")
    assert [rules.route("z").target for _ in range(100)] == ["b"] * 100
    with pytest.raises(KeyError):
        rules.route("nobody")


def test_a_shadow_gets_its_share() -> None:
    rules = TrafficRules({"x": TrafficRule((("a", 1.0),), shadow="b", shadow_share=0.25)}, MODELS)
    copies = Counter(rules.route("x", f"user {n}").shadow for n in range(10_000))
    assert abs(copies["b"] / 10_000 - 0.25) < 0.01
    assert rules.route("a").shadow is None


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"x": split(nobody=1)}, "neither a model"),
        ({"x": split(y=1), "y": split(x=1)}, "back to itself"),
        ({"x": TrafficRule((("a", 1.0),), (Fallback("x"),))}, "back to itself"),
        ({"x": split(a=0)}, "one is above 0"),
        ({"x": split(a=-1, b=2)}, "from 0 on"),
        ({"x": split(a=float("nan"))}, "from 0 on"),
        ({"x": TrafficRule((), ())}, "one is above 0"),
        ({"x": TrafficRule((("a", 1.0),), shadow="a", shadow_share=2)}, "share of a shadow"),
    ],
)
def test_rules_that_lead_nowhere_are_refused(rules: dict[str, TrafficRule], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrafficRules(rules, MODELS)


def test_failures_that_another_model_might_not_have() -> None:
    kinds = {status: failure_of(status) for status in (200, 400, 404, 429, 500, 503, 504)}
    assert kinds == {
        200: None, 400: None, 404: None, 429: Failure.OVERLOAD, 500: Failure.ERROR, 503: Failure.ERROR,
        504: Failure.DEADLINE,
    }  # fmt: skip


@pytest.mark.parametrize("failure", [*Failure])
@pytest.mark.parametrize("status", [200, 400, 429, 500, 503, 504])
def test_an_attempt_that_fails_is_tried_again_where_its_failure_says(failure: Failure, status: int) -> None:
    """Three models, of which the last one is fine; the second one fails in every way that leads on."""
    answered: list[str] = []

    def application(name: str, status: int) -> Any:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            assert (await receive())["body"] == b"{}"
            answered.append(name)
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": name.encode()})

        return answer

    class Model:
        def __init__(self, name: str, status: int) -> None:
            self.id, self.service = name, SimpleNamespace(app=application(name, status))

        def serving(self) -> Any:
            return nullcontext()

    async def ready(_: Model) -> None:
        pass

    second = {Failure.OVERLOAD: 429, Failure.DEADLINE: 504, Failure.ERROR: 500}[failure]
    models = {name: Model(name, code) for name, code in (("a", status), ("b", second), ("c", 200))}
    fleet = cast(Fleet, SimpleNamespace(members=models, ready=ready, lighter=lambda _: None))
    route = TrafficRoute("a", tuple(Fallback(name, frozenset({failure})) for name in ("b", "c")))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(Passing(fleet, route, {}, b"{}", cast(Any, None)).answer(send, administrative=False))
    leads = failure_of(status) is failure
    assert answered == (["a", "b", "c"] if leads else ["a"])
    assert (sent[0]["status"], sent[1]["body"]) == ((200, b"c") if leads else (status, b"a"))
    assert (b"x-quire-deployment", b"c" if leads else b"a") in sent[0]["headers"]
    assert len(sent) == 2  # nothing of an attempt that failed


def test_texts_of_answers_are_compared_whatever_their_form() -> None:
    whole = b'{"id":"1","choices":[{"text":"one two"}]}'
    events = [
        b'data: {"choices":[{"delta":{"content":"one "}}]}',
        b'data: {"choices":[{"delta":{"content":"two"}}]}',
    ]
    stream = b"\n\n".join([*events, b"data: [DONE]\n"])
    lines = b'{"message":{"content":"one "}}\n{"message":{"content":"two"}}\n'
    assert {text_of(body) for body in (whole, stream, lines)} == {"one two"}
    report = ShadowReport()
    report.add("one two", "one two", 1.0, 2.0, "r1")
    report.add("one two", "one", 1.0, 0.5, "r2")
    assert (report.compared, report.equal, report.different) == (2, 1, ["r2"])
    assert (report.characters, report.shadow_characters, report.shadow_seconds) == (14, 10, 2.5)
