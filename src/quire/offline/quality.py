"""Measures how far a quantized model is from its checkpoint, prediction by prediction.

Both run as they would be served, in chunks, over the same passages. For every token of a passage after its prompt, the
distributions of both models for that token are compared:

    divergence  KL(reference || other) = Σ p · (log p - log q), in nats: 0 when nothing changed
    agreement   the share of tokens where both find the same token likeliest
    perplexity  exp of the mean of -log p(the token), of both

A passage is a text, or the reference model's own answer to a prompt, drawn from its distributions (temperature 1): the
only text that every model knows. On a text that the reference does not know, predictions are arbitrary, and so are
changes to them; see sane_perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from quire.config.schema import EngineConfig
from quire.engine.build.assemble import choose, machine_facts, weight_origin
from quire.engine.build.load_weights import load_weights
from quire.engine.build.opening import Model
from quire.executor.base import F32, Limits, StepArrays, step_array_bytes
from quire.executor.kinds import executor_kind
from quire.program.memory import weight_bytes
from quire.records import dataclass
from quire.spec.model import LatentAttention
from quire.types import MemoryBudgetError
from quire.util.platform import resident_exactly
from quire.util.sizes import format_size

WINDOW = 512  # tokens run as one sequence, at most the model's context
CHUNK = 32  # tokens per step; the logits of all of them are computed
CONTINUATION = 128  # the longest answer to one prompt, in tokens
OWN_TOKENS, OWN_ROUNDS = 512, 4  # prompts repeat until this many tokens of answers, or this many rounds
OWN_TEXT = "the model's own"
_SANE_SHARE = 16  # see sane_perplexity
_F64 = npt.NDArray[np.float64]

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens run as one sequence; predictions are compared from the first token after the `prompt`."""

    tokens: tuple[int, ...]
    prompt: int = 1

    @property
    def predictions(self) -> int:
        return len(self.tokens) - self.prompt


@dataclass(frozen=True, slots=True)
class Divergence:
    """The effect of one format on the predictions of one text; see the module.

    kl_error: standard error of kl_mean. perplexity: None for a text that the reference does not know.
    """

    text: str
    tokens: int
    kl_mean: float
    kl_error: float
    kl_max: float
    top1_agreement: float
    perplexity: float | None


@dataclass(frozen=True, slots=True)
class FormatQuality:
    """One choice of formats: bytes of weights, bytes of cache per token, and the effect on each text."""

    quantization: str
    group_size: int | None
    head: str | None
    kv: str
    weight_bytes: int
    texts: tuple[Divergence, ...]


@dataclass(frozen=True, slots=True)
class TextQuality:
    """A text and its perplexity under the reference; `known`: whether that shows that the model knows such text."""

    name: str
    tokens: int
    perplexity: float
    known: bool


@dataclass(frozen=True, slots=True)
class Quality:
    """Formats compared with the `reference`: the checkpoint in its unquantized format, with keys and values in `kv`."""

    reference: str
    kv: str
    weight_bytes: int
    texts: tuple[TextQuality, ...]
    formats: tuple[FormatQuality, ...]


def sane_perplexity(perplexity: float, vocab: int) -> bool:
    """Whether a model knows a text: it hesitates between fewer tokens than one in sixteen of its vocabulary.

    The perplexity of a model that knows nothing is the size of the vocabulary; higher means certainty about wrong
    tokens.
    """
    return perplexity < vocab / _SANE_SHARE


def measure(
    model: Model, asked: EngineConfig, texts: dict[str, Sequence[int]], prompts: Sequence[Sequence[int]], *,
    loading: Progress | None = None, comparing: Progress | None = None,
) -> Quality:  # fmt: skip
    """Compare formats on texts (name -> tokens), and on the reference's answers to `prompts`.

    Formats: the quantized weights and the quantized cache of `asked`, each alone and both together; if it has neither,
    int8 and int4 weights and an int8 cache. All are compared with the same reference.

    `loading` is called with bytes of weights, `comparing` with predictions. Raises ValueError for a text of fewer than
    two tokens, MemoryBudgetError when two copies of the weights exceed the bound.
    """
    for tokens in texts.values():
        if len(tokens) < 2:
            raise ValueError(
                f"the text has {len(tokens)} tokens; at least 2 are needed to compare predictions"
            )
    longest = min(WINDOW, model.facts.spec.max_positions)
    plain_config = asked.replace(quantization="none", quantize_head="none", kv_cache_dtype="auto")
    plain = _Scorer(model, plain_config, longest)
    others = [_Scorer(model, config, longest) for config in _alternatives(model, asked, plain_config)]
    _check_memory(plain, others)
    plain.load(loading)
    passages = {name: _windows(tokens, longest) for name, tokens in texts.items()}
    if prompts:
        passages[OWN_TEXT] = _continuations(
            plain, prompts, asked.execution.seed, set(model.facts.generation.eos_token_ids)
        )
    total = len(others) * sum(passage.predictions for found in passages.values() for passage in found)
    formats: list[FormatQuality] = []
    seen: tuple[TextQuality, ...] = ()
    done = 0
    for other in others:
        other.load(loading)
        sums = {name: _Sums() for name in passages}
        for name, found in passages.items():
            for p, q, targets in _predictions(plain, other, found):
                sums[name].add(p, q, targets)
                done += len(targets)
                if comparing is not None:
                    comparing(done, total)
        seen = tuple(text.reference(name, model.facts.spec.vocab) for name, text in sums.items())
        known = {text.name for text in seen if text.known}
        divergences = tuple(text.divergence(name, known=name in known) for name, text in sums.items())
        formats.append(other.quality(divergences))
        other.close()
    plain.close()
    return Quality(plain.config.weights, plain.config.kv, weight_bytes(plain.program), seen, tuple(formats))


def _alternatives(model: Model, asked: EngineConfig, plain: EngineConfig) -> list[EngineConfig]:
    latent = any(isinstance(layer.mixer, LatentAttention) for layer in model.facts.spec.layers)
    weights = {"quantization": asked.formats.quantization, "quantize_head": asked.formats.quantize_head}
    kv = {"kv_cache_dtype": asked.formats.kv_cache_dtype}
    quantized = asked.formats.quantization in {"int8", "int4"}
    changes: list[dict[str, str]] = []
    if quantized:
        changes.append(weights)
    if asked.formats.kv_cache_dtype != "auto":
        changes.append(kv)
    if len(changes) == 2:
        changes.append(weights | kv)
    if not changes:
        changes = [weights | {"quantization": name} for name in ("int8", "int4")]
        changes += [] if latent else [{"kv_cache_dtype": "int8"}]
    return [plain.replace(**change) for change in changes]


def _windows(tokens: Sequence[int], longest: int) -> list[Passage]:
    windows = (tuple(tokens[at : at + longest]) for at in range(0, len(tokens), longest))
    return [Passage(window) for window in windows if len(window) > 1]


def _continuations(
    plain: _Scorer, prompts: Sequence[Sequence[int]], seed: int, stops: set[int]
) -> list[Passage]:
    """A model's answers to prompts, drawn from its distributions, each up to its end."""
    random, found = np.random.default_rng(seed), list[Passage]()
    for prompt in list(prompts) * OWN_ROUNDS:
        if sum(passage.predictions for passage in found) >= OWN_TOKENS:
            break
        tokens = list(prompt[-(plain.longest // 2) :])
        start, kept = 0, len(tokens)
        most = min(kept + CONTINUATION, plain.longest)
        while len(tokens) < most and not (len(tokens) > kept and tokens[-1] in stops):
            rows = plain.logits(tokens, start)
            start += len(rows)
            if start < len(tokens):  # of the prompt
                continue
            shares = np.exp(log_softmax(rows[-1:])[0]).cumsum()
            tokens.append(
                min(int(np.searchsorted(shares, random.random() * shares[-1], "right")), len(shares) - 1)
            )
        found.append(Passage(tuple(tokens), kept))
    return found


class _Sums:
    """Running sums over predictions."""

    def __init__(self) -> None:
        self.tokens = self.agreed = 0
        self.kl = self.kl_squares = self.kl_max = 0.0
        self._loss, self._reference_loss = 0.0, 0.0

    def add(self, p: F32, q: F32, targets: npt.NDArray[np.int64]) -> None:
        """Add logits [n, vocabulary] of the reference and the other, and the tokens [n] that follow."""
        log_p, log_q = log_softmax(p), log_softmax(q)
        divergence = np.maximum((np.exp(log_p) * (log_p - log_q)).sum(-1), 0.0)  # rounding may leave -1e-16
        rows = np.arange(len(targets))
        self.tokens += len(targets)
        self.agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        self.kl += float(divergence.sum())
        self.kl_squares += float(np.square(divergence).sum())
        self.kl_max = max(self.kl_max, float(divergence.max(initial=0.0)))
        self._reference_loss -= float(log_p[rows, targets].sum())
        self._loss -= float(log_q[rows, targets].sum())

    def reference(self, name: str, vocab: int) -> TextQuality:
        perplexity = float(np.exp(self._reference_loss / self.tokens))
        return TextQuality(name, self.tokens, perplexity, sane_perplexity(perplexity, vocab))

    def divergence(self, name: str, *, known: bool) -> Divergence:
        mean = self.kl / self.tokens
        return Divergence(
            text=name,
            tokens=self.tokens,
            kl_mean=mean,
            kl_error=math.sqrt(max(self.kl_squares / self.tokens - mean * mean, 0.0) / self.tokens),
            kl_max=self.kl_max,
            top1_agreement=self.agreed / self.tokens,
            perplexity=float(np.exp(self._loss / self.tokens)) if known else None,
        )


def log_softmax(logits: F32) -> _F64:
    """Log probabilities over the last axis, in float64."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    log_p: _F64 = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return log_p


class _Scorer:
    """A model in one format that computes the logits of every token of a sequence."""

    def __init__(self, model: Model, asked: EngineConfig, longest: int) -> None:
        self._model, self.longest = model, longest
        asked = asked.replace(max_model_len=max(longest, 2), max_num_seqs=1)
        self.config, self.program = choose(model, asked, machine_facts(asked.execution.executor))
        self._kind = executor_kind(self.config)
        groups = len(self.program.cache_groups)
        size = self.config.asked.cache.block_size
        blocks = -(-longest // size)
        self.limits = Limits(CHUNK, 1, CHUNK, longest, blocks * groups, size)
        self._arrays = StepArrays(self.limits, groups)
        for group, table in enumerate(self._arrays.block_tables):
            table[0, :blocks] = np.arange(group * blocks, (group + 1) * blocks)

    @property
    def nbytes(self) -> int:
        """Bytes it will hold: the executor, its arrays, and the log probabilities of a chunk."""
        held = sum(self._kind.planned_bytes(self.program, self.limits).values())
        scores = 3 * CHUNK * self.program.vocab * 8
        return held + step_array_bytes(self.limits, len(self.program.cache_groups)) + scores

    def load(self, progress: Progress | None) -> None:
        self._executor = self._kind.make(self.program)
        load_weights(weight_origin(self._model), self.program, self.config, self._executor, progress)
        self._executor.bind(self.limits, self._arrays)

    def logits(self, tokens: Sequence[int], start: int) -> F32:
        """Logits [n, vocabulary] of tokens[start : start + CHUNK]; all tokens before must have been run."""
        arrays, chunk = self._arrays, tokens[start : start + CHUNK]
        n = len(chunk)
        arrays.token_ids[:n], arrays.positions[:n] = chunk, range(start, start + n)
        arrays.slots[0], arrays.query_start[:2], arrays.logit_rows[:n] = 0, (0, n), range(n)
        return self._executor.run(n, 1, n)["logits"]

    def quality(self, texts: tuple[Divergence, ...]) -> FormatQuality:
        quantized, head = (self.config.quantized, self.config.head)
        linears = [param for param in self.program.params if param.groups]
        sizes = [
            param.groups.size for param in linears if param.groups and (param.name != "head" or not quantized)
        ]
        return FormatQuality(
            quantization=self.config.asked.formats.quantization if quantized else "none",
            group_size=max(sizes) if sizes else None,
            head=head,
            kv=self.config.kv,
            weight_bytes=weight_bytes(self.program),
            texts=texts,
        )

    def close(self) -> None:
        self._executor.close()


def _predictions(
    plain: _Scorer, other: _Scorer, passages: Sequence[Passage]
) -> Iterator[tuple[F32, F32, npt.NDArray[np.int64]]]:
    """The logits of both models and the next tokens, chunk by chunk."""
    for passage in passages:
        tokens, compared = passage.tokens, passage.prompt - 1
        for start in range(0, len(tokens) - 1, CHUNK):  # no known token follows the last one
            targets = np.array(tokens[start + 1 : start + 1 + CHUNK], np.int64)
            p, q = (scorer.logits(tokens, start)[: len(targets)] for scorer in (plain, other))
            first = max(compared - start, 0)
            if first < len(targets):
                yield p[first:], q[first:], targets[first:]


def _check_memory(plain: _Scorer, others: Sequence[_Scorer]) -> None:
    bound, held = plain.config.memory, resident_exactly()
    need = held + plain.nbytes + max(other.nbytes for other in others)
    if need > bound:
        raise MemoryBudgetError(
            f"memory: comparing formats needs the model twice ({format_size(need)}), "
            f"but the bound is {format_size(bound)}"
        )
