"""Network namespaces with ways of known lengths between them: packets cross by TUN devices, each after its delay.

python -m helpers.far_places NAMESPACE=SECONDS … connects the namespace it is started in, where it is 10.98.0.1, with
each of those, which are 10.98.1.2, 10.98.2.2, … and have a default route. What it reads on standard input changes ways:
"NAMESPACE SECONDS", "NAMESPACE cut", which drops all packets, or "NAMESPACE unruly", which loses, doubles, damages and
delays some of them. It says "ready" first. Needs root and /dev/net/tun.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import random
import shutil
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

_SETUP = 0x400454CA  # TUNSETIFF
_TUN_WITHOUT_HEADER = 0x1001
_PACKET = 65536
_NEW_NETWORK = 0x40000000


def _tun(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _SETUP, struct.pack("16sH", name.encode(), _TUN_WITHOUT_HEADER))
    return fd


def _enter(namespace: int) -> None:
    """os.setns of Python 3.12."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Way:
    """Two devices, and what is on the way between them."""

    def __init__(self, number: int, namespace: str, seconds: float, hub: str) -> None:
        self.seconds, self.cut, self.unruly = seconds, False, False
        self._rng = random.Random(number)
        near, far = f"way{number}", "way"
        self._near = _tun(near)
        _ip("addr", "add", "10.98.0.1", "peer", f"10.98.{number}.2", "dev", near)
        _ip("link", "set", near, "up")
        self._far = self._made_in(namespace, far, hub)
        _ip("-n", namespace, "addr", "add", f"10.98.{number}.2", "peer", "10.98.0.1", "dev", far)
        for device in ("lo", far):
            _ip("-n", namespace, "link", "set", device, "up")
        _ip("-n", namespace, "route", "add", "default", "dev", far)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._near, self._carry, self._near, self._far)
        loop.add_reader(self._far, self._carry, self._far, self._near)

    @staticmethod
    def _made_in(namespace: str, name: str, hub: str) -> int:
        with Path("/run/netns", namespace).open() as there, Path("/run/netns", hub).open() as here:
            _enter(there.fileno())
            try:
                return _tun(name)
            finally:
                _enter(here.fileno())

    def _carry(self, source: int, goal: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = os.read(source, _PACKET)
                for each in () if self.cut else (packet,) if not self.unruly else self._spoiled(packet):
                    late = self.seconds * (1 + 3 * (self.unruly and self._rng.random() < 0.1))
                    asyncio.get_running_loop().call_later(late, self._arrives, goal, each)

    def _spoiled(self, packet: bytes) -> tuple[bytes, ...]:
        """What becomes of a packet on an unruly way."""
        match self._rng.randrange(50):
            case 0:
                return ()
            case 1:
                at = self._rng.randrange(len(packet))
                return (packet[:at] + bytes([packet[at] ^ 1 << self._rng.randrange(8)]) + packet[at + 1 :],)
            case 2 | 3:
                return (packet, packet)
        return (packet,)

    def _arrives(self, goal: int, packet: bytes) -> None:
        with contextlib.suppress(OSError):
            if not self.cut:
                os.write(goal, packet)


async def _carry_packets(hub: str, ends: list[str]) -> None:
    ways = {}
    for number, each in enumerate(ends, 1):
        namespace, _, seconds = each.partition("=")
        ways[namespace] = Way(number, namespace, float(seconds), hub)
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        namespace, what = line.split()
        ways[namespace].cut, ways[namespace].unruly = what == "cut", what == "unruly"
        if what not in {"cut", "unruly"}:
            ways[namespace].seconds = float(what)
        print("ready", flush=True)


class FarPlaces:
    """Namespaces around a hub. `names`: the hub, then the others; `addresses` in the same order."""

    def __init__(self, names: list[str], carrier: subprocess.Popen[str]) -> None:
        self.names, self._carrier = names, carrier
        self.addresses = ["10.98.0.1", *(f"10.98.{number}.2" for number in range(1, len(names)))]

    def inside(self, number: int, *command: str) -> list[str]:
        """A command, run in one of them."""
        return ["ip", "netns", "exec", self.names[number], *command]

    def way(self, number: int, what: str | float) -> None:
        """The way to one is of so many seconds from now on, or "cut", or "unruly"."""
        assert self._carrier.stdin is not None
        assert self._carrier.stdout is not None
        self._carrier.stdin.write(f"{self.names[number]} {what}\n")
        self._carrier.stdin.flush()
        assert self._carrier.stdout.readline().strip() == "ready"


@contextlib.contextmanager
def far_places(*seconds: float) -> Iterator[FarPlaces]:
    """A hub, and a namespace for each of these times, which a packet takes on its way to the hub or back. Skips the
    test where that cannot be had, and says so."""
    if os.geteuid() or shutil.which("ip") is None or not Path("/dev/net/tun").exists():
        pytest.skip("network namespaces with delays need root, ip and /dev/net/tun")
    names = [f"quire-{uuid.uuid4().hex[:8]}" for _ in range(len(seconds) + 1)]
    carrier = None
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("-n", names[0], "link", "set", "lo", "up")
            ends = [f"{name}={each}" for name, each in zip(names[1:], seconds, strict=True)]
            command = [sys.executable, "-m", "helpers.far_places", names[0], *ends]
            carrier = subprocess.Popen(
                ["ip", "netns", "exec", names[0], *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            )  # fmt: skip
            assert carrier.stdout is not None
            if carrier.stdout.readline().strip() != "ready":
                pytest.skip("no TUN devices in network namespaces here")
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield FarPlaces(names, carrier)
    finally:
        if carrier is not None:
            carrier.kill()
            carrier.communicate()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


if __name__ == "__main__":
    asyncio.run(_carry_packets(sys.argv[1], sys.argv[2:]))
