"""Compiles grammars in another process, one at a time, and keeps what came of them.

A thread owns the process: it starts it with the first grammar, and again after one that the kernel has ended for its
use of time or memory. Callers wait in queues by tenant, which take turns, so that the hostile grammars of one do not
hold up another's.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import Future
from typing import Any

import msgspec

from quire.records import dataclass
from quire.structured.ask import CompiledGrammar, GrammarError, StructuredOutput
from quire.structured.compile_bounds import (
    CACHE_BYTES,
    CPU_SECONDS,
    IDLE_SECONDS,
    MAX_WAITING,
    PROCESS_BYTES,
    WAIT_SECONDS,
    WALL_SECONDS,
)
from quire.structured.compile_process import receive, send
from quire.types import Grammar, QuireError
from quire.util.platform import processor_seconds
from quire.util.sizes import format_size

_LOOK_SECONDS = 0.5  # between looks at how much of a processor the process gets
_LEAST_SHARE = 0.1  # of a processor: less is not enough
_ENTRY_BYTES = 1024  # of an entry of the cache besides its texts


class CompilerBusyError(QuireError):
    """A grammar could not be compiled now: too many wait, others took too long, or the process gets no processor (HTTP
    503).
    """

    retry_after = 1.0


@dataclass(slots=True)
class PoolCounts:
    """What a pool has done since it was made."""

    compiled: int = 0
    refused: int = 0
    hits: int = 0
    killed: int = 0  # processes ended by a limit
    seconds: float = 0.0  # of compiling, as callers saw it


_Outcome = CompiledGrammar | GrammarError


@dataclass(slots=True, eq=False)
class _Job:
    """An ask that waits, and the callers with an equal ask."""

    ask: StructuredOutput
    digest: bytes
    waiting: list[Future[CompiledGrammar]]
    since: float  # by the monotonic clock


class GrammarPool:
    """Compiled grammars by what was asked. Any thread may call it."""

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        self.counts = PoolCounts()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._cache: OrderedDict[bytes, tuple[_Outcome, int]] = OrderedDict()
        self._cache_bytes, self._cached = cache_bytes, 0
        self._queues: dict[str, deque[_Job]] = {}  # the tenant whose turn it is comes first
        self._jobs: dict[bytes, _Job] = {}
        self._thread: threading.Thread | None = None
        self._process: _Process | None = None
        self._apart = False  # a process that takes what others leave got nothing
        self._closed = False

    def compile_now(self, ask: StructuredOutput) -> CompiledGrammar:
        """The grammar of an ask, for a thread that can wait. Raises what `submit` says."""
        return self.submit(ask).result()

    def submit(self, ask: StructuredOutput, tenant: str = "") -> Future[CompiledGrammar]:
        """The grammar of an ask: a GrammarError if it cannot be enforced, a CompilerBusyError, which this may raise, if
        it cannot be compiled now. Cancelling takes a grammar that waits out of its queue.
        """
        future: Future[CompiledGrammar] = Future()
        digest = ask.digest()
        with self._lock:
            if digest in self._cache:
                self._cache.move_to_end(digest)
                self.counts.hits += 1
                _settle(future, self._cache[digest][0])
                return future
            if self._closed:
                raise CompilerBusyError("Quire is stopping and compiles no more grammars")
            job = self._jobs.get(digest)
            if job is None:
                self._check_places(tenant)
                job = self._jobs[digest] = _Job(ask, digest, [], time.monotonic())
                self._queues.setdefault(tenant, deque()).append(job)
            job.waiting.append(future)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="quire-grammars", daemon=True)
                self._thread.start()
            self._changed.notify()
        return future

    @property
    def waiting(self) -> int:
        """Grammars that wait to be compiled."""
        return sum(map(len, self._queues.values()))

    @property
    def held(self) -> int:
        """Bytes of what is kept."""
        return self._cached

    @property
    def pid(self) -> int | None:
        """The process that compiles, if there is one now."""
        process = self._process
        return process.pid if process is not None else None

    def close(self) -> None:
        """End the process. Callers that wait get CompilerBusyError. Does nothing the second time."""
        with self._lock:
            self._closed = True
            self._changed.notify()
        while self._thread is not None and self._thread.is_alive():
            if (process := self._process) is not None:
                process.kill()
            self._thread.join(0.05)
        for job in self._jobs.values():
            for future in job.waiting:
                _settle(future, CompilerBusyError("Quire is stopping"))
        self._jobs.clear()
        self._queues.clear()

    def _check_places(self, tenant: str) -> None:
        """As in the engine's queue: a tenant may occupy at most as many places as it leaves to others."""
        waiting, own = self.waiting, len(self._queues.get(tenant, ()))
        if waiting >= MAX_WAITING or (tenant and own and own >= MAX_WAITING - waiting):
            raise CompilerBusyError(
                f"{waiting} grammars are waiting to be compiled (limit {MAX_WAITING}), {own} of them from this client"
            )

    def _run(self) -> None:
        while (job := self._next()) is not None:
            began = time.monotonic()
            outcome: _Outcome | CompilerBusyError = CompilerBusyError("the grammar compiler failed")
            try:
                if began - job.since > WAIT_SECONDS:
                    message = f"other grammars took more than {WAIT_SECONDS:g} s to compile"
                    raise CompilerBusyError(message)
                outcome = self._compile(job.ask)
            except CompilerBusyError as error:
                outcome = error
            finally:
                with self._lock:
                    self.counts.seconds += time.monotonic() - began
                    if not isinstance(outcome, CompilerBusyError):
                        self._keep(job.digest, outcome)
                    del self._jobs[job.digest]
                for future in job.waiting:
                    _settle(future, outcome)
        self._end()

    def _next(self) -> _Job | None:
        """The job whose turn it is; None when the pool is closed."""
        while True:
            with self._lock:
                if self._closed:
                    return None
                job = self._take()
                if job is not None:
                    return job
                idle = not self._changed.wait(IDLE_SECONDS)
            if idle:
                self._end()
                self._apart = False

    def _take(self) -> _Job | None:
        while self._queues:
            tenant, jobs = next(iter(self._queues.items()))
            job = jobs.popleft()
            del self._queues[tenant]
            if jobs:
                self._queues[tenant] = jobs  # behind the others
            if not all(future.cancelled() for future in job.waiting):
                return job
            del self._jobs[job.digest]
        return None

    def _compile(self, ask: StructuredOutput) -> _Outcome:
        """Compile in the process; start one if there is none. One that was ended from outside is tried again, one that
        gets no processor is replaced by one with a share of its own.
        """
        tried = False
        while True:
            if self._process is None:
                self._process = _Process(self._apart)
                if self._closed:
                    raise CompilerBusyError("Quire is stopping")
            try:
                reply = self._process.ask(ask)
            except _StarvedError:
                self._end()
                self._apart = True
            except TimeoutError:
                self._end()
                raise CompilerBusyError(
                    f"compiling a grammar did not end within {WALL_SECONDS:g} s on this busy machine"
                ) from None
            except (EOFError, OSError):
                ended = self._process.status()
                self._end()
                if ended in _REASONS or tried:
                    self.counts.killed += 1
                    self.counts.refused += 1
                    return GrammarError(
                        ask.kind, _REASONS.get(ended, f"it crashed the grammar compiler (status {ended})")
                    )
                tried = True
            else:
                return self._outcome(ask, reply)

    def _outcome(self, ask: StructuredOutput, reply: dict[str, Any]) -> _Outcome:
        if "source" in reply:
            self.counts.compiled += 1
            source = reply["source"]
            grammar = Grammar(source, hashlib.sha256(source.encode()).digest())
            return CompiledGrammar(grammar, tuple(reply["dropped"]), reply["seconds"])
        self.counts.refused += 1
        if "memory" in reply:
            return GrammarError(ask.kind, _REASONS[-signal.SIGABRT])
        return GrammarError(reply["field"], reply["message"])

    def _keep(self, digest: bytes, outcome: _Outcome) -> None:
        size = _ENTRY_BYTES + sys.getsizeof(str(outcome))
        if isinstance(outcome, CompiledGrammar):
            size = (
                _ENTRY_BYTES
                + sys.getsizeof(outcome.grammar.source)
                + sum(map(sys.getsizeof, outcome.dropped))
            )
        if size > self._cache_bytes:
            return
        self._cache[digest] = outcome, size
        self._cached += size
        while self._cached > self._cache_bytes:
            _, (_, dropped) = self._cache.popitem(last=False)
            self._cached -= dropped

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()


# How a process ends that has reached a limit.
_REASONS = {
    -signal.SIGPROF: f"compiling it takes more than {CPU_SECONDS:g} s of processor time",
    -signal.SIGABRT: f"compiling it takes more than {format_size(PROCESS_BYTES)} of memory",
    -signal.SIGSEGV: "it is nested too deeply to be compiled",
}


class _StarvedError(Exception):
    """A process that takes what others leave of the processors gets less than a tenth of one."""


class _Process:
    """The process that compiles, `apart` in a session of its own. Raises CompilerBusyError if it cannot be started."""

    def __init__(self, apart: bool) -> None:
        self._apart = apart or not hasattr(os, "SCHED_IDLE")
        ours, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-P",
            "-m",
            "quire.structured.compile_process",
            str(theirs.fileno()),
            str(os.getpid()),
            str(int(self._apart)),
            str(CPU_SECONDS),
        ]
        try:
            with theirs:
                # The kernel ends the process together with the thread that started it.
                self._process = subprocess.Popen(
                    command,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # where Rust reports that memory is at its end
                    # An interrupt typed at the terminal is for the parent only. What takes what others leave stays in
                    # its session: between sessions, the kernel does not look at the policies of their processes.
                    start_new_session=self._apart,
                    process_group=None if self._apart else 0,
                )
        except OSError as error:
            ours.close()
            raise CompilerBusyError(f"the grammar compiler could not be started: {error}") from None
        self.pid = self._process.pid
        self._sock = ours
        ours.settimeout(WALL_SECONDS)
        try:
            receive(ours)
        except (EOFError, OSError):
            status = self.status()
            self.close()
            raise CompilerBusyError(f"the grammar compiler exited at its start (status {status})") from None

    def ask(self, ask: StructuredOutput) -> dict[str, Any]:
        """Its answer. Raises TimeoutError and _StarvedError, and EOFError or OSError if it ends."""
        send(self._sock, msgspec.json.encode(ask.values()))
        self._wait()
        reply: dict[str, Any] = msgspec.json.decode(receive(self._sock))
        return reply

    def _wait(self) -> None:
        """Until the process has something to say."""
        answer = select.poll()
        answer.register(self._sock, select.POLLIN)
        began, before = time.monotonic(), 0.0 if self._apart else processor_seconds(self.pid)
        while not answer.poll(_LOOK_SECONDS * 1e3):
            waited = time.monotonic() - began
            if waited > WALL_SECONDS:
                raise TimeoutError
            if not self._apart and processor_seconds(self.pid) - before < _LEAST_SHARE * waited:
                raise _StarvedError

    def kill(self) -> None:
        """End it in the middle of what it does; its thread notices."""
        self._process.kill()

    def status(self) -> int:
        """How it ended, after EOFError: the negative number of the signal that ended it, if one did."""
        try:
            return self._process.wait(WALL_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def close(self) -> None:
        """End it."""
        self._sock.close()
        self._process.kill()
        self._process.wait()


def _settle(future: Future[CompiledGrammar], outcome: _Outcome | CompilerBusyError) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, CompiledGrammar):
        future.set_result(outcome)
    elif isinstance(outcome, GrammarError):
        future.set_exception(GrammarError(outcome.field, outcome.message))  # each caller raises its own
    else:
        future.set_exception(CompilerBusyError(*outcome.args))
