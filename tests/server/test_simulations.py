"""What-if and the check of the simulator beside a server: for administrators, one at a time, bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.server import ENDLESS, GUARD, PATIENT, LiveServer, Reply, serving
from quire.config.serving import LEAST_SIMULATOR_MEMORY, ServingConfig
from quire.engine.host.held import server_memory

A, BOSS = ({"authorization": f"Bearer {key}"} for key in ("key-of-a", "boss"))
ASK = {"set": {"max_num_seqs": 1}, "seeds": 1}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    options = {
        "api_key": ("key-of-a",), "admin_api_key": ("boss",), "simulator_memory": 2**27, "simulator_interval": 1.0,
    }  # fmt: skip
    with serving(folder, engine=ENDLESS, **(PATIENT | options)) as live:
        for number in range(25):
            body = {"prompt": f"{number}: tell me a story", "max_tokens": 12, "ignore_eos": True}
            assert live.post("/v1/completions", body, headers=A).status == 200
        yield live


def test_an_administrator_asks_what_if(server: LiveServer) -> None:
    found = server.post("/admin/whatif", ASK | {"goodput": {"ttft": 500}}, headers=BOSS)
    assert found.status == 200, found.body
    figures = found.json["figures"]
    assert {"ttft_mean", "tpot_p50", "output_token_rate", "goodput"} <= figures.keys()
    assert figures["ttft_mean"]["then"]["low"] <= figures["ttft_mean"]["then"]["value"]
    assert found.json["requests"] == 25
    assert found.json["set"] == {"max_num_seqs": "1"}
    assert "cmpl" not in found.body.decode()  # no id of a request


def test_clients_may_not_ask(server: LiveServer) -> None:
    assert server.post("/admin/whatif", ASK, headers=A).status == 401
    assert server.post("/admin/whatif", ASK).status == 401


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"set": {}}, "set"),
        ({"set": {"rate": 2}, "last": -1}, "last"),
        ({"set": {"rate": 2}, "seeds": 1000}, "seeds"),
        ({"set": {"rate": 2}, "goodput": {"speed": 1}}, "speed"),
        ({"set": {"no_such": 1}}, "no_such"),
        ({"like": "another"}, "no model 'another'"),
    ],
)
def test_what_cannot_be_simulated_is_refused(server: LiveServer, body: dict[str, object], says: str) -> None:
    answer = server.post("/admin/whatif", body, headers=BOSS)
    assert answer.status == 400
    assert says in answer.json["error"]["message"]


def test_one_at_a_time(server: LiveServer) -> None:
    """A second one is refused while one runs, and the server answers clients meanwhile."""
    slow = {"set": {"rate": 0.9}, "seeds": 6}
    answers: list[Reply] = []
    threads = [
        threading.Thread(target=lambda: answers.append(server.post("/admin/whatif", slow, headers=BOSS)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2}, headers=A).status == 200
    for thread in threads:
        thread.join()
    assert sorted(one.status for one in answers) == [200, 409, 409], [one.body for one in answers]


def test_a_simulation_that_needs_too_much_memory_ends_alone(server: LiveServer) -> None:
    log = server.get("/admin/log", headers=BOSS).body
    asked = {"set": {"rate": "2"}, "last": 1e9, "slo": [], "seeds": 1, "seconds": 30}
    answers = [simulated({**asked, "memory": memory}, log) for memory in (2**27, 2**20)]
    assert answers[0]["requests"] >= 25
    assert "--simulator-memory" in answers[1]["error"]
    asked |= {"set": {}, "memory": 2**27, "like": len(log)}
    assert simulated(asked, log + log)["fit"] == answers[0]["fit"], (
        "the second log is that of the other server"
    )


def test_a_simulation_has_idle_processors_only() -> None:
    command = [sys.executable, "-P", "-m", "quire.bench.what_if_process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as waiting:  # for its question
        try:
            deadline = time.monotonic() + GUARD
            while os.sched_getscheduler(waiting.pid) != os.SCHED_IDLE:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert os.getpriority(os.PRIO_PROCESS, waiting.pid) == 19
        finally:
            waiting.kill()


def simulated(asked: dict[str, object], log: bytes) -> dict[str, Any]:
    """What the process of simulations answers."""
    command = [sys.executable, "-P", "-m", "quire.bench.what_if_process"]
    done = subprocess.run(
        command, input=json.dumps(asked).encode() + b"\n" + log, capture_output=True, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_the_error_of_the_simulator_is_a_metric(server: LiveServer) -> None:
    deadline = time.monotonic() + 300
    while "quire_simulator_error_ratio{" not in (text := server.get("/metrics", headers=A).body.decode()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    lines = [line for line in text.splitlines() if line.startswith("quire_simulator_error_ratio{")]
    assert any('figure="e2el_mean"' in line for line in lines)
    assert all(float(line.rsplit(" ", 1)[1]) >= 0 for line in lines)
    assert "quire_simulator_checked_requests{" in text


def test_it_is_in_the_plan_of_memory() -> None:
    assert server_memory(ServingConfig(simulator_memory=2**27))["simulator"] == 2**27
    assert "simulator" not in server_memory(ServingConfig())


def test_it_is_off_by_default(folder: Path) -> None:
    with serving(folder, admin_api_key=("boss",)) as live:
        answer = live.post("/admin/whatif", ASK, headers=BOSS)
        assert answer.status == 404
        assert "--simulator-memory" in json.dumps(answer.json)
        assert "quire_simulator_error_ratio{" not in live.get("/metrics").body.decode()


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"simulator_memory: .*minimum"):
        ServingConfig(simulator_memory=LEAST_SIMULATOR_MEMORY - 1)
