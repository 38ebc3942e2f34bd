"""Requests with what was made for them: a negative prompt, a grammar, a prediction that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.types import (
    ContextLengthError,
    Grammar,
    Request,
    RequestError,
    TokenIds,
)

if TYPE_CHECKING:
    # imports the template engine, which the engine process does without
    pass


def check_prediction(prediction: Sequence[int], vocab: int, window: int) -> None:
    """Raise RequestError for a prediction that is longer than a prompt may be, or that is not of the vocabulary."""
    if len(prediction) >= window:
        raise ContextLengthError(
            "prediction", f"{len(prediction)} tokens do not fit in the model's context of {window} tokens"
        )
    if prediction and not 0 <= min(prediction) <= max(prediction) < vocab:
        wrong = next(token for token in prediction if not 0 <= token < vocab)
        raise RequestError("prediction", f"{wrong} is not a token id below the vocabulary size {vocab}")


def check_given(request: Request, vocab: int) -> None:
    """Raise RequestError for the beginning of an output that no sample could go on behind."""
    params = request.params
    if (
        len(request.given) != params.n
        or request.beams
        or request.negative_prompt is not None
        or params.mirostat
    ):
        raise RequestError(
            "given", "only samples without mirostat, one for each output, go on behind outputs"
        )
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else request.eos_token_ids)}
    for given in request.given:
        if given and not 0 <= min(given) <= max(given) < vocab:
            raise RequestError("given", f"it has tokens that are not below the vocabulary size {vocab}")
        if not stops.isdisjoint(given[params.min_tokens :]):
            raise RequestError("given", "the output has ended")


def guided(request: Request, negative: Sequence[int]) -> Request:
    """The same request with its negative prompt, where it asks for guidance.

    Without one it is the last token of the prompt, as in transformers. Raises RequestError without a guidance_scale.
    """
    if request.params.guidance_scale == 1:
        if negative:
            raise RequestError("negative_prompt", "has no effect without a guidance_scale other than 1")
        return request
    found = TokenIds(negative or request.prompt_token_ids[-1:])
    return replace(request, negative_prompt=found, stepwise=True, speculate=False)


def constrained(request: Request, grammar: Grammar) -> Request:
    """The same request with a grammar in place of what it was made from."""
    params = request.params
    if params.structured is not None:
        params = replace(params, structured=None)
    return replace(request, params=params, grammar=grammar, stepwise=True)
