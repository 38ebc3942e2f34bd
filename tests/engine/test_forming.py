"""From the tools of a request to the grammar of its answer: places of schemas, and the limit of all together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.config.shipped import DEFAULT_MODEL, shipped_models
from quire.engine.api import CompiledStructure
from quire.engine.front.forming import formed, formed_now, forming
from quire.structured.answer_form import AnswerPlan, AskedPart
from quire.text.reading import AnswerFormat, Reading
from quire.text.tokenizer import Tokenizer
from quire.text.tools import MAX_TOOLS, read_tools
from quire.types import Grammar, Request, RequestError, SamplingParams, TokenIds

REQUEST = Request(request_id="r", prompt_token_ids=TokenIds([5]), params=SamplingParams())


@pytest.fixture(scope="module")
def many() -> Reading:
    """As many functions as there may be. Every second schema says nothing of its type."""
    functions = [{"name": f"f{i}", "parameters": {"properties": {f"a{i}": {}}}} for i in range(MAX_TOOLS)]
    for function in functions[::2]:
        function["parameters"]["type"] = "object"  # type: ignore[index]
    tools: list[dict[str, Any]] = [{"type": "function", "function": function} for function in functions]
    made = AnswerFormat(Tokenizer.from_dir(shipped_models()[DEFAULT_MODEL]))
    found = made.reading(read_tools(tools, "required"))
    assert found is not None
    return found


def test_the_schema_of_each_function_has_its_place(many: Reading) -> None:
    fields = [part.field for part in AnswerPlan(reading=many).asks()]
    assert fields == [f"tools[{i}].function.parameters" for i in range(MAX_TOOLS)]


def test_the_grammars_of_all_functions_have_a_limit_together(many: Reading) -> None:
    asked: list[AskedPart] = []

    def large(part: AskedPart) -> CompiledStructure:
        asked.append(part)
        return CompiledStructure(Grammar("x" * 100_000, b""))

    with pytest.raises(RequestError, match=r"tools: .* have over 512\.00 KiB together"):
        formed_now(forming(REQUEST, many, None), large)
    assert len(asked) == 6


def test_a_large_request_has_the_same_form(many: Reading) -> None:
    made = CompiledStructure(Grammar('{"grammars": [{"json_schema": {}}]}', b""), ("dropped",))

    async def compiled(_: AskedPart) -> CompiledStructure:
        return made

    here = formed_now(forming(REQUEST, many, None), lambda _: made)
    assert here.request.grammar is not None
    for large in (False, True):
        found = asyncio.run(formed(forming(REQUEST, many, None), compiled, large=large))
        assert found.request == here.request
        assert found.dropped == here.dropped
