"""Processes that share requests are killed and stopped in the middle of them: answers stay, and nothing is held."""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.kv_servers import kv_server
from helpers.process import Process, running, until
from helpers.routed import Routed, routed
from helpers.server import GUARD, Reply
from quire.loader import DEFAULT_MODEL
from quire.routing.transfer import MovingCosts

pytestmark = pytest.mark.chaos

ROOMS = " ".join(f"Room {n} is painted in colour {n * 7 % 12}." for n in range(80))
MODEL = (Path(DEFAULT_MODEL), "--max-model-len", "2048")


def ask(router: Routed, number: int) -> Reply:
    return router.chat(f"{number}. {ROOMS}", tokens=24, seed=number, temperature=0.8, ignore_eos=True)


def texts(router: Routed, numbers: range, meanwhile: Callable[[], object] = lambda: None) -> list[str]:
    """The answers to four requests at a time; `meanwhile` is called once some of them have been sent."""
    with concurrent.futures.ThreadPoolExecutor(4) as clients:
        replies = [clients.submit(ask, router, number) for number in numbers]
        replies[1].result(GUARD)
        meanwhile()
        found = [each.result(GUARD) for each in replies]
    assert [each.status for each in found] == [200] * len(found), [each.text for each in found]
    return [each.json["choices"][0]["message"]["content"] for each in found]


@contextlib.contextmanager
def router_of(decode: list[Process], prefill: list[Process], key_file: Path) -> Iterator[Routed]:
    urls = [f"http://127.0.0.1:{each.port}" for each in decode]
    others = tuple(f"http://127.0.0.1:{each.port}" for each in prefill)
    options: dict[str, Any] = {"prefill": others, "kv_key_file": str(key_file), "prefill_over": 100}
    with routed(urls=urls, prefill_timeout=3.0, **options) as router:
        until(lambda: all(each.healthy for each in router.backends.all))
        yield router


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "kv.key"
    path.write_text("a key that all of them have")
    return path


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MovingCosts, "pays", lambda *_: True)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_answers_stay_whichever_process_is_lost(key: Path, number: signal.Signals) -> None:
    """First the server that computes prompts, then, with another one, the server of blocks."""
    with kv_server(key) as (blocks, port):
        tiers = ("--kv-tiers", f"remote=127.0.0.1:{port}:{key},role=")
        decode_options, prefill_options = ((tiers[0], tiers[1] + role) for role in ("decode", "prefill"))
        with running(*MODEL, *decode_options) as decode, running(*MODEL) as plain:
            with router_of([plain], [], key) as router:
                expected = texts(router, range(24))
            for which in ("prefill", "blocks"):
                with running(*MODEL, *prefill_options) as prefill:
                    for each in (decode, prefill):
                        until(lambda each=each: each.metric("quire_remote_tier_failed") == 0)  # type: ignore[misc]
                    with router_of([decode], [prefill], key) as router:
                        lost = prefill.process if which == "prefill" else blocks
                        half = range(12) if which == "prefill" else range(12, 24)
                        made = texts(router, half, lambda lost=lost: lost.send_signal(number))  # type: ignore[misc]
                        assert made == expected[half.start : half.stop]
                        dividing = router.service.context.dividing
                        assert dividing.divided > 0
                        assert which == "blocks" or sum(dividing.fallbacks.values()) > 0
                        # once more, and the lost one may come back meanwhile
                        assert texts(router, half) == expected[half.start : half.stop]
                    if which == "prefill":
                        prefill.process.kill()
            until(lambda: decode.metric("quire_num_requests_running") == 0)
            assert decode.metric("quire_kv_blocks_used") == 0
            assert decode.metric("quire_remote_tier_damaged_blocks_total") == 0


@pytest.mark.usefixtures("always")
def test_streams_go_on_when_the_server_that_answers_is_killed(key: Path) -> None:
    with kv_server(key) as (_, port):
        options = [
            ("--kv-tiers", f"remote=127.0.0.1:{port}:{key},role={role}") for role in ("decode", "prefill")
        ]
        with running(*MODEL, *options[0]) as one, running(*MODEL, *options[0]) as other:
            with running(*MODEL, *options[1]) as prefill, router_of([one, other], [prefill], key) as router:

                def stream(number: int) -> str:
                    reply = router.chat(
                        f"{number}. {ROOMS}",
                        tokens=600,
                        seed=number,
                        temperature=0.8,
                        ignore_eos=True,
                        stream=True,
                    )
                    assert reply.status == 200
                    parts = [
                        event for event in reply.events if event != "[DONE]" and not isinstance(event, str)
                    ]
                    assert not any("error" in part for part in parts), parts[-1]
                    return "".join(c["delta"].get("content") or "" for p in parts for c in p["choices"])

                with concurrent.futures.ThreadPoolExecutor(4) as clients:
                    streams = [clients.submit(stream, number) for number in range(4)]
                    until(lambda: one.metric("quire_num_requests_running") > 0)
                    one.process.send_signal(signal.SIGKILL)
                    found = [each.result(GUARD) for each in streams]
                assert found == [stream(number) for number in range(4)]
            until(lambda: other.metric("quire_num_requests_running") == 0)
            assert other.metric("quire_kv_blocks_used") == 0
