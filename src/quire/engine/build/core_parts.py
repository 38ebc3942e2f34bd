"""Parts of an engine that are made of its plan: scheduler, worker, swap space, and the gate of whole batches."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from quire.cache_kinds import LATE_KV, FullGroup
from quire.config.schema import MAX_BATCH_WAIT_MS, POLICIES, ResolvedConfig
from quire.core.cost_model import StepCostModel
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.engine.build.budget import MemoryPlan
from quire.engine.build.drafts import Draft
from quire.engine.build.opening import Model
from quire.engine.whole_batches import BatchGate, WholeBatchScheduler
from quire.executor.base import Executor, Limits
from quire.objectives import class_policies, parse_classes
from quire.program.program import Program
from quire.spec import ModelSpec
from quire.speculate.build import judging, max_draft_tokens
from quire.worker.block_tiers import BlockTiers
from quire.worker.swap_space import SwapSpace, place_bytes
from quire.worker.worker import Worker

if TYPE_CHECKING:
    from quire.lora.adapter_service import AdapterService


def make_scheduler(
    program: Program,
    config: ResolvedConfig,
    plan: MemoryPlan,
    spec: ModelSpec,
    costs: StepCostModel,
    swap: BlockTiers | SwapSpace | None,
    draft: Executor | None,
) -> Scheduler:
    """The scheduler of an engine."""
    asked, whole, pooling = config.asked, spec.whole, spec.pooling is not None
    usual, by_class = class_policies(
        asked.scheduler.scheduling_policy, parse_classes(asked.scheduler.slo), POLICIES
    )
    full = all(isinstance(group, FullGroup) for group in program.cache_groups)
    continuous = asked.scheduler.batching == "continuous"
    # Drafts are made from the result of the step before, for the whole of the next one.
    overlaps = program.plan.overlaps and continuous and config.speculation is None and not (whole or pooling)
    kind = Scheduler if continuous else WholeBatchScheduler
    return kind(
        SchedulerConfig(
            num_blocks=plan.limits.num_blocks,
            block_size=plan.limits.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=plan.limits.max_len,
            max_draft_tokens=max_draft_tokens(config, program.cache_groups),
            steps_in_flight=1 + overlaps,
            takes_turns=overlaps,
            groups=program.cache_groups,
            soft_tokens=asked.execution.enable_prompt_embeds,
            enable_prefix_caching=asked.cache.enable_prefix_caching and not whole,
            enable_chunked_prefill=asked.scheduler.enable_chunked_prefill and not whole,
            pooling=pooling,
            # the keys and values of a draft have no copies
            copy_partial=full and draft is None and config.kv not in LATE_KV and not whole and not pooling,
            cache_by_uses=asked.cache.cache_policy == "lfu",
            cache_ttl=asked.cache.cache_ttl,
            cache_pin_share=asked.cache.cache_pin_share,
            policy=usual,
            class_policies=by_class,
            overtake=asked.scheduler.overtake_ms / 1e3,
        ),
        random.Random(asked.execution.seed),
        None if spec.whole or pooling else swap,
        costs,
    )


def make_gate(scheduler: Scheduler, config: ResolvedConfig) -> BatchGate | None:
    """What decides when whole batches begin; None where batching is continuous."""
    if not isinstance(scheduler, WholeBatchScheduler):
        return None
    asked = config.asked.scheduler
    wait = MAX_BATCH_WAIT_MS if asked.batching == "static" else asked.batch_wait_ms
    return BatchGate(scheduler, config.max_num_seqs, wait / 1e3)


def make_swap_space(
    model: Model, block: int, config: ResolvedConfig, draft: Draft | None, lent: int
) -> SwapSpace | None:
    """Room for blocks of `block` bytes outside of the cache, if any was asked for or may be lent.

    Raises ValueError where blocks cannot be taken back alone, or none fits.
    """
    asked, spec = config.asked.cache, model.facts.spec
    if not asked.enable_prefix_caching or draft is not None or spec.whole or spec.pooling is not None:
        lent = 0
    size = asked.swap_space
    if size is None and not lent:
        return None
    if draft is not None:
        raise ValueError("swap_space: not with a draft model, whose keys and values would be missing")
    place = place_bytes(block)
    own = 0 if size is None else size // place
    if size is not None and not own:
        raise ValueError(f"swap_space: has no room for a block of {block} bytes")
    return SwapSpace(own, block, own + lent // place) if own + lent // place else None


def make_worker(
    model: Model,
    executor: Executor,
    limits: Limits,
    config: ResolvedConfig,
    adapters: AdapterService | None,
    swap: BlockTiers | SwapSpace | None,
) -> Worker:
    """The worker of an engine, over an executor that is not bound yet."""
    if model.facts.pooling is None:
        slots = None if adapters is None else adapters.slots
        worker = Worker(executor, limits, swap, judging=judging(config), adapters=slots)
        if isinstance(swap, BlockTiers):
            swap.content = worker.content
        return worker
    from quire.worker.pooling_worker import PoolingWorker

    return PoolingWorker(executor, limits)
