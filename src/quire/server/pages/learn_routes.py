"""The lesson's simulations over HTTP: a list with their controls, and what each shows for given values."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from quire.learn.scene import Control
from quire.server.context import ServerContext
from quire.server.errors import ApiError, bad_request
from quire.server.exchange import Exchange
from quire.server.query import query_of
from quire.server.routes import Act, Get, HttpRoute

_PREFIX = "/learn/api/sim/"
_CHAPTER, _QUIZ, _SEE = "/learn/api/chapters/", "/learn/api/quiz/", "/learn/api/see/"
_one_at_a_time = asyncio.Lock()  # they compute in a thread, beside the engine


class SimulationInfo(msgspec.Struct):
    """A simulation and its controls. `source` says where its numbers come from, `speed` how fast a replay of its lines
    goes at first, 0 for one whose lines are not over time."""

    number: int
    name: str
    title: str
    about: str
    source: str
    speed: int
    controls: list[Control]


class SimulationList(msgspec.Struct):
    """All simulations."""

    data: list[SimulationInfo]


class Shown(msgspec.Struct):
    """What a simulation shows: figures, pictures, places of memory, tables, arrows between places, and a remark."""

    figures: list[dict[str, Any]]
    charts: list[dict[str, Any]]
    cells: list[dict[str, Any]]
    tables: list[dict[str, Any]]
    flows: list[dict[str, Any]]
    remark: str


async def _list(_: ServerContext, __: Exchange) -> SimulationList:
    from quire.learn.simulations import simulations

    return SimulationList(
        [
            SimulationInfo(one.number, one.name, one.title, one.about, one.source, one.speed, [*one.controls])
            for one in simulations().values()
        ]
    )


class QuestionInfo(msgspec.Struct):
    """A question with its choices."""

    chapter: int
    text: str
    choices: list[str]


class QuestionList(msgspec.Struct):
    """The questions by chapter."""

    data: list[QuestionInfo]


class Judgement(msgspec.Struct):
    """Whether a choice is right, the right one, why, and the simulation that shows it."""

    correct: bool
    right: str
    why: str
    simulation: str


async def _quiz(_: ServerContext, __: Exchange) -> QuestionList:
    from quire.learn.quiz import questions

    return QuestionList([QuestionInfo(one.chapter, one.text, [*one.choices]) for one in questions()])


async def _judge(_: ServerContext, exchange: Exchange) -> Judgement:
    from quire.learn.quiz import questions

    chapter = exchange.path.removeprefix(_QUIZ)
    one = next((one for one in questions() if str(one.chapter) == chapter), None)
    if one is None:
        raise ApiError(404, f"no question of chapter {chapter[:20]!r}", code="not_found")
    answer = query_of(exchange.scope["query_string"], ("answer",)).get("answer", "")
    if answer not in one.choices:
        raise bad_request("answer", f"answer: {answer[:100]!r} is none of the choices")
    return Judgement(answer == one.right, one.right, one.why, one.simulation)


class ChapterInfo(msgspec.Struct):
    """A chapter: its place on the path (none for pages beside it), its name, title, and what it is about."""

    number: int | None
    name: str
    title: str
    about: str


class ChapterList(msgspec.Struct):
    """The chapters in their order."""

    data: list[ChapterInfo]


class ChapterBody(msgspec.Struct):
    """A chapter: blocks of text and what stands between them, each a `kind` with its fields; the numbers that are
    taken as given, with their sources; listings and sights that the blocks name."""

    number: int | None
    name: str
    title: str
    about: str
    blocks: list[dict[str, Any]]
    given: dict[str, str]
    listings: dict[str, dict[str, str]]
    sights: dict[str, dict[str, str]]


async def _chapters(_: ServerContext, __: Exchange) -> ChapterList:
    from quire.learn.chapters import chapters

    return ChapterList(
        [ChapterInfo(one.number, one.name, one.title, one.about) for one in chapters().values()]
    )


async def _chapter(_: ServerContext, exchange: Exchange) -> ChapterBody:
    from quire.learn.chapters import chapter
    from quire.learn.lesson_listings import listings
    from quire.server.pages.see import SIGHTS

    try:
        one = chapter(exchange.path.removeprefix(_CHAPTER))
    except ValueError as error:
        raise ApiError(404, str(error), code="not_found") from None
    blocks = await asyncio.to_thread(one.page)
    named = {block["name"] for block in blocks if block["kind"] == "listing"}
    shown = {
        name: {"about": each.about, "source": each.source, "output": each.output}
        for name, each in (listings().items() if named else ())
        if name in named
    }
    seen = {block["name"] for block in blocks if block["kind"] == "see"}
    sights = {name: {"title": SIGHTS[name].title, "about": SIGHTS[name].about} for name in seen}
    return ChapterBody(one.number, one.name, one.title, one.about, blocks, dict(one.given), shown, sights)


async def _see(context: ServerContext, exchange: Exchange) -> Shown:
    from quire.server.pages.see import SIGHTS

    sight = SIGHTS.get(exchange.path.removeprefix(_SEE))
    if sight is None:
        raise ApiError(404, "nothing of that name to see", code="not_found")
    query_of(exchange.scope["query_string"], ())
    context.check_ready()
    async with _one_at_a_time:
        try:
            scene = await sight.run(context, exchange)
        except ValueError as error:
            raise bad_request(None, str(error)) from None
    return Shown(**scene.to_json())


async def _show(context: ServerContext, exchange: Exchange) -> Shown:
    from quire.learn.simulations import simulation
    from quire.server.pages.on_engine import shown

    try:
        one = simulation(exchange.path.removeprefix(_PREFIX))
    except ValueError as error:
        raise ApiError(404, str(error), code="not_found") from None
    given = query_of(exchange.scope["query_string"])
    async with _one_at_a_time:
        try:
            scene = await shown(context, exchange, one, one.values(given))
        except ValueError as error:
            raise bad_request(str(error).partition(":")[0], str(error)) from None
    return Shown(**scene.to_json())


ROUTES: tuple[HttpRoute, ...] = (
    Get(
        path="/learn/api/sims", summary="Simulations of the lesson, with their controls", tag="pages", api="",
        handler=_list, response=SimulationList,
    ),
    Get(
        path="/learn/api/quiz", summary="Questions of the lesson", tag="pages", api="", handler=_quiz,
        response=QuestionList,
    ),
    Act(
        verb="GET", path=_QUIZ + "{}", rest="chapter", summary="Whether an answer to a chapter's question is right",
        tag="pages", api="", handler=_judge, response=Judgement, query=("answer",),
    ),
    Get(
        path="/learn/api/chapters", summary="Chapters of the lesson", tag="pages", api="", handler=_chapters,
        response=ChapterList,
    ),
    Act(
        verb="GET", path=_CHAPTER + "{}", rest="name", summary="A chapter of the lesson, with its numbers computed now",
        tag="pages", api="", handler=_chapter, response=ChapterBody,
    ),
    Act(
        verb="GET", path=_SEE + "{}", rest="name", summary="What a chapter shows in the engine that serves, run now",
        tag="pages", api="", handler=_see, response=Shown,
    ),
    Act(
        verb="GET", path=_PREFIX + "{}", rest="name", summary="What a simulation shows for values of its controls",
        tag="pages", api="", handler=_show, response=Shown,
    ),
)  # fmt: skip
