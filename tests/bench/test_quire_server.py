"""The benchmark against Quire's own server: what the client counts is what the server counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.server import LiveServer, served_folder, serving
from quire.bench import results
from quire.bench.server_bench import records_of
from quire.cli.main import main


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = served_folder(tmp_path_factory.mktemp("benched") / "model")
    with serving(folder, {"max_model_len": 1000}) as live:
        yield live


def test_client_and_server_agree(server: LiveServer, tmp_path: Path) -> None:
    words = [
        "--concurrency",
        "1",
        "--num-requests",
        "10",
        "--prompt-ids",
        "40-60",
        "--api",
        "completions",
        "--quiet",
    ]
    shape = ["--input-len", "30", "--output-len", "7", "--prefix-len", "64", "--count-chunk-tokens"]
    assert main(["bench", "serve", server.url, *words, *shape, "--save", str(tmp_path / "r.json")]) == 0
    found = results.load(tmp_path / "r.json")
    value = {name: metric.value for name, metric in found.metrics.items()}
    records = records_of(found.tables["requests"])
    assert found.settings["backend"] == "quire"
    assert [record.input_tokens for record in records] == [94] * 10
    assert [sum(record.counts) for record in records] == [7] * 10
    # the server's own figures of the same requests; its clock starts when the headers are in, and stops before ours
    assert value["server_decode_tokens"] is not None
    assert (
        60 <= value["server_decode_tokens"] <= 65
    )  # the first of each is its prefill's, whose end may be one row
    ours = sum(record.times[0] - record.scheduled for record in records) / 10
    assert value["server_ttft_mean"] is not None
    assert 0 < value["server_ttft_mean"] <= 1e3 * ours
    assert value["server_e2el_mean"] is not None
    assert value["server_e2el_mean"] <= value["e2el_mean"]
    # the warm-up had keys of its own, so the first request of the family missed and the others hit its prefix
    assert value["server_prefix_hits"] == 9 * 64
    assert sum(record.cached_tokens or 0 for record in records) == value["server_prefix_hits"]
