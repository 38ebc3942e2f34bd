"""One measured process: an engine is started, does its work and ends, with the machine's limits before and after.

    python -m benchmarks.peers.burst '{"command": […], "environment": {…}, "threads": 2, "touch": ["FILE", …]}'

`touch` names files that are read once before, so that starting finds them in the page cache. Prints one JSON object
on its last line:

    lines      what the engine's script reported, one object for each workload
    memory     peak resident MiB of the engine's largest process
    bandwidth  bytes/s, compute: operations/s by number format: means of the samples around the engine
    others     CPUs that other processes took while the engine ran; stolen: that the hypervisor kept
    seconds    of the engine's process, from its start to its end
    error      where it failed, the end of what it said
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quire.bench.environment import Watch

_PATH = re.compile(r"/(?:[\w.+-]+/)+([\w.+-]+)")  # absolute paths, of which a report keeps the last part
_BLOCK = 16 << 20


def main() -> None:
    asked = json.loads(sys.argv[1])
    for name in asked["touch"]:
        touch(Path(name))
    before = limits(asked["threads"])
    found = run(asked["command"], asked["environment"])
    after = limits(asked["threads"])
    compute = {name: (rate + after["compute"][name]) / 2 for name, rate in before["compute"].items()}
    bandwidth = (before["bandwidth"] + after["bandwidth"]) / 2
    print(json.dumps({**found, "bandwidth": bandwidth, "compute": compute}), flush=True)


def limits(threads: int) -> dict[str, Any]:
    """What the machine can do now. Measured by a process of its own: a child's peak memory, as the system counts it,
    begins with that of the process that started it, so this one must stay small."""
    words = [sys.executable, "-m", "benchmarks.peers.burst", "limits", str(threads)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def print_limits(threads: int) -> None:
    """The other end of `limits`."""
    from quire.bench.limits import LimitsProbe

    sample = LimitsProbe(threads=threads).sample()
    print(json.dumps({"bandwidth": sample.bandwidth, "compute": sample.compute}))


def touch(path: Path) -> None:
    """Read a file, or the files of a folder, once."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as opened:
                while opened.read(_BLOCK):
                    pass


def run(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run an engine's script to its end; see the module's text for what comes back."""
    watch, start = Watch(), time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, env={**os.environ, **environment}
        )
        assert process.stdout is not None
        out = process.stdout.read().decode(errors="replace")
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds, noise = time.perf_counter() - start, watch.stop()
        said.seek(0)
        errors = said.read().decode(errors="replace")
    found: dict[str, Any] = {
        "lines": [json.loads(line) for line in out.splitlines() if line.startswith('{"work"')],
        "memory": usage.ru_maxrss / 1024, "seconds": round(seconds, 2),
        "others": noise.others, "stolen": noise.stolen,
    }  # fmt: skip
    if process.returncode:
        found["error"] = f"ended with {process.returncode}: {plain(errors or out)}"
    return found


def plain(text: str, most: int = 600) -> str:
    """The end of what a program said, without absolute paths."""
    return _PATH.sub(r"\1", text.strip()[-most:])


if __name__ == "__main__":
    print_limits(int(sys.argv[2])) if sys.argv[1] == "limits" else main()
