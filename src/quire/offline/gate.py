"""The gate: what a change of a model costs in quality, and whether that is too much.

A candidate (a quantized or pruned checkpoint, or the same one with another KV cache) is compared with the original on a
text that the original knows: perplexity, KL divergence of the next token, greedy agreement. A check of the user's own
can be run on both. See quire.offline.divergence for the measures.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any, Literal

from quire.config.schema import EngineConfig
from quire.engine.build.opening import Model
from quire.executor.base import F32
from quire.offline.divergence import Compared, compare
from quire.offline.eval_text import check_same_tokens, eval_texts
from quire.offline.quality import reference_predictions
from quire.offline.scorer import OWN_TOKENS, WINDOW, Progress, Scorer
from quire.program.memory import kv_bytes_per_token
from quire.records import dataclass
from quire.types import QuireError
from quire.util.sizes import format_size

MAX_KL, MAX_DROP = 0.1, 0.02
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class GateError(QuireError):
    """A candidate lost more than its limits allow, or the user's check failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """How to measure and what to accept.

    eval_file: the user's text; None: see eval_texts. max_kl: limit of the mean KL divergence, in nats. eval_cmd: the
    user's check, see run_check; max_drop: how far its score may change for the worse, as a share of the original's;
    `better`: its direction. force: accept everything. tokens: the most of each text that are compared.
    """

    eval_file: str | None = None
    max_kl: float = MAX_KL
    eval_cmd: str | None = None
    max_drop: float = MAX_DROP
    better: Literal["higher", "lower"] = "higher"
    force: bool = False
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_kl", "max_drop"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: {getattr(self, name)} is not a number from 0")
        if self.tokens is not None and self.tokens < 2:
            raise ValueError(f"tokens: {self.tokens} is below 2")


@dataclass(frozen=True, slots=True)
class GateSide:
    """One of the two models: bytes of its weights in memory, and of the cache per token."""

    name: str
    weight_bytes: int
    kv: str
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class CheckScores:
    """The numbers that the user's check printed for the two."""

    command: str
    original: float
    candidate: float


@dataclass(frozen=True, slots=True)
class GateReport:
    """What a candidate costs; `problems` says in words which limits it exceeds."""

    original: GateSide
    candidate: GateSide
    compared: Compared
    check: CheckScores | None
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"passed": self.passed, **dataclasses.asdict(self)}

    def lines(self) -> list[str]:
        """A table for people."""
        one, two = self.original, self.candidate
        rows = [
            f"quality of {two.name} compared with {one.name}",
            f"  weights {format_size(one.weight_bytes)} -> {format_size(two.weight_bytes)}, KV cache {one.kv} "
            f"{one.kv_bytes_per_token:,} -> {two.kv} {two.kv_bytes_per_token:,} bytes per token",
            f"  {'text':<20} {'tokens':>6} {'perplexity':>20} {'KL mean':>8} {'± error':>8} {'KL p99':>8} "
            f"{'KL max':>8} {'same top-1':>10}",
        ]
        for text, found in zip(self.compared.texts, self.compared.divergences, strict=True):
            after = "-" if found.perplexity is None else f"{found.perplexity:.3f}"
            rows.append(
                f"  {Path(text.name).name[-20:]:<20} {text.tokens:>6} {f'{text.perplexity:.3f} -> {after}':>20} "
                f"{found.kl_mean:>8.4f} {found.kl_error:>8.4f} {found.kl_p99:>8.3f} {found.kl_max:>8.3f} "
                f"{found.top1_agreement:>10.1%}"
            )
            if not text.known:
                rows.append("    the original does not know such text: these figures judge nothing")
        if self.check is not None:
            rows.append(f"  check: {self.check.original:g} -> {self.check.candidate:g}  {self.check.command}")
        return rows + [f"  too much: {problem}" for problem in self.problems]


def gate(
    original: Model,
    candidate: Model,
    asked: EngineConfig,
    options: GateOptions,
    *,
    changed: EngineConfig | None = None,
    loading: Progress | None = None,
    comparing: Progress | None = None,
    each: dict[str, F32] | None = None,
) -> GateReport:
    """Measure `candidate` against `original`; both run with the options `asked`, the candidate with `changed` where
    given. If they are the same object, they share its weights, so that only the format of the cache may differ. Nothing
    is refused here; see `enforce`.

    Memory: both models beside each other, within the bound of `asked`, or one after the other where they do not fit,
    with the predictions of the original in a temporary file. `loading` is called with bytes of weights, `comparing`
    with predictions; `each` gets the divergence of every prediction by text.

    Raises ValueError for models or texts that cannot be compared, MemoryBudgetError, and GateError for a user's check
    that gives no number.
    """
    check_same_tokens(original, candidate)
    texts, prompts = eval_texts(original, options.eval_file)
    longest = min(WINDOW, original.facts.spec.max_positions, candidate.facts.spec.max_positions)
    plain = Scorer(original, asked, longest)
    after = changed or asked
    other = Scorer(candidate, after, longest, beside=plain if candidate is original else None)
    if options.tokens is not None:
        texts = {name: tokens[: options.tokens] for name, tokens in texts.items()}
    own = min(OWN_TOKENS, options.tokens or OWN_TOKENS)
    predictions = reference_predictions(original, plain, [other], texts, prompts, loading, own)
    other.load(loading)
    compared = compare(predictions, other, comparing, each)
    other.close()
    predictions.close()
    sides = _side(original, plain), _side(candidate, other)
    check = None if options.eval_cmd is None else _check(original, candidate, options.eval_cmd, asked, after)
    return GateReport(*sides, compared, check, tuple(_problems(compared, check, options)))


def enforce(report: GateReport, options: GateOptions) -> None:
    """Raise GateError if a limit is exceeded, unless the options force the candidate."""
    if report.problems and not options.force:
        raise GateError(
            f"quality: {'; '.join(report.problems)}; validate on your own text (--eval FILE, --eval-cmd COMMAND), "
            "raise the limit, or accept the loss with --force"
        )


def _side(model: Model, scorer: Scorer) -> GateSide:
    kv_bytes = kv_bytes_per_token(scorer.program)
    return GateSide(model.folder.name, scorer.weight_bytes, scorer.config.kv, kv_bytes)


def _problems(compared: Compared, check: CheckScores | None, options: GateOptions) -> list[str]:
    judged = [d for d, text in zip(compared.divergences, compared.texts, strict=True) if text.known]
    found = [
        f"the mean KL divergence on {each.text} is {each.kl_mean:.4f}, above the limit of {options.max_kl:g}"
        for each in judged
        if each.kl_mean > options.max_kl
    ]
    if not judged and check is None:
        found.append("the original knows none of the texts, so nothing shows that the loss is small")
    if check is not None:
        change = check.candidate - check.original
        drop = (-change if options.better == "higher" else change) / max(abs(check.original), 1e-12)
        if drop > options.max_drop:
            found.append(
                f"the check's score changed from {check.original:g} to {check.candidate:g}, {drop:.1%} for the worse; "
                f"the limit is {options.max_drop:.1%}"
            )
    return found


def _check(
    original: Model, candidate: Model, command: str, before: EngineConfig, after: EngineConfig
) -> CheckScores:
    scores = (
        run_check(command, model, config.formats.kv_cache_dtype)
        for model, config in ((original, before), (candidate, after))
    )
    return CheckScores(command, *scores)


def run_check(command: str, model: Model, kv_cache_dtype: str) -> float:
    """Run a user's check of a model in a shell; returns the last number of its last line.

    `{model}` stands for the quoted path. QUIRE_MODEL and QUIRE_KV_CACHE_DTYPE are set, which Quire's own commands read.
    Raises GateError when it fails or prints no number.
    """
    path = str(model.folder.resolve())
    env = {**os.environ, "QUIRE_MODEL": path, "QUIRE_KV_CACHE_DTYPE": kv_cache_dtype}
    shell = command.replace("{model}", shlex.quote(path))
    done = subprocess.run(
        shell, shell=True, env=env, stdout=subprocess.PIPE, text=True, errors="replace", check=False
    )
    if done.returncode:
        raise GateError(f"eval_cmd: {shell!r} failed with status {done.returncode}")
    last = (done.stdout.strip().splitlines() or [""])[-1]
    numbers = _NUMBER.findall(last)
    if not numbers:
        raise GateError(f"eval_cmd: the last line of {shell!r} has no number: {last[:200]!r}")
    return float(numbers[-1])
