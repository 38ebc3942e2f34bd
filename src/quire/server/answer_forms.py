"""What a chat request asks of the form of its answer: calls of functions, a response format, a budget of thinking."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.api import CompiledStructure, GenerateAsk
from quire.engine.front.forming import formed, forming
from quire.server.context import ServerContext
from quire.server.errors import bad_request
from quire.server.exchange import Exchange
from quire.server.requests import MAX_THINKING_TOKENS, ChatCompletionRequest
from quire.server.structured import compiled_for
from quire.structured.answer_form import AskedPart
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

    `found` is what the text of the answer must look like, and the field that says so. Raises what `compiled_for` does,
    and RequestError for tools that cannot be called.
    """

    async def compile_part(part: AskedPart) -> CompiledStructure:
        return await compiled_for(context, exchange, [ask], (part.field, part.ask))

    response = None if found is None else AskedPart(*found)
    work = forming(ask.request, context.engine.reading(tools), response, budget)
    made = await formed(work, compile_part)
    if made.request.grammar is not None:
        await context.engine.share_vocabulary()
    return replace(ask, request=made.request, reading=made.reading), made.dropped
