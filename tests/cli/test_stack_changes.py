"""A stack that changes while it is up: its file is read again, and servers come and go with the load."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.process import gone, until
from helpers.server import GUARD
from helpers.stacks import command, pids, stack, status, told, up
from helpers.sums import ask_a_sum
from quire.cli.stack_parts import parts_of
from quire.cli.stack_scaling import StackScaling
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
ONE = HEAD + "[[serve]]\n"
TWO = ONE + "count = 2\n"


def parts(file: Path) -> dict[str, dict[str, Any]]:
    """The parts of a stack, by name."""
    return {each["name"]: each for each in told(file.parent)["parts"]}


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


def test_free_ports_stay_free_until_they_are_held(tmp_path: Path) -> None:
    config = read_stack(stack(tmp_path, TWO))
    assert {each.name: each.port for each in parts_of(config, {"serve-2": 9001})} == {
        "serve-1": 0, "serve-2": 9001, "router": 0,
    }  # fmt: skip


def test_a_load_is_that_of_a_table_not_of_its_number(tmp_path: Path) -> None:
    """With one taken out, the next one has its number, and not what was learned of it."""
    one, two = "[[serve]]\nmax = 1\nmodel = 'a'\n", "[[serve]]\nmax = 1\nmodel = 'b'\n"
    before = read_stack(stack(tmp_path, one + two)).scales
    after = read_stack(stack(tmp_path, two)).scales
    assert [each.where for each in after] == ["serve 1"]
    assert after[0].table not in {each.table for each in before}
    assert read_stack(stack(tmp_path, one)).scales[0] == before[0]


def test_a_table_that_the_router_does_not_know_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That nothing is said of its load is not that there is none."""
    config = read_stack(stack(tmp_path, "[[serve]]\nmodel = 'a'\nmin = 0\nmax = 1\ncount = 1\nidle = 0.1\n"))
    table = config.scales[0].table
    answers: list[dict[str, float]] = [{}, {}, {"another": 0.0}, {table: 1.0}, {table: 0.0}]
    left: list[str] = []

    async def asked(_: str, path: str) -> tuple[int, bytes]:
        assert path == "/health"
        if len(answers) > 1:
            assert not left
        return 200, json.dumps({"needed": answers.pop(0) if len(answers) > 1 else answers[0]}).encode()

    async def follow() -> None:
        life = SimpleNamespace(
            config=config, parts={"router": SimpleNamespace(url="")}, turn=asyncio.Lock(), told={}, leaving=(),
            made={"serve-1": SimpleNamespace(state="up")}, say=lambda *_: None, leave=left.append,
        )  # fmt: skip
        running = asyncio.create_task(StackScaling(life).run())  # type: ignore[arg-type]
        while not left and not running.done():
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    monkeypatch.setattr("quire.cli.stack_scaling.asked", asked)
    monkeypatch.setattr("quire.cli.stack_scaling._LOOK", 0.05)
    asyncio.run(follow())
    assert left[:1] == ["serve-1"], "now it is known that it has nothing to do"


def nothing_changes(file: Path) -> None:
    """Of a stack of one server, if its file is wrong; and it says so."""
    before = {name: each["pid"] for name, each in parts(file).items()}
    wrong = (
        ("[[serve", "cannot be read"),
        ("name = 'other'\n" + ONE, "name: stays while the stack is up"),
        (ONE.replace("500MiB", "100TiB"), "more than this machine has"),
    )
    for number, (text, says) in enumerate(wrong, told(file.parent).get("reloads", 0) + 1):
        stack(file.parent, text)
        os.kill(told(file.parent)["pid"], signal.SIGHUP)
        until(lambda number=number: told(file.parent).get("reloads") == number)  # type: ignore[misc]
        assert says in told(file.parent)["reload_error"]
    stack(file.parent, ONE + "[[serve]]\nmodel = '/nowhere'\n")  # its start alone finds it
    made = command("reload", file)
    assert (made.returncode, made.stderr) == (1, "quire: what is new could not start: nothing has changed\n")
    assert before == {name: each["pid"] for name, each in parts(file).items()}


@pytest.mark.chaos
def test_a_server_that_cannot_start_with_other_options_has_its_old_ones_again(tmp_path: Path) -> None:
    with up(tmp_path, TWO) as file:
        before = {name: each["pid"] for name, each in parts(file).items()}
        stack(tmp_path, TWO.replace("count = 2", "count = 2\nmodel = '/nowhere'"))
        made = command("reload", file)
        assert "serve-1: could not start, and has its old options again" in made.stderr
        now = parts(file)
        assert running(file) == ["serve-1", "serve-2"]
        assert {name for name in before if now[name]["pid"] != before[name]} == {"serve-1"}


NONE = HEAD + "[[serve]]\nmin = 0\nmax = 1\n"


def comes_with_a_request(file: Path) -> tuple[int, str]:
    """To a stack without servers, which waits for the one that it starts; the answer. Then that one is in the file."""
    assert running(file) == []
    said = ask_a_sum(told(file.parent)["url"])
    assert said[0] == 200
    until(lambda: running(file) == ["serve-1"])  # the stack may see it after the router
    assert "servers are needed: serve-1 starts" in (file.parent / "state/log").read_text()
    before = {name: each["pid"] for name, each in parts(file).items()}
    stack(file.parent, ONE)
    assert command("reload", file).returncode == 0
    assert before == {name: each["pid"] for name, each in parts(file).items()}
    return said


def ends_with_its_process(file: Path) -> None:
    """All parts end with the process that has started them."""
    found = status(file)
    processes = [found["pid"], *pids(found)]
    assert len(processes) > 3
    os.kill(found["pid"], signal.SIGKILL)
    until(lambda: all(map(gone, processes)))
    assert status(file) == {"name": "some", "up": False, "parts": []}


def test_a_file_that_is_read_again_changes_what_has_changed(tmp_path: Path) -> None:
    """More servers, others, fewer: what is not concerned goes on, and the router knows who is there. A file that is
    wrong changes nothing."""
    with up(tmp_path, NONE) as file:
        said = comes_with_a_request(file)
        nothing_changes(file)
        url, first = told(tmp_path)["url"], parts(file)

        def serves(*names: str) -> None:
            """These do, and the first one and the router as before."""
            assert running(file) == [*names]
            now = parts(file)
            assert all(now[name]["pid"] == each["pid"] for name, each in first.items()), "they go on"
            assert all(now[name]["url"] == each["url"] for name, each in first.items())
            until(lambda: backends(url) == [*names])

        stack(tmp_path, TWO)
        assert command("reload", file).returncode == 0
        serves("serve-1", "serve-2")
        before, reloads = parts(file)["serve-2"], told(tmp_path)["reloads"]

        stack(tmp_path, ONE + "[[serve]]\nmax-num-seqs = 3\n")
        os.kill(told(tmp_path)["pid"], signal.SIGHUP)
        until(lambda: told(tmp_path).get("reloads") == reloads + 1)
        other = parts(file)["serve-2"]
        assert other["pid"] != before["pid"]
        assert other["url"] == before["url"]
        assert json.loads((tmp_path / "state/serve-2.json").read_text())["max_num_seqs"] == 3
        serves("serve-1", "serve-2")

        stack(tmp_path, ONE)
        os.kill(told(tmp_path)["pid"], signal.SIGHUP)
        until(lambda: told(tmp_path).get("reloads") == reloads + 2)
        until(lambda: gone(other["pid"]))
        assert not (tmp_path / "state/serve-2.json").exists()
        serves("serve-1")
        assert ask_a_sum(url) == said
        ends_with_its_process(file)


@pytest.mark.chaos
def test_servers_come_with_the_first_request_and_go_when_there_is_none(tmp_path: Path) -> None:
    """From nothing to one and back, twice; the first request waits for the server that it starts."""
    with up(tmp_path, NONE + "down = 0.5\nidle = 1\n") as file:
        url = told(tmp_path)["url"]
        assert running(file) == []
        for _ in range(2):
            assert ask_a_sum(url)[0] == 200
            until(lambda: running(file) == ["serve-1"])
            until(lambda: running(file) == [])
        log = tmp_path / "state/log"
        until(lambda: log.read_text().count("quire: serving quire-mini at") == 2)
        until(lambda: "servers are needed: serve-1 starts" in log.read_text())


@pytest.mark.chaos
def test_each_table_follows_its_own_load(tmp_path: Path) -> None:
    """Two models of which one is asked: its server comes, the other one's does not once it is known whose it is."""
    tables = "[[serve]]\nmin = 0\nmax = 1\ndown = 0.5\nidle = 1\n", "served-model-name = 'other'\n"
    with up(tmp_path, HEAD + tables[0] + tables[0] + tables[1]) as file:
        url = told(tmp_path)["url"]
        assert ask_a_sum(url)[0] == 200
        until(lambda: len(running(file)) > 0)
        until(lambda: running(file) == [])
        before = {name: each["restarts"] for name, each in parts(file).items()}
        seen: set[str] = set()

        def some() -> bool:
            seen.update(name for name, each in parts(file).items() if each["kind"] == "serve" and each["pid"])
            return asked.done()

        with ThreadPoolExecutor() as clients:
            asked = clients.submit(ask_a_sum, url, "other")
            until(some)
        assert asked.result()[0] == 200
        assert seen == {"serve-2"}
        assert before == {name: each["restarts"] for name, each in parts(file).items()}
        assert [each["table"] for each in told(tmp_path)["scales"]] == ["serve 1", "serve 2"]


ROOMS = " ".join(f"Room {n} is painted in colour {n * 7 % 12}." for n in range(80))
DIVIDED = (
    HEAD.replace("[router]\n", "[router]\nprefill-over = 100\nlevel-seconds = 0.05\nstart-seconds = 1\n")
    + """
[kv-server]
size = "64MiB"
[[serve]]
role = "decode"
[[serve]]
role = "prefill"
min = 1
max = 2
down = 1
"""
)


@pytest.mark.chaos
def test_servers_that_compute_prompts_follow_a_real_load(tmp_path: Path) -> None:
    """Long prompts beside running streams: a second one comes, no text changes, and it goes when all is quiet."""

    def ask(number: int) -> str:
        message = {"role": "user", "content": f"{number}. {ROOMS}"}
        body = {
            "messages": [message],
            "max_tokens": 24,
            "seed": number,
            "temperature": 0.8,
            "ignore_eos": True,
        }
        head = {"content-type": "application/json"}
        asked = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), head)
        with urllib.request.urlopen(asked, timeout=GUARD) as answer:
            return str(json.loads(answer.read())["choices"][0]["message"]["content"])

    def divided() -> float:
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        (found,) = [line for line in lines if line.startswith("quire_router_divided_requests_total ")]
        return float(found.rpartition(" ")[2])

    with up(tmp_path, DIVIDED) as file:
        url, numbers, quiet = told(tmp_path)["url"], itertools.count(), threading.Event()
        until(lambda: backends(url) == ["decode-1", "prefill-1"])
        texts: dict[int, str] = {}

        def load() -> None:
            while not quiet.is_set():
                number = next(numbers)
                texts[number] = ask(number)

        with ThreadPoolExecutor(8) as clients:
            loads = [clients.submit(load) for _ in range(8)]
            try:
                until(lambda: "prefill-2" in running(file) or any(each.done() for each in loads))
                until(lambda: "prefill-2" in backends(url))
                before = divided()
                until(lambda: divided() > before + 4 or any(each.done() for each in loads))
            finally:
                quiet.set()
            for each in loads:
                each.result()
        until(lambda: running(file) == ["decode-1", "prefill-1"])
        log = (tmp_path / "state/log").read_text()
        assert "prefill-2 starts" in log
        assert "prefill-2 ends" in log
        for number in (0, len(texts) // 2, len(texts) - 1):
            assert ask(number) == texts[number]


@pytest.mark.chaos
def test_a_server_that_hangs_is_started_again(tmp_path: Path) -> None:
    """It takes connections and answers none: it is ended from outside. One that answers goes on."""
    with up(tmp_path, "hung-seconds = 10\n" + TWO) as file:
        before = parts(file)
        os.kill(before["serve-1"]["pid"], signal.SIGSTOP)
        until(lambda: parts(file)["serve-1"]["restarts"] == 1 and len(running(file)) == 2)
        now = parts(file)
        assert "gave no answer for" in now["serve-1"]["why"]
        assert gone(before["serve-1"]["pid"])
        assert {name: now[name]["pid"] for name in ("serve-2", "router")} == {
            name: before[name]["pid"] for name in ("serve-2", "router")
        }
        assert ask_a_sum(now["router"]["url"])[0] == 200


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_router_that_is_lost_is_started_again(tmp_path: Path, number: signal.Signals) -> None:
    """At its address, with the servers that there are: none of them is concerned, and the answers are the same."""
    with up(tmp_path, "hung-seconds = 5\n" + TWO) as file:
        before = parts(file)
        url = before["router"]["url"]
        said = ask_a_sum(url)
        assert said[0] == 200
        os.kill(before["router"]["pid"], number)
        until(lambda: parts(file)["router"]["restarts"] == 1 and parts(file)["router"]["state"] == "up")
        assert parts(file)["router"]["url"] == url
        until(lambda: backends(url) == ["serve-1", "serve-2"])
        assert ask_a_sum(url) == said
        assert {name: each["pid"] for name, each in parts(file).items() if name != "router"} == {
            name: each["pid"] for name, each in before.items() if name != "router"
        }


def test_a_stack_ends_while_a_server_starts(tmp_path: Path) -> None:
    with up(tmp_path, NONE) as file, ThreadPoolExecutor() as clients:
        found = told(tmp_path)
        asked = clients.submit(ask_a_sum, found["url"])
        until(lambda: parts(file)["serve-1"]["state"] != "off")
        os.kill(found["pid"], signal.SIGTERM)
        until(lambda: gone(found["pid"]))
        assert asked.result()[0] in {200, 503}, "it was told, unless the server came first"
