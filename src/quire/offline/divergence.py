"""How far the predictions of one model are from those of another, over known tokens.

For every token of a passage after its prompt, the distributions of both models for that token are compared:

    divergence  KL(reference || other) = Σ p · (log p - log q), in nats: 0 when nothing changed
    agreement   the share of tokens where both find the same token likeliest
    perplexity  exp of the mean of -log p(the token), of both

A passage is a text, or the reference model's own answer to a prompt, drawn from its distributions (temperature 1): the
only text that every model knows. On a text that the reference does not know, predictions are arbitrary, and so are
changes to them; see sane_perplexity.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

import numpy as np
import numpy.typing as npt

from quire.executor.base import F32
from quire.offline.scorer import Passage, Progress, Scorer, log_softmax, score, targets
from quire.records import dataclass
from quire.types import MemoryBudgetError
from quire.util.platform import resident_exactly
from quire.util.sizes import format_size

OWN_TEXT = "the model's own"
_SANE_SHARE = 16  # see sane_perplexity


@dataclass(frozen=True, slots=True)
class Divergence:
    """The effect of one change on the predictions of one text; see the module.

    kl_error: standard error of kl_mean. kl_p99: 99 of 100 predictions change less. perplexity: None for a text that the
    reference does not know.
    """

    text: str
    tokens: int
    kl_mean: float
    kl_error: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    perplexity: float | None


@dataclass(frozen=True, slots=True)
class TextQuality:
    """A text and its perplexity under the reference; `known`: whether that shows that the model knows such text."""

    name: str
    tokens: int
    perplexity: float
    known: bool


@dataclass(frozen=True, slots=True)
class Compared:
    """Texts under the reference, and the divergence of the other model on each."""

    texts: tuple[TextQuality, ...]
    divergences: tuple[Divergence, ...]


def sane_perplexity(perplexity: float, vocab: int) -> bool:
    """Whether a model knows a text: it hesitates between fewer tokens than one in sixteen of its vocabulary.

    The perplexity of a model that knows nothing is the size of the vocabulary; higher means certainty about wrong
    tokens.
    """
    return perplexity < vocab / _SANE_SHARE


class _Sums:
    """Running sums over predictions, and the divergence of each."""

    def __init__(self) -> None:
        self.tokens = self.agreed = 0
        self._kl: list[F32] = []
        self._loss, self._reference_loss = 0.0, 0.0

    @property
    def kl(self) -> F32:
        """The divergence of each prediction so far."""
        return np.concatenate(self._kl)

    def add(self, p: F32, q: F32, found: npt.NDArray[np.int64]) -> None:
        """Add logits [n, vocabulary] of the reference and the other, and the tokens [n] that follow."""
        log_p, log_q = log_softmax(p), log_softmax(q)
        divergence = np.maximum((np.exp(log_p) * (log_p - log_q)).sum(-1), 0.0)  # rounding may leave -1e-16
        rows = np.arange(len(found))
        self.tokens += len(found)
        self.agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        self._kl.append(divergence.astype(np.float32))
        self._reference_loss -= float(log_p[rows, found].sum())
        self._loss -= float(log_q[rows, found].sum())

    def reference(self, name: str, vocab: int) -> TextQuality:
        perplexity = _exp(self._reference_loss / self.tokens)
        return TextQuality(name, self.tokens, perplexity, sane_perplexity(perplexity, vocab))

    def divergence(self, name: str, *, known: bool) -> Divergence:
        every = self.kl.astype(np.float64)
        return Divergence(
            text=name,
            tokens=self.tokens,
            kl_mean=float(every.mean()),
            kl_error=float(every.std()) / math.sqrt(self.tokens),
            kl_p99=float(np.quantile(every, 0.99)),
            kl_max=float(every.max()),
            top1_agreement=self.agreed / self.tokens,
            perplexity=_exp(self._loss / self.tokens) if known else None,
        )


def perplexity(scorer: Scorer, passages: Sequence[Passage], progress: Progress | None = None) -> float:
    """Exp of the mean loss, in nats, of all predictions of a loaded model."""
    loss, done, total = 0.0, 0, sum(passage.predictions for passage in passages)
    for logits, found in zip(score(scorer, passages), targets(passages), strict=True):
        loss -= float(log_softmax(logits)[np.arange(len(found)), found].sum())
        done += len(found)
        if progress is not None:
            progress(done, total)
    return _exp(loss / total)


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < math.log(1e300) else math.inf


class Predictions:
    """The logits of a reference over passages: computed beside the other model's, or read from a file where both
    models do not fit the memory bound at the same time.
    """

    def __init__(self, scorer: Scorer, texts: Mapping[str, Sequence[Passage]]) -> None:
        self.texts = texts
        self.vocab = scorer.program.vocab
        self._scorer = scorer
        self._file: IO[bytes] | None = None

    def keep(self) -> None:
        """Compute all, keep them in a file that ends with this process, and free the model."""
        count = sum(p.predictions for passages in self.texts.values() for p in passages)
        need, folder = count * self.vocab * 4, tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        if need > free:
            raise MemoryBudgetError(
                f"memory: the bound does not hold both models, and the predictions of one ({format_size(need)}) do not "
                f"fit the free space of {folder} ({format_size(free)}); raise --memory or use a shorter text"
            )
        file: IO[bytes] = tempfile.TemporaryFile(prefix="quire-eval-")  # noqa: SIM115  closed by close()
        for passages in self.texts.values():
            for logits in score(self._scorer, passages):
                file.write(np.ascontiguousarray(logits, np.float32).tobytes())
        self._scorer.close()
        self._file = file

    def rows(self, name: str) -> Iterator[F32]:
        """The logits of one text, chunk by chunk; texts are asked for in order when they are kept."""
        if self._file is None:
            yield from score(self._scorer, self.texts[name])
            return
        before = 0
        for other, passages in self.texts.items():
            if other == name:
                break
            before += sum(passage.predictions for passage in passages)
        self._file.seek(before * self.vocab * 4)
        for found in targets(self.texts[name]):
            data = self._file.read(len(found) * self.vocab * 4)
            yield np.frombuffer(data, np.float32).reshape(len(found), self.vocab)

    def close(self) -> None:
        if self._file is None:
            self._scorer.close()
        else:
            self._file.close()


def side_by_side(reference: Scorer, others: Sequence[Scorer]) -> bool:
    """Whether the memory bound holds the reference and any one of the others. Raises MemoryBudgetError if it does not
    hold them one after the other.
    """
    bound, held = reference.config.memory, resident_exactly()
    largest = max([0, *(other.nbytes for other in others)])
    together = held + reference.nbytes + largest
    need = together if any(other.borrows for other in others) else held + max(reference.nbytes, largest)
    if need > bound:
        raise MemoryBudgetError(
            f"memory: the model and the logits of a chunk need {format_size(need)}, but the bound is "
            f"{format_size(bound)}"
        )
    return together <= bound


def compare(
    predictions: Predictions,
    other: Scorer,
    progress: Progress | None = None,
    each: dict[str, F32] | None = None,
) -> Compared:
    """The reference's predictions beside those of `other`, which is loaded. `progress` counts predictions; `each` gets
    the divergence of every prediction by text.
    """
    sums = {name: _Sums() for name in predictions.texts}
    done, total = 0, sum(p.predictions for passages in predictions.texts.values() for p in passages)
    for name, passages in predictions.texts.items():
        rows = zip(predictions.rows(name), score(other, passages), targets(passages), strict=True)
        for p, q, found in rows:
            sums[name].add(p, q, found)
            done += len(found)
            if progress is not None:
                progress(done, total)
        if each is not None:
            each[name] = sums[name].kl
    texts = tuple(text.reference(name, predictions.vocab) for name, text in sums.items())
    known = {text.name for text in texts if text.known}
    return Compared(texts, tuple(text.divergence(name, known=name in known) for name, text in sums.items()))
