"""Completions, asked for in the shells themselves, where they are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from quire.cli.completions import SHELLS, commands, options
from quire.cli.main import main

# words typed, what is among the answers, what is not
TYPED = [
    ("", {"serve", "generate", "completions", "help"}, {"--dtype"}),
    ("se", {"serve"}, {"generate"}),
    ("help ch", {"chat"}, {"serve"}),
    ("serve --max-model", {"--max-model-len"}, {"--max-num-seqs"}),
    ("serve --enforce", set(), {"--enforce-eager"}),
    ("serve --dtype bf", {"bfloat16"}, {"auto"}),
    ("serve --port 1 --log-format ", {"human", "json"}, {"--port"}),
    ("bench ", {"latency", "serve"}, {"--num-iters"}),
    ("bench latency --num-it", {"--num-iters"}, {"--port"}),
    ("completions ", {"bash", "zsh", "fish"}, {"serve"}),
]


@pytest.fixture(params=SHELLS)
def script(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[str, Path]:
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completions", shell]) == 0
    path = tmp_path / "_quire"
    path.write_text(capsys.readouterr().out)
    return shell, path


def test_every_option_of_every_command_is_there(script: tuple[str, Path]) -> None:
    shell, path = script
    subprocess.run([shell, "-n", str(path)], check=True)  # reads without running
    text = path.read_text()
    for command in commands():
        assert command.rpartition(" ")[2] in text
        for option in options(command):
            for flag in option.flags:
                assert (flag if shell != "fish" else flag.lstrip("-")) in text


def answers(shell: str, path: Path, typed: str) -> set[str]:
    words = ["quire", *typed.split(" ")]
    if shell == "bash":
        quoted = " ".join(f"'{word}'" for word in words)
        code = f"source {path}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _quire; "
        code += "printf '%s\\n' \"${COMPREPLY[@]}\""
    else:
        code = f"source {path}; complete -C 'quire {typed}'"
    done = subprocess.run(
        [shell, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
        cwd=path.parent,
    )
    assert not done.stderr
    return {line.split("\t")[0] for line in done.stdout.splitlines()}


@pytest.mark.parametrize(
    ("typed", "among", "not_among"), TYPED, ids=lambda v: v or "-" if isinstance(v, str) else ""
)
def test_what_a_shell_answers(
    script: tuple[str, Path], typed: str, among: set[str], not_among: set[str]
) -> None:
    shell, path = script
    if shell == "zsh":
        pytest.skip("zsh completes at a terminal only")
    found = answers(shell, path, typed)
    assert among <= found
    assert not found & not_among
