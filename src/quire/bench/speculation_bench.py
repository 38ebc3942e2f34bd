"""Measure speculative decoding: runs with drafts, and on an engine that has none of it, in turns."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.bench.engine_run import BenchEngine, EngineRun, EngineStep, Figures, Prompts, Tables
from quire.bench.known_drafts import FixedAllotment, KnownDrafts
from quire.bench.results import Metric
from quire.bench.statistics import estimate
from quire.bench.workloads import Turn, from_file
from quire.records import dataclass
from quire.speculate.combined import Combined
from quire.speculate.draft_model import DraftModelProposer
from quire.speculate.proposer import Proposer
from quire.speculate.speculation import Speculation
from quire.text.chat_renderer import ChatAsk, ChatRenderer

FIGURES: Figures = {
    "speedup": ("ratio", "higher", "tokens per second with drafts / without, the same prompts in turns, over the steps "
                "in which every stream decodes: median of the pairs, with its 95 % interval"),
    "tau": ("tokens", "higher", "tokens of a stream per step"),
    "acceptance": ("ratio", "higher", "drafts that were right / drafts that were run"),
    "drafts": ("tokens", "neither", "drafts of a stream per step"),
    "draft_cost": ("ratio", "lower", "seconds in which a draft of one stream is made / native seconds of a step of one "
                   "token: medians"),
    "row_cost": ("ratio", "lower", "native seconds of a step of one stream with so many tokens / with one: medians"),
    "rate": ("ratio", "higher", "of the drafts at a position whose row was right up to there, those that were right"),
}  # fmt: skip
# Texts that can be guessed well, and texts that cannot.
PROMPTS = (
    "Repeat this sentence ten times: The quick brown fox jumps over the lazy dog and runs back to the river.",
    "Write a short story about a lighthouse.",
    "List the numbers from one to thirty in words, one on each line.",
    "What is the capital of France, and what is it known for?",
    "Write a Python class for a stack with push, pop, peek and is_empty, each with a docstring.",
    "Explain how a bicycle stays upright.",
    'Continue: {"name": "Ann", "age": 31, "city": "Rome"}, {"name": "Bob", "age": 27, "city": "Oslo"},',
    "Give me five ideas for a rainy afternoon.",
)


@dataclass(frozen=True, slots=True)
class SpeculationAsked:
    """The work: numbers of streams, pairs of runs for each, tokens of an output."""

    streams: list[int]
    pairs: int
    output_len: int
    most_drafts: int  # of the row costs


@dataclass(slots=True)
class Positions:
    """What became of drafts, by their position in the row."""

    tried: list[int]  # the row was right up to there
    right: list[int]

    def add(self, drafted: int, accepted: int) -> None:
        """Take in a row."""
        self.tried += [0] * (drafted - len(self.tried))
        self.right += [0] * (drafted - len(self.right))
        for position in range(min(accepted + 1, drafted)):
            self.tried[position] += 1
            self.right[position] += position < accepted

    def rates(self) -> list[float]:
        """The chance of a draft at each position, if all before it are right."""
        return [right / tried if tried else 0.0 for tried, right in zip(self.tried, self.right, strict=True)]


def expected_tokens(rates: Iterable[float]) -> float:
    """Tokens per step of a row with a draft for each of these chances: 1 + Σ Π α."""
    return 1 + sum(itertools.accumulate(rates, lambda a, b: a * b))


class Side:
    """One side of a comparison: an engine with drafts of one kind, or with none, and what its runs were."""

    def __init__(
        self, engine: BenchEngine, speculation: Speculation | None, temperature: float = 0.0
    ) -> None:
        self.engine, self.temperature = engine.speculating(speculation), temperature
        self.positions = Positions([], [])
        self.rates: list[float] = []
        self.draft_seconds: list[float] = []  # of one draft, in steps of one row
        self.native_seconds: dict[int, list[float]] = {}  # of steps of one row, by tokens
        self._row_steps = self._made = self._drafted = 0

    def run(self, prompts: Sequence[list[int]], output_len: int, *, warm: bool = False) -> list[list[int]]:
        """Run prompts at once and return the outputs. A `warm` run leaves no figures."""
        run = self.engine.run(prompts, [output_len] * len(prompts), temperature=self.temperature)
        if not warm:
            self._add(full_steps(run, len(prompts)))
        return [list(output.outputs[0].token_ids) for output in run.outputs]

    def _add(self, steps: Sequence[EngineStep]) -> None:
        made, seconds = sum(step.made for step in steps), sum(step.wall for step in steps)
        self.rates.append(made / seconds)
        self._made += made
        for step in steps:
            self._row_steps += len(step.rows)
            for drafted, accepted in step.drafts.values():
                self._drafted += drafted
                self.positions.add(drafted, accepted)
            if len(step.rows) == 1:
                self.native_seconds.setdefault(step.tokens, []).append(step.native)
                if step.drafts:
                    self.draft_seconds.append(step.phases["draft"] / step.drafts[0][0])

    def figures(self) -> dict[str, float | None]:
        """Over all runs: tokens and drafts of a stream per step, and the share of drafts that were right."""
        right = sum(self.positions.right)
        return {
            "rate": statistics.median(self.rates),
            "tau": self._made / self._row_steps,
            "drafts": self._drafted / self._row_steps,
            "acceptance": right / self._drafted if self._drafted else None,
        }


def full_steps(run: EngineRun, streams: int) -> list[EngineStep]:
    """The steps in which every stream decodes. Raises ValueError if there are none."""
    found = [step for step in run.steps if len(step.rows) == streams and step.kind == "decode"]
    if not found:
        raise ValueError(f"streams: {streams} never decode at once; raise output_len or max_num_seqs")
    return found


def compare(
    off: Side, sides: dict[str, Side], prompts: Sequence[list[int]], output_len: int, pairs: int
) -> list[dict[str, Any]]:
    """Run prompts with each kind of drafts and without, in turns that begin with another one each time; a row for each
    kind. Raises ValueError if drafts change an output.
    """
    every = {"": off, **sides}
    ratios: dict[str, list[float]] = {name: [] for name in sides}
    expected = off.run(prompts, output_len, warm=True)
    for number in range(-1, pairs):  # the first one warms up
        order = list(every)
        start = number % len(order)
        for name in order[start:] + order[:start]:
            if every[name].run(prompts, output_len, warm=number < 0) != expected:
                raise ValueError(f"{name}: the outputs are not those without drafts")
        if number >= 0:
            for name, side in sides.items():
                ratios[name].append(side.rates[-1] / off.rates[-1])
    rows = []
    for name, side in sides.items():
        speedup = estimate(sorted(ratios[name]), 50.0)
        rows.append({
            "method": name, "streams": len(prompts), "off": statistics.median(off.rates), **side.figures(),
            "speedup": speedup.value, "speedup_low": speedup.low, "speedup_high": speedup.high, "pairs": pairs,
        })  # fmt: skip
    return rows


class _Fixed(Speculation):
    """Speculation with numbers of drafts that are given."""

    def __init__(self, proposer: Proposer, counts: Iterable[int], **limits: Any) -> None:
        super().__init__(proposer, **limits)
        self._allotment = FixedAllotment(counts)  # type: ignore[assignment]


def speculation_with(
    engine: BenchEngine, proposer: Proposer, counts: Iterable[int] | None = None, depth: int = 16
) -> Speculation:
    """The speculation of an engine with another proposer; with `counts`, the drafts of every row in each step."""
    config = engine.built.core.scheduler.config
    limits: dict[str, Any] = {
        "vocab": engine.program.vocab, "max_rows": config.max_num_seqs, "most": config.max_draft_tokens, "depth": depth
    }  # fmt: skip
    return Speculation(proposer, **limits) if counts is None else _Fixed(proposer, counts, **limits)


def recorded(engine: BenchEngine, prompts: Sequence[list[int]], output_len: int) -> list[list[int]]:
    """The outputs of prompts without drafts."""
    return Side(engine, None).run(prompts, output_len, warm=True)


def known_drafts(
    engine: BenchEngine,
    rate: float,
    prompts: Sequence[list[int]],
    outputs: Sequence[list[int]],
    *,
    seed: int = 0,
) -> KnownDrafts:
    """Drafts of a known acceptance for prompts whose outputs were recorded, from the engine's draft model if there is
    one.
    """
    own = engine.built.core.speculation
    model = own.proposer if own else None
    model = model.method if isinstance(model, Combined) else model
    model = model if isinstance(model, DraftModelProposer) else None
    proposer = KnownDrafts(rate, engine.program.vocab, model=model, seed=seed)
    for prompt, output in zip(prompts, outputs, strict=True):
        proposer.record(prompt, output)
    return proposer


def read_prompts(engine: BenchEngine, path: Path | None, input_len: int, most: int) -> list[list[int]]:
    """Token ids of `most` prompts: of a file, or PROMPTS, in a chat where the model has a template. Random ones for a
    model without a tokenizer. Raises ValueError for a file that such a model cannot read.
    """
    tokenizer = engine.built.model.tokenizer
    if tokenizer is None:
        if path is not None:
            raise ValueError(f"prompts: {path.name}: the model has no tokenizer")
        return Prompts(engine.program.vocab, 0).make(most, input_len)
    chat = ChatRenderer(tokenizer) if tokenizer.chat_templates else None

    def ids(turn: Turn) -> list[int]:
        if chat is None:
            return tokenizer.encode(turn.text)
        return chat.encode(ChatAsk(messages=turn.messages or [{"role": "user", "content": turn.text}]))

    turns = [Turn(text=text) for text in PROMPTS]
    if path is not None:
        turns = [turn for session in from_file(path).sessions for turn in session.turns]
    return list(itertools.islice(itertools.cycle([ids(turn) for turn in turns]), most))


def row_costs(engine: BenchEngine, prompt: list[int], most: int, rounds: int = 8) -> list[dict[str, Any]]:
    """Native seconds of a step of one stream by its tokens: drafts that are all wrong, one more in each step."""
    output_len = 2 + (rounds + 1) * (most + 1)
    outputs = recorded(engine, [prompt], output_len)
    proposer = KnownDrafts(0.0, engine.program.vocab)
    proposer.record(prompt, outputs[0])
    counts = itertools.cycle(range(most + 1))
    run = engine.speculating(speculation_with(engine, proposer, counts, most)).run([prompt], [output_len])
    seconds: dict[int, list[float]] = {}
    for step in full_steps(run, 1)[most + 1 :]:  # each size ran once before
        seconds.setdefault(step.tokens, []).append(step.native)
    one = statistics.median(seconds[1])
    return [
        {"tokens": tokens, "seconds": statistics.median(found), "ratio": statistics.median(found) / one}
        for tokens, found in sorted(seconds.items())
    ]


def measure(
    engine: BenchEngine,
    plain: BenchEngine,
    methods: Mapping[str, float | None],
    asked: SpeculationAsked,
    prompts: list[list[int]],
) -> Tables:
    """Tables of the engine's own drafts and of known drafts: methods with their rates, None for the engine's own.

    `plain` is an engine of the same model without a method. What an engine with one pays in steps without drafts, such
    as features for heads, is seen beside it alone.
    """
    outputs = recorded(plain, prompts, asked.output_len)
    costs = row_costs(engine, prompts[0], asked.most_drafts)
    own = engine.built.core.speculation
    assert own is not None
    off = {streams: Side(plain, None) for streams in asked.streams}
    rows: list[dict[str, Any]] = []
    positions: list[dict[str, Any]] = []
    for streams in asked.streams:
        sides = {
            name: Side(engine, own if rate is None else _known(engine, rate, prompts, outputs))
            for name, rate in methods.items()
        }
        rows += compare(off[streams], sides, prompts[:streams], asked.output_len, asked.pairs)
        for row in rows[-len(sides) :]:
            drafts = sides[row["method"]].draft_seconds
            row["draft_cost"] = statistics.median(drafts) / costs[0]["seconds"] if drafts else None
        for name, side in sides.items():
            rates = side.positions.rates()
            positions += [
                {"method": name, "streams": streams, "position": place + 1, "tried": side.positions.tried[place],
                 "rate": rate}
                for place, rate in enumerate(rates)
            ]  # fmt: skip
    return {"speculation": rows, "positions": positions, "row_costs": costs}


def _known(
    engine: BenchEngine, rate: float, prompts: Sequence[list[int]], outputs: Sequence[list[int]]
) -> Speculation:
    return speculation_with(engine, known_drafts(engine, rate, prompts, outputs))


def metrics(tables: Tables) -> dict[str, Metric]:
    """The figures that files are compared by: of each method and number of streams."""
    found = {}
    for row in tables["speculation"]:
        for name in ("speedup", "tau", "acceptance"):
            unit, better, _ = FIGURES[name]
            found[f"{name} {row['method']} {row['streams']}"] = Metric(row[name], unit, better)
    return found
