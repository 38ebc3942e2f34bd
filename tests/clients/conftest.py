"""A served checkpoint for other people's clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.server import ENDLESS, PATIENT, LiveServer, served_folder, serving


@pytest.fixture(scope="session")
def client_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_folder(tmp_path_factory.mktemp("clients") / "model")


@pytest.fixture(scope="module")
def live(client_folder: Path) -> Iterator[LiveServer]:
    options = {"served_model_name": ("tiny",), "api_key": ("secret",), "max_num_queued_reqs": 2, **PATIENT}
    with serving(client_folder, ENDLESS | {"max_num_seqs": 2}, **options) as server:
        yield server
