"""Writes the log of one engine: the latest rows in memory, and all of them in a file if there is one.

A step costs some microseconds. Rows of requests cost a keyed digest for each block of their prompts.
"""

from __future__ import annotations

import secrets
import time
from array import array
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

from quire.config.live import LiveEngineConfig
from quire.core.cache_misses import Miss
from quire.core.scheduler_config import SchedulerConfig
from quire.core.service_estimates import has_known_length
from quire.records import dataclass
from quire.steplog import log_rows as rows
from quire.steplog.cpu_times import CpuClock
from quire.steplog.log_files import HEADER, WINDOW_BYTES, LogFile, framed, unframed
from quire.steplog.log_rows import SAMPLE_BITS, LogRow, TokenChain, encode
from quire.types import PARAMETERS, FinishReason, Request, SchedulerOutput, SeqEvent, StepOutput

RING_BYTES = 2**20
_SHARED, _RING_SHARED = (
    2**15,
    2**12,
)  # digests of blocks remembered to say what prompts share: for a file, a ring
_DIGEST_BYTES = 240
# The rows, a copy and a frame of them when they are asked for, remembered misses, digests; with a file there are more.
MEMORY_BYTES = 4 * RING_BYTES + _DIGEST_BYTES * _RING_SHARED
FILE_MEMORY_BYTES = _DIGEST_BYTES * (_SHARED - _RING_SHARED) + WINDOW_BYTES
_ACCOUNTS = 4096  # whose order is known
_COSTS_EVERY = 256  # steps
_REASONS = {
    FinishReason.ERROR: rows.FAILED,
    FinishReason.NO_TOKEN: rows.NO_TOKEN,
    FinishReason.GRAMMAR_DEAD_END: rows.DEAD_END,
    FinishReason.GRAMMAR_LIMIT: rows.GRAMMAR_LIMIT,
}
_NONE: list[int] = []  # never changed
_ALONE = (-1, -1)  # shares nothing
_BY_THE_HOST = {"stop", "stop_token_ids"}  # what they decide is in the log
_NUMBERS = {name: parameter for name, parameter in PARAMETERS.items() if parameter.kind in {int, float}}


@dataclass(slots=True)
class _Live:
    number: int
    digest: bytes  # of its chain: of the whole blocks of its prompt, once they are in it
    prompt: Sequence[int]
    samples: dict[int, list[int]]  # output tokens of samples that have not ended
    seen: bool = False  # it has started once


class _Planned(NamedTuple):
    """Of a step: four numbers for each row; rows with drafts; samples that were preempted; three numbers for each that
    started."""

    rows: list[int]
    drafting: list[int]
    preempted: list[int]
    started: list[int]


class StepTimes(NamedTuple):
    """Readings of the clock in a step, in nanoseconds: when it began, and after that."""

    at: int
    scheduled: int
    executed: int
    updated: int
    draft: int  # nanoseconds for drafts


class StepFacts(NamedTuple):
    """Fields of rows.Step that the engine knows."""

    predicted: int
    blocks: int
    waiting: int
    limits: tuple[int, int]
    fetching: list[int]
    stages: tuple[int, ...] = ()


class Recorder:
    """The log of an engine of `config`. `prompts`: token ids of prompts and outputs are written into the file. `cpus`
    are the processors that the engine's process shares with all others, 0 if that is not all that there is to tell."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        file: LogFile | None = None,
        prompts: bool = False,
        ring_bytes: int = RING_BYTES,
        classes: str = "",
        model: str = "",
        batching: str = "continuous",
        swap: bool = False,
        costs: tuple[float, ...] = (),
        cpus: int = 0,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._config, self._file, self._prompts = config, file, prompts
        self._classes, self._model, self.costs, self._cpus = classes, model, costs, cpus
        self._ring: deque[bytes] = deque()
        self._ring_bytes, self._ring_size, self._count = ring_bytes, 0, 0
        self._clock = clock
        self._batching, self._swap, self._part = batching, swap, 0
        self._key = secrets.token_bytes(16)
        self._known: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._live: dict[str, _Live] = {}
        self._accounts: list[str] = []  # in order
        self._alive: set[int] = set()  # keys of samples that have not ended
        self._keys: dict[int, int] = {}  # sequences at the worker
        self._next = 0
        self._steps = 0
        self._cpu = CpuClock()
        self._drafts = config.max_draft_tokens > 0
        self._planned: deque[_Planned] = deque()  # steps in flight
        self._drafting = _NONE  # of the step that has ended
        self._put(self._opened())

    # -- what happens ---------------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """A request came; it is not given to the scheduler yet."""
        domain = self._name(request.tenant), self._name(request.namespace), self._name(request.adapter)
        seed = repr((domain, request.soft_tokens)).encode()
        prompt, samples = _parts(request)
        live = _Live(self._next, seed, prompt, samples)
        self._next += 1
        self._live[request.request_id] = live
        self._alive.update(live.number << SAMPLE_BITS | sample for sample in live.samples)
        terms, params = request.terms, request.params
        self._put(
            rows.Arrived(
                at=self._clock(),
                number=live.number,
                request_id=request.request_id,
                arrival=request.arrival,
                prompt_tokens=len(prompt),
                chain=self._prompt_chain(live),
                params={
                    name: getattr(params, name)
                    for name, parameter in _NUMBERS.items()
                    if getattr(params, name) not in {parameter.default, None}
                },
                domain=domain,
                priority=request.priority,
                service_class=terms.service_class,
                account=self._name(terms.account),
                expected_tokens=terms.expected_tokens,
                weight=terms.weight,
                due=terms.due,
                traits=_traits(request),
                negative_tokens=len(request.negative_prompt or ()),
                place=self._place(terms.account),
                stops=tuple(params.stop_token_ids)
                + (() if params.ignore_eos else tuple(request.eos_token_ids))
                if self._prompts
                else (),
            )
        )

    @property
    def wants_costs(self) -> bool:
        """Whether the next step is followed by the weights of the cost model, which are to be in `costs`."""
        return (self._steps + 1) % _COSTS_EVERY == 0

    def starts(self, request_id: str, sample: int) -> bool:
        """Whether the first sample of a request starts for the first time; asked once."""
        live = self._live.get(request_id)
        if live is None or sample or live.seen:
            return False
        live.seen = True
        return True

    def queued(self, request_id: str) -> None:
        """The scheduler has the request."""
        if live := self._live.get(request_id):
            self._put(rows.Queued(self._clock(), live.number))

    def aborted(self, request_id: str) -> None:
        """A request is ended from outside."""
        if live := self._live.pop(request_id, None):
            self._alive.difference_update(live.number << SAMPLE_BITS | sample for sample in live.samples)
            made = tuple(
                (sample, len(tokens), self._output_chain(live, sample, tokens))
                for sample, tokens in live.samples.items()
                if tokens
            )
            self._put(rows.Aborted(self._clock(), live.number, made))

    def finished(self, request_id: str, sample: int) -> None:
        """A sample is ended for its text."""
        if live := self._live.get(request_id):
            self._put(rows.Finished(self._clock(), live.number, sample))
            self._end(request_id, live, sample, FinishReason.STOP)

    def missed(self, request_id: str, miss: Miss) -> None:
        """Some of a prompt was not found in the cache."""
        if live := self._live.get(request_id):
            row = rows.Missed(
                self._clock(), live.number, miss.kind, miss.hit, miss.lost, miss.differs_at,
                miss.ours, miss.theirs,
            )  # fmt: skip
            hidden = rows.Missed(row.at, row.number, row.kind, row.hit, row.lost, row.differs_at)
            self._put(row, None if self._prompts else hidden)

    def changed(self, name: str, values: tuple[float, ...]) -> None:
        """The cost model has learned."""
        self._put(rows.Changed(self._clock(), name, values))

    def configured(self, live: LiveEngineConfig) -> None:
        """Another configuration is in force from the next step on."""
        shares = {self._name(name): share for name, share in live.cache_shares.items()}
        self._put(rows.Reconfigured(self._clock(), _fields(live) | {"cache_shares": shares}))

    def told(self, row: bytes) -> None:
        """A row that the server has made: rows.ServerMarks or rows.Turned."""
        self._put_frame(framed(row))

    def planned(self, out: SchedulerOutput) -> None:
        """A step was scheduled: its rows as they are before drafts are made."""
        preempted = self._preempted(out) if out.gone else _NONE
        for new in out.new:
            live = self._live.get(new.request_id)
            number = -1 if live is None else live.number
            self._keys[new.seq_id] = number << SAMPLE_BITS | new.sample_index
        started = self._started(out) if out.new else _NONE
        drafting = _NONE
        if self._drafts:
            drafting = [index for index, row in enumerate(out.scheduled) if row.logits > 1]
        self._planned.append(_Planned(self._rows(out), drafting, preempted, started))

    def _rows(self, out: SchedulerOutput) -> list[int]:
        """Four numbers for each row; the last one is to be the tokens that it accepts."""
        flat: list[int] = []
        key = self._keys.get
        for row in out.scheduled:
            flat += (key(row.seq_id, -1), row.start, len(row.token_ids), 0)
        return flat

    def stepped(
        self,
        out: SchedulerOutput,
        result: StepOutput,
        events: Sequence[SeqEvent],
        times: StepTimes,
        facts: StepFacts,
    ) -> None:
        """A step has ended."""
        flat, self._drafting, preempted, started = self._planned.popleft()
        flat[3::4] = map(len, result.token_ids)
        at, scheduled, executed, updated, draft = times
        predicted, blocks, waiting, limits, fetching, stages = facts
        seconds, ended = result.seconds, self._take(events)
        cpu = self._cpu.since(updated)
        # by position, in the order of the fields: half the time of doing it by name
        self._put(
            rows.Step(
                out.step, at, scheduled - at, executed - at, updated - at,
                int(1e6 * seconds.get("forward", 0.0)), int(1e6 * seconds.get("sample", 0.0)), draft // 1000,
                cpu.stolen, predicted, blocks, waiting, limits, flat, self._notes(flat, out, result, ended),
                started, preempted, fetching, cpu.others, cpu.own, stages,
            )
        )  # fmt: skip
        for event, live in ended:
            assert event.finish_reason is not None
            self._end(event.request_id, live, event.sample_index, event.finish_reason, updated)
        self._steps += 1
        if self._steps % _COSTS_EVERY == 0:
            self.changed("costs", self.costs)

    def _started(self, out: SchedulerOutput) -> list[int]:
        started: list[int] = []
        for new in out.new:
            known = max((len(blocks) for blocks in new.blocks), default=0) * self._config.block_size
            started += (self._keys[new.seq_id], known, new.seed)
        return started

    def _preempted(self, out: SchedulerOutput) -> list[int]:
        gone = [self._keys.pop(seq_id, -1) for seq_id in out.gone]
        return [key for key in gone if key in self._alive]

    def key(self, request_id: str, sample: int) -> int:
        """The key of a sample."""
        live = self._live.get(request_id)
        return -1 if live is None else live.number << SAMPLE_BITS | sample

    # -- what was recorded ----------------------------------------------------------------------------------

    def ring(self) -> bytes:
        """The latest rows as a log."""
        return b"".join((HEADER, framed(encode(self._opened())), *self._ring))

    def since(self, count: int) -> tuple[bytes, int]:
        """The rows after the first `count` of this engine as a log, as far as they are kept; and how many there are."""
        fresh = max(0, min(self._count - count, len(self._ring)))
        frames = list(islice(reversed(self._ring), fresh))
        return b"".join((HEADER, *reversed(frames))), self._count

    @property
    def oldest(self) -> int:
        """When the oldest row that is kept and has a time was written, in nanoseconds."""
        for frame in self._ring:
            if at := getattr(unframed(frame), "at", 0):
                return int(at)
        return self._clock()

    def close(self) -> None:
        """The engine ends in order."""
        self._put(rows.Closed(self._clock()))
        if self._file is not None:
            self._file.close()

    @property
    def trouble(self) -> str:
        """Why the file is not written any more."""
        return "" if self._file is None else self._file.broken

    def _opened(self) -> rows.Opened:
        options = asdict(self._config)
        options["floors"] = {self._name(name): blocks for name, blocks in self._config.floors.items()}
        options["groups"] = [[type(group).__name__, _fields(group)] for group in self._config.groups]
        return rows.Opened(
            self._clock(), time.time(), options, self.costs, self._classes, self._prompts, self._model,
            self._batching, self._swap, self._part,
            len(self._live), self._cpus,
        )  # fmt: skip

    def _put(self, row: LogRow, in_file: LogRow | None = None) -> None:
        frame = framed(encode(row))
        self._put_frame(frame, None if in_file is None else framed(encode(in_file)))

    def _put_frame(self, frame: bytes, in_file: bytes | None = None) -> None:
        self._ring.append(frame)
        self._count += 1
        self._ring_size += len(frame) + 64
        while self._ring_size > self._ring_bytes:
            self._ring_size -= len(self._ring.popleft()) + 64
        if self._file is not None:
            frame = in_file or frame
            if self._file.is_full(len(frame)):
                self._file.turn()
                self._part += 1
                self._file.write(framed(encode(self._opened())))
            self._file.write(frame)

    def _take(self, events: Iterable[SeqEvent]) -> list[tuple[SeqEvent, _Live]]:
        """Take in the tokens of a step; returns the samples that it has ended."""
        live_of, ended = self._live.get, []
        for event in events:
            live = live_of(event.request_id)
            if live is not None and (tokens := live.samples.get(event.sample_index)) is not None:
                tokens += event.new_token_ids
                if event.finish_reason is not None:
                    ended.append((event, live))
        return ended

    def _end(self, request_id: str, live: _Live, sample: int, reason: FinishReason, at: int = 0) -> None:
        tokens = live.samples.pop(sample, None)
        if tokens is None:
            return
        self._alive.discard(live.number << SAMPLE_BITS | sample)
        chain = self._output_chain(live, sample, tokens)
        self._put(rows.Ended(at or self._clock(), live.number, sample, str(reason), len(tokens), chain))
        if not live.samples:
            del self._live[request_id]

    def _prompt_chain(self, live: _Live) -> TokenChain:
        chain, live.digest = self._chain(live.digest, live.prompt, (live.number, -1), live.prompt)
        return chain

    def _output_chain(self, live: _Live, sample: int, tokens: list[int]) -> TokenChain:
        """Of prompt and output. The blocks of the prompt are those of its own chain."""
        whole = len(live.prompt) // self._config.block_size
        like = (live.number, -1) if whole else _ALONE
        rest = [*live.prompt[whole * self._config.block_size :], *tokens]
        return self._chain(live.digest, rest, (live.number, sample), tokens, like, whole)[0]

    def _chain(
        self,
        digest: bytes,
        tokens: Sequence[int],
        name: tuple[int, int],
        own: Sequence[int],
        like: tuple[int, int] = _ALONE,
        before: int = 0,
    ) -> tuple[TokenChain, bytes]:
        """What tokens share with earlier ones, behind `before` blocks of `digest` that are those of `like`; and the
        digest of all whole blocks. `own`: the tokens to record."""
        size, known, shared = self._config.block_size, self._known, before
        most = _RING_SHARED if self._file is None else _SHARED
        data = array("i", tokens)
        for block in range(len(data) // size):
            part = data[block * size : (block + 1) * size].tobytes()
            digest = blake2b(digest + part, digest_size=8, key=self._key).digest()
            found = known.get(digest)
            if found is None:
                known[digest] = name
                if len(known) > most:
                    known.popitem(last=False)
            elif shared == before + block:
                like, shared = found, shared + 1
                known.move_to_end(digest)
        written = array("i", own).tobytes() if self._prompts else b""
        there = before or len(data) >= size
        return TokenChain(like, shared, digest if there else b"", written), digest

    def _place(self, account: str) -> int:
        """Where a new account stands among those seen, by name; -1 for one that is known."""
        names = self._accounts
        at = bisect_left(names, account)
        if (at < len(names) and names[at] == account) or len(names) >= _ACCOUNTS:
            return -1
        names.insert(at, account)
        return at

    def _name(self, text: str) -> str:
        """A keyed digest in place of a name."""
        return (
            blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6, key=self._key).hexdigest()
            if text
            else ""
        )

    def _notes(
        self,
        flat: list[int],
        out: SchedulerOutput,
        result: StepOutput,
        ended: Iterable[tuple[SeqEvent, _Live]],
    ) -> list[int]:
        stopped = {
            live.number << SAMPLE_BITS | event.sample_index: len(event.new_token_ids)
            for event, live in ended
            if event.stop_token_id is not None
        }
        if not (
            stopped or self._drafting or result.failed or result.late or result.complete or result.pooled
            or result.drafts or result.depths
        ):  # fmt: skip
            return _NONE
        notes: list[int] = []
        for index in self._drafting:
            notes += (index, rows.DRAFTS, out.scheduled[index].drafts)
        for index, reason in result.failed.items():
            notes += (index, _REASONS.get(reason, rows.FAILED), 0)
        for index in result.late:
            notes += (index, rows.LATE, 0)
        for index in result.complete:
            notes += (index, rows.COMPLETE, 0)
        for index in result.pooled:
            notes += (index, rows.POOLED, 0)
        for index, drafts in result.drafts.items():
            notes += (index, rows.PROPOSED, len(drafts))
        for index, depth in result.depths.items():
            notes += (index, rows.TREE, depth)
        if stopped:
            for index in range(len(out.scheduled)):
                if (kept := stopped.get(flat[4 * index])) is not None:
                    notes += (index, rows.STOPPED, kept)
        return notes


def _fields(group: Any) -> dict[str, Any]:
    return {field.name: getattr(group, field.name) for field in fields(group)}


def _parts(request: Request) -> tuple[Sequence[int], dict[int, list[int]]]:
    """The prompt, and the output tokens of each sample so far. What is given to an only sample is computed like a part
    of its prompt, and recorded as one; several have a prompt in common."""
    prompt, given = request.prompt_token_ids, request.given
    if len(given) == 1:
        return [*prompt, *given[0]], {0: []}
    return prompt, {i: list(given[i]) if given else [] for i in range(request.params.n)}


def _traits(request: Request) -> tuple[str, ...]:
    """What replay and explanations have to know."""
    found = {
        "grammar": request.grammar is not None,
        "adapter": bool(request.adapter),
        "stepwise": request.stepwise,
        "beams": request.beams is not None,
        "pooling": request.pooling,
        "negative": request.negative_prompt is not None,
        "given": bool(request.given),
        "soft": bool(request.soft_tokens),
        "known length": has_known_length(request.params),
        "other parameters": any(
            (value := getattr(request.params, name)) != parameter.default
            and [*value] != [*(parameter.default or ())]
            for name, parameter in PARAMETERS.items()
            if parameter.kind in {dict, list} and name not in _BY_THE_HOST
        ),
    }
    return tuple(name for name, there in found.items() if there)
