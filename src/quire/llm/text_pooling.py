"""Vectors, labels and scores of texts for the Python API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from quire.engine.api import Ask, InputAsk
from quire.engine.front.pool_inputs import (
    POOLING_PARAMS,
    check_dimensions,
    check_ids,
    probabilities,
    score,
    similarities,
    vector,
)
from quire.llm.asked import TextOrIds
from quire.outputs import RequestOutput
from quire.records import dataclass
from quire.spec.pooling_facts import PoolingFacts
from quire.types import NO_POOLING, FinishReason, QuireError, RequestError

T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class PoolingWork(Generic[T]):
    """What a call asks of the engine: its texts, or token ids of them, and what the rows of these become."""

    inputs: list[InputAsk | list[int]]
    read: Callable[[list[RequestOutput]], list[T]]

    def texts(self) -> list[InputAsk]:
        """The inputs that are to be tokenized, in order."""
        return [given for given in self.inputs if isinstance(given, InputAsk)]

    def asks(self, encoded: Sequence[list[int]]) -> list[Ask]:
        """Requests for all inputs, given the token ids of `texts`."""
        ids = iter(encoded)
        prompts = [next(ids) if isinstance(given, InputAsk) else given for given in self.inputs]
        return [Ask(prompt=prompt, params=POOLING_PARAMS, pooling=True) for prompt in prompts]

    def answers(self, outputs: list[RequestOutput]) -> list[T]:
        """What the call returns. Raises QuireError for numbers that are none."""
        for output in outputs:
            if output.outputs[0].finish_reason is FinishReason.ERROR:
                raise QuireError("the model produced NaN or infinite numbers")
        return self.read(outputs)


class TextPooling:
    """The calls for one model with pooling. Raises RequestError for a model without.

    `vocab` and `window` limit token ids and their number.
    """

    def __init__(self, about: PoolingFacts | None, vocab: int, window: int) -> None:
        if about is None:
            raise RequestError("model", NO_POOLING)
        self._about, self._vocab, self._window = about, vocab, window

    def embed(
        self, texts: Sequence[TextOrIds], dimensions: int | None, normalize: bool | None, prompt_name: str | None,
        truncate: int | None,
    ) -> PoolingWork[PoolingRequestOutput[EmbeddingOutput]]:  # fmt: skip
        """See LLM.embed."""
        about = self._of("embed")
        check_dimensions(about, dimensions)

        def made(out: RequestOutput) -> EmbeddingOutput:
            return EmbeddingOutput(vector(about, out.pooled, dimensions, normalize).tolist())

        return _each([self._input(text, prompt_name, truncate) for text in texts], made)

    def classify(
        self, texts: Sequence[TextOrIds], truncate: int | None, *, squash: bool
    ) -> PoolingWork[PoolingRequestOutput[ClassificationOutput]]:
        """See LLM.classify."""
        about = self._of("classify", "score")
        if not about.labels:
            raise RequestError("model", "this model has no labels")

        def made(out: RequestOutput) -> ClassificationOutput:
            return ClassificationOutput(
                probabilities(about, out.pooled, squash=squash).tolist(), about.labels
            )

        return _each([self._input(text, None, truncate) for text in texts], made)

    def score(
        self,
        one: str | Sequence[str],
        other: str | Sequence[str],
        truncate: int | None,
        instruction: str | None,
        *,
        squash: bool,
    ) -> PoolingWork[PoolingRequestOutput[ScoringOutput]]:
        """See LLM.score."""
        first, second = ([text] if isinstance(text, str) else list(text) for text in (one, other))
        if len(first) not in {1, len(second)}:
            raise RequestError("text_1", f"{len(first)} texts are neither 1 nor the {len(second)} of text_2")
        about = self._of("score", "embed")
        if about.task == "embed":
            return self._similarities(first, second, truncate)
        pairs = zip(first if len(first) == len(second) else first * len(second), second, strict=True)
        asks = [
            InputAsk(text=one, second=other, name="text_2", truncate=truncate, instruction=instruction)
            for one, other in pairs
        ]
        return _each(asks, lambda out: ScoringOutput(score(about, out.pooled, squash=squash)))

    def _similarities(
        self, first: list[str], second: list[str], truncate: int | None
    ) -> PoolingWork[PoolingRequestOutput[ScoringOutput]]:
        """Cosines of the vectors of texts; each text is embedded once."""
        about = self._about

        def read(done: list[RequestOutput]) -> list[PoolingRequestOutput[ScoringOutput]]:
            ones = done[: len(first)] if len(first) > 1 else done[:1] * len(second)
            found = similarities(about, [out.pooled for out in done], len(first))
            return [
                PoolingRequestOutput(ScoringOutput(cosine), [*one.prompt_token_ids, *other.prompt_token_ids])
                for cosine, one, other in zip(found, ones, done[len(first) :], strict=True)
            ]

        return PoolingWork([self._input(text, None, truncate) for text in (*first, *second)], read)

    def _of(self, *tasks: str) -> PoolingFacts:
        """What the model is for, if it is one of these tasks."""
        if self._about.task not in tasks:
            raise RequestError("model", f"this model is for the task {self._about.task}, not {tasks[0]}")
        return self._about

    def _input(self, text: TextOrIds, prompt_name: str | None, truncate: int | None) -> InputAsk | list[int]:
        if isinstance(text, str):
            return InputAsk(text=text, name="prompts", prompt_name=prompt_name, truncate=truncate)
        ids = list(text)
        check_ids("prompts", ids, self._vocab, self._window)
        return ids


def _each(
    inputs: Sequence[InputAsk | list[int]], made: Callable[[RequestOutput], T]
) -> PoolingWork[PoolingRequestOutput[T]]:
    """Work whose inputs have an answer each."""
    return PoolingWork(
        list(inputs), lambda done: [PoolingRequestOutput(made(out), out.prompt_token_ids) for out in done]
    )
