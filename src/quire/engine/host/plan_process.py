"""Whether a model fits its bound: python -m quire.engine.host.plan_process, with a Load command on standard input.

Writes one JSON object: the `lines` of the memory plan, or an `error`. Reads no weights.
"""

from __future__ import annotations

import asyncio
import json
import sys

from quire.engine.build.assemble import plan_engine
from quire.engine.build.opening import open_model
from quire.engine.host.messages import FrameReader, Load, command_decoder, frame
from quire.types import MemoryBudgetError, QuireError


async def planned(load: Load) -> list[str]:
    """The memory plan of an engine that would be started so, as lines, planned in a process of its own.

    Raises MemoryBudgetError for every reason that the engine could not be started for.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "quire.engine.host.plan_process",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, _ = await process.communicate(bytes(frame(load)))
    except BaseException:
        process.kill()
        raise
    answer = json.loads(out) if process.returncode == 0 else {"error": "its memory could not be planned"}
    if "error" in answer:
        raise MemoryBudgetError(answer["error"])
    return list(answer["lines"])


def main() -> None:
    """Entry point of the process."""
    (load,) = map(command_decoder().decode, FrameReader().feed(sys.stdin.buffer.read()))
    if not isinstance(load, Load):
        raise TypeError(f"{type(load).__name__} is not a Load")
    try:
        plan = plan_engine(open_model(load.folder, tokenizer=False), load.config, load.beside)[-1]
        answer: dict[str, object] = {"lines": plan.lines()}
    except (QuireError, ValueError, OSError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
