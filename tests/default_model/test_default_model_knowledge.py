"""What the model is taught about Quire and inference: complete, and true of the program as it is."""

from __future__ import annotations

import argparse
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tools.default_model.corpus import faq, glossary, quire_docs, sheets
from tools.default_model.corpus.draw import Draw, Split
from tools.default_model.corpus.sheets import Subject

import quire
from quire.cli.bench import BENCHES, bench_parser
from quire.cli.main import COMMANDS, READ_ENVIRONMENT, command_parser
from quire.config.serving import ServingConfig
from quire.engine.api import EngineState, EngineStats
from quire.engine.usage_ledger import UsageLedger
from quire.server.app import ROUTES
from quire.server.exposition import Exposition
from quire.server.metrics import ServerMetrics
from quire.server.tenant_access import TenantDirectory

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tools" / "default_model" / "corpus"
PAGES = (
    *(n for files, topic, _ in quire_docs.SHEETS if topic == "quire" for n in files),
    *glossary.QUESTIONS,
)
TEXTS = [(CORPUS / "faq" / f"{name}.txt").read_text() for name in PAGES]
TEXTS += [path.read_text() for path in sorted((CORPUS / "sheets").glob("*.txt"))]
SHEETS = {topic: sheets.load(*files) for files, topic, _ in quire_docs.SHEETS if files and topic != "quire"}
SHEETS["term"] = sheets.load(*glossary.TERMS)


@cache
def _actions() -> dict[str, list[argparse.Action]]:
    """Every option of every command, by its flags."""
    found: dict[str, list[argparse.Action]] = {"--version": []}
    parsers = [*map(command_parser, COMMANDS), *map(bench_parser, BENCHES)]
    for action in (a for parser in parsers for a in parser._actions):
        for flag in action.option_strings:
            found.setdefault(flag, []).append(action)
    return found


@cache
def _metrics() -> set[str]:
    """The names in /metrics, as a scrape shows them."""
    engine = SimpleNamespace(
        state=EngineState.STARTING, stats=EngineStats(max_loras=1), startup=[], adapters={}, requests=list,
        ledger=UsageLedger(),
    )  # fmt: skip
    metrics = ServerMetrics(cast(Any, engine))
    metrics.tenants = TenantDirectory(ServingConfig())
    text = Exposition(metrics).render().decode()
    return set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))


def _default(subject: Subject) -> str:
    return subject.fields.get("default", [""])[0]


def test_options_exist_with_their_defaults_and_every_option_of_the_server_is_taught() -> None:
    options = SHEETS["option"].subjects
    for subject in options:
        flag = subject.names[0].split()[0]
        helps = [a.help or "" for a in _actions()[flag]]
        if _default(subject):
            assert any(f"(default: {_default(subject)})" in h.replace("%%", "%") for h in helps), flag
            serve = command_parser("serve")._actions
            assert "serve" in READ_ENVIRONMENT
            assert any(flag in a.option_strings for a in serve), f"{flag}: has an environment variable"
    shown = [a for a in command_parser("serve")._actions if a.help != argparse.SUPPRESS]
    flags = {f for a in shown for f in a.option_strings if f.startswith("--") and not f.startswith("--no-")}
    assert flags - {"--help"} <= {s.names[0] for s in options}


def test_options_metrics_and_pages_that_the_texts_name_exist() -> None:
    for text in TEXTS:
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)) - {"--no-"} <= _actions().keys()
        assert set(re.findall(r"\bquire_(?!…)\w+", text)) <= _metrics() | {"quire_isa", "quire_cache_dir"}
        for page in re.findall(r"docs/[\w/]+\.md", text):
            assert (ROOT / page).is_file(), page
        for command in re.findall(
            r"\bquire (bench [a-z-]+|serve|generate|chat|convert|inspect|verify)\b", text
        ):
            assert command.split()[-1] in {*COMMANDS, *BENCHES}, command


def test_every_metric_of_quire_is_taught() -> None:
    taught = {s.names[0] for s in SHEETS["metric"].subjects}
    assert taught == {name for name in _metrics() if name.startswith(("quire_", "http_request"))} - {
        "http_request_size_bytes_total",
        "http_response_size_bytes_total",
    }


def test_parameters_commands_errors_and_families_are_those_of_the_pages() -> None:
    sampling, server = (ROOT / "docs" / "sampling.md").read_text(), (ROOT / "docs" / "server.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", sampling, re.MULTILINE))
    taught = {s.names[0].lower(): s for s in SHEETS["parameter"].subjects}
    assert rows.keys() <= taught.keys()
    for name, subject in taught.items():
        assert name in rows or re.search(rf"`{name}[.`]", server), name
        assert _default(subject) in {"", rows.get(name, "").strip()}, name
        for option in subject.fields.get("option", []):
            assert option in _actions(), option
    routes = {f"{r.method} {r.path}" for r in ROUTES}
    for name in (s.names[0] for s in SHEETS["command"].subjects):
        if name.startswith("quire."):
            assert name.removeprefix("quire.") in quire.__all__, name
        elif name.startswith(("GET", "POST")):
            assert name in routes, name
    codes = {s.names[0] for s in SHEETS["error"].subjects}
    for code in (c for c in codes if re.fullmatch(r"[a-z_]+|\d+", c)):
        assert code in server, code
    models = (ROOT / "docs" / "models.md").read_text()
    for subject in (s for s in SHEETS["model"].subjects if "example" in s.fields):
        assert subject.names[0].split()[0] in models, subject.names


@pytest.mark.parametrize("topic", SHEETS)
def test_every_question_of_a_sheet_can_be_asked_and_answered(topic: str) -> None:
    sheet = SHEETS[topic]
    draw = Draw(topic, Split.TRAIN)
    for subject in sheet.subjects:
        kinds = [k for k in sheet.kinds if sheets.fits(k, subject)]
        assert any(k.asks and k.weight for k in kinds), subject.names
        for kind in kinds:
            text, must = sheets.compose(draw, kind, subject)
            assert all(m in text for m in must)
            assert "*" not in text or "* means any" in text, text
            assert not re.search(r"  |\.\.$|\{\w+\}", text), text
            if kind.asks:
                assert sheets.ask(draw, topic, kind, subject, kind.asks)
    names = [name.lower() for s in sheet.subjects for name in {n.lower() for n in s.names}]
    assert len(names) == len({*names}), sorted(n for n in names if names.count(n) > 1)


def test_questions_are_asked_once() -> None:
    entries = [entry for name in PAGES for entry in faq.load(name)]
    asks = [a for entry in entries for a in entry.asks]
    assert len(entries) > 300
    assert len(asks) == len({*asks})
    assert all(entry.must for entry in entries)


def test_documents_are_plain_texts() -> None:
    for i in range(60):
        draw = Draw(f"document {i}", Split.EVAL if i % 2 else Split.TRAIN)
        for make in (glossary.document, quire_docs.document):
            text = make(draw)
            assert len(text) > 20
            assert "{" not in text.replace('{"', "")
