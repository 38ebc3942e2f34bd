"""`quire inspect --nnodes`: which host has which ranks, and what travels between hosts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.rank_processes import Wide
from quire.cli.main import main

Shown = pytest.CaptureFixture[str]


def inspected(wide: Wide, shown: Shown, *words: str) -> dict[str, Any]:
    asked = ["inspect", str(wide("qwen3")), "--dtype", "float32", "--prefill", "5", "--no-measure", "--json"]
    assert main([*asked, *words]) == 0
    found: dict[str, Any] = json.loads(shown.readouterr().out)["ranks"]
    return found


def between(found: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Of each rank: its host, and what it receives in a prompt of five tokens, of all ranks and of other hosts."""
    steps = [(each["node"], each["steps"]["prefill"]) for each in found["ranks"]]
    return [(node, step["wire_bytes"], step["host_bytes"]) for node, step in steps]


def test_stages_send_the_residual_stream(wide: Wide, capsys: Shown) -> None:
    found = inspected(wide, capsys, "--pipeline-parallel-size", "2", "--nnodes", "2")
    assert between(found) == [(1, 0, 0), (0, 0, 5 * 192 * 4)]  # the leading rank is on host 0
    here = inspected(wide, capsys, "--pipeline-parallel-size", "2")
    assert between(here) == [(0, 0, 0), (0, 0, 0)]


def test_ranks_of_a_stage_exchange_rows(wide: Wide, capsys: Shown) -> None:
    here = between(inspected(wide, capsys, "--tensor-parallel-size", "2"))
    hosts = between(inspected(wide, capsys, "--tensor-parallel-size", "2", "--nnodes", "2"))
    assert [node for node, *_ in hosts] == [0, 1]
    assert [(wire, 0) for _, wire, _ in hosts] == [(wire, sent) for _, wire, sent in here]
    assert all(wire == sent > 0 for _, wire, sent in hosts)


def test_it_is_printed_with_a_time(wide: Wide, capsys: Shown) -> None:
    words = ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", "--nnodes", "2"]
    assert main(["inspect", str(wide("qwen3")), "--dtype", "float32", *words]) == 0
    text = capsys.readouterr().out
    assert "2 in each of 2 stages, on 2 hosts" in text
    assert "rank 2 of host 0: " in text
    assert " from other hosts" in text
    assert "assumed between hosts: 50 µs, and 10 Gbit/s" in text


def test_auto_knows_hosts(wide: Wide, capsys: Shown) -> None:
    assert main(["inspect", str(wide("qwen3")), "--parallel", "auto", "--nnodes", "2", "--no-measure"]) == 0
    out, err = capsys.readouterr()
    assert "1 in each of 2 stages, on 2 hosts" in out
    assert "--parallel auto: --pipeline-parallel-size 2: 2 hosts" in err


def test_hosts_that_cannot_share_the_ranks_are_refused(wide: Wide, capsys: Shown) -> None:
    asked = ["inspect", str(wide("qwen3")), "--no-measure", "--tensor-parallel-size"]
    assert main([*asked, "2", "--nnodes", "3"]) == 1
    assert "cannot share 2 ranks" in capsys.readouterr().err
    assert main([*asked, "1", "--nnodes", "2"]) == 2
    assert "nnodes: 2 hosts cannot share" in capsys.readouterr().err
