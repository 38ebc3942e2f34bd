"""How the nodes (hosts) of a model meet: who they are, what they must have in common, and their connections.

node 0       listens at the given address, and waits until all others have joined it with the secret
node k       says a line of JSON: its version, kernels, the digests of its model, its options, where it listens
node 0       refuses what differs, with the reason; else says what to load, and where all others listen
node k       connects once more, to show that it is there, and to the nodes before it, which admit it with the
             secret: a connection for each pair of ranks that exchange rows
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, field, replace
from typing import Any

from quire.config import env
from quire.config.launched import Launched, RendezvousError
from quire.config.schema import EngineConfig
from quire.engine.build.load_weights import weights_fingerprint
from quire.engine.build.node_frames import NodeConnection
from quire.engine.build.opening import Model
from quire.engine.build.rendezvous import JOIN_SECONDS, admit, join, listen
from quire.executor.base import Limits
from quire.executor.kinds import library_facts
from quire.program.rank_nodes import RankNodes
from quire.records import dataclass

# Options that are of a host: they may differ, and are told to no other. Blocks are kept by the leading one alone, and
# kv_tiers may have a password.
LOCAL = (
    "memory", "threads", "weight_cache", "weight_cache_dir", "weight_cache_size", "weight_memory", "kv_tiers",
)  # fmt: skip
_LINE_SECONDS = 10.0
_LINK = 2**12  # a connection of a rank has its number above this one
_HEART = 2**13  # and one that shows that a node is there


@dataclass(frozen=True, slots=True)
class NodePlace:
    """One of the hosts that ranks are on, and its connections: of the leading host to all others, and of ranks here to
    ranks on others (RankNodes.peers)."""

    nodes: RankNodes
    node: int = 0
    connections: Mapping[int, NodeConnection] = field(default_factory=dict)
    peers: Mapping[int, Mapping[int, socket.socket]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """All hosts."""
        return self.nodes.nodes

    @property
    def here(self) -> range:
        """The ranks of this host."""
        return self.nodes.ranks_of(self.node)

    @property
    def elsewhere(self) -> list[int]:
        """All other ranks."""
        return [rank for rank in range(self.nodes.size * self.nodes.stages) if rank not in self.here]


def spread(asked: EngineConfig, nodes: int) -> RankNodes:
    """The ranks of a model over so many hosts."""
    return RankNodes(asked.parallel.tensor_parallel_size, asked.parallel.pipeline_parallel_size, nodes)


def shared_options(asked: EngineConfig) -> dict[str, Any]:
    """The options that all hosts have in common, by name."""
    return {name: value for name, value in asked.values().items() if name not in LOCAL}


def identity(model: Model, asked: EngineConfig) -> dict[str, Any]:
    """What all nodes must have in common, by what it is called."""
    from quire import __version__
    from quire._native import supported_isas

    return {
        "version": __version__,
        "kernels": env.isa() or supported_isas()[0],
        "model's config": model.facts.config_sha256,
        "weights": weights_fingerprint(model, asked, copies=True),
        **library_facts(asked),
        **{f"option {name}": value for name, value in json.loads(json.dumps(shared_options(asked))).items()},
    }


def meet_nodes(at: Launched | None, model: Model, asked: EngineConfig, limits: Limits) -> NodePlace:
    """The leading node's place, once all others are there. It waits for them as long as it takes. Raises
    RendezvousError for one that differs."""
    if at is None or not at.nodes:
        return NodePlace(spread(asked, 1))
    ours = identity(model, asked)
    load = {"config": shared_options(asked), "limits": asdict(limits)}
    with listen(at.address, at.port) as listener:
        own = listener.getsockname()[0]
        if own.startswith("127.") and at.address not in {own, "localhost"}:
            raise RendezvousError(
                f"MASTER_ADDR {at.address}: it is {own} here, where no other host comes: give an address"
            )
        while True:
            connections: dict[int, NodeConnection] = {}
            try:
                peers = _gather(at, listener, connections, ours, load)
                return NodePlace(spread(asked, at.world), 0, connections, peers)
            except OSError as error:  # one of them ended meanwhile
                print(f"quire: {error}: all hosts meet again", file=sys.stderr, flush=True)
                _close(connections)
            except BaseException:
                _close(connections)
                raise


def _close(connections: Mapping[int, NodeConnection]) -> None:
    for connection in connections.values():
        connection.close()


def _gather(
    at: Launched,
    listener: socket.socket,
    connections: dict[int, NodeConnection],
    ours: Mapping[str, Any],
    load: Mapping[str, Any],
) -> dict[int, dict[int, socket.socket]]:
    """Fill the connections to all other nodes; returns those of ranks. Raises OSError if one of them ends."""
    listening = {}
    named = f"node {{}} of {at.world} at {at.address}, port {at.port}"
    for node, sock in admit(listener, at.secret, range(1, at.world), named, None):
        made = NodeConnection(sock)
        if node in connections and not connections[node].ended:
            made.say_line(json.dumps({"refused": f"node {node} is there already"}).encode())
            made.close()
            continue
        if node in connections:  # it was started again
            connections[node].close()
        connections[node] = made
        theirs = json.loads(made.line(_LINE_SECONDS) or b"{}")
        if not theirs:
            raise ConnectionResetError(f"node {node} has ended")
        listening[node] = sock.getpeername()[0], theirs.pop("port", 0)
        if differs := difference(ours, theirs, f"node {node}"):
            connections[node].say_line(json.dumps({"refused": differs}).encode())
            raise RendezvousError(differs)
    for connection in connections.values():
        connection.say_line(json.dumps({**load, "listening": listening}).encode())
    hearts = range(_HEART + 1, _HEART + at.world)
    try:
        for number, sock in admit(listener, at.secret, hearts, "a node", JOIN_SECONDS):
            connections[number - _HEART].attach(sock)
        config = EngineConfig(**load["config"])
        return _admit_peers(listener, at.secret, spread(config, at.world), 0)
    except RendezvousError as error:
        raise ConnectionError(f"{error} after it had joined") from None


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any], who: str) -> str:
    """What a node has not in common with the leading one, in words; "" if nothing."""
    for name, value in ours.items():
        if theirs.get(name) != value:
            shown = name not in {"weights", "model's config"}
            has = f"{theirs.get(name)!r}, the leading node has {value!r}" if shown else "another"
            return f"{who}: its {name} is {has}"
    return ""


@dataclass(frozen=True, slots=True)
class Joined:
    """What a node that follows learns when it joins."""

    leader: NodeConnection
    config: EngineConfig
    limits: Limits
    place: NodePlace


def join_nodes(at: Launched, model: Model, asked: EngineConfig) -> Joined:
    """Join the leading node, for which it waits as long as it takes, and the others. Raises RendezvousError if it is
    refused."""
    ours = identity(model, asked)  # before the leading node waits for it
    leader = NodeConnection(join(at, patient=True))
    try:
        with listen(leader.own_address, 0) as listener:
            ours["port"] = listener.getsockname()[1]
            leader.say_line(json.dumps(ours).encode())
            said = json.loads(leader.line() or b"{}")
            if "refused" in said:
                raise RendezvousError(f"the leading node refuses this one: {said['refused']}")
            if not said:
                raise ConnectionResetError("the leading node has ended")
            local = {name: value for name, value in asked.values().items() if name in LOCAL}
            config = EngineConfig(**said["config"]).replace(**local)
            leader.attach(join(replace(at, number=_HEART + at.number), own=leader.own_address))
            nodes = spread(config, at.world)
            addresses = {0: (at.address, at.port)}
            addresses |= {int(node): (host, port) for node, (host, port) in said["listening"].items()}
            peers = _admit_peers_between(at, listener, nodes, addresses, leader.own_address)
        return Joined(leader, config, Limits(**said["limits"]), NodePlace(nodes, at.number, {}, peers))
    except BaseException:
        leader.close()
        raise


def _admit_peers(
    listener: socket.socket, secret: bytes, nodes: RankNodes, node: int
) -> dict[int, dict[int, socket.socket]]:
    """Connections of ranks on later nodes to ranks of this one."""
    pairs = {
        other: rank
        for rank in nodes.ranks_of(node)
        for other in nodes.peers(rank)
        if nodes.node_of(other) > node
    }
    found: dict[int, dict[int, socket.socket]] = {}
    numbers = [_LINK + other for other in pairs]
    for number, sock in admit(listener, secret, numbers, "the connection of a rank", JOIN_SECONDS):
        found.setdefault(pairs[number - _LINK], {})[number - _LINK] = sock
    return found


def _admit_peers_between(
    at: Launched,
    listener: socket.socket,
    nodes: RankNodes,
    addresses: Mapping[int, tuple[str, int]],
    own: str,
) -> dict[int, dict[int, socket.socket]]:
    """Connections of ranks here to those on nodes before, from the address `own`, and of those on later ones."""
    made: dict[int, dict[int, socket.socket]] = {}
    for rank in nodes.ranks_of(at.number):
        for other in nodes.peers(rank):
            if (node := nodes.node_of(other)) < at.number:
                host, port = addresses[node]
                towards = replace(at, number=_LINK + rank, address=host, port=port)
                made.setdefault(rank, {})[other] = join(towards, own=own)
    for rank, some in _admit_peers(listener, at.secret, nodes, at.number).items():
        made.setdefault(rank, {}).update(some)
    return made
