"""The host of the leading rank, as it leads the other hosts (nodes) that a model's ranks are on.

Each of the others has the memory that ranks share once more, with one layout. What the leading rank says goes to all of
them with what it has changed in that memory; what their ranks leave comes back, and goes on to the node that needs it.
"""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from quire import _native
from quire.engine.build.node_frames import LOOK_SECONDS, BadFrameError, NodeFrame, Said
from quire.engine.build.node_place import NodePlace
from quire.executor.mapped import shared_bytes
from quire.executor.ranked import MemoryPiece

COMMAND = struct.Struct("<10i")
SOME = struct.Struct("<HHH")  # a node, and ranks: the first and how many
RESULT = struct.Struct("<iQQ")  # of a rank: what it says, and for how long it has worked and waited
RANK = struct.Struct("<H")
SLOTS_BYTES = 2**20


class LeadingNode:
    """The other nodes, as the leading one sees them. Implements executor.ranked.OtherNodes.

    `heard(rank, message)`: what ranks there say; `lost(reason)`: a node has ended or does not answer. Both are called
    from threads.
    """

    def __init__(
        self, place: NodePlace, ranks: _native.SharedRanks, nbytes: int,
        heard: Callable[[int, dict[str, str]], None], lost: Callable[[str], None], leading: int,
    ) -> None:  # fmt: skip
        self.count, self._place, self._ranks = place.count, place, ranks
        self.peers: Mapping[int, int] = {
            other: sock.fileno() for other, sock in place.peers.get(leading, {}).items()
        }
        self._memory = shared_bytes(ranks, nbytes)
        self._heard, self._lost, self._closing = heard, lost, threading.Event()
        self._telling = threading.Lock()  # while some nodes know of a command, and others do not yet
        self._threads = [threading.Thread(target=self._watch, name="quire-nodes", daemon=True)]
        for node in place.connections:
            self._threads.append(
                threading.Thread(target=self._receive, args=(node,), name=f"quire-node-{node}", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def say(self, command: Sequence[int], pieces: Sequence[MemoryPiece]) -> None:
        """See OtherNodes.say; a node that has left is lost, and so is what runs."""
        with self._telling:
            for node in self._place.connections:
                self._send(node, Said.COMMAND, COMMAND.pack(*command), pieces)

    def send_slots(self, rank: int, content: bytes | memoryview) -> None:
        """Send bytes to the socket of a rank. Raises OSError when its node has left."""
        connection = self._place.connections[self._place.nodes.node_of(rank)]
        whole = memoryview(content)
        for at in range(0, len(whole), SLOTS_BYTES):  # commands may go between two pieces
            connection.send(Said.SLOTS, RANK.pack(rank) + bytes(whole[at : at + SLOTS_BYTES]))

    def expect_end(self) -> None:
        """From now on nodes that end were told to."""
        self._closing.set()

    def leave(self, reason: str) -> None:
        """Tell all nodes that the ranks end, and why."""
        self._closing.set()
        for connection in self._place.connections.values():
            connection.tell(Said.LOST, reason.encode())

    def close(self) -> None:
        """End all connections."""
        self._closing.set()
        watch, *others = self._threads
        for thread in (watch, None, *others):
            if thread is None:
                for connection in self._place.connections.values():
                    connection.close()
            elif thread is not threading.current_thread():
                thread.join()

    def _send(self, node: int, kind: Said, text: bytes, pieces: Sequence[MemoryPiece] = ()) -> None:
        try:
            self._place.connections[node].send(kind, text, pieces)
        except OSError as error:
            self._lose(f"node {node} has closed its connection: {error.strerror or error}")

    def _lose(self, reason: str) -> None:
        if not self._closing.is_set():
            self._lost(reason)

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._closing.wait(LOOK_SECONDS):
            passed, looked = time.monotonic() - looked, time.monotonic()
            for node, connection in self._place.connections.items():
                if connection.silent_after(passed):
                    self._lose(f"node {node} does not answer")

    def _receive(self, node: int) -> None:
        connection, why = self._place.connections[node], "has closed its connection"
        try:
            while (frame := connection.receive(self._memory)) is not None:
                if frame.kind == Said.LOST:
                    self._lose(f"node {node}: {frame.text.decode(errors='replace')}")
                    return
                self._take(node, frame)
        except (BadFrameError, ValueError, KeyError, struct.error) as error:
            why = f"says what is not understood: {error}"
        self._lose(f"node {node} {why}")

    def _take(self, sender: int, frame: NodeFrame) -> None:
        if frame.kind == Said.HEARD:
            message = json.loads(frame.text)
            self._heard(int(message.pop("rank")), message)
        elif frame.kind == Said.DONE:
            node, first, count = SOME.unpack_from(frame.text)
            results = [*RESULT.iter_unpack(frame.text[SOME.size :])]
            own = self._place.nodes.ranks_of(sender)
            if (
                not own.start <= first <= first + count <= own.stop
                or node >= self.count
                or len(results) != count
            ):
                raise ValueError(f"ranks {first} to {first + count - 1} of node {sender}")
            if node:
                pieces = [(at, self._memory[at : at + size]) for at, size in frame.pieces[:1]]  # no features
                with (
                    self._telling
                ):  # a node that has not heard of the step yet would wait for what it has had
                    self._send(node, Said.LEFT, SOME.pack(node, first, count), pieces)
            for rank, numbers in zip(range(first, first + count), results, strict=True):
                self._ranks.finished(rank, *numbers)
