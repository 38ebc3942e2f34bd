"""The text of outputs that requests go on behind, made in threads before these requests are launched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from quire.engine.api import EngineUnavailableError
from quire.engine.front.stream import LiveRequest
from quire.engine.front.text_service import CHARS_PER_TOKEN, TextService
from quire.types import QuireError


class GivenTexts:
    """Launches requests: one without such an output at once, the others when its text is there to be read.

    A request that is ended meanwhile is not launched; one whose text cannot be made ends with an error.
    """

    def __init__(
        self, launch: Callable[[LiveRequest], None], end: Callable[[LiveRequest, QuireError], None]
    ) -> None:
        self._launch, self._end = launch, end
        self._running: set[asyncio.Task[None]] = set()

    def launch(self, live: LiveRequest, texts: TextService) -> None:
        """For a request that was admitted."""
        if not live.request.given:
            self._launch(live)
            return
        task = asyncio.create_task(self._read(live, texts))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _read(self, live: LiveRequest, texts: TextService) -> None:
        request, following = live.request, live.following
        size = CHARS_PER_TOKEN * sum(map(len, request.given))
        try:
            deltas = await texts.apart("given", size, lambda: following.given(request))
        except QuireError as error:
            self._end(live, error)
            return
        except Exception as error:
            self._end(live, EngineUnavailableError(f"the output to go on behind cannot be read: {error!r}"))
            return
        if not live.output.finished:
            for delta in deltas:
                live.keep(delta, time.monotonic())
            self._launch(live)
