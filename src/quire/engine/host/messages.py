"""Messages between the API process and the engine process: a fixed schema over a stream socket.

A frame is a length (4 bytes, little endian) and a MessagePack array whose first item is the message's tag. Token
ids travel as packed int32, logprobs as packed float64: a step of 64 rows is a dozen objects, not 700. Both ends run
on one machine, so numbers are in native byte order. Decoding creates only these types.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import accumulate
from typing import Any, TypeVar

import msgspec

from quire.answers import RowDrafts
from quire.cache_kinds import CacheGroup, FullGroup, SlidingGroup, StateGroup
from quire.config.live import LiveEngineConfig
from quire.config.schema import EngineConfig
from quire.core.cache_changes import CacheChange
from quire.core.scheduler_config import SchedulerConfig
from quire.engine.api import EngineStats, StepRecord
from quire.engine.view import EngineView
from quire.logprobs import LogprobTable
from quire.text.token_bytes import TokenBytes
from quire.types import FinishReason, QuireError, Request, TokenIds
from quire.util.startup_spans import Span

MAX_FRAME_BYTES = 2**30
HEADER_BYTES = 4
# A row of a step is identified by the handle of its request and, in the low bits, the number of its sample.
SAMPLE_BITS = 7
SAMPLE_MASK = 2**SAMPLE_BITS - 1


class ProtocolError(QuireError):
    """The other end sent something invalid: a bug, or not our process."""


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages."""


# -- to the engine ------------------------------------------------------------------------------------------


class Load(_Message, frozen=True, tag=1):
    """First message: the checkpoint folder and options. `beside` is memory held by another process, by part; `lent`
    the most bytes that it may borrow from other engines, None where nothing is lent. `adapters`: paths of those that it
    begins with, for which there must be room. `near`: the processors that the engine and its ranks stay on, any if
    there are none. `named`: Ready says what stands for the engine's bits. `replicas`: the
    file through which replicas that share experts meet.
    """

    folder: str
    config: EngineConfig
    beside: dict[str, int] = {}
    lent: int | None = None
    adapters: tuple[str, ...] = ()
    near: tuple[int, ...] = ()
    named: bool = False
    replicas: str = ""


class AddRequest(_Message, frozen=True, tag=2):
    """Queue a request. Handles are never reused, and rise except for requests that were held back."""

    handle: int
    request: Request


class Abort(_Message, frozen=True, tag=3):
    """End a request before the next step."""

    handle: int


class Finish(_Message, frozen=True, tag=4):
    """End one sample: its text contains a stop string."""

    handle: int
    index: int


class Ping(_Message, frozen=True, tag=5):
    """Answered between two steps."""

    number: int


class AskRecords(_Message, frozen=True, tag=6):
    """Asks for the latest step records. `stages`: those of later steps are to have their stages."""

    count: int
    stages: bool = False


class Stop(_Message, frozen=True, tag=7):
    """End the process."""


class Vocabulary(_Message, frozen=True, tag=8):
    """The bytes of all tokens, for requests whose grammar the engine steps; sent before the first of them."""

    tokens: TokenBytes


class ClearCache(_Message, frozen=True, tag=9):
    """Forget the prefixes that no running sequence holds, before the next step."""


class GivePages(_Message, frozen=True, tag=12):
    """Forget all cached prefixes, and give back the pages that can be had again; see util/given_pages."""


class GrantRoom(_Message, frozen=True, tag=13):
    """How many bytes keys and values may take now: in blocks of the engine's own, and in those borrowed from other
    models. Borrowed ones that are more are given back at once. The answer is UsesRoom.
    """

    number: int
    own: int
    borrowed: int


class OpenAdapter(_Message, frozen=True, tag=10):
    """Read an adapter, and answer with AdapterOpened: a path, or with `root` a name in that folder; or the sum of
    versions that are known, with their weights.

    With a `digest`, a version that was opened before is known again without being read, and there is no answer.
    """

    number: int
    name: str
    path: str
    root: str | None = None
    digest: str = ""
    mixed: tuple[tuple[str, float], ...] = ()


class ForgetAdapter(_Message, frozen=True, tag=11):
    """No request with this version of an adapter is left, and none will come."""

    digest: str


class AskLog(_Message, frozen=True, tag=20):
    """Asks for the latest rows of the log."""


class Tell(_Message, frozen=True, tag=21):
    """A row for the log: what only the server knows of a request."""

    row: bytes


class AskView(_Message, frozen=True, tag=23):
    """Asks what the engine holds, and for the rows of its log after the first `after`."""

    after: int


class WatchCache(_Message, frozen=True, tag=24):
    """Report from now on which blocks can be found, and which cannot any more: CacheWatched, then CacheChanged."""


class LimitDrafts(_Message, frozen=True, tag=22):
    """Run at most so many drafts for a sequence from the next step on."""

    most: int


class Configure(_Message, frozen=True, tag=14):
    """Another configuration from the next step on, answered with Configured."""

    number: int
    live: LiveEngineConfig


_Queued = AddRequest | Abort | Finish
Command = (
    Load
    | _Queued
    | Ping
    | AskRecords
    | Stop
    | Vocabulary
    | ClearCache
    | OpenAdapter
    | ForgetAdapter
    | GivePages
    | AskLog
    | AskView
    | WatchCache
    | Tell
    | LimitDrafts
    | Configure
    | GrantRoom
)


# -- from the engine ----------------------------------------------------------------------------------------


class LoadProgress(_Message, frozen=True, tag=1):
    """Bytes of weights loaded."""

    done: int
    total: int


class Ready(_Message, frozen=True, tag=2):
    """Loaded: the limits that admission checks, facts for the start-up lines, and where the time went."""

    scheduler: SchedulerConfig
    vocab: int
    eos_token_ids: tuple[int, ...]
    notices: tuple[str, ...]
    memory_bound: int
    memory_parts: dict[str, int]
    memory_lines: tuple[str, ...]
    memory_areas: tuple[tuple[str, int, int], ...] = ()  # name, address, bytes: in the engine process
    startup: tuple[Span, ...] = ()
    ids: int = 0  # token ids that a prompt may have, when that is not `vocab`
    embed_dim: int = 0  # of a row in place of a token, 0 if there may be none
    blocks: str = ""  # fingerprint, in hex, of what names blocks in tiers, if there are any
    weights: str = ""  # digest of the files of its weights, equal for copies
    bits: str = ""  # fingerprint, in hex, of all that determines what is computed, if it was asked for
    shares: bool = False  # experts, with other replicas


class Fatal(_Message, frozen=True, tag=3):
    """Loading failed; the process ends. `kind` is the class name of the error."""

    kind: str
    message: str


class Logprobs(_Message, frozen=True):
    """A LogprobTable: ids int32 and logprobs float64 per candidate, ranks int32 and ends int64 per position."""

    ids: bytes
    logprobs: bytes
    ranks: bytes
    ends: bytes


class Note(_Message, frozen=True):
    """Facts about a row besides its tokens."""

    row: int
    cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    pooled: bytes = b""

    @property
    def only_logprobs(self) -> bool:
        """Whether this says nothing but the log-probabilities of the row's tokens."""
        return (
            self.finish_reason is None
            and self.cached_tokens is None
            and self.stop_token_id is None
            and self.prompt_logprobs is None
            and not self.pooled
        )


_SCORE = struct.Struct("=iid")
Score = tuple[int, float]


class StepReport(_Message, frozen=True, tag=4):
    """A completed step. Times are of time.monotonic(), which all processes of a machine share.

    rows     int64 per row: handle << SAMPLE_BITS | sample
    tokens   int32, row after row
    sizes    int32 tokens of each row; empty when every row has one
    drafts   four int32 for each row with drafts: the row, and what became of them (RowDrafts)
    scores   two int32 and a float64 for each row of one token that has its log-probability and no note: the row, the
             rank of the token, and that
    started  int64 handles of requests that this step started
    prompts  three int64 for each request whose prompt is not complete after a step that computed some of one: its
             handle, how many tokens of the prompt are computed, and how many of these were cached
    seen     the last handle whose Add arrived before the step was scheduled
    running, waiting  sequences, after the step
    """

    number: int
    start: float
    end: float
    seen: int
    running: int
    waiting: int
    prefill_tokens: int
    decode_tokens: int
    started: bytes
    rows: bytes
    tokens: bytes
    sizes: bytes
    drafts: bytes
    notes: tuple[Note, ...]
    prompts: bytes = b""
    scores: bytes = b""

    def unpack(self) -> tuple[list[int], list[list[int]]]:
        """The rows' names and tokens."""
        tokens = unpack_ids(self.tokens)
        if not self.sizes:
            return unpack_handles(self.rows), [[token] for token in tokens]
        sizes = unpack_ids(self.sizes)
        ends = accumulate(sizes)
        news = [tokens[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        return unpack_handles(self.rows), news

    def unpack_scores(self) -> dict[int, Score]:
        """The rank and log-probability of the token of each row that has them alone."""
        return {row: (rank, logprob) for row, rank, logprob in _SCORE.iter_unpack(self.scores)}

    def unpack_prompts(self) -> Iterator[tuple[int, int, int]]:
        """The handle of each incomplete prompt, its computed tokens, and those of them that were cached."""
        numbers = iter(unpack_handles(self.prompts))
        return zip(numbers, numbers, numbers, strict=True)

    def unpack_drafts(self) -> Iterator[tuple[int, RowDrafts]]:
        """Each row with drafts, and what became of them."""
        numbers = iter(unpack_ids(self.drafts))
        for row, drafted, accepted, predicted in zip(numbers, numbers, numbers, numbers, strict=True):
            yield row, RowDrafts(drafted, accepted, bool(predicted))


class Refused(_Message, frozen=True, tag=5):
    """A request that could not be queued: field and message of the RequestError."""

    handle: int
    field: str
    message: str


class Pong(_Message, frozen=True, tag=6):
    """The answer to a Ping."""

    number: int


class Stats(_Message, frozen=True, tag=7):
    """Gauges and counters, a few times a second."""

    stats: EngineStats


class Records(_Message, frozen=True, tag=8):
    """The latest step records, oldest first."""

    records: list[StepRecord]


class AdapterOpened(_Message, frozen=True, tag=9):
    """The answer to an OpenAdapter: the version and the rank of the adapter, or why it was refused."""

    number: int
    digest: str = ""
    rank: int = 0
    error: str = ""


class LogRows(_Message, frozen=True, tag=20):
    """The latest rows of the log, as a log."""

    data: bytes


class Viewed(_Message, frozen=True, tag=23):
    """The answer to an AskView."""

    view: EngineView


class CacheWatched(_Message, frozen=True, tag=24):
    """The answer to a WatchCache: what the digests of blocks begin with (core.tier.root_digest)."""

    fingerprint: bytes


class CacheChanged(_Message, frozen=True, tag=25):
    """What has changed in the prefix caches since the last of these, in order."""

    changes: list[CacheChange]


class Configured(_Message, frozen=True, tag=10):
    """The answer to a Configure: nothing, or why all is as before."""

    number: int
    error: str = ""


class UsesRoom(_Message, frozen=True, tag=11):
    """How many bytes an engine wants for keys and values, in blocks of its own and in borrowed ones, and how many of
    the latter it has at most now. `seen`: the last GrantRoom.
    """

    seen: int
    own: int
    borrowed: int
    held: int


Report = (
    LoadProgress
    | Ready
    | Fatal
    | StepReport
    | Refused
    | Pong
    | Stats
    | Records
    | AdapterOpened
    | Configured
    | LogRows
    | Viewed
    | UsesRoom
    | CacheWatched
    | CacheChanged
)


# -- frames -------------------------------------------------------------------------------------------------


def _pack_prompt(value: Any) -> memoryview:
    if not isinstance(value, TokenIds):
        raise NotImplementedError(f"{type(value).__name__} cannot be sent in a message")
    return memoryview(value).cast("B")


def _unpack_group(wanted: type, data: Any) -> CacheGroup:
    """The kind of group that has these fields."""
    for kind in (FullGroup, SlidingGroup, StateGroup):
        if (
            wanted is CacheGroup
            and isinstance(data, dict)
            and {field.name for field in fields(kind)} == {*data}
        ):
            return msgspec.convert(data, kind)
    raise ProtocolError("a message holds no cache group")


def _unpack_prompt(wanted: type, data: Any) -> TokenIds:
    if wanted is not TokenIds or not isinstance(data, bytes) or len(data) % 4:
        raise ProtocolError("a message contains incomplete token ids")
    ids = TokenIds()
    ids.frombytes(data)
    return ids


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack_prompt)
M = TypeVar("M")


def frame(message: Command | Report) -> bytearray:
    """A message with its length, ready to send."""
    buffer = bytearray(HEADER_BYTES)
    _encoder.encode_into(message, buffer, HEADER_BYTES)
    buffer[:HEADER_BYTES] = (len(buffer) - HEADER_BYTES).to_bytes(HEADER_BYTES, "little")
    return buffer


def command_decoder() -> msgspec.msgpack.Decoder[Command]:
    """Decoder for messages to the engine."""
    return msgspec.msgpack.Decoder(Command, dec_hook=_unpack_prompt)


def report_decoder() -> msgspec.msgpack.Decoder[Report]:
    """Decoder for messages from the engine."""
    return msgspec.msgpack.Decoder(Report, dec_hook=_unpack_group)


class FrameReader:
    """Splits a stream of bytes into frames, wherever the pieces begin and end."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[memoryview | bytes]:
        """The bodies of the frames that `data` completes; each is valid until the next one is requested.

        Raises ProtocolError for a frame over MAX_FRAME_BYTES.
        """
        buffer: bytes | bytearray = data
        if self._buffer:
            self._buffer += data
            buffer = self._buffer
        position, available = 0, len(buffer)
        with memoryview(buffer) as view:
            while available - position >= HEADER_BYTES:
                body = position + HEADER_BYTES
                size = int.from_bytes(view[position:body], "little")
                if size > MAX_FRAME_BYTES:
                    raise ProtocolError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
                if available - body < size:
                    break
                with view[body : body + size] as whole:
                    yield whole
                position = body + size
        if buffer is self._buffer:
            del self._buffer[:position]
        else:
            self._buffer += data[position:]


# -- packed numbers -----------------------------------------------------------------------------------------


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as int32."""
    return (token_ids if isinstance(token_ids, array) else array("i", token_ids)).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of pack_ids."""
    return memoryview(data).cast("i").tolist()


def pack_logprobs(table: LogprobTable | None) -> Logprobs | None:
    """The numbers of a table as bytes."""
    if table is None:
        return None
    return Logprobs(table.ids.tobytes(), table.values.tobytes(), table.ranks.tobytes(), table.ends.tobytes())


def pack_score(row: int, table: LogprobTable) -> bytes:
    """The score of a row whose table is the log-probability of one token."""
    return _SCORE.pack(row, table.ranks[0], table.values[0])


def scored(token: int, score: Score) -> LogprobTable:
    """The table of one token with its log-probability."""
    table = LogprobTable()
    table.add((token,), score[1:], score[0])
    return table


def unpack_logprobs(packed: Logprobs | None) -> LogprobTable | None:
    """The inverse of pack_logprobs. Raises ProtocolError when the lengths of the parts disagree."""
    if packed is None:
        return None
    try:
        table = LogprobTable(packed.ids, packed.logprobs, packed.ranks, packed.ends)
    except ValueError:
        raise ProtocolError("a part of a logprob message contains incomplete numbers") from None
    last = table.ends[-1] if table.ends else 0
    if not len(table.ids) == len(table.values) == last or len(table.ranks) != len(table.ends):
        raise ProtocolError("the parts of a logprob message differ in length")
    return table


def unpack_handles(data: bytes) -> list[int]:
    """int64 numbers from bytes."""
    return memoryview(data).cast("q").tolist()


def pack_handles(handles: Sequence[int]) -> bytes:
    """Numbers as int64 bytes."""
    return array("q", handles).tobytes()
