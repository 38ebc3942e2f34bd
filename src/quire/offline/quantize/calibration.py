"""The calibration text as windows of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quire.records import dataclass

BUILTIN = "builtin"
MAX_TEXT_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Calibration:
    """Windows of equal length; `digest` is the SHA-256 of their tokens, `name` that of the text."""

    name: str
    windows: tuple[tuple[int, ...], ...]
    digest: str

    @property
    def longest(self) -> int:
        return max(map(len, self.windows), default=1)


def read_text(name: str) -> str:
    """The text of a file, or the one that is built in. Raises ValueError for a file that is no such text."""
    if name == BUILTIN:
        return (Path(__file__).parent / "calibration.txt").read_text(encoding="utf-8")
    path = Path(name)
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise ValueError(f"calibration: {name} exceeds the limit of {MAX_TEXT_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"calibration: {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"calibration: {name} is not UTF-8: {error}") from error


def windows_of(name: str, tokens: Sequence[int], samples: int, length: int, seed: int) -> Calibration:
    """Up to `samples` windows of `length` tokens, drawn without repetition if there are more.

    Raises ValueError if the text is shorter than a window.
    """
    count = len(tokens) // length
    if count == 0:
        raise ValueError(
            f"calibration: {name} has {len(tokens)} tokens, fewer than a window of {length}: use a longer text or a "
            "smaller --calibration-length"
        )
    chosen = np.arange(count)
    if count > samples:
        chosen = np.sort(np.random.default_rng(seed).choice(count, samples, replace=False))
    windows = tuple(tuple(tokens[at * length : (at + 1) * length]) for at in map(int, chosen))
    sha256 = hashlib.sha256(np.array(windows, "<i4").tobytes()).hexdigest()
    return Calibration(name, windows, sha256)
