"""Run the branches of a program on an LLM or an AsyncLLM: requests that can run at once share batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from quire.lang.transcript import PromptWriter
from quire.outputs import RequestOutput
from quire.types import QuireError, RequestError, SamplingParams

if TYPE_CHECKING:
    from quire.llm import LLM, TextStream
    from quire.llm.asynchronous import AsyncLLM

Busy = Callable[[], bool]
_WRITERS: WeakKeyDictionary[LLM | AsyncLLM, PromptWriter] = WeakKeyDictionary()


class BranchRequest:
    """One request of a branch: `output` grows while it runs; `error` is why it was refused or has failed."""

    __slots__ = ("error", "output", "params", "prompt", "stream")

    def __init__(self, prompt: list[int], params: SamplingParams) -> None:
        self.prompt, self.params = prompt, params
        self.output: RequestOutput | None = None
        self.error: QuireError | None = None
        self.stream: TextStream | None = None  # on an LLM

    @property
    def ended(self) -> bool:
        return self.error is not None or (self.output is not None and self.output.finished)


class ProgramBranch(Protocol):
    """A branch of a program, as its runner sees it. `path` are the numbers of the forks that lead to it; it is `ready`
    when what it was forked from has got there.
    """

    path: tuple[int, ...]
    ready: bool

    @property
    def busy(self) -> bool:
        """Whether something is pending."""

    def resume(self) -> list[BranchRequest]:
        """Go on, up to the next requests; returns none when nothing is pending. An error ends the branch."""

    def end(self, error: QuireError) -> None:
        """Drop what is pending; nothing more is taken."""


class BranchRunner:
    """What the branches of a program have in common, and what runs them. `pending` are those that have something to
    run, in order; `failed` those whose error has not been looked at.
    """

    def __init__(
        self, llm: LLM | AsyncLLM, params: SamplingParams, *, seed: int | None, at_once: int
    ) -> None:
        if at_once < 1:
            raise RequestError("at_once", f"{at_once} is less than 1")
        if llm not in _WRITERS:
            _WRITERS[llm] = PromptWriter(llm.tokenizer)
        self.writer, self.params, self.seed = _WRITERS[llm], params, seed
        self.pending: dict[ProgramBranch, None] = {}
        self.failed: dict[ProgramBranch, None] = {}

    def close(self, path: tuple[int, ...]) -> None:
        """End the branch with this path and its forks."""
        for branch in [branch for branch in list(self.pending) if branch.path[: len(path)] == path]:
            branch.end(QuireError("this branch was closed"))
            self._abort(branch)
            self.pending.pop(branch, None)

    def _abort(self, branch: ProgramBranch) -> None:
        raise NotImplementedError


class SyncRunner(BranchRunner):
    """On an LLM. It has no thread: what waits for a branch runs steps for all of them. At most `at_once` requests are
    open. Another thread may set `stopped`.
    """

    def __init__(self, llm: LLM, *, seed: int | None, at_once: int, **sampling: Any) -> None:
        super().__init__(llm, replace(llm.default_params(), **sampling), seed=seed, at_once=at_once)
        self.stopped = False
        self._llm, self._at_once = llm, at_once
        self._asked: dict[ProgramBranch, list[BranchRequest]] = {}
        self._queue: deque[BranchRequest] = deque()
        self._open: list[BranchRequest] = []

    def run(self, busy: Busy) -> None:
        """Run steps for as long as `busy` says so."""
        while busy():
            self.step()

    def step(self) -> None:
        """Let every branch go on that can, then run one step of the engine."""
        if self.stopped:
            raise QuireError("the program was stopped")
        while going := [branch for branch in self.pending if self._can_go_on(branch)]:
            for branch in going:
                self._asked[branch] = branch.resume()
                self._queue.extend(self._asked[branch])
                if not branch.busy:
                    del self.pending[branch], self._asked[branch]
        while self._queue and len(self._open) < self._at_once:
            self._start(self._queue.popleft())
        if self._open and (stream := self._open[0].stream):
            stream.advance()
        for request in self._open:
            if request.ended and request.stream:
                request.stream.close()  # forgets its deltas
        self._open = [request for request in self._open if not request.ended]

    def _can_go_on(self, branch: ProgramBranch) -> bool:
        return branch.ready and all(request.ended for request in self._asked.get(branch, ()))

    def _start(self, request: BranchRequest) -> None:
        try:
            request.stream = self._llm.stream(request.prompt, request.params)
        except QuireError as error:
            request.error = error
        else:
            request.output = request.stream.output
            self._open.append(request)

    def _abort(self, branch: ProgramBranch) -> None:
        for request in self._asked.pop(branch, ()):
            if request.stream is not None:
                request.stream.close()
            elif request in self._queue:
                self._queue.remove(request)


class AsyncRunner(BranchRunner):
    """On an AsyncLLM, each branch in a task of the event loop. At most `at_once` requests are open."""

    def __init__(self, llm: AsyncLLM, *, seed: int | None, at_once: int, **sampling: Any) -> None:
        params = SamplingParams(**{**llm.card.default_sampling, **sampling})
        super().__init__(llm, params, seed=seed, at_once=at_once)
        self._llm, self._places = llm, asyncio.Semaphore(at_once)
        self._tasks: dict[ProgramBranch, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._failure: BaseException | None = None  # a mistake of this code

    async def run(self, busy: Busy) -> None:
        """Run branches for as long as `busy` says so."""
        while busy():
            await self.step()

    async def step(self) -> None:
        """Let every branch go on that can; returns when something has changed."""
        for branch in list(self.pending):  # a thread may end some of them
            if branch.ready and branch not in self._tasks:
                self._tasks[branch] = asyncio.create_task(self._drive(branch))
        await self._news.wait()
        if self._failure is not None:
            raise self._failure

    async def _drive(self, branch: ProgramBranch) -> None:
        try:
            # rendering and tokenizing are not for the event loop
            while requests := await asyncio.to_thread(branch.resume):
                self._notify()  # its forks may be ready
                await asyncio.gather(*map(self._answer, requests))
        except Exception as failure:
            self._failure = failure
            raise
        finally:
            del self._tasks[branch]
            if not branch.busy:
                self.pending.pop(branch, None)
            self._notify()

    async def _answer(self, request: BranchRequest) -> None:
        async with self._places:
            try:
                async with self._llm.running(request.prompt, request.params) as stream:
                    request.output = stream.output
                    async for _ in stream:
                        self._notify()
            except QuireError as error:
                request.error = error

    def _notify(self) -> None:
        """Wake up all that wait for news."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _abort(self, branch: ProgramBranch) -> None:
        if branch in self._tasks:
            self._tasks[branch].cancel()
