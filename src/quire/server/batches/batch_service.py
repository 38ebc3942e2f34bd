"""Runs the batches of a server, those of each API key one after the other, behind the requests of clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from quire.config.serving import ServingConfig
from quire.server.batches.batch_lines import (
    MAX_LINE,
    InputOrder,
    InvalidLineError,
    LineError,
    OutputMismatchError,
    check_line,
    input_errors,
    line_at,
    order_of,
    refused,
    resume_output,
)
from quire.server.batches.batch_run import BatchRun, LineResult
from quire.server.batches.batch_states import ENDED, BatchBody, BatchStates, Metadata
from quire.server.batches.file_store import FileStore
from quire.server.errors import ApiError
from quire.server.inner_request import Application, InnerAnswer, ask_inner
from quire.server.logs import log
from quire.server.request_memory import RequestMemory
from quire.util.files import open_regular

MAX_REQUESTS = 50_000  # of a batch
_MAX_ERRORS = 50  # of an input that are reported
_AT_ONCE = 64  # requests of all batches: the default of --max-num-seqs
_PAUSE = 0.05  # seconds


class BatchService:
    """The files and batches of a server. It belongs to the event loop that calls `start`.

    Batches whose process was killed go on where they were: every result is a whole line on disk before it counts.
    """

    def __init__(
        self,
        config: ServingConfig,
        application: Application,
        memory: RequestMemory,
        endpoints: Collection[str],
    ) -> None:
        assert config.files_dir is not None
        self.files = FileStore(Path(config.files_dir), config.files_size, config.files_expiry)
        self.states = BatchStates(self.files)
        self.endpoints = frozenset(endpoints)
        self._application, self._memory = application, memory
        self._longest = min(MAX_LINE, config.max_body_bytes)
        self._places = asyncio.Semaphore(max(1, min(_AT_ONCE, config.max_num_queued_reqs // 2)))
        self._asking = 0
        self._queues: dict[str, list[str]] = {}  # by domain: batches that have not ended
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by domain
        self._runs: dict[str, asyncio.Task[None]] = {}  # by batch: its lines that are being run

    def start(self) -> None:
        """Go on with the batches that have not ended."""
        for domain, name in self.states.unfinished():
            self._enqueue(domain, name)

    async def stop(self) -> None:
        """Stop all batches where they are."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.files.close()

    def create(
        self, domain: str, endpoint: str, source: str, window: tuple[str, float], metadata: Metadata | None,
        output_seconds: float | None,
    ) -> BatchBody:  # fmt: skip
        """A new batch, which runs when those before it have ended. Raises ApiError."""
        body = self.states.create(domain, endpoint, source, window, metadata, output_seconds)
        self._enqueue(domain, body.id)
        return body

    def cancel(self, domain: str, name: str) -> BatchBody:
        """End a batch early; its results so far become files. Raises ApiError 404, or 409 when it has ended."""
        body = self.states.get(domain, name)
        if body.status in ENDED:
            raise ApiError(409, f"{name}: has ended: {body.status}", code="batch_ended")
        if body.status in {"validating", "in_progress"}:
            body.status, body.cancelling_at = "cancelling", int(time.time())
            self.states.save(domain, name)
            if run := self._runs.get(name):
                run.cancel()
        return body

    def _enqueue(self, domain: str, name: str) -> None:
        self._queues.setdefault(domain, []).append(name)
        if domain not in self._tasks:
            task = self._tasks[domain] = asyncio.get_running_loop().create_task(self._work(domain))
            task.add_done_callback(_log_failure)

    async def _work(self, domain: str) -> None:
        queue = self._queues[domain]
        try:
            while queue:
                try:
                    await self._process(domain, queue[0])
                except (OSError, OutputMismatchError) as error:
                    log.error("batch %s: %s", queue[0], error)
                    message = "the files of the batch cannot be read or written; the log of the server has the reason"
                    self.states.fail(domain, queue[0], [LineError("storage_error", message)])
                queue.pop(0)
        finally:
            del self._tasks[domain]

    async def _process(self, domain: str, name: str) -> None:
        """Bring a batch to its end, wherever it is."""
        body = self.states.get(domain, name)
        if body.status == "finalizing":
            self.states.finish(domain, name)
            return
        source = self.files.path(domain, body.input_file_id)
        order = await asyncio.to_thread(order_of, source, self._longest)
        if body.status == "validating" and not await self._validated(domain, body, source, order):
            return
        ending = "cancelled"
        if body.status == "in_progress":
            ending = await self._run(domain, body, source)
        if body.status == "cancelling":
            ending = "cancelled"
        if ending == "expired":
            await asyncio.to_thread(self._refuse_rest, domain, body, source, order)
        self.states.finalize(domain, name, ending)  # type: ignore[arg-type]

    async def _validated(self, domain: str, body: BatchBody, source: Path, order: InputOrder) -> bool:
        """Check the input; whether the batch may run."""
        longest = self._longest
        if not len(order):
            errors = [LineError("empty_file", "the input file has no requests")]
        elif len(order) > MAX_REQUESTS:
            message = f"the input file has {len(order)} requests, over the limit of {MAX_REQUESTS}"
            errors = [LineError("too_many_tasks", message)]
        else:
            errors = await asyncio.to_thread(
                input_errors, source, {body.endpoint}, order, longest, _MAX_ERRORS
            )
        if body.status != "validating":  # cancelled meanwhile
            return True
        if errors:
            self.states.fail(domain, body.id, errors)
            return False
        body.status, body.in_progress_at = "in_progress", int(time.time())
        body.request_counts.total = len(order)
        self.states.save(domain, body.id)
        return True

    async def _run(self, domain: str, body: BatchBody, source: Path) -> str:
        """Run the lines that are left; returns how the batch ends."""
        output, errors = (self.states.path(domain, body.id, suffix) for suffix in ("output", "errors"))
        succeeded, failed = await asyncio.to_thread(lambda: (resume_output(output), resume_output(errors)))
        body.request_counts.completed, body.request_counts.failed = len(succeeded), len(failed)

        async def ask(path: str, data: bytes) -> InnerAnswer:
            return await self._ask(path, data, "" if domain == self.files.domain("") else domain)

        with _appended(output) as good, _appended(errors) as bad:

            def write(result: LineResult) -> None:
                (good if result.succeeded else bad).write(result.output)
                body.request_counts.completed += result.succeeded
                body.request_counts.failed += not result.succeeded

            lines = BatchRun(
                source, ask, self._places, {body.endpoint}, longest=self._longest,
                done=succeeded | failed,
            )  # fmt: skip
            run = self._runs[body.id] = asyncio.ensure_future(lines.run(write))
            try:
                async with asyncio.timeout(body.expires_at - time.time()):
                    await run
            except TimeoutError:
                return "expired"
            except asyncio.CancelledError:
                if body.status != "cancelling":  # the server stops
                    raise
                return "cancelled"
            finally:
                run.cancel()
                await asyncio.gather(run, return_exceptions=True)
                del self._runs[body.id]
        return "completed"

    async def _ask(self, path: str, data: bytes, tenant: str) -> InnerAnswer:
        """Answer a request when answers hold less than half of their memory: clients shall not wait for batches."""
        answers = self._memory.answers
        while self._asking and answers.used * 2 > answers.limit:
            await asyncio.sleep(_PAUSE)
        self._asking += 1
        try:
            return await ask_inner(self._application, self._memory, path, data, tenant)
        finally:
            self._asking -= 1

    def _refuse_rest(self, domain: str, body: BatchBody, source: Path, order: InputOrder) -> None:
        """Write an error for each line that was not run in time."""
        output, errors = (self.states.path(domain, body.id, suffix) for suffix in ("output", "errors"))
        done = resume_output(output) | resume_output(errors)
        longest = self._longest
        error = LineError(
            "batch_expired", "This request could not be executed before the completion window expired."
        )
        with open_regular(source) as file, _appended(errors) as bad:
            for offset, number in zip(order.offsets.tolist(), order.numbers.tolist(), strict=True):
                if number in done:
                    continue
                try:
                    custom_id = check_line(
                        line_at(file, offset, longest), number, {body.endpoint}, longest
                    ).custom_id
                except InvalidLineError as invalid:
                    custom_id = invalid.custom_id or ""
                bad.write(refused(number, custom_id, error))
                body.request_counts.failed += 1


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("batches stopped; the next start of the server goes on with them", exc_info=error)


@contextmanager
def _appended(path: Path) -> Iterator[BinaryIO]:
    """A file to which each write appends at once."""
    with path.open("ab", buffering=0) as file:
        yield file
