"""Memory of requests in progress: a request takes its worst case from a planned budget before it uses any.

The memory bound has a part for requests (engine/build/budget). It is divided into three pools. A request takes from
them in this order, so requests can't block each other in a circle:

    bodies    headers and bytes as they arrive, and the token ids of the prompts: until the answer is sent
    work      parsed values, rendered text, what tokenizing needs: until the prompts are token ids
    answers   the worst case of the answer, from max_tokens, n, logprobs, prompt_logprobs: until the answer is sent

A body that does not fit is refused; for work and answers a request waits its turn. The remaining sixteenth keeps
answers for their Idempotency-Key.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import cast

from quire.engine.api import DeadlineError, Engine, GenerateAsk, OverloadedError
from quire.parameters import TextTokens
from quire.records import dataclass
from quire.server.draft_marks import marks_cost
from quire.server.errors import ApiError, bad_request
from quire.server.json_input import MAX_PARTS, MAX_VALUES
from quire.types import Request
from quire.util.sizes import format_size

# Bytes, in both processes together; checked by tests/server/test_request_memory.py and `make test-memory`.
BODY_BYTE = 7  # a body in two pieces and whole, and four bytes per token: a byte becomes at most one token
# The objects of a request, and those of each header in addition to its bytes: 11 KiB measured with 8.
HEAD, HEADER = 10 * 1024, 200
VALUE = 48  # an int in a list
STRUCTURE = 256  # a string, an object or an array, and a key
TEXT_CHAR = 64  # of text that is rendered and tokenized
PARSED_BYTE = 5  # a string of the body with one wide character, in addition to the body
SMALL_TEXTS = 32 * 1024  # characters of the texts that are tokenized besides the longest
CHOICE = 6 * 1024  # the sequence, detokenizer, counters and events of a sample
EMBEDS_COPIES = 4  # of rows in place of tokens: here, on the way to the engine twice, and in the engine
PROMPT = 16 * 1024  # the request and stream of a prompt, in both processes
CONNECTION = 64 * 1024  # the tasks and headers of a request, and what is being encoded
ENGINE_TOKEN = 41  # an id in the engine's lists: an int, and its slot with room to grow
SEQUENCE_TOKEN = 9  # the id of a prompt token in the list of another sample
TOKEN = 5  # an id in an array with room to grow
PREDICTED_TOKEN = (
    37  # an id of a prediction in the engine, on the way there, and in an index of up to twice its tokens
)
TOKEN_TEXT = 128  # bytes of the text of a token, averaged over an answer
ECHO_TOKEN = 6 * TOKEN_TEXT  # of the text of a prompt: wide characters, and in UTF-8
UNREAD_TOKEN = 4 * TOKEN_TEXT + ENGINE_TOKEN  # of a stream whose client is slow
CANDIDATE = 14  # id and logprob, in tables with room to grow
EVENT = 2 * (512 + 6 * TOKEN_TEXT)  # an event of a stream, in pieces and whole
REPEATED = 6  # a text that is held, and repeated in the last events and in what is stored
CARRIED_BYTE = BODY_BYTE + REPEATED  # of an item that the next turn of a response reads
CANDIDATE_TEXT = 2 * 6 * TOKEN_TEXT  # a candidate in an event
MAX_RECORDED_BYTES = 2**20  # of an answer kept for its Idempotency-Key
NAMED_TOKEN = 48  # of allowed_token_ids and similar fields, while held as Python numbers
STOP_CHAR = 300  # of stop strings: a state of their automaton


class Pool:
    """A share of the memory for requests. Waiting tenants take turns; the requests of each tenant stay in order.

    The request whose turn it is waits until it fits, and others wait behind it, so that every request is served.
    Meanwhile each other tenant may pass it once with a request that fits: small requests with one API key do not wait
    for many large ones with another. As in the engine's queue (engine/front/admission), a tenant may occupy at most as
    many waiting places as it leaves free; requests beyond that are refused at once.
    """

    def __init__(self, name: str, limit: Callable[[], int], most_waiting: int) -> None:
        self.name = name
        self.used = self.peak = 0
        self._limit, self._most_waiting = limit, most_waiting
        self._used: Counter[str] = Counter()  # by tenant
        self._waiting: dict[str, deque[_Turn]] = {}  # by tenant; the first one is next
        self._passed: set[str] = set()  # tenants that have passed the one whose turn it is

    @property
    def limit(self) -> int:
        """Size of the pool in bytes."""
        return self._limit()

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return sum(map(len, self._waiting.values()))

    def try_take(self, size: int, tenant: str = "", mine: int = 0) -> bool:
        """Take bytes if they are free and no request waits for them. A tenant that holds some, apart from `mine`, which
        belong to this request, gets them only if as many stay free.
        """
        if self._waiting or self.used + size > self.limit:
            return False
        own = self._used[tenant]
        if tenant and own > mine and own + size > self.limit - self.used - size:
            return False
        self._take(size, tenant)
        return True

    async def take(self, size: int, tenant: str = "") -> None:
        """Take bytes when it is our turn. Raises OverloadedError, with the numbers, when too many requests wait."""
        if self.used + size <= self.limit and (not self._waiting or self._may_pass(tenant)):
            self._take(size, tenant)
            return
        self._check_places(size, tenant)
        turn = _Turn(size, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn.come
        except BaseException:
            if turn.come.done() and not turn.come.cancelled():  # granted, but cancelled since
                self.give(size, tenant)
            elif turn in self._waiting.get(tenant, ()):
                self._leave(turn, tenant)
                self._serve()
            raise

    def give(self, size: int, tenant: str = "") -> None:
        """Give bytes back."""
        self._used[tenant] -= size
        if not self._used[tenant]:
            del self._used[tenant]
        self.used -= size
        self._serve()

    def assign(self, size: int, tenant: str) -> None:
        """Charge bytes to a tenant that were taken before it was known."""
        self._used[""] -= size
        self._used[tenant] += size

    def _may_pass(self, tenant: str) -> bool:
        if tenant in self._waiting or tenant in self._passed:
            return False
        self._passed.add(tenant)
        return True

    def _check_places(self, size: int, tenant: str) -> None:
        """Raise OverloadedError when all waiting places are taken, or the tenant has as many as are left."""
        waiting, own = self.waiting, len(self._waiting.get(tenant, ()))
        whose, most = f"{waiting} requests wait", self._most_waiting
        if waiting < most:
            if not tenant or not own or own < most - waiting:
                return
            whose, most = f"{own} requests with this API key wait", most - waiting
        raise OverloadedError(
            f"{whose} for memory (limit {most}; {self.name}: {format_size(self.used)} of {format_size(self.limit)} "
            f"in use, {format_size(size)} more needed)",
            1.0,
        )

    def _take(self, size: int, tenant: str) -> None:
        self._used[tenant] += size
        self.used += size
        self.peak = max(self.peak, self.used)

    def _serve(self) -> None:
        while self._waiting:
            tenant, turns = next(iter(self._waiting.items()))
            turn = turns[0]
            if self.used + turn.size > self.limit and self.used:
                return
            self._leave(turn, tenant)
            if turn.come.cancelled():  # since the last turn of the event loop: its task has not noticed yet
                continue
            if turns:  # its next request waits for the turns of the other tenants
                self._waiting[tenant] = self._waiting.pop(tenant)
            self._take(turn.size, tenant)
            turn.come.set_result(None)

    def _leave(self, turn: _Turn, tenant: str) -> None:
        if next(iter(self._waiting.values()))[0] is turn:
            self._passed.clear()
        self._waiting[tenant].remove(turn)
        if not self._waiting[tenant]:
            del self._waiting[tenant]


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """A request that waits for bytes; `come` is set when it is its turn."""

    size: int
    come: asyncio.Future[None]


class Held:
    """The memory that one request has taken, and what else it keeps until its end. `tenant`: its API key when there are
    several, as soon as it is known.
    """

    __slots__ = ("_releases", "_sizes", "tenant")

    def __init__(self) -> None:
        self._sizes: dict[Pool, int] = {}
        self._releases: list[Callable[[], None]] = []
        self.tenant = ""

    def assign(self, tenant: str) -> None:
        """Charge what was taken to a tenant."""
        self.tenant = tenant
        if tenant:
            for pool, size in self._sizes.items():
                pool.assign(size, tenant)

    def try_take(self, pool: Pool, size: int) -> bool:
        """Take bytes from a pool if it has them."""
        mine = self._sizes.get(pool, 0)
        taken = pool.try_take(size, self.tenant, mine)
        if taken:
            self._sizes[pool] = mine + size
        return taken

    async def take(self, pool: Pool, size: int) -> None:
        """Take bytes from a pool when it is our turn; once per pool, since a request that holds some must not wait for
        more.
        """
        await pool.take(size, self.tenant)
        self._sizes[pool] = self._sizes.get(pool, 0) + size

    def give(self, pool: Pool) -> None:
        """Return what was taken from a pool."""
        size = self._sizes.pop(pool, 0)
        if size:
            pool.give(size, self.tenant)

    def give_part(self, pool: Pool, size: int) -> None:
        """Return a part of what was taken from a pool."""
        size = min(size, self._sizes.get(pool, 0))
        if size:
            self._sizes[pool] -= size
            pool.give(size, self.tenant)

    def keep(self, release: Callable[[], None]) -> None:
        """Call `release` at the end."""
        self._releases.append(release)

    def close(self) -> None:
        """Return everything."""
        while self._releases:
            self._releases.pop()()
        for pool in list(self._sizes):
            self.give(pool)


@dataclass(frozen=True, slots=True)
class _NoPrompt:
    """The longest prompt in a body that is read where no model is."""

    max_model_len: int = 0


@dataclass(frozen=True, slots=True)
class _Bodies:
    """The part of an engine that RequestMemory reads."""

    request_memory: int
    card: _NoPrompt = _NoPrompt()


class RequestMemory:
    """The pools of a server. Their sizes follow the memory plan of the engine, which may change at a restart."""

    def __init__(self, engine: Engine, most_waiting: int) -> None:
        self._engine = engine
        self.bodies = Pool("bodies", lambda: 3 * engine.request_memory // 16, most_waiting)
        self.work = Pool("work", lambda: engine.request_memory // 4, most_waiting)
        self.answers = Pool("answers", lambda: engine.request_memory // 2, most_waiting)

    @property
    def replays(self) -> int:
        """Bytes for answers kept for their Idempotency-Key."""
        return self._engine.request_memory // 16

    def report(self) -> dict[str, dict[str, int]]:
        """Per pool, in bytes: its limit, current use and highest use; and the number of waiting requests."""
        return {
            pool.name: {"limit": pool.limit, "taken": pool.used, "peak": pool.peak, "waiting": pool.waiting}
            for pool in (self.bodies, self.work, self.answers)
        }

    @property
    def largest_body(self) -> int:
        """Bytes of the largest body that could ever fit."""
        return self.bodies.limit // BODY_BYTE

    def take_head(self, held: Held, size: int, headers: int) -> None:
        """Take what a request needs before its body. Raises ApiError 429 when the pool is full."""
        self._take(held, HEAD + size + HEADER * headers)

    def take_body(self, held: Held, size: int) -> None:
        """Take what `size` more bytes of a body need. Raises ApiError 429 when the pool is full now, 413 when it could
        never fit.
        """
        if size > self.largest_body:
            message = f"the body and its prompts have {size} bytes, over the limit of {self.largest_body}"
            raise ApiError(413, f"{message} (--request-memory)", code="request_too_large", close=True)
        self._take(held, BODY_BYTE * size)

    def give_body(self, held: Held, size: int) -> None:
        """Return what `size` bytes of a body needed, which are kept elsewhere from now on."""
        held.give_part(self.bodies, BODY_BYTE * size)

    def take_turns(self, held: Held, window: int) -> int:
        """Take what a response of several turns carries from one to the next; returns how many bytes of JSON that may
        be: more than the context of a model reads, and at most a quarter of the pool. Raises like `take_body`.
        """
        size = min(16 * window + SMALL_TEXTS, self.bodies.limit // (4 * CARRIED_BYTE))
        self._take(held, CARRIED_BYTE * size)
        return size

    def take_echo(self, held: Held, tokens: int) -> None:
        """Take what the text of a prompt given as ids needs. Raises like `take_body`."""
        self.take_body(held, ECHO_TOKEN * tokens // BODY_BYTE)

    def _take(self, held: Held, size: int) -> None:
        pool = self.bodies
        if held.try_take(pool, size):
            return
        message = (
            f"the bodies of requests in progress hold {format_size(pool.used)} of their {format_size(pool.limit)} of"
            " memory; try again when some have been answered"
        )
        raise ApiError(429, message, code="memory_full", headers=[(b"retry-after", b"1")], close=True)

    async def take_work(self, held: Held, body: bytes, seconds: float) -> None:
        """Take what reading a body needs, waiting up to `seconds`. Raises ApiError 413 for a body that could never be
        read in this memory.
        """
        size, pool = reading_cost(body, self._engine.card.max_model_len), self.work
        if size > pool.limit:
            message = (
                f"reading this body may take {format_size(size)} of memory, over the limit of {format_size(pool.limit)}"
                " (--request-memory)"
            )
            raise ApiError(413, message, code="request_too_large")
        try:
            async with asyncio.timeout(seconds):
                await held.take(pool, size)
        except TimeoutError:
            raise OverloadedError(f"no memory to read the request within {seconds:g} s", 1.0) from None

    async def take_answer(self, held: Held, asks: Sequence[GenerateAsk], costs: dict[str, int]) -> None:
        """Take the worst case of an answer; `costs` names its parts by request field. Raises ApiError 400 for an answer
        that could never fit, OverloadedError, and DeadlineError when its deadline passes while it waits.
        """
        size, pool = sum(costs.values()), self.answers
        if size > pool.limit:
            field = max(costs, key=lambda name: costs[name])
            message = (
                f"{field}: the answer may take {format_size(size)} of memory, over the limit of "
                f"{format_size(pool.limit)} for one request (half of --request-memory); {field} accounts for "
                f"{format_size(costs[field])}: reduce it"
            )
            raise bad_request(field, message)
        ends = [end for ask in asks for end in (ask.deadline, ask.queue_deadline) if end is not None]
        try:
            async with asyncio.timeout(min(ends) - time.monotonic() if ends else None):
                await held.take(pool, size)
        except TimeoutError:
            raise DeadlineError("the deadline of the request passed while it waited for memory") from None


def reading_cost(body: bytes, window: int) -> int:
    """The most bytes held at once while parsing a body, rendering its conversation and tokenizing its texts."""
    values = min(body.count(b","), MAX_VALUES)
    parts = min(body.count(b'"') // 2 + body.count(b"{") + body.count(b"["), MAX_PARTS)
    longest = min(len(body), 16 * window + SMALL_TEXTS)
    return PARSED_BYTE * len(body) + VALUE * values + STRUCTURE * parts + TEXT_CHAR * longest


def answer_costs(
    asks: Sequence[GenerateAsk],
    window: int,
    *,
    unread: int | None,
    held_back: bool,
    recorded: bool,
    kept: bool = False,
    logprobs: str = "logprobs",
) -> dict[str, int]:
    """Upper bound of the bytes that the answers to these prompts can hold, by the field that asks for them.

    `unread`: for a stream, how many tokens of a sample its client may leave unread; None for a complete answer.
    `held_back`: a stream to HTTP/1.0, sent as a whole. `recorded`: kept for its Idempotency-Key. `kept`: its text is
    repeated at the end. `logprobs` is the name of the field that asks for logprobs.
    """
    params = asks[0].request.params
    lengths = [len(ask.request.prompt_token_ids) for ask in asks]
    longest = [
        min(ask.request.params.max_tokens or window, max(1, window - length))
        for ask, length in zip(asks, lengths, strict=True)
    ]
    beams = asks[0].request.beams
    samples = params.n if beams is None else 2 * beams.width  # those that run, and those that have finished
    generated, prompt = samples * sum(longest), sum(lengths)
    candidates = 0 if params.logprobs is None else CANDIDATE * (params.logprobs + 2)
    if unread is None:
        text, of_logprobs = generated * TOKEN_TEXT, generated * candidates
    elif held_back:
        text = generated * EVENT
        of_logprobs = generated * CANDIDATE_TEXT * (params.logprobs + 1) if params.logprobs is not None else 0
    else:
        late = params.n * sum(min(unread + 1, length) for length in longest)
        text, of_logprobs = late * UNREAD_TOKEN, late * candidates
    text += kept * REPEATED * generated * TOKEN_TEXT
    if kept and params.logprobs is not None:
        of_logprobs += REPEATED * generated * (params.logprobs + 1) * CANDIDATE_TEXT // 2
    scored = sum(map(params.scored_tokens, lengths))
    return {
        "max_tokens": generated * (TOKEN + ENGINE_TOKEN) + text,
        "n": CONNECTION
        + recorded * 2 * MAX_RECORDED_BYTES
        + len(asks) * PROMPT
        + len(asks) * samples * CHOICE
        + samples * prompt * SEQUENCE_TOKEN,
        "prompt": prompt * ENGINE_TOKEN,
        logprobs: of_logprobs,
        "prompt_logprobs": scored * CANDIDATE * ((params.prompt_logprobs or 0) + 2),
        "allowed_token_ids": _named_cost(asks[0].request, len(asks)),
        "stop": STOP_CHAR * sum(map(len, params.stop)) * len(asks),
        "structured_outputs": _grammar_cost(asks),
        "prediction": _prediction_cost(asks),
        "resumed_output": sum(map(len, asks[0].request.given)) * (PREDICTED_TOKEN + UNREAD_TOKEN),
        "return_accepted_drafts": marks_cost(asks, generated),
        "negative_prompt": _negative_cost(asks, samples, generated),
        "prompt_embeds": EMBEDS_COPIES * sum(len(ask.request.prompt_embeds) for ask in asks),
    }


def _negative_cost(asks: Sequence[GenerateAsk], samples: int, generated: int) -> int:
    """The second sequences of guided samples in the engine: their prompt, and what the first ones generate."""
    negative = asks[0].request.negative_prompt
    if negative is None:
        return 0
    return len(asks) * len(negative) * (ENGINE_TOKEN + samples * SEQUENCE_TOKEN) + generated * ENGINE_TOKEN


def _prediction_cost(asks: Sequence[GenerateAsk]) -> int:
    """A prediction in the engine, once for each prompt."""
    return len(asks) * len(asks[0].request.prediction or ()) * PREDICTED_TOKEN


def _grammar_cost(asks: Sequence[GenerateAsk]) -> int:
    """The text of a grammar: once here, and per prompt on the way to the engine and in the engine. What is made from it
    there has a part of the memory plan.
    """
    grammar = asks[0].request.grammar
    return 0 if grammar is None else sys.getsizeof(grammar.source) * (1 + 2 * len(asks))


def _named_cost(request: Request, prompts: int) -> int:
    """Token ids named in the parameters: held once here, and per prompt on the way to the engine and in the engine."""
    params, texts = request.params, request.texts or TextTokens()
    named = len(params.allowed_token_ids or ()) + len(params.banned_token_ids) + len(params.stop_token_ids)
    named += sum(2 + len(word) for word in texts.bad_words) + len(texts.breakers)
    biases = len(params.logit_bias) + len(texts.biases)
    return (named + 4 * biases) * NAMED_TOKEN * (1 + prompts)


def memory_of_bodies(size: int, most_waiting: int) -> RequestMemory:
    """The memory of requests whose bodies are read before a model has them: `size` bytes for bodies alone."""
    return RequestMemory(cast(Engine, _Bodies(16 * size // 3)), most_waiting)
