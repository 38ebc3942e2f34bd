"""Whether models fit their bounds: python -m quire.engine.host.plan_process, with Load commands on standard input.

Writes a JSON array: for each the `lines` of its memory plan, or an `error`. Reads no weights.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

from quire.engine.build.adapter_room import with_room_for
from quire.engine.build.assemble import plan_engine
from quire.engine.build.opening import open_model
from quire.engine.host.messages import Command, FrameReader, Load, command_decoder, frame
from quire.types import MemoryBudgetError, QuireError


async def planned(loads: Sequence[Load]) -> list[list[str] | MemoryBudgetError]:
    """The memory plans of engines that would be started so, as lines, planned in one process of their own; an error for
    every reason that one could not be started for.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "quire.engine.host.plan_process",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, _ = await process.communicate(b"".join(bytes(frame(load)) for load in loads))
    except BaseException:
        process.kill()
        raise
    if process.returncode != 0:
        return [MemoryBudgetError("its memory could not be planned") for _ in loads]
    return [
        list(answer["lines"]) if "lines" in answer else MemoryBudgetError(answer["error"])
        for answer in json.loads(out)
    ]


def main() -> None:
    """Entry point of the process."""
    loads = map(command_decoder().decode, FrameReader().feed(sys.stdin.buffer.read()))
    print(json.dumps([_answer(load) for load in loads]))


def _answer(load: Command) -> dict[str, object]:
    if not isinstance(load, Load):
        raise TypeError(f"{type(load).__name__} is not a Load")
    try:
        model = open_model(load.folder, tokenizer=False)
        config = with_room_for(load.config, load.adapters, model.facts.spec)
        plan = plan_engine(model, config, load.beside).plan
        return {"lines": plan.lines()}
    except (QuireError, ValueError, OSError) as error:
        return {"error": str(error)}


if __name__ == "__main__":
    main()
