"""The web page: checked, tested, built again and compared, and driven in a browser.

Needs npm, the npm registry, and Chromium at /usr/bin/chromium.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from helpers.server import LiveServer, serving
from quire.config.shipped import shipped_models
from quire.learn.chapters import chapters
from quire.learn.simulations import simulations

ROOT = Path(quire.__file__).parents[2]
BUILT = Path(quire.__file__).parent / "server/pages/built"

ADMIN = "key-of-an-administrator"

pytestmark = [
    pytest.mark.web,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"),
]


def npm(folder: Path, *words: str) -> None:
    ended = subprocess.run(
        ["npm", *words], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of web/ with its packages, beside an empty place for what is built."""
    root = tmp_path_factory.mktemp("web")
    shutil.copytree(ROOT / "web", root / "web", ignore=shutil.ignore_patterns("node_modules"))
    (root / "src/quire/server/pages").mkdir(parents=True)
    npm(
        root / "web", "install", "--no-audit", "--no-fund"
    )  # "ci" wants packages of every platform in the lock
    return root / "web"


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with serving(
        Path(shipped_models()["quire-mini"]), engine={"max_model_len": 2048}, admin_api_key=(ADMIN,)
    ) as server:
        yield server


def test_sources_are_clean_and_their_tests_pass(sources: Path) -> None:
    npm(sources, "run", "check")


def test_the_committed_files_are_what_the_sources_make(sources: Path) -> None:
    npm(sources, "run", "build")
    made = sources.parent / "src/quire/server/pages/built"
    assert sorted(path.name for path in made.iterdir()) == sorted(path.name for path in BUILT.iterdir())
    for path in made.iterdir():
        assert path.read_bytes() == (BUILT / path.name).read_bytes(), path.name


@pytest.mark.skipif(not Path("/usr/bin/chromium").exists(), reason="Chromium is not installed")
def test_a_browser_can_use_the_page(sources: Path, live: LiveServer, tmp_path: Path) -> None:
    """Asks, asks again, edits, goes back, looks at chances, stops; light, dark, and on a phone."""
    ended = subprocess.run(
        ["node", "test/browse.mjs", live.url, str(tmp_path)],
        cwd=sources, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout)
    assert seen["outside"] == seen["axe"] == []
    # In the words of the browser: the policy stops the style of a hostile answer, and a value is out of range.
    stopped, refused = seen["errors"]
    assert "Applying inline style violates" in stopped
    assert "400 (Bad Request)" in refused
    views = seen["views"]
    assert "first token" in views["answer"]
    assert "tokens/s" in views["figures"]
    assert "2 of 2" in views["places"]
    assert (views["edited"], views["before"]) == ("What is TPOT?", "What is TTFT?")
    assert views["tokens"] >= 5
    assert views["alternatives"] == 5
    assert " ms for " in views["why"]
    assert views["kept"] == 2
    assert len(views["hostile"]) >= 9
    assert all(not one["hacked"] and not one["made"] for one in views["hostile"])
    assert any(one["shown"] for one in views["hostile"])  # the model has said it
    assert not views["dark overflow"]
    assert not views["phone overflow"]
    titles = [one.title for one in simulations().values()]
    written = [one.title for one in chapters().values()]
    assert views["sights"] >= 5  # each ran on this server
    for name in ("lesson", "lesson dark", "lesson phone"):
        assert views[name] == titles
        assert views[f"{name} chapters"] == written
        assert views[f"{name} quiz"].startswith("Right.")
        assert not views[f"{name} overflow"]
    assert len(views["fenced"]) == 1
    assert views["beside the fence"] >= 2
    for name in ("room", "room dark", "room phone"):
        heads = " ".join(views[name])
        assert all(
            one in heads for one in ("Batch", "KV cache", "Cached prefixes", "Memory plan", "Settings")
        )
        assert " ms for " in views[f"{name} why"]
        assert views[f"{name} tried"] == "Would change: max_num_seqs = 3"
        assert not views[f"{name} overflow"]
    assert views["room key"] == ""  # it is asked again for the next change
    assert ADMIN not in views["room kept"]
    for name in ("api", "api phone"):
        assert {"messages", "temperature", "model"} <= set(views[name])
        assert not views[f"{name} overflow"]
    pictures = {path.name for path in tmp_path.iterdir()}
    assert {"welcome.png", "chances.png", "dark.png", "phone.png", "lesson phone block-table.png"} <= pictures
