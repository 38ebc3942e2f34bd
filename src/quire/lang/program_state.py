"""The state of a generation program: text that grows by what is added, variables, and branches."""

from __future__ import annotations

import inspect
import warnings
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, cast

from quire.answers import Usage
from quire.draft_paths import agreement
from quire.lang.branch_runners import AsyncRunner, BranchRequest, SyncRunner
from quire.lang.expressions import Expression, Gen, Select, Term, TurnEnd, TurnStart, terms
from quire.lang.selection import Selection, scores, shared_tokens
from quire.lang.transcript import PromptText, Transcript
from quire.outputs import RequestOutput
from quire.types import FinishReason, QuireError, RequestError, SamplingParams

if TYPE_CHECKING:
    from quire.llm import LLM
    from quire.llm.asynchronous import AsyncLLM

_WORTH_WAITING = 16  # tokens, a block of the cache: fewer are computed by each branch for itself
_SCORE = SamplingParams(temperature=0, max_tokens=1)
_SHOWN_CHARS = 80


class Pending:
    """A term on its way: `text` is set when it has been run, `request` while it is generated."""

    __slots__ = ("request", "result", "term", "text")

    def __init__(self, term: Term | Forks) -> None:
        self.term = term
        self.text: str | None = None
        self.result: RequestOutput | Selection | None = None
        self.request: BranchRequest | None = None

    @property
    def name(self) -> str | None:
        return self.term.name if isinstance(self.term, Gen | Select) else None

    @property
    def written(self) -> str:
        """The text so far."""
        output = None if self.request is None else self.request.output
        return self.text if self.text is not None else output.outputs[0].text if output else ""


class ProgramState:
    """A branch of a generation program on an LLM or an AsyncLLM.

        s = ProgramState(llm, temperature=0)
        s += user("What is the capital of France?")
        s += assistant("It is ", gen("answer", max_tokens=8, stop="."))
        print(s["answer"])  # on an AsyncLLM, `await s` first

    What is added runs when it is needed: reading a variable, joining forks or awaiting the state runs what all branches
    have pending, in common batches. `sampling` are fields of SamplingParams for every `gen`. With a `seed`, every
    `gen` of every branch has a seed made from it: the same text whatever else runs. At most `at_once` requests of the
    program are in the engine. One thread uses the branches of a program.
    """

    def __init__(
        self, llm: LLM | AsyncLLM, *, seed: int | None = None, at_once: int = 64, **sampling: Any
    ) -> None:
        kind: Any = AsyncRunner if inspect.iscoroutinefunction(llm.generate) else SyncRunner
        self._begin(kind(llm, seed=seed, at_once=at_once, **sampling), ())
        self.ready = True

    def _begin(self, runner: SyncRunner | AsyncRunner, path: tuple[int, ...]) -> None:
        self.runner = runner  # of all branches of the program
        self.path, self.ready = path, False
        self.usage = Usage()  # of its own requests
        self.returned: Any = None  # what the program's function returned
        self._parts: deque[Pending] = deque()
        self._work: Iterator[list[BranchRequest]] | None = None
        self._error: QuireError | None = None
        self._current: Pending | None = None
        self._transcript = Transcript()
        self._variables: dict[str, Pending] = {}
        self._cached: list[int] = []  # tokens of the latest request
        self._said = ""  # its text
        self._made = self._forked = 0

    # -- what a program does ---------------------------------------------------------------------------------

    def __iadd__(self, part: str | Expression) -> ProgramState:
        for term in terms(part):
            self._add(term)
        return self

    @contextmanager
    def turn(self, role: str) -> Iterator[None]:
        """A turn around what is added in the block: `with s.turn("assistant"): …`."""
        self._add(TurnStart(role))
        yield
        self._add(TurnEnd())

    def fork(self, count: int) -> Forks:
        """Branches that go on from here, each with a copy of the text and the variables."""
        if count < 1:
            raise RequestError("count", f"{count} is less than 1")
        branches = [ProgramState.__new__(ProgramState) for _ in range(count)]
        for branch in branches:
            branch._begin(self.runner, (*self.path, self._forked))
            self._forked += 1
        forks = Forks(branches)
        self._add(forks)
        return forks

    def __getitem__(self, name: str) -> str:
        return self._variable(name).written

    def result(self, name: str) -> RequestOutput | Selection | None:
        """How a variable was made: the output of its request, or the scores of its choices."""
        return self._variable(name).result

    def stream(self, name: str) -> VariableText:
        """The text of a variable as it is generated: iterate it with `for`, on an AsyncLLM with `async for`."""
        return VariableText(self, self._pending(name) or self._variable(name))

    @property
    def text(self) -> str:
        """The text so far, as the next `gen` would continue it."""
        self._settle()
        return self.runner.writer.render(self._transcript).text

    @property
    def error(self) -> QuireError | None:
        """Why the branch failed; it takes no more parts then. Reading and joining it raise this error."""
        self.runner.failed.pop(self, None)
        return self._error

    def run(self) -> None:
        """Run what is pending, on an LLM. Raises the error of the branch."""
        Forks([self]).join()

    def __await__(self) -> Generator[Any, None, Forks]:
        return Forks([self]).__await__()

    def close(self) -> None:
        """End this branch and its forks, and abort their requests. Does nothing when they have nothing pending."""
        self.runner.close(self.path)

    @property
    def unfinished(self) -> Forks:
        """This branch and all that have something pending, or an error that has not been looked at."""
        left = cast("list[ProgramState]", [*self.runner.failed, *self.runner.pending])
        return Forks([self, *left])

    def __repr__(self) -> str:
        """A line for each variable: shown by notebooks."""
        pending = f"{len(self._parts)} parts pending" if self.busy else "complete"
        state = pending if self._error is None else f"failed: {self._error}"
        counts = f"{self.usage.prompt_tokens} prompt tokens, {self.usage.cached_tokens} cached"
        lines = [f"\n  {name} = {_shown(part.written)}" for name, part in self._variables.items()]
        return f"ProgramState({counts}, {state}){''.join(lines)}"

    # -- how it is run ---------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether something is pending."""
        return bool(self._parts or self._work)

    def resume(self) -> list[BranchRequest]:
        """Go on, up to the next requests; returns none when nothing is pending. An error ends the branch."""
        try:
            self._work = self._work or self._run()
            requests = next(self._work, [])
        except QuireError as error:
            self.end(error)
            return []
        if not requests:
            self._work = None
        return requests

    def end(self, error: QuireError) -> None:
        """Drop what is pending; nothing more is taken."""
        waiting = [part.term for part in (self._current, *self._parts) if part is not None]
        self._parts.clear()
        self._work = self._current = None
        self._error = self._error or error
        self.runner.failed[self] = None
        for forks in waiting:
            if isinstance(forks, Forks):
                forks.end(error)

    def _add(self, term: Term | Forks) -> None:
        if self._error is None:
            self._parts.append(Pending(term))
            self.runner.pending[self] = None
        elif isinstance(term, Forks):
            term.end(self._error)

    def _settle(self) -> None:
        if self.busy:
            self.run()
        Forks([self]).check()

    def _pending(self, name: str) -> Pending | None:
        parts = (self._current, *self._parts)
        return next((part for part in parts if part is not None and part.name == name), None)

    def _variable(self, name: str) -> Pending:
        if name not in self._variables or self._pending(name):
            self._settle()
        if name not in self._variables:
            known = ", ".join(self._variables) or "none"
            raise KeyError(f"{name!r} is not a variable of this branch; it has {known}")
        return self._variables[name]

    def _run(self) -> Iterator[list[BranchRequest]]:
        """Take the parts one by one; yields requests and goes on when they have ended."""
        while self._parts:
            part = self._current = self._parts.popleft()
            match part.term:
                case str(text):
                    self._transcript.add(text, own=True)
                case TurnStart(role):
                    self._transcript.start(role)
                case TurnEnd():
                    self._transcript.end()
                case Gen() as gen:
                    yield from self._generate(part, gen)
                case Select() as select:
                    yield from self._select(part, select)
                case forks:
                    yield from self._start(forks)
            if part.name is not None:
                self._variables[part.name] = part
            self._current = None

    def _generate(self, part: Pending, gen: Gen) -> Iterator[list[BranchRequest]]:
        prompt, sampling = self._prompt(), dict(gen.sampling)
        self._made += 1
        if self.runner.seed is not None:
            words = repr((self.runner.seed, self.path, self._made)).encode()
            sampling.setdefault("seed", int.from_bytes(blake2b(words, digest_size=8).digest()))
        ids = self.runner.writer.encode(prompt)
        part.request = BranchRequest(ids, replace(self.runner.params, **sampling))
        (output,) = yield from self._ask([part.request])
        (sample,) = output.outputs
        if sample.finish_reason not in {FinishReason.STOP, FinishReason.LENGTH}:
            raise QuireError(f"{gen.name or 'gen'}: generation ended with {sample.finish_reason}")
        self._take(part, prompt, sample.text, [*ids, *sample.token_ids])
        part.result = output

    def _select(self, part: Pending, select: Select) -> Iterator[list[BranchRequest]]:
        prompt, choices, encode = self._prompt(), select.choices, self.runner.writer.encode
        before, options = encode(prompt), [encode(prompt, choice) for choice in choices]
        shared = shared_tokens(before, options, choices)
        params = replace(_SCORE, prompt_logprobs=0, prompt_logprobs_start=shared)
        requests = [BranchRequest(option, params) for option in options]
        # Options that start together would each compute what is not cached of the prompt.
        ahead = int(shared - agreement(before, self._cached) >= _WORTH_WAITING)
        outputs = yield from self._ask(requests[:ahead])
        outputs += yield from self._ask(requests[ahead:])
        found = [
            [at[0].logprob for at in (output.prompt_logprobs or ())[shared:] if at] for output in outputs
        ]
        scored = scores([option[shared:] for option in options], found, select.by)
        best = max(range(len(scored)), key=scored.__getitem__)
        self._take(part, prompt, choices[best], options[best])
        pairs = zip(choices, scored, strict=True), zip(choices, map(sum, found), strict=True)
        part.result = Selection(choices[best], *map(dict, pairs))

    def _start(self, forks: Forks) -> Iterator[list[BranchRequest]]:
        """Copy the state into its forks, after computing what they have in common."""
        try:
            ids = self.runner.writer.encode(self._render())
            if len(forks) > 1 and len(ids) - agreement(ids, self._cached) >= _WORTH_WAITING:
                yield from self._ask([BranchRequest(ids, _SCORE)])
                self._cached = ids
        except RequestError:
            pass  # a template may refuse turns that are not complete; each fork computes them then
        for branch in forks:
            branch._transcript, branch._variables = self._transcript.copy(), dict(self._variables)
            branch._cached, branch._said, branch.ready = self._cached, self._said, True

    def _ask(
        self, requests: list[BranchRequest]
    ) -> Generator[list[BranchRequest], None, list[RequestOutput]]:
        """The outputs of requests. Raises the error of the first that has one."""
        if requests:
            yield requests
        outputs = []
        for request in requests:
            if request.error is not None:
                raise request.error
            outputs.append(cast(RequestOutput, request.output))
            for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
                setattr(self.usage, name, getattr(self.usage, name) + getattr(outputs[-1].usage, name))
        return outputs

    def _prompt(self) -> PromptText:
        """The prompt of a gen or a select. Raises RequestError between turns."""
        self._transcript.check_open("gen and select")
        return self._render()

    def _render(self) -> PromptText:
        """The text so far. It begins with that of the latest prompt, unless the template changes earlier text."""
        prompt, said = self.runner.writer.render(self._transcript), self._said
        if not prompt.text.startswith(said):
            same = next((i for i, (a, b) in enumerate(zip(said, prompt.text, strict=False)) if a != b), 0)
            warnings.warn(
                f"the chat template changes earlier text: it is computed again from {_shown(said[same:])} on",
                stacklevel=2,
            )
        self._said = prompt.text
        return prompt

    def _take(self, part: Pending, prompt: PromptText, text: str, ids: list[int]) -> None:
        self._transcript.add(text, own=False)
        self._said, self._cached = prompt.text + text, ids
        part.text, part.request = text, None


class Forks(list[ProgramState]):
    """Branches of a state; forks["x"] are the values of a variable, branch by branch."""

    def __getitem__(self, key: Any) -> Any:
        return [branch[key] for branch in self] if isinstance(key, str) else super().__getitem__(key)

    def __setitem__(self, index: Any, branch: Any) -> None:
        """`forks[0] += …` puts the branch back; another one is refused."""
        if branch is not self[index]:
            raise TypeError("a branch cannot be replaced")

    def join(self) -> Forks:
        """Run all branches to their end, on an LLM. Raises the error of the first one that failed."""
        runner = self[0].runner
        if isinstance(runner, AsyncRunner):
            raise QuireError("the program runs on an AsyncLLM: await the state or the forks")
        with self.closing():
            runner.run(self._busy)
        return self.check()

    async def wait(self) -> Forks:
        """Run all branches to their end, on an AsyncLLM. Raises the error of the first one that failed."""
        runner = self[0].runner
        if isinstance(runner, SyncRunner):
            raise QuireError("the program runs on an LLM: use run() or join(), without await")
        with self.closing():
            await runner.run(self._busy)
        return self.check()

    def __await__(self) -> Generator[Any, None, Forks]:
        return self.wait().__await__()

    def check(self) -> Forks:
        """Raise the error of the first branch that has one."""
        for branch in self:
            if branch.error is not None:
                raise branch.error
        return self

    def end(self, error: QuireError) -> None:
        """End branches that were to be forked from one that has failed."""
        for branch in self:
            branch.end(error)
            branch.runner.pending.pop(branch, None)
            branch.runner.failed.pop(branch, None)  # the error is that of the other one

    def _busy(self) -> bool:
        return any(branch.busy for branch in self)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """End the branches when the block is left by an error, as when it is cancelled."""
        try:
            yield
        except BaseException:
            for branch in self:
                branch.close()
            raise


class VariableText:
    """The text of a variable as it is generated. Leaving the loop leaves the request running."""

    def __init__(self, state: ProgramState, part: Pending) -> None:
        self._state, self._part, self._sent = state, part, 0

    def __iter__(self) -> Iterator[str]:
        runner = self._state.runner
        if isinstance(runner, AsyncRunner):
            raise QuireError("the program runs on an AsyncLLM: use `async for`")
        while (news := self._news()) is not None:
            if news:
                yield news
            else:
                runner.step()

    async def __aiter__(self) -> AsyncIterator[str]:
        runner = self._state.runner
        if isinstance(runner, SyncRunner):
            raise QuireError("the program runs on an LLM: use `for`")
        while (news := self._news()) is not None:
            if news:
                yield news
            else:
                await runner.step()

    def _news(self) -> str | None:
        """New text, which may be empty; None at the end. Raises the error of the branch."""
        text = self._part.written
        news, self._sent = text[self._sent :], len(text)
        if not news and (self._part.text is not None or not self._state.busy):
            Forks([self._state]).check()
            return None
        return news


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}…")
