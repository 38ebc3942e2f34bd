"""Hardware as a table, each row with its source; and the way a user names several devices: h100:8."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from quire.records import dataclass
from quire.util.likeness import did_you_mean

_FILE = Path(__file__).with_name("devices.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator or host. Gigabytes are 1e9 bytes; `tflops` are dense, by number format.

    `on_chip`: its memory is SRAM, and a model is spread over as many devices as hold it.
    """

    name: str
    title: str
    memory_gb: float
    bandwidth_gb_s: float
    tflops: Mapping[str, float]
    source: str
    link_gb_s: float = 0.0
    watts: float = 0.0
    on_chip: bool = False

    def ridge(self, number_format: str = "bf16") -> float | None:
        """FLOPs for each byte from memory at which arithmetic and bandwidth take equally long."""
        peak = self.tflops.get(number_format)
        return None if peak is None else peak * 1000 / self.bandwidth_gb_s


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text())


def links() -> dict[str, float]:
    """GB/s of links between devices, hosts and slower memory."""
    return dict(_table()["links"])


@cache
def devices() -> dict[str, Device]:
    """Every device of the table, by name."""
    return {name: Device(name=name, **row) for name, row in _table().items() if name != "links"}


def device(name: str) -> Device:
    """The device of a name. Raises ValueError for an unknown one."""
    found = devices().get(name.lower())
    if found is None:
        raise ValueError(
            f"device: {name!r} is not one of {', '.join(devices())}{did_you_mean(name.lower(), devices())}"
        )
    return found


def counted(text: str) -> tuple[Device, int]:
    """A device and how many of it: "h100" or "h100:8". Raises ValueError."""
    name, _, count = text.partition(":")
    if count and not (count.isascii() and count.isdigit() and 1 <= int(count) <= 65536):
        raise ValueError(f"device: {text!r}: the number behind the colon must be from 1 to 65536")
    return device(name), int(count or 1)
