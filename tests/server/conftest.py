"""A server on a tiny checkpoint, shared by a module's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.server import LiveServer, served_folder, serving


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_folder(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with serving(folder, served_model_name=("tiny", "also-tiny")) as live:
        yield live
