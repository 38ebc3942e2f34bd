"""The process that compiles: limits that the kernel keeps, turns of tenants, what is kept, and its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.process import until
from quire import StructuredOutput
from quire.structured import pool as pool_module
from quire.structured.ask import GrammarError
from quire.structured.compile_bounds import MAX_WAITING, PROCESS_BYTES
from quire.structured.pool import CompilerBusyError, GrammarPool

# Rules that name each other in the order that is worst to follow.
SLOW = StructuredOutput(
    grammar="root ::= "
    + " | ".join(f"c{i}-0" for i in range(64))
    + "".join(f'\nc{i}-{k} ::= "x" c{i}-{k + 1}' for i in range(64) for k in range(125))
    + "".join(f'\nc{i}-125 ::= "y"' for i in range(64))
)
# Each value becomes a schema.
LARGE = StructuredOutput(json={"enum": [[i] for i in range(45_000)]})
# Each rule doubles what the one before it stands for.
DOUBLING = (
    'root ::= "(" root ")" | a0\n'
    + "".join(f"a{i} ::= a{i + 1} a{i + 1}\n" for i in range(60))
    + 'a60 ::= "a"?'
)
# Each part may be followed by all others.
FOLLOWING = 'root ::= "(" root ")" | ' + " ".join(["([ab]*|[bc]*)"] * 300)
GUARD = 60


def ask(number: int) -> StructuredOutput:
    return StructuredOutput(regex=f"a{{{number}}}")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine may leave nothing to a process, which is replaced then."""
    monkeypatch.setattr(pool_module, "_LEAST_SHARE", -1.0)


@contextmanager
def stopped(pool: GrammarPool) -> Iterator[int]:
    """A process that does not go on, so that what is asked waits."""
    pool.compile_now(StructuredOutput(regex="started"))
    assert pool.pid is not None
    os.kill(pool.pid, signal.SIGSTOP)
    try:
        yield pool.pid
    finally:
        os.kill(pool.pid, signal.SIGCONT)


def test_results_and_refusals_are_kept(pool: GrammarPool) -> None:
    first = pool.compile_now(ask(1))
    hits, pid = pool.counts.hits, pool.pid
    assert pool.compile_now(ask(1)) is first
    assert pool.submit(ask(1), "tenant").result() is first
    refusals = []
    for _ in range(2):
        with pytest.raises(GrammarError, match=r"back-reference \\1") as raised:
            pool.compile_now(StructuredOutput(regex=r"(a)\1"))
        refusals.append(raised.value)
    assert refusals[0] is not refusals[1]
    assert pool.counts.hits == hits + 3
    assert pool.pid == pid


def test_the_process_is_of_low_priority_and_bounded(pool: GrammarPool) -> None:
    pool.compile_now(StructuredOutput(choice=[f"choice number {i}" for i in range(10_000)]))
    assert pool.pid is not None
    assert os.sched_getscheduler(pool.pid) == os.SCHED_IDLE
    assert os.getsid(pool.pid) == os.getsid(0)
    assert os.getpgid(pool.pid) == pool.pid  # an interrupt typed at the terminal is not for it
    status = Path(f"/proc/{pool.pid}/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+)", status)
    assert peak is not None
    assert int(peak[1]) * 1024 < PROCESS_BYTES


def test_a_process_that_gets_no_processor_has_a_share_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "processor_seconds", lambda _: 0.0)
    monkeypatch.setattr(pool_module, "_LEAST_SHARE", 0.1)
    monkeypatch.setattr(pool_module, "_LOOK_SECONDS", 0.001)
    pool = GrammarPool()
    try:
        assert pool.compile_now(ask(1)).grammar.source
        assert pool.pid is not None
        assert os.sched_getscheduler(pool.pid) == os.SCHED_OTHER
        assert os.getpriority(os.PRIO_PROCESS, pool.pid) >= 10
        assert os.getsid(pool.pid) == pool.pid
        group = Path(f"/proc/{pool.pid}/autogroup")
        assert not group.exists() or group.read_text().endswith("nice 10\n")
        assert pool.counts.killed == pool.counts.refused == 0
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("hostile", "seconds", "message", "killed"),
    [
        (SLOW, 0.5, "more than 0.5 s of processor time", 1),
        (LARGE, GUARD, "more than 64.00 MiB of memory", 0),  # no machine is too slow to get there
    ],
)
def test_a_grammar_over_a_limit_is_refused_alone(
    hostile: StructuredOutput, seconds: float, message: str, killed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "CPU_SECONDS", seconds)
    pool = GrammarPool()
    try:
        before = pool.compile_now(ask(2))
        with pytest.raises(GrammarError, match=message) as raised:
            pool.compile_now(hostile)
        assert raised.value.field == hostile.kind
        assert pool.counts.killed == killed
        assert pool.compile_now(ask(2)) is before
        assert pool.compile_now(ask(3)).grammar.source
        hits = pool.counts.hits
        with pytest.raises(GrammarError, match=message):  # known by now
            pool.compile_now(hostile)
        assert pool.counts.hits == hits + 1
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("hostile", "message"),
    [
        (StructuredOutput(grammar=DOUBLING), "more than 60000 steps"),
        (StructuredOutput(grammar=FOLLOWING), "more than 60000 steps"),
        (StructuredOutput(json={"properties": {f"k{i}": {} for i in range(3000)}}), "may be left out"),
        (StructuredOutput(json={"anyOf": [{"type": "null"}] * 10_000}), "more than 8192 schemas"),
    ],
)
def test_what_grows_is_refused_before_the_process_is_ended(
    pool: GrammarPool, hostile: StructuredOutput, message: str
) -> None:
    killed = pool.counts.killed
    with pytest.raises(GrammarError, match=message):
        pool.compile_now(hostile)
    assert pool.counts.killed == killed


def test_a_process_that_was_killed_is_replaced(pool: GrammarPool) -> None:
    pool.compile_now(ask(4))
    pid = pool.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert pool.compile_now(ask(5)).grammar.source
    assert pool.pid not in {None, pid}


def test_tenants_take_turns(pool: GrammarPool) -> None:
    done: list[str] = []

    def submit(number: int, tenant: str) -> Future[object]:
        future = pool.submit(ask(number), tenant)
        future.add_done_callback(lambda _: done.append(tenant))
        return future  # type: ignore[return-value]

    with stopped(pool):
        futures = [submit(100 + i, "many") for i in range(6)]
        futures += [submit(200, "few"), submit(201, "few"), submit(300, "one")]
    wait(futures, GUARD)
    assert done.index("one") <= 4
    assert [i for i, tenant in enumerate(done) if tenant == "few"][-1] <= 6
    assert done[-1] == "many"


def test_equal_asks_wait_for_one_result(pool: GrammarPool) -> None:
    with stopped(pool):
        futures = [pool.submit(ask(400)) for _ in range(3)]
        assert pool.waiting <= 1
    assert len({id(future.result(GUARD)) for future in futures}) == 1


def test_the_queue_has_an_end_and_cancelled_asks_leave_it(pool: GrammarPool) -> None:
    with stopped(pool):
        running = pool.submit(ask(500))
        until(lambda: pool.waiting == 0)
        half = [pool.submit(ask(1000 + i), "a") for i in range(MAX_WAITING // 2)]
        with pytest.raises(CompilerBusyError, match="128 of them from this client"):
            pool.submit(ask(5000), "a")
        rest = [pool.submit(ask(2000 + i), f"b{i}") for i in range(MAX_WAITING // 2)]
        with pytest.raises(CompilerBusyError, match=r"256 grammars are waiting .*limit 256"):
            pool.submit(ask(5000), "c")
        compiled = pool.counts.compiled
        for future in [*half, *rest]:
            assert future.cancel()
    assert running.result(GUARD)
    assert pool.compile_now(ask(501)).grammar.source
    assert pool.waiting == 0
    assert pool.counts.compiled == compiled + 2


def test_a_grammar_waits_for_a_while_only(pool: GrammarPool, monkeypatch: pytest.MonkeyPatch) -> None:
    with stopped(pool):
        running = pool.submit(ask(600))
        until(lambda: pool.waiting == 0)
        monkeypatch.setattr(pool_module, "WAIT_SECONDS", 0.0)
        late = pool.submit(ask(601))
    with pytest.raises(CompilerBusyError, match="other grammars took more than 0 s"):
        late.result(GUARD)
    assert running.result(GUARD)
    monkeypatch.undo()
    assert pool.compile_now(ask(601)).grammar.source, "not kept as a refusal"


def test_the_cache_keeps_to_its_bytes() -> None:
    pool = GrammarPool(cache_bytes=4000)
    try:
        for i in range(6):
            pool.compile_now(ask(i))
        assert pool.held <= 4000
        hits = pool.counts.hits
        pool.compile_now(ask(5))
        assert pool.counts.hits == hits + 1
        pool.compile_now(ask(0))
        assert pool.counts.hits == hits + 1, "the oldest was dropped"
        pool.compile_now(StructuredOutput(regex="x" * 5000))
        assert pool.held <= 4000
    finally:
        pool.close()


def test_closing_ends_everything() -> None:
    pool = GrammarPool()
    pool.compile_now(ask(0))
    pid = pool.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    futures = [pool.submit(ask(i)) for i in range(1, 4)]
    pool.close()
    assert pool.pid is None
    assert not Path(f"/proc/{pid}").exists()
    for future in futures:
        with pytest.raises(CompilerBusyError, match="stopping"):
            future.result(GUARD)
    pool.close()
    with pytest.raises(CompilerBusyError, match="stopping"):
        pool.submit(ask(7))


def test_it_ends_with_its_parent() -> None:
    code = (
        "from quire import StructuredOutput\nfrom quire.structured.pool import GrammarPool\nimport time\n"
        "pool = GrammarPool()\npool.compile_now(StructuredOutput(regex='a'))\n"
        "print(pool.pid, flush=True)\ntime.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text())


def test_a_process_that_cannot_start_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = GrammarPool()
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(CompilerBusyError, match="could not be started"):
        pool.compile_now(ask(1))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CompilerBusyError, match=r"exited at its start \(status 1\)"):
        pool.compile_now(ask(1))
    monkeypatch.undo()
    assert pool.compile_now(ask(1)).grammar.source
    pool.close()
