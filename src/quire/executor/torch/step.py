"""A step's arrays, checked and brought to the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.executor.base import I32, Limits, StepArrays
from quire.executor.torch.cache import CacheRow, Location
from quire.program.program import Program
from quire.records import dataclass


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """What the ops of one step share; `locations` and `rows` are by cache group."""

    token_ids: Tensor
    positions: Tensor
    locations: tuple[Location, ...]
    rows: tuple[tuple[CacheRow, ...], ...]
    adapters: Tensor  # the slot of each token's adapter, or -1


class StepReader:
    """Reads the bound arrays. Raises ValueError for steps that no executor could run."""

    def __init__(self, program: Program, limits: Limits, arrays: StepArrays, device: torch.device) -> None:
        self.limits, self.arrays, self.device = limits, arrays, device
        self.vocab = program.ids or program.vocab
        self.windows = [group.window for group in program.cache_groups]

    def read(self, num_tokens: int, num_rows: int) -> DeviceStep:
        """The first num_tokens and num_rows of the arrays."""
        _within("num_tokens", num_tokens, 1, self.limits.max_tokens)
        _within("num_rows", num_rows, 1, self.limits.lines)
        token_ids, positions = self.arrays.token_ids[:num_tokens], self.arrays.positions[:num_tokens]
        starts, slots = self.arrays.query_start[: num_rows + 1], self.arrays.slots[:num_rows]
        if starts[0] != 0 or starts[-1] != num_tokens or (np.diff(starts) < 1).any():
            raise ValueError(
                f"query_start {starts.tolist()} does not cut {num_tokens} tokens into {num_rows} rows"
            )
        _inside("token_ids", token_ids, self.vocab)
        _inside("positions", positions, self.limits.max_len)
        _inside("slots", slots, self.limits.lines)
        adapters = self.arrays.adapters[slots]
        _inside("adapters", adapters + 1, self.limits.max_loras + 1)
        groups = [self._group(g, positions, starts, slots) for g in range(len(self.windows))]
        return DeviceStep(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(positions),
            locations=tuple(self._location(g, positions, groups[g][0]) for g in range(len(self.windows))),
            rows=tuple(rows for _, rows in groups),
            adapters=self._tensor(np.repeat(adapters, np.diff(starts))),
        )

    def logit_rows(self, num_logit_rows: int, num_tokens: int) -> Tensor:
        """The first num_logit_rows rows of the step whose logits are wanted."""
        _within("num_logit_rows", num_logit_rows, 0, self.limits.max_logit_rows)
        rows = self.arrays.logit_rows[:num_logit_rows]
        _inside("logit_rows", rows, num_tokens)
        return self._tensor(rows)

    def _group(self, group: int, positions: I32, starts: I32, slots: I32) -> tuple[I32, tuple[CacheRow, ...]]:
        """The block of each of a group's tokens, and each row's line of its block table."""
        size, window = self.limits.block_size, self.windows[group]
        rows: list[CacheRow] = []
        block_ids = np.empty_like(positions)
        for start, stop, slot in zip(starts[:-1].tolist(), starts[1:].tolist(), slots.tolist(), strict=True):
            blocks, at = self.arrays.block_tables[group][slot], positions[start:stop]
            first = max(0, int(at.min()) - window + 1) if window else 0
            _inside(f"block_tables[{group}][{slot}]", blocks[first // size : int(at.max()) // size + 1],
                    self.limits.blocks)  # fmt: skip
            block_ids[start:stop] = blocks[at // size]
            rows.append(CacheRow(start, stop, self._tensor(blocks)))
        return block_ids, tuple(rows)

    def _location(self, group: int, positions: I32, block_ids: I32) -> Location:
        """Where a group's tokens are written, those that branches have too among them."""
        size, table = self.limits.block_size, self.arrays.block_tables[group]
        tokens, blocks = [np.arange(len(positions), dtype=np.int32)], [block_ids]
        for begin, end, line, _ in self.arrays.mirrors:
            if not end:
                break
            tokens.append(tokens[0][begin:end])
            blocks.append(table[line][positions[begin:end] // size])
        if len(blocks) == 1:
            return Location(self._tensor(block_ids), self._tensor(positions % size))
        of = np.concatenate(tokens)
        return Location(
            self._tensor(np.concatenate(blocks)), self._tensor(positions[of] % size), self._tensor(of)
        )

    def _tensor(self, array: I32) -> Tensor:
        """A copy on the device, as indices."""
        return torch.from_numpy(array.astype(np.int64)).to(self.device)


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}: {value} is not in [{low}, {high}]")


def _inside(name: str, values: I32, end: int) -> None:
    if len(values) and not (values.min() >= 0 and values.max() < end):
        raise ValueError(f"{name}: values {values.min()} … {values.max()} are not all in [0, {end})")
