"""Run a file of requests in OpenAI's batch format. docs/batches.md explains the format."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from quire.cli.kv_quality import check_kv_quality
from quire.cli.options import (
    add_chat_options,
    add_engine_options,
    add_model_argument,
    answer_fields,
    engine_config,
    named_model,
)
from quire.cli.parser import Several
from quire.types import QuireError
from quire.util.progress import ByteProgress, CountProgress

if TYPE_CHECKING:
    from quire.server.batches.batch_run import LineResult


class _Usage(msgspec.Struct):
    """The counts of tokens in the answers of several routes."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Counted(msgspec.Struct):
    usage: _Usage | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s run -i FILE -o FILE [MODEL] [OPTION …]"
    parser.add_argument("action", choices=["run"], help="run all lines of a file", metavar="run")
    add_model_argument(parser)
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="requests, one per line")
    parser.add_argument(
        "-o", "--output-file", required=True, metavar="FILE",
        help="answers and errors, one per line; lines that it has already are not run again",
    )  # fmt: skip
    parser.add_argument(
        "--served-model-name", action=Several, nargs="+", default=(), metavar="NAME",
        help="names of the model in requests (default: the model argument)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print a summary as JSON")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    add_chat_options(parser, variables=False)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    import uvloop

    from quire.server.batches.batch_lines import OutputMismatchError, resume_output

    source, target = Path(args.input_file), Path(args.output_file)
    if not source.is_file():
        raise ValueError(f"input_file: {source}: no such file")
    if target.exists() and target.samefile(source):
        raise ValueError("output_file: is the input file")
    try:
        done = resume_output(target)
        summary = uvloop.run(_run(args, source, target, done))
    except OutputMismatchError as error:
        raise ValueError(f"output_file: {error}") from None
    except KeyboardInterrupt:
        print(f"quire: interrupted; the same command goes on after the lines in {target}", file=sys.stderr)
        return 130
    print(json.dumps(summary) if args.json else _text(summary))
    return 1 if summary["failed"] else 0


async def _run(
    args: argparse.Namespace, source: Path, target: Path, done: dict[int, str | None]
) -> dict[str, Any]:
    from quire.config.serving import ServingConfig
    from quire.engine.front.serving_engine import serving_engine
    from quire.server.app import ROUTES, App
    from quire.server.batches.batch_endpoints import batch_endpoints
    from quire.server.batches.batch_lines import MAX_LINE
    from quire.server.batches.batch_run import BatchRun
    from quire.server.context import ServerContext
    from quire.server.inner_request import InnerAnswer, ask_inner
    from quire.server.metrics import ServerMetrics

    serving = ServingConfig(
        served_model_name=tuple(args.served_model_name), reader_tokens=2**31, reader_timeout=1e9, quiet=True,
        **answer_fields(args),
    )  # fmt: skip
    config, name = engine_config(args), named_model(args.model, quiet=args.quiet)
    check_kv_quality(name, config, quiet=args.quiet)
    engine = serving_engine(name, config, serving)
    context = ServerContext(engine, serving, ServerMetrics(engine))
    application = App(context)

    async def ask(path: str, body: bytes) -> InnerAnswer:
        return await ask_inner(application, context.memory, path, body, "")

    places = asyncio.Semaphore(config.limits.max_num_seqs)
    batch = BatchRun(source, ask, places, batch_endpoints(ROUTES), longest=MAX_LINE, done=done)
    order = await batch.prepare()  # before the model is loaded
    try:
        await engine.start()
        with (
            target.open("ab", buffering=0) as file,
            CountProgress("batch", "req", enabled=not args.quiet) as bar,
        ):
            tally = _Tally(file, bar, len(order), len(done))
            running, failed = (
                asyncio.ensure_future(batch.run(tally.write)),
                asyncio.ensure_future(engine.failed()),
            )
            await asyncio.wait({running, failed}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                raise QuireError("the engine failed and could not be restarted")
            failed.cancel()
            running.result()
            return tally.summary()
    finally:
        await engine.stop(0.0)


class _Tally:
    """Writes results and counts them."""

    def __init__(self, file: BinaryIO, bar: ByteProgress, total: int, before: int) -> None:
        self._file, self._bar, self._total, self._before = file, bar, total, before
        self._completed = self._failed = self._prompt = self._generated = 0
        self._began = time.monotonic()
        bar(before, total)

    def write(self, result: LineResult) -> None:
        """Append a result to the output: a whole line, in one write."""
        self._file.write(result.output)
        if result.answer is not None and result.succeeded:
            self._completed += 1
            usage = msgspec.json.decode(result.answer.body, type=_Counted).usage or _Usage()
            self._prompt += usage.prompt_tokens + usage.input_tokens
            self._generated += usage.completion_tokens + usage.output_tokens
        else:
            self._failed += 1
        self._bar(self._before + self._completed + self._failed, self._total)

    def summary(self) -> dict[str, Any]:
        """Counts of lines and tokens, seconds, and rates per second. `before` counts lines of an earlier run."""
        seconds = time.monotonic() - self._began
        run = self._completed + self._failed
        return {
            "requests": self._total, "before": self._before, "completed": self._completed, "failed": self._failed,
            "prompt_tokens": self._prompt, "completion_tokens": self._generated, "seconds": round(seconds, 3),
            "requests_per_second": round(run / seconds, 3) if run else 0.0,
            "tokens_per_second": round(self._generated / seconds, 3) if run else 0.0,
        }  # fmt: skip


def _text(summary: dict[str, Any]) -> str:
    before = f", {summary['before']} before" if summary["before"] else ""
    return (
        f"{summary['completed']} requests answered, {summary['failed']} failed{before}, in {summary['seconds']:.1f} s: "
        f"{summary['requests_per_second']:.2f} requests/s, {summary['tokens_per_second']:.1f} tokens/s"
    )
