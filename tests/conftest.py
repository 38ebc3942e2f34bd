"""Settings of the whole suite."""

import gc
import os
import resource
import sys
import unittest.mock

import hypothesis
import pytest

from helpers.processors import keep_to_a_share

# torch works on tiny models here and several test processes share the cores: more threads only wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Containers often ask for no bytecode to be kept. Each of some hundred servers that tests start would then compile all
# of Quire again, which takes longer than the rest of its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

keep_to_a_share()

# The same examples in every run, and no verdict of a clock: neither on an example nor on what draws it.
hypothesis.settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")

MOST_MIB = 4096  # of a test process, or of a process that a test starts
_PEAKS = pytest.StashKey[list[int]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_PEAKS] = []


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What all tests and their imports are is no garbage: a collection, of which there are many, need not look at it.
    A command that a test runs here would exclude what exists then, also garbage of earlier tests.
    """
    gc.collect()
    gc.freeze()
    unittest.mock.patch.object(gc, "freeze").start()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """A process of pytest-xdist has ended."""
    output = getattr(node, "workeroutput", {})
    if "peak" in output:
        node.config.stash[_PEAKS].append(output["peak"])  # type: ignore[attr-defined]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Tell the peak of this process and its children, or fail the session for the largest of all."""
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    peak = max(resource.getrusage(kind).ru_maxrss for kind in kinds) // 1024
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak"] = peak
        return
    peaks = session.config.stash[_PEAKS]
    peaks.append(peak)
    if max(peaks) > MOST_MIB and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    peak = max(config.stash[_PEAKS], default=0)
    terminalreporter.line(f"largest test process: {peak} MiB")
    if peak > MOST_MIB:
        terminalreporter.line(f"ERROR: a test process may take {MOST_MIB} MiB", red=True)
