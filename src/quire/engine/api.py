"""The asynchronous interface of an engine as a server uses it, and its plain types. Implemented by
engine/front/async_engine (the engine in its own process, or in a thread of this one). Every method is called on the
thread of the event loop; none of them blocks it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, MutableSequence, Sequence
from dataclasses import field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from quire.answers import AnswerPart, PromptProgress
from quire.beams import Beams
from quire.engine.usage_ledger import UsageLedger, UsageTotals
from quire.engine.view import EngineView
from quire.logprobs import LogprobTable
from quire.objectives import DegradeStep, ServiceClass
from quire.outputs import RequestOutput
from quire.parameters import Structure, TextTokens
from quire.records import dataclass
from quire.spec.pooling_facts import PoolingFacts
from quire.types import (
    FinishReason,
    Grammar,
    QuireError,
    Request,
    SamplingParams,
)

if TYPE_CHECKING:
    from quire.config.live import LiveConfig
    from quire.engine.cache_log import CacheLog  # imports asyncio, which the engine process does without
    from quire.text.chat_renderer import ChatAsk  # imports the template engine, likewise
    from quire.text.infill import InfillAsk, InfillPrompt
    from quire.text.reading import Reading
    from quire.text.tools import ToolUse

REQUESTS = "requests"  # the part of a memory plan for requests: bodies, prompts, answers


class EngineState(StrEnum):
    """Health as probes see it. READY means that steps complete, or that an idle engine answers pings."""

    STARTING = "starting"
    READY = "ready"
    STALLED = "stalled"  # work is queued and no step has completed for a while, or a ping was not answered
    RESTARTING = "restarting"  # the engine process died and a new one is loading
    SLEEPING = "sleeping"  # put to sleep: nothing runs, and most of its memory is given back
    DRAINING = "draining"  # shutting down: running requests finish, new ones are refused
    FAILED = "failed"


_WHY = {
    EngineState.STARTING: "the engine is loading",
    EngineState.STALLED: "the engine has stopped responding",
    EngineState.RESTARTING: "the engine failed and is restarting",
    EngineState.SLEEPING: "the model sleeps until an administrator wakes it up (POST /wake_up)",
    EngineState.DRAINING: "the server is shutting down",
    EngineState.FAILED: "the engine failed and could not be restarted",
}
_LASTING = {EngineState.FAILED, EngineState.DRAINING}


class OverloadedError(QuireError):
    """The queue is full (HTTP 429). The message says by how much; `retry_after` estimates the wait in seconds."""

    code = "queue_full"

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class WouldBeLateError(OverloadedError):
    """A deadline or the level of a class cannot be kept (HTTP 429). `predicted_ttft` is in seconds."""

    def __init__(self, message: str, retry_after: float, predicted_ttft: float) -> None:
        super().__init__(message, retry_after)
        self.predicted_ttft = predicted_ttft


class ShedError(OverloadedError):
    """The class of a request is not served while the server is saturated (HTTP 429)."""

    code = "shed"


class EngineUnavailableError(QuireError):
    """The engine is starting, restarting or draining, or died while computing the request: try again (HTTP 503)."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def require_ready(state: EngineState) -> None:
    """Raise EngineUnavailableError unless this state admits requests: one rule for admission and for health."""
    if state is not EngineState.READY:
        raise EngineUnavailableError(_WHY[state], 5.0 if state in _LASTING else 1.0)


class RequestCancelledError(QuireError):
    """The request was ended by its owner or an administrator (HTTP 409). Partial output stays in the stream."""


class RequestBlockedError(QuireError):
    """The engine died more than once while computing this request: do not retry, it is refused for a while (400)."""


class DeadlineError(QuireError):
    """The deadline or the queue deadline of a request has passed (HTTP 504). Partial output stays in the stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateAsk:
    """One request, and how to deliver its answer.

    `deadline` and `queue_deadline` are times of time.monotonic(), None for never: the request ends with DeadlineError
    unless it has finished, or been scheduled, by it. They count from `since` (None: its arrival). `prompt_text` only
    comes again in the output. Tenants share the queue; "" may use all of it. `reading` divides the answer into text,
    reasoning, calls. Without `keep_output` text and logprobs are only in the deltas, and `output` has no prompt.
    `predicted` is called with the predicted seconds from arrival to the first token, if there is a prediction. With
    `progress` a delta of the first sample follows each step that computes some of the prompt. `accepted` has a list for
    each sample, for the positions of accepted drafts among its tokens: they are there before the delta.
    """

    request: Request
    prompt_text: str | None = None
    tenant: str = ""
    deadline: float | None = None
    queue_deadline: float | None = None
    since: float | None = None
    keep_output: bool = True
    reading: Reading | None = None
    progress: bool = False
    predicted: Callable[[float], None] | None = None
    accepted: Sequence[MutableSequence[int]] | None = None

    def check_deadlines(self, now: float) -> None:
        """Raise DeadlineError for one that has passed."""
        for limit, name in ((self.deadline, "deadline"), (self.queue_deadline, "queue deadline")):
            if limit is not None and limit <= now:
                raise DeadlineError(f"the {name} of the request passed before it started")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One prompt of the Python API, as text or token ids, and how to continue it.

    `prediction` is what the answer may turn out to be. `negative_prompt` is what it is guided away from, with a
    guidance_scale: by default the last token of the prompt. Not `divided`, the answer is one text. `beams`: it is
    found by beam search. `adapter`: the name of what computes it, "" for the model alone.
    """

    prompt: str | Sequence[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    prediction: str | Sequence[int] = ""
    negative_prompt: str | Sequence[int] = ""
    reading: Reading | None = None
    divided: bool = True
    pooling: bool = False
    beams: Beams | None = None
    adapter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputAsk:
    """A text, or with `second` a pair of texts; `name` is the field that it came in.

    `prompt_name`: the prompt that is put before it; None for the model's default. `truncate`: keep so many tokens; None
    refuses longer texts, -1 keeps what the model takes. `instruction`: what a decoder judges a pair by.
    """

    text: str
    second: str | None = None
    name: str = "input"
    prompt_name: str | None = None
    truncate: int | None = None
    instruction: str | None = None
    special: bool = True


@dataclass(frozen=True, slots=True)
class CompiledStructure:
    """The grammar of a StructuredOutput. `dropped` are keywords of a schema that it does not enforce, with their paths.

    `seconds` is the time that it took, with the wait for others; 0 for a grammar that was known.
    """

    grammar: Grammar
    dropped: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(slots=True)
class StreamDelta:
    """The result of one step for one sample. Text may be empty while a character or stop string is incomplete.

    `parts` are set for a request with a `reading`: all that is new in order, of which `text` has that of the answer.
    `progress` is set for a request that asks for it, up to the first tokens: the prompt is complete with these.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: LogprobTable | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    parts: list[AnswerPart] | None = None
    progress: PromptProgress | None = None


class Stream(Protocol):
    """A running request. Iterate for deltas; `output` grows with them and has the usage and timings.

    Unread output is merged into one delta per sample. A request whose output stays unread for longer than
    ServingConfig's reader_timeout, or exceeds reader_tokens, is ended: read every stream as soon as it is made. A
    stream has one reader. A stream that is dropped before its end is cancelled; callers should rather call `cancel`.

    Iteration raises DeadlineError, EngineUnavailableError or QuireError if the request ends with one, after all
    deltas before it.
    """

    request_id: str
    output: RequestOutput

    def __aiter__(self) -> AsyncIterator[StreamDelta]: ...

    def deliver_to(self, sinks: Sequence[TextSink]) -> None:
        """Offer the text of later tokens to the sinks, one per sample, the moment it arrives.

        A sink is offered text only while the reader waits and nothing is unread, which keeps the order; only after the
        first tokens of its sample; and only for tokens that add nothing but text, and log-probabilities for a `whole`
        sink. All other deltas, and what a sink does not accept, go to the reader. Accepted text is not kept in
        `output`, and usage includes its tokens with the next delta of the sample, or when the request has ended. Sinks
        must neither raise nor take long: all other streams wait for them.
        """

    def nudge(self) -> None:
        """Give a reader that waits a delta with nothing in it."""

    def cancel(self) -> None:
        """Stop computing within one step and forget the request. Does nothing when it has ended."""


class TextSink(Protocol):
    """A destination for the text of a sample. One that is `whole` takes deltas, with token ids and logprobs, alone."""

    whole: bool

    def take(self, text: str, now: float, /) -> bool:
        """Accept new text, which may be empty, of tokens that arrived at `now`, a time of time.monotonic(); or return
        false to leave it to the reader.
        """

    def take_parts(self, parts: Sequence[AnswerPart], now: float, /) -> bool:
        """Accept the new parts of an answer that is read in parts, all of them or none, as `take`."""

    def take_delta(self, delta: StreamDelta, now: float, /) -> bool:
        """Accept a delta, as `take`."""

    def take_token(self, text: str, token_id: int, logprob: float | None, now: float, /) -> bool:
        """Accept a delta of one token that has a log-probability or none, as `take`; or return false to get it by
        `take_delta`.
        """


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The facts about the model in /v1/models and at start-up."""

    name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    config_sha256: str
    template_hash: str | None
    created: int  # wall-clock seconds when it was loaded
    default_sampling: Mapping[str, float | int] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    notices: tuple[str, ...] = ()
    answers: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)  # forms of parts
    acceptance: str = "same"  # of drafts; under another one, answers depend on drafts and load
    cache_block: int = 0  # tokens of a block of the prefix cache, 0 without one
    template_variables: frozenset[str] = frozenset()  # that a request may set with chat_template_kwargs
    pooling: PoolingFacts | None = None  # of a model that gives vectors or scores
    chat_template: str = ""
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # text by role: eos_token, …
    max_num_seqs: int = 0  # sequences that run at once
    embed_dim: int = 0  # of a row in place of a token, 0 if there may be none
    service_classes: tuple[ServiceClass, ...] = ()
    peers: tuple[str, str, str] = ("", "", "")  # role in a division, key file, mark of its blocks
    weights: str = ""  # equal for copies of the files of its weights, as far as samples of them show
    bits: str = ""  # stands for all that determines what it computes; "" if nobody has asked for it


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """What the name of an adapter stands for. `digest`: sha256 of its configuration and weights."""

    name: str
    digest: str
    rank: int
    path: str
    root: str | None  # the folder that the path is in, for one that was loaded by a request
    created: int  # wall-clock seconds when it was loaded


# Upper bounds of EngineStats.step_tokens, in tokens.
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and counters of an engine; times are seconds. The last five are known in the API process alone.

    `step_*` are totals since start; `step_tokens` counts steps by their tokens, one entry more than STEP_TOKEN_BOUNDS,
    for larger ones. `step_plans` are prepared step sizes: hits are steps of one, fallbacks others, padding fills one.
    """

    running: int = 0
    waiting: int = 0
    blocks: int = 0  # of the KV cache
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_pinned: int = 0
    block_size: int = 16
    kv_waste_tokens: int = 0  # allocated, not used
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_copied_tokens: int = 0  # of those, in parts of blocks
    preemptions: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    step_phase_seconds: Mapping[str, float] = field(default_factory=dict)
    rank_seconds: tuple[float, ...] = ()  # in which ranks worked, without waits for stages and commands
    rank_wait_seconds: tuple[float, ...] = ()  # those of them in which they waited for rows of their stage
    replica_wait_seconds: tuple[float, ...] = ()  # that steps of each waited for experts of others
    expert_pairs: tuple[int, ...] = ()  # of (token, expert), by rank
    expert_moves: int = 0
    expert_load: Mapping[str, float] = field(default_factory=dict)  # see ExpertBalance
    flops: Mapping[str, float] = field(default_factory=dict)  # of all steps, by number format
    moved_bytes: float = 0.0  # of weights, keys and values
    compute_share: float | None = None  # of the machine's limit, in recent steps; None: not known
    bandwidth_share: float | None = None
    head_of_line_seconds: float = 0.0  # that requests waited while longer prompts were computed
    prefill_tokens: int = 0
    decode_tokens: int = 0
    step_tokens: tuple[int, ...] = ()
    step_plans: int = 0
    step_plan_hits: int = 0
    step_plan_fallbacks: int = 0
    step_plan_padding: int = 0
    forced_tokens: int = 0  # added unsampled
    late_rows: int = 0  # that sat a step out for their mask
    draft_rows: int = 0  # rows with drafts
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()  # in their row
    rows_by_drafts: tuple[int, ...] = ()  # from none up
    draft_faults: int = 0  # sequences that go on without drafts
    speculation_seconds_won: float = 0.0  # estimated
    max_loras: int = 0
    adapter_bytes: tuple[int, int] = (0, 0)  # of the pool: those that adapters have, and all
    adapter_loads: Mapping[str, int] = field(default_factory=dict)  # into the pool, by version
    adapter_evictions: Mapping[str, int] = field(default_factory=dict)
    resident_bytes: int = 0
    step_costs: tuple[float, ...] = ()  # seconds, by core.cost_model.FEATURES
    step_bends: tuple[float, ...] = ()  # factors of steps with prompts, see core.cost_model.bend_of
    step_cost_error: float = 0.0  # median of |real / predicted - 1| of recent steps
    step_cost_spread: float = 0.0  # the same at the 90th percentile
    swap_blocks: int = 0  # kept in the swap space
    swapped_out: int = 0  # blocks copied there
    swapped_in: int = 0  # and back
    weight_paging: Mapping[str, float] = field(default_factory=dict)  # see executor.plans.PagingCounts
    disk_tier: Mapping[str, int] = field(default_factory=dict)  # see worker.kept_blocks.KeptBlocks.counts
    remote_tier: Mapping[str, float] = field(default_factory=dict)  # likewise, and of core.coming_blocks
    borrowed_bytes: int = 0  # of other models' shares of the memory, for swapped blocks
    lent_bytes: int = 0  # of its own share
    step_budget: int = 0  # tokens that a step may have now
    step_slots: int = 0  # sequences that may run now
    level_kept: Mapping[str, int] = field(default_factory=dict)  # requests by class of service
    level_missed: Mapping[str, int] = field(default_factory=dict)
    goodput: Mapping[str, float] = field(default_factory=dict)  # requests a second, of the last minute
    length_error: float = 0.0  # mean of |predicted / real - 1| of recent output lengths
    degrade_steps: Mapping[str, int] = field(default_factory=dict)  # 1 for those that are entered
    degraded: Mapping[str, int] = field(default_factory=dict)  # requests that each step changed
    usage: tuple[UsageTotals, ...] = ()  # since the engine's start
    tenant_blocks: Mapping[str, int] = field(default_factory=dict)  # held and cached, by cache domain
    floors: Mapping[str, int] = field(default_factory=dict)  # blocks by cache domain
    waiting_tokens: int = 0
    wasted_tokens: int = 0  # of requests cancelled before their client received them
    restarts: int = 0  # starts of the engine after its first
    replica_requests: tuple[int, ...] = ()  # not answered yet, of each of several replicas; -1: it takes none
    memory_parts: Mapping[str, int] = field(default_factory=dict)
    calls: Mapping[str, int] = field(default_factory=dict)  # of functions, by outcome (CALL_OUTCOMES)
    words: tuple[int, int] = (0, 0)  # of prompts that came as texts, and their tokens


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of the engine's log: the contents and the cost of a step. Times in seconds."""

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
    drafted: int = 0  # drafts run
    accepted: int = 0  # of them, those that were right
    predicted_seconds: float = 0.0  # by the cost model, before the step ran
    stage_seconds: tuple[float, ...] = ()  # embedding, layers, projection, sampling, while they are measured


class Engine(Protocol):
    """An engine that serves many callers at once."""

    @property
    def state(self) -> EngineState: ...

    @property
    def card(self) -> ModelCard: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def degraded(self) -> Sequence[DegradeStep]:
        """The steps that a saturated engine has taken; see core.degrading."""

    @property
    def startup(self) -> list[dict[str, Any]]:
        """Where the time went from the start of the process to the first token; see util/startup."""

    @property
    def request_memory(self) -> int:
        """Bytes of the memory plan for requests in progress, in both processes; 0 before there is a plan."""

    async def memory(self) -> Mapping[str, Any]:
        """The memory bound, the plan by part, and what each process holds by part, in bytes."""

    async def start(self) -> None:
        """Load and become ready. Raises the errors of loading (CheckpointError, MemoryBudgetError, ...)."""

    async def failed(self) -> None:
        """Returns when a started engine has failed for good: state FAILED."""

    async def sleep(self, level: int, drain_seconds: float) -> None:
        """Refuse new requests, let running ones finish for `drain_seconds`, end the rest, and give memory back:
        pages at level 1, the process at level 2. Raises EngineUnavailableError unless the engine is ready.
        """

    async def wake(self) -> None:
        """The end of a sleep. Raises the errors of loading."""

    async def stop(self, drain_seconds: float) -> None:
        """Refuse new requests, let running ones finish for `drain_seconds`, end the rest, release everything."""

    def requests(self) -> Sequence[tuple[Request, RequestOutput]]:
        """The requests that are not complete, in the order of their arrival, with their outputs so far."""

    def cancel(self, request_id: str) -> bool:
        """End a request now, with RequestCancelledError; false if there is none of that id."""

    def generate(self, ask: GenerateAsk) -> Stream:
        """Admit a request or raise at once: RequestError (400), OverloadedError (429), EngineUnavailableError,
        RequestBlockedError, or DeadlineError when its deadline has already passed.
        """

    async def compile(self, asked: Structure, tenant: str = "") -> CompiledStructure:
        """The grammar of an answer, for a request (see `constrained`), compiled off the event loop under limits of time
        and memory; tenants take turns. Raises GrammarError naming the field of `asked`, RequestError without a
        tokenizer, and OverloadedError.
        """

    async def share_vocabulary(self) -> None:
        """Prepare for a request with a grammar that `compile` has not made. Raises RequestError without a tokenizer."""

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True, name: str = "prompt"
    ) -> list[int]:
        """Token ids of a text, computed off the event loop, however long it is. Raises RequestError over the limit of a
        prompt; `name` is the field that holds the text.
        """

    async def text_tokens(self, params: SamplingParams) -> TextTokens | None:
        """Tokens of texts in parameters, for Request.texts; None without any. Raises RequestError naming the field."""

    async def encode_inputs(self, asks: Sequence[InputAsk]) -> list[list[int]]:
        """Token ids of texts or pairs of texts for a model with pooling, computed off the event loop. Raises
        RequestError for another model."""

    async def encode_chat(self, ask: ChatAsk) -> list[int]:
        """Token ids of a rendered conversation, computed off the event loop."""

    async def encode_infill(self, ask: InfillAsk) -> InfillPrompt:
        """The prompt that asks for the text between two others, off the event loop. Raises RequestError naming `suffix`
        if the tokenizer has no tokens for it, and `prompt` or `suffix` over the limit of one.
        """

    async def render_chat(self, ask: ChatAsk) -> str:
        """A rendered conversation, off the event loop."""

    def reading(self, tools: ToolUse | None) -> Reading | None:
        """How an answer in the format of the model is divided; None if it is nothing but text."""

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids, off the event loop."""

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as text for logprobs: its bytes decoded on their own, U+FFFD for partial characters."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text."""

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that texts without special tokens leave out."""

    @property
    def adapters(self) -> Mapping[str, AdapterVersion]:
        """What the names of adapters stand for now."""

    async def load_adapter(self, name: str, path: str, *, root: str | None = None) -> AdapterVersion:
        """Have a name stand for the adapter at a path, in a folder `root` if given; requests of the version before end
        on that. Raises CheckpointError, and changes nothing, if it cannot be read or does not fit the model.
        """

    async def mix_adapters(
        self, parts: Sequence[tuple[str, float]]
    ) -> tuple[AdapterVersion, Callable[[], None]]:
        """The sum of adapters, by name, with weights, and what ends its being kept. Raises CheckpointError if its rank,
        the sum of theirs, is above the limit.
        """

    def unload_adapter(self, name: str) -> None:
        """Have a name stand for nothing; its requests end on their version. Raises RequestError for an unknown name."""

    def keep_adapter(self, digest: str) -> Callable[[], None]:
        """Keep a version, whatever its name stands for, until the returned function is called."""

    def adapter_name(self, digest: str) -> str:
        """A name that a version has, or had when its requests that run were made; "" for an unknown digest."""

    @property
    def live(self) -> LiveConfig:
        """The part of the configuration that can be changed, as it is in force. Raises EngineUnavailableError."""

    @property
    def first_live(self) -> LiveConfig:
        """As it was at the start: what it bounds cannot grow beyond it. Raises EngineUnavailableError."""

    def share_cache(self, shares: Mapping[str, float]) -> None:
        """Parts of the KV cache by cache domain, from the next step on, or from the start of the engine."""

    async def configure(self, live: LiveConfig) -> None:
        """Another configuration from the next step on, as a whole. Raises ValueError naming the field, and changes
        nothing, if some of it is wrong, and EngineUnavailableError if the engine does not answer.
        """

    def predict(self, live: LiveConfig, prompt: int) -> Mapping[str, float] | None:
        """What a configuration would do to the requests that run and wait now: seconds of the largest step, and to the
        first token of a prompt of so many tokens that came now. None before steps have been seen.
        """

    @property
    def ledger(self) -> UsageLedger:
        """What accounts have used since the server began, by hour."""

    async def ping(self, timeout: float) -> bool:
        """Whether the engine process answers in time."""

    async def clear_prefix_cache(self, timeout: float) -> bool:
        """Forget the cached prefixes that no running sequence holds; whether the engine has done so in time."""

    async def debug(self, stages: bool = False) -> Mapping[str, Any]:
        """The latest step records. With `stages`, those of later steps have their stages, until a call without."""

    async def log(self, request_id: str = "", replica: int = 0) -> bytes:
        """The latest rows of a log, as a log (quire.steplog): of the engine that has a request, or of a replica."""

    async def view(self, after: int) -> EngineView:
        """What the engine holds now, with the rows of its log after the first `after`."""

    def cache_logs(self) -> Sequence[CacheLog]:
        """What each replica has cached; none where nobody may follow that."""

    def tell(self, row: bytes, request_id: str) -> None:
        """Add a row, what only the server knows of a request, to the log of the engine that has it."""
