"""The rows of a log, as MessagePack arrays. Times are nanoseconds of the machine's monotonic clock.

A log has no text and no token ids of prompts or answers, unless prompts are recorded. What prompts share is there all
the same: a chain of keyed digests is computed over the blocks of each prompt, and a row says after which earlier row,
and for how many blocks, its chain is the same. The key is not in the log.

`key` of a sample: the number of its request << SAMPLE_BITS | its index.
"""

from __future__ import annotations

from typing import Any

import msgspec

SAMPLE_BITS = 7
# What became of a row of a step, in Step.notes. ACCEPTED has the number of tokens when it is not one.
DRAFTS, PROPOSED, STOPPED, FAILED, NO_TOKEN, LATE, COMPLETE, POOLED, DEAD_END, GRAMMAR_LIMIT, TREE = range(11)


class LogRow(msgspec.Struct, frozen=True, array_like=True):
    """Base of all rows."""


class Opened(LogRow, frozen=True, tag=1):
    """The first row of a file. `options` are those of the scheduler, `costs` the weights of the cost model, `classes`
    those of service as an option writes them; `live` are requests that were running when an earlier file was full;
    `cpus` the processors that the engine shares with all others, 0 if the CPU times of steps do not tell of it.
    """

    at: int
    wall: float  # seconds since 1970
    options: dict[str, Any]
    costs: tuple[float, ...]
    classes: str
    prompts: bool
    model: str = ""
    batching: str = "continuous"
    swap: bool = False
    part: int = 0  # how many files of this engine came before
    live: int = 0
    cpus: int = 0


class TokenChain(LogRow, frozen=True):
    """Tokens by what they share: the first `shared` blocks are those of `like`, the key of a sample, or the number of a
    request and -1 for its prompt. `digest` is the keyed hash of all whole blocks. `tokens`: the ids, if recorded.
    """

    like: tuple[int, int]
    shared: int
    digest: bytes
    tokens: bytes = b""


class Arrived(LogRow, frozen=True, tag=2):
    """A request reached the engine process. `arrival` is when it was tokenized, in seconds. `params` are the numbers
    that differ from their defaults; `domain` names tenant, namespace and adapter by keyed digests.
    """

    at: int
    number: int
    request_id: str
    arrival: float
    prompt_tokens: int
    chain: TokenChain
    params: dict[str, float]
    domain: tuple[str, str, str]
    priority: int = 0
    service_class: int = 0
    account: str = ""
    weight: float = 1.0
    expected_tokens: int | None = None
    due: float | None = None
    traits: tuple[
        str, ...
    ] = ()  # grammar, adapter, stepwise, beams, pooling, negative, soft, known length, other parameters
    negative_tokens: int = 0
    place: int = -1  # of a new account in the order of the names of those before it, which breaks ties
    stops: tuple[int, ...] = ()  # tokens that end it, with recorded prompts


class Queued(LogRow, frozen=True, tag=3):
    """A request was given to the scheduler: its grammar was compiled and its adapter was there."""

    at: int
    number: int


class Step(LogRow, frozen=True, tag=4):
    """A step. `scheduled`, `executed`, `updated` are nanoseconds after `at`; `forward`, `sample`, `draft`, `stolen` and
    `predicted` microseconds. `rows` has four numbers a row: key, first position, tokens, accepted tokens. `notes` has
    three for each special fact of a row: the row, the fact, its value. `started` has three for each sample that starts
    or resumes: key, tokens found in the cache, seed. `preempted` and `fetching` are keys. `limits`: tokens and
    sequences that the step could have. A few times a second `others` and `own` have the CPU time of other processes and
    of this one, in microseconds since the last time; so has `stolen` what a hypervisor gave to other guests. `stages`:
    microseconds of embedding, layers, projection and sampling, while they are measured.
    """

    number: int
    at: int
    scheduled: int
    executed: int
    updated: int
    forward: int
    sample: int
    draft: int
    stolen: int
    predicted: int
    blocks: int
    waiting: int
    limits: tuple[int, int]
    rows: list[int]
    notes: list[int] = []
    started: list[int] = []
    preempted: list[int] = []
    fetching: list[int] = []
    others: int = 0
    own: int = 0
    stages: tuple[int, ...] = ()


class Ended(LogRow, frozen=True, tag=5):
    """A sample ended, with `tokens` of output; its chain is that of prompt and output."""

    at: int
    number: int
    sample: int
    reason: str
    tokens: int
    chain: TokenChain


class Aborted(LogRow, frozen=True, tag=6):
    """A request was ended from outside. `made` has, for each sample that had output: its index, the number of its
    tokens, and their chain: others may have found its blocks."""

    at: int
    number: int
    made: tuple[tuple[int, int, TokenChain], ...] = ()


class Finished(LogRow, frozen=True, tag=7):
    """A sample was ended for its text."""

    at: int
    number: int
    sample: int


class Missed(LogRow, frozen=True, tag=8):
    """Why a prompt was not found in the cache as a whole; see core.cache_misses."""

    at: int
    number: int
    kind: str
    hit: int
    lost: int
    differs_at: int
    ours: tuple[int, ...] = ()
    theirs: tuple[int, ...] = ()


class ServerMarks(LogRow, frozen=True, tag=9):
    """Times of a request in the server, in seconds: first byte read, body complete, body parsed, grammar compiled,
    memory there, last token as text, last byte written; and how long the client did not read after the last token.
    """

    request_id: str
    begun: float
    received: float
    parsed: float
    compiled: float
    admitted: float
    finished: float
    written: float
    unread: float


class Changed(LogRow, frozen=True, tag=10):
    """Numbers that have changed: the cost model's weights ("costs")."""

    at: int
    name: str
    values: tuple[float, ...]


class Closed(LogRow, frozen=True, tag=11):
    """The last row of an engine that ended in order."""

    at: int


class Turned(LogRow, frozen=True, tag=12):
    """A server refused a request at admission: why."""

    at: int
    request_id: str
    error: str


class Reconfigured(LogRow, frozen=True, tag=13):
    """The engine's configuration was changed while it ran: the fields of config.live.LiveEngineConfig, shares of the
    cache by the digests of their tenants.
    """

    at: int
    options: dict[str, Any]


AnyRow = (
    Opened
    | Arrived
    | Queued
    | Step
    | Ended
    | Aborted
    | Finished
    | Missed
    | ServerMarks
    | Changed
    | Closed
    | Turned
    | Reconfigured
)
encode = msgspec.msgpack.Encoder().encode
