"""What an engine holds at this moment, for those who look at it: blocks, sequences, the shape of the prefix caches."""

from __future__ import annotations

from quire.core.block_pool import CACHED, FREE
from quire.core.scheduler import Scheduler
from quire.engine.core import EngineCore
from quire.engine.view import SHARED, EngineView, ViewedBranch, ViewedSequence

# Whatever the size of the cache, a look takes some milliseconds.
MOST_BLOCKS, MOST_NODES, MOST_SEQUENCES = 2048, 8192, 256


def engine_view(core: EngineCore, after: int) -> EngineView:
    """The state between two steps, with the rows of the log after the first `after`."""
    scheduler: Scheduler = core.scheduler
    recorder = core.recorder
    log, rows = (b"", 0) if recorder is None else recorder.since(after)
    running = scheduler.running[:MOST_SEQUENCES]
    pool = scheduler.caches.pool
    stride = max(1, -(-pool.num_touched // MOST_BLOCKS))
    states = pool.states(stride)
    blocks = [state if state in {FREE, CACHED} else SHARED for state in states]
    for number, seq in enumerate(running, 1):
        for block in seq.table.live():
            if block % stride == 0 and states[block // stride] == 1:
                blocks[block // stride] = number
    return EngineView(
        stride=stride,
        blocks=tuple(blocks),
        sequences=tuple(
            ViewedSequence(
                seq.state.request.request_id, seq.sample_index, seq.prompt_len, seq.computed, len(seq.tokens),
                seq.state.cached_tokens, len(seq.table.live()),
            )
            for seq in running
        ),
        branches=_branches(scheduler),
        log=log,
        rows=rows,
        oldest=0.0 if recorder is None else recorder.oldest / 1e9,
    )  # fmt: skip


def _branches(scheduler: Scheduler) -> tuple[ViewedBranch, ...]:
    """The prefixes of all tenants in one tree, parents first."""
    found: list[ViewedBranch] = []
    left, size = MOST_NODES, scheduler.config.block_size
    for cache in list(scheduler.caches.all):
        first = len(found)
        for parent, nodes, locks in cache.branches(left):
            found.append(ViewedBranch(parent + first if parent >= 0 else -1, nodes * size, locks))
            left -= nodes
    return tuple(found)
