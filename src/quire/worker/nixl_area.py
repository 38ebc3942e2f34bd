"""Contents of blocks through NIXL in place of a stream (worker.shared_area has the same calls): `via=nixl`.

Each side has an agent for the connection and memory that it registers: slots for what it sends, and a place for what it
takes. The two say over the authenticated connection where their memory is. Who takes a content reads it from a slot of
the other side; its sum is checked after that, as always, since NIXL proves nothing. NIXL is imported by name.
"""

from __future__ import annotations

import contextlib
import importlib
import time
import uuid
from typing import Any

import numpy as np

from quire.worker.kv_wire import WireError

MODULE = "nixl._api"
AGENT_BYTES = 32 * 2**20  # of an agent with UCX; see docs/kv_cache.md
_TAKE_SECONDS = 1.0
_POLL_SECONDS = 2e-5


class NixlArea:
    """One side: `slots` contents of `size` bytes to send, and a place for one that comes.

    Raises WireError for all that NIXL cannot do, and where it is not installed.
    """

    def __init__(self, size: int, slots: int) -> None:
        self.size, self.slots = size, slots
        self._put = self._taken = 0
        self._memory = np.zeros((slots + 1) * size, np.uint8)
        self._theirs: tuple[str, int, int] | None = None  # agent, address, slots
        with _told():
            self._agent: Any = importlib.import_module(MODULE).nixl_agent(uuid.uuid4().hex)
            where = [(self.address, self._memory.nbytes, 0, "")]
            self._registered = self._agent.register_memory(where, mem_type="DRAM")

    @property
    def address(self) -> int:
        """Where the slots begin."""
        return int(self._memory.ctypes.data)

    @property
    def metadata(self) -> bytes:
        """What the other side needs to know of this agent."""
        with _told():
            return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes, address: int, slots: int) -> None:
        """Take contents from the slots of another side from now on."""
        with _told():
            name = self._agent.add_remote_agent(metadata)
        self._theirs = name, address, slots

    def put(self, content: bytes | bytearray | memoryview) -> None:
        """Copy a content of `size` bytes into the next slot."""
        at = self._put % self.slots * self.size
        self._put += 1
        np.copyto(self._memory[at : at + self.size], np.frombuffer(content, np.uint8))

    def take(self, room: memoryview) -> None:
        """Read the next content of the other side."""
        if self._theirs is None:
            raise WireError("NIXL: no other side")
        name, address, slots = self._theirs
        at = address + self._taken % slots * self.size
        self._taken += 1
        place = self._memory[self.slots * self.size :]
        agent, until = self._agent, time.monotonic() + _TAKE_SECONDS
        with _told():
            local = agent.get_xfer_descs([(int(place.ctypes.data), self.size, 0)], mem_type="DRAM")
            remote = agent.get_xfer_descs([(at, self.size, 0)], mem_type="DRAM")
            handle = agent.initialize_xfer("READ", local, remote, name)
            try:
                state = agent.transfer(handle)
                while state == "PROC" and time.monotonic() < until:
                    time.sleep(_POLL_SECONDS)
                    state = agent.check_xfer_state(handle)
            finally:
                agent.release_xfer_handle(handle)
        if state != "DONE":
            raise WireError(f"NIXL: a content was not read: {'late' if state == 'PROC' else state}")
        np.copyto(np.frombuffer(room, np.uint8), place)

    def close(self) -> None:
        """Give everything back; again, nothing."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        with contextlib.suppress(WireError), _told():
            if self._theirs is not None:
                agent.remove_remote_agent(self._theirs[0])
        with contextlib.suppress(WireError), _told():
            agent.deregister_memory(self._registered)


@contextlib.contextmanager
def _told() -> Any:
    """Errors of NIXL, which have classes of its own, as those of a connection."""
    try:
        yield
    except ImportError as error:
        raise WireError(f"NIXL: {error}") from None
    except OSError:
        raise
    except Exception as error:
        raise WireError(f"NIXL: {error or type(error).__name__}") from error
