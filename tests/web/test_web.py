"""The web page: checked, tested, built again and compared, and driven in a browser.

Needs npm, the npm registry, and Chromium at /usr/bin/chromium.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from helpers.server import LiveServer, serving
from quire.config.shipped import shipped_models
from quire.learn.chapters import chapters
from quire.learn.simulations import simulations

ROOT = Path(quire.__file__).parents[2]
BUILT = Path(quire.__file__).parent / "server/pages/built"

ADMIN, CLIENT = "key-of-an-administrator", "key-of-a-client"

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


browser = pytest.mark.skipif(not Path("/usr/bin/chromium").exists(), reason="Chromium is not installed")


def browse(part: str, sources: Path, live: LiveServer, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """What a part of browse.mjs saw, and the errors on the console. Nothing came from elsewhere; axe found nothing."""
    ended = subprocess.run(
        ["node", "test/browse.mjs", live.url, str(folder), part],
        cwd=sources, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout)
    assert seen["outside"] == seen["axe"] == []
    return seen["views"], seen["errors"]


@browser
def test_the_chat(
    sources: Path, live: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asks, asks again, edits, goes back, looks at chances, calls a tool, stops; light, dark, and on a phone."""
    views, errors = browse("chat", sources, live, tmp_path)
    (stopped,) = errors  # the policy stops the style of a hostile answer
    assert "Applying inline style violates" in stopped
    assert "first token" in views["answer"]
    assert "tokens/s" in views["figures"]
    assert views["copied"].split() == views["answer"].split()
    assert views["saved"] == ["user", "assistant"]
    assert "2 of 2" in views["places"]
    assert (views["edited"], views["before"]) == ("What is TPOT?", "What is TTFT?")
    assert views["tokens"] >= 5
    assert views["alternatives"] == 5
    assert " ms for " in views["why"]
    assert views["kept"] == 2
    assert len(views["hostile"]) >= 9
    assert all(not one["hacked"] and not one["made"] for one in views["hostile"])
    assert any(one["shown"] for one in views["hostile"])  # the model has said it
    assert re.match(r"(clock|dice|calculate)\(\{", views["called"])
    assert views["told"] == "4"
    cached, whole = map(int, re.findall(r"\d+", views["prompt"]))
    assert 0 < cached < whole  # the conversation before the call
    assert not views["side overflow"]
    assert not views["dark overflow"]
    assert not views["phone overflow"]
    assert views["loaded"] <= 150_000
    pictures = {path.name for path in tmp_path.iterdir()}
    assert {"welcome.png", "chances.png", "tools.png", "dark.png", "phone.png"} <= pictures
    with capsys.disabled():
        print(f"\nfirst paint {views['painted']:.0f} ms, {views['loaded']:,} bytes")


@browser
def test_the_lesson(sources: Path, live: LiveServer, tmp_path: Path) -> None:
    views, errors = browse("lesson", sources, live, tmp_path)
    (refused,) = errors  # a value is out of range
    assert "400 (Bad Request)" in refused
    titles = [one.title for one in simulations().values()]
    written = [one.title for one in chapters().values()]
    assert views["sights"] >= 5  # each ran on this server
    assert views["replayed"]
    sent = [what for _, _, what in simulations()["parallelism"].scene({}).flows[0].arrows]
    assert views["arrows"] == sent
    for name in ("lesson", "lesson dark", "lesson phone"):
        assert views[name] == titles
        assert views[f"{name} other"] == []  # the page shows what the server said, in its words
        assert views[f"{name} chapters"] == written
        assert views[f"{name} quiz"].startswith("Right.")
        assert not views[f"{name} overflow"]
    assert "lesson phone block-table.png" in {path.name for path in tmp_path.iterdir()}


@browser
def test_a_simulation_that_fails_leaves_the_others(sources: Path, live: LiveServer, tmp_path: Path) -> None:
    views, errors = browse("fence", sources, live, tmp_path)
    assert errors == []
    assert len(views["fenced"]) == 1
    assert views["beside the fence"] >= 2


@browser
def test_the_control_room(sources: Path, live: LiveServer, tmp_path: Path) -> None:
    views, errors = browse("room", sources, live, tmp_path)
    assert errors == []
    for name in ("room", "room dark", "room phone"):
        heads = " ".join(views[name])
        parts = ("Batch", "KV cache", "Cached prefixes", "Memory plan", "Settings")
        assert all(one in heads for one in parts)
        assert " ms for " in views[f"{name} why"]
        assert views[f"{name} tried"] == "Would change: max_num_seqs = 3"
        assert not views[f"{name} overflow"]
    assert views["room key"] == ""  # it is asked again for the next change
    assert ADMIN not in views["room kept"]


@browser
def test_a_key_stays_in_its_tab(sources: Path, tmp_path: Path) -> None:
    with serving(Path(shipped_models()["quire-mini"]), api_key=(CLIENT,)) as live:
        views, errors = browse("locked", sources, live, tmp_path)
    assert all("401 (Unauthorized)" in one for one in errors)
    assert views["told"] == []
    assert CLIENT not in views["kept"]
    assert views["asked"] == ["/", "/learn", "/dashboard", "/docs"]


@browser
def test_the_api_reference(sources: Path, live: LiveServer, tmp_path: Path) -> None:
    views, errors = browse("api", sources, live, tmp_path)
    assert errors == []
    for name in ("api", "api phone"):
        assert {"messages", "temperature", "model"} <= set(views[name])
        assert not views[f"{name} overflow"]


@browser
def test_a_newcomer_gets_an_answer(sources: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`make serve`, the page, its first button: nothing to read, nothing to choose."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What is installed is not installed again, however old it is.
    make = [
        "make",
        "-s",
        "-o",
        f"{sys.prefix}/.installed",
        "serve",
        f"VENV={sys.prefix}",
        f"ARGS=--port {port} --quiet",
    ]
    with subprocess.Popen(make, cwd=ROOT, start_new_session=True) as server:
        try:
            ended = subprocess.run(
                ["node", "test/newcomer.mjs", f"http://127.0.0.1:{port}/"],
                cwd=sources, capture_output=True, text=True, timeout=300, check=False,
            )  # fmt: skip
        finally:
            os.killpg(server.pid, signal.SIGTERM)
    assert ended.returncode == 0, ended.stderr
    times = json.loads(ended.stdout)
    with capsys.disabled():
        print(
            f"\nfrom make serve to the page {times['there']:.0f} ms, to an answer {times['answered']:.0f} ms"
        )
