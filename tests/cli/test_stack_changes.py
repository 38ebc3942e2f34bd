"""A stack that changes while it is up: its file is read again, and servers come and go with the load."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from helpers.process import gone, until
from helpers.stacks import command, stack, status, up
from helpers.sums import ask_a_sum
from quire.cli.stack_parts import parts_of
from quire.config.stack import read_stack

HEAD = """
first-port = 0
[router]
port = 0
[defaults]
memory = "500MiB"
max-model-len = 2048
threads = 1
"""
TWO = HEAD + "[[serve]]\ncount = 2\n"


def parts(file: Path) -> dict[str, dict[str, Any]]:
    """The parts of a stack, by name."""
    return {each["name"]: each for each in status(file)["parts"]}


def running(file: Path) -> list[str]:
    """The servers that work."""
    return [name for name, each in parts(file).items() if each["kind"] == "serve" and each["state"] == "up"]


def backends(url: str) -> list[str]:
    """The servers that the router can ask."""
    with urllib.request.urlopen(f"{url}/router/backends") as answer:
        return [each["name"] for each in json.loads(answer.read())["data"] if each["state"] == "ready"]


def test_ports_stay_where_they_were(tmp_path: Path) -> None:
    text = "[router]\nport = 9000\n[[serve]]\nmemory = '1GiB'\ncount = 3\n"
    config = read_stack(stack(tmp_path, text))
    assert {each.name: each.port for each in parts_of(config, {"serve-3": 9001})} == {
        "serve-1": 9002, "serve-2": 9003, "serve-3": 9001, "router": 9000,
    }  # fmt: skip


def test_a_file_that_is_read_again_changes_what_has_changed(tmp_path: Path) -> None:
    """More servers, fewer, others: what is not concerned goes on, and the router knows who is there."""
    with up(tmp_path, TWO) as file:
        url = status(file)["url"]
        said, first = ask_a_sum(url), parts(file)
        assert said[0] == 200

        stack(tmp_path, TWO.replace("count = 2", "count = 3"))
        assert command("reload", file).returncode == 0
        more = parts(file)
        assert running(file) == ["serve-1", "serve-2", "serve-3"]
        assert all(more[name]["pid"] == each["pid"] for name, each in first.items()), "they go on"
        assert all(more[name]["url"] == each["url"] for name, each in first.items())
        until(lambda: backends(url) == ["serve-1", "serve-2", "serve-3"])

        stack(tmp_path, HEAD + "[[serve]]\n[[serve]]\nmax-num-seqs = 3\n")
        os.kill(status(file)["pid"], signal.SIGHUP)
        until(lambda: status(file).get("reloads") == 2)
        fewer = parts(file)
        assert running(file) == ["serve-1", "serve-2"]
        assert fewer["serve-1"]["pid"] == more["serve-1"]["pid"]
        assert fewer["serve-2"]["pid"] != more["serve-2"]["pid"]
        assert json.loads((tmp_path / "state/serve-2.json").read_text())["max_num_seqs"] == 3
        until(lambda: gone(more["serve-3"]["pid"]))
        assert not (tmp_path / "state/serve-3.json").exists()
        until(lambda: backends(url) == ["serve-1", "serve-2"])
        assert ask_a_sum(url) == said


def told(folder: Path) -> dict[str, Any]:
    """What the stack whose state is there wrote of itself last, whatever its file says."""
    found: dict[str, Any] = json.loads((folder / "state/status.json").read_text())
    return found


def test_a_file_that_is_wrong_changes_nothing_and_says_so(tmp_path: Path) -> None:
    with up(tmp_path, TWO) as file:
        before = {name: each["pid"] for name, each in parts(file).items()}
        wrong = (
            ("[[serve", "cannot be read"),
            ("name = 'other'\n" + TWO, "name: stays while the stack is up"),
            (TWO.replace("500MiB", "100TiB"), "more than this machine has"),
        )
        for number, (text, says) in enumerate(wrong, 1):
            stack(tmp_path, text)
            os.kill(told(tmp_path)["pid"], signal.SIGHUP)
            until(lambda number=number: told(tmp_path).get("reloads") == number)  # type: ignore[misc]
            assert says in told(tmp_path)["reload_error"]
        stack(tmp_path, TWO + "[[serve]]\nmodel = '/nowhere'\n")  # its start alone finds it
        made = command("reload", file)
        assert (made.returncode, made.stderr) == (
            1, "quire: what is new could not start: nothing has changed\n"
        )  # fmt: skip
        stack(tmp_path, TWO.replace("count = 2", "count = 2\nmodel = '/nowhere'"))
        made = command("reload", file)
        assert "serve-1: could not start, and has its old options again" in made.stderr
        now = parts(file)
        assert running(file) == ["serve-1", "serve-2"]
        assert {name for name in before if now[name]["pid"] != before[name]} == {"serve-1"}
        assert ask_a_sum(now["router"]["url"])[0] == 200


def test_servers_come_with_the_first_request_and_go_when_there_is_none(tmp_path: Path) -> None:
    """From nothing to one and back, twice; the first request waits for the server that it starts."""
    with up(tmp_path, HEAD + "[[serve]]\nmin = 0\nmax = 1\ndown = 0.5\nidle = 1\n") as file:
        url = status(file)["url"]
        assert running(file) == []
        for _ in range(2):
            assert ask_a_sum(url)[0] == 200
            until(lambda: running(file) == [])
        log = tmp_path / "state/log"
        until(lambda: log.read_text().count("quire: serving quire-mini at") == 2)
        until(lambda: "servers are needed: serve-1 starts" in log.read_text())


def test_a_stack_ends_while_a_server_starts(tmp_path: Path) -> None:
    with up(tmp_path, HEAD + "[[serve]]\nmin = 0\nmax = 1\n") as file, ThreadPoolExecutor() as clients:
        found = status(file)
        asked = clients.submit(ask_a_sum, found["url"])
        until(lambda: parts(file)["serve-1"]["state"] != "off")
        os.kill(found["pid"], signal.SIGTERM)
        until(lambda: gone(found["pid"]))
        assert asked.exception() is not None or asked.result()[0] >= 200, "it got an end of some kind"
