"""The cost of the asynchronous engine: CPU time per token in the API process and per step in the engine, and delays.

    python benchmarks/async_engine.py [--out benchmarks/results/async_engine.json]

A two-layer model with random weights keeps the kernels out of the way. CPU is process time, so that other load on
the machine does not count; delays are wall time and medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import msgspec

from helpers.checkpoints import tiny_model
from helpers.tokenizers import write_byte_tokenizer
from quire.config.schema import EngineConfig
from quire.config.serving import ServingConfig
from quire.engine.api import EngineState, EngineUnavailableError, GenerateAsk
from quire.engine.front.async_engine import AsyncEngine
from quire.engine.host.messages import Report, Step, frame, pack_handles, report_decoder
from quire.types import Request, RequestError, SamplingParams, TokenIds

STREAMS, TOKENS, REPEATS = 64, 400, 5


def model(folder: Path) -> Path:
    config = tiny_model("llama2").config().to_dict() | {"max_position_embeddings": 65536}
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    write_byte_tokenizer(folder)
    return folder


async def start(folder: Path, *, in_process: bool = False, **serving: Any) -> AsyncEngine:
    config = EngineConfig(load_format="random", num_kv_blocks=16384, threads=1, memory=2**31)
    engine = AsyncEngine(folder, config, ServingConfig(**serving), in_process=in_process)
    await engine.start()
    return engine


def ask(name: str, tokens: int, **params: Any) -> GenerateAsk:
    return GenerateAsk(
        request=Request(
            request_id=name,
            prompt_token_ids=TokenIds([40 + len(name), 41, 42]),
            params=SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1, **params),
            arrival=time.monotonic(),
        )
    )


async def drain(engine: AsyncEngine, name: str, tokens: int, **params: Any) -> tuple[int, int]:
    """Tokens and deltas of one stream, read as they arrive."""
    count = deltas = 0
    async for delta in engine.generate(ask(name, tokens, **params)):
        count += len(delta.token_ids)
        deltas += 1
    return count, deltas


async def streams(folder: Path, **params: Any) -> dict[str, float]:
    """CPU of both processes while STREAMS streams run."""
    engine = await start(folder)
    await asyncio.gather(*[drain(engine, f"w{i}", 20, **params) for i in range(STREAMS)])
    await asyncio.sleep(0.3)
    before, cpu, wall = engine.stats, time.process_time(), time.perf_counter()
    done = await asyncio.gather(*[drain(engine, f"r{i}", TOKENS, **params) for i in range(STREAMS)])
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    await asyncio.sleep(0.3)
    after = engine.stats
    await engine.stop(0)
    tokens, deltas = sum(count for count, _ in done), sum(deltas for _, deltas in done)
    steps = after.steps - before.steps
    phases = {
        f"engine_{name}_us_per_step": 1e6 * (seconds - before.step_phase_seconds.get(name, 0.0)) / steps
        for name, seconds in after.step_phase_seconds.items()
    }
    return {
        "api_cpu_us_per_token": 1e6 * cpu / tokens,
        "deltas_per_token": deltas / tokens,
        "tokens_per_second": tokens / wall,
        "steps": steps,
        **phases,
    }


async def replay(folder: Path) -> dict[str, float]:
    """Steps of STREAMS rows, recorded once, decoded and processed without readers: no loop, no socket."""
    engine = await start(folder)
    recorded: list[bytes] = []
    client = engine._client
    assert client is not None
    receive = client._receive

    def record(report: Report) -> None:
        if isinstance(report, Step) and len(report.rows) == 8 * STREAMS:
            recorded.append(bytes(frame(report))[4:])
        receive(report)

    object.__setattr__(client._supervisor._hooks, "report", record)
    first = engine._numbers.__reduce__()[1][0]
    await asyncio.gather(*[drain(engine, f"r{i}", TOKENS) for i in range(STREAMS)])
    asks = [engine.generate(ask(f"s{i}", TOKENS)) for i in range(STREAMS)]
    await client.stop()
    shift = (asks[0]._live.handle - first) << 7  # type: ignore[attr-defined]
    decode = report_decoder().decode
    moved = []
    for body in recorded:
        step = decode(body)
        assert isinstance(step, Step)
        rows = memoryview(step.rows).cast("q")
        moved.append(
            bytes(frame(msgspec.structs.replace(step, rows=pack_handles([r + shift for r in rows]))))[4:]
        )
    cpu = time.process_time()
    for body in moved[:200]:
        client._receive(decode(body))
    cpu = time.process_time() - cpu
    decoding = time.process_time()
    for body in moved[:200]:
        decode(body)
    decoding = time.process_time() - decoding
    await engine.stop(0)
    return {
        "process_us_per_token": 1e6 * cpu / 200 / STREAMS,
        "decode_us_per_step": 1e6 * decoding / 200,
        "bytes_per_step": statistics.median(map(len, moved)),
    }


async def loop_gap(folder: Path, characters: int) -> dict[str, float]:
    """The longest pause of the event loop while a long text is encoded."""
    engine = await start(folder)
    gaps: list[float] = []

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.05)
    gaps.clear()
    begin = time.perf_counter()
    with contextlib.suppress(RequestError):
        await engine.encode("the quick brown fox " * (characters // 20))
    begin = time.perf_counter() - begin
    ticking.cancel()
    await engine.stop(0)
    return {
        "encode_ms": 1e3 * begin,
        "longest_gap_ms": 1e3 * max(gaps),
        "p99_gap_ms": 1e3 * sorted(gaps)[int(0.99 * len(gaps))],
    }


async def median(measure: Callable[[], Awaitable[float]]) -> float:
    return statistics.median([await measure() for _ in range(REPEATS)])


async def delays(folder: Path) -> dict[str, float]:
    """Milliseconds from a fault to its effect."""

    async def start_ms(in_process: bool) -> float:
        begin = time.perf_counter()
        engine = await start(folder, in_process=in_process)
        begin = time.perf_counter() - begin
        await engine.stop(0)
        return 1e3 * begin

    async def kill_ms() -> float:
        engine = await start(folder)
        stream = engine.generate(ask("r", 60_000))
        await anext(aiter(stream))
        begin = time.perf_counter()
        assert engine.pid
        os.kill(engine.pid, signal.SIGKILL)
        try:
            async for _ in stream:
                pass
        except EngineUnavailableError:
            begin = time.perf_counter() - begin
        await engine.stop(0)
        return 1e3 * begin

    async def recover_ms() -> float:
        engine = await start(folder)
        begin = time.perf_counter()
        assert engine.pid
        os.kill(engine.pid, signal.SIGKILL)
        while engine.state is EngineState.READY:
            await asyncio.sleep(0.001)
        while engine.state is not EngineState.READY:
            await asyncio.sleep(0.001)
        begin = time.perf_counter() - begin
        await engine.stop(0)
        return 1e3 * begin

    async def stall_ms() -> float:
        engine = await start(folder, stall_timeout=1.0)
        stream = engine.generate(ask("r", 60_000))
        await anext(aiter(stream))
        begin = time.perf_counter()
        assert engine.pid
        os.kill(engine.pid, signal.SIGSTOP)
        while engine.state is EngineState.READY:
            await asyncio.sleep(0.001)
        begin = time.perf_counter() - begin
        await engine.stop(0)
        return 1e3 * begin

    return {
        "start_process_ms": await median(lambda: start_ms(False)),
        "start_thread_ms": await median(lambda: start_ms(True)),
        "kill_to_error_ms": await median(kill_ms),
        "kill_to_ready_ms": await median(recover_ms),
        "stop_to_stalled_ms_with_timeout_1s": await median(stall_ms),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runners: dict[str, Any] = {"asyncio": asyncio.run}
    try:
        import uvloop

        runners["uvloop"] = uvloop.run
    except ImportError:
        pass
    result: dict[str, Any] = {"python": platform.python_version(), "streams": STREAMS, "tokens": TOKENS}
    with tempfile.TemporaryDirectory() as name:
        folder = model(Path(name))
        for loop, runner in runners.items():
            runs = sorted(
                (runner(streams(folder)) for _ in range(3)), key=lambda r: r["api_cpu_us_per_token"]
            )
            result[loop] = runs[1] | {"api_cpu_us_per_token_runs": [r["api_cpu_us_per_token"] for r in runs]}
            print(loop, json.dumps(result[loop], indent=1))
        result["greedy"] = asyncio.run(streams(folder, temperature=0))
        result["stop_strings"] = asyncio.run(streams(folder, stop=["\x00never"]))
        result["logprobs_5"] = asyncio.run(streams(folder, logprobs=5))
        result["replay"] = asyncio.run(replay(folder))
        result["encode_1M_characters"] = asyncio.run(loop_gap(folder, 1_000_000))
        result["delays"] = asyncio.run(delays(folder))
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
