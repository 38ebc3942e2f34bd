"""Engines of one server share the cores out among those that compute; how many threads a step has changes no bit."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.memory import memory_for
from helpers.process import until
from helpers.tokenizers import Folder
from quire import LLM, SamplingParams
from quire.config.schema import EngineConfig
from quire.engine.host import core_shares
from quire.engine.host.core_shares import GRACE_SECONDS, CoreShares
from quire.engine.host.messages import FrameReader, Load, Ready, Stop, frame, report_decoder
from quire.engine.host.spawn import Spawned


def shares(path: Path, count: int, cores: int = 4) -> list[CoreShares]:
    made = [CoreShares(str(path), cores) for _ in range(count)]
    for each in made:
        each.bind(cores, lambda _: None)
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time of all engines, which passes when a test says so."""
    made = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(core_shares, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def threads(one: CoreShares) -> int:
    with one.step():
        return one.threads


def test_cores_are_those_of_engines_that_compute(tmp_path: Path, clock: SimpleNamespace) -> None:
    first, second, third = shares(tmp_path / "cores", 3)
    assert threads(first) == 4
    with first.step():
        assert threads(second) == 2
        with second.step():
            assert [threads(third), threads(first)] == [1, 2]  # what is left over goes to the first ones
    clock.now += 2 * GRACE_SECONDS
    assert threads(third) == 4  # who is idle has no part
    assert threads(first) == 2  # the next step of one that has just computed may be near
    second.close()
    third.close()
    assert threads(first) == 4
    assert [threads(each) for each in shares(tmp_path / "cores", 5)] == [2, 1, 1, 1, 1]
    with pytest.raises(OSError, match="No such file"):
        CoreShares(str(tmp_path / "missing" / "cores"))


@pytest.mark.usefixtures("clock")
def test_threads_change_only_when_the_part_does(tmp_path: Path) -> None:
    used: list[int] = []
    one, other = shares(tmp_path / "cores", 2)
    one.bind(3, used.append)
    for _ in range(3):
        threads(one)
    with other.step():
        threads(one)
        threads(one)
    assert used == [2]
    assert [one.threads, other.threads] == [2, 2]


def test_an_engine_that_was_killed_in_a_step_has_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    path = tmp_path / "cores"
    code = (
        "import sys, time; from quire.engine.host.core_shares import CoreShares\n"
        "CoreShares(sys.argv[1], 2).begin(); print('begun', flush=True); time.sleep(600)"
    )
    killed = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE)
    assert killed.stdout is not None
    assert killed.stdout.readline() == b"begun\n"
    (one,) = shares(path, 1, cores=2)
    clock.now = time.monotonic()  # that of the other process
    monkeypatch.setattr(core_shares, "_LOOK_SECONDS", 0.0)
    assert threads(one) == 1
    killed.kill()
    killed.communicate()
    assert threads(one) == 2
    assert threads(*shares(path, 1, cores=2)) == 1


def test_an_engine_has_its_part_from_its_start_to_its_end(checkpoint: Folder, tmp_path: Path) -> None:
    path = tmp_path / "cores"

    def row() -> float:
        data = path.read_bytes() if path.exists() else b""
        return float(memoryview(data).cast("d")[1]) if data else 0.0

    spawned = Spawned(cores=str(path))
    until(lambda: row() < 0)  # without any command
    process, sock = spawned.take()
    config = EngineConfig(memory=memory_for(2**30), threads=1, max_model_len=64, num_kv_blocks=64)
    reader, decode, seen = FrameReader(), report_decoder().decode, set[type]()
    with process, sock:
        sock.sendall(frame(Load(str(checkpoint("qwen3")), config)))
        while Ready not in seen and (data := sock.recv(2**16)):
            seen |= {type(decode(body)) for body in reader.feed(data)}
        assert Ready in seen
        assert row() > 0  # it is idle
        sock.sendall(frame(Stop()))
        while sock.recv(2**16):
            pass
        assert process.wait() == 0
    assert row() < 0  # as long as nobody has found that it is gone


def test_any_number_of_threads_gives_the_same_bits(checkpoint: Folder) -> None:
    llm = LLM(checkpoint("qwen3"), max_model_len=256, threads=3, enable_prefix_caching=False, progress=False)
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2)
    prompts = [list(range(1, 40 + 30 * at)) for at in range(3)]

    def answers() -> list[object]:
        found = [one.outputs[0] for one in llm.generate(prompts, params)]
        return [(one.token_ids, one.logprobs) for one in found]

    expected = answers()
    executor = llm._built.executor
    for count in (1, 3, 2, 9, 0, 4):  # up and down, and out of range
        executor.use_threads(count)
        assert answers() == expected, count
    llm.close()
