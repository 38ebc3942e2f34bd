"""Counters of the engine process, updated every step and reported a few times a second."""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from quire.core.coming_blocks import Arrivals
from quire.core.cost_model import StepCostModel
from quire.core.scheduler import Scheduler
from quire.core.usage_line import UsageLine
from quire.engine.api import STEP_TOKEN_BOUNDS, EngineStats
from quire.engine.core import EngineCore
from quire.engine.usage_ledger import UsageTotals
from quire.util.platform import resident_bytes

if TYPE_CHECKING:
    from quire.executor.plans import Paging
    from quire.worker.swap_space import SwapSpace

_SHARE_SECONDS = 5.0


class StepTotals:
    """Totals over all steps of one engine. Phases are those of the worker, "schedule", "update" and "send"."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.steps = 0
        self._seconds = 0.0
        self._prefill = 0
        self._decode = 0
        self._tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)
        self._behind = 0.0
        self._shares = _Shares(core)
        self._phases: dict[str, float] = {"schedule": 0.0, "update": 0.0, "send": 0.0}

    def add_step(self) -> None:
        """Count the step that the core has just run."""
        record = self._core.records[-1]
        phases = self._phases
        seconds = record.schedule_seconds + record.execute_seconds + record.update_seconds
        self.steps += 1
        self._seconds += seconds
        if self._core.work is not None:
            self._core.work.add(self._core.features)
        if record.waiting and record.prefill_tokens:
            self._behind += seconds * self._core.scheduler.behind_longer()
        self._prefill += record.prefill_tokens
        self._decode += record.decode_tokens
        self._tokens[bisect_left(STEP_TOKEN_BOUNDS, record.prefill_tokens + record.decode_tokens)] += 1
        phases["schedule"] += record.schedule_seconds
        phases["update"] += record.update_seconds
        for name, seconds in self._core.last_phases.items():
            phases[name] = phases.get(name, 0.0) + seconds

    def add_send(self, seconds: float) -> None:
        """Count time spent in reporting a step."""
        self._phases["send"] += seconds

    def report(self) -> EngineStats:
        """All counters and gauges as of now."""
        scheduler: Scheduler = self._core.scheduler
        plans, kept = self._core.worker.plans, self._core.tiers.counts() if self._core.tiers else {}
        drafts, adapters = self._core.speculation, self._core.adapters
        grammars, swap = self._core.grammars, self._core.swap
        stepped = None if callable(grammars) else grammars
        scheduler.usage.hold(scheduler.caches, scheduler.running, time.monotonic())
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            blocks=scheduler.config.num_blocks,
            blocks_used=scheduler.blocks_used,
            blocks_cached=scheduler.blocks_cached,
            blocks_pinned=scheduler.prefix_stats.pinned_blocks,
            block_size=scheduler.config.block_size,
            kv_waste_tokens=scheduler.kv_waste_tokens,
            prefix_queried_tokens=scheduler.prefix_stats.queried_tokens,
            prefix_hit_tokens=scheduler.prefix_stats.hit_tokens,
            prefix_copied_tokens=scheduler.prefix_stats.copied_tokens,
            preemptions=scheduler.num_preemptions,
            steps=self.steps,
            step_seconds=self._seconds,
            step_phase_seconds=dict(self._phases),
            **_rank_counts(self._core),
            **self._shares.fields(self._seconds),
            head_of_line_seconds=self._behind,
            prefill_tokens=self._prefill,
            decode_tokens=self._decode,
            step_tokens=tuple(self._tokens),
            step_plans=plans.sizes,
            step_plan_hits=plans.hits,
            step_plan_fallbacks=plans.fallbacks,
            step_plan_padding=plans.padding,
            forced_tokens=0 if stepped is None else stepped.added_tokens,
            late_rows=0 if stepped is None else stepped.late_steps,
            max_loras=adapters.max_loras if adapters else 0,
            adapter_bytes=adapters.pool_bytes if adapters else (0, 0),
            adapter_loads=dict(adapters.loads) if adapters else {},
            adapter_evictions=dict(adapters.evictions) if adapters else {},
            resident_bytes=resident_bytes(),
            **_learned(self._core.costs),
            **_swapped(swap, self._core.paging),
            disk_tier=kept.get("disk", {}),
            remote_tier={**kept.get("remote", {}), **_arrived(self._core.arrivals)},
            step_budget=min(scheduler.limits.tokens, scheduler.config.max_num_batched_tokens),
            step_slots=min(scheduler.limits.sequences, scheduler.config.max_num_seqs),
            length_error=scheduler.estimates.error,
            usage=tuple(map(_totals, scheduler.usage.lines.values())),
            tenant_blocks={cache.tenant: cache.num_blocks for cache in scheduler.caches.all},
            floors=dict(scheduler.config.floors),
            draft_rows=drafts.rows if drafts else 0,
            drafted_tokens=drafts.drafted if drafts else 0,
            accepted_tokens=sum(drafts.accepted) if drafts else 0,
            accepted_by_position=tuple(drafts.accepted) if drafts else (),
            rows_by_drafts=tuple(drafts.chosen) if drafts else (),
            draft_faults=drafts.faults if drafts else 0,
            speculation_seconds_won=drafts.seconds_won if drafts else 0.0,
        )


def _rank_counts(core: EngineCore) -> dict[str, Any]:
    seconds, experts = [*core.rank_seconds()], core.experts
    found: dict[str, Any] = {
        "rank_seconds": tuple(worked for worked, _ in seconds),
        "rank_wait_seconds": tuple(waited for _, waited in seconds),
        "replica_wait_seconds": core.replica_waits(),
    }
    if experts is not None and any(experts.pairs):
        found |= {
            "expert_pairs": tuple(experts.pairs),
            "expert_moves": experts.moved,
            "expert_load": experts.ratios,
        }
    return found


class _Shares:
    """The shares of the machine's limits that the latest steps reached: those of the last five to ten seconds."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._due = 0.0
        # Seconds of steps, those of computing alone, and bytes moved, when the last two windows began.
        self._begun = [(0.0, 0.0, 0.0)] * 2
        self.compute: float | None = None
        self.bandwidth: float | None = None

    def fields(self, seconds: float) -> dict[str, Any]:
        """Those of EngineStats: FLOP and bytes of all steps, which took so many seconds, and the shares."""
        work, peaks, now = self._core.work, self._core.peaks, time.monotonic()
        if work is None:
            return {}
        work.count()
        if peaks is not None:
            computing = sum(
                flops / peaks.flops[name] for name, flops in work.flops.items() if name in peaks.flops
            )
            (before, computed, moved), last = self._begun
            passed = seconds - before
            self.compute = (computing - computed) / passed if passed else 0.0
            self.bandwidth = (work.moved - moved) / passed / peaks.bandwidth if passed else 0.0
            if now >= self._due and seconds > last[0]:
                self._due, self._begun = now + _SHARE_SECONDS, [last, (seconds, computing, work.moved)]
        return {
            "flops": dict(work.flops), "moved_bytes": work.moved,
            "compute_share": self.compute, "bandwidth_share": self.bandwidth,
        }  # fmt: skip


def _arrived(arrivals: Arrivals | None) -> dict[str, float]:
    """What EngineStats.remote_tier has of prompts that came from other engines."""
    if arrivals is None:
        return {}
    return {"came": arrivals.came, "late": arrivals.late, "wait_seconds": arrivals.seconds}


def _swapped(swap: SwapSpace | None, paging: Paging | None) -> dict[str, Any]:
    """The fields of EngineStats about a swap space, and weights that do not all stay in memory."""
    found: dict[str, Any] = {} if paging is None else {"weight_paging": paging.counts._asdict()}
    if swap is not None:
        found |= {"swap_blocks": len(swap), "swapped_out": swap.blocks_out, "swapped_in": swap.blocks_in}
    return found


def _learned(costs: StepCostModel) -> dict[str, Any]:
    """The fields of EngineStats about what steps cost."""
    return {
        "step_costs": costs.weights, "step_bends": costs.bends,
        "step_cost_error": costs.error, "step_cost_spread": costs.spread,
    }  # fmt: skip


def _totals(line: UsageLine) -> UsageTotals:
    return UsageTotals(
        line.account, line.tag, line.prompt, line.cached, line.generated, line.seconds, line.block_seconds
    )
