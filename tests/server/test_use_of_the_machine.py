"""Metrics of what steps compute and move, the cache in bytes, and the words of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.server import LiveServer, serving
from quire import _native
from quire.engine.build.kept_peaks import keep_peaks, load_peaks
from quire.program.step_work import MachinePeaks

PEAKS = MachinePeaks(1e10, {"f32": 1e11, "bf16": 2e11, "i8": 4e11})


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of a machine whose limits were measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        keep_peaks(PEAKS, _native.supported_isas()[0], 2)
        with serving(folder, engine={"threads": 2}) as live:
            yield live


def test_steps_count_what_they_compute_and_move(server: LiveServer) -> None:
    def moved() -> float:
        return server.metric("quire_step_moved_bytes_total")

    before = moved()
    server.complete("0123456789" * 4, max_tokens=40, ignore_eos=True)
    server.wait(server.idle)
    server.wait(lambda: moved() > before)
    assert sum(server.metric("quire_step_flops_total", format=name) for name in ("f32",)) > 0
    assert server.metric("quire_bandwidth_share") > 0
    assert server.metric("quire_compute_share") > 0


def test_the_cache_in_bytes(server: LiveServer) -> None:
    server.wait(server.idle)
    held, cached, free = (
        server.metric("quire_kv_bytes", state=state) for state in ("held", "cached", "free")
    )
    assert held == 0
    assert cached > 0
    assert held + cached + free == pytest.approx(server.metric("quire_memory_bytes", part="kv"))
    assert server.metric("quire_kv_bytes", state="pinned") == 0
    assert server.metric("quire_kv_bytes", state="reserved") == 0


def test_words_of_prompts(server: LiveServer) -> None:
    names = ("quire_prompt_text_words_total", "quire_prompt_text_tokens_total")
    before = [server.metric(name) for name in names]
    tokens = server.complete("three little words", max_tokens=2).json["usage"]["prompt_tokens"]
    words, counted = (server.metric(name) - was for name, was in zip(names, before, strict=True))
    assert (words, counted) == (3, tokens)


def test_limits_of_another_machine_or_damaged_ones_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    assert load_peaks("avx2", 2) is None
    keep_peaks(PEAKS, "avx2", 2)
    assert load_peaks("avx2", 2) == PEAKS
    assert load_peaks("avx2", 4) is None
    (path,) = (tmp_path / "limits").iterdir()
    for text in ("", "[]", "{", '{"version": 1, "bandwidth": -1, "flops": {}}', '{"version": 2}'):
        path.write_text(text)
        assert load_peaks("avx2", 2) is None
