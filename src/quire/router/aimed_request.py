"""A request as servers get it: for one model at a time, with what policies see of its prompt."""

from __future__ import annotations

import time
from functools import cache

import msgspec

from quire.router.backend_server import ROUTED, SPILLED, BackendServer
from quire.router.dividing import divisible
from quire.router.request_heads import request_head
from quire.router.resuming import is_resumable, is_seeded, with_seed
from quire.router.routed_request import AskedOfServers, named, with_time_left, without_field
from quire.router.router_context import RouterContext
from quire.routing.continued import FIELD, STREAM, stream_proof
from quire.routing.prefix_index import prompt_digests
from quire.routing.router_policies import RoutedPrompt
from quire.routing.settled_weights import VERSION
from quire.routing.tickets import PEER, peer_proof
from quire.routing.traffic import TrafficRoute
from quire.server.exchange import Exchange
from quire.util.http_client import SentBody


class AimedRequest:
    """A request, whose body was read. `asked` and `body` are for the model that is asked now, and `digests` of its
    prompt of `size` bytes; a `ticket` stands for that once another server has computed it. `version`: of the weights
    that an answer must have, "" for any. `resumable`: other servers can go on with its stream."""

    def __init__(
        self, context: RouterContext, exchange: Exchange, body: bytes, asked: AskedOfServers
    ) -> None:
        self.context, self.exchange, self.asked = context, exchange, asked
        self._parts = asked.parts()
        self.size = sum(map(len, self._parts))
        name = asked.model or asked.name or ""
        self.renamed = name in context.backends.rules.names  # the client knows it by another name
        self.route = self._routed(name)
        config = context.backends.config
        several = len(context.backends.all) > 1 or config.hold_seconds > 0
        self.resumable = config.resume and several and is_resumable(exchange.path, asked)
        again = self.resumable or (self.route.shadow is not None and is_seeded(exchange, asked))
        own: SentBody = body  # what is between a router and its servers is dropped
        if asked.resumed_output is not msgspec.UNSET:
            own = without_field(body, FIELD)
        self.given = with_seed(own, asked) if again else own  # the same tokens are drawn each time
        self.spilled = bool(exchange.header(SPILLED.encode()))
        self.version = ""
        self.aim(self.route.target)

    def _routed(self, name: str) -> TrafficRoute:
        context, rules, asked = self.context, self.context.backends.rules, self.asked
        before = context.model_of(asked.previous_response_id)
        if self.renamed and rules.leads_to(name, before):
            return TrafficRoute(before)  # what goes on from a stored response stays with its model
        if name not in rules:
            return TrafficRoute(name)
        route = rules.route(name, asked.session(self.exchange), asked.features)
        if route.judged is not None:
            context.metrics.judge(route.judged)
        return route

    def aim(self, target: str) -> None:
        """Ask for a model from now on."""
        self.asked, self.body = named(self.exchange, self.given, self.asked, target)
        self.digests = prompt_digests(self._domain(), self._parts)
        self.ticket: bytes | None = None
        self.divisible = divisible(self.exchange, self.asked)

    @property
    def passed(self) -> float:
        """Seconds since it came."""
        return time.monotonic() - self.exchange.arrival

    def pass_time(self) -> None:
        """The next server gets what is left of the request's times."""
        self.body = with_time_left(self.body, self.asked, self.passed)

    def _domain(self) -> bytes:
        """What separates prompts that share no cache: the model, and the client's key where servers see it."""
        key = b"" if self.context.presents_key else self.exchange.header(b"authorization").encode("latin-1")
        return f"{self.asked.model} ".encode() + key

    @property
    def model(self) -> str | None:
        """The model that is asked."""
        return self.asked.model or self.asked.name

    def prompt(self) -> RoutedPrompt:
        """The prompt as policies see it; what is cached of it stays what it was before it was sent."""
        rates = self.context.rates
        return RoutedPrompt(
            self.asked.session(self.exchange), rates.prompt_tokens(self.size),
            rates.answer_tokens(self.asked.most_tokens()), cache(self._cached),
        )  # fmt: skip

    def _cached(self, name: str) -> float:
        return self.context.backends.cached_tokens(name, self.digests, self.context.rates.prompt_tokens)

    def is_sent(self, server: BackendServer) -> None:
        """A server gets the prompt."""
        self.context.backends.sent(server.name, self.exchange.request_id, self.digests, self.size)

    def head(self, backend: BackendServer, size: int, *, peer: bool = False) -> bytes:
        """The head of a request whose body has so many bytes. To a `peer` the router shows that it has the key."""
        exchange, own = self.exchange, list[str]()
        key = self.context.dividing.key
        if peer:
            own.append(f"{PEER}: {peer_proof(key, exchange.request_id)}")
        if key and self.resumable:
            own.append(f"{STREAM}: {stream_proof(key, exchange.request_id)}")
        if backend.is_router:
            own += [f"{ROUTED}: 1", *([f"{VERSION}: {self.version}"] if self.version else [])]
        has_body = self.body or exchange.method in {"POST", "PUT", "PATCH"}
        return request_head(
            exchange, backend, own, size if has_body else None, passes_key=not self.context.has_keys
        )
