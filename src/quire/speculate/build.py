"""From the options to a proposer, and what it takes. A method is imported when it is chosen: engines start sooner."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from quire.cache_kinds import CacheGroup, StateGroup
from quire.config.schema import ResolvedConfig
from quire.config.speculative import MAX_DEPTH, SpeculativeConfig
from quire.executor.base import Executor, Judging, Limits, Outputs, StepArrays
from quire.executor.plans import decode_sizes
from quire.program.cost import Row, step_cost
from quire.program.lower_draft import module_count
from quire.program.op import Op, param_names
from quire.program.program import Program
from quire.records import dataclass
from quire.spec.draft import Features
from quire.speculate.combined import Combined
from quire.speculate.prediction import PredictionProposer
from quire.speculate.proposer import Proposer
from quire.speculate.speculation import Speculation
from quire.speculate.step_costs import PassCosts
from quire.types import UnsupportedModelError
from quire.worker.proposals import Proposals
from quire.worker.worker import Worker

PREDICTED_TOKENS = 16  # of a prediction in a step, unless a method says how many
MAX_DRAFT_TOKENS = 64  # of a step: positions with logits beside those of sequences
TEXT_TOKEN = 16  # bytes: its place in a list, and its share of the hash of a block
SELF_SHARE = 4  # a quarter of the layers drafts, unless it is said how many


@dataclass(frozen=True, slots=True)
class Drafter:
    """The executor of a draft model, loaded and not yet bound, and what it is built for.

    Its blocks are those of the target's cache group `group`, which keeps tokens in a `window`. Positions from `longest`
    on are not known to it. `features`: what it takes of the target, if it does. `ids`: the target's ids of its tokens,
    where they are others.
    """

    executor: Executor
    limits: Limits
    group: int
    window: int
    longest: int
    features: Features | None = None
    ids: npt.NDArray[np.int32] | None = None


def max_draft_tokens(config: ResolvedConfig, groups: Collection[CacheGroup]) -> int:
    """Drafts that a step may run, over all sequences: predictions bring some whatever was chosen. Raises
    UnsupportedModelError where a method was chosen for a model that can run none.
    """
    if not any(isinstance(group, StateGroup) for group in groups):
        return MAX_DRAFT_TOKENS
    if config.speculation is not None:
        raise UnsupportedModelError(
            f"speculate: {config.speculation.method} is not for a model with a state per sequence: a rejected draft "
            "cannot be taken out of it"
        )
    return 0


def tree_branches(config: ResolvedConfig) -> int:
    """Branches that the trees of a step may have: each has a draft of its own, and a first path has one."""
    chosen = config.speculation
    return MAX_DRAFT_TOKENS - 1 if chosen is not None and chosen.trees else 0


def proposer_bytes(config: ResolvedConfig, max_len: int, vocab: int) -> int:
    """The most bytes that the proposer holds besides what executors hold, for texts of up to max_len tokens, and what
    its drafts are judged by. Predictions belong to their requests."""
    chosen = config.speculation
    if chosen is None:
        return 0
    if chosen.method == "ngram":
        from quire.speculate.ngram import NgramProposer

        return NgramProposer.memory_bound(config.max_num_seqs, chosen.recent_outputs)
    if chosen.method == "lookahead":
        from quire.speculate.lookahead import LookaheadProposer

        return LookaheadProposer.memory_bound(config.max_num_seqs)
    drawn = Proposals.memory_bound(MAX_DRAFT_TOKENS, vocab) if chosen.acceptance == "rejection" else 0
    return drawn + config.max_num_seqs * max_len * TEXT_TOKEN


def judging(config: ResolvedConfig) -> Judging | None:
    """How drafts are judged other than by the sample."""
    chosen = config.speculation
    if chosen is None or chosen.acceptance == "same":
        return None
    return Judging(chosen.acceptance, float(chosen.epsilon))


def draft_cost(chosen: SpeculativeConfig, target: Program, draft: Program | None) -> float:
    """What a pass for drafts costs, in steps of the target with one token: by the bytes of weights that both read."""
    if chosen.method in {"ngram", "lookahead"}:
        return 0.0
    if draft is None:
        read = _step_bytes(target, _own_ops(chosen, target))
    else:  # a pass runs one module of several
        read = _step_bytes(draft, draft.inputs[1].first_op if module_count(draft) > 1 else None)
    return read / _step_bytes(target)


def make_speculation(
    config: ResolvedConfig, worker: Worker, target: Executor, limits: Limits, drafter: Drafter | None
) -> Speculation | None:
    """Predictions, and the method that was asked for. `limits` are the target's."""
    most = limits.max_logit_rows - limits.max_rows
    if not most:
        return None
    chosen, predictions = config.speculation, PredictionProposer()
    return Speculation(
        Combined(predictions, _proposer(chosen, worker, target, limits, drafter)) if chosen else predictions,
        vocab=target.program.vocab,
        max_rows=config.max_num_seqs,
        most=most,
        depth=chosen.num_speculative_tokens if chosen else PREDICTED_TOKENS,
        predicted=predictions.GRADES,
        everyone=chosen is not None,
    )


def _proposer(
    chosen: SpeculativeConfig, worker: Worker, target: Executor, limits: Limits, drafter: Drafter | None
) -> Proposer:
    if chosen.method == "ngram":
        from quire.speculate.ngram import NgramProposer

        return NgramProposer(chosen.prompt_lookup_min, chosen.prompt_lookup_max, chosen.recent_outputs)
    if chosen.method == "lookahead":
        from quire.speculate.lookahead import LookaheadProposer

        return LookaheadProposer(chosen, worker.watch_trees())
    if drafter is None:
        return _self_draft(chosen, worker, target, limits)
    return _drafted(chosen, worker, target, limits, drafter)


def _drafted(
    chosen: SpeculativeConfig, worker: Worker, target: Executor, limits: Limits, drafter: Drafter
) -> Proposer:
    """What drafts with an executor of its own."""
    from quire.speculate.tree_growth import TreeGrowth

    executor, program, most = drafter.executor, drafter.executor.program, drafter.limits.max_tokens
    table = worker.arrays.block_tables[drafter.group]
    arrays = StepArrays(drafter.limits, 1, (table,) if program.cache_groups else ())
    executor.bind(drafter.limits, arrays)
    executor.prepare(decode_sizes(drafter.limits.max_rows))
    relative = draft_cost(chosen, target.program, program)
    growth = TreeGrowth(chosen.width, chosen.tree_width)
    if drafter.features is not None:
        from quire.speculate.target_rows import TargetRows

        rows = TargetRows(drafter.features, lambda: worker.outputs, worker.right_tokens)
        if not program.kv_layers:
            from quire.speculate.medusa import MedusaProposer

            costs = PassCosts(most, relative, once=True)
            growth = TreeGrowth(chosen.width, MAX_DEPTH)
            return MedusaProposer(
                executor, arrays, rows, worker.guess, worker.line, growth=growth, costs=costs
            )
        if module_count(program) > 1:
            from quire.speculate.draft_modules import ModuleDraftProposer

            return ModuleDraftProposer(
                executor, arrays, rows, worker.guess, worker.line, growth=growth,
                costs=PassCosts(most, relative), limits=drafter.limits, longest=drafter.longest,
            )  # fmt: skip
        from quire.speculate.feature_drafts import FeatureDraftProposer

        return FeatureDraftProposer(
            executor, arrays, rows, worker.guess, worker.line, growth=growth,
            costs=PassCosts(most, relative), limits=drafter.limits, longest=drafter.longest, ids=drafter.ids,
        )  # fmt: skip
    from quire.speculate.draft_branches import DraftBranches
    from quire.speculate.draft_cache import DraftCache
    from quire.speculate.draft_model import DraftModelProposer
    from quire.speculate.draft_passes import DraftPasses

    passes = DraftPasses(
        executor.run, arrays, worker.guess, growth, vocab=program.ids or program.vocab,
        max_tokens=most, costs=PassCosts(most, relative),
    )  # fmt: skip
    cache = DraftCache(table, limits.block_size, drafter.window)
    branches = DraftBranches(arrays, drafter.limits, executor.copy_blocks)
    return DraftModelProposer(passes, branches, worker.line, cache, drafter.longest)


def _self_draft(chosen: SpeculativeConfig, worker: Worker, target: Executor, limits: Limits) -> Proposer:
    """The first layers and the head of the target, on its own cache."""
    from quire.speculate.draft_branches import DraftBranches
    from quire.speculate.draft_model import DraftModelProposer
    from quire.speculate.draft_passes import DraftPasses
    from quire.speculate.tree_growth import TreeGrowth

    program = target.program
    stop = _own_ops(chosen, program)

    def run(tokens: int, rows: int, logit_rows: int) -> Outputs:
        target.run_range(tokens, rows, logit_rows, 0, stop)
        return target.run_head(logit_rows)

    costs = PassCosts(limits.max_logit_rows, draft_cost(chosen, program, None))
    growth = TreeGrowth(chosen.width, chosen.tree_width)
    passes = DraftPasses(
        run,
        worker.arrays,
        worker.guess,
        growth,
        vocab=program.vocab,
        max_tokens=limits.max_tokens,
        costs=costs,
    )
    branches = DraftBranches(worker.arrays, limits, target.copy_blocks)
    return DraftModelProposer(passes, branches, worker.line, None, limits.max_len)


def _own_ops(chosen: SpeculativeConfig, program: Program) -> int:
    """The ops of a model's body that draft for it. Raises UnsupportedModelError if it has no more layers."""
    layers = len(program.kv_layers)
    count = chosen.layers or max(1, layers // SELF_SHARE)
    if count >= layers:
        raise UnsupportedModelError(
            f"speculative_config.layers: {count} of the model's {layers} layers are not fewer than all"
        )
    return next(at for at, op in enumerate(program.body) if _of_layer(op, count))


def _of_layer(op: Op, layer: int) -> bool:
    return any(name.startswith(f"layers.{layer}.") for name in param_names(op))


def _step_bytes(program: Program, stop: int | None = None) -> int:
    """Bytes of weights that one token reads, by the head and the body up to some op."""
    ops = step_cost(program, [Row(1, 0)], 1).ops
    body = len(program.body)
    return sum(cost.weight_bytes for cost in (*ops[:body][:stop], *ops[body:]))
