"""The lesson's simulations over HTTP: a list with their controls, and what each shows for given values."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import msgspec

from quire.learn.scene import Control
from quire.server.context import ServerContext
from quire.server.errors import ApiError, bad_request
from quire.server.exchange import Exchange
from quire.server.query import query_of
from quire.server.routes import Act, Get, HttpRoute

_PREFIX = "/learn/api/sim/"
_one_at_a_time = asyncio.Lock()  # they compute in a thread, beside the engine


class SimulationInfo(msgspec.Struct):
    """A simulation and its controls. `source` says where its numbers come from."""

    number: int
    name: str
    title: str
    about: str
    source: str
    controls: list[Control]


class SimulationList(msgspec.Struct):
    """All simulations."""

    data: list[SimulationInfo]


class Shown(msgspec.Struct):
    """What a simulation shows: figures, pictures, places of memory, tables, and a remark."""

    figures: list[dict[str, Any]]
    charts: list[dict[str, Any]]
    cells: list[dict[str, Any]]
    tables: list[dict[str, Any]]
    remark: str


async def _list(_: ServerContext, __: Exchange) -> SimulationList:
    from quire.learn.simulations import simulations

    return SimulationList(
        [
            SimulationInfo(one.number, one.name, one.title, one.about, one.source, [*one.controls])
            for one in simulations().values()
        ]
    )


class QuestionInfo(msgspec.Struct):
    """A question with its choices, the right one, why, and the simulation that shows it."""

    chapter: int
    text: str
    choices: list[str]
    right: str
    why: str
    simulation: str


class QuestionList(msgspec.Struct):
    """The questions by chapter."""

    data: list[QuestionInfo]


async def _quiz(_: ServerContext, __: Exchange) -> QuestionList:
    from quire.learn.quiz import questions

    return QuestionList([msgspec.convert(asdict(one), QuestionInfo) for one in questions()])


async def _show(context: ServerContext, exchange: Exchange) -> Shown:
    from quire.learn.simulations import simulation
    from quire.server.pages.lifecycle import lifecycle

    try:
        one = simulation(exchange.path.removeprefix(_PREFIX))
    except ValueError as error:
        raise ApiError(404, str(error), code="not_found") from None
    given = query_of(exchange.scope["query_string"])
    async with _one_at_a_time:
        try:
            if one.name == "lifecycle":
                scene = await lifecycle(context, exchange, one.values(given))
            else:
                scene = await asyncio.to_thread(one.scene, given)
        except ValueError as error:
            raise bad_request(str(error).partition(":")[0], str(error)) from None
    return Shown(**scene.to_json())


ROUTES: tuple[HttpRoute, ...] = (
    Get(
        path="/learn/api/sims", summary="Simulations of the lesson, with their controls", tag="pages", api="",
        handler=_list, response=SimulationList,
    ),
    Get(
        path="/learn/api/quiz", summary="Questions of the lesson, with their answers", tag="pages", api="",
        handler=_quiz, response=QuestionList,
    ),
    Act(
        verb="GET", path=_PREFIX + "{}", rest="name", summary="What a simulation shows for values of its controls",
        tag="pages", api="", handler=_show, response=Shown,
    ),
)  # fmt: skip
