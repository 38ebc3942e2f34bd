"""The file of a stack, read again while it is up.

What is new starts, what has changed starts again, one part after another, and what is gone ends.
"""

from __future__ import annotations

import asyncio
import os

from quire.cli.stack_life import KINDS, ROUTER, StackLife
from quire.cli.stack_parts import StackFiles, StackPart, check_memory, files_of, make_key, parts_of
from quire.config.stack import StackConfig, read_stack


class StackReload:
    """Reads the file again each time that it is asked to. A file that is wrong changes nothing."""

    def __init__(self, life: StackLife) -> None:
        self._life = life
        self._wanted = asyncio.Event()
        self._number = 0
        self._had_terminal = _has_terminal()

    def hang_up(self) -> bool:
        """Read the file again soon; true if the process had a terminal that was closed, and should end instead."""
        self._wanted.set()
        return self._had_terminal and not _has_terminal()

    async def run(self) -> None:
        """Do as asked until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            async with self._life.turn:
                await self._life.left()
                self._number += 1
                self._life.told["reading"] = self._number  # before the file is read
                self._life.tell()
                error = await self._reload()
            self._life.told["reloads"], self._life.told["reload_error"] = self._number, error
            self._life.say(
                ROUTER, f"not reloaded: {error}" if error else f"{self._life.config.file} was read again"
            )
            self._life.tell()

    async def _reload(self) -> str:
        """Change what the file has changed; why that was not possible, or an empty text."""
        life, old = self._life, list(self._life.parts.values())
        try:
            config = read_stack(life.config.file)
            for name in ("name", "state"):
                if getattr(config, name) != getattr(life.config, name):
                    raise ValueError(f"{name}: stays while the stack is up")
            parts = parts_of(config, {each.name: each.port for each in old})
            gone = [each for each in old if each.name not in {part.name for part in parts}]
            check_memory([*parts, *gone])
            life.ports.hold(parts)
            files = files_of(config, parts)
            make_key(config)
        except (ValueError, OSError) as error:
            life.ports.keep(old)
            return str(error)
        try:
            return await self._change(config, parts, files)
        except OSError as error:
            return f"state: {error.filename or config.state}: {error.strerror or error}"
        finally:
            life.ports.keep(list(life.parts.values()))

    async def _change(self, config: StackConfig, parts: list[StackPart], files: StackFiles) -> str:
        life = self._life
        running, names = [*life.made], {each.name for each in parts}
        if not await self._add(config, [each for each in parts if each.name not in running], files):
            return "what is new could not start: nothing has changed"
        life.list_servers([*life.parts.values()])
        for part in _in_order(parts).values():
            changed = part.name in running and files.differs(life.files, part.name)
            if changed and not await self._replace(part, files):
                life.list_servers([*life.parts.values()])
                return f"{part.name}: could not start, and has its old options again; what follows was left"
        gone = [name for name in life.parts if name not in names]
        life.list_servers(parts)
        await life.end(gone)
        for name in gone:
            (config.state / f"{name}.json").unlink(missing_ok=True)
        life.config, life.parts = config, _in_order(parts)
        return ""

    async def _add(self, config: StackConfig, new: list[StackPart], files: StackFiles) -> bool:
        """Start what does not run and should; if a part cannot, all is as before."""
        life, scaled = self._life, {name for each in config.scales for name in each.names}
        before, old = dict(life.parts), _copied(life.files)
        kept, later = scaled & before.keys(), config.later
        life.parts = _in_order([*(before | {each.name: each for each in new}).values()])
        for part in new:
            self._give(part, files)
        names = [each.name for each in new if each.name not in kept and each.name not in later]
        if await life.start(names):
            return True
        await life.end(names)
        life.parts = before
        for part in new:
            if part.name in before:
                self._give(before[part.name], old)
        return False

    async def _replace(self, part: StackPart, files: StackFiles) -> bool:
        """Start a part again with other options; with its old ones if it cannot with those."""
        life = self._life
        old, old_files = life.parts[part.name], _copied(life.files)
        runs = part.name in life.made
        await life.end([part.name])
        self._give(part, files)
        if not runs or await life.start([part.name]):
            return True
        await life.end([part.name])
        self._give(old, old_files)
        await life.start([part.name])
        return False

    def _give(self, part: StackPart, files: StackFiles) -> None:
        """A part has other options from its next start on."""
        life, file = self._life, f"{part.name}.json"
        life.parts[part.name] = part
        life.files.commands[part.name] = files.commands[part.name]
        if file in files.texts:
            life.files.texts[file] = files.texts[file]
            life.write(file, files.texts[file])


def _copied(files: StackFiles) -> StackFiles:
    return StackFiles(dict(files.commands), dict(files.texts))


def _in_order(parts: list[StackPart]) -> dict[str, StackPart]:
    """By name, in the order in which they start."""
    return {each.name: each for each in sorted(parts, key=lambda part: KINDS.index(part.kind))}


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
