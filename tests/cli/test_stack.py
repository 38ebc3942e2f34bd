"""`quire stack`: a file of a router, servers and their tiers; what is wrong in it is named, and what is up stays up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.process import gone, until
from helpers.server import GUARD
from helpers.stacks import command, pids, stack, status, told, up
from helpers.sums import ask_a_sum
from quire.cli.stack import _holder, _locked
from quire.cli.stack_log import LogView
from quire.cli.stack_parts import HeldPorts, StackPart, files_of, own_folder, parts_of, write_files
from quire.config.stack import read_stack
from quire.types import QuireError
from quire.util.supervised import Supervised

SERVERS = """
first-port = 0
[router]
port = 0
[kv-server]
size = "64MiB"
[defaults]
memory = "500MiB"
max-model-len = 2048
threads = 1
[[serve]]
role = "decode"
[[serve]]
role = "prefill"
"""


def parts(folder: Path, text: str) -> list[StackPart]:
    return parts_of(read_stack(stack(folder, text)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1", "x: is not one of name, state, first-port"),
        ("a", "some.toml: cannot be read: "),
        ("name = 'a/b'\n[[serve]]", "name: 'a/b' is not of letters"),
        ("hung-seconds = 0.5\n[[serve]]", "hung-seconds: 0.5 is not 0 or a number of seconds from 1 on"),
        ("first-port = 70000\n[[serve]]", r"first-port: 70000 is not in \[0, 65535\]"),
        ("first-port = 65535\n[[serve]]\nmemory = '1GiB'\ncount = 3", "first-port: 65535 leaves no room for 3 ports"),
        ("[router]\nport = 65535\n[[serve]]\nmemory = '1GiB'", "router: port: 65535 leaves no room after it for 1"),
        ("[router]\nhost = ''\n[[serve]]\nmemory = '1GiB'", "router: host: is empty"),
        ("[[serve]]\nssl-certfile = 'a'", "serve 1: ssl-certfile: is the stack's to choose"),
        ("[[serve]]\nssl-cert-file = 'a'", "serve 1: ssl-certfile: is the stack's to choose"),
        ("[defaults]\nssl-key-file = 'a'\n[[serve]]", "defaults: ssl-keyfile: is the stack's to choose"),
        ("[router]\nbackends-file = 'a'\n[[serve]]", "router: backends-file: is the stack's to choose"),
        ("first-port = 8000\n[[serve]]\nmemory = '1GiB'", "first-port: two parts would have port 8000"),
        ("[router]", r"serve: at least one \[\[serve\]\] table"),
        ("[serve]\nmemory = '1GiB'", r"serve: at least one \[\[serve\]\] table"),
        ("[[serve]]\nmemori = '1GiB'", r"serve 1: 'memori' is unknown \(did you mean memory\?\)"),
        ("[[serve]]\nmemory = 'much'", "serve 1: memory: 'much' is not a size"),
        ("[[serve]]\nmax-num-seqs = 0", "serve 1: max_num_seqs: 0 is not a positive integer"),
        ("[[serve]]\nmax-num-seqs = 'all'", "serve 1: max_num_seqs: 'all' has the wrong type"),
        ("[[serve]]\nmodel = 'quire-mini'", "serve 1: memory: missing"),
        ("[[serve]]\nmemory = '1GiB'\n[[serve]]\nport = 1", "serve 2: port: is the stack's to choose"),
        ("[defaults]\nhost = 'a'\n[[serve]]", "defaults: host: is the stack's to choose"),
        ("[[serve]]\ncount = -1", r"serve 1: count: -1 is not in \[0, 64\]"),
        ("[[serve]]\ncount = 0", "serve: 0 servers are not 1 to 64"),
        ("[[serve]]\nmin = 1", "serve 1: min: needs max"),
        ("[[serve]]\nmax = 0", r"serve 1: max: 0 is not in \[1, 64\]"),
        ("[[serve]]\nmax = 2\nmin = 3", r"serve 1: min: 3 is not in \[0, 2\]"),
        ("[[serve]]\nmax = 2\ncount = 0", r"serve 1: count: 0 is not in \[1, 2\]"),
        ("[[serve]]\nmax = 2\nidle = 0", "serve 1: idle: 0 is not a number of seconds above 0"),
        ("[[serve]]\nmax = 2\n[[serve]]\nmax = 2", "serve . answers for the same model"),
        (
            "[kv-server]\n[[serve]]\n[[serve]]\nrole = 'prefill'\nmin = 0\nmax = 2",
            "serve 2: min: is 1 or more for role prefill",
        ),
        ("[[serve]]\nmax = 2\n[[serve]]", "serve 1: max: serve 2 answers for the same model"),
        ("[[serve]]\nrole = 'both'", r"serve 1: role: needs a table \[kv-server\]"),
        ("[kv-server]\n[[serve]]\nrole = 'all'", "serve 1: role: 'all' is not one of prefill, decode, both"),
        ("[kv-server]\n[[serve]]\nrole = 'prefill'", "serve: role: all of them are prefill"),
        ("[kv-server]\n[[serve]]\nmemory = '1GiB'\nkv-tiers = 'tape=1'", "serve 1: kv_tiers: 'tape=1' is not a tier"),
        ("[kv-server]\nsize = '1'\n[[serve]]", "kv-server: size: '1' is not a size of 1048576 bytes or more"),
        ("[kv-server]\nsize = true\n[[serve]]", "kv-server: size: True is not a size"),
        ("[kv-server]\ncolour = 1\n[[serve]]", "kv-server: colour: is not one of size, port"),
        ("[router]\npolicy = 'best'\n[[serve]]", "router: policy: 'best' is not one of prefix"),
        ("[router]\nbackend = ['http://a']\n[[serve]]", "router: backend: is the stack's to choose"),
        ("[router]\nmemory = '1GiB'\n[[serve]]", "router: memory: is no option of a router"),
        ("state = 'a'\n[[serve]]", "some.toml: cannot be read: Cannot overwrite"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parts(tmp_path, text)


def test_parts_have_names_ports_and_what_they_need(tmp_path: Path) -> None:
    text = """
    [router]
    port = 9000
    [kv-server]
    size = "64MiB"
    [defaults]
    memory = "500MiB"
    kv-tiers = "ram=16MiB"
    [[serve]]
    role = "decode"
    count = 2
    [[serve]]
    role = "prefill"
    gpu-memory-utilization = 0.01
    [[serve]]
    memory = "600MiB"
    served-model-name = "other"
    """
    config = read_stack(stack(tmp_path, text.replace("    gpu-memory-utilization = 0.01\n", "")))
    made = parts_of(config)
    assert [(each.name, each.port, each.role) for each in made] == [
        ("kv-server", 9001, ""), ("decode-1", 9002, "decode"), ("decode-2", 9003, "decode"),
        ("prefill-1", 9004, "prefill"), ("serve-1", 9005, ""), ("router", 9000, ""),
    ]  # fmt: skip
    config.state.mkdir(mode=0o700)
    commands = write_files(config, made).commands
    assert commands["decode-2"][-2:] == ["serve", f"--config={config.state / 'decode-2.json'}"]
    written = {
        name: json.loads((config.state / f"{name}.json").read_text())
        for name in ("prefill-1", "serve-1", "router")
    }
    key = config.state / "kv.key"
    path = f"{config.state}/kv.sock"
    at = path if len(path) <= 107 else "127.0.0.1:9001"
    assert written["prefill-1"]["kv_tiers"] == f"ram=16MiB,remote={at}:{key},role=prefill"
    assert written["serve-1"]["kv_tiers"] == f"ram=16MiB,remote={at}:{key}"
    deep = files_of(replace(config, state=tmp_path / ("x" * 108)), made)
    assert "remote=127.0.0.1:9001:" in deep.texts["serve-1.json"], "no path of a socket is so long"
    assert not any("--uds" in word for word in deep.commands["kv-server"])
    assert written["serve-1"]["served_model_name"] == ["other"]
    assert written["router"]["kv_key_file"] == str(key)
    before = key.read_bytes()
    write_files(config, made)
    assert key.read_bytes() == before, "servers that go on know this one"
    assert all(file.stat().st_mode & 0o77 == 0 for file in config.state.iterdir())
    with pytest.raises(ValueError, match="sets more than one of them"):
        parts(tmp_path, text)


def test_addresses_are_ones_to_call(tmp_path: Path) -> None:
    for host, at in (
        ("0.0.0.0", "127.0.0.1"),
        ("::", "[::1]"),
        ("[::1]", "[::1]"),
        ("a.example", "a.example"),
    ):
        config = read_stack(
            stack(tmp_path, f"[router]\nport = 9000\nhost = '{host}'\n[[serve]]\nmemory = '1GiB'")
        )
        made = parts_of(config)
        assert made[-1].url == f"http://{at}:9000"
        config.state.mkdir(mode=0o700, exist_ok=True)
        write_files(config, made)
        seen = json.loads((config.state / "prometheus.json").read_text())
        assert [each["targets"] for each in seen] == [["127.0.0.1:9001"], [f"{at}:9000"]]


def test_state_is_found_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    file = tmp_path / "here/some.toml"
    file.write_text("state = 'of/it'\n[[serve]]\nmemory = '1GiB'")
    monkeypatch.chdir(tmp_path / "there")
    for path in (file, Path("../here/some.toml")):
        assert read_stack(path).state.resolve() == tmp_path / "here/of/it"


def test_what_others_can_use_is_no_state(tmp_path: Path) -> None:
    file = stack(tmp_path, SERVERS)
    config = read_stack(file)
    config.state.mkdir()
    config.state.chmod(0o750)
    both = [["stack", "up", str(file), *options] for options in ((), ("--detach",))]
    for code, _, err in run_all(both):
        assert (code, "others can use it: its mode is 750" in err) == (2, True)
    assert not [*config.state.iterdir()]
    config.state.chmod(0o700)
    key = config.state / "kv.key"
    key.write_text("known to others")
    key.chmod(0o644)
    with pytest.raises(ValueError, match=r"kv\.key: others can use it: its mode is 644"):
        write_files(config, parts_of(config))
    key.unlink()
    key.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"kv\.key: is not one of this user's own, or a link"):
        write_files(config, parts_of(config))
    config.state.rename(tmp_path / "moved")
    config.state.symlink_to(tmp_path / "moved")
    with pytest.raises(ValueError, match="state: is not one of this user's own, or a link"):
        own_folder(config.state)
    file.write_text(f"state = '/proc/nope/x'\n{SERVERS}")
    for code, _, err in run_all(both):
        assert (code, err.count("\n")) == (2, 1), err
        assert "state: /proc/nope" in err


def test_the_kernel_says_who_has_a_stack_up(tmp_path: Path) -> None:
    config = read_stack(stack(tmp_path, SERVERS))
    held = (
        "import sys; from pathlib import Path; from quire.cli.stack import _locked, read_stack\n"
        "with _locked(read_stack(Path(sys.argv[1]))): print('held', flush=True); sys.stdin.read()"
    )
    assert _holder(config) is None
    with subprocess.Popen(
        [sys.executable, "-c", held, str(tmp_path / "some.toml")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        assert [_holder(config) for _ in range(3)] == [other.pid] * 3
        with pytest.raises(QuireError, match=f"some is up already, as process {other.pid}"), _locked(config):
            pytest.fail("two have it")
        assert _holder(config) == other.pid
    assert _holder(config) is None
    (config.state / "lock").write_text("1")  # no number of a process is believed
    assert _holder(config) is None
    with _locked(config):  # nothing that asked holds it
        pass


def test_a_question_that_fails_does_not_end_the_watch() -> None:
    said: list[str] = []

    async def ready() -> bool:
        raise ValueError("no such address")

    async def watched() -> Supervised:
        made = Supervised(
            "it",
            [sys.executable, "-c", "print('its line')"],
            ready,
            lambda _, line: said.append(line),
            lambda: None,
        )
        await made.run()
        assert made.settled.is_set()
        return made

    assert asyncio.run(watched()).state == "failed"
    assert said.count("quire: whether it works cannot be asked: no such address") == 1
    assert "its line" in said


@pytest.mark.parametrize("hung", [0.02, 0.0])
def test_who_gives_no_answer_is_started_again(hung: float) -> None:
    """Only after several questions in a row; never, where that is asked for."""
    given = iter([*[True, False, False] * 3, *[False] * 100])

    async def ready() -> bool:
        return True

    async def watched() -> Supervised:
        async def answers() -> bool:
            return next(given) if not made.restarts else True

        command = [sys.executable, "-c", "import time; time.sleep(3600)"]
        made = Supervised("it", command, ready, lambda *_: None, lambda: None, answers, hung)
        running = asyncio.create_task(made.run())
        if hung:
            while not (made.restarts and made.state == "up"):
                await asyncio.sleep(0.01)
        else:
            await made.settled.wait()
            await asyncio.sleep(0.2)
        await made.end(GUARD)
        await running
        return made

    made = asyncio.run(watched())
    assert made.restarts == (hung > 0)
    assert sum(given) == (0 if hung else 3), "what it had to answer was asked"


def test_lines_that_nobody_reads_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with open(writer, "w") as into, open(reader) as output:
        monkeypatch.setattr(sys, "stderr", into)
        log = LogView(["it"])
        for _ in range(400):
            log.say("it", "x" * 2**16)
        assert 0 < log._waiting <= 8 * 2**20
        seen: list[str] = []
        lines = threading.Thread(target=lambda: seen.extend(output))
        lines.start()
        until(lambda: log._waiting == 0)
        log.say("it", "the last")
        log.close(GUARD)
        into.close()
        lines.join()
    assert seen[-1] == "it | the last\n"
    lost = 400 - sum("xxx" in line for line in seen)
    assert seen[-2] == f"   | {lost} lines were not read in time\n"


def test_ports_are_held_and_can_be_listened_on(tmp_path: Path) -> None:
    made = parts(tmp_path, SERVERS)
    held = HeldPorts()
    held.hold(made)
    assert len({each.port for each in made}) == len(made)
    with contextlib.closing(held), socket.create_server(("127.0.0.1", made[0].port)):
        again = HeldPorts()
        with (
            contextlib.closing(again),
            pytest.raises(ValueError, match=r"kv-server: 127\.0\.0\.1:\d+: .*in use"),
        ):
            again.hold(made[:1])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Path]:
    with up(tmp_path, SERVERS) as file:
        yield file


def test_a_stack_answers_outlives_its_parts_and_leaves_nothing(served: Path) -> None:
    found = status(served)
    names = [each["name"] for each in found["parts"]]
    assert names == ["kv-server", "decode-1", "prefill-1", "router"]
    assert [each["state"] for each in found["parts"]] == ["up"] * 4
    assert all(each["resident"] > 2**20 for each in found["parts"])
    said = ask_a_sum(found["url"])
    assert said[0] == 200
    again = command("up", served)
    assert (again.returncode, f"is up already, as process {found['pid']}" in again.stderr) == (1, True)
    before = {each["name"]: each for each in found["parts"]}
    for name in ("decode-1", "kv-server"):
        os.kill(before[name]["pid"], signal.SIGKILL)

    def back() -> bool:
        now = {each["name"]: each for each in told(served.parent)["parts"]}
        return all(
            now[name]["restarts"] == 1 and now[name]["state"] == "up" for name in ("decode-1", "kv-server")
        )

    until(back)
    now = {each["name"]: each for each in status(served)["parts"]}
    for name in names:
        assert now[name]["url"] == before[name]["url"], "its port stays its own"
        assert (now[name]["pid"] == before[name]["pid"]) == (name not in {"decode-1", "kv-server"})
    assert now["decode-1"]["why"] == "ended by SIGKILL"
    until(lambda: ask_a_sum(found["url"]) == said)
    processes = [status(served)["pid"], *pids(status(served))]
    assert len(processes) > 6
    down = command("down", served)
    assert (down.returncode, down.stdout) == (0, "some is down\n")
    until(lambda: all(map(gone, processes)))  # what was killed with them, too
    assert command("status", served).returncode == 1
    assert (served.parent / "state/log").stat().st_mode & 0o777 == 0o600
    log = (served.parent / "state/log").read_text()
    assert log.count("decode-1  | quire: serving quire-mini at") == 2
    assert "decode-1  | quire: it ended by SIGKILL" in log
    left = {each.name for each in (served.parent / "state").iterdir()}
    assert left == {
        "lock",
        "log",
        "kv.key",
        "backends.toml",
        "prometheus.json",
        "decode-1.json",
        "prefill-1.json",
        "router.json",
    }


def test_a_part_that_cannot_start_ends_all(tmp_path: Path) -> None:
    file = stack(tmp_path, SERVERS.partition("[[serve]]")[0] + '[[serve]]\nmodel = "/nowhere"\n')
    made = command("up", file, "--detach")
    assert made.returncode == 1
    assert "serve-1   | quire: /nowhere: no such file or folder" in made.stderr
    assert "serve-1   | quire: serve-1 ended with status 1 before it worked" in made.stderr
    assert command("down", file).stdout == "some is not up\n"


COMMANDS = """
import contextlib, io, json, sys
from quire.cli.main import main
made = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(words)
    made.append((code, out.getvalue(), err.getvalue()))
json.dump(made, sys.stdout)
"""


def commands(folder: Path, *asked: tuple[str, ...]) -> list[tuple[int, str, str]]:
    """Actions on stacks of texts; what each said."""
    words = []
    for number, (action, text, *options) in enumerate(asked):
        (folder / str(number)).mkdir()
        words.append(["stack", action, str(stack(folder / str(number), text)), *options])
    return run_all(words)


def run_all(words: list[list[str]]) -> list[tuple[int, str, str]]:
    """Commands in one process, which has nothing else in its memory; what each said."""
    made = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(words)],
        capture_output=True, text=True, timeout=GUARD, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return [(code, out, err) for code, out, err in json.loads(made.stdout)]


def test_a_plan_says_what_each_part_takes(tmp_path: Path) -> None:
    large = SERVERS.replace("500MiB", "100TiB")
    (code, plan, _), (_, table, _), small, too_large, refused = commands(
        tmp_path,
        ("plan", SERVERS, "--json"),
        ("plan", SERVERS),
        ("plan", SERVERS.replace("500MiB", "50MiB")),
        ("plan", large),
        ("up", large),
    )
    assert code == 0
    found = json.loads(plan)
    by_name = {each["name"]: each for each in found["parts"]}
    assert found["memory"] == sum(each["memory"] for each in found["parts"])
    assert by_name["decode-1"]["memory"] == 500 * 2**20 >= sum(by_name["decode-1"]["parts"].values())
    assert by_name["decode-1"]["parts"]["tiers"] > 0
    assert by_name["decode-1"]["kv_tokens"] > 2048
    lines = table.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["part", "kv-server", "decode-1", "prefill-1", "router"]
    assert small[0] == 1
    assert "cannot hold one sequence" in small[1]
    assert too_large[0] == 1
    assert refused[0] == 2
    assert "more than this machine has" in refused[2]
