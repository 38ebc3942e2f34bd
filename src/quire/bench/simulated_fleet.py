"""Several simulated servers behind a router, with prefill and decode together or on servers of their own.

Each server is a SimulatedServer with its own clock. The policies are the router's, and count work as it does; but they
know what is cached and how long answers will be, where the router predicts both. A session is named by the first tokens
of its prompts. With prefill servers a request runs there up to its first token; its KV cache then moves to a decode
server, whose scheduler takes it in without computing it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from quire.bench.shared_cpus import alone
from quire.bench.simulated_server import Arrival, SimulatedRun, SimulatedServer
from quire.bench.timeline import RequestRecord
from quire.records import dataclass
from quire.routing.router_policies import RoutedPrompt, RoutingPolicy, policy_named

_START = 64  # tokens that name a session

MakeServer = Callable[
    [int, bool], SimulatedServer
]  # its number; whether it decodes prompts that others computed


@dataclass(slots=True, eq=False)
class Replica:
    """A server, and what a router counts of it: see routing.router_policies.Choosable."""

    server: SimulatedServer
    name: str
    requests: int = 0
    work: float = 0.0
    weight: float = 1.0
    queued: float = 0.0
    distance: float = 0.0


class SimulatedFleet:
    """`replicas` servers for all, or with `prefill` so many of them for prompts. `transfer` gives the seconds that the
    cache of so many tokens takes from one to the other, `slower` by how much a step takes longer while so many of them
    run one. `known` makes of what is true of a request, by its number, what the router knows of it. Raises ValueError
    if none is left to decode.
    """

    def __init__(
        self,
        make: MakeServer,
        replicas: int,
        router: RoutingPolicy | None = None,
        *,
        prefill: int = 0,
        transfer: Callable[[int], float] = lambda _: 0.0,
        slower: Callable[[int], float] = alone,
        known: Callable[[int, RoutedPrompt], RoutedPrompt] = lambda _, prompt: prompt,
    ) -> None:
        if not 0 <= prefill < replicas:
            raise ValueError(f"prefill_replicas: {prefill} of {replicas} replicas leave none to decode")
        self._router, self._transfer, self._prefill = router or policy_named("prefix"), transfer, prefill
        self._slower, self._known = slower, known
        self.servers = [make(i, prefill > 0 and i >= prefill) for i in range(replicas)]
        self._replicas = [Replica(server, f"replica {i}") for i, server in enumerate(self.servers)]
        # Request -> where it is, and the work of its answer.
        self._placed: dict[int, tuple[Replica, float]] = {}
        # Prompts without a token, and what of them has to be computed, by request.
        self._computing: dict[str, dict[int, float]] = {each.name: {} for each in self._replicas}

    def run(self, arrivals: Sequence[Arrival]) -> SimulatedRun:
        """Serve all."""
        records = [RequestRecord(index=i, scheduled=one.at) for i, one in enumerate(arrivals)]
        found = SimulatedRun(records=records)
        decoded = SimulatedRun(records=[RequestRecord(index=i, scheduled=0.0) for i in range(len(arrivals))])
        entry, exits = self._replicas[: self._prefill or None], self._replicas[self._prefill :]
        coming = [(one.at, i, False) for i, one in enumerate(arrivals)]
        heapify(coming)
        while True:
            due = [one.due() for one in self.servers]
            next_step = min(due)
            place = due.index(next_step)
            if coming and coming[0][0] <= next_step:
                at, index, moved = heappop(coming)
                self._place(
                    at, index, arrivals[index], moved, exits if moved else entry, decoded if moved else found
                )
            elif next_step < math.inf:
                server = self.servers[place]
                moves = place < self._prefill
                server.now = next_step
                ended = server.step(slower=self._slower(self._running(next_step)))
                self._begin(self._replicas[place], decoded if self._prefill and not moves else found)
                for index in ended:
                    self._leave(index)
                for index in ended if moves else ():
                    if arrivals[index].output > 1:
                        late = self._transfer(len(arrivals[index].prompt) + 1)
                        heappush(coming, (server.now + late, index, True))
            else:
                break
        for first, rest in zip(records, decoded.records, strict=True):
            if rest.finished is not None:
                first.times += rest.times
                first.counts += rest.counts
                first.finished = first.closed = rest.finished
                first.output_tokens = sum(first.counts) or len(first.times)
                first.finish_reason = rest.finish_reason
        return self._together(found, decoded)

    def is_computing(self, index: int) -> bool:
        """Whether the prompt of a request, by its number, waits or is being computed: it has no token yet."""
        return any(index in computing for computing in self._computing.values())

    def _running(self, now: float) -> int:
        """Servers that run a step, with the one that begins now."""
        return sum(each.now > now or each.scheduler.has_work() for each in self.servers)

    def _place(
        self,
        at: float,
        index: int,
        arrival: Arrival,
        moved: bool,
        among: Sequence[Replica],
        found: SimulatedRun,
    ) -> None:
        cached = {each.name: len(arrival.prompt) if moved else each.server.cached(arrival) for each in among}
        session = " ".join(map(str, arrival.prompt[:_START]))
        answer = 1 if self._prefill and not moved else arrival.output
        prompt = self._known(index, RoutedPrompt(session, len(arrival.prompt), answer, cached.__getitem__))
        chosen = self._router.choose(prompt, among)
        chosen.requests, chosen.work = chosen.requests + 1, chosen.work + prompt.work(chosen.name)
        self._placed[index] = chosen, prompt.answer_work
        self._computing[chosen.name][index] = prompt.uncached(chosen.name)
        server = chosen.server
        if not server.scheduler.has_work():
            server.now = max(server.now, at)
        if moved:
            arrival = replace(arrival, prompt=[*arrival.prompt, 1], output=arrival.output - 1, at=at)
        elif self._prefill:
            arrival = replace(arrival, output=1)
        server.add(index, arrival, found)
        if found.records[index].failed:
            self._leave(index)

    def _begin(self, replica: Replica, found: SimulatedRun) -> None:
        """The prompts that have got a token are done."""
        computing = self._computing[replica.name]
        for index in [index for index in computing if found.records[index].times]:
            replica.work -= computing.pop(index)

    def _leave(self, index: int) -> None:
        """A request has ended where it was placed."""
        replica, work = self._placed.pop(index)
        work += self._computing[replica.name].pop(index, 0.0)
        replica.requests -= 1
        replica.work = replica.work - work if replica.requests else 0.0

    def _together(self, found: SimulatedRun, decoded: SimulatedRun) -> SimulatedRun:
        outcomes = [server.outcome(found) for server in self.servers]
        first = self._prefill or len(outcomes)
        entered, stats = outcomes[:first], [one.scheduler.prefix_stats for one in self.servers[:first]]
        asked, hits = sum(one.queried_tokens for one in stats), sum(one.hit_tokens for one in stats)
        return replace(
            found,
            cached={index: tokens for one in entered for index, tokens in one.cached.items()},
            refused=found.refused | decoded.refused,
            steps=sum(one.steps for one in outcomes),
            preemptions=sum(one.preemptions for one in outcomes),
            hit_share=hits / max(1, asked),
            cost_error=max(one.cost_error for one in outcomes),
            length_error=max(one.length_error for one in outcomes),
        )
