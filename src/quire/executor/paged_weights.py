"""Weights of which a bounded part is in memory: the others stay in the mapped file of packed weights.

A step runs in segments of a few ops. Before each one its weights are brought in, and what is needed next is read while
it runs. What makes room is what is needed last: an op's turn comes once a step, so that of the op that ran last;
experts that no token of this step went to come before it, those used longest ago first (Belady's rule, with the past
for what is not known).

A unit is the whole pages of a parameter, or of the matrix of one expert; what is smaller, and pages that two share,
stay. For one fault the kernel maps as much of a file as it has in one piece, up to 2 MiB, but not beyond a mapping. So
each unit is made a mapping of its own, by flags that say nothing here. Of a table the rows of a step's tokens come.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from quire.executor.plans import PagingCounts
from quire.program.memory import param_bytes, weight_bytes
from quire.program.op import Op, param_names
from quire.program.program import Program
from quire.program.tensors import Param
from quire.records import dataclass
from quire.types import MemoryBudgetError
from quire.util.sizes import format_size

FAULT = 2**21  # bytes that one fault maps at most
SMALL = 2**16  # bytes of a parameter that stays
MOST_UNITS = 20_000  # mappings of a process have a limit (vm.max_map_count: 65,530)
_SHARE = 4  # of the bound: a segment with several parameters, and what is read ahead
_POPULATE_READ = 22  # of madvise(2), since Linux 5.14
_FLAGS = mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP  # two neighbours have different ones
_PAGE = mmap.PAGESIZE

RunRange = Callable[[int, int], None]  # ops from one to another
Chosen = Callable[
    [str], Sequence[int]
]  # experts that the tokens of the step go to, by the buffer of their ids


@dataclass(frozen=True, slots=True)
class WeightUnit:
    """Bytes [begin, end) of the weights, whole pages. `expert`: not needed in every step."""

    begin: int
    end: int
    expert: bool = False

    @property
    def size(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class WeightSegment:
    """Ops [begin, end): units that they need, by number; and of an op of experts the unit of each expert, and the
    buffer that says which are needed. `routes`: what that has is another choice from here on."""

    begin: int
    end: int
    units: tuple[int, ...]
    routes: bool = False
    ids: str = ""
    experts: tuple[int, ...] = ()


class PagingPlan:
    """How a program's weights are divided where at most `bound` bytes of them are in memory."""

    def __init__(self, program: Program, bound: int) -> None:
        self.units: list[WeightUnit] = []
        self.tables: list[tuple[int, int]] = []
        self.total = 0
        self._small: set[int] = set()  # pages that stay
        self._of: dict[str, tuple[int, ...]] = {}  # units by parameter
        chosen = {_chosen(op) for op in program.ops}
        for param in program.params:
            self._add(param, per_expert=param.name in chosen)
        self.segments = self._divided(program.ops, (bound - self.fixed) // _SHARE, len(program.body))
        self.head = tuple(
            unit for each in self.segments if each.begin >= len(program.body) for unit in each.units
        )

    @property
    def fixed(self) -> int:
        """Bytes that are always in memory."""
        return len(self._small) * _PAGE

    @property
    def least(self) -> int:
        """The smallest bound with which a step can run."""
        needs = [self._most(each) for each in self.segments]
        return self.fixed + max([*needs, sum([self.units[unit].size for unit in self.head])])

    def _most(self, segment: WeightSegment) -> int:
        return sum([self.units[unit].size for unit in (*segment.units, *segment.experts)])

    def _add(self, param: Param, *, per_expert: bool) -> None:
        size, begin = param_bytes(param), self.total
        self.total += size
        count = param.experts if per_expert else 1
        cuts = [begin + size * number // count for number in range(count + 1)]
        if size // count < SMALL:
            self._small.update(range(begin // _PAGE, -(-self.total // _PAGE)))
            return
        inside = [
            (-(-one // _PAGE) * _PAGE, other // _PAGE * _PAGE) for one, other in itertools.pairwise(cuts)
        ]
        self._small.update([cut // _PAGE for cut in cuts if cut % _PAGE])
        if param.kind == "table":
            self.tables += inside
            return
        first = len(self.units)
        self.units += [WeightUnit(*pages, per_expert) for pages in inside]
        self._of[param.name] = tuple(range(first, first + count))

    def _divided(self, ops: Sequence[Op], most: int, head: int) -> list[WeightSegment]:
        """Segments of ops whose units take no more than `most` bytes together, if they are not those of one op. What a
        router has chosen is known behind it."""
        found: list[WeightSegment] = []
        begin, held, routes = 0, dict[int, None](), False
        for index, op in enumerate(ops):
            routed = _chosen(op) in self._of
            units = [unit for name in param_names(op) if not (routed and name == _chosen(op))
                     for unit in self._of.get(name, ())]  # fmt: skip
            size = sum([self.units[unit].size for unit in {*held, *units}])
            if index > begin and (routed or index == head or (units and size > most)):
                found.append(WeightSegment(begin, index, tuple(held), routes))
                begin, held, routes = index, {}, False
            held |= dict.fromkeys(units)
            routes |= op.chooses_experts
            if routed:
                ids, experts = str(getattr(op, "ids", "")), self._of[_chosen(op)]
                found.append(WeightSegment(index, index + 1, tuple(held), ids=ids, experts=experts))
                begin, held = index + 1, {}
        if begin < len(ops):
            found.append(WeightSegment(begin, len(ops), tuple(held), routes))
        return found


def _chosen(op: Op) -> str:
    """The weight of which an op reads chosen experts; "" if there is none."""
    return str(getattr(op, "weight", "")) if op.reads_chosen_experts else ""


class PagedWeights:
    """Pages of a mapping of weights at `address`, at most `bound` bytes of them in memory. Calls come from one
    thread."""

    def __init__(self, plan: PagingPlan, address: int, bound: int) -> None:
        self._plan, self._address = plan, address
        self._room = bound - plan.fixed
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._resident: dict[int, None] = {}
        self._idle: OrderedDict[int, int] = (
            OrderedDict()
        )  # experts, used longest ago first, and in which step
        self._coming: dict[int, threading.Event] = {}
        self._step = 0
        self._held = 0  # bytes of the units that are in memory, or coming
        self._paged_in, self._seconds = 0, 0.0
        self._asked: queue.SimpleQueue[tuple[int, threading.Event] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read_all, name="quire-weights", daemon=True)
        self._reader.start()
        parts = sorted([*plan.tables, *[(unit.begin, unit.end) for unit in plan.units]])
        for number, part in enumerate(parts):
            self._advise(*part, _FLAGS[number % 2])
        self.forget()

    @property
    def counts(self) -> PagingCounts:
        """What is in memory, and what has come."""
        plan = self._plan
        return PagingCounts(
            min(plan.total, plan.fixed + self._held), plan.total, self._paged_in, self._seconds
        )

    def run(self, run_range: RunRange, chosen: Chosen, begin: int, end: int) -> None:
        """Run ops [begin, end) of the program."""
        self._step += begin == 0
        segments = self._plan.segments
        for index, segment in enumerate(segments):
            first, last = max(begin, segment.begin), min(end, segment.end)
            if first >= last:
                continue
            need = self._needed(segment, chosen)
            self._hold(index, need)
            self._read_ahead(index, need, chosen)
            run_range(first, last)
        for table in self._plan.tables:
            self._advise(*table, mmap.MADV_DONTNEED)

    def hold_head(self) -> None:
        """Bring in what the head needs."""
        self._hold(len(self._plan.segments) - 1, self._plan.head)

    def forget(self) -> None:
        """Have nothing in memory."""
        for event in self._coming.values():
            event.wait()
        self._coming.clear()
        self._resident.clear()
        self._idle.clear()
        self._held = 0
        self._advise(0, -(-self._plan.total // _PAGE) * _PAGE, mmap.MADV_DONTNEED)

    def close(self) -> None:
        """End; the mapping may go."""
        self._asked.put(None)
        self._reader.join()

    def _needed(self, segment: WeightSegment, chosen: Chosen) -> tuple[int, ...]:
        if not segment.experts:
            return segment.units
        return (*segment.units, *[segment.experts[expert] for expert in chosen(segment.ids)])

    def _hold(self, index: int, need: Sequence[int]) -> None:
        """Have units in memory for the segment of this number."""
        started, units = time.perf_counter(), self._plan.units
        missing = [unit for unit in need if unit not in self._resident and unit not in self._coming]
        keep = {*need}
        if not self._make_room(sum([units[unit].size for unit in missing]), index, keep):
            raise MemoryBudgetError("weight_memory: too little for a step")  # see PagingPlan.least
        for unit in missing:
            self._advise(units[unit].begin, units[unit].end, mmap.MADV_WILLNEED)
        for unit in need:
            if (event := self._coming.pop(unit, None)) is not None:
                event.wait()
        for unit in missing:
            try:
                self._populate(units[unit])
            except OSError:
                self._advise(units[unit].begin, units[unit].end, mmap.MADV_DONTNEED)
                raise
            self._take(unit)
            self._resident[unit] = None
        for unit in need:
            self._resident[unit] = None
            if units[unit].expert:
                self._idle[unit] = self._step
                self._idle.move_to_end(unit)
        self._seconds += time.perf_counter() - started

    def _read_ahead(self, index: int, need: Sequence[int], chosen: Chosen) -> None:
        """Have what comes next read while a segment runs, where nothing makes room that is needed before it. Not what
        comes much later: it would take the place of what could have stayed."""
        segments, units, keep = self._plan.segments, self._plan.units, {*need}
        left, ids = self._room // _SHARE, segments[index].ids
        for ahead in range(1, len(segments)):
            number = (index + ahead) % len(segments)
            segment = segments[number]
            ids = "" if segment.routes else ids
            for unit in self._needed(segment, chosen) if segment.ids == ids else segment.units:
                left -= units[unit].size
                if left < 0:
                    return
                if unit in self._resident or unit in self._coming:
                    keep.add(unit)
                    continue
                if not self._make_room(units[unit].size, index, keep, len(segments) - ahead):
                    return
                keep.add(unit)
                self._take(unit)
                event = self._coming[unit] = threading.Event()
                self._asked.put((unit, event))

    def _take(self, unit: int) -> None:
        size = self._plan.units[unit].size
        self._held += size
        self._paged_in += size

    def _make_room(self, size: int, index: int, keep: set[int], behind: int | None = None) -> bool:
        """Let units go until so many bytes fit; whether they do. `behind`: those of so many segments before this one
        may, and experts of no token of this step."""
        while self._held + size > self._room:
            unit = self._last_needed(index, keep, behind)
            if unit is None:
                return False
            self._drop(unit)
        return True

    def _last_needed(self, index: int, keep: set[int], behind: int | None) -> int | None:
        """The unit in memory, and not in `keep`, whose turn is expected last."""
        for unit, step in self._idle.items():
            if step >= self._step:
                break
            if unit not in keep:
                return unit
        segments = self._plan.segments
        for back in range(1, len(segments) if behind is None else behind):
            for unit in reversed(segments[index - back].units):
                if unit not in keep and unit in self._resident:
                    return unit
        if behind is None:
            for unit in (*self._idle, *self._coming):
                if unit not in keep:
                    return unit
        return None

    def _drop(self, unit: int) -> None:
        if (event := self._coming.pop(unit, None)) is not None:
            event.wait()
        self._resident.pop(unit, None)
        self._idle.pop(unit, None)
        found = self._plan.units[unit]
        self._held -= found.size
        self._advise(found.begin, found.end, mmap.MADV_DONTNEED)

    def _read_all(self) -> None:
        while (asked := self._asked.get()) is not None:
            unit, event = asked
            found = self._plan.units[unit]
            with contextlib.suppress(OSError):  # then the step reads it, page by page
                self._advise(found.begin, found.end, mmap.MADV_WILLNEED)
                self._populate(found)
            event.set()

    def _populate(self, unit: WeightUnit) -> None:
        """Have the pages of a unit that was asked for mapped. Raises OSError."""
        try:
            self._advise(unit.begin, unit.end, _POPULATE_READ)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            pages = (ctypes.c_uint8 * unit.size).from_address(self._address + unit.begin)
            np.add.reduce(np.ctypeslib.as_array(pages)[::_PAGE])

    def _advise(self, begin: int, end: int, advice: int) -> None:
        """Advise the kernel about bytes of the weights. Raises OSError."""
        if self._libc.madvise(ctypes.c_void_p(self._address + begin), ctypes.c_size_t(end - begin), advice):
            number = ctypes.get_errno()
            raise OSError(number, f"madvise of weights: {errno.errorcode.get(number, number)}")


def weights_in_memory(program: Program, bound: int | None, max_tokens: int) -> int:
    """Bytes of weights that are in memory at most, in steps of so many tokens: of tables the rows of these, too. Raises
    MemoryBudgetError if no step can run with so few."""
    whole = weight_bytes(program)
    if bound is None or bound >= whole:
        return whole
    plan = PagingPlan(program, bound)
    if len(plan.units) > MOST_UNITS:
        raise MemoryBudgetError(
            f"weight_memory: the weights have {len(plan.units)} parts that come and go, over the limit of {MOST_UNITS}"
        )
    if bound < (least := plan.least):
        raise MemoryBudgetError(
            f"weight_memory: {format_size(bound)} is too little for a step of this model: of its {format_size(whole)} "
            f"at least {format_size(least)} are needed at once"
        )
    return min(whole, bound + sum([min(end - begin, max_tokens * FAULT) for begin, end in plan.tables]))
