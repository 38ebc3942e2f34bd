"""Requests that two servers share: one computes the prompt, the other one answers.

The server that answers is chosen as always. Where its streams would be held up by the prompt for longer than it takes
to have it computed elsewhere and to move the blocks, another server computes it first. Whatever fails there, the one
that answers computes what it lacks: only time is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from quire.config.routing import RouterConfig
from quire.router.backends import Backends, BackendServer
from quire.router.resuming import RESUMABLE
from quire.router.routed_request import AskedOfServers, with_field
from quire.routing.router_policies import RoutedPrompt, policy_named
from quire.routing.transfer import MovingCosts
from quire.server.exchange import Exchange
from quire.util.http_client import ClientError, Whole
from quire.worker.kv_wire import read_key

PREFILL = b'{"do_remote_decode":true}'
FALLBACKS = ("failed", "late", "refused", "nothing")  # why a prompt was not computed elsewhere after all
_MARGIN, _TIMES = 1.0, 4.0  # a server is late after so many seconds, and so many times as long as expected


class _Params(msgspec.Struct):
    remote_request_id: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0


class _PrefillAnswer(msgspec.Struct):
    """What is read of the answer of a server that has computed a prompt."""

    kv_transfer_params: _Params | None = None
    usage: _Usage = _Usage()


def divisible(exchange: Exchange, asked: AskedOfServers) -> bool:
    """Whether another server could compute the prompt of a request. One that is sent with a key to be sent again must
    have the same body each time."""
    kind = exchange.header(b"content-type").partition(";")[0].strip().lower()
    return (
        exchange.path in RESUMABLE and kind == "application/json" and not exchange.header(b"idempotency-key")
        and not (asked.prompt_logprobs or asked.echo or asked.kv_transfer_params)
    )  # fmt: skip


def with_params(body: bytes, asked: AskedOfServers, params: bytes) -> bytes:
    """The body of a divisible request, with kv_transfer_params."""
    return with_field(body, "kv_transfer_params", params, replaces=asked.kv_transfer_params is None)


class Dividing:
    """Decides which prompts are computed by another server than the one that answers, and has it done. `divided`
    requests have had a ticket, for `tokens` in `seconds`."""

    def __init__(self, backends: Backends) -> None:
        """Raises ValueError for a key that cannot be read."""
        self._backends, self._config = backends, backends.config
        self.key = b"" if backends.config.kv_key_file is None else _key(backends.config)
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
        if not self.key or tokens < self._config.prefill_over:
            return None
        able = self._backends.computing(model, answering)
        if not able:
            return None
        chosen = self._policy.choose(prompt, able)
        ahead = chosen.work / chosen.weight
        return chosen if self.costs.pays(tokens, ahead, answering.requests - 1) else None

    async def ticket(
        self, server: BackendServer, prompt: RoutedPrompt, head: Callable[[int], bytes], asked: bytes
    ) -> bytes | None:
        """Have a server compute the prompt of a request; what to send to the one that answers, None for nothing."""
        uncached = max(prompt.prompt_tokens - prompt.cached(server.name), 1.0)
        expected, answer = self.costs.compute * (uncached + server.work / server.weight), Whole()
        limit = self._config.prefill_timeout
        if self.costs.learned:
            limit = min(limit, _MARGIN + _TIMES * expected)
        began = time.monotonic()
        try:
            with self._backends.busy(server, uncached):
                async with asyncio.timeout(limit):
                    await server.client.request(head(len(asked)), asked, answer)
        except TimeoutError:
            server.failed("did not compute a prompt in time", time.monotonic())
            self.fallbacks["late"] += 1
            return None
        except ClientError as error:
            server.failed(str(error), time.monotonic())
            self.fallbacks["failed"] += 1
            return None
        return self._read(server, answer, uncached, time.monotonic() - began)

    def _read(self, server: BackendServer, answer: Whole, uncached: float, seconds: float) -> bytes | None:
        read, found = None, None
        if answer.status == 200:
            server.succeeded()
            with contextlib.suppress(msgspec.MsgspecError):
                read = msgspec.json.decode(answer.body, type=_PrefillAnswer)
        else:
            server.answers["refused"] += 1
        if read is not None and read.kv_transfer_params is not None:
            found = read.kv_transfer_params.remote_request_id
        if read is None or found is None:
            self.fallbacks["refused" if read is None else "nothing"] += 1
            return None
        self.costs.computed(uncached, seconds)
        self.divided += 1
        self.tokens += read.usage.prompt_tokens
        self.seconds += seconds
        return msgspec.json.encode({"do_remote_prefill": True, "remote_request_id": found})


def _key(config: RouterConfig) -> bytes:
    try:
        return read_key(config.kv_key_file or "")
    except ValueError as error:
        raise ValueError(f"kv_key_file: {error}") from None
