"""Pull a model in a process of its own: python -m quire.store.pull_process NAME LIMIT.

Its threads would hold up a server that shares an interpreter with them, and it can be killed at any time: what has
arrived is kept. Writes lines of JSON: [done, total] in bytes, texts for people, and at the end an object with `path`,
or with `error` and the `status` of HTTP that fits.
"""

from __future__ import annotations

import json
import os
import sys

from quire.store.hub_client import HubError
from quire.store.model_store import ModelStore
from quire.store.pulling import CONNECTIONS, PullOptions, pull
from quire.store.references import ModelReference
from quire.types import CheckpointError
from quire.util.platform import end_with_parent

_NOT_THERE = {401, 403, 404}


def _say(value: object) -> None:
    print(json.dumps(value), flush=True)


def main() -> None:
    """Entry point of the process."""
    end_with_parent(os.getppid())
    os.nice(10)
    options = PullOptions(CONNECTIONS, int(sys.argv[2]), lambda done, total: _say([done, total]), _say)
    try:
        _say({"path": str(pull(ModelStore(), ModelReference.parse(sys.argv[1]), options).path)})
    except HubError as error:
        _say({"error": str(error), "status": 404 if error.status in _NOT_THERE else 502})
    except CheckpointError as error:
        _say({"error": str(error), "status": 400})


if __name__ == "__main__":
    main()
