"""The lesson's simulations over HTTP."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest

from helpers.server import LiveServer
from quire.cli.serve import simulated
from quire.learn.chapters import chapter, chapters
from quire.learn.offered import offer
from quire.learn.quiz import questions
from quire.learn.simulations import simulations
from quire.planner import formulas, memory_sums
from quire.planner.figure import Figure
from quire.server.pages.see import SIGHTS

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
    assert server.get(f"/learn/api/sim/{one.number}").status == 200
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
    server.wait(lambda: server.engine.stats.steps > before)
    figures = {one["label"]: one["value"] for one in reply.json["figures"]}
    assert all(value >= 0 for value in figures.values())
    if name == "token":
        assert sum(figures.values()) == pytest.approx(1)
    if name == "prefix":
        first, again, spaced = figures.values()
        assert first == spaced == 0
        assert again > 50
    if name == "batch":
        assert figures["as many times"] > 0
    assert server.get(f"/learn/api/see/{name}?tokens=3").status == 400


def test_nothing_else_to_see(server: LiveServer) -> None:
    assert server.get("/learn/api/see/secrets").status == 404


def test_the_life_of_a_request_is_that_of_this_engine(server: LiveServer) -> None:
    assert len(server.get("/learn/api/sims").json["data"]) == 16
    before = server.engine.stats.steps
    reply = server.get("/learn/api/sim/1?tokens=6")
    assert reply.status == 200
    server.wait(lambda: server.engine.stats.steps > before)
    *stages, whole, _ = [figure["value"] for figure in reply.json["figures"]]
    assert len(stages) == 6
    assert sum(stages) == pytest.approx(whole)
    assert all(value >= 0 for value in stages)
    answer, life = reply.json["tables"]
    assert 1 <= len(answer["rows"]) <= 6
    spent = sum(float(row[2].split()[0]) for row in life["rows"])
    assert spent <= whole + 0.01 * len(life["rows"])
    server.get("/learn/api/sim/1?tokens=0").error(400, param="tokens")
