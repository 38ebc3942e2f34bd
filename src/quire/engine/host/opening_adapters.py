"""Adapters that are read at the other end's request, while steps run."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from quire.engine.host.channel import Channel
from quire.engine.host.messages import AdapterOpened, ForgetAdapter, OpenAdapter
from quire.types import QuireError

if TYPE_CHECKING:
    from quire.lora.adapter_service import AdapterService, Checked, Open

LOOK_SECONDS = 0.001  # between two looks at adapters that are being read, while there is no step to run


class OpeningAdapters:
    """Obeys commands about adapters. `service` is None for an engine without them."""

    def __init__(self, service: AdapterService | None, channel: Channel) -> None:
        self._service, self._channel = service, channel
        self._reading: dict[int, tuple[Future[Checked], Open]] = {}

    def obey(self, command: OpenAdapter | ForgetAdapter) -> None:
        """Begin to read an adapter, or forget one."""
        service = self._service
        if service is None:
            if isinstance(command, OpenAdapter):
                self._answer(
                    AdapterOpened(command.number, error="this engine has no adapters: use enable_lora")
                )
            return
        if isinstance(command, ForgetAdapter):
            service.forget(command.digest)
            return
        opener = (
            service.mixed(command.mixed)
            if command.mixed
            else service.opener(command.name, command.path, command.root)
        )
        if command.digest:
            service.know(command.digest, opener)
        else:
            self._reading[command.number] = service.check(opener), opener

    def settle(self, due: float | None) -> float | None:
        """Answer for what has been read; seconds until the next look, not above `due`."""
        for number in [number for number, (future, _) in self._reading.items() if future.done()]:
            future, opener = self._reading.pop(number)
            error = future.exception()
            if error is None:
                assert self._service is not None
                version = future.result()
                self._service.know(version.digest, opener)
                self._answer(AdapterOpened(number, version.digest, version.rank))
            elif isinstance(error, QuireError | ValueError | OSError | MemoryError):
                self._answer(AdapterOpened(number, error=str(error) or type(error).__name__))
            else:
                raise error
        if not self._reading:
            return due
        return LOOK_SECONDS if due is None else min(due, LOOK_SECONDS)

    def _answer(self, report: AdapterOpened) -> None:
        self._channel.send(report)
