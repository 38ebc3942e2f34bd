"""Pulling models into the store for administrators: in a process of its own, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator
from typing import Any

from quire.server.errors import ApiError, shorten

PROCESS_BYTES = 128 * 2**20  # of the process and its four connections: a bound, not measured
_MOST_SHOWN = 500  # characters of what a hub says


class Pulls:
    """`limit`: bytes that the store may have."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._turn = asyncio.Lock()

    async def pull(self, reference: str) -> AsyncGenerator[tuple[int, int] | str, None]:
        """Pull a model; yields progress as (done, total) in bytes, and texts. Closing the iterator stops it; what has
        arrived is kept for the next time. Raises ApiError with what went wrong.
        """
        async with self._turn:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "quire.store.pull_process", reference, str(self._limit),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            try:
                assert process.stdout is not None
                end: dict[str, Any] = {"error": "the process that pulls has ended", "status": 500}
                async for line in process.stdout:
                    said = json.loads(line)
                    if isinstance(said, dict):
                        end = said
                    else:
                        yield said if isinstance(said, str) else (int(said[0]), int(said[1]))
                if "error" in end:
                    message = shorten(str(end["error"]), _MOST_SHOWN)
                    raise ApiError(int(end["status"]), message, code="pull_failed", param="model")
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
