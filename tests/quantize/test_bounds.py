"""`quire quantize` in a process of its own: killed at any moment, and within its memory."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.bench.random_checkpoint import write_checkpoint
from quire.planner.shapes import SHAPES

pytestmark = pytest.mark.quantize
QUIRE = [sys.executable, "-m", "quire.cli.main", "quantize"]
HOW = ["--method", "gptq", "--no-eval", "--quiet", "--threads", "1", "--calibration-samples", "8"]
PEAK = """
import sys
from quire.cli.main import main
status = main(sys.argv[1:])
# not ru_maxrss, which a child takes over from the process that starts it
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(status)
"""


@pytest.mark.parametrize("more", [[], ["--target-bits", "4.5"]], ids=["4 bits", "mixed"])
def test_a_run_that_is_killed_continues_to_the_same_bytes(more: list[str], tmp_path: Path) -> None:
    """Killed after ever longer times, until one run comes to its end."""
    command = [*QUIRE, "quire-mini", *HOW, *more, "--out"]
    subprocess.run([*command, str(tmp_path / "whole")], check=True)
    out, wait, killed = tmp_path / "out", 0.3, 0
    while True:
        run = subprocess.Popen([*command, str(out)])
        time.sleep(wait)
        run.send_signal(signal.SIGKILL)
        if run.wait() == 0:
            break
        killed, wait = killed + 1, wait * 1.3
        assert not out.exists() or not (tmp_path / "out.unfinished").exists()
        if out.exists():  # killed after the last rename
            break
    assert killed
    for path in (tmp_path / "whole").iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("method", ["gptq", "awq", "rtn"])
def test_memory_is_what_the_plan_says(method: str, tmp_path: Path) -> None:
    """The bound of a process that names what it needs holds: two layers in the shape of Qwen3-0.6B."""
    model = tmp_path / "model"
    write_checkpoint(model, {**SHAPES["qwen3-0.6b"], "num_hidden_layers": 2, "vocab_size": 4096})
    how = ["quantize", str(model), "--method", method, *HOW[2:], "--out", str(tmp_path / "out")]
    small = subprocess.run(
        [sys.executable, "-c", PEAK, *how, "--memory", "150MiB"], capture_output=True, text=True, check=False
    )
    numbers = re.findall(r"([\d.]+) MiB", small.stderr)
    assert small.returncode == 1
    assert len(numbers) >= 2, small.stderr
    bound = (
        float(numbers[0]) + float(numbers[1]) + 8
    )  # what a process holds differs a little from start to start
    found = subprocess.run(
        [sys.executable, "-c", PEAK, *how, "--memory", f"{bound:.0f}MiB"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(found.stdout) / 1024 <= bound
