"""Grammars of requests, compiled before the requests are admitted."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from quire.engine.api import CompiledStructure, OverloadedError
from quire.parameters import Structure
from quire.types import RequestError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from quire.structured.ask import CompiledGrammar
    from quire.structured.pool import GrammarPool


class GrammarService:
    """Compiles what requests ask for, in a process that is started for the first of them.

    Tenants take turns. What was compiled before is known. `planned` is the process's part of the memory plan: without
    one it is not started, and every grammar is refused.
    """

    def __init__(self, planned: int = 0) -> None:
        self.planned = planned
        self._pool: GrammarPool | None = None
        self._making = threading.Lock()

    async def compile(self, asked: Structure, tenant: str = "") -> CompiledStructure:
        """The grammar of an answer, compiled off the event loop; cancelling this leaves the queue.

        Raises GrammarError naming the field of `asked`, and OverloadedError.
        """
        import asyncio  # a start without a server does not need it

        from quire.structured.pool import CompilerBusyError

        start = time.monotonic()
        try:
            future = self._submit(asked, tenant)
            known = future.done()
            made = await asyncio.wrap_future(future)
        except CompilerBusyError as error:
            raise OverloadedError(str(error), error.retry_after) from None
        return CompiledStructure(made.grammar, made.dropped, 0.0 if known else time.monotonic() - start)

    def compile_now(self, asked: Structure) -> CompiledStructure:
        """The same for a thread that can wait. Raises CompilerBusyError in place of OverloadedError."""
        made = self._submit(asked).result()
        return CompiledStructure(made.grammar, made.dropped)

    @property
    def pid(self) -> int | None:
        """The process that compiles, if there is one now."""
        return None if self._pool is None else self._pool.pid

    def _submit(self, asked: Structure, tenant: str = "") -> Future[CompiledGrammar]:
        from quire.structured.ask import StructuredOutput

        if not isinstance(asked, StructuredOutput):
            raise RequestError("structured", f"{type(asked).__name__} is not a StructuredOutput")
        if not self.planned:
            message = "the memory bound leaves no room for grammars; raise --memory, or set --grammar-memory"
            raise RequestError(asked.kind, message)
        with self._making:
            if self._pool is None:
                from quire.structured.pool import GrammarPool

                self._pool = GrammarPool()
        return self._pool.submit(asked, tenant)

    def close(self) -> None:
        """End what is being compiled."""
        if self._pool is not None:
            self._pool.close()
