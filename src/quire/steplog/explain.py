"""Where the time of a request went: its life in consecutive spans, each with one reason, from a log.

    first byte ─ receive ─ parse ─ tokenize ─ grammar ─ memory ─ handover ─ queue ─ steps ─ detokenize ─ write

Spans follow each other without a gap, so their sum is the time from the first byte read to the last one written. A step
that computes a part of the request is divided by what its rows cost (core.cost_model): chunks of other prompts, its
own share, drafts. Time in steps that compute nothing of it is the wait for something.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field

from quire.records import dataclass
from quire.steplog import log_rows as rows
from quire.steplog.log_rows import SAMPLE_BITS, AnyRow

NS = 1_000_000_000
# name of a part -> what it says, and whether something else than the request itself is the reason
PARTS: dict[str, tuple[str, bool]] = {
    "receive": ("the body arrived", True),
    "parse": ("the body was parsed", False),
    "tokenize": ("the template was rendered and the text tokenized", False),
    "grammar": ("it waited for its grammar", True),
    "memory": ("it waited for memory for its answer", True),
    "handover": ("it passed to the engine process, behind a running step", True),
    "adapter": ("it waited until its adapter was in a slot", True),
    "queue": ("it waited in the queue", True),
    "fetch": ("it waited for blocks from the swap space", True),
    "prefill": ("its prompt was computed", False),
    "recompute": ("what a preemption had taken was computed again", True),
    "preempted": ("it waited for its turn again after a preemption", True),
    "other prompts": ("its steps computed prompts of others", True),
    "decode": ("its tokens were generated", False),
    "draft": ("drafts were made", False),
    "held back": ("it ran, and the steps had no row for it", True),
    "engine": ("between steps: commands and reports", False),
    "detokenize": ("its last token became text", False),
    "write": ("the answer was written", False),
    "slow reader": ("the client did not read", True),
    "cancel": ("it was ended from outside", False),
}
STAGES = ("embed", "layers", "project", "sample")  # of a step, in the order of rows.Step.stages


@dataclass(frozen=True, slots=True)
class LifeSpan:
    """Nanoseconds, and the reason; `detail` is a number or a name for the reader."""

    start: int
    end: int
    part: str
    detail: str = ""


@dataclass(slots=True)
class Explanation:
    """The life of a request. Times in nanoseconds. `behind` has the time in the queue by the key of what ran."""

    request_id: str
    number: int
    spans: list[LifeSpan] = field(default_factory=list)
    behind: Counter[tuple[int, str]] = field(default_factory=Counter)
    batches: Counter[int] = field(default_factory=Counter)  # decode time by rows of the step
    why_queued: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    chunks: int = 0
    preemptions: int = 0
    cached: int = 0
    prompt: int = 0
    output: int = 0
    drafted: int = 0
    stolen: int = 0
    finished: bool = False
    reason: str = ""
    miss: rows.Missed | None = None
    took_part: list[rows.Step] = field(default_factory=list)

    def stages(self) -> dict[str, int]:
        """Nanoseconds of the steps that computed something of it by stage, as far as these were measured."""
        measured = [step.stages for step in self.took_part if step.stages]
        sums = [1000 * sum(each) for each in zip(*measured, strict=True)]
        return dict(zip(STAGES, sums, strict=False))

    @property
    def total(self) -> int:
        return self.spans[-1].end - self.spans[0].start if self.spans else 0

    def parts(self) -> dict[str, int]:
        """Nanoseconds by part, in the order of PARTS; their sum is `total`."""
        found: Counter[str] = Counter()
        for span in self.spans:
            found[span.part] += span.end - span.start
        return {name: found[name] for name in PARTS if found[name]}

    def cause(self) -> str:
        """What the time was lost to: the largest part that is not the request's own work, if it is a tenth or more of
        the time; else its own largest part."""
        parts, total = self.parts(), self.total
        if not total:
            return ""
        lost = {name: time for name, time in parts.items() if PARTS[name][1] and 10 * time >= total}
        if "recompute" in parts and "preempted" in parts:
            both = parts["recompute"] + parts["preempted"]
            if 10 * both >= total:
                lost["preempted"] = both
        if self.stolen * 5000 >= total and self.stolen * 1000 > max(lost.values(), default=0):
            return "stolen CPU"
        if lost:
            worst = max(lost, key=lambda name: lost[name])
            return (
                f"queue: {self.why_queued.most_common(1)[0][0]}"
                if worst == "queue" and self.why_queued
                else worst
            )
        return max(parts, key=lambda name: parts[name])


def explain(log: Sequence[AnyRow], request_id: str) -> Explanation | None:
    """The life of the latest request of that name, up to the end of the log. None if the log has no such request."""
    arrived = next(
        (row for row in reversed(log) if isinstance(row, rows.Arrived) and row.request_id == request_id), None
    )
    if arrived is None:
        return None
    return _Walk(log, arrived).run()


class _Walk:
    """Goes through a log once, from the arrival of a request to its end."""

    def __init__(self, log: Sequence[AnyRow], arrived: rows.Arrived) -> None:
        self._log, self._arrived = log, arrived
        self._found = Explanation(arrived.request_id, arrived.number, prompt=arrived.prompt_tokens)
        self._marks = next(
            (
                row
                for row in log
                if isinstance(row, rows.ServerMarks) and row.request_id == arrived.request_id
            ),
            None,
        )
        self._cursor = 0
        self._state = "handover"
        self._reach: dict[int, int] = {}  # sample -> tokens that were computed once
        self._prompts: dict[int, int] = {}  # number -> tokens of its prompt
        opened = next((row for row in log if isinstance(row, rows.Opened)), None)
        self._costs = opened.costs if opened else ()
        self._options: Mapping[str, object] = opened.options if opened else {}
        self._open = set(range(int(arrived.params.get("n", 1))))

    def run(self) -> Explanation:
        arrived, marks, found = self._arrived, self._marks, self._found
        begin = marks.begun if marks else arrived.arrival
        self._cursor = int(begin * NS) if begin else arrived.at
        if marks is not None:
            self._to(int(marks.received * NS), "receive")
            self._to(int(marks.parsed * NS), "parse")
        self._to(int(arrived.arrival * NS), "tokenize")
        if marks is not None:
            self._to(int(marks.compiled * NS), "grammar")
            self._to(int(marks.admitted * NS), "memory")
        self._to(arrived.at, "handover")
        traits = arrived.traits
        self._state = "grammar" if "grammar" in traits else "adapter" if "adapter" in traits else "handover"
        ended = self._walk()
        found.finished = ended
        if marks is not None and (ended or marks.written):
            self._finish(marks)
        return found

    def _finish(self, marks: rows.ServerMarks) -> None:
        self._to(int(marks.finished * NS), "detokenize")
        end, unread = int(marks.written * NS), int(marks.unread * NS)
        self._to(end - unread, "write")
        self._to(end, "slow reader")

    def _to(self, end: int, part: str, detail: str = "") -> int:
        """Time up to `end` belongs to a part; returns how much that is."""
        start = self._cursor
        if end <= start:
            return 0
        spans = self._found.spans
        if spans and spans[-1].part == part and spans[-1].detail == detail:
            start = spans.pop().start
        spans.append(LifeSpan(start, end, part, detail))
        passed, self._cursor = end - self._cursor, end
        return passed

    def _walk(self) -> bool:
        """Go through the engine's rows; whether the request has ended."""
        number, seen = self._arrived.number, False
        for row in self._log:
            match row:
                case rows.Arrived():
                    self._prompts[row.number] = row.prompt_tokens
                    seen = seen or row is self._arrived
                case rows.Changed(name="costs"):
                    self._costs = row.values
                case rows.Missed(number=n) if n == number:
                    self._found.miss = row
                case rows.Queued(number=n) if n == number and seen:
                    self._to(row.at, self._state)
                    self._state = "queue"
                case rows.Step():
                    if row.at + row.updated > self._cursor and (seen or row.at < self._arrived.at):
                        self._step(row)
                case rows.Ended(number=n) if n == number and seen:
                    self._found.output += row.tokens
                    self._found.reason = row.reason
                    self._to(row.at, "engine")
                    self._open.discard(row.sample)
                    if not self._open:
                        return True
                case rows.Aborted(number=n) if n == number and seen:
                    self._found.reason = "abort"
                    self._to(row.at, self._state if self._state != "running" else "engine")
                    self._state = "cancel"
                    return True
        return False

    def _step(self, step: rows.Step) -> None:
        number, found, flat = self._arrived.number, self._found, step.rows
        own: list[list[int]] = []
        others: list[list[int]] = []
        for i in range(0, len(flat), 4):
            (own if flat[i] >> SAMPLE_BITS == number else others).append(flat[i : i + 4])
        if step.at + step.updated <= self._arrived.at:
            return
        fetching = any(key >> SAMPLE_BITS == number for key in step.fetching)
        taken = {key for key in step.preempted if key >> SAMPLE_BITS == number}
        waits = "engine" if self._state == "running" else self._state
        gap = self._to(step.at, waits)
        if waits == "queue" and gap:
            found.why_queued[self._why(step, others)] += gap
        for i in range(0, len(step.started), 3):
            if step.started[i] >> SAMPLE_BITS == number:
                if self._state == "queue":
                    found.cached = max(found.cached, step.started[i + 1])
                self._state = "running"
        if taken and not own:
            found.preemptions += len(taken)
            self._state = "preempted"
        end = step.at + step.updated
        found.stolen += step.stolen if own else 0
        if own:
            self._computed(step, own, others, end)
        elif self._state == "running":
            self._to(end, "fetch" if fetching else "held back")
        else:
            self._wait(step, others, end, "fetch" if fetching else self._state)

    def _wait(self, step: rows.Step, others: list[list[int]], end: int, part: str) -> None:
        passed = self._to(end, part)
        if part != "queue" or not passed:
            return
        self._found.why_queued[self._why(step, others)] += passed
        costs = [(row, self._cost(row)) for row in others]
        whole = sum(cost for _, cost in costs) or 1.0
        for row, cost in costs:
            kind = "prompt" if self._is_prompt(row) else "decode"
            self._found.behind[row[0] >> SAMPLE_BITS, kind] += int(passed * cost / whole)

    def _why(self, step: rows.Step, others: list[list[int]]) -> str:
        """Why a request was not started in a step."""
        tokens, slots = step.limits
        if sum(row[2] for row in others) >= tokens:
            return "prompts of others took the tokens of its steps"
        if len({row[0] for row in others}) >= slots:
            return "all places were taken"
        if step.at < self._arrived.at:
            return "a step was running"
        blocks = self._options.get("num_blocks")
        size = self._options.get("block_size")
        if isinstance(blocks, int) and isinstance(size, int):
            need = -(-self._arrived.prompt_tokens // size)
            if step.blocks + need > blocks - len(others):
                return "the KV cache was full"
        return "others were ahead of it"

    def _computed(self, step: rows.Step, own: list[list[int]], others: list[list[int]], end: int) -> None:
        found, begin = self._found, max(self._cursor, step.at)
        found.steps += 1
        found.took_part.append(step)
        prompts = sum(self._cost(row) for row in others if self._is_prompt(row))
        whole = (self._costs[0] if self._costs else 0.0) + sum(map(self._cost, (*own, *others)))
        length = end - begin
        draft = min(length, step.draft * 1000)
        work = length - draft
        theirs = int(work * prompts / whole) if whole else 0
        if draft:
            self._to(begin + draft, "draft")
        if theirs:
            self._to(begin + draft + theirs, "other prompts")
        row = max(own, key=lambda one: one[2])
        sample = row[0] & (1 << SAMPLE_BITS) - 1
        reach = self._reach.get(sample, 0)
        if self._noted(step, rows.LATE):
            self._to(end, "grammar")
        elif row[1] + row[2] <= reach:
            self._to(end, "recompute")
        elif self._is_prompt(row):
            found.chunks += 1
            self._to(end, "prefill", f"{row[2]} tokens")
        else:
            count = len(own) + len(others)
            found.batches[count] += self._to(end, "decode", f"{count} rows")
        for each in own:
            sample = each[0] & (1 << SAMPLE_BITS) - 1
            self._reach[sample] = max(self._reach.get(sample, 0), each[1] + each[2])
        found.drafted += self._noted(step, rows.DRAFTS)

    def _noted(self, step: rows.Step, what: int) -> int:
        """Sum of the values of a note over the request's rows; for LATE, how many there are."""
        found = 0
        for i in range(0, len(step.notes), 3):
            row, note, value = step.notes[i : i + 3]
            if note == what and step.rows[4 * row] >> SAMPLE_BITS == self._arrived.number:
                found += 1 if what == rows.LATE else value
        return found

    def _is_prompt(self, row: Sequence[int]) -> bool:
        return row[1] < self._prompts.get(row[0] >> SAMPLE_BITS, row[1] + (row[2] > 1))

    def _cost(self, row: Sequence[int]) -> float:
        """Seconds of a row beside those of the step, or its tokens if costs are unknown."""
        costs, (_, start, tokens, _) = self._costs, row
        if len(costs) < 5 or not any(costs):
            return float(tokens)
        if self._is_prompt(row):
            return costs[2] * tokens + costs[4] * tokens * (start + tokens / 2)
        return costs[1] + costs[3] * (start + tokens) + (costs[7] * (tokens - 1) if len(costs) > 7 else 0.0)


def text_of(found: Explanation, name_of: Mapping[int, str] | None = None) -> str:
    """The explanation for a reader: a sentence, a table, a timeline. `name_of`: names of requests that may be shown."""
    total = found.total or 1
    lines = [sentence(found, name_of or {}), ""]
    for part, time in found.parts().items():
        lines.append(f"  {part:<18} {time / 1e6:>10.1f} ms {time / total:>6.1%}  {PARTS[part][0]}")
    lines.append(f"  {'sum':<18} {found.total / 1e6:>10.1f} ms")
    if stages := found.stages():
        measured = ", ".join(f"{name} {time / 1e6:.1f} ms" for name, time in stages.items())
        lines.append(f"  its steps, with all that was in them: {measured}")
    lines.append("")
    lines += _timeline(found.spans)
    return "\n".join(lines)


def sentence(found: Explanation, name_of: Mapping[int, str]) -> str:
    """What happened, in a sentence or two."""
    parts = found.parts()
    text = f"{found.request_id}: {found.total / 1e6:.1f} ms"
    text += "" if found.finished else " so far"
    text += f" for {found.prompt} prompt tokens ({found.cached} from the cache) and {found.output} tokens of output"
    if found.reason:
        text += f", ended by {found.reason}"
    cause = found.cause()
    name = cause.partition(":")[0]
    if name == "queue":
        why = cause.partition(": ")[2]
        text += f". Most was lost in the queue, {parts['queue'] / 1e6:.0f} ms: {why}"
        if found.behind:
            (number, kind), _ = found.behind.most_common(1)[0]
            what = "the prompt" if kind == "prompt" else "the answer"
            text += f", above all {what} of {name_of.get(number, 'another request')}"
    elif name == "stolen CPU":
        text += f". The machine gave {found.stolen / 1e3:.0f} ms of its processors to others"
    elif name in parts:
        text += f". {'Most was lost' if PARTS[name][1] else 'Most was its own work'}: {PARTS[name][0]}"
        text += f", {parts[name] / 1e6:.0f} ms"
    if found.preemptions:
        text += f". It was preempted {found.preemptions} times"
    if found.batches:
        rows_, _ = found.batches.most_common(1)[0]
        text += f". It decoded mostly in steps of {rows_} rows"
    return text + "."


def _timeline(spans: Iterable[LifeSpan], most: int = 40) -> list[str]:
    """Spans with their times; many short ones are drawn together."""
    found: list[LifeSpan] = list(spans)
    if not found:
        return []
    first = found[0].start
    while len(found) > most:
        # what is shortest joins its neighbour
        at = min(range(1, len(found)), key=lambda i: found[i].end - found[i - 1].start)
        a, b = found[at - 1], found[at]
        longer = a if a.end - a.start >= b.end - b.start else b
        found[at - 1 : at + 1] = [LifeSpan(a.start, b.end, longer.part, "and others")]
    return [
        f"  {(span.start - first) / 1e6:>10.1f} ms  {(span.end - span.start) / 1e6:>9.1f} ms  {span.part}"
        f"{f' ({span.detail})' if span.detail else ''}"
        for span in found
    ]
