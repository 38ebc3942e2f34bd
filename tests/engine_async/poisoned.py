"""An engine process with a fault in it, for tests: a prompt that begins with POISON kills it in its first step."""

from __future__ import annotations

import os
import signal
from typing import Any

from quire.engine.core import EngineCore
from quire.engine.host import process

POISON = [66, 66, 66]
_step, _add = EngineCore.step, EngineCore.add


def add(core: EngineCore, request: Any) -> None:
    _add(core, request)
    core.poisoned = getattr(core, "poisoned", False) or list(request.prompt_token_ids[:3]) == POISON  # type: ignore[attr-defined]


def step(core: EngineCore) -> Any:
    if getattr(core, "poisoned", False):
        os.kill(os.getpid(), signal.SIGKILL)
    return _step(core)


if __name__ == "__main__":
    EngineCore.add, EngineCore.step = add, step  # type: ignore[method-assign,assignment]
    process.main()
