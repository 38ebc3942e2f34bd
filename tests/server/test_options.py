"""The options that vLLM's users know: there, explained by --help, documented, and refused when they contradict."""

from __future__ import annotations

import argparse
import dataclasses
import re

import pytest
from tools import options_table

from quire.cli.elsewhere import ALWAYS, CALLED, PASSING, REFUSED, explain
from quire.cli.parser import Parser
from quire.cli.serve import add_arguments, settings
from quire.config.schema import OPTIONS
from quire.config.serving import ServingConfig

KNOWN = [
    "--host", "--port", "--uds", "--api-key", "--api-key-file", "--served-model-name", "--max-model-len",
    "--max-num-seqs", "--max-num-batched-tokens", "--max-num-queued-reqs", "--max-num-queued-tokens", "--memory",
    "--gpu-memory-utilization", "--kv-cache-dtype", "--block-size", "--enable-prefix-caching",
    "--enable-chunked-prefill", "--scheduling-policy", "--dtype", "--load-format", "--chat-template", "--seed",
    "--threads", "--shutdown-timeout", "--ssl-keyfile", "--ssl-certfile", "--config",
]  # fmt: skip
# The other options of vLLM, SGLang, llama-server and TGI that people bring along: each is there, or explained.
BROUGHT = """
    quantization tokenizer revision trust-remote-code chat-template-content-format tool-call-parser
    reasoning-parser enable-auto-tool-choice enable-lora lora-modules max-loras speculative-config
    tensor-parallel-size pipeline-parallel-size data-parallel-size enable-expert-parallel kv-transfer-config
    kv-events-config prefix-caching-hash-algo enable-per-request-metrics enable-prompt-tokens-details
    enable-force-include-usage otlp-traces-endpoint allowed-media-domains mem-fraction-static
    chunked-prefill-size schedule-policy max-running-requests max-queued-requests page-size
    enable-deterministic-inference enable-cache-report enable-metrics watchdog-timeout model-path cache-type-k
    cache-type-v metrics api-key-file lora jinja reasoning-budget models-dir slot-save-path spec-type ctx-size
    parallel max-input-tokens max-total-tokens max-batch-prefill-tokens max-concurrent-requests speculate
    model-id graceful-termination-timeout
"""
FIELDS = [*OPTIONS, *(f.name for f in dataclasses.fields(ServingConfig))]
EVERY = [f"--{name.replace('_', '-')}" for name in FIELDS]


@pytest.fixture(scope="module")
def parser() -> Parser:
    made = Parser(prog="quire serve")
    add_arguments(made)
    return made


def test_options_of_vllm_are_there_and_explained(parser: Parser) -> None:
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    for flag in {*KNOWN, *EVERY}:
        assert flag in actions, flag
        assert actions[flag].help not in {None, "", argparse.SUPPRESS}, flag
    text = parser.format_help()
    assert [flag for flag in {*KNOWN, *EVERY} if flag not in text] == []


def test_options_of_other_servers_are_there_or_explained(
    parser: Parser, capsys: pytest.CaptureFixture[str]
) -> None:
    actions = {flag for action in parser._actions for flag in action.option_strings}
    for name in (*BROUGHT.split(), *REFUSED, *CALLED):
        flag = name if name.startswith("-") else f"--{name}"
        if flag in actions:
            continue
        with pytest.raises(SystemExit):
            parser.parse_args(["model", flag, "1"])
        assert explain(name)
        assert f"{flag} {explain(name)}" in capsys.readouterr().err
    own = {*KNOWN, *EVERY, "--no-enable-prefix-caching"}
    assert {text for text in CALLED.values() if text.startswith("--")} <= own
    assert not own & {f"--{name}" for name in (*REFUSED, *ALWAYS, *PASSING, *CALLED)}


def test_options_that_request_the_default_behaviour_are_accepted(
    parser: Parser, capsys: pytest.CaptureFixture[str]
) -> None:
    """Command lines of vLLM: an option passes only with the value that requests the default behaviour."""
    flags = [name if name.startswith("-") else f"--{name}" for name in ALWAYS]
    found = parser.parse_args([*flags, "m", "--tensor-parallel-size", "1", "-ngl", "0", "--runner=generate"])
    assert found.model == "m"
    for name, (values, why) in PASSING.items():
        flag = name if name.startswith("-") else f"--{name}"
        assert parser.parse_args([flag, values[0], "m"]).model == "m"
        with pytest.raises(SystemExit):
            parser.parse_args(["m", flag, "other"])
        assert f"{flag} other: takes only {values[0]}" in (told := capsys.readouterr().err)
        assert why in told


@pytest.mark.parametrize(
    ("words", "option", "value"),
    [
        (["-c", "8k"], "max_model_len", 8000),
        (["--max-model-len", "8K"], "max_model_len", 8192),
        (["--max-num-batched-tokens", "2.5k"], "max_num_batched_tokens", 2500),
        (["-np", "4"], "max_num_seqs", 4),
        (["-t", "2"], "threads", 2),
        (["--dtype", "bf16"], "dtype", "bfloat16"),
        (["--dtype", "float"], "dtype", "float32"),
        (["--load-format", "safetensors"], "load_format", "safetensors"),
        (["--load-format", "dummy"], "load_format", "random"),
        (["--quantization", "awq_marlin"], "quantization", "awq"),
    ],
)
def test_values_as_other_servers_write_them(
    parser: Parser, words: list[str], option: str, value: object
) -> None:
    assert getattr(parser.parse_args([*words, "m"]), option) == value


def test_an_option_is_suggested_only_when_it_works(
    parser: Parser, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {flag for action in parser._actions if action.help != argparse.SUPPRESS
             for flag in action.option_strings}  # fmt: skip
    names = (
        "slo",
        "schedule",
        "disable-log",
        "served-name",
        "max-models-len",
        "tokenizers",
        "lor",
        "parallels",
    )
    for name in (*names, *(name + "s" for name in BROUGHT.split())):
        with pytest.raises(SystemExit):
            parser.parse_args([f"--{name}", "1"])
        told = capsys.readouterr().err
        suggested = re.findall(r"did you mean (\S+)\?", told)
        assert set(suggested) <= shown, told


def test_every_option_of_the_server_is_documented() -> None:
    """docs/server.md is written from the parser."""
    page = options_table.PAGE.read_text()
    assert options_table.render(page) == page, "run python -m tools.options_table"
    rows = set(re.findall(r"^\| `(--[a-z0-9-]+)`", page, re.MULTILINE))
    assert {*EVERY, *KNOWN} <= rows


@pytest.mark.parametrize(
    ("given", "file", "text"),
    [
        (
            {"memory": 1, "gpu_memory_utilization": 0.5},
            {},
            "gpu_memory_utilization and memory: the command line sets",
        ),
        ({}, {"uds": "s", "port": 1}, "port and uds: the config file sets"),
        ({"uds": "s", "host": "h", "port": 1}, {}, "host and port and uds: the command line sets"),
        ({"ssl_keyfile": "k"}, {}, "set both or neither"),
    ],
)
def test_options_that_contradict(given: dict[str, object], file: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        settings({"model": "m", **given}, file)


def test_the_command_line_wins_over_a_file_that_says_it_otherwise() -> None:
    assert settings({"model": "m", "uds": "s"}, {"port": 1})[2].port == 8000
    assert settings({"model": "m", "port": 1}, {"uds": "s"})[2].uds is None
    assert settings({"model": "m", "port": 1}, {"host": "h"})[2].host == "h"
    assert settings({"model": "m"}, {"uds": "s"}, {"port": 1})[2].port == 1
    assert settings({"port": 2}, {"model": "m", "port": 3}, {"model": "n", "port": 1})[2].port == 2
    assert settings({"port": 2}, {"model": "m"}, {"model": "n"})[0] == "n"
