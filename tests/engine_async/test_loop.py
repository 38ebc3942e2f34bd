"""The engine's loop, step by step: what an abort and a stop string cost."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.config.schema import EngineConfig
from quire.engine.build.assemble import Built, build
from quire.engine.build.opening import open_model
from quire.engine.core import EngineCore
from quire.engine.host.channel import ChannelClosedError
from quire.engine.host.loop import EngineLoop
from quire.engine.host.messages import (
    SAMPLE_BITS,
    Abort,
    AddRequest,
    Command,
    Finish,
    Refused,
    Report,
    Stats,
    StepReport,
    Stop,
    Vocabulary,
    unpack_handles,
)
from quire.text.token_bytes import TokenBytes
from quire.types import FinishReason, Grammar, Request, SamplingParams, TokenIds

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


class Script:
    """A channel whose commands are given for each time the loop looks; records what it reports."""

    def __init__(self, turns: list[list[Command]]) -> None:
        self.turns: Iterator[list[Command]] = iter(turns)
        self.reports: list[Report] = []

    def receive(self, *, wait: bool, seconds: float | None = None) -> list[Command]:
        commands = next(self.turns, None)
        if commands is None:
            raise ChannelClosedError
        return commands

    def send(self, report: Report) -> None:
        self.reports.append(report)

    def rows(self) -> list[list[tuple[int, int]]]:
        """Handle and sample of every row, step by step."""
        mask = (1 << SAMPLE_BITS) - 1
        return [
            [(key >> SAMPLE_BITS, key & mask) for key in unpack_handles(report.rows)]
            for report in self.reports
            if isinstance(report, StepReport)
        ]


@pytest.fixture
def built(tiny: Path) -> Iterator[Built]:
    made = build(open_model(tiny, tokenizer=False), EngineConfig(num_kv_blocks=64, max_num_seqs=4, threads=1))
    yield made
    made.executor.close()


def add(handle: int, params: SamplingParams = LONG, prompt: tuple[int, ...] = (40, 41)) -> AddRequest:
    return AddRequest(
        handle, Request(request_id=f"r{handle}", prompt_token_ids=TokenIds(prompt), params=params)
    )


def drive(built: Built, *turns: list[Command]) -> Script:
    script = Script(list(turns))
    with contextlib.suppress(ChannelClosedError):
        EngineLoop(built.core, script).run()  # type: ignore[arg-type]
    return script


def test_an_abort_costs_no_step(built: Built) -> None:
    script = drive(built, [add(1), add(2)], [], [], [Abort(1)], [], [])
    assert script.rows() == [[(1, 0), (2, 0)]] * 3 + [[(2, 0)]] * 3
    built.core.abort("r2")
    assert built.core.scheduler.blocks_used == 0
    built.core.scheduler.audit()


def test_aborting_all_goes_idle_at_once_and_says_so(built: Built) -> None:
    script = drive(built, [add(1)], [], [Abort(1)], [Stop()])
    assert len(script.rows()) == 2
    last = script.reports[-1]
    assert isinstance(last, Stats)
    stats = last.stats
    assert (stats.running, stats.waiting, stats.blocks_used, stats.kv_waste_tokens) == (0, 0, 0, 0)
    assert stats.decode_tokens + stats.prefill_tokens == 3


def test_finish_ends_one_sample_of_several(built: Built) -> None:
    two = SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=100, ignore_eos=True)
    script = drive(built, [add(1, two)], [], [], [Finish(1, 0)], [], [Finish(1, 1)], [Finish(1, 1), Stop()])
    assert script.rows()[1:] == [[(1, 0), (1, 1)]] * 2 + [[(1, 1)]] * 2
    assert not built.core.has_work()


def test_unknown_handles_are_ignored_and_refusals_are_reported(built: Built) -> None:
    script = drive(built, [Abort(9), Finish(9, 0)], [add(1, prompt=(5,) * 300)], [add(2)], [Stop()])
    (refused,) = [report for report in script.reports if isinstance(report, Refused)]
    assert (refused.handle, refused.field) == (1, "prompt_token_ids")
    assert script.rows() == [[(2, 0)]]


def test_the_vocabulary_comes_when_it_is_sent(built: Built) -> None:
    drive(built, [Abort(1)], [Stop()])
    assert built.core.vocabulary is None
    tokens = TokenBytes(b"abc", array("i", [1, 1, 3]).tobytes())
    drive(built, [Vocabulary(tokens)], [Stop()])
    assert built.core.vocabulary == tokens
    assert [tokens[i] for i in range(len(tokens))] == [b"a", b"", b"bc"]
    for other in (-1, 3):
        with pytest.raises(IndexError):
            tokens[other]


def test_a_name_can_be_used_again_after_its_end(built: Built) -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    again = AddRequest(2, Request(request_id="r1", prompt_token_ids=TokenIds([7]), params=params))
    script = drive(built, [add(1)], [Abort(1), again], [Stop()])
    assert script.rows() == [[(1, 0)], [(2, 0)]]
    assert not built.core.has_work()


def in_time(core: EngineCore, turns: list[Command]) -> Iterator[list[Command]]:
    """These commands, and none until the core has nothing to do."""
    yield turns
    while core.has_work():
        time.sleep(0.001)
        yield []
    yield [Stop()]


def constrained(handle: int, source: str, **params: Any) -> AddRequest:
    plain = add(handle, SamplingParams(**({"temperature": 0, "max_tokens": 60} | params)))
    grammar = Grammar(source, hashlib.sha256(source.encode()).digest())
    return AddRequest(handle, replace(plain.request, grammar=grammar, stepwise=True))


def grown(script: Script, handle: int) -> tuple[list[int], FinishReason | None]:
    """The tokens of a request, and why it ended."""
    tokens: list[int] = []
    reason = None
    for report in script.reports:
        if isinstance(report, StepReport):
            rows, news = report.unpack()
            for row, (key, new) in enumerate(zip(rows, news, strict=True)):
                if key >> SAMPLE_BITS == handle:
                    tokens += new
                    reason = next((note.finish_reason for note in report.notes if note.row == row), None)
    return tokens, reason


def test_a_request_waits_for_its_grammar_and_holds_up_no_other(tiny: Path, built: Built) -> None:
    """The engine process reads the tokenizer itself, with its first grammar."""
    tokenizer = open_model(tiny).tokenizer
    assert tokenizer is not None
    text = '{"name": "x"}'
    vocabulary = Vocabulary(tokenizer.all_bytes(built.program.vocab))
    script = Script([])
    asked = [vocabulary, constrained(1, f"start: {json.dumps(text)}"), add(2, SamplingParams(max_tokens=3))]
    script.turns = in_time(built.core, asked)
    EngineLoop(built.core, script).run()  # type: ignore[arg-type]
    assert grown(script, 1) == (tokenizer.encode(text), FinishReason.STOP)
    first = next(report for report in script.reports if isinstance(report, StepReport))
    assert {key >> SAMPLE_BITS for key in unpack_handles(first.rows)} == {2}  # while the other is compiled


def test_a_grammar_that_fails_is_the_error_of_its_request(tiny: Path, built: Built) -> None:
    tokenizer = open_model(tiny).tokenizer
    assert tokenizer is not None
    early = drive(built, [constrained(1, 'start: "a"')])
    (refused,) = [report for report in early.reports if isinstance(report, Refused)]
    assert (refused.field, "vocabulary" in refused.message) == ("grammar", True)
    script = Script([])
    asked: list[Command] = [
        Vocabulary(tokenizer.all_bytes(built.program.vocab)),
        constrained(2, "start: missing"),
        constrained(3, 'start: "' + "a" * 2**20 + '"'),
        constrained(4, 'start: "a"', n=2),
        Abort(4),
        add(5, SamplingParams(max_tokens=3)),
    ]
    script.turns = in_time(built.core, asked)
    EngineLoop(built.core, script).run()  # type: ignore[arg-type]
    refusals = {r.handle: r for r in script.reports if isinstance(r, Refused)}
    assert refusals.keys() == {2, 3}
    assert all(refusal.field == "grammar" for refusal in refusals.values())
    assert "missing" in refusals[2].message
    assert "512.00 KiB" in refusals[3].message
    assert grown(script, 5)[1] is FinishReason.LENGTH
    built.core.scheduler.audit()
