"""Random histories of a router on a virtual clock: servers that die, hang, fall silent, lie and come back, clients that
leave, clocks that jump, and routers that end. Nothing wrong is said, nothing hangs, and the books add up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from helpers.virtual_servers import MODEL, Network, Place, tokens_of
from helpers.virtual_time import clocks_of
from quire.config.routing import RouterConfig
from quire.config.serving import ServingConfig
from quire.router.attempts import Attempt
from quire.router.backends import Backends
from quire.router.delivering import Delivering
from quire.router.relay import FromServer, Relay
from quire.router.resuming import ResumedStream
from quire.router.router_service import RouterService
from quire.routing.router_policies import POLICIES, policy_named
from quire.routing.transfer import MovingCosts

KEY = b"a key that all of them have"
EVENTS = (
    "kill",
    "kill",
    "start",
    "start",
    "silence",
    "speak",
    "vanish",
    "other weights",
    "lie",
    "clock",
    "restart",
)
HEALED = 9.0  # seconds after which nothing fails any more
# Seconds that a request may take: three servers before it waits for one, and three after that, each until it is known
# to be silent or late; as many again to go on with its stream; the events of each, or a client that is slow; and the
# prompt, once, at one that computes it for others.
BOUND = 12 * (2 * 1.0 + 12.0 + 5.0) + 3.0 + 7.0


@dataclass
class Answer:
    """What a client got."""

    body: dict[str, Any]
    began: float
    status: int = 0
    data: bytes = b""
    first: float | None = None  # when the first part came
    whole: bool = False  # the response has an end
    aborted: bool = False
    left: bool = False  # the client has
    ended: float = 0.0


@dataclass
class History:
    """One life of a router, from a seed. `seen` counts what happened."""

    seed: int
    key_file: str
    seen: Counter[str] = field(default_factory=Counter)

    def play(self) -> Counter[str]:
        self.rng, self.loop, self.day = random.Random(self.seed), Network(), 1e9
        with pytest.MonkeyPatch.context() as patch:
            clocks_of(self.loop, patch, lambda: self.day + self.loop.now)
            patch.setattr(MovingCosts, "pays", lambda *_: True)
            patch.setattr("quire.router.resuming.secrets.randbelow", self.rng.randrange)
            try:
                self.loop.run_until_complete(self._live())
            finally:
                for task in asyncio.all_tasks(self.loop):
                    task.cancel()
                self.loop.run_until_complete(asyncio.sleep(0))
                self.loop.close()
        return self.seen

    def _router(self) -> tuple[Backends, RouterService]:
        urls = {name: f"http://{name}:80" for name in self.loop.places}
        helps = (urls.pop("p"),) if "p" in urls else ()
        made = Backends(RouterConfig(backend=tuple(urls.values()), prefill=helps, **self.options))
        for each in made.all:
            each.client.clock = self.loop.time
        service = RouterService(made, ServingConfig())
        service.context.policy = policy_named(self.options["policy"], self.seed)
        service.context.hedging._seen = 20  # it has learned what is late
        return made, service

    async def _live(self) -> None:
        rng = self.rng
        self.options: dict[str, Any] = {
            "health_interval": 1.0, "health_timeout": 1.0, "connect_timeout": 1.0, "first_byte_timeout": 6.0,
            "hold_seconds": rng.choice((0.0, 3.0)), "policy": rng.choice(tuple(POLICIES)),
            "hedge_share": rng.choice((0.0, 0.5)), "resume": rng.random() < 0.8,
            "weights": rng.choice(("any", "any", "one")), "kv_key_file": rng.choice((None, self.key_file)),
            "prefill_over": 50, "prefill_timeout": 5.0,
        }  # fmt: skip
        key = KEY if self.options["kv_key_file"] else b""
        for number in range(rng.randrange(1, 4)):
            name = f"s{number}"
            self.loop.places[name] = Place(name, key, random.Random(rng.random()), "w1")
        if key and rng.random() < 0.5:  # one that computes prompts for the others
            self.loop.places["p"] = Place("p", key, random.Random(rng.random()), "w1")
        self.backends, self.service = self._router()
        self.retired: list[tuple[Backends, RouterService]] = []
        self.running: list[asyncio.Task[None]] = []
        await self.backends.start()
        happens = [asyncio.create_task(self._happens()) for _ in range(rng.randrange(6))]
        self.answers = [answer async for answer in self._asked(rng.randrange(1, 6))]
        await asyncio.sleep(HEALED - self.loop.now)
        await asyncio.gather(*happens)
        for place in self.loop.places.values():
            place.speak()
            if not place.up or place.weights != "w1":
                place.start("w1")
            place.faults, place.lies = {}, False
        if self.running:
            await asyncio.wait(self.running, timeout=BOUND)
        for answer in self.answers:
            self._check(answer)
        await self._heals()
        for backends, service in [*self.retired, (self.backends, self.service)]:
            await backends.stop(0.0)
            self._balance(backends, service)

    async def _asked(self, count: int) -> Any:
        for _ in range(count):
            await asyncio.sleep(self.rng.uniform(0.0, 1.6))
            answer = Answer(self._body(), self.loop.now)
            self._begin(answer)
            yield answer

    def _body(self) -> dict[str, Any]:
        rng = self.rng
        body: dict[str, Any] = {
            "model": MODEL, "max_tokens": rng.randrange(1, 14), "stream": rng.random() < 0.75,
            "messages": [{"role": "user", "content": f"{rng.randrange(4)}" * rng.choice((9, 900))}],
        }  # fmt: skip
        return body | rng.choice(({"seed": 7}, {}))

    async def _happens(self) -> None:
        rng = self.rng
        await asyncio.sleep(rng.uniform(0.0, 8.0))
        place, what = rng.choice([*self.loop.places.values()]), rng.choice(EVENTS)
        self.seen[what] += 1
        match what:
            case "kill":
                place.kill()
            case "start":
                place.start(place.weights)
            case "other weights":
                place.start("w2")
            case "silence":
                place.fall_silent()
            case "vanish" if any(
                other is not place and not other.vanished for other in self.loop.places.values()
            ):
                place.fall_silent()
                place.vanished = True
            case "speak":
                place.speak()
            case "lie":
                place.lies = not place.lies
            case "clock":
                self.day += rng.choice((-1e6, 1e6, -3600.0, 60.0))
            case "restart":
                await self._restart()

    async def _restart(self) -> None:
        """Another router takes the requests that come; this one lets those that run end, for a while."""
        backends, service, running = self.backends, self.service, [*self.running]
        new = self._router()
        await new[0].start()
        self.backends, self.service = new
        self.retired.append((backends, service))
        await backends.stop(2.0)
        for task in running:
            task.cancel()

    def _begin(self, answer: Answer) -> None:
        number = len(self.running)
        name = f"r{number}-{self.loop.now}"
        answer.body["user"] = name
        left = asyncio.Event()
        self.running.append(asyncio.create_task(self._ask(answer, name, left)))
        if self.rng.random() < 0.12:
            self.loop.call_later(self.rng.uniform(0.0, 1.0), left.set)

    async def _ask(self, answer: Answer, name: str, left: asyncio.Event) -> None:
        given, slow = [json.dumps(answer.body).encode()], self.rng.random() < 0.1
        headers = [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"x-request-id", name.encode()),
        ]
        path = "/v1/chat/completions"

        async def receive() -> dict[str, Any]:
            if given:
                return {"type": "http.request", "body": given.pop(), "more_body": False}
            await left.wait()
            answer.left = True
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                return
            if slow:
                await asyncio.sleep(0.1)
            if message["body"] and answer.first is None:
                answer.first = self.loop.now
            answer.data += message["body"]
            answer.whole = not message.get("more_body", False)

        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers,
            "http_version": "1.1", "query_string": b"", "quire.abort": lambda: setattr(answer, "aborted", True),
        }  # fmt: skip
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await self.service.app(scope, receive, send)
            except asyncio.CancelledError:
                answer.aborted = True
        answer.ended = self.loop.now

    # ---- what must hold

    def _check(self, answer: Answer) -> None:
        assert answer.ended, "it hangs"
        assert answer.ended - answer.began <= BOUND
        asked = [
            each for place in self.loop.places.values() for each in place.asked
            if each.body.get("user") == answer.body["user"]
        ]  # fmt: skip
        seeds = {each.body.get("seed") for each in asked}
        assert len(seeds) <= 1, "each server draws the same tokens"
        self._check_text(answer, answer.body | {"seed": seeds.pop() if seeds else None})
        if answer.first is not None and not (self.options["resume"] and answer.body["stream"]):
            assert all(each.at <= answer.first for each in asked), (
                "nothing is sent again once something has come"
            )

    def _check_text(self, answer: Answer, body: dict[str, Any]) -> None:
        """It is the text of some weights, or begins it and does not look complete."""
        right = ["".join(tokens_of(weights, body)) for weights in ("w1", "w2", "w1?", "w2?")]
        if answer.status != 200:
            self.seen[f"status {answer.status}"] += 1
            assert answer.status in {429, 500, 502, 503, 504} or answer.left or answer.aborted, answer
            assert not re.search(rb"s\d:80|http:|refused|reset|listens", answer.data), (
                "where servers are is nobody's"
            )
            return
        if not (answer.whole or answer.left or answer.aborted):
            raise AssertionError("it has no end")
        if not body["stream"]:
            self.seen["answered"] += 1
            assert not answer.whole or json.loads(answer.data)["choices"][0]["message"]["content"] in right
            return
        assert b": ids" not in answer.data, "ids are the router's"
        *lines, rest = answer.data.replace(b"\r\n", b"\n").split(b"\n\n")
        events = [line[6:] for line in lines]
        assert not rest, "a part of an event"
        made = [json.loads(each) for each in events if each != b"[DONE]"]
        text = "".join(c["delta"]["content"] for each in made for c in each.get("choices", ()))
        done, failed = events[-1:] == [b"[DONE]"], any("error" in each for each in made)
        assert len({each["id"] for each in made if "id" in each}) <= 1, "one answer"
        assert not (done and failed)
        self.seen["done" if done else "cut off"] += 1
        if done:
            assert text in right
        else:
            assert failed or answer.left or answer.aborted, "it looks complete"
            assert any(each.startswith(text) for each in right)

    async def _heals(self) -> None:
        """Once nothing fails any more, requests are answered again."""
        begun = self.loop.now
        while self.loop.now - begun < 2 * BOUND:
            answer = Answer(self._body(), self.loop.now)
            self._begin(answer)
            await asyncio.wait(self.running, timeout=BOUND)
            self._check(answer)
            if answer.status == 200 and not (answer.left or answer.aborted):
                return
            await asyncio.sleep(1.0)
        raise AssertionError("it does not recover")

    def _balance(self, backends: Backends, service: RouterService) -> None:
        """Nothing is left of any request."""
        context = service.context
        assert (context.kept, backends.held, context.watches) == (0, 0, set())
        assert not any(backends._held_by.values())
        assert not any(backends._held_tokens.values())
        for each in backends.all:
            assert (each.requests, each.work, each.waiting, each.reading) == (0, 0.0, 0.0, set()), each.name
        metrics = context.metrics
        self.seen.update(
            {"resumed": metrics.resumed, "by ids": metrics.resumed_by_ids, "hedged": metrics.hedged,
             "retried": metrics.retried, "divided": context.dividing.divided,
             **{f"fallback {why}": count for why, count in context.dividing.fallbacks.items()}}
        )  # fmt: skip


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("histories") / "key"
    path.write_bytes(KEY)
    return str(path)


def histories(seeds: range, key_file: str) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            seen.update(History(seed, key_file).play())
        except BaseException as error:
            error.add_note(f"history {seed}")
            raise
    return seen


def test_random_histories(key_file: str) -> None:
    seen = histories(range(150), key_file)
    assert (
        min(seen[name] for name in ("done", "answered", "cut off", "resumed", "by ids", "retried", "divided"))
        > 0
    ), seen
    assert all(seen[name] for name in EVENTS), seen


def glue(patch: pytest.MonkeyPatch) -> None:
    """What another server says follows whatever the client has."""
    patch.setattr(ResumedStream, "feed", lambda _, data: data)


def believe(patch: pytest.MonkeyPatch) -> None:
    """Texts of two servers are not compared."""
    patch.setattr("quire.router.resuming._behind", skip)


def skip(left: dict[Any, str], key: Any, text: str) -> str:
    had = left[key]
    left[key] = had[len(text) :]
    return text[len(had) :]


def wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FromServer, "give_up", lambda *_: None)


def keep_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Relay, "forget", lambda _: None)


def hold_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Attempt, "close", lambda self: self.request.cancel())


def pass_parts(patch: pytest.MonkeyPatch) -> None:
    """An error follows a part of an event."""

    right = Relay._whole_events

    def whole(self: Relay, chunk: bytes) -> bytes:
        if self.mark:
            return right(self, chunk)
        self.add(chunk)
        return chunk

    patch.setattr(Relay, "_whole_events", whole)


def look_complete(patch: pytest.MonkeyPatch) -> None:
    """A stream that is lost just ends."""

    async def cut_off(self: Delivering, _: Relay) -> None:
        await self._exchange.write(b"", more=False)

    patch.setattr(Delivering, "_cut_off", cut_off)


def pass_on_what_is_of_the_ticket(patch: pytest.MonkeyPatch) -> None:
    """A client gets the refusal of a ticket that it knows nothing of."""
    patch.setattr("quire.router.asking_servers._OF_TICKET", frozenset())


@pytest.mark.parametrize(
    ("break_it", "seed"),
    [
        (pass_on_what_is_of_the_ticket, 28), (glue, 1), (believe, 17), (wait_for_ever, 95), (keep_all, 0),
        (hold_all, 0), (pass_parts, 9), (look_complete, 6),
    ],
)  # fmt: skip
def test_what_is_broken_is_caught(
    key_file: str, break_it: Callable[[pytest.MonkeyPatch], None], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed is that of a history that showed it once; a later one may be the first now."""
    break_it(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        histories(range(seed, seed + 2000), key_file)


@pytest.mark.chaos
@pytest.mark.parametrize("part", range(20))
def test_a_hundred_thousand_histories(key_file: str, part: int) -> None:
    histories(range(5_000 * part, 5_000 * (part + 1)), key_file)
