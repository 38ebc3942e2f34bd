"""Which part of a model one rank computes: a plan over the logical axes of its parameters.

Every linear is split by output columns and its inputs are gathered. No sum is cut, so each number has the bits that one
rank alone gives it, at every degree (docs/decisions/0046).
"""

from __future__ import annotations

from typing import Literal

from quire.records import dataclass
from quire.types import UnsupportedModelError

SPARE = 8  # experts of a rank for each place that it has for a copy


@dataclass(frozen=True, slots=True)
class Share:
    """Units `start` … `stop` - 1 of the `total` units of an axis: columns, heads, experts."""

    start: int
    stop: int
    total: int

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def whole(self) -> bool:
        return self.count == self.total


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One of the pipeline_parallel_size · tensor_parallel_size ranks that a model is spread over; by default, the only.

    Pipeline stages hold neighbouring layers, as evenly as possible or as many as `stage_layers` says. Ranks of a stage
    split every layer: attention by heads, other linears by panels of output columns. `expert_parallel`: ranks hold
    whole experts instead of columns of all of them.

    `reduce` "fast": a branch's last linear is split by input columns, and the partial sums are added in the order of
    ranks. That moves other bytes, and the bits depend on the degree.

    With a `data_parallel_size` the ranks of so many replicas hold the experts of a stage between them, and this is of
    one of these replicas. All else each replica holds.
    """

    tensor_parallel_size: int = 1
    tensor_parallel_rank: int = 0
    pipeline_parallel_size: int = 1
    pipeline_parallel_rank: int = 0
    expert_parallel: bool = False
    reduce: Literal["exact", "fast"] = "exact"
    stage_layers: tuple[int, ...] = ()
    data_parallel_size: int = 1
    data_parallel_rank: int = 0

    def __post_init__(self) -> None:
        for kind in ("tensor", "pipeline", "data"):
            size, rank = getattr(self, f"{kind}_parallel_size"), getattr(self, f"{kind}_parallel_rank")
            if size < 1:
                raise ValueError(f"{kind}_parallel_size: {size} is less than 1")
            if not 0 <= rank < size:
                raise ValueError(f"{kind}_parallel_rank: {rank} is not in [0, {size - 1}]")
        if self.stage_layers and (
            len(self.stage_layers) != self.pipeline_parallel_size or min(self.stage_layers) < 1
        ):
            raise ValueError(
                f"stage_layers: {list(self.stage_layers)} is not a number of layers, at least 1, for each of "
                f"{self.pipeline_parallel_size} stages"
            )

    @property
    def ranks(self) -> int:
        """All ranks of the model."""
        return self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def shares_experts(self) -> bool:
        """Whether experts are over the ranks of several replicas."""
        return self.expert_parallel and self.data_parallel_size > 1

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold the experts of a stage between them."""
        return self.tensor_parallel_size * self.data_parallel_size if self.expert_parallel else 1

    @property
    def expert_rank(self) -> int:
        """The number of this one among them."""
        return self.data_parallel_rank * self.tensor_parallel_size + self.tensor_parallel_rank

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_parallel_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_parallel_rank == self.pipeline_parallel_size - 1

    @property
    def overlaps(self) -> bool:
        """Whether a step may begin in the first stages while the one before it ends in the others."""
        return self.pipeline_parallel_size > 1

    @property
    def in_first_half(self) -> bool:
        """Whether this is one of the stages that begin a step. The other ones end it."""
        return self.pipeline_parallel_rank < self.pipeline_parallel_size // 2

    @property
    def fast(self) -> bool:
        """Whether partial sums are added."""
        return self.reduce == "fast" and self.tensor_parallel_size > 1

    def layers(self, count: int) -> range:
        """This stage's layers of a model with `count`. Raises UnsupportedModelError for more stages than layers."""
        size, stage = self.pipeline_parallel_size, self.pipeline_parallel_rank
        if size > max(count, 1):
            raise UnsupportedModelError(
                f"pipeline_parallel_size: {size} is more than the model's {count} layers"
            )
        if not self.stage_layers:
            return range(count * stage // size, count * (stage + 1) // size)
        if sum(self.stage_layers) != count:
            raise UnsupportedModelError(
                f"stage_layers: {list(self.stage_layers)} add up to {sum(self.stage_layers)}, but the model has "
                f"{count} layers"
            )
        first = sum(self.stage_layers[:stage])
        return range(first, first + self.stage_layers[stage])

    def columns(self, field: str, total: int, panel: int) -> Share:
        """This rank's panels of `total` output columns. Raises UnsupportedModelError for fewer panels than ranks."""
        panels = -(-total // panel)
        self._check(field, total, panels, f"panels of {panel} columns")
        cut = self._cut(panels)
        return Share(min(cut.start * panel, total), min(cut.stop * panel, total), total)

    def experts(self, total: int, top_k: int) -> Share:
        """This rank's places of a layer's experts, of which a token takes `top_k`: all unless experts are split.

        There are more places than experts where a single expert can have more than a rank's even share of the work,
        as a token counts once for it: with more ranks than experts of a token. Then each rank has an eighth more, for
        copies of busy ones. Experts that replicas share have one place each.
        """
        size = self.expert_ranks
        if size == 1:
            return Share(0, total, total)
        if size > total:
            degrees = (
                "tensor_parallel_size times data_parallel_size"
                if self.shares_experts
                else "tensor_parallel_size"
            )
            raise UnsupportedModelError(
                f"enable_expert_parallel: {size} ranks cannot share num_experts {total}: each needs one, so {degrees} "
                f"can be {total} at most"
            )
        spare = total // size // SPARE * size if size > top_k and not self.shares_experts else 0
        return even_share(total + spare, size, self.expert_rank)

    def heads(self, heads: int, kv_heads: int) -> tuple[Share, Share]:
        """This rank's query heads, and the key/value heads that they read.

        Key/value heads are split as evenly as possible. With fewer of them than ranks each is held by several.
        Raises UnsupportedModelError when these would have unequal numbers of its query heads.
        """
        size, rank = self.tensor_parallel_size, self.tensor_parallel_rank
        if size <= kv_heads:
            kv, group = self._cut(kv_heads), heads // kv_heads
            return Share(kv.start * group, kv.stop * group, heads), kv
        if not _shares_heads(size, heads, kv_heads):
            fitting = [str(n) for n in range(1, heads + 1) if _shares_heads(n, heads, kv_heads)]
            raise UnsupportedModelError(
                f"tensor_parallel_size: {size} ranks cannot share num_attention_heads {heads} with "
                f"num_key_value_heads {kv_heads}; {', '.join(fitting)} can"
            )
        each, at = heads // size, rank * kv_heads // size
        return Share(rank * each, rank * each + each, heads), Share(at, at + 1, kv_heads)

    def _check(self, field: str, total: int, units: int, unit: str) -> None:
        if self.tensor_parallel_size > units:
            raise UnsupportedModelError(
                f"tensor_parallel_size: {self.tensor_parallel_size} ranks cannot split {field} {total}: it has "
                f"{units} {unit}, and each rank needs one"
            )

    def _cut(self, units: int) -> Share:
        return even_share(units, self.tensor_parallel_size, self.tensor_parallel_rank)


def even_share(units: int, size: int, rank: int) -> Share:
    """The units of one of `size` ranks, even to one unit. csrc/ops/all_to_all.cpp states the same rule."""
    return Share(units * rank // size, units * (rank + 1) // size, units)


def _shares_heads(size: int, heads: int, kv_heads: int) -> bool:
    return size <= kv_heads or (size % kv_heads == 0 and heads % size == 0)
