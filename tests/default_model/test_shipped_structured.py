"""The shipped model on held-out prompts that want JSON or a call: `make test-model`.

Under constraint all of 100 answers are valid and fit their schemas, whatever the model is; without it they are as good
as its card says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import pytest
from tools.default_model.backends import quire_backend
from tools.default_model.corpus.conversation import Check
from tools.default_model.corpus.draw import Split
from tools.default_model.corpus.mixture import GENERATOR_VERSION, of_domain
from tools.default_model.corpus.schema_check import fits
from tools.default_model.evaluate import EVAL_SEED, Item, items_of, run, stop_ids
from tools.default_model.grading import grade
from tools.default_model.tokenizer import load as load_tokenizer

from helpers.memory import memory_for
from quire import LLM, SamplingParams, StructuredOutput
from quire.answers import ToolCall
from quire.loader import DEFAULT_MODEL, resolve_model

pytestmark = pytest.mark.model
FOLDER = resolve_model(DEFAULT_MODEL)
EACH = 50
MOST = 320  # tokens, as in the evaluation of the card
LONGEST = 1200  # of an answer that must come to its end
NEAR = 0.02  # ties of rounding fall either way
GREEDY = SamplingParams(temperature=0.0, max_tokens=MOST)
# Parts of the card's answers that say how valid they are.
PARTS = {"valid call", "right tool", "valid JSON", "fits the schema"}


class Asked(NamedTuple):
    """A held-out prompt and how its answer is graded."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    check: Check


def held_out(domain: str, kinds: set[str]) -> Iterator[Asked]:
    """Prompts of a domain whose answers are of some kinds; calls are those that call a function."""
    for made in of_domain(domain, EVAL_SEED, Split.EVAL, 4 * EACH):
        for i, turn in enumerate(made.turns):
            if turn.check is not None and turn.check.kind in kinds and turn.check.data.get("calls") != []:
                yield Asked(made.messages()[:i], made.tools, turn.check)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", progress=False, memory=memory_for(2**30)) as made:
        yield made


def bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose values have an end, which a small model does not always find by itself."""
    limited = schema | {"maxLength": 60, "maxItems": 8}
    if "items" in schema:
        limited["items"] = bounded(schema["items"])
    if "properties" in schema:
        limited["properties"] = {name: bounded(part) for name, part in schema["properties"].items()}
        limited["additionalProperties"] = False
    return limited


def with_an_end(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools whose arguments have an end."""
    functions = [tool["function"] for tool in tools]
    return [
        {"type": "function", "function": {**function, "parameters": bounded(function["parameters"])}}
        for function in functions
    ]


def told(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        print(f"\n{text}", flush=True)


def fitting(calls: Sequence[ToolCall], asked: Asked) -> bool:
    """Whether there is a call, and each is one of a given function with arguments of its schema."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in asked.tools}
    return bool(calls) and all(
        call.name in schemas and fits(json.loads(call.arguments), schemas[call.name]) for call in calls
    )


def test_calls_under_constraint(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    asked = list(islice(held_out("tools", {"tool_call"}), EACH))
    assert len(asked) == EACH
    right = valid = 0
    for item in asked:
        (output,) = llm.chat(
            item.messages,
            SamplingParams(temperature=0.0, max_tokens=LONGEST),
            tools=with_an_end(item.tools),
            tool_choice="required",
            parallel_tool_calls=len(item.check.data["calls"]) > 1,
        )
        (sample,) = output.outputs
        assert sample.finish_reason == "stop"
        assert not sample.text.strip()
        assert fitting(sample.tool_calls, item), (item.messages[-1], sample.tool_calls)
        found = [{"name": call.name, "arguments": json.loads(call.arguments)} for call in sample.tool_calls]
        right += found == item.check.data["calls"]
        # As the model likes, then kept to the form; it may not find the end.
        (output,) = llm.chat(item.messages, GREEDY, tools=item.tools)
        (sample,) = output.outputs
        valid += sample.finish_reason == "stop" and fitting(sample.tool_calls, item)
    told(
        capsys,
        f"calls: {EACH} of {EACH} valid, {right} right if required; {valid} called and valid with auto",
    )


def test_json_under_constraint(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    asked = list(islice(held_out("extraction", {"json"}), EACH))
    assert len(asked) == EACH
    forms = [StructuredOutput(json=bounded(item.check.data["schema"])) for item in asked]
    params = [SamplingParams(temperature=0.0, max_tokens=LONGEST, structured=form) for form in forms]
    right = 0
    for item, output in zip(asked, llm.chat([item.messages for item in asked], params), strict=True):
        (sample,) = output.outputs
        assert sample.finish_reason == "stop", sample.text[:500]
        assert fits(json.loads(sample.text), item.check.data["schema"]), sample.text
        right += grade(item.check, sample.text).right
    free = llm.chat([item.messages for item in asked], GREEDY)
    plain = sum(grade(item.check, o.outputs[0].text).right for item, o in zip(asked, free, strict=True))
    told(capsys, f"JSON: {EACH} of {EACH} valid, {right} right; {plain} right without constraint")


Rates = dict[tuple[str, str], tuple[float, int]]


def card() -> tuple[int, Rates, dict[str, int]]:
    """The generator's version, the rates of the model's card: (domain, part of the answer) -> rate, of how many; and
    how many answers of each domain were graded.
    """
    text = (FOLDER / "README.md").read_text().partition("## Evaluation")[2]
    (version,) = re.findall(r"generator (\d+), seed", text)
    rows = re.findall(r"^\| ([\w ]+) \| ([\w ]+) \| ([\d.]+) % \| (\d+) \|$", text, re.MULTILINE)
    counts = re.findall(r"^\| ([\w ]+) \| [\d.]+ % \| (\d+) \|$", text, re.MULTILINE)
    rates = {(domain, part): (float(rate) / 100, int(of)) for domain, part, rate, of in rows}
    return int(version), rates, {domain: int(count) for domain, count in counts}


def test_without_constraint_as_good_as_the_card_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Over the very prompts of the card: the first of the held-out split, as many as it counts."""
    version, rows, counts = card()
    assert {part for _, part in rows} >= PARTS
    if version != GENERATOR_VERSION:
        pytest.skip(f"the card is of generator {version}, whose prompts are no longer made")
    tokenizer = load_tokenizer(FOLDER)
    generate = quire_backend(FOLDER, stop_ids(tokenizer))
    for domain in sorted({domain for domain, part in rows if part in PARTS}):
        wanted = {part: rates for (one, part), rates in rows.items() if one == domain and part in PARTS}
        graded = run(items_of_the_card(domain, counts[domain]), generate, tokenizer, MOST)
        for part, (rate, of) in wanted.items():
            found = [g.grade.marks[part] for g in graded if part in g.grade.marks]
            told(capsys, f"{domain}, {part}: {sum(found) / of:.3f} of {of}; the card says {rate:.3f}")
            assert len(found) == of
            assert sum(found) / of >= rate - NEAR


def items_of_the_card(domain: str, count: int) -> list[Item]:
    """The first items of a domain, as many as the card counts."""
    items: list[Item] = []
    for made in of_domain(domain, EVAL_SEED, Split.EVAL, count):
        items += items_of([made])
        if len(items) >= count:
            break
    return items


def test_the_answers_of_the_generator_fit() -> None:
    """Negative control of prompts and judge: what the generator expects fits, and something else does not."""
    for item in islice(held_out("tools", {"tool_call"}), EACH):
        calls = [
            ToolCall("", call["name"], json.dumps(call["arguments"])) for call in item.check.data["calls"]
        ]
        assert fitting(calls, item)
        assert not fitting([ToolCall("", "none", "{}")], item)
        assert not fitting([], item)
    for item in islice(held_out("extraction", {"json"}), EACH):
        assert fits(item.check.data["value"], item.check.data["schema"])
        assert (
            not fits("text", item.check.data["schema"]) or item.check.data["schema"].get("type") == "string"
        )
