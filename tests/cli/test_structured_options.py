"""Structured output on the command line."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.config.elsewhere.lookup import explain
from quire.text.tokenizer import Tokenizer

FIXED = ("--max-tokens", "40", "--seed", "3", "--quiet")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 22]}},
    "required": ["a"],
    "additionalProperties": False,
}


def generate(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> str:
    assert main(["generate", str(folder), "--prompt", "Hi", *FIXED, *options]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def test_generate_takes_every_kind(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "yes.gbnf").write_text('root ::= "yes" | "no" [0-9]')
    assert generate(capsys, folder, "--choice", "red", "--choice", "blue") in {"red", "blue"}
    assert re.match(
        r"\s*\{\s*\"a\"", generate(capsys, folder, "--json-schema", str(tmp_path / "schema.json"))
    )
    assert re.fullmatch("yes|no[0-9]", generate(capsys, folder, "--grammar", str(tmp_path / "yes.gbnf")))
    assert generate(capsys, folder, "--json-object").lstrip().startswith("{")
    several = generate(capsys, folder, "--regex", "[a-c]{3}", "--json", "--n", "2")
    assert all(re.fullmatch("[a-c]{3}", sample["text"]) for sample in json.loads(several)["outputs"])


def test_chat_answers_under_constraint(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nAgain\n"))
    assert main(["chat", str(folder), *FIXED, "--no-history", "--choice", "yes", "--choice", "no"]) == 0
    assert {"yes", "no"}.issuperset(capsys.readouterr().out.split())


TEMPLATE = (
    "{% if enable_thinking %}THINK {% endif %}{{ effort }}{% for m in messages %}{{ m.content }}{% endfor %}"
)
RENDERED = ("--chat-template", TEMPLATE, "--enable-thinking", "--chat-template-kwargs", '{"effort": "high "}')


def test_options_of_a_chat_reach_the_template(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parsers = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--thinking-token-budget", "5")
    shown = json.loads(generate(capsys, folder, "--chat", "--json", *RENDERED, *parsers))
    assert shown["prompt_token_ids"] == Tokenizer.from_dir(folder).encode("THINK high Hi")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    assert main(["chat", str(folder), *FIXED, "--no-history", *RENDERED, *parsers, "--choice", "yes"]) == 0
    assert capsys.readouterr().out.split() == ["yes"]


def test_wrong_options_of_a_chat_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", str(folder), "--prompt", "Hi", "--quiet"]
    for options, said in (
        (["--no-enable-thinking"], "chat: "),
        (["--chat", "--tool-call-parser", "x"], "tool_call_parser: 'x' is not one of"),
        (["--thinking-token-budget", "-1"], "thinking_token_budget: -1"),
    ):
        assert main([*asked, *options]) in {1, 2}
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*asked, "--chat-template-kwargs", "[1]"])
    assert "is not a JSON object" in capsys.readouterr().err


def test_wrong_structures_are_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    asked = ["generate", str(folder), "--prompt", "Hi", "--quiet"]
    for options, said in (
        (["--json-schema", str(tmp_path / "none.json")], "json-schema: "),
        (["--json-schema", str(bad)], "json"),
        (["--regex", "("], "regex"),
    ):
        assert main([*asked, *options]) == 1
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*asked, "--regex", "a", "--json-object"])
    assert "not allowed with" in capsys.readouterr().err


def test_a_cut_answer_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(folder), "--prompt", "Hi", "--regex", "[a-c]{30}", "--max-tokens", "3"]) == 0
    assert "--max-tokens" in capsys.readouterr().err


def test_a_server_says_where_a_grammar_belongs() -> None:
    for name in ("--grammar", "--grammar-file", "--json-schema", "-j"):
        assert "requests set their own grammar" in explain(name)
