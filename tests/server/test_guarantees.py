"""Deadlines of a class that guarantees them, over HTTP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.server import ENDLESS, PATIENT, LiveServer, serving

AMPLE = 20  # times the shortest deadline that could be kept: a machine under load is that much slower at most


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    options = {"slo": ("sure:guaranteed", "rest:"), "scheduling_policy": "edf", "max_num_seqs": 2}
    with serving(folder, engine=ENDLESS | options, **PATIENT) as live:
        for _ in range(3):
            live.complete("Hello", max_tokens=40, ignore_eos=True)
        live.wait(lambda: live.metric("quire_steps_total") >= 64)
        yield live


def least(server: LiveServer, tokens: int) -> int:
    """The shortest deadline, in milliseconds, that is guaranteed to an answer of so many tokens now."""
    asked = {"max_tokens": tokens, "service_tier": "sure", "deadline_ms": 100}
    while (reply := server.complete("Hello", **asked)).status == 504:  # it had passed on arrival
        pass
    message = reply.error(429, "would_be_late")
    found = re.search(r"deadline_ms (\d+) or more", message)
    assert found is not None, message
    return int(found[1])


def test_a_guarantee_counts_all_tokens_that_an_answer_may_have(server: LiveServer) -> None:
    """Even alone: answers have been short, but this one may be long."""
    stops = {"allowed_token_ids": [5], "stop_token_ids": [5], "max_tokens": 60_000}
    for _ in range(12):
        assert server.complete("Hello", **stops).json["usage"]["completion_tokens"] <= 1
    asked = stops | {"service_tier": "sure", "deadline_ms": 500}
    while (late := server.complete("Hello", **asked)).status == 504:
        pass
    message = late.error(429, "would_be_late")
    assert re.match(r"deadline_ms of \d+ ms cannot be kept: \d+ ms predicted; try again in ", message)
    assert int(late.headers["retry-after"]) >= 1
    # The class that guarantees nothing goes by what was usual; a slow machine may miss it, but refuses nothing.
    assert server.complete("Hello", **stops, service_tier="rest", deadline_ms=500).status != 429


def test_what_was_guaranteed_is_kept_beside_others(server: LiveServer) -> None:
    """The other class has one of the two places for as long as it likes."""
    deadline = AMPLE * least(server, 3000)
    with server.busy(1, service_tier="rest"), ThreadPoolExecutor(8) as clients:

        def one(_: int) -> int:
            asked = {"max_tokens": 300, "ignore_eos": True, "service_tier": "sure", "deadline_ms": deadline}
            return server.complete("Hello", **asked).status

        found = list(clients.map(one, range(8)))
    assert found == [200] * 8  # never 504
