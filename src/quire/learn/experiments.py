"""Simulations that run parts of the engine: its attention in tiles, block tables, speculation."""

from __future__ import annotations

import random
import time

import numpy as np

from quire import _native
from quire.config import env
from quire.core.block_pool import BlockPool
from quire.executor.base import Judging
from quire.executor.sampler import HostSampler
from quire.learn.calculated import accepted, sram_kib
from quire.learn.scene import Cells, Chart, ChartSeries, Scene, Table
from quire.planner import memory_sums
from quire.planner.figure import Figure
from quire.reference.plain_attention import Array, attention, naive_traffic
from quire.reference.static_serving import Contiguous, paged_waste
from quire.types import NewSeq, SamplingParams

_HEAD_DIM = 64
_ROWS = 16


def attention_tiling(tokens: int, tile: int) -> Scene:
    """Attention of one head by the executor's kernel, so many queries at a time, in float32; traffic as a device with
    FP16 has it."""
    held = (4 * tile * _HEAD_DIM + tile * tile) * 2 / 1024
    if held > sram_kib():
        raise ValueError(
            f"tile: {tile} × {tile} scores, with queries, keys, values and outputs, take {held:,.0f} KiB, and"
            f" the shared memory of an SM has {sram_kib():.0f} KiB"
        )
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((tokens, _HEAD_DIM), np.float32) for _ in range(3))
    out, core = np.empty_like(q), _native.Executor(env.isa(), 1)
    started = time.perf_counter()
    moved = _native.attend_tiles(
        core, q.ctypes.data, k.ctypes.data, v.ctypes.data, out.ctypes.data, tokens, _HEAD_DIM, tile
    )
    took = time.perf_counter() - started
    error = _largest_error(out, q, k, v)
    naive, scratch = naive_traffic(tokens, _HEAD_DIM) * 2, _native.attend_tile_bytes(_HEAD_DIM, tile)
    figures = [
        Figure("score matrices in memory, naive", 3 * tokens * tokens * 2 / 2**20, "MiB", "written once, read twice"),
        Figure("bytes moved, naive", naive / 2**20, "MiB"),
        Figure("bytes moved, in tiles", moved * 2 / 2**20, "MiB", "counted by the engine's kernel while it ran"),
        Figure("less traffic", naive / (moved * 2), "×"),
        Figure("memory beside inputs and outputs, naive", tokens * tokens * 2 / 1024, "KiB", "grows with N²"),
        Figure("memory beside inputs and outputs, in tiles", scratch / 1024, "KiB", "the kernel's scratch, whatever N"),
        Figure("shared memory of a tile", held, "KiB", f"of {sram_kib():.0f} KiB"),
        Figure("largest difference from float64", error),
        Figure("time here", took * 1000, "ms", "one head, one thread"),
    ]  # fmt: skip
    lengths = [2**power for power in range(8, 14)]
    chart = Chart(
        "Bytes moved by length", "lines", "tokens", "MiB",
        [ChartSeries("naive", lengths, [naive_traffic(n, _HEAD_DIM) * 2 / 2**20 for n in lengths]),
         ChartSeries("in tiles", lengths, [_tiled_traffic(n, tile) * 2 / 2**20 for n in lengths])],
    )  # fmt: skip
    return Scene(
        figures, [chart],
        remark="The kernel takes the keys of a tile 64 at a time: what it moves depends on the rows of the tile alone.",
    )  # fmt: skip


def _largest_error(out: Array, q: Array, k: Array, v: Array) -> float:
    """The largest difference of an output from that in float64, a few rows at a time: a server's memory is planned."""
    wide = [part.astype(np.float64) for part in (k, v)]
    rows = (slice(at, at + _ROWS) for at in range(0, len(q), _ROWS))
    return max(
        float(np.abs(out[part] - attention(q[part].astype(np.float64), *wide, causal=False)).max())
        for part in rows
    )


def _tiled_traffic(tokens: int, tile: int) -> int:
    """Numbers that tiles move: queries and outputs once, keys and values once for each row of tiles."""
    return 2 * tokens * _HEAD_DIM + -(-tokens // tile) * 2 * tokens * _HEAD_DIM


_LONGEST, _BLOCK, _MEAN = 2048, 16, 50


def block_table(mode: str, sequences: int, finished: int) -> Scene:
    """Sequences come, every second one of the first ends, and one more comes; in memory for four of the longest."""
    rng = random.Random(0)
    lengths = [max(1, round(rng.gauss(_MEAN, 12))) for _ in range(sequences)]
    gone = list(range(0, 2 * finished, 2))
    if gone and gone[-1] >= sequences:
        raise ValueError(
            f"finished: {finished} is above {(sequences + 1) // 2}, every second of {sequences} sequences"
        )
    whole = _memory_figures()
    if mode == "contiguous":
        return _contiguous(lengths, gone, whole)
    return _paged(lengths, gone, whole)


_PLACES = 4 * _LONGEST


def _contiguous(lengths: list[int], gone: list[int], whole: list[Figure]) -> Scene:
    memory = Contiguous(_PLACES)
    starts = {i: memory.allocate(str(i), _LONGEST) for i in range(len(lengths))}
    admitted = [i for i, start in starts.items() if start is not None]
    for i in gone:
        if i in admitted:
            memory.free(str(i))
            admitted.remove(i)
    wanted = _LONGEST + _LONGEST // 2
    late = memory.allocate("late", wanted)
    owners = [0] * (_PLACES // _BLOCK)
    for i in admitted:
        first = starts[i]
        assert first is not None
        for place in range(_LONGEST // _BLOCK):
            owners[first // _BLOCK + place] = i + 1 if place * _BLOCK < lengths[i] else -1
    used = sum(lengths[i] for i in admitted)
    held = len(admitted) * _LONGEST
    figures = [
        Figure("sequences that found room", len(admitted), "", f"of {len(lengths) - len(gone)}"),
        Figure("held and unused", 100 * (1 - used / held) if held else 0.0, "%"),
        Figure("free in all", memory.free_places if late is None else memory.free_places + wanted, "tokens"),
        Figure(
            f"a sequence of {wanted:,} more finds room",
            late is not None,
            "",
            "" if late else "no gap is large enough",
        ),
        *whole,
    ]
    return Scene(figures, cells=[Cells("Memory, 16 tokens a cell", owners, _names(lengths))])


def _paged(lengths: list[int], gone: list[int], whole: list[Figure]) -> Scene:
    pool = BlockPool(_PLACES // _BLOCK)
    tables = {i: pool.take(-(-length // _BLOCK)) for i, length in enumerate(lengths)}
    for i in gone:
        pool.release(tables.pop(i))
    wanted = _LONGEST + _LONGEST // 2
    fits = wanted <= pool.num_free * _BLOCK
    # A copy shares all full blocks and writes into a new one: copy on write.
    first = min(tables) if tables else None
    shared: list[int] = []
    if first is not None:
        shared = tables[first][: lengths[first] // _BLOCK]
        pool.hold(shared)
        tables[len(lengths)] = [*shared, *pool.take(1)]
    pool.audit(tables.values())
    owners = [0] * pool.num_blocks
    for i, blocks in tables.items():
        for block in blocks:
            owners[block] = owners[block] or i + 1
    left = {i: lengths[i] for i in tables if i < len(lengths)}
    waste = paged_waste([*left.values()], _BLOCK)
    used = sum(left.values())
    figures = [
        Figure("sequences that found room", len(left), "", f"of {len(left)}"),
        Figure("held and unused", 100 * sum(waste) / (used + sum(waste)) if used else 0.0, "%"),
        Figure("the most that one wastes", max(waste, default=0), "tokens", f"at most {_BLOCK - 1}"),
        Figure("free in all", pool.num_free * _BLOCK, "tokens"),
        Figure(f"a sequence of {wanted:,} more finds room", fits, "", "blocks need not be neighbours"),
        Figure("blocks that a copy shares", len(shared), "", "and one of its own"),
        *whole,
    ]  # fmt: skip
    table = Table(
        "Block tables", ("sequence", "tokens", "blocks"),
        [(_names(lengths)[i] if i < len(lengths) else "copy of the first", str(lengths[i]) if i < len(lengths) else "",
          " ".join(map(str, blocks))) for i, blocks in tables.items()],
    )  # fmt: skip
    return Scene(
        figures, cells=[Cells("Memory, a block a cell", owners, [*_names(lengths), "copy"])], tables=[table]
    )


def _names(lengths: list[int]) -> list[str]:
    return [f"sequence {i + 1}" for i in range(len(lengths))]


def _memory_figures() -> list[Figure]:
    """The sum for Llama 2 13B: its longest context set aside for each, or blocks."""
    wanted = {"wasted, contiguous", "sequences in the same memory"}
    found = memory_sums.paging(
        layers=40, kv_heads=40, head_dim=128, longest=_LONGEST, output=_MEAN, block_size=_BLOCK
    )
    return [one for one in found if one.label in wanted]


def speculation(
    gamma: int, alpha: float, draft_ms: float, target_ms: float, rounds: int, seed: int, real: bool
) -> Scene:
    """Rounds of rejection sampling, judged by the sampler: the draft always says token 0, which the target takes with
    chance α. Raises ValueError for real drafts, which a running server alone can show."""
    if real:
        raise ValueError(
            "real: a running server shows it: GET /learn/api/sim/speculation?real=true, or /learn"
        )
    made = _rounds(gamma, alpha, rounds, seed)
    figures, curve = accepted(alpha, gamma, draft_ms, target_ms)
    spread = float(np.std(made)) / rounds**0.5
    shown = made[:40]
    numbers = [str(i + 1) for i in range(len(shown))]
    chart = Chart(
        "The first rounds", "bars", "round", "tokens",
        [ChartSeries("accepted drafts", numbers, [one - 1 for one in shown]),
         ChartSeries("from the target", numbers, [1.0] * len(shown))],
    )  # fmt: skip
    right = sum(made) - rounds
    measured = [
        Figure("tokens of a round, drawn", sum(made) / rounds, "tokens", f"± {3 * spread:.3f} (3σ), {rounds} rounds"),
        Figure("drafts accepted", right, "", f"of {rounds * gamma}"),
        Figure("drafts rejected", rounds * gamma - right, "", "the first wrong one ends its round"),
        Figure("rounds with a correction", sum(one <= gamma for one in made), "", "the target's own token"),
    ]  # fmt: skip
    return Scene([*figures, *measured], [chart, curve])


def _rounds(gamma: int, alpha: float, rounds: int, seed: int) -> list[int]:
    """Tokens of each round: drafts up to the first that is not accepted, and the target's token behind them."""
    sampler = HostSampler(2, 1, max_rows=gamma + 1)
    sampler.add(
        0,
        NewSeq(
            seq_id=0,
            token_ids=[0],
            prompt_len=1,
            params=SamplingParams(),
            sample_index=0,
            seed=seed,
            blocks=(),
        ),
    )
    with np.errstate(divide="ignore"):
        row = np.log(np.array([alpha, 1 - alpha], np.float32))
    logits = {"logits": np.tile(row, (gamma + 1, 1))}
    slots, drafts = np.zeros(gamma + 1, np.int32), np.array([*[0] * gamma, -1], np.int32)
    found = []
    for first in range(1, 1 + rounds * (gamma + 1), gamma + 1):
        positions = np.arange(first, first + gamma + 1, dtype=np.int32)
        tokens = sampler.verify(logits, slots, positions, drafts, judging=Judging("rejection")).token_ids
        right = next((at for at, token in enumerate(tokens[:gamma]) if token), gamma)
        found.append(right + 1)
    sampler.close()
    return found
