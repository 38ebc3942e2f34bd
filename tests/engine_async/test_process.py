"""The engine process: what happens when it dies, hangs, or is left alone."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_async.running import GUARD, ON_AND_ON, ask, collect, run, running, until
from helpers.patience import with_patience
from quire.config.schema import EngineConfig
from quire.config.serving import ServingConfig
from quire.engine.api import EngineState, EngineUnavailableError, GenerateAsk
from quire.engine.front.async_engine import AsyncEngine
from quire.engine.host.hosts import ProcessHost
from quire.engine.host.messages import AddRequest, FrameReader, Load, Stats, Vocabulary, frame, report_decoder
from quire.engine.request_forms import constrained
from quire.structured.ask import StructuredOutput
from quire.types import Grammar, Request, SamplingParams, TokenIds

SHORT = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def signal_engine(engine: AsyncEngine, number: int) -> None:
    assert engine.pid is not None
    os.kill(engine.pid, number)


def gone(pid: int) -> bool:
    """No such process, or only what its parent has not collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_grammars_outlive_the_engine(tiny: Path) -> None:
    """An engine that was started again enforces grammars too, those that are known and new ones."""

    async def work() -> None:
        async with running(tiny, in_process=False) as engine:

            async def text(name: str, regex: str) -> str:
                made = await engine.compile(StructuredOutput(regex=regex))
                asked = ask(name, params=SamplingParams(seed=3, max_tokens=30))
                asked = replace(asked, request=constrained(asked.request, made.grammar))
                return (await collect(engine.generate(asked)))[0][0]

            before = await text("before", "[a-c]{3}")
            assert re.fullmatch("[a-c]{3}", before)
            signal_engine(engine, signal.SIGKILL)
            await until(lambda: engine.stats.restarts == 1 and engine.state is EngineState.READY)
            assert await text("after", "[a-c]{3}") == before
            assert re.fullmatch("[x-z]{2}", await text("new", "[x-z]{2}"))

    run(work())


def test_a_killed_engine_ends_its_streams_and_is_started_again(
    endless: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A vocabulary that the engine was given is given to the next one too, once to each; grammars hold in both."""
    one = Grammar('start: "[" ("1" | "2") ", end]"', bytes(32))

    def limited(name: str) -> GenerateAsk:
        plain = ask(name, params=SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        return replace(plain, request=replace(plain.request, grammar=one, stepwise=True))

    async def work() -> None:
        async with running(endless, in_process=False) as engine:
            text = (await collect(engine.generate(ask("before", params=SHORT))))[0]
            client = engine._client
            assert client is not None
            sent, send = list[Any](), client.send
            client.send = lambda command: (sent.append(command), send(command))[1]  # type: ignore[method-assign]
            await asyncio.gather(engine.share_vocabulary(), engine.share_vocabulary())
            await engine.share_vocabulary()
            (shared,) = sent
            assert shared.tokens[65] == engine.token_bytes(65)
            assert len(shared.tokens) == engine.card.vocab_size
            ((answer,), _) = await collect(engine.generate(limited("limited")))
            assert answer in {"[1, end]", "[2, end]"}
            streams = [engine.generate(ask(f"r{i}")) for i in range(4)]
            await anext(aiter(streams[0]))
            first = engine.pid
            signal_engine(engine, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(EngineUnavailableError, match="ended unexpectedly"):
                    await collect(stream)
            assert engine.state is EngineState.RESTARTING
            with pytest.raises(EngineUnavailableError, match="is restarting") as refused:
                engine.generate(ask("too early"))
            assert refused.value.retry_after > 0
            await until(lambda: engine.state is EngineState.READY)
            assert engine.pid not in {None, first}
            assert (await collect(engine.generate(ask("after", params=SHORT))))[0] == text
            assert (await collect(engine.generate(limited("again"))))[0] == [answer]
            assert [one for one in sent if isinstance(one, Vocabulary)] == [shared, Vocabulary(shared.tokens)]
        assert "killed by SIGKILL" in caplog.text

    run(work())


def test_an_engine_that_keeps_dying_is_given_up(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights vanish, so that every start fails. The cause is logged each time."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())

    async def work() -> None:
        async with running(folder, in_process=False, serving=ServingConfig(engine_restarts=2)) as engine:
            (folder / "model.safetensors").unlink()
            signal_engine(engine, signal.SIGKILL)
            await until(lambda: engine.state is EngineState.FAILED)
            with pytest.raises(EngineUnavailableError, match="could not be restarted"):
                engine.generate(ask("r"))
        assert caplog.text.count("could not be restarted") == 2
        assert "giving up" in caplog.text

    run(work())


def test_a_crash_is_logged_with_its_last_words(endless: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with running(endless, in_process=False) as engine:
            await anext(aiter(stream := engine.generate(ask("r"))))
            signal_engine(engine, signal.SIGSEGV)
            with pytest.raises(EngineUnavailableError):
                await collect(stream)
            await until(lambda: engine.state is EngineState.READY)
        assert "SIGSEGV" in caplog.text
        assert "Fatal Python error" in caplog.text

    run(work())


@pytest.mark.parametrize("busy", [True, False])
def test_a_stopped_engine_is_seen_and_so_is_its_return(endless: Path, busy: bool) -> None:
    async def work(seconds: float) -> None:
        async with running(endless, in_process=False, serving=ServingConfig(stall_timeout=seconds)) as engine:
            stream = None
            if busy:
                await anext(aiter(stream := engine.generate(ask("r"))))
            signal_engine(engine, signal.SIGSTOP)
            try:
                assert engine.state is EngineState.READY  # it is judged by its silence
                await until(lambda: engine.state is EngineState.STALLED)
                assert not await engine.ping(0.05)
                with pytest.raises(EngineUnavailableError, match="stopped responding"):
                    engine.generate(ask("new"))
            finally:
                signal_engine(engine, signal.SIGCONT)
            await until(lambda: engine.state is EngineState.READY)
            if stream is not None:
                await anext(aiter(stream))  # it goes on
            assert await engine.ping(GUARD)

    with_patience(lambda seconds: run(work(seconds)), 0.6, 5.0, 30.0)


def test_an_engine_that_hangs_for_good_is_replaced(endless: Path) -> None:
    async def work(seconds: float) -> None:
        serving = ServingConfig(stall_timeout=seconds, hang_timeout=seconds / 2)
        async with running(endless, in_process=False, serving=serving) as engine:
            first = engine.pid
            await anext(aiter(stream := engine.generate(ask("r"))))
            signal_engine(engine, signal.SIGSTOP)
            with pytest.raises(EngineUnavailableError):
                await collect(stream)
            await until(lambda: engine.state is EngineState.READY)
            assert engine.pid != first
            await collect(engine.generate(ask("r", params=SHORT)))

    with_patience(lambda seconds: run(work(seconds)), 0.6, 5.0, 30.0)


def test_interrupts_are_the_parent_s_business(endless: Path) -> None:
    async def work() -> None:
        async with running(endless, in_process=False) as engine:
            pid = engine.pid
            assert pid is not None
            assert os.getpgid(pid) == pid  # also before it can ignore anything
            stream = engine.generate(ask("r", params=SHORT))
            for number in (signal.SIGINT, signal.SIGTERM):
                signal_engine(engine, number)
            await collect(stream)
            assert (engine.pid, engine.state) == (pid, EngineState.READY)
        assert gone(pid)  # a Stop command ends it

    run(work())


def test_stopping_a_stopped_engine_ends_it(endless: Path) -> None:
    async def work() -> None:
        async with running(endless, in_process=False) as engine:
            pid = engine.pid
            assert pid is not None
            signal_engine(engine, signal.SIGSTOP)
            await engine.stop(0)
            assert gone(pid)

    run(work())


PARENT = """
    import asyncio, os, signal, sys
    from engine_async.running import ask, running
    from pathlib import Path
    async def main():
        async with running(Path(sys.argv[1]), in_process=False) as engine:
            if sys.argv[2] == "busy":
                await anext(aiter(engine.generate(ask("r"))))
            print(engine.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["busy", "idle"])
def test_a_killed_parent_leaves_no_orphan(endless: Path, how: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PARENT), str(endless), how]
    path = os.pathsep.join(filter(None, sys.path))
    parent = subprocess.run(
        command, stdout=subprocess.PIPE, timeout=GUARD, env=os.environ | {"PYTHONPATH": path}, check=False
    )
    assert parent.returncode == -signal.SIGKILL
    pid = int(parent.stdout)

    async def work() -> None:
        await until(lambda: gone(pid))

    run(work())


@pytest.mark.parametrize("busy", [True, False])
def test_a_closed_socket_ends_the_engine(endless: Path, busy: bool) -> None:
    """What ends it where the kernel does not tie it to its parent."""

    async def work() -> None:
        host = ProcessHost()
        sock = await host.start()
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        config = EngineConfig(load_format="random", num_kv_blocks=8192, threads=1)
        await loop.sock_sendall(sock, frame(Load(str(endless), config)))
        reader, decode = FrameReader(), report_decoder().decode
        seen: set[type] = set()
        while Stats not in seen:  # all that it says when idle: unread bytes would reset the connection
            seen |= {type(decode(body)) for body in reader.feed(await loop.sock_recv(sock, 2**16))}
        if busy:
            await loop.sock_sendall(
                sock,
                frame(
                    AddRequest(1, Request(request_id="r", prompt_token_ids=TokenIds([5]), params=ON_AND_ON))
                ),
            )
            await loop.sock_recv(sock, 1)
        sock.close()
        assert await host.ended() == "exit status 0"

    run(work())
