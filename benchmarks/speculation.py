"""The figures of speculative decoding: known acceptance, load, numbers of drafts, repeats, predictions, structures.

    python benchmarks/speculation.py known [--formats bf16 int8 int4] [--draft trimmed full none]
    python benchmarks/speculation.py load [--formats int8] [--streams 1 2 4 8 16 32] [--rates 0 0.5 0.7 0.9]
    python benchmarks/speculation.py load --model quire-mini --method '{"method": …}'     its own drafts, as chosen
    python benchmarks/speculation.py repeat --model SmolLM2.gguf
    python benchmarks/speculation.py prediction [--formats int8]
    python benchmarks/speculation.py structures
    python benchmarks/speculation.py report

Drafts of a known acceptance are recorded outputs with seeded errors (quire.bench.known_drafts). `known` and `load` run
a shape (--shape, default Qwen3-0.6B) with random weights; its draft has two layers, and 32,000 tokens or all of them.
Each finished unit adds its rows to a file (--runs): the same command continues after an interruption, and `report`
prints the tables of that file. Runs with drafts alternate with runs of an engine that has neither a method nor a draft
model; figures are medians of the pairs, with 95 % intervals.

known       at one stream, for each rate: the numbers of drafts 1 … 16 and the one that the engine chooses, and the
            formula τ / (r(γ + 1) + γ c) with the row cost r and the draft cost c measured in the same process
load        throughput by streams and acceptance, relative to no drafts: 0 is a text that is never guessed
repeat      prompt lookup on a text that a real model repeats
prediction  a recorded answer with 5 % of its tokens replaced is sent as its prediction
structures  Python's part of a step: acceptance, allotment, proposals, µs a row
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench import speculation_bench as bench
from quire.bench.engine_run import BenchEngine, Prompts
from quire.bench.environment import Watch
from quire.bench.known_drafts import KnownDrafts
from quire.config.schema import EngineConfig
from quire.executor.base import SampledRows
from quire.planner.shapes import SHAPES
from quire.speculate.ngram import NgramProposer
from quire.speculate.prediction import PredictionProposer
from quire.speculate.speculation import Speculation
from quire.types import NewSeq, SamplingParams, ScheduledSeq, SchedulerOutput, StepOutput, TokenIds
from quire.worker.worker import accept

TRIMMED = 32_000  # tokens of the trimmed vocabulary
FORMATS = {"bf16": "none", "int8": "int8", "int4": "int4"}
QUOTED = (
    "The keeper of the lighthouse wrote down every ship that passed. On some days there were none, and he wrote down "
    "the birds. On the last day of the year he counted all of them, and sent the numbers to the harbour, where a clerk "
    "put them into a drawer. Nobody had ever asked for the birds, but the clerk liked to read them on Sundays. "
)


class Runs:
    """Rows in a file that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def unit(self, key: dict[str, Any], measure: Callable[[], list[dict[str, Any]]]) -> None:
        """Measure a unit, unless its rows are there."""
        if any(row["unit"] == key for row in self.rows):
            return
        watch = Watch()
        found = measure()
        noise = watch.stop()
        new = [{"unit": key, "others": round(noise.others, 2), **row} for row in found]
        self.rows += new
        with self._path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in new)
        for row in new:
            print(json.dumps(row), flush=True)

    def of(self, what: str) -> list[dict[str, Any]]:
        """The rows of one kind of unit."""
        return [{**row["unit"], **row} for row in self.rows if row["unit"]["what"] == what]


@contextmanager
def stored_engine(
    form: str, args: argparse.Namespace, streams: int, *, plain_first: bool
) -> Iterator[tuple[BenchEngine, BenchEngine]]:
    """A model on disk with its draft, and without speculation. Both map the same packed weights: where in memory
    weights happen to lie changes the time of a step by a few percent. So does the order in which engines are loaded.
    """
    asked = EngineConfig(
        quantization=FORMATS[form], max_num_seqs=max(2, streams), max_model_len=2048,
        enable_prefix_caching=False,
    )  # fmt: skip
    if args.method:
        speculating = asked.replace(speculative_config=args.method)
    elif args.draft_model:
        speculating = asked.replace(draft_model=args.draft_model)
    else:
        speculating = asked.replace(speculate="ngram")
    with BenchEngine(args.model, asked, tokenizer=False):
        pass  # now they are in the cache
    own = bool(args.method)
    with loaded(args.model, speculating, asked, plain_first=plain_first, tokenizer=own) as engines:
        yield engines


@contextmanager
def loaded(
    model: str, speculating: EngineConfig, asked: EngineConfig, *, plain_first: bool, tokenizer: bool = False
) -> Iterator[tuple[BenchEngine, BenchEngine]]:
    """Both engines, loaded in one order or the other."""
    order = [asked, speculating] if plain_first else [speculating, asked]
    with ExitStack() as stack:
        engines = [stack.enter_context(BenchEngine(model, each, tokenizer=tokenizer)) for each in order]
        yield engines[plain_first], engines[not plain_first]


@contextmanager
def shape_engine(
    shape: str, form: str, draft: str, streams: int, *, plain_first: bool
) -> Iterator[tuple[BenchEngine, BenchEngine]]:
    """The shape with random weights and a draft with two layers; and without speculation."""
    with tempfile.TemporaryDirectory() as folder:
        target, small = Path(folder) / "target", Path(folder) / "draft"
        vocab = TRIMMED if draft == "trimmed" else SHAPES[shape]["vocab_size"]
        for place, config in (
            (target, SHAPES[shape]),
            (small, {**SHAPES[shape], "num_hidden_layers": 2, "vocab_size": vocab}),
        ):
            place.mkdir()
            (place / "config.json").write_text(json.dumps(config))
        asked = EngineConfig(
            quantization=FORMATS[form], load_format="random", max_num_seqs=max(2, streams), max_model_len=2560,
            enable_prefix_caching=False,
        )  # fmt: skip
        speculating = (
            asked.replace(speculate="ngram") if draft == "none" else asked.replace(draft_model=str(small))
        )
        with loaded(str(target), speculating, asked, plain_first=plain_first) as engines:
            yield engines


class Lab:
    """An engine and one without speculation, prompts, and their recorded outputs."""

    def __init__(
        self, engine: BenchEngine, plain: BenchEngine, streams: int, args: argparse.Namespace
    ) -> None:
        self.engine, self.plain, self.args = engine, plain, args
        self.prompts = bench.read_prompts(engine, None, args.prompt, streams)
        self.outputs = bench.recorded(plain, self.prompts, args.tokens)

    def side(self, rate: float, counts: int | None = None) -> bench.Side:
        """Drafts of a known acceptance, always `counts` of them, or as many as the engine chooses."""
        drafts = bench.known_drafts(self.engine, rate, self.prompts, self.outputs, seed=counts or 0)
        fixed = None if counts is None else itertools.repeat(counts)
        return bench.Side(self.engine, bench.speculation_with(self.engine, drafts, fixed))

    def known(self, rate: float) -> list[dict[str, Any]]:
        """A row for each number of drafts, "free" for that of the engine."""
        args, off = self.args, bench.Side(self.plain, None)
        sides = {str(count): self.side(rate, count) for count in args.drafts} | {"free": self.side(rate)}
        rows = {
            row["method"]: row for row in bench.compare(off, sides, self.prompts, args.tokens, args.pairs)
        }
        one = statistics.median(off.native_seconds[1])
        best = 1.0
        for count in args.drafts:
            side, row = sides[str(count)], rows[str(count)]
            row["row_cost"] = statistics.median(side.native_seconds[count + 1]) / one
            row["draft_cost"] = statistics.median(side.draft_seconds) / one
            cost = row["row_cost"] + count * row["draft_cost"]
            row["formula"] = row["tau"] / cost
            best = max(best, sum(rate**k for k in range(count + 1)) / cost)
        rows["free"]["formula"] = best
        for name, row in rows.items():
            row["of_formula"] = row["speedup"] / row["formula"]
            row["tau_by_position"] = bench.expected_tokens(sides[name].positions.rates())
        return [*rows.values()]

    def load(self, streams: int) -> list[dict[str, Any]]:
        """A row for each rate, or one for the method's own drafts."""
        sides = {str(rate): self.side(rate) for rate in self.args.rates}
        if self.args.method:
            sides = {"own": bench.Side(self.engine, self.engine.built.core.speculation)}
        off = bench.Side(self.plain, None)
        return bench.compare(off, sides, self.prompts[:streams], self.args.tokens, self.args.pairs)


def labs(args: argparse.Namespace, streams: int) -> Iterator[tuple[dict[str, Any], Lab]]:
    """An engine for each format, draft and order of loading, and what names its units."""
    model = args.model and Path(args.model).name
    drafts = args.draft
    if model:
        name = json.loads(args.method)["method"] if args.method else "stored"
        drafts = [name if args.method or args.draft_model else "none"]
    orders = [False, True] if args.both_orders else [False]
    for form, draft, first in itertools.product(args.formats, drafts, orders):
        made = (
            stored_engine(form, args, streams, plain_first=first)
            if model
            else shape_engine(args.shape, form, draft, streams, plain_first=first)
        )
        with made as engines:
            key = {
                "what": args.what,
                "shape": model or args.shape,
                "format": form,
                "draft": draft,
                "pairs": args.pairs,
                "plain_first": first,
            }
            yield key, Lab(*engines, streams, args)


def known(runs: Runs, args: argparse.Namespace) -> None:
    for key, lab in labs(args, 1):
        for rate in args.rates:
            runs.unit({**key, "alpha": rate}, partial(lab.known, rate))


def load(runs: Runs, args: argparse.Namespace) -> None:
    for key, lab in labs(args, max(args.streams)):
        for streams in args.streams:
            runs.unit({**key, "of": streams}, partial(lab.load, streams))


def repeat(runs: Runs, args: argparse.Namespace) -> None:
    """A text three times and its beginning: a model that copies goes on with it."""
    asked = EngineConfig(max_num_seqs=2, max_model_len=2048, enable_prefix_caching=False, speculate="ngram")
    with BenchEngine(args.model, asked) as engine:
        tokenizer, own = engine.built.model.tokenizer, engine.built.core.speculation
        assert tokenizer is not None
        prompt = tokenizer.encode(3 * QUOTED + QUOTED[:60])

        def unit() -> list[dict[str, Any]]:
            costs = bench.row_costs(engine, prompt, 16)
            rows = bench.compare(
                bench.Side(engine, None),
                {"ngram": bench.Side(engine, own)},
                [prompt],
                args.tokens,
                args.pairs,
            )
            return [{**row, "row_costs": {cost["tokens"]: cost["ratio"] for cost in costs}} for row in rows]

        runs.unit({"what": "repeat", "model": Path(args.model).name, "pairs": args.pairs}, unit)


def prediction(runs: Runs, args: argparse.Namespace) -> None:
    """An answer of 2,000 tokens, 5 % of them edited. It is sampled: random weights repeat a few tokens greedily."""
    for form in args.formats:
        with shape_engine(args.shape, form, "none", 1, plain_first=False) as (engine, plain):
            prompts = Prompts(engine.program.vocab, 0).make(1, args.prompt)
            off = bench.Side(plain, None, temperature=1.0)
            (output,) = off.run(prompts, args.tokens, warm=True)
            predicted = edited(output, 0.05, engine.program.vocab)
            speculation = bench.speculation_with(engine, Predicted(predicted))
            side = bench.Side(engine, speculation, temperature=1.0)
            key = {
                "what": "prediction",
                "shape": args.shape,
                "format": form,
                "tokens": args.tokens,
                "pairs": args.pairs,
            }
            runs.unit(
                key, partial(bench.compare, off, {"prediction": side}, prompts, args.tokens, args.pairs)
            )


class Predicted(PredictionProposer):
    """The same prediction for every request."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self._tokens = TokenIds(tokens)

    def start(self, new: NewSeq) -> None:
        new.prediction = self._tokens
        super().start(new)


def edited(tokens: Sequence[int], share: float, vocab: int) -> list[int]:
    """The tokens with a share of them edited, a third each replaced, removed and with another one after them."""
    rng, found = random.Random(0), []
    for token in tokens:
        edit = rng.randrange(3) if rng.random() < share else -1
        found += {0: [rng.randrange(vocab)], 1: [], 2: [token, rng.randrange(vocab)]}.get(edit, [token])
    return found


def structures(runs: Runs, args: argparse.Namespace) -> None:
    def unit() -> list[dict[str, Any]]:
        return [
            structure(name, rows, most)
            for name in ("known", "ngram", "wrong")
            for rows, most in ((1, 16), (8, 8), (32, 2))
        ]

    runs.unit({"what": "structures"}, unit)


def structure(name: str, rows: int, most: int, steps: int = 300) -> dict[str, Any]:
    """Python's part of steps of so many rows, each with up to `most` drafts of which four in five are right. Those of
    "wrong" never are, and steps are short: what is left is the cost of looking where there is nothing.
    """
    rng, vocab, length = random.Random(0), 50_000, 32 + (most + 1) * (steps + 2)
    prompts = [[rng.randrange(vocab) for _ in range(16)] for _ in range(rows)]
    # prompt lookup finds what it needs in texts of a few different parts
    parts = [[rng.randrange(vocab) for _ in range(24)] for _ in range(8)]
    outputs = [[token for _ in range(length // 24 + 1) for token in rng.choice(parts)] for _ in prompts]
    lookup = NgramProposer(3, 32)
    drafts = KnownDrafts(0.0 if name == "wrong" else 0.8, vocab)
    for prompt, output in zip(prompts, outputs, strict=True):
        drafts.record(prompt, output)
    speculation = Speculation(
        lookup if name == "ngram" else drafts, vocab=vocab, max_rows=rows, most=64, depth=most
    )
    starts, counts, took = [16] * rows, [0] * rows, dict.fromkeys(("fill", "accept", "advance"), 0.0)
    new = [
        NewSeq(i, [*prompt, outputs[i][0]], len(prompt), SamplingParams(max_tokens=length), 0, 0, ([],))
        for i, prompt in enumerate(prompts)
    ]
    texts = [list(each.token_ids) for each in new]
    drafted = 0
    for step in range(steps):
        scheduled = [
            ScheduledSeq(
                i, starts[i], [outputs[i][starts[i] - 16], *([-2] * counts[i])], ([],), 1 + counts[i]
            )
            for i in range(rows)
        ]
        out = SchedulerOutput(step, scheduled, new if step == 0 else [], [])
        begin = time.perf_counter()
        idles = speculation.idles(out, sum(row.drafts for row in scheduled))
        if not idles:
            speculation.fill(out, texts.__getitem__)
        filled = time.perf_counter()
        sampling = [i for i, row in enumerate(scheduled) for _ in range(row.logits)]
        wanted = [token for row in scheduled for token in (*row.token_ids[1:], -1)]
        tokens = [outputs[row.seq_id][row.start - 15 + k] for row in scheduled for k in range(row.logits)]
        sampled = SampledRows(np.array(tokens, np.int32), {}, [None] * len(sampling))
        result = StepOutput([[] for _ in range(rows)], [None] * rows, [None] * rows)
        ready = time.perf_counter()
        accept(sampling, wanted, sampled, result)
        accepted = time.perf_counter()
        # the cost of a step that hides all drafts, or of one of a small model
        seconds = 3e-4 * (1 + 0.1 * out.num_tokens) if name == "wrong" else 1.0
        result.seconds = {"forward": seconds}
        if not idles:
            speculation.advance(out, result, seconds)
        advanced = time.perf_counter()
        for i, tokens in enumerate(result.token_ids):
            starts[i] += len(tokens)
            texts[i] += tokens
            counts[i] = len(result.drafts.get(i, ()))
        drafted += sum(row.drafts for row in scheduled)
        if step >= 20:
            for part, seconds in zip(
                took, (filled - begin, accepted - ready, advanced - accepted), strict=True
            ):
                took[part] += seconds
    each = {part: seconds / (steps - 20) / rows * 1e6 for part, seconds in took.items()}
    return {
        "proposer": name,
        "rows": rows,
        "drafts": drafted / steps / rows,
        **each,
        "us_a_row": sum(each.values()),
    }


def report(runs: Runs, _: argparse.Namespace) -> None:
    """Tables in Markdown."""
    if rows := runs.of("known"):
        print(
            "| weights | draft | α | drafts | τ | 1 + ΣΠα | c | r(γ + 1) | formula | speed-up | of formula |"
        )
        print("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
        for row in rows:
            free = row["method"] == "free"
            drafts = f"chosen, {row['drafts']:.1f}" if free else row["method"]
            costs = "| " if free else f"{row['draft_cost']:.2f} | {row['row_cost']:.2f}"
            print(
                f"| {row['format']} | {row['draft']} | {row['alpha']} | {drafts} | {row['tau']:.2f} | "
                f"{row['tau_by_position']:.2f} | {costs} | {row['formula']:.2f} | {row['speedup']:.2f} | "
                f"{row['of_formula']:.0%} |"
            )
    if rows := runs.of("load"):
        print("\n| weights | draft | streams | α | off tok/s | drafts | relative | 95 % |")
        print("|---|---|--:|--:|--:|--:|--:|--:|")
        for row in rows:
            print(
                f"| {row['format']} | {row['draft']} | {row['streams']} | {row['method']} | {row['off']:.1f} | "
                f"{row['drafts']:.2f} | {row['speedup']:.3f} | {interval(row)} |"
            )
        for row in rows:
            if row.get("plain_first"):
                print(both_orders(row, rows))
    for what in ("repeat", "prediction"):
        for row in runs.of(what):
            print(
                f"\n{what} {row.get('model') or row['format']}: speed-up {row['speedup']:.2f} ({interval(row)}), "
                f"{row['tau']:.2f} tokens and {row['drafts']:.2f} drafts a step, {row['acceptance']:.0%} of them "
                f"right, {row['off']:.1f} tok/s without"
            )
    if rows := runs.of("structures"):
        print("\n| proposer | rows | drafts a row | fill | accept | advance | µs a row and step |")
        print("|---|--:|--:|--:|--:|--:|--:|")
        for row in rows:
            print(
                f"| {row['proposer']} | {row['rows']} | {row['drafts']:.1f} | {row['fill']:.1f} | "
                f"{row['accept']:.1f} | {row['advance']:.1f} | {row['us_a_row']:.1f} |"
            )
    if busy := max((row["others"] for row in runs.rows), default=0.0):
        print(f"\nOther processes used up to {busy:.2f} processors.")


def both_orders(last: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """A line for the geometric mean of both orders, in which what the order does cancels out."""
    names = ("format", "draft", "streams", "method")
    [first] = (row for row in rows if not row.get("plain_first") and all(row[n] == last[n] for n in names))
    mean = math.sqrt(first["speedup"] * last["speedup"])
    text = f"| {' | '.join(str(last[name]) for name in names)} | both orders | | {mean:.3f} | "
    if None in (first["speedup_low"], last["speedup_low"]):
        return f"{text}– |"
    half = math.hypot(*(math.log(row["speedup_high"] / row["speedup_low"]) / 2 for row in (first, last))) / 2
    return f"{text}{mean * math.exp(-half):.3f} to {mean * math.exp(half):.3f} |"


def interval(row: dict[str, Any]) -> str:
    low, high = row["speedup_low"], row["speedup_high"]
    return "–" if low is None or high is None else f"{low:.3f} to {high:.3f}"


WHAT = {
    "known": known, "load": load, "repeat": repeat, "prediction": prediction, "structures": structures,
    "report": report,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "known": {"formats": ["bf16", "int8", "int4"], "draft": ["trimmed"], "rates": [0.5, 0.7, 0.8, 0.9], "tokens": 96,
              "pairs": 5},
    "load": {"formats": ["int8"], "draft": ["none"], "rates": [0.0, 0.5, 0.7, 0.9], "tokens": 64, "pairs": 15},
    "repeat": {"tokens": 512, "pairs": 15},
    "prediction": {"formats": ["int8"], "tokens": 2000, "pairs": 5},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=WHAT)
    parser.add_argument(
        "--runs", type=Path, default=Path("speculation.jsonl"), help="rows that were measured"
    )
    parser.add_argument("--model", help="of `repeat`, and in place of a shape: a GGUF file or a folder")
    parser.add_argument("--draft-model", help="of `known` and `load` with --model: a folder")
    parser.add_argument(
        "--method", metavar="JSON", help="of `load` with --model: its own drafts, as of --speculative-config"
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--formats", nargs="+", choices=FORMATS)
    parser.add_argument("--draft", nargs="+", choices=["trimmed", "full", "none"])
    parser.add_argument("--rates", nargs="+", type=float)
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--drafts", nargs="+", type=int, default=[1, 2, 3, 4, 6, 8, 12, 16])
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--tokens", type=int, help="of an output")
    parser.add_argument(
        "--both-orders", action="store_true", help="load each engine first once: it changes a few percent"
    )
    parser.add_argument("--pairs", type=int)
    args = parser.parse_args()
    for name, value in DEFAULTS.get(args.what, {}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.what == "repeat" and args.model is None:
        parser.error("repeat needs --model")
    WHAT[args.what](Runs(args.runs), args)


if __name__ == "__main__":
    main()
