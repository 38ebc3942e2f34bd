"""From texts to what a model with pooling takes, and from its rows of numbers to vectors, probabilities and scores.

Without numpy until the first row: the API process starts without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.engine.api import InputAsk
from quire.spec.facts import ModelFacts
from quire.spec.pooling_facts import PoolingFacts
from quire.text.tokenizer import Tokenizer
from quire.types import ContextLengthError, RequestError, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Row = npt.NDArray[np.float32]

# How a decoder is asked for "yes" or "no" (Qwen3-Reranker, arXiv 2506.05176, and its model card).
_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

POOLING_PARAMS = SamplingParams(max_tokens=1)  # nothing is sampled


class PoolInputs:
    """Encodes the texts of one model. `window`: the most tokens of one."""

    def __init__(self, facts: ModelFacts, tokenizer: Tokenizer | None, window: int) -> None:
        assert facts.pooling is not None
        self.about: PoolingFacts = facts.pooling
        added = facts.spec.added
        self._segments, self._vocab = (added.segments if added else 0), facts.spec.vocab
        self._tokenizer, self.window = tokenizer, window

    def encode(self, ask: InputAsk) -> list[int]:
        """Token ids, at most `window`; those of a second segment follow the vocabulary's (see spec.AddedEmbedding).

        Raises RequestError naming the field.
        """
        if self._tokenizer is None:
            raise RequestError(ask.name, "this model folder has no tokenizer; give token ids")
        if ask.second is None:
            if not ask.text:
                raise RequestError(ask.name, "a text is empty")
            ids = self._tokenizer.encode(self._prompt(ask) + ask.text, ask.special)
            special = self._tokenizer.special_ids
            return self._within(ask, ids, sum(token not in special for token in ids))
        if self.about.judge:
            return self._judged(ask, ask.second)
        ids, segments = self._tokenizer.encode_pair(ask.text, ask.second)
        last = len(self._tokenizer.encode(ask.second, add_special_tokens=False)) if ask.second else 0
        if self._segments > 1:
            ids = [token + self._vocab * segment for token, segment in zip(ids, segments, strict=True)]
        return self._within(ask, ids, last)

    def _prompt(self, ask: InputAsk) -> str:
        prompts = self.about.prompts
        name = self.about.default_prompt if ask.prompt_name is None else ask.prompt_name
        if not name:
            return ""
        if name not in prompts:
            known = f"has {', '.join(prompts)}" if prompts else "has none"
            raise RequestError("prompt_name", f"{name!r} is not a prompt of this model, which {known}")
        return prompts[name]

    def _judged(self, ask: InputAsk, document: str) -> list[int]:
        """The question whether a document answers a query. Their texts are plain: no control token is read in them."""
        assert self._tokenizer is not None
        text = f"<Instruct>: {ask.instruction or INSTRUCTION}\n<Query>: {ask.text}\n<Document>: {document}"
        before, after = (self._tokenizer.encode(part, add_special_tokens=False) for part in (_JUDGE, _ANSWER))
        ids = self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        limit = self._limit(ask)
        if limit is not None:
            ids = ids[: max(0, limit - len(before) - len(after))]
        ids = [*before, *ids, *after]
        check_length(ask.name, len(ids), self.window)
        return ids

    def _limit(self, ask: InputAsk) -> int | None:
        if ask.truncate is None:
            return None
        return self.window if ask.truncate == -1 else min(ask.truncate, self.window)

    def _within(self, ask: InputAsk, ids: list[int], last: int) -> list[int]:
        """The ids, cut to the length that was asked for, from the `last` tokens before special ones at the end."""
        if not ids:
            raise RequestError(ask.name, "has no tokens")
        limit = self._limit(ask)
        if limit is not None and len(ids) > limit:
            assert self._tokenizer is not None
            special, end = self._tokenizer.special_ids, len(ids)
            while end and ids[end - 1] % self._vocab in special:
                end -= 1
            if len(ids) - limit >= last:
                raise RequestError(
                    "truncate_prompt_tokens",
                    f"{limit} tokens leave no room for the text beside {len(ids) - last} others",
                )
            ids = [*ids[: end - (len(ids) - limit)], *ids[end:]]
        check_length(ask.name, len(ids), self.window)
        return ids


def check_length(name: str, length: int, window: int) -> None:
    """Raise ContextLengthError for a text of more tokens than the model takes."""
    if length > window:
        raise ContextLengthError(
            name,
            f"{length} tokens are over the limit of {window} tokens for a text (max_model_len); "
            "truncate_prompt_tokens cuts longer ones",
        )


def check_ids(name: str, ids: Sequence[int], vocab: int, window: int) -> None:
    """Raise RequestError for token ids that a model cannot take."""
    if not ids:
        raise RequestError(name, "has no tokens")
    if not 0 <= min(ids) <= max(ids) < vocab:
        wrong = next(token for token in ids if not 0 <= token < vocab)
        raise RequestError(name, f"{wrong} is not a token id below the vocabulary size {vocab}")
    check_length(name, len(ids), window)


def check_dimensions(about: PoolingFacts, dimensions: int | None) -> None:
    """Raise RequestError for a number of dimensions that a vector does not have."""
    if dimensions is not None and not 1 <= dimensions <= about.dimensions:
        raise RequestError(
            "dimensions", f"{dimensions} is not in [1, {about.dimensions}], the vector's length"
        )


def vector(
    about: PoolingFacts, pooled: bytes, dimensions: int | None = None, normalise: bool | None = None
) -> Row:
    """The vector of a text: its first `dimensions` numbers (Matryoshka, arXiv 2205.13147), of length one if the model's
    are, or as `normalise` says."""
    import numpy as np

    found = np.frombuffer(pooled, np.float32)[:dimensions]
    if not (about.normalise if normalise is None else normalise):
        return found
    length = np.sqrt(np.square(found, dtype=np.float64).sum())
    scaled: Row = (found / max(length, 1e-12)).astype(np.float32)
    return scaled


def probabilities(about: PoolingFacts, pooled: bytes, *, squash: bool = True) -> Row:
    """What a classifier says of its labels; without `squash`, the logits."""
    import numpy as np

    logits = np.frombuffer(pooled, np.float32).astype(np.float64)
    if not squash or about.squash == "none":
        return logits.astype(np.float32)
    if about.squash == "sigmoid":
        found = 1.0 / (1.0 + np.exp(-logits))
    else:
        raised = np.exp(logits - logits.max())
        found = raised / raised.sum()
    made: Row = found.astype(np.float32)
    return made


def score(about: PoolingFacts, pooled: bytes, *, squash: bool = True) -> float:
    """How well a pair goes together: the only label, or of a decoder how much likelier "yes" is than "no"."""
    found = probabilities(about, pooled, squash=squash)
    if len(found) == 1:
        return float(found[0])
    return float(found[1] if squash else found[1] - found[0])


def similarities(about: PoolingFacts, rows: Sequence[bytes], first: int) -> list[float]:
    """Cosines of the vectors of texts with those of the first one, or with that in its place among the `first`."""
    import numpy as np

    found = [vector(about, row, normalise=True) for row in rows]
    ones = found[:first] if first > 1 else found[:1] * (len(found) - 1)
    return [
        float(np.multiply(one, other, dtype=np.float64).sum())
        for one, other in zip(ones, found[first:], strict=True)
    ]
