"""The four ways a sequence can come by its logits, and a loop that runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from helpers.backends import Backend
from helpers.checkpoints import LENGTH, random_tokens
from helpers.stepper import Stepper
from quire.executor.base import Limits
from quire.program.formats import NumberFormats

Logits = npt.NDArray[np.float32]
Steps = Sequence[Mapping[int, int]]  # for each step, new tokens of each sequence
LIMITS = Limits(max_tokens=64, max_rows=5, max_logit_rows=8, max_len=LENGTH, num_blocks=40)

WHOLE: Steps = [{0: LENGTH}]
CHUNKS: Steps = [{0: n} for n in (7, 1, 16, 15, 6)]
DECODE: Steps = [{0: 5}] + [{0: 1}] * (LENGTH - 5)
# Sequences start, prefill in chunks and decode side by side.
MIXED: Steps = [
    {0: 20},
    {0: 1, 1: 9},
    {0: 1, 1: 16, 2: 30},
    *[{0: 1, 1: 1, 2: 1}] * 4,
    {0: 1, 2: 1, 3: 17},
    {0: 1, 1: 7, 2: 1, 3: 28},
    *[{0: 1, 1: 1, 2: 1}] * 5,
    {1: 2, 2: 3},
]


def run_steps(folder: Path, backend: Backend, steps: Steps, formats: NumberFormats) -> list[Logits]:
    """Logits [tokens run, vocabulary] of each sequence; sequence i is random_tokens(i)."""
    executor = backend.load(folder, formats)
    stepper = Stepper(executor.program, LIMITS, seed=1)
    executor.bind(LIMITS, stepper.arrays)
    found: list[list[Logits]] = []
    for counts in steps:
        while len(found) <= max(counts):
            stepper.add(random_tokens(len(found)))
            found.append([])
        for number, logits in stepper.step(executor, counts).items():
            found[number].append(logits)
    executor.close()
    return [np.concatenate(pieces) for pieces in found]
