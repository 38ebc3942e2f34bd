"""Several simulated servers behind a router, with prefill and decode together or on servers of their own.

Each server is a SimulatedServer with its own clock; the router's policies see the requests and caches of servers as
they are. With prefill servers a request runs there up to its first token; its KV cache then moves to a decode server,
whose scheduler takes it in without computing it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from quire.bench.simulated_server import Arrival, SimulatedRun, SimulatedServer
from quire.bench.timeline import RequestRecord
from quire.routing.router_policies import RoutedRequest, RouterPolicy, least_work

_START = 64  # tokens that name a prompt

MakeServer = Callable[
    [int, bool], SimulatedServer
]  # its number; whether it decodes prompts that others computed


class SimulatedFleet:
    """`replicas` servers for all, or with `prefill` so many of them for prompts. `transfer` gives the seconds that the
    cache of so many tokens takes from one to the other. Raises ValueError if none is left to decode.
    """

    def __init__(
        self,
        make: MakeServer,
        replicas: int,
        router: RouterPolicy = least_work,
        *,
        prefill: int = 0,
        transfer: Callable[[int], float] = lambda _: 0.0,
    ) -> None:
        if not 0 <= prefill < replicas:
            raise ValueError(f"prefill_replicas: {prefill} of {replicas} replicas leave none to decode")
        self._router, self._transfer, self._prefill = router, transfer, prefill
        self.servers = [make(i, prefill > 0 and i >= prefill) for i in range(replicas)]

    def run(self, arrivals: Sequence[Arrival]) -> SimulatedRun:
        """Serve all."""
        records = [RequestRecord(index=i, scheduled=one.at) for i, one in enumerate(arrivals)]
        found = SimulatedRun(records=records)
        decoded = SimulatedRun(records=[RequestRecord(index=i, scheduled=0.0) for i in range(len(arrivals))])
        entry = range(self._prefill or len(self.servers))
        exits = range(self._prefill, len(self.servers))
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
                ended = server.step(decoded.records if self._prefill and not moves else records)
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
                first.output_tokens, first.finish_reason = sum(first.counts), rest.finish_reason
        return self._together(found, decoded)

    def _place(
        self, at: float, index: int, arrival: Arrival, moved: bool, among: range, found: SimulatedRun
    ) -> None:
        asked = RoutedRequest(index, len(arrival.prompt), array("i", arrival.prompt[:_START]).tobytes())
        server = self.servers[among[self._router(asked, [self.servers[i].load(arrival) for i in among])]]
        if not server.scheduler.has_work():
            server.now = max(server.now, at)
        if moved:
            arrival = replace(arrival, prompt=[*arrival.prompt, 1], output=arrival.output - 1, at=at)
        elif self._prefill:
            arrival = replace(arrival, output=1)
        server.add(index, arrival, found)

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
