"""Functions as generation programs: run once, or on many inputs at a time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any, overload

from quire.lang.branch_runners import AsyncRunner, SyncRunner
from quire.lang.program_state import Forks, ProgramState

if TYPE_CHECKING:
    from quire.llm import LLM
    from quire.llm.asynchronous import AsyncLLM


class GenerationProgram:
    """A function of a state and of its inputs. `options` are those of the ProgramState that it gets.

    Called with a state, it is a part of another program. On an AsyncLLM, the function may be a coroutine function.
    """

    def __init__(self, body: Callable[..., Any], **options: Any) -> None:
        functools.update_wrapper(self, body)
        self._body, self._options = body, options

    def __call__(self, state: ProgramState, *args: Any, **inputs: Any) -> Any:
        return self._body(state, *args, **inputs)

    def with_options(self, **options: Any) -> GenerationProgram:
        """The same program with other options of its state."""
        return GenerationProgram(self._body, **{**self._options, **options})

    @overload
    def run(self, llm: LLM, *args: Any, **inputs: Any) -> ProgramState: ...
    @overload
    def run(self, llm: AsyncLLM, *args: Any, **inputs: Any) -> Coroutine[Any, Any, ProgramState]: ...
    def run(self, llm: LLM | AsyncLLM, *args: Any, **inputs: Any) -> Any:
        """Run the program to its end and return its state; on an AsyncLLM, a coroutine of that.

        Raises the first error of a branch that the program has not looked at. When it ends early, as by Ctrl-C or
        because it is cancelled, its requests are aborted.
        """
        state = ProgramState(llm, **self._options)
        whole = self._run_async if isinstance(state.runner, AsyncRunner) else self._run
        return whole(state, args, inputs)

    def run_batch(
        self, llm: LLM, inputs: Sequence[Mapping[str, Any]], *, at_once: int = 32
    ) -> list[ProgramState]:
        """Run the program on several inputs, `at_once` at a time, each in a thread; states are in the order of inputs.

        If one fails, the others are ended and its error is raised. On an AsyncLLM, use asyncio.gather.
        """
        states = [ProgramState(llm, **self._options) for _ in inputs]
        with ThreadPoolExecutor(at_once, "quire-program") as pool:
            runs = [
                pool.submit(self._run, *each) for each in zip(states, [()] * len(states), inputs, strict=True)
            ]
            try:
                for run in as_completed(runs):
                    run.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for state in states:
                    if isinstance(state.runner, SyncRunner):
                        state.runner.stopped = True
                raise
        return states

    def _run(self, state: ProgramState, args: Sequence[Any], inputs: Mapping[str, Any]) -> ProgramState:
        with Forks([state]).closing():
            state.returned = self._body(state, *args, **inputs)
            state.unfinished.join()
        return state

    async def _run_async(
        self, state: ProgramState, args: Sequence[Any], inputs: Mapping[str, Any]
    ) -> ProgramState:
        with Forks([state]).closing():
            returned = self._body(state, *args, **inputs)
            state.returned = await returned if inspect.iscoroutine(returned) else returned
            await state.unfinished
        return state


@overload
def function(body: Callable[..., Any], **options: Any) -> GenerationProgram: ...
@overload
def function(**options: Any) -> Callable[[Callable[..., Any]], GenerationProgram]: ...
def function(body: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Make a function of a state a generation program: `@function`, or `@function(seed=1, temperature=0)`."""
    if body is None:
        return lambda body: GenerationProgram(body, **options)
    return GenerationProgram(body, **options)
