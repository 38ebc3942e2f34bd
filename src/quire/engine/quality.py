"""How far a quantized model is from its checkpoint, prediction by prediction over a text.

Both run as they would serve, in chunks, over the same windows of tokens. For every token that has a successor in its
window, the two distributions of the next token are compared:

    divergence  KL(reference || quantized) = Σ p · (log p - log q), in nats: 0 when nothing changed
    agreement   the share of tokens where both find the same token likeliest
    perplexity  exp of the mean of -log p(the text's next token), of both
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.config.schema import EngineConfig
from quire.engine.build import choose, machine_facts, make_executor, weight_origin
from quire.engine.opening import Model
from quire.engine.weights import load_weights
from quire.executor.base import F32, Limits, StepArrays, step_array_bytes
from quire.executor.native import planned_bytes
from quire.program.memory import weight_bytes
from quire.types import MemoryBudgetError
from quire.util.sizes import format_size

WINDOW = 512  # tokens that are run as one sequence, or the model's context
CHUNK = 32  # tokens of a step, all of whose logits are wanted
_F64 = npt.NDArray[np.float64]

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class FormatQuality:
    """What one format does to a model; see the module. `tokens` is how many predictions were compared."""

    quantization: str
    group_size: int | None
    head: str | None
    weight_bytes: int
    tokens: int
    kl_mean: float
    kl_max: float
    top1_agreement: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class Quality:
    """Formats against the `reference`: the checkpoint in its unquantized number format."""

    reference: str
    weight_bytes: int
    perplexity: float
    text_tokens: int
    formats: tuple[FormatQuality, ...]


def measure(
    model: Model, asked: EngineConfig, tokens: Sequence[int], *,
    loading: Progress | None = None, comparing: Progress | None = None,
) -> Quality:  # fmt: skip
    """Compare the quantization that is asked for, or int8 and int4 when none is, with the unquantized model.

    `loading` is told bytes of weights, `comparing` predictions. Raises ValueError for a text of fewer than two tokens,
    MemoryBudgetError when two copies of the weights do not fit the bound.
    """
    if len(tokens) < 2:
        raise ValueError(f"the text has {len(tokens)} tokens; at least 2 are needed to compare predictions")
    wanted = [asked.quantization] if asked.quantization in {"int8", "int4"} else ["int8", "int4"]
    window = min(WINDOW, model.facts.spec.max_positions)
    windows = [tokens[i : i + window] for i in range(0, len(tokens), window)]
    plain = _Scorer(model, dataclasses.replace(asked, quantization="none", quantize_head="none"), windows)
    others = [_Scorer(model, dataclasses.replace(asked, quantization=name), windows) for name in wanted]
    _check_memory(plain, others)
    plain.load(loading)
    predictions = sum(len(window) - 1 for window in windows)
    formats, perplexity, done = [], 0.0, 0
    for other in others:
        other.load(loading)
        sums = _Sums()
        for p, q, targets in _predictions(plain, other, windows):
            sums.add(p, q, targets)
            if comparing is not None:
                comparing(done + sums.tokens, predictions * len(others))
        done += sums.tokens
        formats.append(other.quality(sums))
        perplexity = sums.reference_perplexity
        other.close()
    plain.close()
    config = plain.config
    return Quality(config.weights, weight_bytes(plain.program), perplexity, len(tokens), tuple(formats))


class _Sums:
    """Running sums over predictions."""

    def __init__(self) -> None:
        self.tokens = self.agreed = 0
        self.kl = self.kl_max = 0.0
        self._loss, self._reference_loss = 0.0, 0.0

    def add(self, p: F32, q: F32, targets: npt.NDArray[np.int64]) -> None:
        """Logits [n, vocabulary] of the reference and the other, and the tokens [n] that follow."""
        log_p, log_q = log_softmax(p), log_softmax(q)
        divergence = np.maximum((np.exp(log_p) * (log_p - log_q)).sum(-1), 0.0)  # rounding may leave -1e-16
        rows = np.arange(len(targets))
        self.tokens += len(targets)
        self.agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        self.kl += float(divergence.sum())
        self.kl_max = max(self.kl_max, float(divergence.max(initial=0.0)))
        self._reference_loss -= float(log_p[rows, targets].sum())
        self._loss -= float(log_q[rows, targets].sum())

    @property
    def perplexity(self) -> float:
        return float(np.exp(self._loss / self.tokens))

    @property
    def reference_perplexity(self) -> float:
        return float(np.exp(self._reference_loss / self.tokens))


def log_softmax(logits: F32) -> _F64:
    """Log probabilities over the last axis, in float64."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    log_p: _F64 = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return log_p


class _Scorer:
    """A model in one format that gives the logits of every token of a sequence."""

    def __init__(self, model: Model, asked: EngineConfig, windows: Sequence[Sequence[int]]) -> None:
        self._model = model
        longest = max(len(window) for window in windows)
        asked = dataclasses.replace(asked, max_model_len=max(longest, 2), max_num_seqs=1)
        self.config, self.program = choose(model, asked, machine_facts())
        groups = len(self.program.cache_groups)
        blocks = -(-longest // asked.block_size)
        self.limits = Limits(CHUNK, 1, CHUNK, longest, blocks * groups, asked.block_size)
        self._arrays = StepArrays(self.limits, groups)
        for group, table in enumerate(self._arrays.block_tables):
            table[0, :blocks] = np.arange(group * blocks, (group + 1) * blocks)

    @property
    def nbytes(self) -> int:
        """What it will hold: the executor, its arrays, and a chunk's log probabilities."""
        held = sum(planned_bytes(self.program, self.limits, self.config.threads).values())
        scores = 3 * CHUNK * self.program.vocab * 8
        return held + step_array_bytes(self.limits, len(self.program.cache_groups)) + scores

    def load(self, progress: Progress | None) -> None:
        self._executor = make_executor(self.program, self.config)
        load_weights(weight_origin(self._model), self.program, self.config, self._executor, progress)
        self._executor.bind(self.limits, self._arrays)

    def logits(self, tokens: Sequence[int], start: int) -> F32:
        """Logits [n, vocabulary] of tokens[start : start + CHUNK]; what is before must have been run."""
        arrays, chunk = self._arrays, tokens[start : start + CHUNK]
        n = len(chunk)
        arrays.token_ids[:n], arrays.positions[:n] = chunk, range(start, start + n)
        arrays.slots[0], arrays.query_start[:2], arrays.logit_rows[:n] = 0, (0, n), range(n)
        return self._executor.run(n, 1, n)

    def quality(self, sums: _Sums) -> FormatQuality:
        asked = self.config.asked
        grouped = "i4" in {self.config.quantized, self.config.head}
        return FormatQuality(
            quantization=asked.quantization,
            group_size=asked.quantization_group_size if grouped else None,
            head=self.config.head,
            weight_bytes=weight_bytes(self.program),
            tokens=sums.tokens,
            kl_mean=sums.kl / sums.tokens,
            kl_max=sums.kl_max,
            top1_agreement=sums.agreed / sums.tokens,
            perplexity=sums.perplexity,
        )

    def close(self) -> None:
        self._executor.close()


def _predictions(
    plain: _Scorer, other: _Scorer, windows: Sequence[Sequence[int]]
) -> Iterator[tuple[F32, F32, npt.NDArray[np.int64]]]:
    """Both models' logits and the next tokens, chunk by chunk."""
    for window in windows:
        for start in range(0, len(window) - 1, CHUNK):  # the last token predicts nothing that is known
            targets = np.array(window[start + 1 : start + 1 + CHUNK], np.int64)
            p, q = (scorer.logits(window, start)[: len(targets)] for scorer in (plain, other))
            yield p, q, targets


def _check_memory(plain: _Scorer, others: Sequence[_Scorer]) -> None:
    bound, held = plain.config.memory, machine_facts().resident_memory
    need = held + plain.nbytes + max(other.nbytes for other in others)
    if need > bound:
        raise MemoryBudgetError(
            f"memory: comparing formats needs the model twice, {format_size(need)}, "
            f"and the bound is {format_size(bound)}"
        )
