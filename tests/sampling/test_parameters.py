"""One table of sampling parameters: everything generated from it agrees."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tools import sampling_table

from quire.cli.main import command_parser
from quire.cli.options import sampling_params
from quire.parameters import Parameter
from quire.server.app import ROUTES
from quire.server.openapi import document
from quire.types import PARAMETERS, RequestError, SamplingParams

ROOT = Path(__file__).parents[2]
NUMBERS = {name: known for name, known in PARAMETERS.items() if known.kind in {int, float}}


def outside(known: Parameter) -> list[object]:
    """Values next to the range, and some of other types."""
    step = (
        (lambda value, way: math.nextafter(value, way))
        if known.kind is float
        else lambda value, way: value + (way > 0) * 2 - 1
    )
    low = known.low if known.above else step(known.low, -math.inf)
    return [low, step(known.high, math.inf), math.nan, "1", True, 10**400]


@pytest.mark.parametrize("name", NUMBERS)
def test_values_out_of_range_are_refused_with_the_range(name: str) -> None:
    known = NUMBERS[name]
    for value in outside(known):
        with pytest.raises(RequestError) as refused:
            SamplingParams(**{name: value})
        assert refused.value.field == name
        assert refused.value.message.endswith(f"in {known.range}")
    for end in (known.high, known.low) if not known.above else (known.high,):
        given = {"max_tokens": 2**31 - 1, name: end}
        assert getattr(SamplingParams(**given), name) == end  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NUMBERS)
def test_http_and_the_command_line_know_every_number(name: str) -> None:
    known = NUMBERS[name]
    schemas = json.loads(document(ROUTES))["components"]["schemas"]
    for request in ("ChatCompletionRequest", "CompletionRequest"):
        field = schemas[request]["properties"][name]
        if (request, name) != ("ChatCompletionRequest", "logprobs"):  # true or false there
            (number,) = (kind for kind in field["anyOf"] if kind["type"] != "null")
            least = number["exclusiveMinimum" if known.above else "minimum"]
            assert (least, number["maximum"]) == (known.low, known.high)
            assert field["description"].startswith(known.help)
    flag = "--" + name.replace("_", "-")
    (option,) = (a for a in command_parser("generate")._actions if flag in a.option_strings)
    assert (option.help or "").startswith(known.help)


def test_the_command_line_has_lists_of_texts_and_samplers() -> None:
    words = [
        "--bad-word",
        "a b",
        "--bad-word",
        "c",
        "--dry-sequence-breaker",
        "\n",
        "--samplers",
        "top_k;temperature",
    ]
    asked = command_parser("generate").parse_args(["--prompt", "x", *words])
    made = sampling_params(asked, SamplingParams())
    assert (made.bad_words, made.dry_sequence_breakers) == (("a b", "c"), ("\n",))
    assert made.samplers == ("top_k", "temperature")
    plain = sampling_params(command_parser("generate").parse_args(["--prompt", "x"]), SamplingParams())
    assert plain == SamplingParams()


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"samplers": ("top_k", "infill")}, "samplers", "'infill' is not one of penalties, dry"),
        ({"samplers": ("xtc", "xtc")}, "samplers", "xtc occurs twice"),
        ({"samplers": "top_k"}, "samplers", "'top_k' is not a list of strings"),
        ({"bad_words": ["x"] * 257}, "bad_words", "257 strings exceed the limit of 256"),
        ({"bad_words": ["x" * 257]}, "bad_words", "a bad word of 257 characters is over 256"),
        (
            {"dry_sequence_breakers": [""]},
            "dry_sequence_breakers",
            "every breaker must be a non-empty string",
        ),
        ({"logit_bias": {"": 1.0}}, "logit_bias", "every text must be a non-empty string"),
        ({"logit_bias": {"x": 101.0}}, "logit_bias", "bias 101.0 of token x is not in [-100, 100]"),
    ],
)
def test_wrong_texts_are_refused(given: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**given)
    assert refused.value.field == field
    assert refused.value.message.startswith(message)


def test_the_page_is_made_from_the_table() -> None:
    page = sampling_table.PAGE.read_text()
    assert sampling_table.render(page) == page, "run python -m tools.sampling_table"


def test_a_number_is_known_to_seven_source_files_at_most() -> None:
    """docs/architecture.md says which. Beside these, the bodies of an API that lists its fields have their names."""
    for name in ("min_p", "top_p"):
        word = re.compile(rf"\b{name}\b")
        files = [
            path
            for room in ("src/quire", "csrc")
            for path in (ROOT / room).rglob("*")
            if path.suffix in {".py", ".pyi", ".h", ".cpp"}
            and path.parent.name
            not in {"dialects", "learn", "listings", "planner", "reference"}  # numbers of their own
            and word.search(path.read_text())
        ]
        assert len(files) <= 7, files


TOY = """
import importlib.util, json, sys

spec = importlib.util.find_spec("quire.types")
source = open(spec.origin).read()
line = '    toy: float = number(0.5, "a toy", 0, 2, "T", names={"TGI": "tgi_toy"})\\n'
place = source.index("    min_p: float")
module = sys.modules["quire.types"] = importlib.util.module_from_spec(spec)
exec(compile(source[:place] + line + source[place:], spec.origin, "exec"), module.__dict__)

from quire.cli.main import command_parser
from quire.cli.options import sampling_params
from quire.server import fields
from quire.server.app import ROUTES
from quire.server.openapi import document
from quire.server.requests import ChatCompletionRequest
from quire.server.sampling import chat_params

asked = command_parser("generate").parse_args(["--prompt", "a", "--toy", "0.25"])
body = ChatCompletionRequest(messages=[], toy=1.5)
try:
    chat_params(ChatCompletionRequest(messages=[], toy=3.0), {})
except module.RequestError as error:
    refusal = str(error)
schema = json.loads(document(ROUTES))["components"]["schemas"]["CompletionRequest"]["properties"]["toy"]
print(json.dumps({
    "option": sampling_params(asked, module.SamplingParams()).toy, "request": chat_params(body, {}).toy,
    "refusal": refusal, "schema": schema, "elsewhere": fields.CHAT["tgi_toy"],
}))
"""


def test_a_line_in_the_table_is_a_parameter_everywhere() -> None:
    done = subprocess.run([sys.executable, "-c", TOY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    number = {"type": "number", "minimum": 0, "maximum": 2}
    assert json.loads(done.stdout) == {
        "option": 0.25,
        "request": 1.5,
        "refusal": "toy: 3.0 is not a number in [0, 2]",
        "schema": {"anyOf": [number, {"type": "null"}], "default": None, "description": "a toy"},
        "elsewhere": [0.5],
    }
