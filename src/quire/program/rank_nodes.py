"""On which node (host) each rank of a model is.

Every node has as many ranks, which follow each other. Ranks of one node share memory; those of several send what others
read. So a node has whole stages of a pipeline, or a part of one: a stage never begins in the middle of a node.
"""

from __future__ import annotations

from quire.records import dataclass
from quire.types import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class RankNodes:
    """Where the ranks of `stages` pipeline stages, of `size` ranks each, are. Node 0 has the rank that leads, the first
    of the last stage.

    Raises UnsupportedModelError for ranks that cannot be spread over so many nodes.
    """

    size: int
    stages: int
    nodes: int = 1

    def __post_init__(self) -> None:
        ranks = self.size * self.stages
        even = self.nodes > 0 and ranks % self.nodes == 0
        if not even or (self.each % self.size and self.size % self.each):
            raise UnsupportedModelError(
                f"nnodes: {self.nodes} hosts cannot share {ranks} ranks ({self.stages} stages of {self.size}): each "
                f"has whole stages, or an even part of one"
            )

    @property
    def each(self) -> int:
        """Ranks of a node."""
        return self.size * self.stages // self.nodes

    @property
    def spans(self) -> bool:
        """Whether ranks of one stage are on several nodes."""
        return self.each < self.size

    @property
    def _first(self) -> int:
        """The run of ranks that node 0 has."""
        return self.size * (self.stages - 1) // self.each

    def node_of(self, rank: int) -> int:
        """The node of a rank."""
        run = rank // self.each
        return 0 if run == self._first else run + (run < self._first)

    def ranks_of(self, node: int) -> range:
        """The ranks of a node."""
        run = self._first if node == 0 else node - (node <= self._first)
        return range(run * self.each, (run + 1) * self.each)

    def here(self, rank: int) -> range:
        """The ranks of a rank's stage that are on its node."""
        count = min(self.each, self.size)
        first = rank // count * count
        return range(first, first + count)

    def before(self, rank: int) -> range:
        """The ranks whose residual stream a rank waits for and takes, which are on one node: of the stage before."""
        here = self.here(rank)
        return range(here.start - self.size, here.stop - self.size)

    def taken_from(self, rank: int) -> int:
        """The rank of the stage before whose residual stream a rank reads, in the memory of its own node."""
        before = self.before(rank)
        return before.start if self.node_of(before.start) != self.node_of(rank) else rank - self.size

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks of its stage on other nodes that a rank exchanges rows with: those with its place."""
        first = rank // self.size * self.size
        return tuple(other for other in range(first + (rank - first) % self.each, first + self.size, self.each)
                     if other != rank) if self.spans else ()  # fmt: skip
