"""Completions, asked for in the shells themselves, where they are installed."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from quire.cli.completions import SHELLS, commands, options
from quire.cli.main import main

# typed words, words that must be among the completions, words that must not
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
    if shell == "zsh":
        return zsh_answers(path, typed)
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


def zsh_answers(path: Path, typed: str) -> set[str]:
    """zsh completes at a terminal only: the words it lists before it prompts again, or before it beeps at none."""
    setup = f"fpath=({path.parent} $fpath); autoload -Uz compinit; compinit -D -u; bindkey -e; LISTMAX=9999"
    (path.parent / ".zshrc").write_text(f"{setup}; bindkey '^D' list-choices; PROMPT='ready> '")
    ours, theirs = pty.openpty()
    environment = os.environ | {"ZDOTDIR": str(path.parent), "TERM": "dumb", "COLUMNS": "200"}
    shell = subprocess.Popen(
        ["zsh", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=path.parent,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)

    def read_until(mark: str) -> str:
        said, until = b"", time.monotonic() + 120
        while not re.search(mark.encode(), said):
            assert select.select([ours], [], [], max(0.0, until - time.monotonic()))[0], said
            said += os.read(ours, 65536)
        return said.decode()

    try:
        read_until("ready> ")
        os.write(ours, f"quire {typed}\x04".encode())
        listed = read_until("ready> |\a")
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)
    lines = listed.splitlines()[1:-1]  # without the typed line
    return {word for line in lines for word in line.partition(" -- ")[0].split()}


@pytest.mark.parametrize(
    ("typed", "among", "not_among"), TYPED, ids=lambda v: v or "-" if isinstance(v, str) else ""
)
def test_completions_in_a_shell(
    script: tuple[str, Path], typed: str, among: set[str], not_among: set[str]
) -> None:
    shell, path = script
    found = answers(shell, path, typed)
    assert among <= found
    assert not found & not_among
