"""Words everyone shares: what a user asks, what crosses the scheduling/compute seam, what comes back.

Plain data only. Token ids are ints, sequences of them are lists; there are no tensors here.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING

from quire import records
from quire.logprobs import LogprobTable, PositionLogprobs
from quire.parameters import (
    MAX_INTEGER,
    Parameter,
    Source,
    integer,
    is_integer,
    is_number,
    number,
    several,
    switch,
)

MAX_LOGPROBS = 64
_SHOWN_CHARS = 80  # of a text, in what a notebook shows of it
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 4096
MAX_SAMPLES = 128
# Tokens that logit_bias, banned_token_ids and stop_token_ids may name together.
MAX_NAMED_TOKENS = 4096
# Tokens that allowed_token_ids may hold before a vocabulary is known to compare with.
MAX_ALLOWED_TOKENS = 2**20

# Bytes of a token, on the average of a vocabulary that the engine may be given. Large vocabularies have 6 to 9.
MAX_MEAN_BYTES = 10

# Block-table entry of a sliding group that lies wholly behind the window of a prefix hit: never read.
NO_BLOCK = -1
# In ScheduledSeq.token_ids: the token that the step before samples for the sequence, which the host does not know yet.
NEXT_TOKEN = -1


class QuireError(Exception):
    """Base of every error that Quire raises on purpose."""


class RequestError(QuireError):
    """A request asks for something out of range. `field` names the offending parameter."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class ContextLengthError(RequestError):
    """A prompt, or what is to be generated after it, does not fit."""


def check_window(
    prompt: int,
    max_tokens: int | None,
    window: int,
    name: str = "prompt_token_ids",
    asked: str = "max_tokens",
) -> None:
    """Raise ContextLengthError when a prompt of so many tokens and what is asked for after it do not fit a context.

    A length that was not asked for (None) is the rest of the context. `name` and `asked` are the caller's fields.
    """
    context = f"the model's context of {window} tokens (max_model_len)"
    if prompt >= window:
        raise ContextLengthError(name, f"{prompt} tokens leave no room for an output token in {context}")
    if max_tokens is not None and prompt + max_tokens > window:
        total = f"{prompt} prompt tokens and {max_tokens} to generate are {prompt + max_tokens}"
        raise ContextLengthError(asked, f"{total}, over {context}")


class CheckpointError(QuireError):
    """A checkpoint file is missing, malformed, or disagrees with its config."""


class UnsupportedModelError(QuireError):
    """A config asks for something Quire does not implement. The message names the key and value."""


class MemoryBudgetError(QuireError):
    """The memory bound cannot hold what was asked for. The message says what to change."""


class FinishReason(enum.StrEnum):
    """Why a sample ended."""

    STOP = "stop"  # end-of-sequence token, stop id or stop string
    LENGTH = "length"  # max_tokens or the context window
    ABORT = "abort"  # the caller gave up
    ERROR = "error"  # numerical failure
    NO_TOKEN = "no_token"  # what the request allows, the model gives no probability


@records.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to turn logits into tokens and when to stop. Field names follow the OpenAI API and vLLM.

    This is the table of the parameters: what else has to know them reads it from PARAMETERS (see quire.parameters).

    temperature 0 is argmax (lowest id on ties). top_k 0 or -1 is off. `max_tokens` None means up to the
    context window. `logprobs`/`prompt_logprobs` N asks for the N most likely tokens beside the chosen one.
    `seed` None lets the engine pick one; equal seeds give equal samples whatever else is running.

    Raises RequestError naming the field when a value is out of range.
    """

    temperature: float = number(
        1.0, "0 is greedy", 0, 1e4, "T", names={"generation_config": "temperature", "GGUF": "temp"}
    )
    top_k: int = integer(
        0, "sample from the K most likely tokens; 0 and -1 are off", -1, MAX_INTEGER, "K",
        names={"generation_config": "top_k", "GGUF": "top_k"},
    )  # fmt: skip
    top_p: float = number(
        1.0, "sample from the smallest set with probability P", 0, 1, "P", above=True,
        names={"generation_config": "top_p", "GGUF": "top_p"},
    )  # fmt: skip
    min_p: float = number(
        0.0, "drop tokens below P times the most likely one", 0, 1, "P",
        names={"generation_config": "min_p", "GGUF": "min_p"},
    )  # fmt: skip
    repetition_penalty: float = number(
        1.0, "divide the logits of tokens already seen; 1 is off", 0, 1e3, "R", above=True,
        names={
            "generation_config": "repetition_penalty", "GGUF": "penalty_repeat", "llama-server": "repeat_penalty",
            "Ollama": "repeat_penalty",
        },
    )  # fmt: skip
    frequency_penalty: float = number(0.0, "subtract F for each time a token was generated", -100, 100, "F")
    presence_penalty: float = number(0.0, "subtract F from every token generated before", -100, 100, "F")
    logit_bias: Mapping[int, float] = several({}, "token id to bias in [-100, 100]", MAX_NAMED_TOKENS)
    allowed_token_ids: Sequence[int] | None = several(None, "sample only these tokens", MAX_ALLOWED_TOKENS)
    banned_token_ids: Sequence[int] = several((), "never sample these tokens", MAX_NAMED_TOKENS)
    max_tokens: int | None = integer(
        None, "tokens to generate at most", 1, MAX_INTEGER,
        names={
            "generation_config": "max_new_tokens", "llama-server": "n_predict", "Ollama": "num_predict",
            "TGI": "max_new_tokens",
        },
    )  # fmt: skip
    min_tokens: int = integer(0, "do not end before N tokens", 0, MAX_INTEGER, "N")
    stop: Sequence[str] = several((), "end at any of these texts", MAX_STOP_STRINGS)
    stop_token_ids: Sequence[int] = several((), "end at any of these tokens", MAX_NAMED_TOKENS)
    include_stop_str_in_output: bool = switch(False, "keep the stop string in the text")
    ignore_eos: bool = switch(False, "do not end at the end-of-sequence token")
    skip_special_tokens: bool = switch(True, "leave special tokens out of the text")
    n: int = integer(1, "samples of each prompt", 1, MAX_SAMPLES, "N")
    seed: int | None = integer(
        None, "seed of the sampling; equal seeds give equal samples whatever else runs", -(2**63), 2**64 - 1, "N"
    )  # fmt: skip
    logprobs: int | None = integer(
        None, "report the N most likely tokens at every position", 0, MAX_LOGPROBS, "N"
    )
    prompt_logprobs: int | None = integer(
        None, "report the N most likely tokens at every position of the prompt", 0, MAX_LOGPROBS, "N"
    )

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for (name, parameter), value in zip(_NUMBERS, _numbers(self), strict=True):
            if (refusal := parameter.refusal(value)) is not None:
                raise RequestError(name, refusal)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}")
        self._check_named_tokens()
        _stop_strings(self.stop)

    def _check_named_tokens(self) -> None:
        """Lengths before contents: what is refused costs nothing, however long it is."""
        named = len(self.logit_bias) + len(self.banned_token_ids) + len(self.stop_token_ids)
        if named > MAX_NAMED_TOKENS:
            raise RequestError(
                "logit_bias", f"{named} tokens in logit_bias, banned_token_ids and stop_token_ids are more than the "
                f"limit of {MAX_NAMED_TOKENS}",
            )  # fmt: skip
        _token_ids("banned_token_ids", self.banned_token_ids)
        _token_ids("stop_token_ids", self.stop_token_ids)
        allowed, banned = self.allowed_token_ids, self.banned_token_ids
        if allowed is not None:
            if len(allowed) > MAX_ALLOWED_TOKENS:
                raise RequestError(
                    "allowed_token_ids", f"{len(allowed)} tokens are more than the limit of {MAX_ALLOWED_TOKENS}"
                )  # fmt: skip
            _token_ids("allowed_token_ids", allowed)
            if not allowed or (banned and not set(allowed).difference(banned)):
                raise RequestError(
                    "allowed_token_ids", "no token can be sampled: all allowed tokens are banned"
                )
        for token, bias in self.logit_bias.items():
            if not is_integer(token) or token < 0:
                raise RequestError("logit_bias", f"token id {token!r} is not a non-negative integer")
            if not is_number(bias) or not -100.0 <= bias <= 100.0:
                raise RequestError("logit_bias", f"bias {bias!r} of token {token} is not in [-100, 100]")

    def check_vocab(self, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """Raise RequestError when a named token id does not exist in a vocabulary of `vocab_size`, or no token is
        left to sample."""
        named: dict[str, Collection[int]] = {
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids or (),
            "banned_token_ids": self.banned_token_ids,
            "stop_token_ids": self.stop_token_ids,
        }
        for name, ids in named.items():
            if ids and (token := max(ids)) >= vocab_size:
                raise RequestError(name, f"token id {token} is not below the vocabulary size {vocab_size}")
        if len(set(self.banned_token_ids)) >= vocab_size:
            raise RequestError("banned_token_ids", "every token of the vocabulary is banned")
        self._check_held_back(vocab_size, eos_token_ids)

    def _check_held_back(self, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        if not self.min_tokens:
            return
        out = {*self.banned_token_ids, *self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}
        allowed = self.allowed_token_ids
        if len(out) >= vocab_size if allowed is None else out.issuperset(allowed):
            names = (
                "banned_token_ids leaves"
                if allowed is None
                else "allowed_token_ids and banned_token_ids leave"
            )
            raise RequestError(
                "min_tokens",
                f"{self.min_tokens} tokens must come before one that ends the text, and {names} no other token",
            )


PARAMETERS: Mapping[str, Parameter] = {f.name: f.metadata["parameter"] for f in fields(SamplingParams)}
_NUMBERS = tuple((name, p) for name, p in PARAMETERS.items() if p.kind in {int, float})
_numbers = attrgetter(*(name for name, _ in _NUMBERS))


def parameter_names(source: Source) -> dict[str, str]:
    """What a file or an API calls parameters -> their names here."""
    return {p.names[source]: name for name, p in PARAMETERS.items() if source in p.names}


if TYPE_CHECKING:
    _IntArray = array[int]
else:
    _IntArray = array


class TokenIds(_IntArray):
    """Token ids as int32 in one piece: a prompt from the tokenizer to the scheduler.

    Raises TypeError or OverflowError for what is no int32.
    """

    __slots__ = ()

    def __new__(cls, ids: Iterable[int] = ()) -> TokenIds:
        return super().__new__(cls, "i", ids)  # type: ignore[return-value]


@records.dataclass(frozen=True, slots=True)
class TokenBytes:
    """The bytes that each token adds to a text: token i is data[ends[i - 1]:ends[i]], with `ends` as int32.

    The memory plan has room for MAX_MEAN_BYTES a token.
    """

    data: bytes
    ends: bytes

    def __len__(self) -> int:
        return len(self.ends) // 4

    def __getitem__(self, token_id: int) -> bytes:
        if not 0 <= token_id < len(self):
            raise IndexError(f"{token_id} is not a token id below {len(self)}")
        ends = memoryview(self.ends).cast("i")
        return self.data[ends[token_id - 1] if token_id else 0 : ends[token_id]]


@records.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the engine is asked, in token ids. One request makes `params.n` sequences.

    It is made once, beside the client, and goes to the scheduler as it is.

    `arrival` is a monotonic time in seconds; `priority` lower runs earlier (vLLM's convention).
    `tenant` and, within a tenant, `namespace` separate prefix caches (API key; cache salt, later the
    adapter): equal prompts of different ones never share blocks. Each tenant has its part of the blocks.
    `stepwise` says that each step of it needs what the host makes of the one before (drafts, a grammar): with two steps
    in flight it is in one of them only.
    """

    request_id: str
    prompt_token_ids: TokenIds
    params: SamplingParams
    arrival: float = 0.0
    priority: int = 0
    namespace: str = ""
    tenant: str = ""
    eos_token_ids: tuple[int, ...] = ()
    stepwise: bool = False


@records.dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose KV blocks live and die together; one block table a group.

    `window` 0 means full attention: every block is kept. Otherwise a token at position p is read only by
    positions below p + window, and blocks wholly behind the window are given back.
    """

    layers: tuple[int, ...]
    window: int = 0


@dataclass(slots=True)
class NewSeq:
    """Everything a worker must know of a sequence, sent once when it is (re)scheduled from scratch.

    `token_ids` is prompt and output so far; `prompt_len` says where the prompt ends. `blocks` holds, per
    cache group, the block ids it starts with (prefix hits); later ids come in ScheduledSeq.new_blocks.
    `stop_ids` are all ids that end it (eos and stop ids): what min_tokens holds back. `request_id` is for
    records only.
    """

    seq_id: int
    token_ids: list[int]
    prompt_len: int
    params: SamplingParams
    sample_index: int
    seed: int
    blocks: tuple[list[int], ...]
    stop_ids: tuple[int, ...] = ()
    request_id: str = ""


@dataclass(slots=True)
class ScheduledSeq:
    """One row of a step: run `token_ids` at positions start, start+1, … of sequence `seq_id`.

    `new_blocks` per cache group are appended to the sequence's block table before the step. `logits` says how many
    of the last positions' logits are wanted: 0, or 1 when the row reaches the end of the known tokens, so that they
    give the next one, and 1 more for each draft, a guess at what follows the known tokens; see StepOutput.
    `prompt_logprobs` is true when every position's logprobs for the following prompt token are wanted. With two steps
    in flight the one token of a row may be NEXT_TOKEN.
    """

    seq_id: int
    start: int
    token_ids: list[int]
    new_blocks: tuple[list[int], ...]
    logits: int
    prompt_logprobs: bool = False

    @property
    def sample(self) -> bool:
        """True when a token is sampled."""
        return self.logits > 0

    @property
    def drafts(self) -> int:
        """How many of the last tokens are drafts."""
        return max(0, self.logits - 1)


@dataclass(frozen=True, slots=True)
class Move:
    """The content of a KV block copied from or to where blocks are kept besides the executor (see core.tier.Tier).

    `digest` and `group` say what it is: the KV of a cache group for a block of tokens after a certain prefix. A block
    that is filled belongs to the move until StepOutput.filled names it. One that is copied out may be another's after.
    """

    block: int
    digest: bytes
    group: int
    fill: bool


@dataclass(slots=True)
class SchedulerOutput:
    """What to run in one step. Row i of every step array is scheduled[i]; nobody sorts.

    `gone` are sequences whose worker slot is to be released before this step: finished, aborted, preempted. `moves` are
    begun in order before the rows run. Those out of a block have then ended, others may take longer than the step.
    """

    step: int
    scheduled: list[ScheduledSeq]
    new: list[NewSeq]
    gone: list[int]
    moves: list[Move] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.scheduled)


@dataclass(slots=True)
class StepOutput:
    """What a step made, row for row.

    `token_ids[i]` are the tokens accepted for scheduled[i] (empty when it did not sample); `logprobs[i]` one
    entry per accepted token when asked for; `prompt_logprobs[i]` one entry per position of the row whose next
    prompt token is known. `failed` are rows without a token and why: ERROR where logits held NaN or Inf, NO_TOKEN.
    `seconds` is wall time by phase.

    A row with drafts accepts those that are what would have been sampled, up to the first that is not, and the token
    sampled after them. `drafts[i]` are guesses at what follows the tokens accepted for scheduled[i], for a later step.

    `filled` names blocks whose moves have ended, of this step or earlier ones: True where the content came.
    """

    token_ids: list[list[int]]
    logprobs: list[LogprobTable | None]
    prompt_logprobs: list[LogprobTable | None]
    failed: dict[int, FinishReason] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    drafts: dict[int, list[int]] = field(default_factory=dict)
    filled: dict[int, bool] = field(default_factory=dict)


@dataclass(slots=True)
class SeqEvent:
    """What one step changed for one sequence; the engine turns it into text for the caller."""

    request_id: str
    sample_index: int
    new_token_ids: list[int]
    logprobs: LogprobTable | None
    prompt_logprobs: LogprobTable | None
    finish_reason: FinishReason | None
    stop_token_id: int | None = None
    cached_tokens: int = 0


@records.dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of the engine's log book: what a step held and what it cost. Times in seconds."""

    step: int
    start: float
    schedule_seconds: float
    execute_seconds: float
    update_seconds: float
    rows: int
    prefill_tokens: int
    decode_tokens: int
    context_tokens: int
    blocks_used: int
    running: int
    waiting: int
    preempted: int


@dataclass(slots=True, repr=False)
class CompletionOutput:
    """One sample of a request, so far or finished."""

    index: int
    text: str
    token_ids: list[int] | array[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: LogprobTable | None = None

    def __repr__(self) -> str:
        """A line, however long the sample is: what a notebook shows."""
        text = self.text if len(self.text) <= _SHOWN_CHARS else f"{self.text[: _SHOWN_CHARS - 1]}…"
        state = "unfinished" if self.finish_reason is None else str(self.finish_reason)
        return f"CompletionOutput({self.index}, {text!r}, {len(self.token_ids)} tokens, {state})"


@dataclass(slots=True)
class Usage:
    """Token counts of a request; cached_tokens of the prompt came from the prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class Timings:
    """Monotonic seconds of a request's life: arrival, first scheduled, first token, finished."""

    arrival: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


@dataclass(slots=True, repr=False)
class RequestOutput:
    """A request's samples with what was asked and what it cost."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: Sequence[PositionLogprobs | None] | None = None
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    finished: bool = False

    def __repr__(self) -> str:
        samples = "".join(f"\n  {output!r}," for output in self.outputs)
        asked, cached = self.usage.prompt_tokens, self.usage.cached_tokens
        return f"RequestOutput({self.request_id!r}, {asked} prompt tokens, {cached} cached, [{samples}\n])"


def _token_ids(name: str, ids: Sequence[int]) -> None:
    """Raise RequestError for what is no token id; of good ones there may be very many, so these are not walked."""
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < 2**31):
        return
    for token in ids:
        if not is_integer(token) or not 0 <= token < 2**31:
            raise RequestError(name, f"{token!r} is not a token id")


def _stop_strings(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise RequestError("stop", f"{len(stop)} strings are more than the limit of {MAX_STOP_STRINGS}")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise RequestError("stop", "every stop string must be a non-empty string")
        if len(text) > MAX_STOP_STRING_CHARS:
            raise RequestError(
                "stop", f"a stop string of {len(text)} characters is over {MAX_STOP_STRING_CHARS}"
            )
