"""The options of parallelism."""

from __future__ import annotations

from quire.config.option import check_options, option
from quire.records import dataclass

MAX_RANKS = 64  # that share a model on one host


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """The ranks that a model is split over, and its replicas: processes of this host. Answers are the same to the bit
    at every degree."""

    tensor_parallel_size: int = option(
        1,
        "ranks that split every layer: by heads, and by output columns of linears, so that no sum is cut",
        metavar="N",
        count=True,
        most=MAX_RANKS,
    )
    pipeline_parallel_size: int = option(
        1,
        "stages of neighbouring layers, each held by ranks of its own; two steps are in them at a time",
        metavar="N",
        count=True,
        most=MAX_RANKS,
    )
    data_parallel_size: int = option(
        1,
        "replicas of the model in one server, each of all its ranks, with a cache and a queue of its own",
        metavar="N",
        count=True,
        most=MAX_RANKS,
    )
    enable_expert_parallel: bool = option(
        False,
        "ranks that split a layer, of all replicas, hold whole experts in place of columns of all of them",
    )

    tensor_parallel_reduce: str = option(
        "exact",
        "how ranks make a branch of their parts; exact: gathered, with the bits of one rank; fast: partial sums, half "
        "as many meetings, but the bits depend on the number of ranks",
        choices=("exact", "fast"),
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.ranks * self.data_parallel_size > MAX_RANKS:
            raise ValueError(
                f"tensor_parallel_size: {self.tensor_parallel_size} by pipeline_parallel_size "
                f"{self.pipeline_parallel_size} by data_parallel_size {self.data_parallel_size} is more than "
                f"{MAX_RANKS} ranks"
            )

    @property
    def ranks(self) -> int:
        """Processes that hold a part of one replica of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
