"""Requests that two servers share: one computes the prompt, the other one answers.

The server that answers is chosen as always. Where its streams would be held up by the prompt for longer than it takes
to have it computed elsewhere and to move the blocks, another server computes it first. Whatever fails there, the one
that answers computes what it lacks: only time is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from quire.router.backend_server import BackendServer
from quire.router.backends import Backends
from quire.router.resuming import RESUMABLE
from quire.router.routed_request import AskedOfServers, with_field
from quire.routing.router_policies import RoutedPrompt, policy_named
from quire.routing.transfer import MovingCosts
from quire.server.exchange import Exchange
from quire.util.http_client import ClientError, SentBody, Whole, body_size

_SEVERAL = re.compile(rb'\s*\[\s*["\[]')  # prompts in a list
PREFILL = b'{"do_remote_decode":true}'
# Why a prompt was not computed elsewhere after all; ticket: the server that answers did not take it.
FALLBACKS = ("failed", "late", "refused", "nothing", "ticket")
_MARGIN, _TIMES = 1.0, 4.0  # a server is late after so many seconds, and so many times as long as expected
_ALONE = 5.0  # seconds for which nothing is divided with a server with which it came to nothing


class _Params(msgspec.Struct):
    remote_request_id: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0


class _PrefillAnswer(msgspec.Struct):
    """What is read of the answer of a server that has computed a prompt."""

    kv_transfer_params: _Params | None = None
    usage: _Usage = _Usage()


def divisible(exchange: Exchange, asked: AskedOfServers) -> bool:
    """Whether another server could compute the prompt of a request: a single one, of text or tokens. A request that is
    sent with a key to be sent again must have the same body each time."""
    kind = exchange.header(b"content-type").partition(";")[0].strip().lower()
    return (
        exchange.path in RESUMABLE and kind == "application/json" and not exchange.header(b"idempotency-key")
        and not (asked.prompt_logprobs or asked.echo or asked.kv_transfer_params)
        and bytes(asked.prompt_embeds) in (b"", b"null") and _SEVERAL.match(asked.prompt) is None
    )  # fmt: skip


def with_params(body: SentBody, asked: AskedOfServers, params: bytes) -> SentBody:
    """The body of a divisible request, with kv_transfer_params."""
    return with_field(
        body, "kv_transfer_params", params, replaces=asked.kv_transfer_params is not msgspec.UNSET
    )


def leave_alone(server: BackendServer) -> None:
    """Divide nothing with a server for a while: it neither computes prompts for others nor has them computed."""
    server.alone_until = time.monotonic() + _ALONE


class Dividing:
    """Decides which prompts are computed by another server than the one that answers, and has it done. `divided`
    requests have had a ticket, for `tokens` in `seconds`."""

    def __init__(self, backends: Backends) -> None:
        self._backends, self._config = backends, backends.config
        self.key = backends.key
        self.costs = MovingCosts()
        self._policy = policy_named("prefix")
        self.divided = self.tokens = 0
        self.seconds = 0.0
        self.fallbacks: Counter[str] = Counter()

    def server_for(
        self, answering: BackendServer, prompt: RoutedPrompt, model: str | None
    ) -> BackendServer | None:
        """The server that should compute a prompt for the one that answers; None: that one itself."""
        tokens = prompt.prompt_tokens - prompt.cached(answering.name)
        now = time.monotonic()
        if not self.key or tokens < self._config.prefill_over or now < answering.alone_until:
            return None
        able = self._backends.computing(model, answering)
        if not able:
            return None
        chosen = self._policy.choose(prompt, able)
        ahead = chosen.work / chosen.weight
        return chosen if self.costs.pays(tokens, ahead, answering.requests - 1) else None

    async def ticket(
        self, server: BackendServer, prompt: RoutedPrompt, head: Callable[[int], bytes], asked: SentBody
    ) -> bytes | None:
        """Have a server compute the prompt of a request; what to send to the one that answers, None for nothing."""
        uncached = prompt.uncached(server.name)
        expected, answer = self.costs.compute * (uncached + server.work / server.weight), Whole()
        longest = self._config.prefill_timeout
        limit = min(longest, _MARGIN + _TIMES * expected) if self.costs.learned else longest
        began, ahead = time.monotonic(), server.waiting + uncached
        self._backends.need(server).arrived(uncached, began)
        try:
            with self._backends.busy(server, 0.0), server.computing(uncached):
                async with asyncio.timeout(limit):
                    await server.client.request(head(body_size(asked)), asked, answer)
        except TimeoutError:
            if limit == longest:
                server.failed("did not compute a prompt in time", time.monotonic())
            else:
                leave_alone(server)  # it is slow, for all that is known
            self.fallbacks["late"] += 1
            return None
        except ClientError as error:
            server.failed(str(error), time.monotonic())
            self.fallbacks["failed"] += 1
            return None
        seconds = time.monotonic() - began
        if answer.status == 200:
            self._backends.need(server).answered(ahead, seconds)
        return self._read(server, answer, uncached, seconds)

    def _read(self, server: BackendServer, answer: Whole, uncached: float, seconds: float) -> bytes | None:
        read, found = None, None
        if answer.status == 200:
            server.succeeded()
            with contextlib.suppress(msgspec.MsgspecError):
                read = msgspec.json.decode(answer.body, type=_PrefillAnswer)
        else:
            server.refused(answer.status)
        if read is not None and read.kv_transfer_params is not None:
            found = read.kv_transfer_params.remote_request_id
        if read is None:
            self.fallbacks["refused"] += 1
            return None
        if found is None:
            leave_alone(server)
            self.fallbacks["nothing"] += 1
            return None
        self.costs.computed(uncached, seconds)
        self.divided += 1
        self.tokens += read.usage.prompt_tokens
        self.seconds += seconds
        return msgspec.json.encode({"do_remote_prefill": True, "remote_request_id": found})
