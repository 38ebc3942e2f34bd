"""Measure the quality of a model: perplexity of a text, its predictions compared with another model's, or tasks.

ppl    perplexity of a text by a strided window, and bits per byte
kl     how far the predictions are from those of the original: KL divergence, perplexity, same most likely token
agree  how far greedy answers are those of the original
tasks  tasks of lm-evaluation-harness, over the API
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from quire.cli.gate import add_gate_arguments, gate_options
from quire.cli.options import add_engine_options, add_model_argument, engine_config, named_model
from quire.types import QuireError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from quire.bench.results import Metric, Result
    from quire.config.schema import EngineConfig
    from quire.engine.build.opening import Model
    from quire.executor.base import F32
    from quire.offline.scorer import Passage

MEASURES = ("ppl", "kl", "agree", "tasks")
MOST_PREDICTIONS = 5000  # in a result file
_DEFINITIONS = {
    "perplexity": "exp of the mean of -log p(token); lower is better, and comparable with one tokenizer only",
    "bits_per_byte": "the mean of -log2 p(token), by bytes of text: comparable between tokenizers",
    "kl_mean": "mean over predictions of Σ p · (log p - log q), original p, in nats; 0.01 is hard to notice, 0.1 is "
    "noticeable",
    "kl_p99": "99 of 100 predictions have a smaller divergence",
    "top1_agreement": "share of tokens where both models find the same token likeliest",
    "greedy_agreement": "share of the tokens of the original's greedy answers that the candidate finds likeliest too",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", choices=MEASURES, metavar="ppl|kl|agree|tasks", help="what to measure")
    add_model_argument(parser)
    add = parser.add_argument
    add("--against", metavar="MODEL", help="the original; without it, kl and agree compare the model with itself in "
        "floats, so that --quantization or --kv-cache-dtype are measured")  # fmt: skip
    add(
        "--window", type=int, metavar="N", help="ppl: tokens of a window (default: the context, at most 4096)"
    )
    add("--stride", type=int, metavar="N", help="ppl: tokens between windows (default: half a window)")
    add("--tasks", metavar="A,B", help="tasks: their names in lm-evaluation-harness")
    add("--limit", type=int, metavar="N", help="tasks: documents of each task (default: all)")
    add("--task-path", metavar="FOLDER", help="tasks: a folder with tasks of your own")
    add("--json", action="store_true", help="print the result as one JSON object, see docs/benchmarking.md")
    add(
        "--html", metavar="FILE", help="write a page with plots: divergence, error by layer, outlier channels"
    )
    add("--quiet", action="store_true", help="no progress and no notes")
    add_gate_arguments(parser)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    from quire.bench.recording import Recording
    from quire.util.printable import printable

    words = ["quire", "eval", *sys.argv[2:]] if sys.argv[1:2] == ["eval"] else ["quire", "eval", args.what]
    recording = Recording(f"eval {args.what}", words)
    found = _Run(args)
    {"ppl": found.ppl, "kl": found.kl, "agree": found.agree, "tasks": found.tasks}[args.what]()
    result = recording.result(
        settings=found.settings, metrics=found.metrics, tables=found.tables, notes=found.notes,
        definitions={name: text for name, text in _DEFINITIONS.items() if name in found.metrics},
    )  # fmt: skip
    _write(result, args)
    if not args.json:
        print("\n".join(map(printable, found.lines)))
    return 1 if found.failed else 0


def _write(result: Result, args: argparse.Namespace) -> None:
    from pathlib import Path

    from quire.bench.html_report import write_report
    from quire.bench.results import to_json

    if args.json:
        print(to_json(result))
    if args.html:
        try:
            write_report([result], Path(args.html))
        except OSError as error:
            raise QuireError(f"html: {args.html}: {error.strerror}") from error
        if not args.quiet:
            print(f"wrote {args.html}", file=sys.stderr)


class _Run:
    """One measurement: its models, and what it found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.name = args, named_model(args.model, quiet=args.quiet)
        self.asked: EngineConfig = engine_config(args)
        self.settings: dict[str, Any] = {"model": self.name}
        self.metrics: dict[str, Metric] = {}
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self.notes: list[str] = []
        self.lines: list[str] = []
        self.failed = False

    def ppl(self) -> None:
        from quire.offline.eval_text import BUILT_IN, text_of
        from quire.offline.evaluation import text_perplexity

        text = text_of(self.args.eval)
        self.settings["text"] = self.args.eval or BUILT_IN
        rows = []
        for name, prefix in ((self.args.against, "original_"), (self.name, "")):
            if name is None:
                continue
            with self._progress() as (loading, scoring):
                found = text_perplexity(
                    _opened(name), self.asked, text, self.args.window, self.args.stride,
                    loading=loading, scoring=scoring,
                )  # fmt: skip
            self._metric(f"{prefix}perplexity", found.perplexity, "", "lower")
            self._metric(f"{prefix}bits_per_byte", found.bits_per_byte, "bits", "lower")
            rows.append(dataclasses.asdict(found))
            self.lines.append(
                f"{found.model}: perplexity {found.perplexity:.4f}, {found.bits_per_byte:.4f} bits per byte "
                f"({found.tokens} tokens, windows of {found.window}, stride {found.stride})"
            )
        self.tables["texts"] = rows
        if self.args.html:
            model = _opened(self.name)
            self._channels(model, text)

    def kl(self) -> None:
        from quire.offline.gate import gate

        original, candidate, before, after = self._pair()
        each: dict[str, F32] = {}
        options = gate_options(self.args)
        with self._progress() as (loading, comparing):
            report = gate(
                original,
                candidate,
                before,
                options,
                changed=after,
                loading=loading,
                comparing=comparing,
                each=each,
            )
        worst = max(
            report.compared.divergences, key=lambda found: (found.perplexity is not None, found.kl_mean)
        )
        text = next(text for text in report.compared.texts if text.name == worst.text)
        self._metric("original_perplexity", text.perplexity, "", "lower")
        self._metric("perplexity", worst.perplexity, "", "lower")
        for name in ("kl_mean", "kl_error", "kl_p99", "kl_max"):
            self._metric(name, getattr(worst, name), "nats", "lower")
        self._metric("top1_agreement", worst.top1_agreement, "share", "higher")
        self.tables["texts"] = [
            {**dataclasses.asdict(text), **{f"candidate_{k}": v for k, v in dataclasses.asdict(found).items()
                                            if k not in {"text", "tokens"}}}
            for text, found in zip(report.compared.texts, report.compared.divergences, strict=True)
        ]  # fmt: skip
        self.tables["predictions"] = [
            {"text": name, "kl": float(kl)} for name, all_kl in each.items()
            for kl in all_kl[:: len(all_kl) // MOST_PREDICTIONS + 1]
        ]  # fmt: skip
        self.settings |= {"passed": report.passed, "max_kl": options.max_kl}
        self.notes += report.problems
        self.lines += report.lines()
        self.failed = not report.passed and not options.force
        if self.args.html:
            self._plots(original, candidate, before, after)

    def agree(self) -> None:
        from quire.offline.evaluation import greedy_agreement

        original, candidate, before, after = self._pair()
        with self._progress() as (loading, comparing):
            found = greedy_agreement(
                original, candidate, before, after, self.args.eval, loading=loading, comparing=comparing
            )
        self._metric("greedy_agreement", found.same_tokens, "share", "higher")
        self._metric("same_answers", found.same_answers / found.answers, "share", "higher")
        self._metric("common_tokens", found.common_tokens, "tokens", "higher")
        self.lines.append(
            f"greedy answers of {candidate.folder.name} compared with {original.folder.name}: {found.same_tokens:.1%} "
            f"of {found.tokens} tokens are the same, {found.same_answers} of {found.answers} answers to their end; "
            f"half of them differ after {found.common_tokens:g} tokens or later"
        )
        if self.args.html:
            self._plots(original, candidate, before, after)

    def tasks(self) -> None:
        from quire.cli.eval_tasks import run_tasks

        if not self.args.tasks:
            raise ValueError("tasks: --tasks names them, for example --tasks hellaswag,arc_easy")
        rows = run_tasks(
            self.name, self.asked, self.args.tasks.split(","),
            limit=self.args.limit, task_path=self.args.task_path, quiet=self.args.quiet,
        )  # fmt: skip
        self.tables["tasks"] = rows
        for row in rows:
            self._metric(f"{row['task']}_{row['metric']}", row["value"], "", "higher")
            error = "" if row["error"] is None else f" ± {row['error']:.4f}"
            self.lines.append(f"{row['task']:<32} {row['metric']:<24} {row['value']:.4f}{error}")

    def _pair(self) -> tuple[Model, Model, EngineConfig, EngineConfig]:
        """Original, candidate, and the options of each."""
        formats, candidate = self.asked.formats, _opened(self.name)
        if self.args.against is not None:
            self.settings["against"] = self.args.against
            before = self.asked.replace(kv_cache_dtype="auto", kv_cache_scales=None)
            return _opened(self.args.against), candidate, before, self.asked
        if formats.quantization == "auto" and formats.kv_cache_dtype == "auto":
            raise ValueError(
                f"{self.args.what}: needs --against MODEL, or a --kv-cache-dtype or --quantization to measure"
            )
        before = self.asked.replace(kv_cache_dtype="auto", kv_cache_scales=None)
        if formats.quantization in {"int8", "int4"}:
            before = before.replace(quantization="none", quantize_head="none")
            return _opened(self.name), candidate, before, self.asked
        return candidate, candidate, before, self.asked

    def _plots(self, original: Model, candidate: Model, before: EngineConfig, after: EngineConfig) -> None:
        """The tables behind the plots of a report."""
        from quire.offline.channels import layer_errors
        from quire.offline.eval_text import text_of

        text = text_of(self.args.eval)
        try:
            errors = layer_errors(original, candidate, before, after, _passages(original, text))
        except ValueError as error:
            self.notes.append(str(error))
        else:
            self.tables["layer_errors"] = [{"layer": i, "error": error} for i, error in enumerate(errors)]
        self._channels(original, text)

    def _channels(self, model: Model, text: str) -> None:
        from quire.offline.channels import channel_tables

        self.tables |= channel_tables(model, self.asked, _passages(model, text))

    def _metric(self, name: str, value: float | None, unit: str, better: Any) -> None:
        from quire.bench.results import Metric

        self.metrics[name] = Metric(value, unit, better, [] if value is None else [value])

    def _progress(self) -> Any:
        return _bars(enabled=not self.args.quiet)


def _passages(model: Model, text: str) -> list[Passage]:
    """The beginning of a text, for plots."""
    from quire.offline.eval_text import tokenizer_of
    from quire.offline.scorer import WINDOW, windows

    return windows(
        tokenizer_of(model).encode(text)[: 4 * WINDOW], min(WINDOW, model.facts.spec.max_positions)
    )


def _bars(*, enabled: bool) -> Any:
    from contextlib import contextmanager

    from quire.util.progress import ByteProgress, CountProgress

    @contextmanager
    def bars() -> Iterator[Sequence[Any]]:
        with (
            ByteProgress("loading weights", enabled=enabled) as loading,
            CountProgress("comparing", "predictions", enabled=enabled) as comparing,
        ):
            yield loading, comparing

    return bars()


def _opened(name: str) -> Model:
    from quire.engine.build.opening import open_model

    return open_model(name)
