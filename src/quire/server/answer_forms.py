"""What a chat request asks of the form of its answer: calls of functions, a response format, a budget of thinking."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.api import GenerateAsk, constrained
from quire.server.context import ServerContext
from quire.server.errors import bad_request
from quire.server.exchange import Exchange
from quire.server.requests import MAX_THINKING_TOKENS, ChatCompletionRequest
from quire.server.structured import compiled_for, with_grammar
from quire.structured.answer_form import AnswerPlan, AskedPart
from quire.structured.ask import StructuredOutput
from quire.text.tools import ToolUse, read_functions, read_tools


def tools_of(body: ChatCompletionRequest) -> ToolUse | None:
    """The functions that an answer may call. Raises ApiError or RequestError naming the field."""
    if body.tools and body.functions:
        raise bad_request("functions", "functions: cannot be combined with tools")
    tools = read_tools(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
    return tools or read_functions(body.functions, body.function_call)


def check_budget(budget: int | None) -> None:
    """Raise ApiError 400 for a budget of thinking that is out of range."""
    if budget is not None and not 0 <= budget <= MAX_THINKING_TOKENS:
        name = "thinking_token_budget"
        raise bad_request(name, f"{name}: {budget} is not in [0, {MAX_THINKING_TOKENS}]")


async def with_form(
    context: ServerContext,
    exchange: Exchange,
    ask: GenerateAsk,
    tools: ToolUse | None,
    found: tuple[str, StructuredOutput] | None,
    budget: int | None,
) -> tuple[GenerateAsk, tuple[str, ...]]:
    """The same request with the grammar of its answer, and the keywords of lenient schemas that it does not enforce.

    `found` is what the text of the answer must look like, and the field that says so. Raises what `with_grammar` does.
    """
    reading = context.engine.reading(tools)
    ask = replace(ask, reading=reading)
    if reading is None:
        if found is None:
            return ask, ()
        (ask,), dropped = await with_grammar(context, exchange, [ask], found)
        return ask, dropped
    response = None if found is None else AskedPart(*found)
    plan = AnswerPlan(
        reading=reading,
        tools=tools,
        thinking=reading.thinking(ask.request.prompt_token_ids),
        response=response,
        budget=budget,
    )
    sources = {}
    for part in plan.asks():
        made = await compiled_for(context, exchange, [ask], (part.field, part.ask))
        sources[part.ask.digest()] = made.grammar.source, made.dropped
    form = plan.joined(sources)
    if form is None:
        return ask, ()
    request = replace(constrained(ask.request, form.grammar), regions=form.regions)
    return replace(ask, request=request, reading=replace(reading, eager=True)), form.dropped
