"""What the requests of a router work with: servers, policy, counts, and what answers have taught."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from quire.config.semantic import parse_semantic
from quire.config.serving import ServingConfig
from quire.router.backend_server import BackendServer
from quire.router.backends import Backends
from quire.router.dividing import Dividing
from quire.router.router_metrics import RouterMetrics
from quire.routing.hedging import Hedging
from quire.routing.router_policies import RoutingPolicy, policy_named
from quire.server.access import AccessControl
from quire.server.context import Reader, directory_of, sweep_readers
from quire.server.exchange import HangUpWatch
from quire.server.fleet.shadows import MAX_COMPARED_BYTES, MAX_SHADOWS, Shadows
from quire.server.logs import log
from quire.server.request_memory import RequestMemory, memory_of_bodies

if TYPE_CHECKING:
    from quire.router.semantic_cache import SemanticCache

MAX_OWNERS = 100_000  # stored responses whose server is remembered
BODY_MEMORY = 256 * 2**20  # bytes of the bodies of requests
# Bytes for shadows: of each request what came for the client, from two servers if it is hedged, its body, and the
# answer of the shadow.
SHADOW_MEMORY = 4 * MAX_SHADOWS * MAX_COMPARED_BYTES
KEPT_MEMORY = 64 * 2**20  # bytes of streams, kept so that another server can go on with them
# Answers that a semantic cache collects at a time, each up to so many bytes, from two servers if a request is hedged.
COLLECTED, MOST_COLLECTED = 64, 256 * 1024
NUMPY_MEMORY = 32 * 2**20  # of the library, which is there for a semantic cache alone; 11 MiB measured
_LEARNING = 0.05  # weight of the newest answer in a mean


def semantic_memory(options: str | None) -> int:
    """Bytes that a router with such a semantic cache takes more than one without."""
    if options is None:
        return 0
    return parse_semantic(options).size + 2 * COLLECTED * MOST_COLLECTED + NUMPY_MEMORY


class Rates:
    """Bytes of a prompt by token, and tokens of an answer, as answers have shown them."""

    def __init__(self) -> None:
        self._bytes, self._answer = 4.0, 128.0

    def prompt_tokens(self, size: int) -> float:
        """The tokens of a text of so many bytes."""
        return size / self._bytes

    def answer_tokens(self, most: int | None) -> float:
        """The tokens that an answer of at most `most` will have."""
        return self._answer if most is None else min(self._answer, most)

    def learn(self, size: int, usage: dict[str, int]) -> None:
        """Take the usage of an answer to a prompt of `size` bytes."""
        if size and (tokens := usage.get("prompt_tokens", 0)) >= 16:
            self._bytes += _LEARNING * (min(max(size / tokens, 0.5), 16.0) - self._bytes)
        if "completion_tokens" in usage:
            self._answer += _LEARNING * (usage["completion_tokens"] - self._answer)


class RouterContext:
    """One router. `watches` (responses being written) and `connections` are checked for slow readers."""

    def __init__(self, backends: Backends, config: ServingConfig) -> None:
        self.backends, self.config = backends, config
        self.policy: RoutingPolicy = policy_named(backends.config.policy)
        self.hedging = Hedging(backends.config.hedge_share)
        self.shadows = Shadows()
        self._shadowed = 0  # requests that a shadow gets too, from their beginning on
        self.tenants = directory_of(config, "router")
        self.access = AccessControl(config, self.tenants)
        self.has_keys = self.access.has_keys
        key_file = backends.config.backend_api_key_file
        self.presents_key = key_file is not None or any(each.entry.api_key for each in backends.all)
        self.dividing = Dividing(backends)
        self.semantic: SemanticCache | None = None
        if backends.config.semantic_cache is not None:
            from quire.router.semantic_cache import SemanticCache

            options = parse_semantic(backends.config.semantic_cache)
            self.semantic = SemanticCache(options, COLLECTED, MOST_COLLECTED)
        self.metrics = RouterMetrics(backends, self.dividing, self.shadows, self.tenants, self.semantic)
        self.memory: RequestMemory = memory_of_bodies(BODY_MEMORY, config.max_num_queued_reqs)
        self.rates = Rates()
        self.kept = 0  # bytes of streams that run
        self.watches: set[HangUpWatch] = set()
        self.connections: Collection[Reader] = ()
        self._owners: OrderedDict[str, tuple[str, str]] = OrderedDict()  # stored response -> server, model

    @contextlib.contextmanager
    def watched(self, watch: HangUpWatch) -> Iterator[None]:
        """Check this response for a slow reader while it is being written."""
        self.watches.add(watch)
        try:
            yield
        finally:
            self.watches.discard(watch)

    def keep(self, size: int) -> bool:
        """Take memory for so many bytes of a stream; false if there is none left. Negative gives it back."""
        if size > 0 and self.kept + size > KEPT_MEMORY:
            return False
        self.kept += size
        return True

    def begin_shadow(self, pair: tuple[str, str], size: int) -> bool:
        """Whether a request with a body of so many bytes is for a shadow too; `end_shadow` then has to follow."""
        if self._shadowed >= MAX_SHADOWS or size > MAX_COMPARED_BYTES:
            self.shadows.skip(pair)
            return False
        self._shadowed += 1
        return True

    def end_shadow(self) -> None:
        """A request that a shadow gets too, or its comparison, has ended."""
        self._shadowed -= 1

    def stored(self, response: str, backend: BackendServer, model: str) -> None:
        """Note which server has a stored response, and which model has given it."""
        self._owners[response] = backend.name, model
        while len(self._owners) > MAX_OWNERS:
            self._owners.popitem(last=False)

    def owner(self, response: str | None) -> BackendServer | None:
        """The server that has a stored response, if that is known."""
        if response is None:
            return None
        name, _ = self._owners.get(response, ("", ""))
        return next((each for each in self.backends.all if each.name == name), None)

    def model_of(self, response: str | None) -> str:
        """The model that has given a stored response; "" if that is not known."""
        return self._owners.get(response or "", ("", ""))[1]

    def reload(self) -> None:
        """Read the files of tenants and servers again."""
        if self.config.tenants is not None:
            self.tenants.reload_or_log()
        try:
            self.backends.reload()
        except ValueError as error:
            log.error("servers not reloaded, still using the old ones: %s", error)
            return
        log.info("servers: %s", ", ".join(each.name for each in self.backends.all))

    async def sweep(self) -> None:
        """End responses whose client does not read; runs until cancelled."""
        await sweep_readers(self.config.reader_timeout, lambda: [*self.watches, *self.connections])
