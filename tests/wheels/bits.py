"""Prints a hash of the logits of each checkpoint, number format and instruction set here, and of what a sampler draws.

PYTHONPATH=tests PYTHON tests/wheels/bits.py FOLDER…

PYTHON needs Quire and nothing else, so it can be the interpreter of an environment that a wheel was installed into.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np

from helpers.group_codes import codes_of
from helpers.stepper import Stepper
from quire import _native
from quire.executor.base import Limits
from quire.executor.native import NativeExecutor
from quire.executor.sampler import HostSampler
from quire.loader import Checkpoint, LoadRules, load
from quire.program.formats import GROUP_SIZES, Groups, NumberFormats, OffsetKind, ScaleKind, WeightFormat
from quire.program.lower import lower
from quire.program.ops.linear import MAXIMA_COLS
from quire.program.program import Program
from quire.spec.facts import read_model
from quire.types import NewSeq, SamplingParams

LENGTH = 45
LIMITS = Limits(max_tokens=64, max_rows=5, max_logit_rows=8, max_len=LENGTH, num_blocks=40)
STEPS = [{0: 33}, {0: 1, 1: 9}, {0: 1, 1: 16, 2: 30}, *[{0: 1, 1: 1, 2: 1}] * 6]
I8_GROUPS, I4_GROUPS = WeightFormat("i8", Groups(128, "bf16", rotated=True)), WeightFormat("i4", Groups())
FLOATS = [NumberFormats("f32", "f32"), NumberFormats("bf16", "bf16"), NumberFormats("f16", "f16")]
COMMON = [*FLOATS, *(NumberFormats("bf16", "bf16", form, form) for form in (I8_GROUPS, I4_GROUPS))]


def every_format() -> Iterator[NumberFormats]:
    """Float and quantized weights and caches, and each kind of groups."""
    yield from FLOATS
    yield NumberFormats("bf16", "i8", I8_GROUPS, I8_GROUPS)
    kinds = (GROUP_SIZES, get_args(ScaleKind), get_args(OffsetKind), (False, True), ("i4", "i8"))
    for size, scales, offsets, rotated, dtype in itertools.product(*kinds):
        try:
            form = WeightFormat(dtype, Groups(size, scales, offsets, rotated))
        except ValueError:  # kinds that do not go together
            continue
        yield NumberFormats("bf16", "bf16", form, form)


def logits(folder: Path, formats: NumberFormats, isa: str) -> bytes:
    spec = read_model(folder).spec
    program = lower(spec, formats)
    executor = NativeExecutor(program, threads=1, isa=isa)
    if folder.name == "formats":  # of most kinds of groups only quantized checkpoints have any
        fill(program, executor)
    else:
        with Checkpoint(folder) as source:
            load(program.params, source, executor, rules=LoadRules.of(spec))
    stepper, random = Stepper(program, LIMITS, seed=1), np.random.default_rng(0)
    executor.bind(LIMITS, stepper.arrays)
    for _ in range(3):
        stepper.add(random.integers(0, program.vocab, LENGTH).tolist())
    found = [x.tobytes() for step in STEPS for _, x in sorted(stepper.step(executor, step).items())]
    executor.close()
    return b"".join(found)


def fill(program: Program, executor: NativeExecutor) -> None:
    for seed, param in enumerate(program.params):
        if param.groups is not None:
            executor.put_codes(param, 0, codes_of(param, seed))
            continue
        offset = 0
        for part in param.parts:
            values = np.random.default_rng(seed).standard_normal(part.shape).astype(np.float32)
            executor.put(param, offset, values, "F32")
            offset += part.rows


def drawn(isa: str, vocab: int = 50_000, rows: int = 6) -> bytes:
    """Tokens and logprobs of flat and peaked logits, row by row with other parameters."""
    random = np.random.default_rng(0)
    sampler = HostSampler(vocab, rows, isa)
    for slot in range(rows):
        params = SamplingParams(
            temperature=0.3 * slot, top_k=(0, 50, 5000)[slot % 3], top_p=(1.0, 0.9)[slot % 2], logprobs=4,
            min_p=(0.0, 0.01)[slot % 2], repetition_penalty=1.0 + 0.1 * slot, presence_penalty=0.2 * slot,
        )  # fmt: skip
        sampler.add(slot, NewSeq(slot, random.integers(0, vocab, 99).tolist(), 99, params, 0, slot, ()))
    found = []
    for position in range(99, 120):
        x = (random.standard_normal((rows, vocab)) * (1 + position % 4)).astype(np.float32)
        maxima = np.ascontiguousarray(
            np.pad(x, ((0, 0), (0, -vocab % MAXIMA_COLS)), constant_values=-np.inf)
            .reshape(rows, -1, MAXIMA_COLS)
            .max(axis=2)
        )
        slots, positions = np.arange(rows, dtype=np.int32), np.full(rows, position, np.int32)
        sampled = sampler.sample({"logits": x, "maxima": maxima}, slots, positions)
        found += [
            sampled.token_ids.tobytes(),
            *(t.values.tobytes() for t in sampled.logprobs if t is not None),
        ]
    return b"".join(found)


def main() -> None:
    found = {}
    for isa in _native.supported_isas():
        found[f"{isa}, sampler"] = hashlib.sha256(drawn(isa)).hexdigest()
        for folder in map(Path, sys.argv[1:]):
            for formats in every_format() if folder.name == "formats" else COMMON:
                made = logits(folder, formats, isa)
                found[f"{isa}, {folder.name}, {formats}"] = hashlib.sha256(made).hexdigest()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
