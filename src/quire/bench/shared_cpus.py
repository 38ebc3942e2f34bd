"""Engines that share the processors of one machine: by how much their steps take longer while several run.

An engine's log says how many processors its steps keep busy and how many other processes do, the server and its client
among them. What is asked for beyond the processors of the machine is shared evenly. That is a lower bound: processors
that are threads of one core, or that wait for the same memory, slow each other down before. How much cannot be told
from the log of one engine; at worst two engines are no faster than one.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.records import dataclass
from quire.steplog import log_rows as rows
from quire.steplog.log_rows import AnyRow


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Processors of a machine: all, those of an engine while it runs a step, and those of other processes."""

    cpus: int
    engine: float
    others: float

    def slower(self, engines: int) -> float:
        """How much longer a step takes while so many engines run one, if nothing but time is shared."""
        return max(1.0, self._asked(engines)) / max(1.0, self._asked(1))

    def _asked(self, engines: int) -> float:
        return (engines * self.engine + self.others) / self.cpus


def alone(engines: int) -> float:  # noqa: ARG001
    """The same for engines that share nothing."""
    return 1.0


def slower_at_worst(engines: int) -> float:
    """The same for engines that are no faster together than one alone."""
    return float(engines)


def cpu_use(log: Iterable[AnyRow]) -> CpuUse | None:
    """What a log says of processors; None for one that does not tell: an older one, or of an engine with ranks."""
    cpus, own, others, busy, read, last, first = 0, 0, 0, 0, 0, 0, 0
    for row in log:
        if isinstance(row, rows.Opened):
            cpus = row.cpus
        elif isinstance(row, rows.Step):
            busy += row.updated
            if row.own:
                if first:  # what the first reading counts began before the log
                    own, others, read, last = own + row.own, others + row.others, busy, row.at + row.updated
                else:
                    first, busy = row.at + row.updated, 0
    if not cpus or not read or last <= first:
        return None
    return CpuUse(cpus, 1e3 * own / read, 1e3 * others / (last - first))
