"""Adapters over ranks: what the leading rank puts into slots of the others, as frames of a socket.

A frame is a line of JSON and the bytes of its arrays. Ranks read them in a thread of their own, while steps run. Only
`settle` is answered, with the first thing that went wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from quire.executor.base import F32, AdapterSlots
from quire.program.program import Program
from quire.program.tensors import AdapterShape
from quire.quant.floats import FloatsOrBits

_DTYPES = {name: np.dtype(name) for name in ("float32", "uint16")}


class RemoteSlots:
    """The slots of another rank, which computes `program`; see AdapterSlots. `send` writes to its socket."""

    def __init__(self, program: Program, send: Callable[[bytes | memoryview], object]) -> None:
        self.program = program
        self._send = send
        self._answers: SimpleQueue[str] = SimpleQueue()
        self._lost = ""

    def open_adapter(self, slot: int, shape: AdapterShape) -> None:
        """Give a slot the pages for an adapter."""
        self._say({"act": "open", "slot": slot, "shape": asdict(shape)})

    def put_adapter(
        self, slot: int, name: str, part: int, a: FloatsOrBits, b: FloatsOrBits, gain: F32 | None = None,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Fill a part of a slot."""
        arrays = (a, b) if gain is None else (a, b, gain)
        self._say({"act": "put", "slot": slot, "name": name, "part": part, "scale": scale}, arrays)

    def put_own_rows(self, slot: int, name: str, first: int, rows: F32) -> None:
        """Fill rows of a parameter in a slot."""
        self._say({"act": "own", "slot": slot, "name": name, "first": first}, (rows,))

    def clear_adapter(self, slot: int) -> None:
        """Empty a slot."""
        self._say({"act": "clear", "slot": slot})

    def settle_adapters(self) -> None:
        """Wait until the rank has done all of this."""
        self._say({"act": "settle"})
        if error := self._answers.get() or self._lost:
            raise RuntimeError(error)

    def answer(self, error: str) -> None:
        """What the rank says to `settle_adapters`: what went wrong, if anything."""
        self._answers.put(error)

    def lose(self, reason: str) -> None:
        """The rank has ended: nothing is waited for any more."""
        self._lost = reason
        self._answers.put(reason)

    def _say(self, frame: dict[str, Any], arrays: Sequence[npt.NDArray[Any]] = ()) -> None:
        if self._lost:
            raise RuntimeError(self._lost)
        whole = [np.ascontiguousarray(each) for each in arrays]
        frame["arrays"] = [(str(each.dtype), each.shape) for each in whole]
        try:
            self._send(json.dumps(frame).encode() + b"\n")
            for each in whole:
                self._send(each.data.cast("B"))
        except OSError as error:
            raise RuntimeError(self._lost or f"a rank does not take adapters: {error}") from None


def obey_frames(frames: BinaryIO, slots: Callable[[], AdapterSlots], answer: Callable[[str], None]) -> None:
    """Do what frames say until they end. `slots` waits until there are some; `answer` answers `settle`."""
    error = ""
    while line := frames.readline():
        frame = json.loads(line)
        arrays = [_array(frames, *each) for each in frame["arrays"]]
        if frame["act"] == "settle":
            answer(error)
            error = ""
            continue
        if frame["act"] == "open":  # what went wrong with an adapter that was given up is of no other
            error = ""
        try:
            _obey(slots(), frame, arrays)
        except (ValueError, RuntimeError, MemoryError) as failed:
            error = error or str(failed) or type(failed).__name__


def _array(frames: BinaryIO, dtype: str, shape: list[int]) -> npt.NDArray[Any]:
    array = np.empty(shape, _DTYPES[dtype])
    at, view = 0, array.data.cast("B")
    while at < len(view):
        got = frames.readinto(view[at:])  # type: ignore[attr-defined]  # of a buffered reader
        if not got:
            raise EOFError("the leading rank has ended")
        at += got
    return array


def _obey(slots: AdapterSlots, frame: dict[str, Any], arrays: list[npt.NDArray[Any]]) -> None:
    slot = frame["slot"]
    match frame["act"]:
        case "open":
            parts = {
                name: [(rank, gains) for rank, gains in each]
                for name, each in frame["shape"]["parts"].items()
            }
            slots.open_adapter(slot, AdapterShape(parts, frame["shape"]["own"]))
        case "put":
            a, b, *gain = arrays
            slots.put_adapter(
                slot, frame["name"], frame["part"], a, b, gain[0] if gain else None, frame["scale"]
            )
        case "own":
            slots.put_own_rows(slot, frame["name"], frame["first"], *arrays)
        case "clear":
            slots.clear_adapter(slot)
        case _:
            raise ValueError(f"{frame['act']}: no frame for adapters")
