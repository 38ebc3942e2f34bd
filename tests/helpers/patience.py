"""Checks with timeouts: one that is short for a test is too short for what a slow machine does beside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")


def with_patience(check: Callable[[float], T], *seconds: float) -> T:
    """What `check` returns for the first of these timeouts, rising, for which it holds. It must hold for the last."""
    *short, last = seconds
    for timeout in short:
        with contextlib.suppress(Exception, pytest.fail.Exception):
            return check(timeout)
    return check(last)
