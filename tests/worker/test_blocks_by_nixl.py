"""Blocks through NIXL: the calls are those of its documented Python API, whose rules a module checks that stands in for
it; and NIXL itself where it is installed."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar

import pytest

from quire.config.kv_tiers import parse_tiers
from quire.worker import kv_server, remote_tier
from quire.worker.kv_server import KvServer
from quire.worker.kv_wire import UNANSWERED, WireError
from quire.worker.nixl_area import NixlArea
from quire.worker.remote_tier import RemoteTier

from .keeping import BLOCK, MARK, fetch, keep, name_of, serving, wait

KEY = b"a key that both sides have"
_HERE = importlib.util.find_spec("nixl") is not None


class NotAllowedError(Exception):
    """As NIXL's own, it is derived from no error of Python's."""


class XferDescs(list[tuple[int, int, int]]):
    """What get_xfer_descs returns."""


class Handle:
    def __init__(self, source: int, target: int, size: int) -> None:
        self.source, self.target, self.size = source, target, size
        self.posted, self.released, self.asked = False, False, 0


class Agent:
    """An agent that reads memory of others in this process, once they have registered it, and are known by their
    metadata. A read is done when it was asked for twice."""

    agents: ClassVar[dict[str, Agent]] = {}
    reads: ClassVar[int] = 0
    state: ClassVar[str] = "DONE"  # how reads end
    flips: ClassVar[bool] = False

    def __init__(self, agent_name: str, nixl_conf: Any = None, instantiate_all: bool = False) -> None:
        assert isinstance(agent_name, str)
        self.name, self.regions, self.known = agent_name, list[tuple[int, int]](), set[str]()
        self.handles: list[Handle] = []
        self.agents[agent_name] = self

    def register_memory(
        self,
        reg_list: list[tuple[int, int, int, str]],
        mem_type: str | None = None,
        backends: list[str] | None = None,
    ) -> list[tuple[int, int, int, str]]:
        assert mem_type == "DRAM"
        self.regions += [(address, length) for address, length, device, meta in reg_list]
        return reg_list

    def deregister_memory(
        self, dereg_list: list[tuple[int, int, int, str]], backends: list[str] | None = None
    ) -> None:
        for address, length, _, _ in dereg_list:
            self.regions.remove((address, length))
        del self.agents[self.name]
        assert all(handle.released for handle in self.handles)

    def get_agent_metadata(self) -> bytes:
        return b"metadata of " + self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        before, _, name = metadata.partition(b" of ")
        if before != b"metadata" or name.decode() not in self.agents:
            raise NotAllowedError("NIXL_ERR_MISMATCH")
        self.known.add(name.decode())
        return name

    def remove_remote_agent(self, agent: bytes) -> None:
        self.known.remove(agent.decode())

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str | None = None) -> XferDescs:
        assert mem_type == "DRAM"
        assert all(len(each) == 3 for each in descs)
        return XferDescs(descs)

    def initialize_xfer(
        self, operation: str, local_descs: XferDescs, remote_descs: XferDescs, remote_agent: bytes,
        notif_msg: bytes = b"", backends: list[str] | None = None,
    ) -> Handle:  # fmt: skip
        assert operation == "READ"
        assert isinstance(local_descs, XferDescs)
        assert isinstance(remote_descs, XferDescs)
        if remote_agent.decode() not in self.known or remote_agent.decode() not in self.agents:
            raise NotAllowedError("NIXL_ERR_NOT_FOUND")
        (local,), (remote,) = local_descs, remote_descs
        for (address, length, _), agent in ((local, self), (remote, self.agents[remote_agent.decode()])):
            if not any(at <= address and address + length <= at + size for at, size in agent.regions):
                raise NotAllowedError("NIXL_ERR_INVALID_PARAM")
        assert local[1] == remote[1]
        self.handles.append(Handle(remote[0], local[0], local[1]))
        return self.handles[-1]

    def transfer(self, handle: Handle, notif_msg: bytes = b"") -> str:
        assert not handle.posted
        handle.posted = True
        return "PROC"

    def check_xfer_state(self, handle: Handle) -> str:
        assert handle.posted
        assert not handle.released
        handle.asked += 1
        if self.state == "DONE" and handle.asked == 2:
            ctypes.memmove(handle.target, handle.source, handle.size)
            if self.flips:
                ctypes.c_ubyte.from_address(handle.target).value ^= 1
            type(self).reads += 1
        return "PROC" if handle.asked < 2 else self.state

    def release_xfer_handle(self, handle: Handle) -> None:
        assert not handle.released
        handle.released = True


@pytest.fixture(
    params=["stand-in", pytest.param("nixl", marks=pytest.mark.skipif(not _HERE, reason="needs nixl"))]
)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("quire.worker.kept_blocks._LOOK_SECONDS", 0.05)
    monkeypatch.setattr("quire.worker.outages.PAUSES", (0.05, 0.1))
    if request.param == "stand-in":
        package, module = ModuleType("nixl"), ModuleType("nixl._api")
        module.nixl_agent = Agent  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "nixl", package)
        monkeypatch.setitem(sys.modules, "nixl._api", module)
        monkeypatch.setattr(Agent, "reads", 0)
    yield request.param
    assert not Agent.agents, "each was given back"


@contextlib.contextmanager
def tier_of(server: KvServer, *, nixl: bool = True) -> Iterator[RemoteTier]:
    made = RemoteTier(("127.0.0.1", server._listener.getsockname()[1]), KEY, BLOCK, MARK, nixl=nixl)
    try:
        yield made
    finally:
        made.close()


def test_blocks_go_there_and_back(kind: str) -> None:
    count = 3 * UNANSWERED + 1
    with serving(KEY, nixl=True) as server, tier_of(server) as first, tier_of(server) as second:
        keep(first, *range(count))
        wait(lambda: second.holds(name_of(count - 1)))
        assert fetch(second, *range(count)) == [*range(count)]
        assert (server.refused, first.damaged, second.damaged) == (0, 0, 0)
        assert kind == "nixl" or Agent.reads == 2 * count


def test_an_engine_without_it_shares_the_server(kind: str) -> None:
    del kind
    with serving(KEY, nixl=True) as server, tier_of(server) as first, tier_of(server, nixl=False) as second:
        keep(first, 1)
        wait(lambda: second.holds(name_of(1)))
        assert fetch(second, 1) == [1]


def test_a_server_has_agents_for_a_few(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Each takes memory beside the blocks; those of connections that have ended are for others."""
    del kind
    most = kv_server.MOST_AGENTS
    with serving(KEY, nixl=True) as server:
        monkeypatch.setattr(kv_server, "MOST_AGENTS", 0)
        with tier_of(server) as tier:
            wait(lambda: server.refused > 0)
            assert fetch(tier, 1) == []
        monkeypatch.setattr(kv_server, "MOST_AGENTS", most)
        with tier_of(server) as first:
            keep(first, 1)
            wait(lambda: first.holds(name_of(1)))
            assert fetch(first, 1) == [1]
            assert 0 < len(server._agents) <= most
        wait(lambda: not server._agents)


def test_a_server_without_it_is_not_used(kind: str) -> None:
    del kind
    with serving(KEY) as server, tier_of(server) as tier:
        wait(lambda: tier._outages.was_up)
        assert not tier.works
        assert fetch(tier, 1) == []


@pytest.mark.parametrize("kind", ["stand-in"], indirect=True)
def test_what_came_otherwise_or_not_at_all_is_not_used(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    del kind
    monkeypatch.setattr("quire.worker.nixl_area._TAKE_SECONDS", 0.05)
    with serving(KEY, nixl=True) as server, tier_of(server) as tier:
        keep(tier, 1)
        monkeypatch.setattr(Agent, "flips", True)
        assert fetch(tier, 1) == []
        assert tier.damaged == 1
        monkeypatch.setattr(Agent, "flips", False)
        wait(lambda: name_of(1) not in tier._names)
        keep(tier, 2)
        for state in ("ERR", "PROC"):
            wait(lambda: tier.works)
            monkeypatch.setattr(Agent, "state", state)
            assert fetch(tier, 2) == []
            monkeypatch.setattr(Agent, "state", "DONE")
        wait(lambda: tier.works and fetch(tier, 2) == [2])


def test_without_the_package_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(WireError, match="NIXL: "):
        NixlArea(BLOCK, 1)
    with serving(KEY, nixl=True) as server, tier_of(server) as tier:
        wait(lambda: tier._outages.was_up)
        assert not tier.works
    assert "NIXL: " in capfd.readouterr().err


def test_the_option() -> None:
    assert parse_tiers("remote=a:1:k,via=nixl").nixl
    assert not parse_tiers("remote=a:1:k").nixl
    for wrong in ("via=nixl", "remote=/kv.sock:k,via=nixl", "remote=a:1:k,via=ucx"):
        with pytest.raises(ValueError, match="kv_tiers: via: "):
            parse_tiers(wrong)
    plain = remote_tier.remote_bytes(BLOCK)
    assert remote_tier.remote_bytes(BLOCK, nixl=True) > plain + 9 * BLOCK
