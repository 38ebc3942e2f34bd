"""The lesson's simulations over HTTP."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from helpers.server import GUARD, LiveServer, serving
from quire.bench.lesson import measured_levels
from quire.cli.serve import simulated
from quire.core.policy import BACKGROUND
from quire.core.scheduler_config import SchedulerConfig
from quire.engine.api import EngineState, GenerateAsk, Stream
from quire.executor import sampler
from quire.executor.base import SampledRows
from quire.executor.sampler import HostSampler
from quire.learn import lanes
from quire.learn.chapters import chapter, chapters
from quire.learn.next_token import STORY
from quire.learn.offered import offer
from quire.learn.quiz import questions
from quire.learn.simulations import simulations
from quire.planner import formulas, memory_sums
from quire.planner.figure import Figure
from quire.program.step_work import MachinePeaks
from quire.server.pages import real_lanes
from quire.server.pages.see import SIGHTS
from quire.speculate.prediction import PredictionProposer
from quire.steplog.recorder import Recorder
from quire.types import NewSeq
from quire.util.platform import usable_cores

offer(simulated)


@pytest.mark.parametrize("name", sorted(simulations().keys() - {"lifecycle"}))
def test_pages_show_what_the_simulation_says(server: LiveServer, name: str) -> None:
    one, reply = simulations()[name], server.get(f"/learn/api/sim/{name}")
    assert reply.status == 200
    scene = one.scene({}).to_json()
    same = [figure["label"] for figure in scene["figures"] if figure["label"] != "time here"]
    got = {figure["label"]: figure["shown"] for figure in reply.json["figures"]}
    assert {label: got[label] for label in same} == {
        f["label"]: f["shown"] for f in scene["figures"] if f["label"] in same
    }
    less = "?real=false" if any(control.name == "real" for control in one.controls) else ""
    assert server.get(f"/learn/api/sim/{one.number}{less}").status == 200
    listed = next(each for each in server.get("/learn/api/sims").json["data"] if each["name"] == name)
    assert [each["name"] for each in listed["controls"]] == [each.name for each in one.controls]


def test_a_changed_sum_changes_the_page(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers come from the calculators: another one there is another one on the page."""
    monkeypatch.setattr(
        memory_sums, "prefix_cache", lambda **_: iter([Figure("without", 7.0), Figure("with", 3.0)])
    )
    figures = {
        one["label"]: one["value"] for one in server.get("/learn/api/sim/prefix-cache").json["figures"]
    }
    assert (figures["without"], figures["time to the first token"]) == (7.0, 3.0)


def test_errors_over_http_name_the_control(server: LiveServer) -> None:
    reply = server.get("/learn/api/sim/memory?" + urlencode({"precision": "INT3"}))
    assert (reply.status, reply.json["error"]["param"]) == (400, "precision")
    assert server.get("/learn/api/sim/memori").status == 404


def test_the_server_judges_answers(server: LiveServer) -> None:
    found = server.get("/learn/api/quiz").json["data"]
    assert all("right" not in one for one in found)
    for one, question in zip(found, questions(), strict=True):
        for choice in one["choices"]:
            path = f"/learn/api/quiz/{one['chapter']}?{urlencode({'answer': choice})}"
            said = server.get(path).json
            assert said["correct"] == (choice == question.right)
            assert said["right"] == question.right
    server.get("/learn/api/quiz/3?answer=none").error(400, param="answer")
    assert server.get("/learn/api/quiz/11?answer=1").status == 404


def test_chapters_come_with_computed_numbers(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = server.get("/learn/api/chapters").json["data"]
    assert [one["name"] for one in listed] == [*chapters()]
    for one in listed:
        body = server.get(f"/learn/api/chapters/{one['name']}").json
        assert body["blocks"] == chapter(one["name"]).page()
        assert body["listings"].keys() == {b["name"] for b in body["blocks"] if b["kind"] == "listing"}
        assert body["sights"].keys() == {b["name"] for b in body["blocks"] if b["kind"] == "see"}
    assert "95.71 tokens/s" in server.get("/learn/api/chapters/0").body.decode()
    monkeypatch.setattr(formulas, "decode_bound", lambda *_: 1234.0)
    assert "1,234 tokens/s" in server.get("/learn/api/chapters/0").body.decode()
    assert server.get("/learn/api/chapters/nothing").status == 404


@pytest.mark.parametrize("name", SIGHTS)
def test_what_a_chapter_shows_runs_on_this_engine(server: LiveServer, name: str) -> None:
    before = server.engine.stats.steps
    reply = server.get(f"/learn/api/see/{name}")
    assert reply.status == 200, reply.body
    server.wait(lambda: name == "memory" or server.engine.stats.steps > before)
    figures = {one["label"]: one["value"] for one in reply.json["figures"]}
    assert all(value >= 0 for value in figures.values())
    if name == "batch":
        assert figures["as many times"] > 0
    if name == "blocks":
        assert figures["held and unused"] < 2 * figures["a block"]
        assert figures["its blocks"] > 1
    if name == "memory":
        parts = server.engine.stats.memory_parts
        assert figures["planned"] == sum(parts.values()) / 2**20
        assert figures["weights"] == parts["weights"] / 2**20
    if name == "arrivals":
        assert [row[0] for row in reply.json["tables"][0]["rows"]] == ["4", "16", "64"]
    assert server.get(f"/learn/api/see/{name}?tokens=3").status == 400


def test_nothing_else_to_see(server: LiveServer) -> None:
    assert server.get("/learn/api/see/secrets").status == 404


def steps_of(scene: dict[str, Any]) -> int:
    """Steps of the request that a life tells of."""
    remark = next(figure["remark"] for figure in scene["figures"] if figure["label"] == "the request")
    return int(remark.split()[0])


def test_the_life_of_a_request_is_that_of_this_engine(server: LiveServer) -> None:
    assert len(server.get("/learn/api/sims").json["data"]) == 16
    before = server.engine.stats.steps
    reply = server.get("/learn/api/sim/1?tokens=6")
    assert reply.status == 200
    server.wait(lambda: server.engine.stats.steps > before)
    *stages, whole = [figure["value"] for figure in reply.json["figures"]][:7]
    assert sum(stages) == pytest.approx(whole)
    assert all(value >= 0 for value in stages)
    answer, life = reply.json["tables"]
    assert 1 <= len(answer["rows"]) <= 6
    (flow,) = reply.json["flows"]
    assert len(flow["places"]) == 6
    assert flow["arrows"][-1][:2] == [5, 2]  # from the last stage to the third, once a token
    entered = [stage for _, stage in flow["moments"]]
    assert entered[:2] == [0, 1]
    assert entered.count(2) == entered.count(3) == entered.count(4) == steps_of(reply.json)
    assert entered.count(5) == len(answer["rows"])
    spent = sum(float(row[2].split()[0]) for row in life["rows"])
    assert spent <= whole + 0.01 * len(life["rows"])
    server.get("/learn/api/sim/1?tokens=0").error(400, param="tokens")


def scene_of(server: LiveServer, path: str) -> dict[str, Any]:
    reply = server.get(f"/learn/api/sim/{path}")
    assert reply.status == 200, reply.body
    found: dict[str, Any] = reply.json
    found["numbers"] = {figure["label"]: figure["value"] for figure in found["figures"]}
    return found


def test_the_next_token_is_that_of_this_model(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chances are those that the API reports, shaped by the sampler; tokens are drawn from what is left."""
    body = {"temperature": 0, "max_tokens": 1, "logprobs": 5, "ignore_eos": True}
    said = server.complete(STORY, **body).json["choices"][0]["logprobs"]["top_logprobs"][0]
    likely = [math.exp(value) for value in sorted(said.values(), reverse=True)]
    for path, count in (("2?top_k=3", 3), ("2?temperature=0", 1)):
        before, now, drawn = (one["y"] for one in scene_of(server, path)["charts"][1]["series"])
        assert before[:5] == pytest.approx(likely)
        assert now[:count] == pytest.approx([one / sum(likely[:count]) for one in likely[:count]])
        assert not any(now[count:])
        assert sum(drawn) == 1
        assert not any(drawn[count:])
    plain = scene_of(server, "2")["charts"][1]["series"]
    assert plain[1]["y"] == pytest.approx(plain[0]["y"], rel=1e-3)
    own = sampler._slot_params

    def cooler(new: NewSeq) -> Any:
        return own(replace(new, params=replace(new.params, top_k=1)))

    monkeypatch.setattr(sampler, "_slot_params", cooler)
    changed = scene_of(server, "2")
    assert changed["numbers"]["mat"] == 1
    assert [one["y"][0] for one in changed["charts"][1]["series"][1:]] == [1, 1]


def test_real_drafts_leave_the_text_as_it_is(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(label.startswith("this server") for label in scene_of(server, "11")["numbers"])
    right, wrong = (scene_of(server, f"11?real=true&alpha={alpha}") for alpha in (1, 0))
    for found in (right, wrong):
        assert {row[-1] for row in found["tables"][0]["rows"]} == {"yes"}
    drafted, accepted, rejected, steps = map(int, right["tables"][0]["rows"][-1][1:5])
    assert accepted > 30
    assert accepted + rejected == drafted
    assert steps == 64 - accepted
    assert wrong["tables"][0]["rows"][-1][2] == "0"
    monkeypatch.setattr(PredictionProposer, "look", lambda *_: {})
    assert scene_of(server, "11?real=true&alpha=1")["tables"][0]["rows"][-1][1] == "0"


def test_judged_rounds_are_those_of_the_sampler(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = HostSampler.verify

    def stern(
        self: HostSampler, outputs: Any, slots: Any, positions: Any, drafts: Any, **more: Any
    ) -> SampledRows:
        found = verify(self, outputs, slots, positions, drafts, **more)
        return replace(found, token_ids=1 + 0 * found.token_ids)

    monkeypatch.setattr(HostSampler, "verify", stern)
    assert scene_of(server, "11")["numbers"]["tokens of a round, drawn"] == 1


def test_a_prefix_is_found_by_the_real_cache(server: LiveServer, folder: Path) -> None:
    label = "this server: from the cache, {}".format
    found = scene_of(server, "14?prefix=100&new=20")["numbers"]
    assert found["time to the first token"] == 40 / 80 * 20  # what lessons print stays beside it
    assert found[label("a hit")] == 100
    assert found[label("a miss")] < 16
    assert found[label("one space before it")] < 16
    assert found["this server: time to the first token"] > 0
    with serving(folder, {"enable_prefix_caching": False}) as live:
        found = scene_of(live, "14?prefix=100&new=20")["numbers"]
        assert found[label("a hit")] == 0


@pytest.mark.parametrize("variance", [0, 50, 100])
def test_lanes_of_batching_are_requests_of_this_engine(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, variance: int
) -> None:
    """Steps are those that the engine counts: a closed batch takes as many as its longest answer has tokens."""
    monkeypatch.setattr(real_lanes, "_LANE_SECONDS", GUARD)  # all requests come, however slow steps are
    before = server.engine.stats.steps
    found = scene_of(server, f"8?variance={variance}&rate=20&requests=24&seed=3")
    lengths = lanes.lengths_of(8, variance, 3)
    ratio = found["numbers"]["this server: steps of a closed batch, to the mean length"]
    assert ratio == pytest.approx(max(lengths) * 8 / sum(lengths), rel=0.05)
    assert (ratio == 1) == (variance == 0)
    table = {row[0]: row for row in found["tables"][1]["rows"]}
    asked = sum(lanes.lengths_of(24, variance, 3))
    assert {name: row[-1] for name, row in table.items()} == dict.fromkeys(lanes.POLICIES, f"{asked:,}")
    names = [one["name"] for one in found["charts"][1]["series"]]
    assert names == [*lanes.POLICIES]
    places = {name: int(row[4].replace(",", "")) for name, row in table.items()}
    assert places["static"] > 0 or variance == 0
    ran = sum(len(one["y"]) for one in found["charts"][1]["series"])
    server.wait(lambda: server.engine.stats.steps - before > ran / 4)


def test_lanes_are_background_work_and_end(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of others come first, under every policy, and none of these lasts."""
    asked: list[GenerateAsk] = []
    own = type(server.engine).generate

    def generate(self: Any, ask: GenerateAsk) -> Stream:
        asked.append(ask)
        return own(self, ask)

    monkeypatch.setattr(type(server.engine), "generate", generate)
    scene_of(server, "8?rate=50&requests=8")
    assert len(asked) == 8 + 3 * 8
    assert {ask.request.priority for ask in asked} == {BACKGROUND}
    assert len({ask.deadline for ask in asked}) == 1
    assert not any(ask.request.speculate for ask in asked)


def test_lanes_that_would_take_too_long_are_not_run(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_lanes, "_LANE_SECONDS", 0.0)
    found = scene_of(server, "8?requests=8")
    assert "the lanes would take too long" in found["remark"]
    assert len(found["tables"]) == 1
    assert not any(label.startswith("this server") for label in scene_of(server, "8?real=false")["numbers"])


def test_steps_of_a_pipeline_are_not_counted(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has half of the rows."""
    log = Recorder(SchedulerConfig(num_blocks=8, block_size=16, steps_in_flight=2, takes_turns=True)).ring()

    async def of_a_pipeline(self: Any) -> bytes:
        return log

    monkeypatch.setattr(type(server.engine), "log", of_a_pipeline)
    found = scene_of(server, "8?requests=8")
    assert "In a pipeline each step has half of the rows" in found["remark"]
    assert not any(label.startswith("this server") for label in found["numbers"])


def test_phases_are_measured_here(server: LiveServer) -> None:
    found = scene_of(server, "3?prompt=64&output=9")["numbers"]
    first, each = found["this server: TTFT"], found["this server: TPOT"]
    assert found["this server: whole request"] == pytest.approx(first + 8 * each)


def test_this_machine_has_a_column(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    measured_levels._levels.cache_clear()
    monkeypatch.setattr(measured_levels, "load_peaks", lambda *_: MachinePeaks(40e9, {}))
    monkeypatch.setattr(measured_levels, "cache_rates", lambda *_: {"L2": (200e9, usable_cores())})
    found = scene_of(server, "5")
    assert (found["numbers"]["this machine: L2"], found["numbers"]["this machine: memory"]) == (200, 40)
    assert found["tables"][1]["rows"] == [["L2", "200", "5 ms"], ["memory", "40", "25 ms"]]
    measured_levels._levels.cache_clear()


def test_lessons_are_shown_while_the_engine_takes_no_requests(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(server.engine), "state", property(lambda _: EngineState.SLEEPING))
    found = scene_of(server, "14")
    assert found["numbers"]["time to the first token"] == 40
    assert "sleeps" in found["remark"]
    assert server.get("/learn/api/sim/1").status == 503
