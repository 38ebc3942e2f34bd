"""Quire on a real Ray cluster of two nodes, both on this machine: Ray Data's actors, and replicas of Ray Serve."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.rank_nodes import fresh_address
from quire import LLM, SamplingParams
from quire.ray import build, predict

pytestmark = pytest.mark.ray
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
BODY = {"prompt": "Once", **GREEDY}
GUARD = 120.0
NAME = f"quire-{os.getpid()}"  # of the deployment: Ray names processes of replicas after it


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A cluster of two nodes, without a dashboard."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    utils = pytest.importorskip("ray.cluster_utils")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    node = {"num_cpus": 2, "memory": 4 * 2**30, "object_store_memory": 200 * 2**20}
    cluster = utils.Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    ray.init(address=cluster.address, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield ray
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def alone() -> list[str]:
    """What one process answers."""
    with LLM("quire-mini", progress=False, threads=1, memory="1GiB") as llm:
        prompts = ["Once", *(f"Row {i}" for i in range(12))]
        return [out.outputs[0].text for out in llm.generate(prompts, SamplingParams(**GREEDY))]


def test_a_dataset_over_two_actors(ray: Any, alone: list[str]) -> None:
    items = [{"id": i, "prompt": f"Row {i}"} for i in range(12)]
    dataset = predict(
        ray.data.from_items(items, override_num_blocks=4), "quire-mini",
        memory="1GiB", actors=2, batch_size=3, sampling_params=GREEDY,
    )  # fmt: skip
    found = sorted(dataset.take_all(), key=lambda row: row["id"])
    assert [row["generated_text"] for row in found] == alone[1:]
    assert {row["num_generated_tokens"] for row in found} == {8}


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    return urllib.request.urlopen(request, timeout=GUARD)


def text_of(url: str) -> str:
    with post(f"{url}/v1/completions", BODY) as answer:
        return str(json.load(answer)["choices"][0]["text"])


@pytest.fixture(scope="module")
def served(ray: Any) -> Iterator[str]:
    serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed: make test-ray")
    host, port = fresh_address(), 18321
    serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
    deployment = {
        "name": NAME, "num_replicas": 2, "health_check_period_s": 1, "graceful_shutdown_timeout_s": 5
    }  # fmt: skip
    made = build({"model": "quire-mini", "memory": "1GiB", "engine_restarts": 0, "deployment": deployment})
    serve.run(made, route_prefix="/")
    yield f"http://{host}:{port}"
    serve.shutdown()


def test_replicas_answer_as_one_process(served: str, alone: list[str]) -> None:
    assert {text_of(served) for _ in range(6)} == {alone[0]}
    with urllib.request.urlopen(f"{served}/health", timeout=GUARD) as answer:
        assert answer.status == 200


def test_a_stream_comes_in_pieces(served: str, alone: list[str]) -> None:
    with post(f"{served}/v1/completions", BODY | {"stream": True}) as answer:
        events = [line for line in answer if line.startswith(b"data: ")]
    assert events.pop() == b"data: [DONE]\n"
    texts = [json.loads(event[6:])["choices"][0]["text"] for event in events]
    assert "".join(texts) == alone[0]
    assert len([text for text in texts if text]) > 2


def test_an_error_is_the_servers_own(served: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(f"{served}/v1/completions", BODY | {"temperature": -1})
    assert caught.value.code == 400
    assert "temperature" in json.loads(caught.value.read())["error"]["message"]


def test_a_client_that_leaves_ends_its_request(served: str) -> None:
    """Ray tells the application, which ends the request in the engine, unless it has come to its own end by then."""

    def leave() -> bool:
        with post(f"{served}/v1/completions", BODY | {"stream": True, "max_tokens": 1900}) as answer:
            next(line for line in answer if line.startswith(b"data: "))
        return aborted(served)

    assert not aborted(served)
    until(leave, "no replica has ended the request")


def aborted(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/metrics", timeout=GUARD) as answer:  # of one replica or the other
        found = [
            line for line in answer if b'finish_reason="abort"' in line or b'finished_reason="abort"' in line
        ]
    assert found, "there is no such metric"
    return any(float(line.split()[-1]) > 0 for line in found)


def test_a_replica_stays_within_its_memory(served: str) -> None:
    for _ in range(4):
        text_of(served)
    for pid in replicas():
        held = sum(map(resident, [pid, *children(pid)]))
        assert 2**27 < held <= 2**30, f"{held / 2**20:.0f} MiB"


@pytest.mark.parametrize("what", ["replica", "engine"])
def test_what_dies_is_replaced(served: str, alone: list[str], what: str) -> None:
    """Ray sees that a process ended; that an engine is gone for good the replica says."""
    before = {*replicas()}
    assert len(before) == 2
    killed = before if what == "replica" else [child for pid in before for child in children(pid)]
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    until(lambda: len(replicas()) == 2 and not {*replicas()} & before and answers(served), "none is back")
    assert {text_of(served) for _ in range(6)} == {alone[0]}


def answers(url: str) -> bool:
    try:
        text_of(url)
    except OSError:  # also what urllib makes of HTTP 503
        return False
    return True


def until(condition: Callable[[], bool], failure: str) -> None:
    end = time.monotonic() + GUARD
    while not condition():
        assert time.monotonic() < end, failure
        time.sleep(0.2)


def replicas() -> list[int]:
    """Processes of replicas of this test's deployment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(f"ray::ServeReplica:default:{NAME}".encode()):
                found.append(int(path.parent.name))
    return found


def children(pid: int) -> list[int]:
    return [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]


def resident(pid: int) -> int:
    """Bytes of memory that a process holds alone, and its share of what it has in common with others."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Pss")
