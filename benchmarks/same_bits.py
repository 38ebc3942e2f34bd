"""Do the logits of a request depend on what runs beside it? Random co-batches of tiny models, and one hash.

    PYTHONPATH=src python -m benchmarks.same_bits [--co-batches 500] [--first 0] [--cases dense …] [--record FILE]

A case is a model and its number formats. Its targets are a few fixed requests; what they give alone, on one thread, in
one chunk and without a prefix cache, is the reference. A co-batch runs some of them to the end among random neighbours.
Drawn at random are:

    neighbours      how many, their prompts (some begin as a target does), when they join, how urgent, some aborted
    chunks          the token budget of a step, how many sequences run at once, prompts whole or split
    cache states    few or many blocks, hits of any length, evictions, preemptions, blocks that went to a tier and back
    steps           one or two in flight, with right and wrong drafts or none
    threads         1 or 2

Every logit that is computed for a position of a target is compared with the reference, those of prompts too, and a
co-batch's hash is that of them all. Each case and instruction set must have one. --record adds up the counts of several
runs, which take other co-batches with another --first.

A control must have more than one: --control torch runs the same program with the products of a library, which cuts sums
as suits the shape (needs torch); --control isa mixes two instruction sets.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from quire import _native
from quire.core.capacity import peak_blocks
from quire.core.scheduler import Scheduler
from quire.core.scheduler_config import SchedulerConfig
from quire.core.tier import Name
from quire.executor.base import Executor, Limits, Outputs
from quire.executor.native import NativeExecutor
from quire.loader import RandomWeights, load
from quire.program.formats import Groups, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.program.program import Program
from quire.spec import MLP, Attention, LatentAttention, Layer, ModelSpec, MoE, NormSpec, QKNorm, Rope, Router
from quire.types import Request, SamplingParams, SchedulerOutput, StepOutput
from quire.worker.worker import Worker

VOCAB, DIM, BLOCK, ROWS, DRAFTS = 150, 64, 16, 8, 12
TARGET = "target"  # ids of targets begin so


def decoder(windows: Sequence[int], mlp: MLP | MoE | None = None, latent: bool = False) -> ModelSpec:
    rope = Rope(theta=1e4, dim=16)
    attention = [
        Attention(4, 2, 16, rope, 0.25, qk_norm=QKNorm(NormSpec()), window=window) for window in windows
    ]
    if latent:
        part = Rope(theta=1e4, dim=8)
        attention = [LatentAttention(4, 0, 32, 16, 8, 16, part, 0.2) for _ in windows]  # type: ignore[misc]
    layers = tuple(Layer(a, mlp or MLP(96)) for a in attention)
    return ModelSpec(vocab=VOCAB, dim=DIM, layers=layers, norm=NormSpec(), max_positions=2048, tied=True)


I4, I8 = WeightFormat("i4", Groups()), WeightFormat("i8", Groups())
ROTATED = WeightFormat("i8", Groups(32, "bf16", rotated=True))
EXPERTS = MoE(Router(6, 2), 40, shared=MLP(24))
DENSE, WINDOWS, LATENT, MIXTURE = (
    decoder([0, 0]), decoder([0, 24, 40]), decoder([0, 0], latent=True), decoder([0, 24], EXPERTS)
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, its formats, and how long its targets are."""

    spec: ModelSpec
    formats: NumberFormats
    prompts: tuple[int, ...] = (3, 17, 40, 75)
    length: int = 112  # positions of a sequence


CASES = {
    "dense, bf16": Case(DENSE, NumberFormats("bf16", "bf16")),
    "dense, f16": Case(DENSE, NumberFormats("f16", "f16")),
    "dense, int8, cache int8": Case(DENSE, NumberFormats("bf16", "i8", I8, I8)),
    "dense, rotated int8": Case(DENSE, NumberFormats("bf16", "bf16", ROTATED, ROTATED)),
    "dense, int4": Case(DENSE, NumberFormats("bf16", "bf16", I4, I4)),
    "windows, f32": Case(WINDOWS, NumberFormats("f32", "f32")),
    "windows, int4, cache int8": Case(WINDOWS, NumberFormats("bf16", "i8", I4, I8)),
    "latent, bf16": Case(LATENT, NumberFormats("bf16", "bf16")),
    "experts and windows, bf16": Case(MIXTURE, NumberFormats("bf16", "bf16")),
    "experts and windows, int8": Case(MIXTURE, NumberFormats("bf16", "bf16", I8, I8)),
    "dense over 1,024 tokens, bf16": Case(DENSE, NumberFormats("bf16", "bf16"), (1030, 1010), 1060),
}


class Recorder:
    """An executor that compares the logits of targets, whether asked for or not, with the reference."""

    def __init__(self, executor: Executor, program: Program) -> None:
        self.program = program
        self._executor = executor
        self.expected: dict[tuple[str, int], bytes] = {}  # digests by target and position
        self.known: dict[str, list[int]] = {}  # tokens of each target, prompt and output
        self.rows: list[str] = []  # request of each row of the step
        self.seen: dict[tuple[str, int], set[bytes]] = {}
        self.compared = 0  # rows of logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def bind(self, limits: Limits, arrays: Any) -> None:
        self._limits, self._arrays = limits, arrays
        self._executor.bind(limits, arrays)

    def run(self, tokens: int, rows: int, wanted: int, first_op: int = 0) -> Outputs:
        places = self._places()
        made = self._executor.run(tokens, rows, wanted, first_op)
        asked = self._arrays.logit_rows[:wanted].copy()
        self._see(made, asked, places)
        left = sorted(places)
        for start in range(0, len(left), self._limits.max_logit_rows):
            part = left[start : start + self._limits.max_logit_rows]
            self._arrays.logit_rows[: len(part)] = part
            self._see(self._executor.run_head(len(part)), part, places)
        if left:
            self._arrays.logit_rows[:wanted] = asked
            made = self._executor.run_head(wanted) if wanted else made
        return made

    def _places(self) -> dict[int, tuple[str, int]]:
        """Target and position of each token of the step that goes on as a target does: not of wrong drafts."""
        found, arrays = {}, self._arrays
        for row, name in enumerate(self.rows):
            if not name.startswith(TARGET):
                continue
            first, stop = map(int, arrays.query_start[row : row + 2])
            known = self.known.get(name)
            for token in range(first, stop):
                position = int(arrays.positions[token])
                if known is not None and (
                    position >= len(known) or known[position] != arrays.token_ids[token]
                ):
                    break
                found[token] = name, position
        return found

    def _see(self, made: Outputs, tokens: Sequence[int], places: dict[int, tuple[str, int]]) -> None:
        for row, token in enumerate(tokens):
            place = places.get(int(token))
            if place is not None:
                digest = hashlib.blake2b(made["logits"][row].tobytes(), digest_size=16).digest()
                self.seen.setdefault(place, set()).add(digest)
                self.compared += 1

    def hash(self) -> str:
        """Of all positions of all targets: what was computed since the last call, or else the reference."""
        whole = hashlib.sha256()
        for place in sorted(self.expected):
            for digest in sorted(self.seen.get(place, {self.expected[place]})):
                whole.update(digest)
        self.seen = {}
        return whole.hexdigest()[:16]


class Memory:
    """A tier and its store in one: what is offered is kept, and every fifth content is lost."""

    fingerprint = b"same bits"

    def __init__(self) -> None:
        self.contents: dict[Name, Any] = {}
        self.asked = self.got = 0

    def published(self, name: Name, block: int, tenant: str) -> None:
        pass

    def moved(self, name: Name, block: int) -> None:
        pass

    def saves(self, *, idle: bool) -> tuple[()]:
        return ()

    def withdrawn(self, name: Name, *, offered: bool) -> bool:
        if offered:
            self.contents[name] = None  # until it is copied
        return offered

    def holds(self, name: Name) -> bool:
        return name in self.contents

    def copy_seconds(self, name: Name) -> float:
        return 0.0

    work_seconds = copy_seconds

    def put(self, name: Name, content: Any) -> None:
        self.contents[name] = content

    def comes(self, block: int, name: Name) -> bool:
        return False

    def arrived(self, most: int) -> tuple[()]:
        return ()

    def spent(self) -> float:
        return 0.0

    def get(self, name: Name) -> Any:
        self.asked += 1
        content = self.contents.get(name) if self.asked % 5 else None
        self.got += content is not None
        return content


class Engine:
    """A case on one instruction set and a number of threads: a worker that outlives schedulers."""

    def __init__(self, case: Case, isa: str, threads: int) -> None:
        self.program = program = lower(case.spec, case.formats)
        executor = _executor(program, isa, threads)
        load(program.params, Loud(program.params), executor)
        self.recorder = Recorder(executor, program)
        self.memory = Memory()
        self.most_blocks = ROWS * peak_blocks(program.cache_groups, case.length, case.length, BLOCK)
        limits = Limits(2 * case.length, ROWS, ROWS + DRAFTS, case.length, self.most_blocks, BLOCK)
        self.worker = Worker(self.recorder, limits, self.memory)

    def execute(self, out: SchedulerOutput) -> StepOutput:
        self.worker.begin(out)
        self.worker.forward(out)
        return self.worker.sample()


def _executor(program: Program, isa: str, threads: int) -> Executor:
    if isa == "torch":
        from quire.executor.torch import TorchExecutor

        return TorchExecutor(program)
    return NativeExecutor(program, threads=threads, isa=isa)


class Loud(RandomWeights):
    """Random matrices sixteen times as large, so that attention and experts have preferences."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        values: Any = super().read(name, start, stop)
        return np.where(values & 0x7FFF, values + 0x0200, values) if values.ndim > 1 else values


@dataclass
class Counts:
    """What the co-batches of a case went through."""

    hashes: set[str] = field(default_factory=set)
    numbers: Counter[str] = field(default_factory=Counter)


class Trial:
    """Co-batches of one case and instruction set. `isas` more than one: each scheduler's life draws one."""

    def __init__(self, name: str, isas: Sequence[str]) -> None:
        self.name, self.case, self.counts = name, CASES[name], Counts()
        self.engines = [Engine(self.case, isa, threads) for isa in isas for threads in (1, 2)]
        values = np.random.default_rng(1)
        self.targets = [
            self._request(f"{TARGET}{i}", values.integers(0, VOCAB, length).tolist(), i)
            for i, length in enumerate(self.case.prompts)
        ]
        self._learn()

    def _request(self, name: str, prompt: list[int], seed: int, **more: Any) -> Request:
        room = self.case.length - len(prompt)
        params = SamplingParams(
            max_tokens=min(8 + seed % 9, room), temperature=0.8 * (seed % 2), seed=seed, logprobs=3,
            repetition_penalty=1.0 + 0.1 * (seed % 3),
        )  # fmt: skip
        return Request(request_id=name, prompt_token_ids=prompt, params=params, **more)  # type: ignore[arg-type]

    def _learn(self) -> None:
        """Each target alone, whole, on one thread, without a prefix cache."""
        engine = self.engines[0]
        for target in self.targets:
            life = Life(engine, self._config(engine, enable_prefix_caching=False), None, random.Random(0))
            life.run([target], random.Random(0), Counter())
            life.end()
            engine.recorder.known[target.request_id] = [
                *target.prompt_token_ids, *life.outputs[target.request_id]
            ]  # fmt: skip
        expected = {place: min(found) for place, found in engine.recorder.seen.items()}
        for other in self.engines:
            other.recorder.known, other.recorder.expected = engine.recorder.known, expected
        self.counts.hashes.add(engine.recorder.hash())
        self.counts.numbers["positions"] = len(expected)

    def _config(self, engine: Engine, **more: Any) -> SchedulerConfig:
        asked: dict[str, Any] = {
            "num_blocks": engine.most_blocks, "max_num_seqs": ROWS,
            "max_num_batched_tokens": 2 * self.case.length, "max_model_len": self.case.length,
            "groups": engine.program.cache_groups,
        }  # fmt: skip
        return SchedulerConfig(**(asked | more))

    def _budget(self, rng: random.Random, chunked: bool) -> int:
        """Tokens of a step: a whole prompt where it is not split, else any number, often a small one."""
        length = self.case.length
        if not chunked:
            return rng.randint(length, 2 * length)
        return rng.randint(length // 9, rng.choice([length // 4, length, 2 * length]))

    def run(self, number: int) -> None:
        """Co-batches from the seed `number` on: a scheduler's life, whose cache one leaves to the next."""
        rng = random.Random(number)
        engine = rng.choice(self.engines)
        chunked = rng.random() < 0.8
        least = peak_blocks(engine.program.cache_groups, self.case.length, self.case.length, BLOCK)
        config = self._config(
            engine,
            num_blocks=int(least * rng.choice([1, 1, 1.2, 1.5, 2, 4, ROWS])),
            max_num_seqs=rng.randint(1, ROWS),
            max_num_batched_tokens=self._budget(rng, chunked),
            enable_chunked_prefill=chunked,
            enable_prefix_caching=rng.random() < 0.85,
            max_draft_tokens=rng.choice([0, 3, DRAFTS]),
            steps_in_flight=rng.randint(1, 2),
            policy=rng.choice(["fcfs", "priority"]),
        )
        tier = engine.memory if config.enable_prefix_caching and rng.random() < 0.5 else None
        engine.memory.contents.clear()
        life = Life(engine, config, tier, rng)
        numbers = self.counts.numbers
        for _ in range(CO_BATCHES):
            got, compared = engine.memory.got, engine.recorder.compared
            life.run(self._asked(rng), rng, numbers)
            self.counts.hashes.add(engine.recorder.hash())
            for name, tokens in life.outputs.items():
                whole = engine.recorder.known.get(name)
                prompt = next((len(t.prompt_token_ids) for t in self.targets if t.request_id == name), 0)
                if whole is not None and whole[prompt:] != tokens:
                    self.counts.hashes.add(f"other tokens in {number}")
            numbers["logits compared"] += engine.recorder.compared - compared
            numbers["blocks from a tier"] += engine.memory.got - got
            numbers["co-batches"] += 1
        numbers["preemptions"] += life.scheduler.num_preemptions
        numbers["prompt tokens hit"] += life.scheduler.prefix_stats.hit_tokens
        life.end()

    def _asked(self, rng: random.Random) -> list[Request]:
        """Some targets among neighbours, in any order."""
        asked = rng.sample(self.targets, rng.randint(1, len(self.targets)))
        for index in range(rng.choice([0, 1, 2, 5, 8])):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, min(80, self.case.length - 20)))]
            if rng.random() < 0.5:  # it begins as a target does
                base = list(rng.choice(self.targets).prompt_token_ids)
                prompt = (base[: rng.randint(1, len(base))] + prompt[:10])[: self.case.length - 20]
            asked.append(self._request(f"n{index}", prompt, rng.randrange(1000)))
        rng.shuffle(asked)
        return asked


CO_BATCHES = 5  # of one scheduler's life


class Life:
    """A scheduler over the worker of an engine."""

    def __init__(
        self, engine: Engine, config: SchedulerConfig, tier: Memory | None, rng: random.Random
    ) -> None:
        self.engine, self.config = engine, config
        self.scheduler = Scheduler(config, rng, tier)
        self.outputs: dict[str, list[int]] = {}
        self._names: dict[int, str] = {}  # request of a sequence
        self._drafts = config.max_draft_tokens > 0

    def run(self, asked: Sequence[Request], rng: random.Random, numbers: Counter[str]) -> None:
        """These requests to the end, joining step by step."""
        scheduler, queue = self.scheduler, list(asked)
        flights: deque[tuple[SchedulerOutput, StepOutput]] = deque()
        self.outputs = {one.request_id: [] for one in asked}
        while queue or scheduler.has_work() or flights:
            while queue and rng.random() < 0.5:
                one = queue.pop()
                scheduler.add(_changed(one, rng, stepwise=self._drafts))
            if queue and len(queue) < len(asked) and rng.random() < 0.05:
                done = asked[-1].request_id
                if not done.startswith(TARGET):
                    scheduler.abort(done)
            if scheduler.has_work():
                out = scheduler.schedule()
                flights.append((out, self._execute(out, rng, numbers)))
            if flights and (len(flights) == self.config.steps_in_flight or not scheduler.has_work()):
                for event in scheduler.update(*flights.popleft()):
                    self.outputs[event.request_id] += event.new_token_ids

    def end(self) -> None:
        """Let go of what the worker keeps."""
        self.engine.execute(self.scheduler.schedule())

    def _execute(self, out: SchedulerOutput, rng: random.Random, numbers: Counter[str]) -> StepOutput:
        for new in out.new:
            self._names[new.seq_id] = new.request_id
        rows = self.engine.recorder.rows = [self._names[row.seq_id] for row in out.scheduled]
        result = self.engine.execute(out)
        numbers["steps"] += bool(rows)
        for i, (row, name) in enumerate(zip(out.scheduled, rows, strict=True)):
            numbers["drafts"] += row.drafts
            numbers["drafts accepted"] += max(0, len(result.token_ids[i]) - 1)
            if self._drafts and result.token_ids[i] and rng.random() < 0.7:
                known = row.start + len(row.token_ids) - row.drafts + len(result.token_ids[i])
                right = self.engine.recorder.known.get(name, [])[known : known + rng.randint(1, 5)]
                drafts = [t if rng.random() < 0.8 else rng.randrange(VOCAB) for t in right]
                result.drafts[i] = drafts or [rng.randrange(VOCAB)]
        return result


def _changed(request: Request, rng: random.Random, stepwise: bool) -> Request:
    return replace(request, priority=rng.randint(0, 2), arrival=time.monotonic(), stepwise=stepwise)


def record(path: Path, found: dict[str, Counts]) -> dict[str, Counts]:
    """These counts and those of earlier runs in a file."""
    old = json.loads(path.read_text()) if path.exists() else {}
    for key, counts in found.items():
        before = old.get(key, {"hashes": [], "numbers": {}})
        counts.hashes.update(before["hashes"])
        for name, number in before["numbers"].items():
            most = name == "positions"
            counts.numbers[name] = (
                max(counts.numbers[name], number) if most else counts.numbers[name] + number
            )
        old[key] = {"hashes": sorted(counts.hashes), "numbers": counts.numbers}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(old, indent=1) + "\n")
    return {key: Counts(set(one["hashes"]), Counter(one["numbers"])) for key, one in old.items()}


def markdown(found: dict[str, Counts]) -> str:
    """A line for each case and instruction set."""
    names = [
        "co-batches", "steps", "positions", "logits compared", "prompt tokens hit", "preemptions", "drafts",
        "drafts accepted", "blocks from a tier",
    ]  # fmt: skip
    lines = [
        f"| case | instruction set | hashes | {' | '.join(names)} |",
        "|---|---|" + "--:|" * (len(names) + 1),
    ]
    for key, counts in sorted(found.items()):
        name, isa = key.split("|")
        numbers = " | ".join(f"{counts.numbers[n]:,}" for n in names)
        lines.append(f"| {name} | {isa} | {len(counts.hashes)} | {numbers} |")
    total = sum(counts.numbers["co-batches"] for counts in found.values())
    return "\n".join([*lines, "", f"{total:,} co-batches"])


def compare(
    cases: Sequence[str], co_batches: int, first: int = 0, control: str = "", isas: Sequence[str] = ()
) -> dict[str, Counts]:
    """Counts by "case|instruction set" of at least so many co-batches of each."""
    found = {}
    sets = [[isa] for isa in isas or _native.supported_isas()]
    if control:
        sets = [["torch"]] if control == "torch" else [list(_native.supported_isas())]
    for name in cases:
        for together in sets:
            trial = Trial(name, together)
            for number in range(first, first + co_batches, CO_BATCHES):
                trial.run(number)
            found[f"{name}|{' and '.join(together)}"] = trial.counts
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--co-batches", type=int, default=500, help="of each case and instruction set")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--isa", nargs="+", default=[], help="instruction sets, all of this machine if none")
    parser.add_argument(
        "--control", choices=["torch", "isa"], default="", help="what must have more than one hash"
    )
    parser.add_argument("--record", type=Path, help="file of counts to add to")
    asked = parser.parse_args()
    found = compare(asked.cases, asked.co_batches, asked.first, asked.control, asked.isa)
    if asked.record:
        found = record(asked.record, found)
    print(markdown(found))
    wrong = [key for key, counts in found.items() if (len(counts.hashes) == 1) == bool(asked.control)]
    if wrong:
        raise SystemExit(f"{'one hash' if asked.control else 'more than one hash'}: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
