"""Run a router, servers and a server of KV blocks on this machine, from one file. docs/stack.md explains it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.stack import StackConfig, read_stack
from quire.types import QuireError
from quire.util.columns import in_columns
from quire.util.sizes import format_size

if TYPE_CHECKING:
    from quire.cli.stack_parts import StackPart

_DOWN_SECONDS = 120.0  # for `down`, beside what the parts may take
_LOOK = 0.1
_FLOCK = "hhqqi4x"  # struct flock of Linux: type, whence, start, length, process
_LOG_TAIL = 20  # lines of the log that are shown when it does not come up


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=("up", "plan", "status", "reload", "down"),
        help="up: start it, and keep it up until it is ended; plan: say what it would take; status: say what it does; "
        "reload: let it do as its file says now, and wait for that; down: end it, and wait for that",
    )  # fmt: skip
    parser.add_argument("file", metavar="STACK.toml", help="what it consists of")
    parser.add_argument(
        "--detach", action="store_true", help="up: go on in the background, once all parts work"
    )
    parser.add_argument("--json", action="store_true", help="plan, status: print one JSON object")


def run(args: argparse.Namespace) -> int:
    config = read_stack(Path(args.file))
    if args.detach and args.action != "up":
        raise ValueError("detach: is for up")
    if args.action == "up":
        return _detached(config, args.file) if args.detach else _up(config)
    return {"plan": _plan, "status": _status, "reload": _reload, "down": _down}[args.action](
        config, as_json=args.json
    )


def _up(config: StackConfig) -> int:
    from quire.cli.stack_life import StackLife
    from quire.cli.stack_parts import HeldPorts, check_memory, parts_of, write_files
    from quire.cli.stack_reload import StackReload
    from quire.cli.stack_scaling import StackScaling

    parts = parts_of(config)
    check_memory(parts)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it means something only once the stack runs
    with _locked(config), contextlib.closing(HeldPorts()) as ports:
        ports.hold(parts)
        for name in _options_in_environment():
            os.environ.pop(name)  # they are of this command, and would be stronger than the files
        with _of_state(config):
            files = write_files(config, parts)

        async def life() -> int:
            made = StackLife(config, parts, files, ports)
            reload = StackReload(made)
            return await made.run(reload.hang_up, reload.run(), StackScaling(made).run())

        return asyncio.run(life())


def _options_in_environment() -> list[str]:
    from quire.config.env import option_variables

    return [*option_variables()]


@contextlib.contextmanager
def _of_state(config: StackConfig) -> Iterator[None]:
    """What fails concerns the folder of the state."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"state: {error.filename or config.state}: {error.strerror or error}") from None


@contextlib.contextmanager
def _locked(config: StackConfig) -> Iterator[None]:
    """The stack is this process's. Raises QuireError if it is up."""
    from quire.cli.stack_parts import own_folder

    with _of_state(config):
        own_folder(config.state)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(config.state / "lock", flags, 0o600)
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            pid = _holder(config)
            raise QuireError(
                f"{config.name} is up already" + (f", as process {pid}" if pid else "")
            ) from None
        yield
    finally:
        os.close(fd)


def _holder(config: StackConfig) -> int | None:
    """The process that has the stack up, as the kernel knows it; to ask takes no lock. Raises QuireError."""
    try:
        fd = os.open(config.state / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    finally:
        os.close(fd)
    if kind == fcntl.F_UNLCK:
        return None
    if pid <= 0:
        raise QuireError(f"{config.name} is up, but its process cannot be seen from this container")
    return int(pid)


def _detached(config: StackConfig, path: str) -> int:
    """Start it in the background, and wait until it works."""
    if (pid := _holder(config)) is not None:
        raise QuireError(f"{config.name} is up already, as process {pid}")
    from quire.cli.stack_parts import own_folder, parts_of

    parts_of(config)  # what is wrong is said here
    log = config.state / "log"
    with _of_state(config):
        own_folder(config.state)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(log, flags, 0o600)
        os.fchmod(fd, 0o600)  # of an older one
    with open(fd, "ab") as file:
        begin = os.fstat(fd).st_size
        made = subprocess.Popen(
            [sys.executable, "-m", "quire.cli.main", "stack", "up", path],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    while made.poll() is None:
        found = _told(config)
        if found.get("pid") == made.pid and found.get("up"):
            print(f"{config.name} is up at {found['url']}; its log is {log}")
            return 0
        time.sleep(_LOOK)
    with log.open("rb") as file:
        file.seek(begin)
        for line in file.read().decode("utf-8", "replace").splitlines()[-_LOG_TAIL:]:
            print(line, file=sys.stderr)
    return 1


def _plan(config: StackConfig, *, as_json: bool) -> int:
    from quire.cli.stack_parts import STACK_PROCESS, memory_of, parts_of
    from quire.util.platform import total_memory

    parts = parts_of(config)
    made = [_planned(each) for each in parts]
    made.append({"name": "stack", "kind": "stack", "url": "", "role": "", "memory": STACK_PROCESS, "parts": {},
                 "error": "", "text": "the process that runs the others"})  # fmt: skip
    taken, there = memory_of(parts), total_memory()
    if as_json:
        print(
            json.dumps(
                {
                    "name": config.name,
                    "state": str(config.state),
                    "parts": made,
                    "memory": taken,
                    "machine": there,
                }
            )
        )
    else:
        rows = [[each["name"], each["url"], format_size(each["memory"]), each["text"]] for each in made]
        print(*in_columns([["part", "address", "memory", "of which"], *rows]), sep="\n")
        print(
            f"\n{format_size(taken)} at most, of {format_size(there)} that this machine has; state: {config.state}"
        )
    fails = taken > there or any(each["error"] for each in made)
    return int(fails)


def _planned(part: StackPart) -> dict[str, Any]:
    """What a part takes. Of a server: its engine's plan, made without its weights."""
    found: dict[str, Any] = {"name": part.name, "kind": part.kind, "url": part.url, "role": part.role,
                             "memory": part.memory, "parts": {}, "error": "", "text": ""}  # fmt: skip
    if part.engine is None or part.serving is None:
        return found
    if part.engine.parallel.data_parallel_size > 1:
        return found | {"text": f"{part.engine.parallel.data_parallel_size} replicas: see quire inspect"}
    from quire.engine.build.assemble import plan_engine
    from quire.engine.build.opening import open_model
    from quire.engine.host.held import memory_beside

    try:
        model = open_model(part.model, tokenizer=False)
        files = model.gguf.files if model.gguf else None
        plan = plan_engine(model, part.engine, memory_beside(model.folder, files, part.serving)).plan
    except QuireError as error:
        return found | {"error": str(error), "text": str(error)}
    tokens = plan.limits.num_blocks * plan.limits.block_size
    text = (
        f"weights {format_size(plan.parts.get('weights', 0))}, KV {format_size(plan.parts['kv'])} = {tokens} tokens; "
        f"{part.engine.execution.threads} threads"
    )
    return found | {"parts": plan.parts, "kv_tokens": tokens, "text": text}


def _status(config: StackConfig, *, as_json: bool) -> int:
    pid, found = _holder(config), _told(config)
    if pid is None or found.get("pid") != pid:
        if as_json:
            print(json.dumps({"name": config.name, "up": False, "parts": []}))
        else:
            print(f"{config.name} is not up")
        return 1
    from quire.util.platform import resident_of_tree

    for part in found["parts"]:
        part["resident"] = 0 if part["pid"] is None else resident_of_tree(part["pid"])
    if as_json:
        print(json.dumps(found))
        return 0
    now = time.time()
    rows = [
        [each["name"], each["url"], each["state"], f"{now - each['since']:.0f} s" if each["since"] else "",
         str(each["pid"] or ""), format_size(each["resident"]),
         f"{each['restarts']} restarts, {each['why']}" if each["restarts"] else ""]
        for each in found["parts"]
    ]  # fmt: skip
    print(*in_columns([["part", "address", "state", "since", "pid", "resident", ""], *rows]), sep="\n")
    return 0


def _reload(config: StackConfig, *, as_json: bool) -> int:  # noqa: ARG001
    from quire.cli.stack_parts import parts_of

    parts_of(config)  # what is wrong is said here
    pid = _holder(config)
    if pid is None:
        raise QuireError(f"{config.name} is not up")
    found: dict[str, Any] = {}
    asked = 0  # the first read of the file that begins from now on
    while not asked or found.get("reloads", 0) < asked:
        if _holder(config) != pid:
            raise QuireError(f"{config.name} has ended")
        found = _told(config)
        if not asked and found.get("pid") == pid and found["up"]:
            asked = found.get("reading", 0) + 1
            os.kill(pid, signal.SIGHUP)
        time.sleep(_LOOK)
    if found["reload_error"]:
        raise QuireError(found["reload_error"])
    print(f"{config.name} is as its file says")
    return 0


def _down(config: StackConfig, *, as_json: bool) -> int:  # noqa: ARG001
    pid = _holder(config)
    if pid is None:
        print(f"{config.name} is not up")
        return 0
    seconds = _told(config).get("seconds", 0.0) + _DOWN_SECONDS
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + seconds
    while _holder(config) == pid:
        if time.monotonic() > until:
            raise QuireError(f"process {pid} is still there after {seconds:.0f} s")
        time.sleep(_LOOK)
    print(f"{config.name} is down")
    return 0


def _told(config: StackConfig) -> dict[str, Any]:
    """What the stack wrote of itself last."""
    try:
        found: dict[str, Any] = json.loads((config.state / "status.json").read_text())
    except (OSError, ValueError):
        return {}
    return found
