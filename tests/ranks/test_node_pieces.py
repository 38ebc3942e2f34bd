"""What travels with a command is enough: a node with nothing else sees the step that the leading rank has filled."""

from __future__ import annotations

import argparse
import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.specs import BF16, decoder_spec
from quire.cli.main import main
from quire.cli.node_options import add_node_options, other_words, use_node_options
from quire.config.launched import launched
from quire.executor.base import Limits, StepArrays
from quire.executor.node_pieces import ChangedPieces, LeftPieces
from quire.executor.ranked import PAIRS, RankAct, handover_place, rank_memory, residual_place
from quire.program.lower import lower
from quire.program.program import Program
from quire.program.rank_nodes import RankNodes
from quire.program.ranks import RankPlan
from quire.spec import MoE, Router

LIMITS = Limits(max_tokens=40, max_rows=6, max_logit_rows=40, max_len=256, num_blocks=64, max_loras=2)


def programs(size: int, stages: int) -> tuple[Program, ...]:
    spec = decoder_spec(330, 256, 328, (8, 4, 32), [0, 24, 0])
    plans = [RankPlan(size, rank, stages, stage) for stage in range(stages) for rank in range(size)]
    return tuple(lower(spec, BF16, plan) for plan in plans)


@pytest.mark.parametrize("seed", range(5))
def test_what_has_changed_is_enough(seed: int) -> None:
    """Random steps in turns in the two sets of arrays of a pipeline, whose block tables change between them."""
    chance, made = random.Random(seed), programs(1, 2)
    layout = rank_memory(made, LIMITS)
    ours, theirs = (np.zeros(layout.nbytes, np.uint8) for _ in range(2))
    both = []
    for memory in (ours, theirs):
        arrays = StepArrays(LIMITS, len(made[0].cache_groups), overlaps=True)
        arrays.move_to(memory[layout.arrays : layout.pairs], keep=memory is ours)
        both.append(arrays)
    changed = ChangedPieces(made, LIMITS, both[0], ours, RankNodes(1, 2, 2))
    sizes = [(0, 0, 0, 0), (0, 0, 0, 0)]  # of the steps of the two halves
    for command in range(40):
        rows, twin = chance.randint(1, LIMITS.max_rows), command % 2
        filled = both[0].twin if twin else both[0]
        assert filled is not None
        tokens = chance.randint(rows, LIMITS.max_tokens)
        for array in (filled.token_ids, filled.query_start, filled.logit_rows, filled.adapters):
            array[:] = [chance.randint(0, 300) for _ in array]
        last = chance.randint(0, LIMITS.max_len - 1)
        filled.positions[:tokens] = [chance.randint(0, last) for _ in range(tokens)]
        filled.slots[:rows] = chance.sample(range(LIMITS.max_rows), rows)
        for table in filled.block_tables:
            for _ in range(chance.randint(0, 9)):
                table[chance.randrange(len(table)), chance.randrange(table.shape[1])] = chance.randint(1, 60)
        sizes = [(tokens, rows, chance.randint(0, tokens), twin), sizes[0]]
        _apply(changed.of(RankAct.RUN, (0, *sizes[0], *sizes[1])), theirs)
        for size in sizes:
            one, other = (each.twin if size[3] else each for each in both)
            assert one is not None
            assert other is not None
            _same_step(one, other, *size[:3])


def _apply(pieces: list[Any], memory: np.ndarray) -> None:
    for at, content in pieces:
        memory[at : at + content.nbytes] = content


def _same_step(one: StepArrays, other: StepArrays, tokens: int, rows: int, logit_rows: int) -> None:
    if not tokens:
        return
    counts = {"token_ids": tokens, "positions": tokens, "query_start": rows + 1, "slots": rows}
    for name, count in (counts | {"logit_rows": logit_rows}).items():
        np.testing.assert_array_equal(getattr(one, name)[:count], getattr(other, name)[:count], err_msg=name)
    lines, blocks = one.slots[:rows], one.positions[:tokens].max() // LIMITS.block_size + 1
    np.testing.assert_array_equal(one.adapters[lines], other.adapters[lines])
    for table, copy in zip(one.block_tables, other.block_tables, strict=True):
        np.testing.assert_array_equal(table[lines, :blocks], copy[lines, :blocks])


def test_what_other_commands_change() -> None:
    made = programs(2, 1)
    layout = rank_memory(made, LIMITS)
    memory = np.random.default_rng(1).integers(0, 256, layout.nbytes, np.uint8)
    arrays = StepArrays(LIMITS, len(made[0].cache_groups))
    arrays.move_to(memory[layout.arrays : layout.pairs])
    changed = ChangedPieces(made, LIMITS, arrays, memory, RankNodes(2, 1, 2))
    for act, numbers, places in (
        (RankAct.COPY, (3,), [(layout.pairs, 12), (layout.pairs + 4 * PAIRS, 12)]),
        (RankAct.WRITE, (1,), [(layout.blocks[0], layout.blocks[-1] - layout.blocks[0])]),
        (RankAct.USE_THREADS, (1,), []),
    ):
        assert [(at, piece.nbytes) for at, piece in changed.of(act, numbers)] == places
    ((at, piece),) = changed.of(RankAct.HEAD, (5,))
    assert piece.nbytes == 20
    np.testing.assert_array_equal(piece, memory[at : at + 20])


def test_what_a_stage_leaves_goes_where_it_is_taken() -> None:
    """Stages on three hosts: the first hands over to the second half, the second one to the last within a step."""
    made = programs(1, 3)
    layout, nodes = rank_memory(made, LIMITS), RankNodes(1, 3, 3)
    memory = np.zeros(layout.nbytes, np.uint8)
    first, second = (LeftPieces(made, LIMITS, nodes, nodes.here(rank), memory) for rank in (0, 1))
    numbers = (0, 7, 2, 2, 1, 5, 1, 1, 0)  # a step of 7 tokens begins, in the second place; one of 5 ends
    assert (first.node, second.node) == (2, 0)
    ((at, piece),) = first.of(RankAct.RUN, numbers)
    assert (at, piece.nbytes) == (handover_place(made, LIMITS, layout, 1), 7 * 256 * 4)
    ((at, piece),) = second.of(RankAct.RUN, numbers)
    assert (at, piece.nbytes) == (residual_place(made, LIMITS, layout, 1)[0], 5 * 256 * 4)
    ((at, piece),) = second.of(RankAct.READ, (1,))
    assert (at, at + piece.nbytes) == (layout.blocks[1], layout.blocks[2])
    assert first.of(RankAct.USE_THREADS, (1,)) == []


def test_experts_go_to_the_host_that_takes_them() -> None:
    """Three ranks on three hosts: what node 0 has or takes is not sent back; a copy goes one way."""
    spec = decoder_spec(330, 192, 328, (6, 3, 32), [0])
    spec = replace(spec, layers=(replace(spec.layers[0], mlp=MoE(Router(24, 2), 40)),))
    made = tuple(lower(spec, BF16, RankPlan(3, rank, expert_parallel=True)) for rank in range(3))
    layout, nodes = rank_memory(made, LIMITS), RankNodes(3, 1, 3)
    memory = np.zeros(layout.nbytes, np.uint8)
    arrays = StepArrays(LIMITS, len(made[0].cache_groups))
    changed = ChangedPieces(made, LIMITS, arrays, memory, nodes)
    left = [LeftPieces(made, LIMITS, nodes, nodes.here(rank), memory) for rank in (1, 2)]
    [layer] = made[0].expert_layers
    assert (layer.experts, layer.places, layer.held) == (24, 27, 9)

    def sent(*places: int) -> list[list[int]]:
        numbers = layer.layer, *places
        pieces = [*(each.of(RankAct.SHOW_EXPERTS, numbers) for each in left)]
        pieces.append(changed.of(RankAct.TAKE_EXPERTS, numbers))
        sizes = {piece.nbytes for some in pieces for _, piece in some}
        assert len(sizes) <= 1
        return [[at - layout.experts for at, _ in some] for some in pieces]

    ours, theirs, third = 3, 9 + 3, 18 + 3  # a place of each rank
    apart = sent(theirs, third, 0)[1][0]
    assert apart > 0
    assert sent(ours, theirs, 0) == [[apart], [], [0]]
    assert sent(theirs, third, 0) == [[0], [apart], [0, apart]]
    assert sent(theirs, third, 1) == [[0], [], [0]]
    assert sent(theirs, ours, 1) == [[0], [], []]
    assert sent(ours, third, 1) == [[], [], [0]]
    assert sent(theirs, theirs + 1, 0) == [[], [], []]


def test_other_hosts_get_the_other_words() -> None:
    words = ["quire-mini", "--nnodes", "2", "--port=7", "--launcher=ray", "--tensor-parallel-size", "2"]
    assert other_words([*words, "--master-port", "9"]) == [
        "quire-mini",
        "--port=7",
        "--tensor-parallel-size",
        "2",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 7", ""),
        ("--nnodes 1", ""),
        ("--nnodes 2 --node-rank 2 --master-addr 10.0.0.1", "node_rank: 2 is not one of 2 hosts"),
        ("--master-addr 10.0.0.1", "master_addr: it says something of several hosts"),
        ("--nnodes 2 --master-addr a --master-port 65535", "master_port: 65535 is not in"),
        ("--nnodes 2", "master_addr: where the other hosts reach host 0"),
    ],
)
def test_options_say_what_a_launcher_would(words: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"QUIRE_RANK_SECRET": "sixteen bytes or more"})
    parser = argparse.ArgumentParser()
    add_node_options(parser)
    given = vars(parser.parse_args(words.split()))
    if message:
        with pytest.raises(ValueError, match=message):
            use_node_options([given])
        return
    assert use_node_options([given, {"master_port": 9}]) == (2 if "--nnodes 2" in words else 1)
    assert not given
    found = launched(os.environ, 2)
    assert (found is not None) == ("--nnodes 2" in words)
    assert found is None or (found.number, found.address, found.port, found.nodes) == (1, "10.0.0.1", 8, True)
    if found is not None:
        with pytest.raises(ValueError, match="nnodes: a launcher has set RANK"):
            use_node_options([{"nnodes": 2, "master_addr": "a"}])


def test_hosts_without_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each would serve the whole model."""
    monkeypatch.setattr(os, "environ", {**os.environ})
    words = ["serve", "quire-mini", "--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1"]
    assert main(words) == 2
    assert "nnodes: hosts share the ranks of one model" in capsys.readouterr().err
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name != "RANK"})
    assert main([*words, "--data-parallel-size", "2"]) == 2
    assert "start a server for each, and quire router before them" in capsys.readouterr().err
