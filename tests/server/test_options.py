"""The options that vLLM's users know: there, explained by --help, documented, and refused when they contradict."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from tools import migration_table, options_table

from quire.cli.config_file import read_config
from quire.cli.main import command_parser
from quire.cli.parser import Parser
from quire.cli.serve import add_arguments, settings
from quire.config.elsewhere.known import ROWS
from quire.config.elsewhere.lookup import explain, rows_of
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
    --quantization --tokenizer --revision --trust-remote-code --chat-template-content-format --tool-call-parser
    --reasoning-parser --enable-auto-tool-choice --enable-lora --lora-modules --max-loras --speculative-config
    --tensor-parallel-size --pipeline-parallel-size --data-parallel-size --enable-expert-parallel
    --kv-transfer-config --kv-events-config --prefix-caching-hash-algo --enable-per-request-metrics
    --enable-prompt-tokens-details --enable-force-include-usage --otlp-traces-endpoint --allowed-media-domains
    --mem-fraction-static --chunked-prefill-size --schedule-policy --schedule-conservativeness
    --max-running-requests --max-queued-requests --page-size --enable-deterministic-inference
    --enable-cache-report --enable-metrics --watchdog-timeout --crash-dump-folder --model-path -c -np -ctk -ctv
    -ngl -t -tb --cache-reuse --cache-ram --slot-save-path --spec-type --metrics --api-key-file --lora --jinja
    --reasoning-budget --sleep-idle-seconds --models-dir --models-max --fit --ctx-size --parallel --cache-type-k
    --max-input-tokens --max-total-tokens --max-batch-prefill-tokens --max-batch-total-tokens
    --waiting-served-ratio --max-concurrent-requests --speculate --model-id --graceful-termination-timeout
    OLLAMA_CONTEXT_LENGTH OLLAMA_NUM_PARALLEL OLLAMA_MAX_QUEUE OLLAMA_MAX_LOADED_MODELS OLLAMA_KEEP_ALIVE
    OLLAMA_KV_CACHE_TYPE OLLAMA_FLASH_ATTENTION OLLAMA_ORIGINS OLLAMA_HOST
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


def test_options_of_other_servers_are_there_or_explained(parser: Parser) -> None:
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    assert [name for name in BROUGHT.split() if name not in actions and not explain(name)] == []
    for row in ROWS:
        assert row.to in {*actions, ""}, row.names
        assert row.to or row.why, row.names
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", row.why))
        theirs = {
            "--json-schema",
            "--grammar",
            "--max-tokens",
            "--merge-adapter",
        }  # of others, as the texts say
        assert named <= {*actions} | theirs, row.names


def test_options_that_request_the_default_behaviour_are_accepted(
    parser: Parser, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option of which the table names values passes with these alone."""
    flags = ["--enforce-eager", "--metrics", "--jinja", "-cb", "--enable-auto-tool-choice"]
    found = parser.parse_args([*flags, "m", "--tensor-parallel-size", "1", "-ngl", "0", "--runner=generate"])
    assert found.model == "m"
    own = {
        flag
        for action in parser._actions
        for flag in action.option_strings
        if action.help != argparse.SUPPRESS
    }
    for row in ROWS:
        for name in row.names if not row.to and row.done != ("", "true", "1") else ():
            if name in own or not name.startswith("-") or len(rows_of(name)) > 1:
                continue
            for value in row.done:
                assert parser.parse_args(["m", f"{name}={value}"]).model == "m"
            with pytest.raises(SystemExit):
                parser.parse_args(["m", name] if row.arity == "" else ["m", f"{name}=other"])
            assert row.why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--ctx-size 8k --parallel 4", {"max_model_len": 8000, "max_num_seqs": 4}),
        ("--ctx-size 0 --parallel -1", {}),
        ("-ctk q8_0 -ctv q8_0 -tb 2", {"kv_cache_dtype": "int8", "threads": 2}),
        ("--mem-fraction-static 0.5 --page-size 32", {"gpu_memory_utilization": 0.5, "block_size": 32}),
        ("--chunked-prefill-size -1", {"enable_chunked_prefill": False}),
        ("--max-batch-total-tokens 100", {"num_kv_blocks": 7}),
        ("--disable-radix-cache --log-requests", {"enable_prefix_caching": False, "access_log": True}),
        ("--quantize bitsandbytes-nf4 --hostname h", {"quantization": "int4", "host": "h"}),
        ("--alias a,b", {"served_model_name": ["a", "b"]}),
        ("--watchdog-timeout 9 --schedule-policy fcfs", {"hang_timeout": 9.0, "scheduling_policy": "fcfs"}),
        ("--spec-type ngram-simple --json-output", {"speculate": "ngram", "log_format": "json"}),
    ],
)
def test_options_of_other_servers_are_translated(
    parser: Parser, words: str, expected: dict[str, Any]
) -> None:
    found = vars(parser.parse_args(["m", *words.split()]))
    assert {name: value for name, value in found.items() if name not in {"model", "config"}} == expected


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--max-total-tokens 4096", "means different things: that of TGI is --max-model-len here"),
        ("-ctk q8_0 -ctv f16", "-ctv f16: contradicts -ctk q8_0; both are --kv-cache-dtype here"),
        ("-ctk q5_1", "'q5_1' is not supported, only f32, f16, bf16, q8_0, q4_0"),
        ("--max-running-requests x", "is --max-num-seqs here: 'x' is not a whole number"),
        ("--schedule-policy lof", "'lof' is not supported, only fcfs, lpm"),
        ("--lora a.gguf", "--lora a.gguf: is not supported: an adapter is a model name of its own here"),
        ("--sla x", "unrecognized argument: --sla"),
    ],
)
def test_what_cannot_be_translated_is_explained(
    parser: Parser, capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["m", *words.split()])
    said = capsys.readouterr().err
    assert told in said
    assert "did you mean" not in said


def test_a_command_without_an_option_says_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """quire generate runs an engine, but no server."""
    assert (
        command_parser("generate").parse_args(["m", "--ctx-size", "99", "--prompt", "x"]).max_model_len == 99
    )
    with pytest.raises(SystemExit):
        command_parser("generate").parse_args(["m", "--hostname", "h"])
    assert "is --host of quire serve, which this command does not have" in capsys.readouterr().err


def test_config_files_take_options_of_other_servers(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model-path: m\ncontext-length: 4k\nlog-requests: true\ntp: 1\nalias: a,b\n")
    expected = {"model": "m", "max_model_len": 4000, "access_log": True, "served_model_name": ["a", "b"]}
    expected["tensor_parallel_size"] = 1
    assert read_config(file) == expected
    file.write_text("expert-parallel-size: 2\n")
    with pytest.raises(ValueError, match="takes only 1 here: --enable-expert-parallel"):
        read_config(file)


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
        "slos",
        "schedule",
        "disable-log",
        "served-name",
        "max-models-len",
        "tokenizers",
        "lor",
        "parallels",
    )
    for name in (
        *map("--{}".format, names),
        *(name + "s" for name in BROUGHT.split() if name.startswith("--")),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args([name, "1"])
        told = capsys.readouterr().err
        suggested = re.findall(r"did you mean (\S+)\?", told)
        assert set(suggested) <= shown, told


def test_every_option_of_the_server_is_documented() -> None:
    """docs/server.md is written from the parser."""
    page = options_table.PAGE.read_text()
    assert options_table.render(page) == page, "run python -m tools.options_table"
    rows = set(re.findall(r"^\| `(--[a-z0-9-]+)`", page, re.MULTILINE))
    assert {*EVERY, *KNOWN} <= rows


def test_every_option_of_other_servers_is_documented() -> None:
    page = migration_table.PAGE.read_text()
    assert migration_table.render(page) == page, "run python -m tools.migration_table"


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
