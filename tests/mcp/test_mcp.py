"""The client of tool servers: what the file allows is called, and no server can stall, flood or fill this process."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helpers.patience import with_patience
from helpers.scripted import Script, scripted_folder
from quire.cli.main import main
from quire.mcp.connect import connect
from quire.mcp.session import MAX_RESULT_CHARS, Cancellation, McpError
from quire.mcp.settings import ServerSettings, read_settings
from quire.mcp.toolbox import Toolbox
from quire.types import CheckpointError, RequestError

from .tool_server import HttpToolServer

SERVER = Path(__file__).with_name("tool_server.py")


def settings_file(folder: Path, rounds: int = 8, **servers: dict[str, Any]) -> str:
    path = folder / "mcp.json"
    path.write_text(json.dumps({"mcpServers": servers, "rounds": rounds}))
    return str(path)


def piped(mode: str = "asks", **more: Any) -> dict[str, Any]:
    return {"command": sys.executable, "args": [str(SERVER), "pipes", mode], "tools": ["add"], **more}


@pytest.fixture(params=["json", "events"])
def web(request: pytest.FixtureRequest) -> Iterator[HttpToolServer]:
    server = HttpToolServer(request.param)
    yield server
    server.close()


def test_a_server_over_pipes(tmp_path: Path) -> None:
    with Toolbox(read_settings(settings_file(tmp_path, calc=piped(tools=["add", "long"])))) as box:
        assert [tool["function"]["name"] for tool in box.tools] == ["add", "long"]
        assert box.tools[0]["function"]["parameters"]["properties"] == {"a": {}, "b": {}}
        found = box.call("add", '{"a": 2, "b": 3}')
        assert (found.text, found.failed) == ("5\n[image left out]", False)
        assert "a is no integer" in box.call("add", '{"a": "x"}').text
        assert box.call("add", "{").failed
        assert len(box.call("long", "{}").text) < MAX_RESULT_CHARS + 100
        assert box.notes == [
            'calc also offers erase, sleep, fail, die, process; "tools" names those that may be called'
        ]


def test_a_server_over_http(tmp_path: Path, web: HttpToolServer) -> None:
    given = {"url": web.url, "tools": ["*"], "headers": {"Authorization": "Bearer k"}}
    with Toolbox(read_settings(settings_file(tmp_path, web=given))) as box:
        assert len(box.tools) == 7
        assert box.call("add", '{"a": 2, "b": 3}').text.startswith("5")
    methods = [method for method, _ in web.seen]
    assert methods == [
        "initialize", "notifications/initialized", "tools/list", "tools/list", "tools/list", "tools/call",
        "DELETE",
    ]  # fmt: skip
    assert all(headers["Authorization"] == "Bearer k" for _, headers in web.seen)
    assert all(headers["Mcp-Session-Id"] == "session-1" for _, headers in web.seen[1:])
    assert all("MCP-Protocol-Version" in headers for _, headers in web.seen[1:])


def test_only_what_the_file_allows_is_called(tmp_path: Path, web: HttpToolServer) -> None:
    with Toolbox(read_settings(settings_file(tmp_path, web={"url": web.url, "tools": ["add"]}))) as box:
        assert box.call("erase", "{}").text == "there is no tool 'erase'"
        assert "tools/call" not in [method for method, _ in web.seen]
    with Toolbox(read_settings(settings_file(tmp_path, web={"url": web.url}))) as box:
        assert not box.tools  # no list: none
    with pytest.raises(McpError, match="has no tool missing"):
        Toolbox(read_settings(settings_file(tmp_path, web={"url": web.url, "tools": ["missing"]})))
    both = {"a": {"url": web.url, "tools": ["add"]}, "b": {"url": web.url, "tools": ["add"]}}
    with pytest.raises(McpError, match="two MCP servers"):
        Toolbox(read_settings(settings_file(tmp_path, **both)))


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("silent", "did not answer initialize within 0.5 s"),
        ("noise", "sent a message that is not a JSON object"),
        ("flood", "messages in place of an answer"),
        ("huge", "a message of more than"),
        ("schemas", "lists tools with more than 20000 values"),
        ("ends", "has ended"),
        ("old", "speaks version '1999-01-01'"),
    ],
)
def test_servers_that_misbehave(tmp_path: Path, mode: str, text: str) -> None:
    timeout = 0.5 if mode == "silent" else 30.0
    with pytest.raises(McpError, match=text):
        Toolbox(read_settings(settings_file(tmp_path, bad=piped(mode, timeout=timeout))))


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("huge", "more than"),
        ("refuses", "HTTP status 403"),
        ("deaf", "did not take notifications/initialized within {:g} s"),
    ],
)
def test_http_servers_that_misbehave(tmp_path: Path, mode: str, text: str) -> None:
    server = HttpToolServer(mode)

    def check(seconds: float) -> None:
        given = {"url": server.url, "tools": ["*"], "timeout": seconds if mode == "deaf" else 30.0}
        with pytest.raises(McpError, match=text.format(seconds)):
            Toolbox(read_settings(settings_file(tmp_path, bad=given)))

    try:
        with_patience(check, 0.3, 3.0, 30.0)
    finally:
        server.close()


def test_a_slow_call_ends_and_the_session_goes_on(tmp_path: Path) -> None:
    def over_pipes(seconds: float) -> None:
        slow = piped(tools=["sleep", "add"], timeout=seconds)
        with Toolbox(read_settings(settings_file(tmp_path, slow=slow))) as box:
            late = json.dumps({"seconds": 1.6 * seconds})
            assert f"within {seconds:g} s" in box.call("sleep", late).text
            time.sleep(seconds)
            assert box.call("add", '{"a": 1, "b": 1}').text.startswith("2")  # not the late answer

    def over_http(seconds: float) -> None:
        given = {"url": server.url, "tools": ["add"], "timeout": seconds}
        with Toolbox(read_settings(settings_file(tmp_path, slow=given))) as box:
            assert f"within {seconds:g} s" in box.call("add", '{"a": 1, "b": 1}').text

    with_patience(over_pipes, 0.5, 4.0, 30.0)
    server = HttpToolServer("slow")
    try:
        with_patience(over_http, 0.5, 4.0, 30.0)
    finally:
        server.close()


@pytest.mark.parametrize("over_http", [False, True])
def test_another_thread_ends_a_call(over_http: bool) -> None:
    web = HttpToolServer("slow") if over_http else None
    if web is not None:
        settings = ServerSettings(name="s", url=web.url, timeout=1000)
    else:
        command = (sys.executable, str(SERVER), "pipes", "asks")
        settings = ServerSettings(name="s", command=command, timeout=1000)
    session, stop, ended = connect(settings, 2**20), Cancellation(), threading.Event()

    def run() -> None:
        with pytest.raises(McpError):
            session.call("sleep", {"seconds": 1000, "a": 1}, stop)
        ended.set()

    session.open("1")
    threading.Thread(target=run, daemon=True).start()
    time.sleep(0.2)
    stop.cancel()
    assert ended.wait(200)
    session.close()
    if web is not None:
        web.close()


def test_threads_share_a_session(tmp_path: Path) -> None:
    """Each gets its own answer, whatever else the server sends; one that dies ends all of them."""
    with Toolbox(read_settings(settings_file(tmp_path, calc=piped(tools=["add", "die"])))) as box:
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda n: box.call("add", json.dumps({"a": n, "b": 0})).text, range(200)))
            assert [text.split()[0] for text in made] == [str(n) for n in range(200)]
            failed = list(pool.map(lambda name: box.call(name, '{"a": 1, "b": 1}'), ["die", "add", "add"]))
        assert failed[0].failed
        assert "has ended" in box.call("add", '{"a": 1, "b": 1}').text


def test_servers_end_with_the_toolbox(tmp_path: Path) -> None:
    with Toolbox(read_settings(settings_file(tmp_path, calc=piped()))) as box:
        pid = box._sessions[0]._transport._process.pid  # type: ignore[attr-defined]
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_keys_of_this_process_stay_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "s")
    command = f"import os; open({str(tmp_path / 'env')!r}, 'w').write(repr(dict(os.environ)))"
    given = {"command": sys.executable, "args": ["-c", command], "env": {"GIVEN": "g"}}
    with pytest.raises(McpError):
        Toolbox(read_settings(settings_file(tmp_path, env=given)))
    with pytest.raises(McpError, match="did not start: illegal environment variable name"):
        Toolbox(read_settings(settings_file(tmp_path, env={"command": "x", "env": {"A=B": "c"}})))
    seen = (tmp_path / "env").read_text()
    assert "GIVEN" in seen
    assert "SECRET_KEY" not in seen


@pytest.mark.parametrize(
    ("found", "field"),
    [
        ({}, "mcpServers"),
        ({"mcpServers": {}}, "mcpServers"),
        ({"mcpServers": {"a": 1}}, "mcpServers.a"),
        ({"mcpServers": {"a": {}}}, "mcpServers.a"),
        ({"mcpServers": {"a": {"command": "x", "url": "http://x"}}}, "mcpServers.a"),
        ({"mcpServers": {"a": {"command": ["x"]}}}, "mcpServers.a.command"),
        ({"mcpServers": {"a": {"url": "file:///x"}}}, "mcpServers.a.url"),
        ({"mcpServers": {"a": {"url": "http://x:99999/"}}}, "mcpServers.a.url"),
        ({"mcpServers": {"a": {"url": "http://[x/"}}}, "mcpServers.a.url"),
        ({"mcpServers": {"a": {"url": "http://x", "headers": {"A": "1\r\nB: 2"}}}}, "mcpServers.a.headers"),
        ({"mcpServers": {"a": {"command": "x", "timeout": 0}}}, "mcpServers.a.timeout"),
        ({"mcpServers": {"a": {"command": "x", "tool": ["y"]}}}, "mcpServers.a.tool"),
        ({"mcpServers": {"a": {"command": "x", "tools": "y"}}}, "mcpServers.a.tools"),
        ({"mcpServers": {"a": {"command": "x"}}, "rounds": 0}, "rounds"),
        ({"mcpServers": {"a": {"command": "x"}}, "calls": 1000}, "calls"),
        ({"mcpServers": {"a": {"command": "x"}}, "message_bytes": "1"}, "message_bytes"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, found: object, field: str) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps(found))
    with pytest.raises(RequestError) as error:
        read_settings(str(path))
    assert error.value.field == field
    with pytest.raises(CheckpointError):
        read_settings(str(tmp_path / "missing.json"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scripted_folder(tmp_path_factory.mktemp("scripted") / "model")


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def test_a_chat_with_a_tool_server(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A question, a call, its result from the server, and the answer; then a model that never stops calling."""
    script = Script(folder)
    script.says("2 and 3", CALL)
    script.says("[tool] 5", "It is 5.")
    script.says("for ever", CALL)
    path = settings_file(tmp_path, rounds=2, calc=piped())
    command = ["chat", str(folder), "--mcp", path, "--no-history", "--max-tokens", "200"]
    with script.played():
        monkeypatch.setattr("sys.stdin", io.StringIO("2 and 3?\n"))
        assert main(command) == 0
        out, err = capsys.readouterr()
        assert "It is 5." in out
        assert '→ add({"a": 2, "b": 3})' in err
        assert "← 5" in err
        del script._texts["[tool] 5"]
        monkeypatch.setattr("sys.stdin", io.StringIO("for ever\n"))
        assert main(command) == 0
        assert "2 rounds of calls without an answer" in capsys.readouterr().err


def test_results_typed_in(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(folder)
    script.says("2 and 3", CALL)
    script.says("[tool] five", "It is five.")
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([{"name": "add", "parameters": {"type": "object"}}]))
    monkeypatch.setattr("sys.stdin", io.StringIO("2 and 3?\nfive\n"))
    with script.played():
        assert main(["chat", str(folder), "--tools", str(tools), "--no-history", "--max-tokens", "200"]) == 0
    out, err = capsys.readouterr()
    assert "It is five." in out
    assert "→ add(" in err
    tools.write_text("{}")
    assert main(["chat", str(folder), "--tools", str(tools)]) != 0
