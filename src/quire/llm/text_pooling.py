"""Vectors, labels and scores of texts for the Python API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Generic, TypeVar

from quire.engine.api import Ask, InputAsk
from quire.engine.build.assemble import Built
from quire.engine.front.pool_inputs import (
    POOLING_PARAMS,
    PoolInputs,
    check_dimensions,
    check_ids,
    probabilities,
    score,
    similarity,
    vector,
)
from quire.records import dataclass
from quire.types import NO_POOLING, RequestError, RequestOutput

T = TypeVar("T")
TextOrIds = str | Sequence[int]
Run = Callable[[list[Ask]], list[RequestOutput]]


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a text."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The probability of each label, and the labels' names."""

    probs: list[float]
    labels: tuple[str, ...]

    @property
    def label(self) -> str:
        """The likeliest label."""
        return self.labels[max(range(len(self.probs)), key=self.probs.__getitem__)]


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[T]):
    """What a model with pooling gave for one text, or for one pair; `prompt_token_ids` are those of both texts."""

    outputs: T
    prompt_token_ids: list[int]


class TextPooling:
    """One model's texts, run by `run`."""

    def __init__(self, built: Built, run: Run) -> None:
        self._built, self._run = built, run

    @cached_property
    def _inputs(self) -> PoolInputs:
        facts = self._built.model.facts
        if facts.pooling is None:
            raise RequestError("model", NO_POOLING)
        return PoolInputs(facts, self._built.model.tokenizer, self._built.plan.limits.max_len)

    def embed(
        self, texts: Sequence[TextOrIds], dimensions: int | None, normalize: bool | None, prompt_name: str | None,
        truncate: int | None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:  # fmt: skip
        """See LLM.embed."""
        about = self._of("embed").about
        check_dimensions(about, dimensions)
        done = self._pooled([self._ids(text, prompt_name, truncate) for text in texts])
        return [
            PoolingRequestOutput(EmbeddingOutput(vector(about, out.pooled, dimensions, normalize).tolist()),
                                 out.prompt_token_ids)
            for out in done
        ]  # fmt: skip

    def classify(
        self, texts: Sequence[TextOrIds], truncate: int | None, *, squash: bool
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """See LLM.classify."""
        about = self._of("classify", "score").about
        if not about.labels:
            raise RequestError("model", "this model has no labels")
        done = self._pooled([self._ids(text, None, truncate) for text in texts])
        return [
            PoolingRequestOutput(
                ClassificationOutput(probabilities(about, out.pooled, squash=squash).tolist(), about.labels),
                out.prompt_token_ids,
            )
            for out in done
        ]

    def score(
        self,
        first: Sequence[str],
        second: Sequence[str],
        truncate: int | None,
        instruction: str | None,
        *,
        squash: bool,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """See LLM.score."""
        if len(first) not in {1, len(second)}:
            raise RequestError("text_1", f"{len(first)} texts are neither 1 nor the {len(second)} of text_2")
        pairs = zip(first if len(first) == len(second) else [*first] * len(second), second, strict=True)
        inputs = self._of("score", "embed")
        if inputs.about.task == "embed":
            return self._similarities(first, second, truncate)
        asks = [
            InputAsk(text=one, second=other, name="text_2", truncate=truncate, instruction=instruction)
            for one, other in pairs
        ]
        done = self._pooled([inputs.encode(ask) for ask in asks])
        return [
            PoolingRequestOutput(ScoringOutput(score(inputs.about, out.pooled, squash=squash)), out.prompt_token_ids)
            for out in done
        ]  # fmt: skip

    def _similarities(
        self, first: Sequence[str], second: Sequence[str], truncate: int | None
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Cosines of the vectors of texts; each text is embedded once."""
        done = self._pooled([self._ids(text, None, truncate) for text in (*first, *second)])
        about = self._inputs.about
        rows = [vector(about, out.pooled, normalise=True) for out in done]
        found = []
        for number in range(len(second)):
            one, other = number if len(first) > 1 else 0, len(first) + number
            ids = [*done[one].prompt_token_ids, *done[other].prompt_token_ids]
            found.append(PoolingRequestOutput(ScoringOutput(similarity(rows[one], rows[other])), ids))
        return found

    def _of(self, *tasks: str) -> PoolInputs:
        """What the model takes, if it is for one of these tasks."""
        inputs = self._inputs
        if inputs.about.task not in tasks:
            raise RequestError("model", f"this model is for the task {inputs.about.task}, not {tasks[0]}")
        return inputs

    def _ids(self, text: TextOrIds, prompt_name: str | None, truncate: int | None) -> list[int]:
        inputs = self._inputs
        if isinstance(text, str):
            return inputs.encode(
                InputAsk(text=text, name="prompts", prompt_name=prompt_name, truncate=truncate)
            )
        ids = list(text)
        check_ids("prompts", ids, self._built.model.facts.spec.vocab, inputs.window)
        return ids

    def _pooled(self, prompts: list[list[int]]) -> list[RequestOutput]:
        return self._run([Ask(prompt=ids, params=POOLING_PARAMS, pooling=True) for ids in prompts])
