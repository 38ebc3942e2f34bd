"""How many servers of a stack run: as many as its router says that the load needs."""

from __future__ import annotations

import asyncio
import time

import msgspec

from quire.cli.stack_life import FAILED_PAUSE, ROUTER, StackLife, asked
from quire.config.stack import StackScale
from quire.routing.servers_needed import ScalingRule

_LOOK = 0.25  # seconds between two looks at the load


class _Health(msgspec.Struct):
    replicas_needed: float


class StackScaling:
    """Starts servers and has them end, between the bounds of the file."""

    def __init__(self, life: StackLife) -> None:
        self._life = life
        self._rule: ScalingRule | None = None
        self._failed: dict[str, float] = {}  # servers that never worked, and when that was seen

    async def run(self) -> None:
        """Follow the load until cancelled."""
        while True:
            await asyncio.sleep(_LOOK)
            scale = self._life.config.scale
            if scale is None:
                self._rule = None
                continue
            _, body = await asked(self._life.parts[ROUTER].url, "/health")
            try:
                needed = msgspec.json.decode(body, type=_Health).replicas_needed
            except msgspec.MsgspecError:  # it starts, or is overloaded: what runs stays
                continue
            async with self._life.turn:
                if self._life.config.scale == scale:
                    self._follow(scale, needed, time.monotonic())

    def _follow(self, scale: StackScale, needed: float, now: float) -> None:
        running = self._running(scale, now)
        if self._rule is None or self._rule.bounds != scale.bounds:
            self._rule = ScalingRule(scale.bounds, len(running), now)
        wanted = self._rule.servers(needed, now)
        self._life.told["scale"] = {"needed": needed, "wanted": wanted}
        leaving = self._life.leaving
        able = [name for name in scale.names if name not in running and name not in leaving]
        for name in able[: max(wanted - len(running), 0)]:
            if name not in self._failed:
                self._life.say(name, f"{needed:g} servers are needed: {name} starts")
                self._life.launch(name)
        for name in running[wanted:]:
            self._life.say(name, f"{needed:g} servers are needed: {name} ends")
            self._life.leave(name)

    def _running(self, scale: StackScale, now: float) -> list[str]:
        """The servers that work or start. One that never worked is tried again after a while."""
        life = self._life
        for name in scale.names:
            made = life.made.get(name)
            if made is not None and made.state == "failed":
                life.say(name, f"{name} {made.why} before it worked")
                del life.made[name]
                self._failed[name] = now
        self._failed = {name: at for name, at in self._failed.items() if now - at < FAILED_PAUSE}
        return [name for name in scale.names if name in life.made and name not in life.leaving]
