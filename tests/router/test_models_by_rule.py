"""Names of models that stand for others across servers: aliases, splits, fallbacks, shadows."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.fake_llm import Behaviour
from helpers.process import until
from helpers.raw_server import RawServer, answer
from helpers.routed import Routed, routed
from quire.config.routing import RouterConfig, traffic_rules

FAST = {"ttft": 0.0, "itl": 0.0}
REFUSING = {"refuse": set(range(1000))}


def models(router: Routed) -> list[list[str]]:
    """The models that each server was asked for."""
    return [[ask["model"] for _, ask in fake.seen] for fake in router.fakes]


def test_a_name_stands_for_a_model_of_a_server() -> None:
    rules = "[rules.nice]\ntargets = {b = 1}\n"
    with routed(Behaviour(**FAST), Behaviour(**FAST), rules=rules) as router:
        reply = router.chat("hello", model="nice")
        assert (reply.status, reply.headers["x-quire-backend"]) == (200, "of-b")
        assert router.chat("hello", model="nice", stream=True).text.endswith("data: [DONE]\n\n")
        assert models(router) == [[], ["b", "b"]]
        listed = router.request("GET", "/v1/models").json["data"]
        assert sorted(each["id"] for each in listed) == ["a", "b", "nice"]
        ollama = {"name": "nice", "prompt": "x", "options": {"num_predict": 2}}
        assert router.request("POST", "/api/generate", ollama).status == 200
        assert router.fakes[1].seen[-1][1]["name"] == "b"


def test_versions_share_requests_and_a_session_stays() -> None:
    rules = "[rules.both]\ntargets = {a = 3, b = 1}\n"
    with routed(Behaviour(**FAST), Behaviour(**FAST), rules=rules) as router:
        for _ in range(40):
            assert router.chat("hello", model="both").status == 200
        assert [len(each) for each in models(router)] == [pytest.approx(30, abs=2), pytest.approx(10, abs=2)]
        seen = {router.chat("hello", model="both", user="u").headers["x-quire-backend"] for _ in range(6)}
        assert len(seen) == 1


def test_what_goes_on_from_a_stored_response_stays_with_its_model() -> None:
    """Its server alone has the response, and no other model of a split knows what it has computed."""
    servers = [
        RawServer(answer(200, b'{"id": "resp_%d", "object": "response"}' % number)) for number in range(2)
    ]
    rules = "[rules.both]\ntargets = {a = 1, b = 1}\n[rules.other]\ntargets = {b = 1}\n"
    with routed(urls=[each.url for each in servers], rules=rules) as router:
        until(lambda: all(each.healthy for each in router.backends.all))

        def ask(**more: str) -> str:
            reply = router.request("POST", "/v1/responses", {"model": "both", "input": "hello"} | more)
            assert reply.status == 200, reply.text
            assert router.backends.rules.leads_to(
                reply.headers["x-quire-model"], reply.headers["x-quire-model"]
            )
            return str(reply.json["id"])

        assert {ask() for _ in range(4)} == {"resp_0", "resp_1"}
        for name in ("resp_0", "resp_1"):
            assert {ask(previous_response_id=name) for _ in range(6)} == {name}
        assert {ask(previous_response_id="resp_unknown") for _ in range(4)} == {"resp_0", "resp_1"}
        assert [{body["model"] for _, body in each.asked} for each in servers] == [{"a"}, {"b"}]
        ask(previous_response_id="resp_0", model="other")
        assert servers[0].asked[-1][1]["model"] == "b", "a name gets no model that it does not stand for"
    for each in servers:
        each.close()


def test_another_model_answers_what_one_cannot() -> None:
    rules = (
        '[rules.sure]\ntargets = {a = 1}\nfallbacks = [{target = "b", on = ["overload"]}, {target = "c"}]\n'
        '[rules.late]\ntargets = {a = 1}\nfallbacks = [{target = "b", on = ["deadline"]}]\n'
    )
    with routed(
        Behaviour(**FAST, **REFUSING), Behaviour(**FAST, **REFUSING), Behaviour(**FAST), rules=rules
    ) as router:
        reply = router.chat("hello", model="sure")
        assert (reply.status, reply.headers["x-quire-backend"]) == (200, "of-c")
        assert models(router) == [["a"], ["b"], ["c"]]
        refused = router.chat("hello", model="late")
        assert (refused.status, refused.json["error"]["code"]) == (429, "queue_full")
        router.lose(0)
        until(lambda: not router.backends.all[0].healthy)
        assert router.chat("hello", model="sure").headers["x-quire-backend"] == "of-c", (
            "b is asked if a is busy"
        )
        text = router.request("GET", "/metrics").text
        assert 'quire_router_fallbacks_total{model="a",next="b"} 1.0' in text
        assert 'quire_router_fallbacks_total{model="a",next="c"} 1.0' in text


def test_a_shadow_answers_too_and_nobody_waits_for_it() -> None:
    rules = '[rules.new]\ntargets = {a = 1}\nshadow = "b"\n[rules.gone]\ntargets = {a = 1}\nshadow = "c"\n'
    with routed(Behaviour(**FAST), Behaviour(**FAST), rules=rules) as router:
        for stream in (False, True):
            assert router.chat("hello", model="new", stream=stream).headers["x-quire-backend"] == "of-a"
        reports = router.service.context.shadows.reports
        until(lambda: ("a", "b") in reports and reports["a", "b"].compared == 2)
        assert reports["a", "b"].equal == 2
        assert models(router) == [["a", "a"], ["b", "b"]]
        seeds = [[ask.get("seed") for _, ask in fake.seen] for fake in router.fakes]
        assert seeds[0] == seeds[1]
        assert None not in seeds[0], "both draw the same tokens"
        context = router.service.context
        until(lambda: context._shadowed == 0)
        assert router.chat("hello " * 200_000, model="new").status == 200
        until(lambda: reports["a", "b"].skipped == 1)
        assert router.chat("hello", model="gone").status == 200
        until(lambda: ("a", "c") in reports and reports["a", "c"].failed == 1)
        text = router.request("GET", "/metrics").text
        assert 'quire_router_shadow_requests_total{model="a",outcome="equal",shadow="b"} 2.0' in text
        until(lambda: all(each.requests == 0 for each in router.backends.all) and context._shadowed == 0)


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ("[rules.x]\ntargets = {}", "x: weights are numbers"),
        ("[rules.x]\ntargets = {x = 1}", "x: leads back to itself"),
        ("[rules.x]\ntargets = {a = 1}\nshadow_share = 2", "x: the share of a shadow"),
        ("[rules.x]\ntargets = {a = 1}\ncolour = 1", "colour"),
        ("rules = 3", "rules: "),
        ("[rule.x]", "it consists of"),
    ],
)
def test_rules_that_are_wrong_are_named(tmp_path: Path, rules: str, says: str) -> None:
    file = tmp_path / "backends.toml"
    file.write_text(rules + '\n[[backend]]\nurl = "http://a"\n')
    with pytest.raises(ValueError, match=f"backends_file: .*{says}"):
        traffic_rules(RouterConfig(backends_file=str(file)))
