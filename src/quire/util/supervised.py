"""Processes that are kept running: one that ends, or answers no more, is started again, after a pause that grows while
that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

PAUSES = (0.5, 30.0)  # seconds before it is started again: first, and at most
STEADY = 30.0  # seconds up after which the next pause is the first again
_ASKED = 5.0  # seconds between two questions once it works
_MISSED = 3  # questions without an answer, at least, before it is ended
_LOOK = 0.1  # seconds between two looks whether it works
_LINE = 2**16  # bytes of the longest line of its output
_LAST = 3  # lines of its output that are remembered
_LAST_WORDS = 1.0  # seconds in which its output must end with it


class Supervised:
    """A process that is started by `run` and again whenever it ends, until `end`.

    `ready` says whether it works; `answers`, once it works, whether it gives any answer: after `hung` seconds without
    one it is killed, and so started again (0: never). `say` gets its name and each line of its output; `changed` is
    called with each change of `state`: waiting, starting, up, pausing (before another start), ended, or failed: it
    never was up.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        ready: Callable[[], Awaitable[bool]],
        say: Callable[[str, str], None],
        changed: Callable[[], None],
        answers: Callable[[], Awaitable[bool]] | None = None,
        hung: float = 0.0,
    ) -> None:
        self.name, self._command = name, command
        self._answers, self._hung = answers, hung
        self._ready, self._say, self._changed = ready, say, changed
        self.state, self.restarts, self.since = "waiting", 0, time.time()
        self.pid: int | None = None
        self.why = ""  # it ended last time
        self.last: deque[str] = deque(maxlen=_LAST)  # lines of its output
        self.settled = asyncio.Event()  # it was up, or has failed
        self._ending = asyncio.Event()
        self._killed = ""  # why this process ended it
        self._unasked = False  # `ready` failed in a way that is not a connection's
        self._readers: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Keep it running until `end`, or until it ends before it was up for the first time."""
        pause, was_up = PAUSES[0], False
        while not self._ending.is_set():
            took = await self._once()
            was_up = was_up or took > 0
            if self._ending.is_set() or not was_up:
                break
            if took > STEADY:
                pause = PAUSES[0]
            self.restarts += 1
            self._become("pausing")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._ending.wait()
            pause = min(2 * pause, PAUSES[1])
        self._become("ended" if self._ending.is_set() else "failed")
        self.settled.set()

    async def end(self, seconds: float) -> None:
        """Have it end: by SIGTERM, and by SIGKILL after so many seconds."""
        self._ending.set()
        self._signal(signal.SIGTERM)
        until = time.monotonic() + seconds
        while self.pid is not None and time.monotonic() < until:
            await asyncio.sleep(0.02)
        self._signal(signal.SIGKILL)

    def kill(self) -> None:
        """End it now."""
        self._ending.set()
        self._signal(signal.SIGKILL)

    async def _once(self) -> float:
        """Run it once; returns for how many seconds it was up."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self.why = error.strerror or str(error)
            return 0.0
        self.pid, up_at = process.pid, 0.0
        if self._ending.is_set():  # meanwhile
            self._signal(signal.SIGTERM)
        self._become("starting")
        assert process.stdout is not None
        reader = asyncio.create_task(self._read(process.stdout))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        ended = asyncio.create_task(process.wait())
        while not ended.done() and not up_at:
            if await self._works(self._ready):
                up_at = time.monotonic()
                self._become("up")
                self.settled.set()
            else:
                await asyncio.wait([ended], timeout=_LOOK)
        self._killed = ""
        await self._watch(ended)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever it has left behind
        await asyncio.wait([reader], timeout=_LAST_WORDS)
        code = ended.result()
        self.pid = None
        self.why = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        self.why = self._killed or self.why
        if not self._ending.is_set():
            self._say(self.name, f"quire: it {self.why}")
        return time.monotonic() - up_at if up_at else 0.0

    async def _watch(self, ended: asyncio.Task[int]) -> None:
        """Wait until a process that works ends; end it if it answers no more. One that has to end has time for that,
        and what it answers meanwhile does not matter."""
        if self._answers is None or not self._hung:
            await asyncio.wait([ended])
            return
        last, missed = time.monotonic(), 0
        while not ended.done():
            await asyncio.wait([ended], timeout=min(_ASKED, self._hung / (_MISSED + 1)))
            if ended.done() or self._ending.is_set():
                continue
            asked = time.monotonic()
            if await self._works(self._answers):
                last, missed = asked, 0
                continue
            missed += 1
            if missed >= _MISSED and time.monotonic() - last >= self._hung and not self._ending.is_set():
                self._killed = f"gave no answer for {time.monotonic() - last:.0f} s, and was ended"
                self._signal(signal.SIGKILL)

    async def _works(self, question: Callable[[], Awaitable[bool]]) -> bool:
        try:
            return await question()
        except OSError:
            return False
        except Exception as error:  # whatever it is, the process has to be looked after
            if not self._unasked:
                self._say(self.name, f"quire: whether it works cannot be asked: {error}")
            self._unasked = True
            return False

    async def _read(self, output: asyncio.StreamReader) -> None:
        rest = b""
        while part := await output.read(_LINE):
            *lines, rest = (rest + part).split(b"\n")
            if len(rest) > _LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._pass_on(line)
        if rest:
            self._pass_on(rest)

    def _pass_on(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace")
        self.last.append(text)
        self._say(self.name, text)

    def _signal(self, number: int) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _become(self, state: str) -> None:
        self.state, self.since = state, time.time()
        self._changed()
