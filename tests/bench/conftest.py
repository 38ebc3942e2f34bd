"""A small machine: limits are measured over little memory and for a moment, as no test reads a timing."""

from __future__ import annotations

import pytest

from quire.bench import kernels, limits


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LEAST_ARENA", 1 << 20)
    monkeypatch.setattr(limits, "CACHES_READ", 0)
    monkeypatch.setattr(limits, "PASSES", 1)
    monkeypatch.setattr(limits, "LOOP_SECONDS", 1e-4)
    monkeypatch.setattr(kernels, "SPILL", 0)
    monkeypatch.setattr(kernels, "CALL_SECONDS", 1e-4)
