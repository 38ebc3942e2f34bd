"""Names behind which the difficulty of a request chooses the model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from helpers.fake_llm import Behaviour
from helpers.routed import Routed, routed
from quire.config.routing import RouterConfig, traffic_rules
from quire.routing.difficulty import DifficultyModel

FAST = {"ttft": 0.0, "itl": 0.0}
EASY, HARD = "what is 2 + 2", "please prove it"


@pytest.fixture
def rules(tmp_path: Path) -> str:
    """A rule by which "auto" is a for what has small numbers and b for proofs."""
    model = DifficultyModel("quire difficulty 1", 0.5, 0.0, {"1 digits": 3.0, "prove": -3.0})
    (tmp_path / "difficulty.json").write_bytes(msgspec.json.encode(model))
    return f'[rules.auto]\ndifficulty = {{file = "{tmp_path / "difficulty.json"}", easy = "a", hard = "b"}}\n'


def asked(router: Routed) -> list[list[str]]:
    """The models that each server was asked for."""
    return [[ask["model"] for _, ask in fake.seen] for fake in router.fakes]


def test_easy_requests_go_to_the_small_model(rules: str) -> None:
    """And the answer, and the metrics, say so."""
    with routed(Behaviour(**FAST), Behaviour(**FAST), rules=rules) as router:
        for stream in (False, True):
            easy = router.chat(EASY, model="auto", stream=stream)
            hard = router.chat(HARD, model="auto", stream=stream)
            assert [each.headers["x-quire-model"] for each in (easy, hard)] == ["a", "b"]
            assert [each.headers["x-quire-suffices"] for each in (easy, hard)] == ["0.9526", "0.0474"]
        assert router.chat("neither", model="auto").headers["x-quire-model"] == "a"  # 0.5 is enough
        assert asked(router) == [["a"] * 3, ["b"] * 2]
        plain = router.chat(EASY, model="b")
        assert plain.headers["x-quire-backend"] == "of-b"
        assert not {"x-quire-model", "x-quire-suffices"} & plain.headers.keys()
        text = router.request("GET", "/metrics").text
        assert 'quire_router_difficulty_requests_total{model="auto",target="a"} 3.0' in text
        assert 'quire_router_difficulty_requests_total{model="auto",target="b"} 2.0' in text
        assert 'quire_router_difficulty_suffices_total{model="auto",target="b"} 0.0948' in text
        assert "auto" in {each["id"] for each in router.request("GET", "/v1/models").json["data"]}


def test_what_cannot_be_judged_is_hard(rules: str) -> None:
    image = [{"type": "text", "text": EASY}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    busy = Behaviour(**FAST, refuse=set(range(100)))  # its server would have to understand them
    with routed(Behaviour(**FAST), busy, rules=rules) as router:
        for body in (
            {"messages": [{"role": "user", "content": image}]}, {"prompt": [1, 2, 3]},
            {"messages": [{"role": [], "content": EASY}]},
        ):  # fmt: skip
            reply = router.request("POST", "/v1/chat/completions", {"model": "auto", "max_tokens": 2, **body})
            assert (reply.status, reply.headers["x-quire-model"]) == (429, "b"), body
            assert reply.headers["x-quire-suffices"] == "0.0000"


def test_the_last_question_decides(rules: str) -> None:
    talk = [
        {"role": "user", "content": EASY},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": HARD},
    ]
    with routed(Behaviour(**FAST), Behaviour(**FAST), rules=rules) as router:
        for messages, model in ((talk, "b"), (talk[::-1], "a")):
            body = {"model": "auto", "max_tokens": 2, "messages": messages}
            assert router.request("POST", "/v1/chat/completions", body).headers["x-quire-model"] == model


def test_rules_are_combined(rules: str) -> None:
    """A name that leads to one with a difficulty, a threshold of the rule's own, and a fallback to the large model."""
    more = rules.replace('hard = "b"}', 'hard = "b", threshold = 0.99}').replace("auto", "strict")
    busy = Behaviour(**FAST, refuse=set(range(100)))
    text = f'{rules}fallbacks = [{{target = "b"}}]\n{more}[rules.chat]\ntargets = {{auto = 1}}\n'
    with routed(busy, Behaviour(**FAST), rules=text) as router:
        for name in ("chat", "strict"):
            reply = router.chat(EASY, model=name)
            assert (reply.status, reply.headers["x-quire-model"], reply.headers["x-quire-suffices"]) == (
                200,
                "b",
                "0.9526",
            )
        assert asked(router) == [["a"], ["b", "b"]]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ('targets = {a = 1}\ndifficulty = {file = "FILE", easy = "a", hard = "b"}', "exclude each other"),
        ('difficulty = {file = "FILE", easy = "a", hard = "a"}', "easy and hard are both 'a'"),
        ('difficulty = {file = "FILE", easy = "a", hard = "b", threshold = 2}', "threshold: 2.0 is not in"),
        ('difficulty = {file = "missing.json", easy = "a", hard = "b"}', "difficulty: file: missing.json: "),
        (
            'difficulty = {file = "backends.toml", easy = "a", hard = "b"}',
            "is not a file of `quire train-router`",
        ),
        ('difficulty = {file = "FILE", easy = "auto", hard = "b"}', "leads back to itself"),
        ("", "weights are numbers from 0 on"),
    ],
)
def test_what_is_wrong_in_a_rule_is_said(tmp_path: Path, rules: str, rule: str, message: str) -> None:
    assert rules
    path = tmp_path / "backends.toml"
    path.write_text(
        f'[[backend]]\nurl = "http://h"\n[rules.auto]\n{rule.replace("FILE", "difficulty.json")}\n'
    )
    with pytest.raises(ValueError, match="backends_file: rules: ") as error:
        traffic_rules(RouterConfig(backends_file=str(path)))
    assert message in str(error.value)
