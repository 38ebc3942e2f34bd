"""How many servers of each table of a stack run: as many as its router says that their load needs."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from quire.cli.stack_life import FAILED_PAUSE, ROUTER, StackLife, asked
from quire.config.stack import StackScale
from quire.routing.servers_needed import ScalingRule

_LOOK = 0.25  # seconds between two looks at the load


class _Health(msgspec.Struct):
    needed: dict[str, float]  # by table


class StackScaling:
    """Starts servers and has them end, between the bounds of the file."""

    def __init__(self, life: StackLife) -> None:
        self._life = life
        self._rules: dict[str, ScalingRule] = {}  # by table
        self._failed: dict[str, float] = {}  # servers that never worked, and when that was seen

    async def run(self) -> None:
        """Follow the load until cancelled."""
        while True:
            await asyncio.sleep(_LOOK)
            scales = self._life.config.scales
            self._rules = {
                each.table: self._rules[each.table] for each in scales if each.table in self._rules
            }
            if not scales:
                continue
            _, body = await asked(self._life.parts[ROUTER].url, "/health")
            try:
                needed = msgspec.json.decode(body, type=_Health).needed
            except msgspec.MsgspecError:  # it starts, or is overloaded: what runs stays
                continue
            async with self._life.turn:
                if self._life.config.scales == scales:
                    told = [  # what the router does not know yet stays as it is
                        self._follow(each, needed[each.table], time.monotonic())
                        for each in scales
                        if each.table in needed
                    ]
                    self._life.told["scales"] = told

    def _follow(self, scale: StackScale, needed: float, now: float) -> dict[str, Any]:
        running, rule = self._running(scale, now), self._rules.get(scale.table)
        if rule is None or rule.bounds != scale.bounds:
            rule = self._rules[scale.table] = ScalingRule(scale.bounds, len(running), now)
        wanted = rule.servers(needed, now)
        leaving = self._life.leaving
        able = [name for name in scale.names if name not in running and name not in leaving]
        for name in able[: max(wanted - len(running), 0)]:
            if name not in self._failed:
                self._life.say(name, f"{needed:g} servers are needed: {name} starts")
                self._life.launch(name)
        for name in running[wanted:]:
            self._life.say(name, f"{needed:g} servers are needed: {name} ends")
            self._life.leave(name)
        return {"table": scale.where, "needed": needed, "wanted": wanted}

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
