"""The record of a start-up: what it must name, on one axis of time."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.folders import llama_folder
from helpers.memory import memory_for
from quire import LLM
from quire.cli.main import main
from quire.config.schema import EngineConfig
from quire.engine.api import GenerateAsk
from quire.engine.front.async_engine import AsyncEngine
from quire.engine.host.spawn import Spawned
from quire.types import CheckpointError, Request, SamplingParams, TokenIds
from quire.util.beside import beside
from quire.util.progress import ByteProgress
from quire.util.startup_spans import Span, Startup, process_start

PHASES = ["interpreter", "imports", "config", "plan", "weights", "bind", "ready", "first token"]


def test_generate_reports_where_its_start_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = llama_folder(tmp_path / "model")
    assert main(["generate", str(folder), "--prompt-token-ids", "5,6", "--max-tokens", "2", "--json"]) == 0
    spans = json.loads(capsys.readouterr().out)["startup"]
    assert {span["process"] for span in spans} == {"main"}
    by_name = {span["phase"]: span for span in spans}
    assert set(PHASES) <= set(by_name)
    ends = [by_name[name]["end"] for name in PHASES]
    assert ends == sorted(ends)
    assert all(0 <= span["begin"] <= span["end"] for span in spans)
    assert by_name["interpreter"]["begin"] == 0


def test_process_start_is_before_the_interpreter_and_after_the_parent() -> None:
    code = (
        "import time; from quire.util.startup_spans import process_start as p; print(p(), time.monotonic())"
    )
    before = time.monotonic()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    start, inside = map(float, out.split())
    assert before - 0.02 <= start < inside <= time.monotonic()  # a clock tick, and rounding
    assert process_start() < before


def test_spans_of_two_processes_share_an_axis() -> None:
    startup = Startup()
    with startup.span("tokenizer"):
        now = time.monotonic()
    startup.add([Span("engine", "weights", now, now + 5)])
    startup.mark("ready")
    startup.mark("ready")
    report = startup.report()
    assert [span["phase"] for span in report].count("ready") == 1
    weights = next(span for span in report if span["process"] == "engine")
    assert weights["end"] - weights["begin"] == pytest.approx(5)
    tokenizer = next(span for span in report if span["phase"] == "tokenizer")
    assert tokenizer["begin"] <= weights["begin"] <= tokenizer["end"]


def test_the_engine_process_leaves_text_and_http_to_its_parent() -> None:
    code = "import quire.engine.host.process, sys; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert {"numpy", "quire._native"} <= set(out.split())
    assert not {"tokenizers", "jinja2", "huggingface_hub", "uvicorn", "asyncio", "torch"} & set(out.split())


def test_generating_needs_no_templates_and_no_hub() -> None:
    code = "import quire.cli.generate, quire.llm, sys; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"jinja2", "huggingface_hub", "uvicorn", "asyncio", "torch"} & set(out.split())


def test_an_engine_spawned_early_is_the_one_that_serves(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "model")
    spawned = Spawned()

    async def work() -> list[dict[str, Any]]:
        config = EngineConfig(memory=memory_for(2**30), threads=1, max_model_len=64, num_kv_blocks=64)
        engine = AsyncEngine(folder, config, spawned=spawned)
        async with asyncio.timeout(300):
            await engine.start()
            assert engine.pid == spawned.process.pid
            params = SamplingParams(max_tokens=2)
            request = Request(request_id="1", prompt_token_ids=TokenIds([5, 6]), params=params)
            async for _ in engine.generate(GenerateAsk(request=request)):
                pass
            await engine.stop(0)
        return engine.startup

    spans = asyncio.run(work())
    spawned.close()  # it was taken: nothing is left to do
    found = {(span["process"], span["phase"]): span for span in spans}
    assert {("engine", "weights"), ("engine", "ready"), ("main", "ready"), ("main", "first token")} <= set(
        found
    )
    assert found["engine", "ready"]["end"] <= found["main", "ready"]["end"]


def test_a_spawned_engine_that_is_not_taken_is_ended() -> None:
    spawned = Spawned()
    spawned.close()
    assert spawned.process.returncode is not None
    assert spawned.socket.fileno() == -1


def test_the_bar_of_saving_follows_the_bar_of_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with ByteProgress("loading weights", "saving packed weights") as bar:
        for done, total in ((50, 100), (100, 100), (20, 80), (80, 80)):
            bar(done, total)
    shown = terminal.getvalue()
    assert shown.index("loading weights") < shown.index("saving packed weights")
    assert "/100 " in shown
    assert "/80.0 " in shown


def test_beside_runs_both_calls_and_raises_failures() -> None:
    order: list[str] = []
    released = threading.Event()

    def native() -> int:
        assert released.wait(60)  # only ends when the other runs
        order.append("native")
        return 7

    def other() -> None:
        order.append("other")
        released.set()

    assert beside(native, other) == 7
    assert order == ["other", "native"]

    def fails() -> int:
        raise MemoryError("native")

    def refuses() -> None:
        raise CheckpointError("other")

    with pytest.raises(MemoryError):
        beside(fails, other)
    with pytest.raises(CheckpointError):
        beside(lambda: 1, refuses)
    with pytest.raises(CheckpointError):
        beside(fails, refuses)


@pytest.mark.parametrize("cache", ["on", "off"])
def test_a_tokenizer_that_does_not_fit_is_refused_packed_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    from helpers.tokenizers import write_byte_tokenizer  # brings torch, which nothing else here needs

    monkeypatch.setattr("quire.engine.build.load_weights.SMALLEST", 0)
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    folder = llama_folder(tmp_path / "model", vocab_size=128)
    write_byte_tokenizer(folder)
    for _ in range(2):
        with LLM(folder, progress=False, max_model_len=64, threads=1, weight_cache=cache) as llm:
            assert llm.generate("Hi", SamplingParams(max_tokens=1))[0].prompt_token_ids
        finish_saving()
    assert llm.built.weights.source == ("packed" if cache == "on" else "checkpoint")
    data = json.loads((folder / "tokenizer.json").read_text())
    data["model"]["vocab"]["zz"] = 500
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="ids up to 500"):
        LLM(folder, progress=False, max_model_len=64, threads=1, weight_cache=cache)


def finish_saving() -> None:
    for thread in threading.enumerate():
        if thread.name == "quire-kept-file":
            thread.join()
