"""Beam search in the Python API, with the names of vLLM's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from quire.beams import Beams
from quire.core.beam_search import check_ranges
from quire.engine.api import Ask
from quire.llm.asked import Prompt, prompt_list
from quire.logprobs import LogprobTable
from quire.outputs import RequestOutput
from quire.records import dataclass
from quire.types import FinishReason, RequestError, SamplingParams

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """A beam search with `beam_width` sequences of up to `max_tokens` tokens; see `quire.beams.Beams` for the score.

    `temperature` is 0: nothing is drawn. Other values are refused when the search begins.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: Sequence[int] = ()
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One sequence. `tokens` and `text` begin with the prompt; a stop token is left out unless it was asked for.

    `cum_logprob` is the sum of the log-probabilities of the output, with that of a stop token; `score` orders the
    sequences.
    """

    tokens: list[int]
    logprobs: LogprobTable
    cum_logprob: float
    score: float
    text: str | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The sequences found for one prompt, the best first."""

    sequences: list[BeamSearchSequence]


def beam_asks(prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[Ask]:
    """A request for each prompt. Raises RequestError."""
    if not isinstance(params, BeamSearchParams):
        raise RequestError("params", f"must be a BeamSearchParams, not {type(params).__name__}")
    if params.temperature:
        raise RequestError("temperature", f"{params.temperature!r} is not 0: a beam search draws nothing")
    beams = Beams(
        width=params.beam_width, length_penalty=params.length_penalty, early_stopping=params.early_stopping
    )
    check_ranges(beams)
    sampling = SamplingParams(
        n=params.beam_width,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=tuple(params.stop_token_ids),
        logprobs=0,
    )
    return [
        Ask(prompt=prompt, params=sampling, beams=beams, divided=False) for prompt in prompt_list(prompts)
    ]


def beam_output(
    output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchOutput:
    """The sequences of a finished request."""
    found = []
    for sample in output.outputs:
        ids, logprobs = list(sample.token_ids), sample.logprobs or LogprobTable()
        total, length = logprobs.mean() * len(logprobs) if ids else -math.inf, len(ids)
        if sample.stop_reason is not None and not params.include_stop_str_in_output:
            ids.pop()
        tokens = [*output.prompt_token_ids, *ids]
        found.append(
            BeamSearchSequence(
                tokens=tokens,
                logprobs=logprobs,
                cum_logprob=total,
                score=total / math.pow(max(1, length), params.length_penalty),
                text=None if tokenizer is None else tokenizer.decode(tokens),
                finish_reason=sample.finish_reason,
                stop_reason=sample.stop_reason,
            )
        )
    return BeamSearchOutput(found)
