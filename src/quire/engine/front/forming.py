"""From what a request asks of its answer to what is enforced: the grammar, and the regions in which it holds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.engine.api import CompiledStructure
from quire.engine.request_forms import constrained
from quire.records import dataclass
from quire.types import MAX_NAMED_TOKENS, Request, RequestError, SamplingParams

if TYPE_CHECKING:
    from quire.structured.answer_form import AskedPart
    from quire.text.reading import Reading


@dataclass(frozen=True, slots=True)
class Formed:
    """A request with its grammar, how its answer is read, and the keywords of lenient schemas that are not enforced."""

    request: Request
    reading: Reading | None
    dropped: tuple[str, ...] = ()


# Yields the structures that must be compiled, one after the other, and is sent what came of them.
Forming = Generator["AskedPart", CompiledStructure, Formed]


def forming(
    request: Request, reading: Reading | None, response: AskedPart | None, *, divided: bool = True
) -> Forming:
    """The form of the answers to a request: calls of the tools of its `reading`, `response` for their text, and its
    budget for their thinking. Not `divided`, answers are one text all the same.
    """
    if reading is None:
        if response is None:
            return Formed(request, None)
        made = yield response
        return Formed(constrained(request, made.grammar), None, made.dropped)
    from quire.structured.answer_form import AnswerPlan
    from quire.structured.grammar_limits import MAX_SOURCE_BYTES
    from quire.util.sizes import format_size

    reading = reading.behind(request.prompt_token_ids)
    plan = AnswerPlan(
        reading=reading,
        thinking=reading.thinking,
        response=response,
        budget=request.params.thinking_token_budget,
    )
    sources, size = {}, 0
    for part in plan.asks():
        made = yield part
        sources[part.ask.digest()] = made.grammar.source, made.dropped
        size += len(made.grammar.source)
        if size > MAX_SOURCE_BYTES:
            limit = format_size(MAX_SOURCE_BYTES)
            raise RequestError("tools", f"the grammars of their schemas have over {limit} together")
    form = plan.joined(sources)
    params = request.params
    if reading.banned and len(params.banned_token_ids) + len(reading.banned) <= MAX_NAMED_TOKENS:
        banned = (*params.banned_token_ids, *reading.banned)
        request = replace(request, params=replace(params, banned_token_ids=banned))
    if form is None:
        return Formed(request, reading if divided else None)
    request = replace(constrained(request, form.grammar), regions=form.regions)
    reading = replace(reading, eager=True, formed=form.formed) if divided else None
    return Formed(request, reading, form.dropped)


def asked_part(params: SamplingParams) -> AskedPart | None:
    """What parameters ask of the text of an answer. Raises RequestError for another kind of structure."""
    if params.structured is None:
        return None
    from quire.structured.answer_form import AskedPart
    from quire.structured.ask import StructuredOutput

    if not isinstance(params.structured, StructuredOutput):
        raise RequestError("structured", f"{type(params.structured).__name__} is not a StructuredOutput")
    return AskedPart("structured", params.structured)


def formed_now(work: Forming, compile_part: Callable[[AskedPart], CompiledStructure]) -> Formed:
    """Compile in this thread what a form needs."""
    found = _advance(work, None)
    while not isinstance(found, Formed):
        found = _advance(work, compile_part(found))
    return found


async def formed(
    work: Forming, compile_part: Callable[[AskedPart], Awaitable[CompiledStructure]], *, large: bool = False
) -> Formed:
    """Compile off the event loop what a form needs. The work beside that takes long where a request is `large`: a
    thread does it then.
    """
    import asyncio  # a start without a server does not need it

    made: CompiledStructure | None = None
    while True:
        found = await asyncio.to_thread(_advance, work, made) if large else _advance(work, made)
        if isinstance(found, Formed):
            return found
        made = await compile_part(found)


def _advance(work: Forming, made: CompiledStructure | None) -> AskedPart | Formed:
    try:
        return next(work) if made is None else work.send(made)
    except StopIteration as ended:
        found: Formed = ended.value
        return found
