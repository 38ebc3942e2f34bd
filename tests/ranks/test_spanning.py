"""Ranks that exchange rows through sockets: the bits of one rank, whatever the connection does."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from helpers.ranks import CHUNKS, LIMITS, prompts, same
from helpers.specs import BF16, I8, decoder_spec, moe_spec
from helpers.stepper import Stepper
from quire import _native
from quire.executor.native import NativeExecutor
from quire.loader import LoadRules, RandomWeights, load
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.program.memory import plan_arena
from quire.program.ranks import RankPlan
from quire.spec import MLP, ModelSpec, Router

PAGE = 4096
GUARD = 300.0  # seconds after which waiting is given up; no test is decided by it
DENSE = decoder_spec(330, 256, 328, (8, 4, 32), [0, 24, 0], qk_norm=True, bias=True)
EXPERTS = replace(
    moe_spec(Router(5, 2, bias=True), 200, dim=256, shared=MLP(200), shared_gate=True), vocab=330
)
INT8 = NumberFormats("bf16", "i8", I8, I8)


class Hosts:
    """A model as `size` ranks on `nodes` hosts, which are memories of one process with connections between them."""

    def __init__(
        self,
        spec: ModelSpec,
        formats: NumberFormats,
        size: int,
        nodes: int,
        buffers: int,
        *,
        experts: bool = False,
    ) -> None:
        whole, each = lower(spec, formats), size // nodes
        self.stepper = Stepper(whole, LIMITS)
        self.executors = [
            NativeExecutor(lower(spec, formats, RankPlan(size, rank, expert_parallel=experts)), threads=1)
            for rank in range(size)
        ]
        at, places = _native.SharedRanks.HEADER_BYTES, []
        for executor in self.executors:
            places.append(at)
            at += (
                -(-plan_arena(executor.program, LIMITS.max_tokens, LIMITS.max_logit_rows).total // PAGE)
                * PAGE
            )
        memories = [os.memfd_create("ranks") for _ in range(nodes)]
        for memory in memories:
            os.ftruncate(memory, at)
        self.ranks = [
            _native.SharedRanks(memories[rank // each], at, size, rank, True) for rank in range(size)
        ]
        for memory in memories:
            os.close(memory)
        self.sockets = _connections(size, each, buffers)
        rules = LoadRules().of_rank(whole.params)
        for rank, executor in enumerate(self.executors):
            load(executor.program.params, RandomWeights(whole.params), executor, rules=rules)
            executor.place_activations(self.ranks[rank].address + places[rank])
            executor.bind(LIMITS, self.stepper.arrays)
            peers = [(other, sock.fileno()) for (one, other), sock in self.sockets.items() if one == rank]
            executor.join(_native.SpanningGroup(self.ranks[rank], 0, size, rank // each * each, each, peers))

    def logits(self, tokens: list[list[int]]) -> list[list[dict[str, np.ndarray]]]:
        """Outputs of all ranks, step by step."""
        numbers, steps = [self.stepper.add(each) for each in tokens], []
        for counts in CHUNKS:
            size = self.stepper.fill({n: count for n, count in zip(numbers, counts, strict=True) if count})
            self.stepper.arrays.logit_rows[: size.num_tokens] = range(size.num_tokens)

            def run(executor: NativeExecutor) -> dict[str, np.ndarray]:
                made = executor.run(size.num_tokens, size.num_rows, size.num_tokens)  # noqa: B023
                return {name: rows.copy() for name, rows in made.items()}

            with ThreadPoolExecutor(len(self.executors)) as threads:
                steps.append(list(threads.map(run, self.executors)))
        return steps


def _connections(size: int, each: int, buffers: int) -> dict[tuple[int, int], socket.socket]:
    """Of each rank to those with its place on other hosts, with small buffers."""
    made = {}
    for one in range(size):
        for other in range(one + each, size, each):
            made[one, other], made[other, one] = socket.socketpair()
    for sock in made.values():
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, buffers)
    return made


@pytest.mark.parametrize(
    ("spec", "formats", "size", "nodes"),
    [(DENSE, BF16, 2, 2), (DENSE, INT8, 4, 2), (EXPERTS, INT8, 2, 2), (DENSE, BF16, 3, 3)],
    ids=["one-each", "two-each", "experts", "three-hosts"],
)
def test_ranks_of_several_hosts_have_the_bits_of_one(
    spec: ModelSpec, formats: NumberFormats, size: int, nodes: int
) -> None:
    """Buffers are smaller than what travels, so all send and receive at the same time."""
    one = Hosts(spec, formats, 1, 1, 2**16).logits(prompts(spec.vocab))
    hosts = Hosts(spec, formats, size, nodes, 2048, experts=spec is EXPERTS)
    for (alone,), all_ranks in zip(one, hosts.logits(prompts(spec.vocab)), strict=True):
        for found in all_ranks:
            same(alone, found)


def test_a_connection_that_ends_ends_the_step() -> None:
    """Whoever watches says why; until then, or for some seconds, the rank waits."""
    hosts = Hosts(DENSE, BF16, 2, 2, 2**16)
    hosts.stepper.fill({hosts.stepper.add(list(range(3, 12))): 9})
    hosts.sockets[1, 0].shutdown(socket.SHUT_RDWR)
    leaving = threading.Timer(0.1, hosts.ranks[0].leave)
    leaving.start()
    with pytest.raises(RuntimeError, match="ranks came apart"):
        hosts.executors[0].run(9, 1, 0)
    leaving.join()


def test_rows_that_are_not_in_the_memory_end_the_step() -> None:
    hosts = Hosts(DENSE, BF16, 2, 2, 2**16)
    hosts.stepper.fill({hosts.stepper.add(list(range(3, 12))): 9})
    head = np.array([2**40, 64, 64], np.uint64).tobytes() + np.array([9, 1], np.int32).tobytes()
    hosts.sockets[1, 0].sendall(head)
    hosts.ranks[0].leave()
    with pytest.raises(RuntimeError, match="ranks came apart"):
        hosts.executors[0].run(9, 1, 0)


def test_hearts_beat_over_a_wire_until_one_ends() -> None:
    one, other = socket.socketpair()
    ours, theirs = _native.WireHeart(one.fileno()), _native.WireHeart(other.fileno())
    end = time.monotonic() + GUARD
    while not (ours.beats > 1 and theirs.beats > 1):
        assert time.monotonic() < end
        time.sleep(0.01)
    del theirs  # what it has sent is all that comes
    time.sleep(0.5)
    before = ours.beats
    time.sleep(0.5)
    assert ours.beats == before
    del ours
    for sock in (one, other):
        sock.close()
