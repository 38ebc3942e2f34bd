"""Where the time of a request went: parts that sum to it, and the cause that a test has made."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.engine.core import EngineCore
from quire.steplog import log_rows as rows
from quire.steplog.explain import PARTS, Explanation, explain, text_of
from quire.steplog.log_files import LogFile, read_rows
from quire.steplog.log_rows import encode

from .storm import MS, Clock, engine, request, storm


def told(core: EngineCore, name: str) -> Explanation:
    assert core.recorder is not None
    found = explain(read_rows(core.recorder.ring()).rows, name)
    assert found is not None
    return found


SHAPES: list[dict[str, Any]] = [
    {"num_blocks": 24},
    {"num_blocks": 24, "max_draft_tokens": 6},
    {"policy": "priority+fair", "max_num_seqs": 3},
    {"slo": ("chat:ttft=500ms,tpot=3ms",)},
]


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_parts_sum_to_the_wall_time_in_storms(shape: int) -> None:
    """Of every request, also those that are preempted, drafted for or cancelled."""
    seen: set[str] = set()
    for seed in (1, 2):
        core, names = storm(1000 * shape + seed, **SHAPES[shape])
        assert core.recorder is not None
        log = read_rows(core.recorder.ring()).rows
        ends = {}
        for row in log:
            if isinstance(row, rows.Ended | rows.Aborted):
                ends[row.number] = max(row.at, ends.get(row.number, 0))
        for name in names:
            found = explain(log, name)
            assert found is not None
            seen |= {found.reason}
            for before, after in zip(found.spans, found.spans[1:], strict=False):
                assert before.end == after.start
                assert before.start < before.end
            arrival = next(r.arrival for r in log if isinstance(r, rows.Arrived) and r.request_id == name)
            wall = ends[found.number] - int(arrival * 1e9)
            assert abs(sum(found.parts().values()) - wall) < MS, name
            assert set(found.parts()) <= set(PARTS)
            assert found.finished
            assert text_of(found).startswith(name)
    assert {"length", "stop", "abort"} <= seen


def test_marks_of_the_server_are_parts_too() -> None:
    core, clock = alone()
    mark(core, clock, "a", receive=3, parse=4, tokenize=0, text=7, write=8, unread=9)
    found = told(core, "a")
    parts = found.parts()
    assert [round(parts[name] / MS) for name in ("detokenize", "write", "slow reader")] == [7, 8, 9]
    whole = next(r for r in log_of(core) if isinstance(r, rows.ServerMarks))
    assert abs(found.total - (whole.written - whole.begun) * 1e9) < MS


def log_of(core: EngineCore) -> list[Any]:
    assert core.recorder is not None
    return read_rows(core.recorder.ring()).rows


def alone(**options: Any) -> tuple[EngineCore, Clock]:
    core, _, clock = engine(1, **options)
    request(core, "a", [*range(10, 20)], clock, max_tokens=5, ignore_eos=True)
    run(core)
    return core, clock


def run(core: EngineCore) -> None:
    while core.has_work():
        core.step()


def mark(core: EngineCore, clock: Clock, name: str, **ms: float) -> None:
    """What a server would say of a request: milliseconds before and after the engine had it."""
    log = log_of(core)
    arrived = next(r for r in log if isinstance(r, rows.Arrived) and r.request_id == name)
    ended = max(r.at for r in log if isinstance(r, rows.Ended | rows.Aborted) and r.number == arrived.number)
    at = arrived.arrival - ms.get("tokenize", 0.1) / 1e3
    parsed, received = at, at - ms.get("parse", 0.1) / 1e3
    begun = received - ms.get("receive", 0.1) / 1e3
    compiled = arrived.arrival + ms.get("compiled", 0) / 1e3
    finished = ended / 1e9 + ms.get("text", 0.1) / 1e3
    unread = ms.get("unread", 0) / 1e3
    written = finished + ms.get("write", 0.1) / 1e3 + unread
    assert core.recorder is not None
    core.recorder.told(
        encode(
            rows.ServerMarks(
                name, begun, received, parsed, compiled, compiled + ms.get("admitted", 0) / 1e3, finished, written,
                unread,
            )
        )
    )  # fmt: skip


def marked(**ms: float) -> Callable[[], Explanation]:
    def make() -> Explanation:
        core, _, clock = engine(1)
        arrival = clock() / 1e9
        late = ms.get("compiled", 0) + ms.get("admitted", 0) + ms.get("handover", 0)
        clock.now += int(late * MS)
        made = request(core, "a", [*range(10, 20)], clock, max_tokens=5, ignore_eos=True)
        run(core)
        # the request was tokenized before its grammar was compiled
        log = log_of(core)
        row = next(r for r in log if isinstance(r, rows.Arrived))
        fields = {name: getattr(row, name) for name in row.__struct_fields__} | {"arrival": arrival}
        mark_at = log.index(row)
        assert made.request_id == "a"
        log[mark_at] = rows.Arrived(**fields)
        marks = rows.ServerMarks(
            "a", arrival - sum(ms.get(n, 0.1) for n in ("tokenize", "parse", "receive")) / 1e3,
            arrival - sum(ms.get(n, 0.1) for n in ("tokenize", "parse")) / 1e3,
            arrival - ms.get("tokenize", 0.1) / 1e3,
            arrival + ms.get("compiled", 0) / 1e3,
            arrival + (ms.get("compiled", 0) + ms.get("admitted", 0)) / 1e3,
            clock.now / 1e9 + ms.get("text", 0.1) / 1e3,
            clock.now / 1e9 + (ms.get("text", 0.1) + ms.get("write", 0.1) + ms.get("unread", 0)) / 1e3,
            ms.get("unread", 0) / 1e3,
        )  # fmt: skip
        found = explain([*log, marks], "a")
        assert found is not None
        return found

    return make


def behind_prompts() -> Explanation:
    core, worker, clock = engine(
        1, num_blocks=400, max_num_batched_tokens=16, max_model_len=400, max_num_seqs=9
    )
    worker.token_ms = 1.0
    for i in range(3):
        request(core, f"big{i}", [i + 50, *range(200)], clock, max_tokens=2, ignore_eos=True)
    return last(core, clock)


def last(core: EngineCore, clock: Clock, prompt: int = 10, tokens: int = 3) -> Explanation:
    request(core, "a", [*range(700, 700 + prompt)], clock, max_tokens=tokens, ignore_eos=True)
    run(core)
    return told(core, "a")


def places_taken() -> Explanation:
    core, _, clock = engine(1, max_num_seqs=2, num_blocks=200)
    for i in range(2):
        request(core, f"long{i}", [i + 1, 2, 3], clock, max_tokens=60, ignore_eos=True)
    core.step()
    return last(core, clock)


def cache_full() -> Explanation:
    core, _, clock = engine(1, num_blocks=16, max_num_seqs=9, max_model_len=64)
    request(core, "long", [1, 2, 3], clock, max_tokens=50, ignore_eos=True)
    for _ in range(30):
        core.step()
    return last(core, clock, prompt=40)


def preempted() -> Explanation:
    core, _, clock = engine(1, num_blocks=20, max_num_seqs=2, max_model_len=80)
    request(core, "first", [1, 2, 3], clock, max_tokens=70, ignore_eos=True)
    for _ in range(30):
        core.step()
    return last(core, clock, prompt=20, tokens=25)


def other_prompts() -> Explanation:
    core, worker, clock = engine(
        1, num_blocks=900, max_num_batched_tokens=64, max_model_len=900, max_num_seqs=9
    )
    worker.token_ms = 0.5
    request(core, "a", [*range(10)], clock, max_tokens=20, ignore_eos=True)
    core.step()
    for i in range(4):
        request(core, f"big{i}", [i + 50, *range(300)], clock, max_tokens=2, ignore_eos=True)
    run(core)
    return told(core, "a")


def own_prompt() -> Explanation:
    core, worker, clock = engine(1, num_blocks=900, max_num_batched_tokens=64, max_model_len=900)
    worker.token_ms = 1.0
    return last(core, clock, prompt=600, tokens=2)


def own_answer() -> Explanation:
    core, _, clock = engine(1)
    return last(core, clock, tokens=60)


def slow_drafts() -> Explanation:
    core, _, clock = engine(1, max_draft_tokens=4)

    class Slow:
        last = None
        rows = drafted = faults = 0

        def idles(self, out: Any, drafts: int) -> bool:
            return False

        def fill(self, out: Any, text_of: Any) -> None:
            clock.now += 20 * MS

        def advance(self, out: Any, result: Any, seconds: float) -> None:
            self.last = type("Drafts", (), {"drafted": 0, "accepted": 0})

    core.speculation = Slow()  # type: ignore[assignment]
    return last(core, clock, tokens=20)


def stolen() -> Explanation:
    core, _ = alone()
    return forged(core, lambda step: {"stolen": 1500})


def forged(core: EngineCore, change: Callable[[rows.Step], dict[str, Any]]) -> Explanation:
    """Of `a`, by the log of an engine whose steps had other fields."""
    log = [
        rows.Step(**{n: getattr(row, n) for n in row.__struct_fields__} | change(row))
        if isinstance(row, rows.Step)
        else row
        for row in log_of(core)
    ]
    found = explain(log, "a")
    assert found is not None
    return found


def out_of_the_swap_space() -> Explanation:
    """Copies of its blocks come back while others run."""
    core, _, clock = engine(1, max_num_seqs=2, num_blocks=200)
    for i in range(2):
        request(core, f"long{i}", [i + 1, 2, 3], clock, max_tokens=60, ignore_eos=True)
    core.step()
    last(core, clock)
    return forged(core, lambda step: {"fetching": [] if rows_of(step, 2) else [2 << rows.SAMPLE_BITS]})


def without_a_row() -> Explanation:
    """It runs, and most steps compute others alone."""
    core, _, clock = engine(1)
    request(core, "other", [1, 2, 3], clock, max_tokens=60, ignore_eos=True)
    last(core, clock, tokens=60)

    def cut(step: rows.Step) -> dict[str, Any]:
        kept = rows_of(step, 0) if 5 < step.number < 50 else []
        return {"rows": [number for flat in kept for number in flat]} if kept else {}

    return forged(core, cut)


def rows_of(step: rows.Step, number: int) -> list[list[int]]:
    """The four numbers of each row of a request in a step."""
    quads = [step.rows[i : i + 4] for i in range(0, len(step.rows), 4)]
    return [flat for flat in quads if flat[0] >> rows.SAMPLE_BITS == number]


def between_queue(trait: str) -> Callable[[], Explanation]:
    """A request that the engine keeps until its grammar or adapter is there."""

    def make() -> Explanation:
        core, _ = alone()
        log = log_of(core)
        at = next(i for i, r in enumerate(log) if isinstance(r, rows.Arrived))
        row = log[at]
        fields = {n: getattr(row, n) for n in row.__struct_fields__}
        fields |= {"at": row.at - 300 * MS, "arrival": row.arrival - 0.3, "traits": (trait,)}
        log[at] = rows.Arrived(**fields)
        found = explain(log, "a")
        assert found is not None
        return found

    return make


CAUSES: dict[str, tuple[Callable[[], Explanation], str]] = {
    "slow upload": (marked(receive=900), "receive"),
    "large body": (marked(parse=900), "parse"),
    "long template": (marked(tokenize=900), "tokenize"),
    "grammar in the server": (marked(compiled=900), "grammar"),
    "grammar in the engine": (between_queue("grammar"), "grammar"),
    "adapter": (between_queue("adapter"), "adapter"),
    "memory of answers": (marked(admitted=900), "memory"),
    "engine busy": (marked(handover=900), "handover"),
    "behind prompts": (behind_prompts, "queue: prompts of others took the tokens of its steps"),
    "places taken": (places_taken, "queue: all places were taken"),
    "cache full": (cache_full, "queue: the KV cache was full"),
    "preempted": (preempted, "preempted"),
    "other prompts": (other_prompts, "other prompts"),
    "own prompt": (own_prompt, "prefill"),
    "own answer": (own_answer, "decode"),
    "drafts": (slow_drafts, "draft"),
    "stolen CPU": (stolen, "stolen CPU"),
    "swap space": (out_of_the_swap_space, "fetch"),
    "no row of it": (without_a_row, "held back"),
    "text": (marked(text=900), "detokenize"),
    "write": (marked(write=900), "write"),
    "slow reader": (marked(unread=900), "slow reader"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_that_was_made_is_named(name: str) -> None:
    make, cause = CAUSES[name]
    assert make().cause() == cause


MARKS = {
    "receive": "receive", "parse": "parse", "tokenize": "tokenize", "compiled": "grammar", "admitted": "memory",
    "handover": "handover", "text": "detokenize", "write": "write", "unread": "slow reader",
}  # fmt: skip


@pytest.mark.parametrize("pair", list(permutations(MARKS, 2)), ids=" and ".join)
def test_causes_that_come_together_are_all_told(pair: tuple[str, str]) -> None:
    """The larger is the cause, unless only the other is not the request's own work."""
    found = marked(**{pair[0]: 900, pair[1]: 400})()
    first, second = (MARKS[name] for name in pair)
    parts = found.parts()
    assert parts[first] >= 899 * MS
    assert parts[second] >= 399 * MS
    assert found.cause() == (second if PARTS[second][1] and not PARTS[first][1] else first)
    text = text_of(found, {})
    assert PARTS[first][0] in text
    assert PARTS[second][0] in text


def test_behind_whom_is_told() -> None:
    found = behind_prompts()
    text = text_of(found, {0: "big0", 1: "big1", 2: "big2"})
    assert "above all the prompt of big" in text.splitlines()[0]
    assert "another request" in text_of(found).splitlines()[0]


def test_a_request_that_is_not_in_the_log() -> None:
    core, _ = alone()
    assert explain(log_of(core), "b") is None


def test_a_request_that_runs_is_explained_so_far() -> None:
    core, _, clock = engine(1)
    request(core, "a", [*range(10)], clock, max_tokens=20, ignore_eos=True)
    core.step()
    core.step()
    found = told(core, "a")
    assert not found.finished
    assert "so far" in text_of(found)


def test_the_command_explains_requests_of_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The slowest first; one by its name, with the same parts; a name that is not there; and what a cut has left."""
    path = tmp_path / "a.qlog"
    core, names = storm(5, file=LogFile(path, 2**24))
    assert core.recorder is not None
    core.recorder.close()
    assert main(["explain", "--log", str(path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed) == 20
    assert [one["ms"] for one in listed] == sorted((one["ms"] for one in listed), reverse=True)
    slowest = listed[0]["id"]
    assert slowest in names
    assert main(["explain", "--log", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[2] == slowest
    assert main(["explain", slowest, "--log", str(path), "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert sum(one["parts"].values()) == pytest.approx(one["total_ms"])
    assert one["total_ms"] == listed[0]["ms"]
    assert main(["explain", slowest, "--log", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"{slowest}: ")
    assert main(["explain", "nobody", "--log", str(path)]) == 1
    assert "no request 'nobody'" in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:-3])
    assert main(["explain", "--log", str(path)]) == 0
    assert "note: " in capsys.readouterr().out
    assert main(["explain"]) == 2
