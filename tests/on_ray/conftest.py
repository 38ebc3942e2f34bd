"""A checkpoint folder for tests of quire.ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.tokenizers import save_whole


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whole("qwen3", tmp_path_factory.mktemp("on_ray") / "model")
