"""Runs the lines of a batch: as many at once as fill the engine, each answered as if it had come over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import BinaryIO

from quire.records import dataclass
from quire.server.batches.batch_lines import (
    BatchLine,
    InputOrder,
    InvalidLineError,
    OutputMismatchError,
    answered,
    check_line,
    line_at,
    line_id,
    order_of,
    read_line,
    refused,
    repeated_line,
)
from quire.server.inner_request import InnerAnswer
from quire.util.files import open_regular

_RETRIED = (429, 503)
_MAX_WAIT = 5.0  # seconds between two tries
AskRoute = Callable[[str, bytes], Awaitable[InnerAnswer]]


@dataclass(frozen=True, slots=True)
class LineResult:
    """The output of a line. `answer` is None for one that was not run."""

    number: int
    output: bytes
    answer: InnerAnswer | None

    @property
    def succeeded(self) -> bool:
        """Whether the request was answered with status 200."""
        return self.answer is not None and self.answer.status == 200


class BatchRun:
    """One input, of which some lines may have been run before.

    `ask` answers a request; `places` bounds the requests at once, and may be shared by several runs. `endpoints` are
    the urls that a line may have. `done` names the lines that were run before, and `longest` bounds a line in bytes.
    """

    def __init__(
        self,
        path: Path,
        ask: AskRoute,
        places: asyncio.Semaphore,
        endpoints: Collection[str],
        *,
        longest: int,
        done: Mapping[int, str | None],
    ) -> None:
        self._path, self._ask, self._places = path, ask, places
        self._endpoints, self._longest, self._done = endpoints, longest, done
        self._order: InputOrder | None = None

    async def prepare(self) -> InputOrder:
        """Read the input for the order of its lines.

        Raises OutputMismatchError if what was done before is not of this input, and OSError.
        """
        self._order = await asyncio.to_thread(order_of, self._path, self._longest)
        await asyncio.to_thread(self._check_done, self._order)
        return self._order

    def _check_done(self, order: InputOrder) -> None:
        offsets = dict(zip(order.numbers.tolist(), order.offsets.tolist(), strict=True)) if self._done else {}
        with open_regular(self._path) as file:
            for number, custom_id in self._done.items():
                found = None
                if number in offsets:
                    found = _id_of(line_at(file, offsets[number], self._longest), number, self._endpoints)
                if number not in offsets or found != custom_id:
                    raise OutputMismatchError(
                        f"the output has a line {line_id(number)} of {custom_id!r}, the input has {found!r} there: it "
                        "is the output of another input"
                    )

    async def run(self, write: Callable[[LineResult], None]) -> None:
        """Run all lines that were not run before; `write` gets each result when it is there. When this is cancelled,
        requests in progress end without a result. Raises what `write` raises, and OSError.
        """
        order = self._order if self._order is not None else await self.prepare()
        try:
            await self._run_all(order, write)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _run_all(self, order: InputOrder, write: Callable[[LineResult], None]) -> None:
        todo = zip(order.offsets.tolist(), order.numbers.tolist(), strict=True)
        with open_regular(self._path) as file:
            async with asyncio.TaskGroup() as group:
                for offset, number in todo:
                    if number in self._done:
                        continue
                    await self._places.acquire()
                    line = group.create_task(self._run_line(file, offset, number, write))
                    line.add_done_callback(lambda _: self._places.release())

    async def _run_line(
        self, file: BinaryIO, offset: int, number: int, write: Callable[[LineResult], None]
    ) -> None:
        write(await self._result(line_at(file, offset, self._longest), number))

    async def _result(self, data: bytes, number: int) -> LineResult:
        try:
            line = check_line(data, number, self._endpoints, self._longest)
            if self._order is not None and number in self._order.repeated:
                raise repeated_line(number, line.custom_id)
        except InvalidLineError as invalid:
            return LineResult(number, refused(number, invalid.custom_id, invalid.error), None)
        answer = await self._answer(line)
        return LineResult(number, answered(number, line.custom_id, answer), answer)

    async def _answer(self, line: BatchLine) -> InnerAnswer:
        """Ask until the server has room, and an engine."""
        while True:
            answer = await self._ask(line.url, bytes(line.body))
            if answer.status not in _RETRIED or answer.retry_after is None:
                return answer
            await asyncio.sleep(min(answer.retry_after, _MAX_WAIT))


def _id_of(data: bytes, number: int, endpoints: Collection[str]) -> str | None:
    try:
        return read_line(data, number, endpoints).custom_id
    except InvalidLineError as invalid:
        return invalid.custom_id
