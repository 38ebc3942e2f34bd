"""A new version of a model without an outage: load it beside the old one, verify, switch, drain, give back."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from quire.engine.build.opening import find_model
from quire.routing.traffic import RuleBody
from quire.server.errors import ApiError, bad_request, shorten
from quire.server.fleet.fleet import Fleet, check_shares
from quire.server.fleet.member import Member
from quire.server.fleet.pulls import PROCESS_BYTES
from quire.server.fleet.shadows import text_of
from quire.server.fleet.shares import with_share
from quire.server.inner_request import ask_inner
from quire.types import QuireError
from quire.util.sizes import format_size

logger = logging.getLogger("quire.server")

_PIECE = 2**20


class CanaryBody(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt, and the text that the greedy answer to it must be; without a text any answer will do."""

    prompt: str
    text: str | None = None
    max_tokens: int = 16


class DeployBody(msgspec.Struct, forbid_unknown_fields=True):
    """A new version of a model. `sha256`: digests that its files must have. `switch` false leaves it beside the version
    that answers, for a split or a shadow. `swap` allows to drain the old one first where both do not fit. `keep` keeps
    the old one loaded for an instant way back.
    """

    name: str
    path: str
    memory: int | None = None
    sha256: dict[str, str] = {}
    canary: CanaryBody | None = None
    switch: bool = True
    swap: bool = False
    keep: bool = False


class Deployments:
    """Changes of the versions of a fleet, one at a time."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._turn = fleet, asyncio.Lock()
        self._before: dict[str, str] = {}  # name -> the version that answered before the one that does

    async def deploy(
        self, asked: DeployBody, watching: Callable[[], AbstractAsyncContextManager[object]] = nullcontext
    ) -> Member:
        """Load and verify a version, and switch to it if asked. The old version answers until then, and goes on
        answering if anything fails, or if `watching` ends what it surrounds: loading beside the old version. Raises
        ApiError: 404, 409 where both do not fit, 422 for a version that is not as it should be.
        """
        fleet = self._fleet
        if asked.name not in fleet.current:
            raise ApiError(
                404,
                f"name: {shorten(asked.name, 200)!r} is not a model",
                code="model_not_found",
                param="name",
            )
        async with self._turn:
            old = fleet.members[fleet.current[asked.name]]
            size, fits = self._room(asked, old)
            served = replace(with_share(old.served, size), model=asked.path)
            number = 1 + max(
                each.version for each in fleet.members.values() if each.served.name == asked.name
            )
            await self._check_files(asked)
            if (
                not fits
            ):  # before the old one is drained; what is loaded beside it is planned when it is loaded
                with fleet.ledger.spare(PROCESS_BYTES) as there:  # else it is found when the old one is gone
                    try:
                        await check_shares([served] if there else [])
                    except QuireError as error:
                        raise _refused(str(error)) from None
            placed = old.places is not None
            member = fleet.add(served, number, placed=placed)
            fleet.added(member)
            if not placed:
                fleet.shares = fleet.shares.with_model(member.id, size if fits else 0)
            try:
                if fits:
                    async with watching():
                        await self._verify(asked, member)
                    self._accept(asked, member)
                else:
                    await self._swapped(asked, old, member)
            except BaseException:
                await self._remove(member)
                raise
            if asked.switch:
                await self._retire(old, keep=asked.keep and fits)
                if not placed:
                    fleet.shares = fleet.shares.with_model(member.id, size)
            return member

    async def serve_stored(self, name: str) -> None:
        """Serve a model of the store under its name; where another version of it was served, in its place. Models that
        were named at the start stay as they are. Raises ApiError.
        """
        fleet = self._fleet
        async with self._turn:
            path = str(await asyncio.to_thread(find_model, name))
            before = fleet.members.get(fleet.current.get(name, ""))
            if (before is None and name in fleet.rules) or (before is not None and not before.served.stored):
                return
            if before is not None and before.served.model == path:
                return
            member = fleet.add_stored(name, path)
            fleet.added(member)
            fleet.set_rules(fleet.extra, {**fleet.current, name: member.id})
            if before is not None:
                await self._retire(before, keep=False)

    async def drop(self, name: str) -> None:
        """Serve a model of the store no longer. Raises ApiError 409 where it is needed."""
        fleet = self._fleet
        async with self._turn:
            if name not in fleet.current:
                return
            current = {other: of for other, of in fleet.current.items() if other != name}
            mine = [each for each in fleet.members.values() if each.served.name == name]
            if not current or not all(each.served.stored for each in mine):
                raise ApiError(
                    409, f"model: {name} was named when the server started", code="in_use", param="model"
                )
            try:
                for each in mine:
                    fleet.set_rules(fleet.extra, current, without=each.id)
            except ValueError as error:
                raise ApiError(
                    409, f"model: {name} is in a rule: {error}", code="in_use", param="model"
                ) from None
            for each in mine:
                await self._remove(each)

    async def back(self, name: str) -> Member:
        """Switch to the version that answered before, which was kept. Raises ApiError 409 if there is none."""
        fleet = self._fleet
        async with self._turn:
            before = fleet.members.get(self._before.get(name, ""))
            if before is None:
                message = f"name: no earlier version of {shorten(name, 200)!r} was kept"
                raise ApiError(409, message, code="nothing_to_go_back_to", param="name")
            await _load(before)
            self._switch(before)
            return before

    async def remove(self, of: str) -> None:
        """Drain and remove a version that answers no name. Raises ApiError 404 and 409."""
        member = self._fleet.members.get(of)
        if member is None:
            raise ApiError(404, f"{shorten(of, 200)!r} is not a version", code="model_not_found")
        async with self._turn:
            if of in self._fleet.current.values():
                raise ApiError(409, f"{of} answers requests: deploy another version first", code="in_use")
            try:
                self._fleet.set_rules(self._fleet.extra, self._fleet.current, without=of)
            except ValueError as error:
                raise ApiError(409, f"{of} is in a rule: {error}", code="in_use") from None
            await self._remove(member)

    async def set_rules(self, asked: Mapping[str, RuleBody]) -> None:
        """Replace all rules at once. Raises ApiError 400 for rules that lead nowhere."""
        rules = {name: body.rule() for name, body in asked.items()}
        async with self._turn:
            try:
                self._fleet.set_rules(rules, self._fleet.current)
            except ValueError as error:
                raise bad_request("rules", f"rules: {error}") from None

    async def _verify(self, asked: DeployBody, member: Member) -> None:
        await _load(member)
        await self._try_canary(asked, member)

    def _accept(self, asked: DeployBody, member: Member) -> None:
        if asked.switch:
            self._switch(member)
        else:  # from now on rules, and requests, may name it
            self._fleet.set_rules(self._fleet.extra, self._fleet.current)

    async def _swapped(self, asked: DeployBody, old: Member, member: Member) -> None:
        """Drain the old version, load the new one in its place; requests wait meanwhile. The old one comes back if
        it fails.
        """
        old.swap = asyncio.get_running_loop().create_future()
        try:
            await old.drained(self._fleet.config.shutdown_timeout)
            if old.state == "ready":
                await old.sleep(2, self._fleet.config.shutdown_timeout, held=False)
            try:
                await self._verify(asked, member)
                self._accept(asked, member)
            except BaseException:
                await member.stop(0.0)
                raise
        finally:
            old.swap.set_result(None)
            old.swap = None

    def _switch(self, member: Member) -> None:
        """Requests from now on go to this version."""
        fleet, name = self._fleet, member.served.name
        before = fleet.current[name]
        fleet.set_rules(fleet.extra, {**fleet.current, name: member.id})
        self._before[name] = before
        logger.info("%s answers in place of %s", member.id, before)

    async def _retire(self, old: Member, *, keep: bool) -> None:
        """Let the requests of a version end, and give its memory back, unless it is kept or a rule names it."""
        if keep:
            return
        try:
            self._fleet.set_rules(self._fleet.extra, self._fleet.current, without=old.id)
        except ValueError:
            return  # a rule of an administrator sends requests there
        await self._remove(old)

    async def _remove(self, member: Member) -> None:
        fleet = self._fleet
        fleet.set_rules(fleet.extra, fleet.current, without=member.id)
        await member.drained(fleet.config.shutdown_timeout)
        fleet.members.pop(member.id, None)
        await member.stop(self._fleet.config.shutdown_timeout)
        await member.service.stop_alone()
        fleet.shares = fleet.shares.with_model(member.id, 0)
        if self._before.get(member.served.name) == member.id:
            del self._before[member.served.name]

    def _share(self, member: Member) -> int:
        return self._fleet.shares.models.get(member.id, 0)

    def _room(self, asked: DeployBody, old: Member) -> tuple[int, bool]:
        """The memory of a new version, and whether it fits beside the old one. Raises ApiError."""
        free, places = self._fleet.shares.free, old.places
        if places is not None:
            if asked.memory not in {None, places.size}:
                message = (
                    f"memory: {asked.name} takes one of {places.count} places of {format_size(places.size)}"
                )
                raise bad_request("memory", message)
            if places.count == 1 and not (asked.swap and asked.switch):
                message = "memory: there is one place for a model at a time; swap: true drains the old version first"
                raise ApiError(409, message, code="does_not_fit", param="memory")
            return places.size, places.count > 1
        size = asked.memory or old.served.config.limits.memory or 0
        fits = size <= free
        if not fits and not (asked.swap and asked.switch and size <= free + self._share(old)):
            raise ApiError(409, self._why_not(asked, old, size), code="does_not_fit", param="memory")
        return size, fits

    def _why_not(self, asked: DeployBody, old: Member, size: int) -> str:
        free = self._fleet.shares.free
        left = format_size(max(0, free))
        where = f"memory: a share of {format_size(size)} beside {old.id} is over the {left} that are free"
        if asked.switch and size <= free + self._share(old):
            return (
                f"{where}; with swap: true {old.id} is drained first, and requests wait for the new version"
            )
        return where

    async def _check_files(self, asked: DeployBody) -> None:
        """Raise ApiError 422 for files that are missing, or differ from their digests."""
        try:
            path = await asyncio.to_thread(find_model, asked.path)
        except (QuireError, OSError) as error:
            raise _refused(f"path: {error}") from None
        folder = path.parent if path.is_file() else path
        for name, digest in asked.sha256.items():
            if Path(name).name != name:
                raise bad_request("sha256", f"sha256: {shorten(name, 200)!r} is not the name of a file")
            try:
                found = await asyncio.to_thread(_sha256, folder / name)
            except OSError as error:
                raise _refused(f"sha256: {name}: {error.strerror or error}") from None
            if found != digest.lower():
                raise _refused(f"sha256: {name} has {found}, not {shorten(digest, 80)}")

    async def _try_canary(self, asked: DeployBody, member: Member) -> None:
        """Raise ApiError 422 unless the version answers the canary as it should."""
        if asked.canary is None:
            return
        body: dict[str, Any] = {
            "model": asked.name, "prompt": asked.canary.prompt, "max_tokens": asked.canary.max_tokens, "temperature": 0,
        }  # fmt: skip
        service = member.service
        answer = await ask_inner(
            service.app, service.memory, "/v1/completions", msgspec.json.encode(body), ""
        )
        if answer.status != 200:
            raise _refused(
                f"canary: answered with {answer.status}: {shorten(answer.body.decode('utf-8', 'replace'), 300)}"
            )
        text = text_of(answer.body)
        if asked.canary.text is not None and text != asked.canary.text:
            raise _refused(
                f"canary: the answer is {shorten(text, 200)!r}, not {shorten(asked.canary.text, 200)!r}"
            )


async def _load(member: Member) -> None:
    try:
        await member.load()
    except (QuireError, ValueError, OSError, MemoryError) as error:
        raise _refused(f"{member.id} cannot be loaded: {error}") from None


def _refused(why: str) -> ApiError:
    return ApiError(422, f"{why}; nothing was changed", code="version_refused")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
