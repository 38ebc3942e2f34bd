"""Ranks that a launcher has started: they meet with a secret, and answer as those that Quire starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from quire import LLM, SamplingParams
from quire.config.launched import Launched, RendezvousError, launched
from quire.engine.build import rendezvous
from quire.engine.build.rendezvous import admit, gather, join, listen

SECRET = "sixteen bytes or more"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def place(port: int, number: int, world: int = 2, secret: str = SECRET) -> Launched:
    return Launched(number, world, "127.0.0.1", port, secret.encode())


def test_whoever_knows_the_secret_joins(port: int) -> None:
    with ThreadPoolExecutor(3) as threads:
        found = threads.submit(lambda: dict(gather(place(port, 0, 3))))
        joined = [threads.submit(join, place(port, number, 3)) for number in (2, 1)]
        sockets = found.result()
        for number, ours in zip((2, 1), joined, strict=True):
            sockets[number].sendall(bytes([number]))
            assert ours.result().recv(1) == bytes([number])


def test_others_are_cut_off(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "JOIN_SECONDS", 4.0)
    with ThreadPoolExecutor(3) as threads:
        found = threads.submit(lambda: dict(gather(place(port, 0))))
        wrong = threads.submit(join, place(port, 1, secret="another secret, as long"))
        with pytest.raises(RendezvousError, match="QUIRE_RANK_SECRET is another"):
            wrong.result()
        with pytest.raises(RendezvousError, match="RANK 1 of 2 did not join within 4 s"):
            found.result()


def test_connections_that_say_nothing_delay_nobody(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ADMIT_SECONDS", 3600.0)
    monkeypatch.setattr(rendezvous, "_MOST_CALLERS", 4)
    with ThreadPoolExecutor(1) as threads, ExitStack() as strangers, listen("127.0.0.1", port) as listener:
        for _ in range(6):
            stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
            stranger.settimeout(60)
        ours = threads.submit(join, place(port, 1))
        found = dict(admit(listener, SECRET.encode(), [1], "RANK {}", 60.0))
        found[1].sendall(b"x")
        assert ours.result().recv(1) == b"x"
        assert len(stranger.recv(64)) == 32
        assert stranger.recv(1) == b""
        found[1].close()


def test_a_leader_with_another_secret_is_not_followed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "JOIN_SECONDS", 2.0)
    with ThreadPoolExecutor(1) as threads, socket.create_server(("127.0.0.1", port)) as listener:
        ours = threads.submit(join, place(port, 1))
        sock, _ = listener.accept()
        sock.sendall(bytes(32))
        assert len(sock.recv(66)) == 66
        sock.sendall(bytes(32))
        with pytest.raises(RendezvousError, match="another secret"):
            ours.result()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"WORLD_SIZE": "3"}, "RANK 1 of WORLD_SIZE 3: the model has 2 ranks"),
        ({"RANK": "2"}, "RANK 2 of WORLD_SIZE 2"),
        ({"RANK": "x"}, "RANK, WORLD_SIZE"),
        ({"LOCAL_WORLD_SIZE": "1"}, "MASTER_ADDR: where the other hosts reach node 0"),
        ({"QUIRE_RANK_SECRET": "short"}, "QUIRE_RANK_SECRET: all ranks need the same secret of 16 bytes"),
    ],
)
def test_variables_that_do_not_fit(changed: dict[str, str], message: str) -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "5", "QUIRE_RANK_SECRET": SECRET}
    assert launched(given, 1) is None
    assert launched({}, 2) is None
    assert launched(given, 2) == place(6, 1)
    with pytest.raises(RendezvousError, match=message):
        launched({**given, **changed}, 2)


def test_a_launched_rank_answers_with_the_others(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of a launcher for rank 1; rank 0 leads from here."""
    prompt = [list(range(3, 40))]
    with LLM("quire-mini", progress=False, threads=1) as llm:
        alone = llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1)}
    given["QUIRE_RANK_SECRET"] = SECRET
    command = [sys.executable, "-m", "quire", "serve", "quire-mini", "--tensor-parallel-size", "2"]
    with subprocess.Popen(command, env={**os.environ, **given, "RANK": "1"}) as other:
        for name, value in {**given, "RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        with LLM("quire-mini", progress=False, threads=1, tensor_parallel_size=2) as llm:
            assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == alone
        assert other.wait(30) == 0
