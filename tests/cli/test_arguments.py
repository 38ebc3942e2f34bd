"""What is typed after a command's name: where the model may stand, what the environment adds, what mistakes get."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from helpers.quantized_folders import quantized_folder
from helpers.tokenizers import save_whole
from quire.cli.main import COMMANDS, READ_ENVIRONMENT, command_parser, main
from quire.cli.serve import settings
from quire.config.schema import OPTIONS, STORED
from quire.spec.quantization import METHODS


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that looks like a checkpoint."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return str(tmp_path / "model")


SERVE = command_parser("serve")


def served(*words: str) -> dict[str, Any]:
    found = vars(SERVE.parse_args(words))
    return {name: value for name, value in found.items() if name not in {"config", "environment"}}


PARTS = [
    ["--api-key", "k1", "k2"],
    ["--served-model-name", "a", "b"],
    ["--port", "80"],
    ["--access-log"],
    ["MODEL"],
]


@pytest.mark.parametrize("order", list(permutations(range(5))), ids=lambda o: "".join(map(str, o)))
def test_the_model_is_found_wherever_it_stands(order: tuple[int, ...], model: str) -> None:
    words = [model if word == "MODEL" else word for at in order for word in PARTS[at]]
    found = served(*words)
    assert found["model"] == model
    assert (found["api_key"], found["served_model_name"]) == (["k1", "k2"], ["a", "b"])
    option = [word if word != model else f"--model={model}" for word in words]
    assert served(*option) == found


@pytest.mark.parametrize("flag", ["-m", "--model", "-hf", "--hf-repo", "--model-path", "--model-id"])
def test_the_model_as_an_option(flag: str) -> None:
    assert served("--api-key", "k1", "org/key", flag, "org/name")["model"] == "org/name"
    assert served(flag, "org/name", "org/name")["model"] == "org/name"
    with pytest.raises(SystemExit):
        served(flag, "org/name", "other")


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", "k1", "org/name"],
        ["--api-key", "k1", "/no/such/model"],
        ["--api-key", "k1", "~nobody/models/x"],
        ["--served-model-name", "a", "x.gguf"],
        ["--served-model-name", "org/a", "org/b"],
        ["--api-key", "MODEL"],
        ["--api-key", "MODEL", "k2"],
        ["--api-key", "k1", "MODEL", "--served-model-name", "a", "MODEL"],
    ],
)
def test_a_word_that_could_be_a_model_or_a_value_is_refused(
    words: list[str], model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [model if word == "MODEL" else word for word in words]
    with pytest.raises(SystemExit) as ended:
        served(*words)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"{words[0]}: a value looks like a model, but no model is given" in told
    assert words[-1] not in told  # it may be a key
    assert served("m", *words)["model"] == "m"  # the model is named: no doubt
    if len(words) == 3:
        flag, name = words[0], words[0][2:].replace("-", "_")
        assert served(f"{flag}={words[1]}", f"{flag}={words[2]}") == {name: words[1:]}


def test_without_a_model_values_are_values() -> None:
    assert served("--api-key", "k1", "k2", "--allowed-origins", "http://a", "http://b:1") == {
        "api_key": ["k1", "k2"], "allowed_origins": ["http://a", "http://b:1"],
    }  # fmt: skip
    assert served("--api-key", "k" * 4000, "x") == {"api_key": ["k" * 4000, "x"]}
    assert served("--served-model-name", "org/name") == {"served_model_name": ["org/name"]}
    assert served("--api-key", "secret", "quire-mini") == {"api_key": ["secret"], "model": "quire-mini"}
    assert served("--api-key", "k1", "--api-key", "k2", "--", "m") == {"api_key": ["k1", "k2"], "model": "m"}


def test_a_quantization_is_the_checkpoints_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = save_whole("llama2", tmp_path / "plain")
    assert set(METHODS) <= {*STORED, *OPTIONS["quantization"].metadata["aliases"]}
    for kind, asked, wrong in (
        ("awq", "awq_marlin", "gptq"), ("gptq", "gptq", "awq"), ("int-quantized", "compressed-tensors", "fp8"),
    ):  # fmt: skip
        folder, _ = quantized_folder(plain, tmp_path / kind, kind)
        inspect = ["inspect", str(folder), "--no-measure", "--json", "--quantization"]
        found = []
        for method in ("auto", asked):
            assert main([*inspect, method]) == 0
            found.append(json.loads(capsys.readouterr().out)["params"])
        assert found[0] == found[1]
        assert main([*inspect, wrong]) == 2
        name = STORED[OPTIONS["quantization"].metadata["aliases"].get(asked, asked)]
        assert f"'{wrong}' does not match the checkpoint, which is {name}" in capsys.readouterr().err


# ---- the environment


def test_every_option_of_a_command_can_be_set_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in READ_ENVIRONMENT:
        variables = command_parser(name).variables()
        flags = {
            flag
            for a in command_parser(name)._actions
            for flag in a.option_strings
            if a.help != argparse.SUPPRESS
        }
        of = {flag for action in variables.values() for flag in action.option_strings}
        assert flags - of <= {"-h", "--help", "-m", "--model", "-hf", "-p", "--prompt", "--prompt-token-ids"}
    for variable, text, option, value in (
        ("QUIRE_API_KEY", "k1, k2", "api_key", ["k1", "k2"]),
        ("QUIRE_PORT", "81", "port", 81),
        ("QUIRE_MAX_MODEL_LEN", "8K", "max_model_len", 8192),
        ("QUIRE_MEMORY", "2GiB", "memory", 2 << 30),
        ("QUIRE_ENABLE_PREFIX_CACHING", "off", "enable_prefix_caching", False),
        ("QUIRE_ACCESS_LOG", "1", "access_log", True),
        ("QUIRE_DTYPE", "bf16", "dtype", "bfloat16"),
        ("QUIRE_MODEL", "org/name", "model", "org/name"),
        ("QUIRE_STALL_TIMEOUT", "2.5", "stall_timeout", 2.5),
    ):
        monkeypatch.setenv(variable, text)
        found = command_parser("serve").parse_args([])
        assert getattr(found, option) == value
        assert found.environment[option] == value


def test_the_command_line_wins_over_the_environment_and_that_over_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in (
        ("PORT", "1"),
        ("HOST", "h"),
        ("API_KEY", "e1,e2"),
        ("MODEL", "env"),
        ("MEMORY", "1GiB"),
    ):
        monkeypatch.setenv(f"QUIRE_{name}", text)
    words = ["m", "--port", "2", "--api-key", "k", "--gpu-memory-utilization", "0.5"]
    found = command_parser("serve").parse_args(words)
    environment = found.environment
    assert environment == {"host": "h", "memory": 2**30}
    given = {
        name: value
        for name, value in vars(found).items()
        if name not in {*environment, "environment", "config"}
    }
    model, engine, serving = settings(given, {"host": "f", "reader_tokens": 7, "model": "f"}, environment)
    assert (model, serving.port, serving.host, serving.api_key, serving.reader_tokens) == (
        "m",
        2,
        "h",
        ("k",),
        7,
    )
    assert engine.limits.memory != 2**30  # --gpu-memory-utilization says it otherwise
    asked = command_parser("generate").parse_args(["--prompt", "x", "--stop", "a"])
    assert (asked.model, asked.memory, asked.stop) == ("env", 2**30, ["a"])


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("QUIRE_PORT", "eighty", "QUIRE_PORT: 'eighty' is not a whole number"),
        ("QUIRE_API_KEY", "", "QUIRE_API_KEY: the variable is empty"),
        ("QUIRE_API_KEY", "a, ", "a key must be printable ASCII, and not empty or blank"),
        ("QUIRE_API_KEY", "a,,b", "a key must be printable ASCII, and not empty or blank"),
        ("QUIRE_ACCESS_LOG", "maybe", "QUIRE_ACCESS_LOG: 'maybe' is not one of 1, true"),
        ("QUIRE_DTYPE", "int3", "QUIRE_DTYPE: invalid choice: 'int3'"),
        ("QUIRE_MEMORY", "much", "QUIRE_MEMORY: 'much' is not a size"),
    ],
)
def test_variables_that_cannot_be_used(
    variable: str,
    text: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, text)
    try:
        status: Any = main(["serve", "quire-mini", "--api-key-file", "/never/started"])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_unknown_variables_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("QUIRE_MAX_MODLE_LEN", "5")
    monkeypatch.setenv("QUIRE_HOST", "of serve")
    monkeypatch.setenv("QUIRE_PORT", "tcp://10.0.0.7:8000")  # Kubernetes sets this for a service of that name
    monkeypatch.setenv("QUIRE_PORT_8000_TCP_ADDR", "10.0.0.7")
    monkeypatch.setenv("QUIRE_SERVICE_HOST", "10.0.0.7")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    words = ["generate", str(tmp_path), "--prompt", "x"]
    main(words)
    told = capsys.readouterr().err
    assert "QUIRE_MAX_MODLE_LEN is unknown and ignored (did you mean QUIRE_MAX_MODEL_LEN?)" in told
    assert told.count("unknown and ignored") == 1
    main([*words, "--quiet"])
    assert "QUIRE" not in capsys.readouterr().err


# ---- commands


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serv"], "unknown command: serv (did you mean serve?)"),
        (["help", "serv"], "unknown command: serv (did you mean serve?)"),
        (["generate", "m", "n", "--prompt", "x"], "unrecognized argument: n"),
        (["generate", "--promt", "x", "--prompt", "y"], "--promt (did you mean --prompt?)"),
        (["serve", "-tb", "x"], "-tb x: is --threads here: 'x' is not a whole number"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: Any = main(words)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 2  # no usage of a hundred options


def test_help_comes_by_subject(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["help"], ["--help"], []):
        with pytest.raises(SystemExit):
            main(words)
        assert all(f"\n  {name} " in capsys.readouterr().out for name in ["serve"])
    for command in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main(["help", command])
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: quire {command} ")
    with pytest.raises(SystemExit):
        main(["help", "serve"])
    text = capsys.readouterr().out
    for subject in (
        "address and TLS",
        "access",
        "API",
        "limits and timeouts",
        "KV cache",
        "scheduling",
        "loading",
    ):
        assert f"\n{subject}:\n" in text
    assert "QUIRE_MAX_MODEL_LEN" in text


def test_python_m_quire() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quire", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("quire ")


@pytest.mark.parametrize("closed", ["2>&-", "<&-", "2>&- <&- >&-"])
def test_closed_streams(closed: str) -> None:
    """The text is printed, or the exit status says why not; no opened file takes the place of a stream."""
    for words, status in (
        ("generate quire-mini --prompt Hi --max-tokens 3", 0),
        ("generate no/such/folder --prompt x", 1),
    ):
        command = f"exec {sys.executable} -m quire {words} {closed}"
        done = subprocess.run(
            ["sh", "-c", command], stdout=subprocess.PIPE, text=True, check=False, env={**os.environ}
        )
        assert done.returncode == status
        assert bool(done.stdout) == (status == 0 and ">&-" not in closed.replace("2>&-", ""))


class _ShortWrites(io.RawIOBase):
    """Takes at most a hundred bytes at a time, as a pipe does with what a signal interrupts."""

    def __init__(self) -> None:
        self.taken = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        some = bytes(data)[:100]
        self.taken += some
        return len(some)


def test_a_text_is_whole_without_a_buffer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With PYTHONUNBUFFERED, under which the interpreter writes a text once and forgets what was not taken."""
    assert main(["calc", "worked"]) == 0
    whole, pipe = capsys.readouterr().out, _ShortWrites()
    text = io.TextIOWrapper(pipe, "utf-8", write_through=True)
    monkeypatch.setattr(sys, "stdout", text)
    monkeypatch.setattr(sys, "__stdout__", text)
    assert main(["calc", "worked"]) == 0
    assert pipe.taken.decode() == whole
