"""The JSON-Schema-Test-Suite, and answers found at random judged by another validator: make test-schema.

The suite comes with the source of `jsonschema`, which also validates. Both are fetched once into build/json-schema.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from helpers.grammar_bytes import producible, walk
from quire.structured.json_schema import SchemaError, compile_json_schema
from structured.json_schema.corpus import CORPUS

pytestmark = pytest.mark.schema
PLACE = Path(__file__).parents[3] / "build" / "json-schema"
VERSION = "4.26.0"
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
# Tests of the suite that Quire answers otherwise, by the ends of their files.
ELSEWISE = {
    "/format.json": "formats are enforced",
    "/optional/format-assertion.json": "formats are enforced",
    "/optional/content.json": "contents are annotations, as in the later drafts",
    "/optional/format/hostname.json": "encoded labels cannot be checked, so none is allowed",
    "/optional/format/idn-hostname.json": "encoded labels cannot be checked, so none is allowed",
    "/optional/zeroTerminatedFloats.json": "1.0 is written 1 in every draft",
}
WALKS = 4


@pytest.fixture(scope="session")
def suite() -> Path:
    """The folder of the suite; also makes `jsonschema` importable."""
    if not (PLACE / "suite").exists():
        pip = [os.environ.get("SCHEMA_PYTHON", sys.executable), "-m", "pip", "--disable-pip-version-check"]
        name = f"jsonschema=={VERSION}"
        subprocess.run([*pip, "install", "-q", "--target", PLACE / "lib", f"{name}"], check=True)
        source = PLACE / "source"
        command = [*pip, "download", "-q", "--no-deps", "--no-binary", "jsonschema", "-d", source, name]
        subprocess.run(command, check=True)
        with tarfile.open(next(source.glob("*.tar.gz"))) as archive:
            inside = [one for one in archive.getmembers() if "/json/tests/" in one.name and one.isfile()]
            for one in inside:
                one.name = one.name.partition("/json/tests/")[2]
            archive.extractall(PLACE / "suite", members=inside, filter="data")
    sys.path.append(str(PLACE / "lib"))
    return PLACE / "suite"


def cases(suite: Path, draft: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((suite / draft).rglob("*.json")):
        for case in json.loads(path.read_text()):
            schema = case["schema"]
            if isinstance(schema, dict):
                case["schema"] = {"$schema": DRAFTS[draft], **schema}
            yield str(path), case


def decimal_multiple(_: Any, step: Any, value: Any, __: Any) -> Iterator[Any]:
    """multipleOf in decimal numbers: in binary ones, 19.99 is no multiple of 0.01."""
    from jsonschema import ValidationError

    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and (Fraction(str(value)) / Fraction(str(step))).denominator != 1:
        yield ValidationError("no multiple")


def ecma_pattern(_: Any, pattern: str, value: Any, __: Any) -> Iterator[Any]:
    """pattern, where the judge's engine knows it: its classes are those of ECMA-262 with one of two flags."""
    from jsonschema import ValidationError

    try:
        if isinstance(value, str):
            value = value.replace("\ufeff", " ") if "\\s" in pattern else value
            if not any(re.search(pattern, value, flag) for flag in (re.ASCII, 0)):
                yield ValidationError("does not match")
    except re.error:
        return


def judge(schema: Any) -> Any:
    """A validator of the draft that a schema names."""
    from jsonschema import validators

    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    more = {"multipleOf": decimal_multiple, "pattern": ecma_pattern}
    return validators.extend(kind, more)(schema)


def judged(schema: Any, source: str, seeds: int) -> int:
    """Answers found at random that are valid; fails for one that is not."""
    validator, ended = judge(schema), 0
    for seed in range(seeds):
        text = walk(source, seed, 60)
        if text is not None:
            ended += 1
            errors = [error.message[:200] for error in validator.iter_errors(json.loads(text))]
            assert not errors, f"{json.dumps(schema)[:500]} leads to {text[:300]}: {errors}"
    return ended


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_suite(suite: Path, draft: str) -> None:
    refused: Counter[str] = Counter()
    required, taken, ended, wrong = 0, 0, 0, []
    for path, case in cases(suite, draft):
        schema, main = case["schema"], "/optional/" not in path
        try:
            source = compile_json_schema(schema).source
        except SchemaError as error:
            if "another document" in error.message:
                continue
            unsatisfiable = error.message.startswith("no value is valid")
            required += main
            taken += main and unsatisfiable
            refused[error.keyword] += main and not unsatisfiable
            if unsatisfiable:
                wrong += [(path, case["description"]) for test in case["tests"] if test["valid"]]
            continue
        required, taken = required + main, taken + main
        if not path.endswith(tuple(ELSEWISE)):
            wrong += [
                (path, case["description"], test["description"])
                for test in case["tests"]
                if producible(source, test["data"]) != test["valid"]
            ]
        if "$dynamicRef" not in json.dumps(schema) and "refRemote" not in path:
            ended += judged(schema, source, WALKS)
    assert wrong == []
    assert taken >= 0.9 * required, refused
    assert ended > taken, "walks end"
    print(f"{draft}: {taken} of {required} schemas, {ended} answers, refused {dict(refused)}")


def test_the_corpus(suite: Path) -> None:
    taken = ended = 0
    for schema in CORPUS:
        try:
            source = compile_json_schema(schema).source
        except SchemaError:
            continue
        taken += 1
        known = "iglucentral" not in schema.get("$schema", "")
        ended += judged(schema if known else {**schema, "$schema": DRAFTS["draft4"]}, source, 10)
    assert taken == 200
    print(f"{taken} of 200 schemas, {ended} answers")


def test_the_judge_refuses(suite: Path) -> None:
    """Negative control: a grammar of another schema leads to answers that the judge refuses."""
    source = compile_json_schema({"type": "integer"}).source
    with pytest.raises(AssertionError, match="leads to"):
        judged({"type": "string"}, source, 3)
