"""Types that all parts share: what a user requests, what crosses between scheduling and computing, what comes back.

Plain data only. Token ids are ints, sequences of them are lists; there are no tensors here.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, fields
from operator import attrgetter
from typing import TYPE_CHECKING

from quire import records
from quire.answers import AnswerRegions, RowDrafts
from quire.beams import Beams
from quire.cache_kinds import Move
from quire.draft_paths import agreement
from quire.logprobs import LogprobTable
from quire.objectives import ServiceTerms
from quire.parameters import (
    MAX_INTEGER,
    NameSource,
    Parameter,
    Structure,
    TextTokens,
    called,
    choices_refusal,
    ids_refusal,
    integer,
    is_integer,
    is_number,
    number,
    several,
    structure,
    switch,
    texts_refusal,
)

NO_POOLING = "this model generates text; to embed texts with it, start it with --task embed"
MAX_LOGPROBS = 64
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 4096
MAX_SAMPLES = 128
# Limit of the tokens in logit_bias, banned_token_ids and stop_token_ids together, and of those of texts.
MAX_NAMED_TOKENS = 4096
MAX_BAD_WORDS = 256
MAX_BREAKERS = 64
MAX_NAMED_TEXT_CHARS = 256  # of a bad word, a sequence breaker, or a text in logit_bias
# Steps of sampling by llama.cpp's names; csrc/sampler_chain.h has them in this order.
SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
MAX_ALLOWED_TOKENS = 2**20  # in allowed_token_ids, before the vocabulary is known

# Block-table entry of a sliding group for a block behind the window of a prefix hit: never read.
NO_BLOCK = -1
SOFT_DIGEST_BYTES = 32  # of what soft tokens stand for: a SHA-256
# In ScheduledSeq.token_ids: the token that the previous step samples for the sequence, not known to the host yet.
NEXT_TOKEN = -1
# In StepOutput.drafts: a guess that is made when its row is about to run.
DRAFT = -2


class QuireError(Exception):
    """Base of every error that Quire raises on purpose."""


class RequestError(QuireError):
    """A parameter of a request is out of range. `field` is its name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message


class ContextLengthError(RequestError):
    """A prompt, or the tokens to generate after it, exceed the context."""


class CheckpointError(QuireError):
    """A checkpoint file is missing, malformed, or disagrees with its config."""


class UnsupportedModelError(QuireError):
    """A config needs something that Quire does not implement. The message names the key and value."""


class MemoryBudgetError(QuireError):
    """The memory bound is too small. The message says what to change."""


class FinishReason(enum.StrEnum):
    """Why a sample ended."""

    STOP = "stop"  # end-of-sequence token, stop id or stop string
    LENGTH = "length"  # max_tokens or the context window
    ABORT = "abort"  # the caller cancelled it
    ERROR = "error"  # numerical failure
    NO_TOKEN = "no_token"  # the model gives probability 0 to every token that the request allows
    GRAMMAR_DEAD_END = "grammar_dead_end"  # no token continues the output as the grammar wants it
    CONTENT_FILTER = "content_filter"  # the operator's hook ended it
    GRAMMAR_LIMIT = "grammar_limit"  # the grammar took more time or memory than a request may


@records.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to turn logits into tokens and when to stop. Field names follow the OpenAI API and vLLM.

    This is the one table of the parameters: all other code reads it from PARAMETERS (see quire.parameters).

    temperature 0 is argmax (lowest id on ties). top_k 0 or -1 is off. `max_tokens` None means up to the
    context window. `logprobs`/`prompt_logprobs` N adds the N most likely tokens to the chosen one.
    `seed` None lets the engine pick one; equal seeds give equal samples whatever else is running.

    Raises RequestError naming the field when a value is out of range.
    """

    temperature: float = number(
        1.0, "0 is greedy", 0, 1e4, "T",
        names=called("temperature", "generation_config") | {"GGUF": "temp"},
    )  # fmt: skip
    top_k: int = integer(
        0, "sample from the K most likely tokens; 0 and -1 are off", -1, MAX_INTEGER, "K",
        names=called("top_k", "generation_config", "GGUF"),
    )  # fmt: skip
    top_p: float = number(
        1.0, "sample from the smallest set with probability P", 0, 1, "P", above=True,
        names=called("top_p", "generation_config", "GGUF"),
    )  # fmt: skip
    min_p: float = number(
        0.0, "drop tokens below P times the most likely one", 0, 1, "P",
        names=called("min_p", "generation_config", "GGUF"),
    )  # fmt: skip
    typical_p: float = number(
        1.0, "sample from the tokens of typical surprise that have probability P together", 0, 1, "P", above=True,
        names={"generation_config": "typical_p", "Ollama": "typical_p"},
    )  # fmt: skip
    top_n_sigma: float = number(
        -1.0, "keep logits within N standard deviations of the greatest; 0 and below are off", -1, 1e3, "N"
    )
    xtc_probability: float = number(
        0.0, "how often the most likely tokens are excluded (XTC)", 0, 1, "P", names={"GGUF": "xtc_probability"}
    )  # fmt: skip
    xtc_threshold: float = number(
        0.1, "XTC excludes all but the last of the tokens from this probability on", 0, 1, "P",
        names={"GGUF": "xtc_threshold"},
    )  # fmt: skip
    min_keep: int = integer(0, "top_p, min_p, typical_p and XTC leave at least N tokens", 0, MAX_INTEGER, "N")
    dynatemp_range: float = number(
        0.0, "the temperature goes with the entropy, from T - R to T + R; 0 is off", 0, 1e4, "R"
    )
    dynatemp_exponent: float = number(1.0, "exponent of the entropy for dynatemp_range", 0, 100, "E")
    mirostat: int = integer(
        0, "version 1 or 2 keeps the surprise of tokens near mirostat_tau, in place of truncation; 0 is off", 0, 2, "V",
        names={"GGUF": "mirostat", "Ollama": "mirostat"},
    )  # fmt: skip
    mirostat_tau: float = number(
        5.0, "surprise that mirostat aims at, in bits", 0, 100, "T",
        names={"GGUF": "mirostat_tau", "Ollama": "mirostat_tau"},
    )  # fmt: skip
    mirostat_eta: float = number(
        0.1, "learning rate of mirostat", 0, 100, "R", names={"GGUF": "mirostat_eta", "Ollama": "mirostat_eta"}
    )  # fmt: skip
    samplers: Sequence[str] | None = several(
        None, "the steps of sampling in their order, by llama.cpp's names", len(SAMPLERS)
    )
    repetition_penalty: float = number(
        1.0, "divide the logits of tokens already seen; 1 is off", 0, 1e3, "R", above=True,
        names={"generation_config": "repetition_penalty", "GGUF": "penalty_repeat", "llama-server": "repeat_penalty",
               "Ollama": "repeat_penalty", "SGLang": "repetition_penalty"},
    )  # fmt: skip
    frequency_penalty: float = number(
        0.0, "subtract F for each time a token was generated", -100, 100, "F", names=called("frequency_penalty")
    )  # fmt: skip
    presence_penalty: float = number(
        0.0, "subtract F from every token generated before", -100, 100, "F", names=called("presence_penalty")
    )  # fmt: skip
    repeat_last_n: int = integer(
        -1, "penalties look at the last N tokens of prompt and output; -1 is all, 0 is off", -1, MAX_INTEGER, "N",
        names={"GGUF": "penalty_last_n", "Ollama": "repeat_last_n"},
    )  # fmt: skip
    dry_multiplier: float = number(
        0.0, "penalty of tokens that go on with a repetition (DRY); 0 is off", 0, 100, "F"
    )
    dry_base: float = number(1.75, "DRY multiplies its penalty by B for each repeated token", 1, 10, "B")
    dry_allowed_length: int = integer(2, "DRY penalizes no shorter repetitions than N tokens", 0, 50, "N")
    dry_penalty_last_n: int = integer(
        -1, "DRY looks at the last N tokens of prompt and output; -1 is all, 0 is off", -1, MAX_INTEGER, "N"
    )
    dry_sequence_breakers: Sequence[str] = several(
        ("\n", ":", '"', "*"), "texts whose last token ends a repetition (DRY)", MAX_BREAKERS
    )
    guidance_scale: float = number(
        1.0, "how far the answer keeps from that to negative_prompt (classifier-free guidance); 1 is off", 0, 100, "S",
        names={"generation_config": "guidance_scale"},
    )  # fmt: skip
    watermark_delta: float = number(0.0, "bias of the tokens that carry a watermark; 0 is off", 0, 100, "D")
    watermark_gamma: float = number(0.25, "share of the vocabulary that carries it", 0, 1, "G", above=True)
    watermark_key: int = integer(15485863, "number from which it is drawn", 1, MAX_INTEGER, "K")
    bad_words: Sequence[str] = several((), "texts whose tokens never come one after the other", MAX_BAD_WORDS)
    logit_bias: Mapping[int | str, float] = several(
        {}, "token id, or a text for each of its tokens, to bias in [-100, 100]", MAX_NAMED_TOKENS
    )
    allowed_token_ids: Sequence[int] | None = several(None, "sample only these tokens", MAX_ALLOWED_TOKENS)
    banned_token_ids: Sequence[int] = several((), "never sample these tokens", MAX_NAMED_TOKENS)
    max_tokens: int | None = integer(
        None, "largest number of tokens to generate", 1, MAX_INTEGER,
        names={"generation_config": "max_new_tokens", "llama-server": "n_predict", "Ollama": "num_predict",
               "SGLang": "max_new_tokens", "TGI": "max_new_tokens"},
    )  # fmt: skip
    min_tokens: int = integer(0, "do not end before N tokens", 0, MAX_INTEGER, "N")
    stop: Sequence[str] = several((), "end at any of these texts", MAX_STOP_STRINGS)
    stop_token_ids: Sequence[int] = several((), "end at any of these tokens", MAX_NAMED_TOKENS)
    include_stop_str_in_output: bool = switch(False, "keep the stop string in the text")
    ignore_eos: bool = switch(False, "do not end at the end-of-sequence token")
    skip_special_tokens: bool = switch(True, "leave special tokens out of the text")
    n: int = integer(1, "samples of each prompt", 1, MAX_SAMPLES, "N")
    seed: int | None = integer(
        None, "seed of the sampling; equal seeds give equal samples whatever else runs", -(2**63), 2**64 - 1, "N",
        names={"llama-server": "seed", "Ollama": "seed", "SGLang": "sampling_seed"},
    )  # fmt: skip
    logprobs: int | None = integer(
        None, "report the N likeliest tokens at every position", 0, MAX_LOGPROBS, "N"
    )
    prompt_logprobs: int | None = integer(
        None, "report the N most likely tokens at every position of the prompt", 0, MAX_LOGPROBS, "N"
    )
    prompt_logprobs_start: int = integer(
        0, "report prompt logprobs from token I on; the cache may hold those before", 0, MAX_INTEGER, "I"
    )
    thinking_token_budget: int | None = integer(
        None, "most tokens of reasoning; it is closed when they are used up", 0, MAX_INTEGER, "N"
    )
    structured: Structure | None = structure("what the text must look like; see docs/structured.md")

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for (name, parameter), value in zip(_NUMBERS, _numbers(self), strict=True):
            if (refusal := parameter.refusal(value)) is not None:
                raise RequestError(name, refusal)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", f"{self.min_tokens} exceeds max_tokens {self.max_tokens}")
        if self.structured is not None and not isinstance(self.structured, Structure):
            raise RequestError("structured", f"{type(self.structured).__name__} is not a StructuredOutput")
        self._check_named_tokens()
        self._check_texts()

    def _check_named_tokens(self) -> None:
        """Check lengths before contents, so that refusing a long list costs nothing."""
        named = len(self.logit_bias) + len(self.banned_token_ids) + len(self.stop_token_ids)
        if named > MAX_NAMED_TOKENS:
            raise RequestError(
                "logit_bias", f"{named} tokens in logit_bias, banned_token_ids and stop_token_ids exceed the "
                f"limit of {MAX_NAMED_TOKENS}",
            )  # fmt: skip
        for name in ("banned_token_ids", "stop_token_ids"):
            _refuse(name, ids_refusal(getattr(self, name)))
        allowed, banned = self.allowed_token_ids, self.banned_token_ids
        if allowed is not None:
            if len(allowed) > MAX_ALLOWED_TOKENS:
                raise RequestError(
                    "allowed_token_ids", f"{len(allowed)} tokens exceed the limit of {MAX_ALLOWED_TOKENS}"
                )  # fmt: skip
            _refuse("allowed_token_ids", ids_refusal(allowed))
            if not allowed or (banned and not set(allowed).difference(banned)):
                raise RequestError(
                    "allowed_token_ids", "no token can be sampled: all allowed tokens are banned"
                )
        texts = [token for token in self.logit_bias if isinstance(token, str)]
        _refuse("logit_bias", texts_refusal(texts, MAX_BAD_WORDS, MAX_NAMED_TEXT_CHARS, "text"))
        for token, bias in self.logit_bias.items():
            if not isinstance(token, str) and (not is_integer(token) or token < 0):
                raise RequestError("logit_bias", f"token id {token!r} is not a non-negative integer")
            if not is_number(bias) or not -100.0 <= bias <= 100.0:
                raise RequestError("logit_bias", f"bias {bias!r} of token {token} is not in [-100, 100]")

    def _check_texts(self) -> None:
        _refuse("stop", texts_refusal(self.stop, MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS, "stop string"))
        _refuse("bad_words", texts_refusal(self.bad_words, MAX_BAD_WORDS, MAX_NAMED_TEXT_CHARS, "bad word"))
        breakers = texts_refusal(self.dry_sequence_breakers, MAX_BREAKERS, MAX_NAMED_TEXT_CHARS, "breaker")
        _refuse("dry_sequence_breakers", breakers)
        if self.samplers is not None:
            _refuse("samplers", choices_refusal(self.samplers, SAMPLERS, "sampler"))

    @property
    def has_texts(self) -> bool:
        """Whether tokens of texts are needed: TextTokens in the request."""
        biased = any(isinstance(token, str) for token in self.logit_bias)
        return (
            bool(self.bad_words) or biased or (self.dry_multiplier > 0 and bool(self.dry_sequence_breakers))
        )

    def scored_tokens(self, prompt_len: int) -> int:
        """How many tokens at the end of a prompt get logprobs. The first token of a prompt has none."""
        if self.prompt_logprobs is None:
            return 0
        return max(0, prompt_len - max(1, self.prompt_logprobs_start))

    def check_vocab(self, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """Raise RequestError for a token id that is not below `vocab_size`, or if no token could be sampled."""
        named: dict[str, Collection[int]] = {
            "logit_bias": [token for token in self.logit_bias if not isinstance(token, str)],
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
            text = f"{self.min_tokens} tokens must come before the end, but {names} no other token"
            raise RequestError("min_tokens", text)


def _refuse(name: str, refusal: str | None) -> None:
    if refusal is not None:
        raise RequestError(name, refusal)


PARAMETERS: Mapping[str, Parameter] = {f.name: f.metadata["parameter"] for f in fields(SamplingParams)}
_NUMBERS = tuple((name, p) for name, p in PARAMETERS.items() if p.kind in {int, float})
_numbers = attrgetter(*(name for name, _ in _NUMBERS))


def parameter_names(source: NameSource) -> dict[str, str]:
    """Name of a parameter in a file or API -> its name here."""
    return {p.names[source]: name for name, p in PARAMETERS.items() if source in p.names}


if TYPE_CHECKING:
    _IntArray = array[int]
else:
    _IntArray = array


class TokenIds(_IntArray):
    """Token ids as one int32 array: a prompt from the tokenizer to the scheduler.

    Raises TypeError or OverflowError for a value that is not an int32.
    """

    __slots__ = ()

    def __new__(cls, ids: Iterable[int] = ()) -> TokenIds:
        return super().__new__(cls, "i", ids)  # type: ignore[return-value]


@records.dataclass(frozen=True, slots=True)
class SoftSpan:
    """Positions start … start + length - 1 of a prompt hold soft tokens: rows of embeddings in place of ids, as those
    of an image or a sound. The ids there are placeholders.

    `digest` is a hash of all that decides the rows, in SOFT_DIGEST_BYTES. Blocks of the cache are shared only where
    digests are equal too.
    """

    start: int
    length: int
    digest: bytes

    @property
    def end(self) -> int:
        return self.start + self.length


@records.dataclass(frozen=True, slots=True)
class Grammar:
    """What the output of a request must look like: a grammar in llguidance's serialized form, compiled and checked
    before admission. It speaks of bytes and is the same for every vocabulary. `digest` names it."""

    source: str
    digest: bytes


@records.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to the engine, in token ids. It has `params.n` sequences.

    It is made once, in the API process, and reaches the scheduler unchanged.

    `arrival` is a monotonic time in seconds; `priority` lower runs earlier (vLLM's convention); that of
    background work is core.policy.BACKGROUND, under every policy.
    `tenant` and, within a tenant, `namespace` and `adapter` separate prefix caches (API key; cache salt): equal
    prompts of different ones never share blocks. Each tenant has its part of the blocks.
    `adapter` is the digest of the adapter's version that computes it, "" for the model alone.
    `soft_tokens` are in order and do not overlap. `prompt_embeds` are the rows of one span: float32 as bytes.
    `grammar` is enforced on the output of every sample. Such a request is `stepwise`.
    `stepwise` says that each step of it needs what the host makes of the one before (drafts, a grammar): with two steps
    in flight it is in one of them only.
    `prediction` is what the answer may turn out to be: drafts for it. Without `speculate` there are no drafts at all.
    `given`: the beginning of the output of each sample, from another engine with the same bits; empty without one.
    `beams`: it is found by beam search (core.beam_search). `pooling`: a row of numbers is wanted, and no token.
    `texts` are there if `params.has_texts`. `terms` are those of service: how soon, and at whose cost.
    `negative_prompt`: what `params.guidance_scale` keeps away from; there are two sequences a sample (see
    core.guided_pairs). Such a request is `stepwise`, and without `speculate`.
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
    soft_tokens: tuple[SoftSpan, ...] = ()
    grammar: Grammar | None = None
    regions: AnswerRegions | None = None
    prediction: TokenIds | None = None
    given: tuple[TokenIds, ...] = ()
    speculate: bool = True
    beams: Beams | None = None
    pooling: bool = False
    texts: TextTokens | None = None
    adapter: str = ""
    negative_prompt: TokenIds | None = None
    prompt_embeds: bytes = b""
    terms: ServiceTerms = ServiceTerms()


@records.dataclass(slots=True)
class NewSeq:
    """Everything a worker needs to know about a sequence, sent once when it starts or resumes.

    `token_ids` is prompt and output so far; `prompt_len` says where the prompt ends. `blocks` holds, per
    cache group, the block ids it starts with (prefix hits); later ids come in ScheduledSeq.new_blocks.
    `stop_ids` are all ids that end it (eos and stop ids): what min_tokens holds back. `request_id` is for
    records only. `soft_tokens` are the request's: a row takes those at its positions. So are `grammar`, `prediction`,
    `speculate`, `adapter` and `origin`, its tenant and namespace: texts of another one must not show in its speed.
    `surprise` is what StepOutput.surprises had for it last.
    `leader`: the sequence whose tokens this one takes, drawn from the logits of both.
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
    soft_tokens: tuple[SoftSpan, ...] = ()
    grammar: Grammar | None = None
    regions: AnswerRegions | None = None
    prediction: TokenIds | None = None
    speculate: bool = True
    origin: tuple[str, str] = ("", "")
    texts: TextTokens | None = None
    surprise: float | None = None
    adapter: str = ""
    leader: int | None = None
    prompt_embeds: bytes = b""


@records.dataclass(slots=True)
class ScheduledSeq:
    """One row of a step: run `token_ids` at positions start, start+1, … of sequence `seq_id`.

    `new_blocks` per cache group are appended to the sequence's block table before the step. `logits` is the number of
    last positions whose logits are needed: 0, or 1 when the row reaches the end of the known tokens, plus 1 for each
    draft, a guess at the tokens after the known ones; see StepOutput. `prompt_logprobs` is true when the logprobs of
    the following prompt token are needed at every position. With two steps in flight the only token of a row may be
    NEXT_TOKEN.

    With `parents` the drafts are a tree: draft i, from 1 up, follows draft parents[i - 1], a lower number, and 0 is the
    last known token. None: each follows the one before. `depth` is the most drafts in a row that a tree may have.
    """

    seq_id: int
    start: int
    token_ids: list[int]
    new_blocks: tuple[list[int], ...]
    logits: int
    prompt_logprobs: bool = False
    depth: int = 0
    parents: tuple[int, ...] | None = None

    @property
    def sample(self) -> bool:
        """Whether a token is sampled."""
        return self.logits > 0

    @property
    def drafts(self) -> int:
        """Number of drafts, the last tokens of the row."""
        return max(0, self.logits - 1)

    def goes_on(self, accepted: Sequence[int]) -> bool:
        """Whether tokens may be added to those accepted: the cache holds no rejected draft in the place of the last."""
        if self.parents is None:
            return len(accepted) == self.logits
        return len(self.path(accepted)) < len(accepted)

    def right(self, tokens: Sequence[int]) -> int:
        """How many drafts are the tokens after the known ones."""
        return (
            agreement(self.token_ids[len(self.token_ids) - self.drafts :], tokens)
            if self.parents is None
            else len(self.path(tokens))
        )

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The drafts of a tree that the tokens after the known ones go along. Of equal drafts the first counts."""
        found: list[int] = []
        drafts, parents, at = self.token_ids[-self.drafts :], self.parents or (), 0
        for token in tokens:
            edges = enumerate(zip(parents, drafts, strict=True), 1)
            at = next((i for i, edge in edges if edge == (at, token)), 0)
            if not at:
                break
            found.append(at)
        return found


@records.dataclass(slots=True)
class SchedulerOutput:
    """What to run in one step. Row i of every step array is scheduled[i]; nothing sorts them.

    `gone` are sequences whose worker slot is released before: finished, aborted, preempted. `moves` start in order,
    then `copies` are made, then rows run; moves out of a block have ended then, others may outlast the step."""

    step: int
    scheduled: list[ScheduledSeq]
    new: list[NewSeq]
    gone: list[int]
    moves: list[Move] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.scheduled)


@records.dataclass(slots=True)
class StepOutput:
    """The result of a step, row by row.

    `token_ids[i]` are the tokens accepted for scheduled[i] (empty when it did not sample); `logprobs[i]` one
    entry per accepted token when requested; `prompt_logprobs[i]` one entry per position of the row whose next
    prompt token is known. `failed` are rows without a token and why: ERROR where logits held NaN or Inf, NO_TOKEN.
    `seconds` is wall time by phase.

    A row with drafts accepts those equal to the tokens that would have been sampled, up to the first that differs, and
    the token sampled after them: with a tree, along one path. `drafts[i]` are guesses, or DRAFTs, after those accepted
    for scheduled[i]. With `depths[i]` they will be a tree, with up to so many in a row. `drafted[i]` says what became
    of those that it ran.

    `filled` names blocks whose moves have ended, of this step or earlier ones: True if the content arrived.

    `late` are rows that sampled nothing, as their masks were not ready: their last token runs again. `complete` are
    rows whose sequence ends with the accepted tokens, because its grammar allows nothing after them. `pooled` has the
    float32 numbers of rows that are pooled: their sequences end. `surprises` has mirostat's mu of rows that have one.
    """

    token_ids: list[list[int]]
    logprobs: list[LogprobTable | None]
    prompt_logprobs: list[LogprobTable | None]
    failed: dict[int, FinishReason] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    drafts: dict[int, list[int]] = field(default_factory=dict)
    depths: dict[int, int] = field(default_factory=dict)
    drafted: dict[int, RowDrafts] = field(default_factory=dict)
    filled: dict[int, bool] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    complete: set[int] = field(default_factory=set)
    pooled: dict[int, bytes] = field(default_factory=dict)
    surprises: dict[int, float] = field(default_factory=dict)


@records.dataclass(slots=True)
class SeqEvent:
    """What one step changed in one sequence; the engine turns it into text for the caller."""

    request_id: str
    sample_index: int
    new_token_ids: list[int]
    logprobs: LogprobTable | None
    prompt_logprobs: LogprobTable | None
    finish_reason: FinishReason | None
    stop_token_id: int | None = None
    cached_tokens: int = 0
    drafts: RowDrafts | None = None
    pooled: bytes = b""
