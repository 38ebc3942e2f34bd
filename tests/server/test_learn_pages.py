"""The lesson's simulations over HTTP."""

from __future__ import annotations

from urllib.parse import urlencode

import pytest

from helpers.server import LiveServer
from quire.cli.serve import simulated
from quire.learn.offered import offer
from quire.learn.quiz import questions
from quire.learn.simulations import simulations
from quire.planner import memory_sums
from quire.planner.figure import Figure

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


def test_questions_come_with_their_answers(server: LiveServer) -> None:
    found = server.get("/learn/api/quiz").json["data"]
    assert [one["right"] for one in found] == [one.right for one in questions()]
    assert all(one["right"] in one["choices"] for one in found)


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
