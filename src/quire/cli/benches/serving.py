"""Options of the benchmarks of a server."""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.benches.common import add_report_option, add_result_options, add_trace_options, count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire.bench.server_bench import ServerOptions
    from quire.bench.workloads import Workload
    from quire.objectives import SLO

# preset -> its lengths and sharing (its objectives are in goodput.PRESETS)
SHAPES: dict[str, dict[str, Any]] = {
    "chat": {"input_len": "lognormal:256:0.8", "output_len": "lognormal:160:0.6", "prefix_len": 64},
    "code": {"input_len": "512-1536", "output_len": "16-64", "prefix_len": 0},
    "voice": {"input_len": "64-256", "output_len": "32-96", "prefix_len": 128},
    "batch": {"input_len": "lognormal:768:0.6", "output_len": "64-256", "prefix_len": 0},
    "agent": {"input_len": "64-384", "output_len": "32-160", "prefix_len": 768, "turns": 4},
}
DEFAULTS: dict[str, Any] = {"input_len": "256", "output_len": "64", "prefix_len": 0, "turns": 1}


def add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", help="server (default: %(default)s)"
    )
    add = parser.add_argument_group("server").add_argument
    add(
        "--backend", default="auto", metavar="NAME",
        help="quire, vllm, sglang, llama-server, tgi, ollama or openai (default: detected)",
    )  # fmt: skip
    add(
        "--api", default="chat", choices=("chat", "completions", "native", "native-chat"),
        help="OpenAI's routes, or the native one of the backend (default: chat)",
    )  # fmt: skip
    add(
        "--model",
        default="",
        metavar="NAME",
        help="name of the model in requests (default: the first that the server lists)",
    )
    add("--api-key", metavar="KEY", help="sent as a bearer token (default: $OPENAI_API_KEY)")
    add(
        "--header",
        action="append",
        default=[],
        metavar="NAME:VALUE",
        help="additional header; may be repeated",
    )
    add("--insecure", action="store_true", help="accept any TLS certificate")
    add("--timeout", type=seconds, default=600.0, metavar="S", help="time limit of a request (default: 600)")
    add(
        "--server-metrics", action=argparse.BooleanOptionalAction, default=True,
        help="read the server's /metrics once per second (default: on)",
    )  # fmt: skip
    add = parser.add_argument_group("requests").add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="default: 0")
    add(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
        help="answers have exactly the requested length, if the server supports it (default: on)",
    )  # fmt: skip
    add(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="stream the answers (default: on)",
    )
    add(
        "--count-chunk-tokens", action="store_true",
        help="request the number of tokens per chunk, for an exact ITL of bundled tokens (costs the server a little)",
    )  # fmt: skip
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="additional fields of the body")


def add_measuring_options(parser: argparse.ArgumentParser) -> None:
    """Add options for workload, objectives and output, after the other options of a command."""
    add_workload_options(parser)
    add_goodput_options(parser)
    add_result_options(parser)
    add_report_option(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress")


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("workload").add_argument
    add("--preset", choices=sorted(SHAPES), help="lengths, sharing and objectives typical of a product")
    add("--input-len", metavar="SPEC", help="512, 256-1024, normal:512:128 or lognormal:512:0.8")
    add("--output-len", metavar="SPEC", help="likewise")
    add("--prefix-len", type=int, metavar="N", help="common prefix of the requests of a family, in tokens")
    add("--prefix-families", type=count, default=1, metavar="N", help="number of families (default: 1)")
    add("--turns", type=count, metavar="N", help="turns per conversation (default: 1)")
    add("--think-time", type=float, default=0.0, metavar="S", help="mean pause between turns")
    add("--prompts", type=Path, metavar="FILE", help="prompts: one per line, or JSON lines")
    add_trace_options(add)
    add("--trace-start", type=float, default=0.0, metavar="S", help="start at this second of the trace")
    add("--length-scale", type=float, default=1.0, metavar="F", help="multiply the lengths of a trace")
    add("--max-input-len", type=count, metavar="N", help="cut the prompts of a trace")
    add("--max-output-len", type=count, metavar="N", help="cut the outputs of a trace")
    add("--seed", type=int, default=0, metavar="N", help="seed of lengths, texts and arrivals (default: 0)")
    add(
        "--salt",
        default="",
        metavar="TEXT",
        help="make different texts of the same lengths, which the server has not cached",
    )
    add("--prompt-ids", type=id_range, metavar="LOW-HIGH", help="send prompts as token ids in this range")
    add("--tokenizer", type=Path, metavar="FOLDER", help="count tokens with this checkpoint's tokenizer")


def add_goodput_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("objectives").add_argument
    add("--goodput", nargs="+", default=[], metavar="NAME:MS", help="like ttft:500 tpot:50 itl:100 e2el:8000")
    add(
        "--slo-share",
        type=float,
        default=0.9,
        metavar="F",
        help="share of requests that must meet them (default: 0.9)",
    )


def server_options(args: argparse.Namespace) -> ServerOptions:
    """Return the options of the server. Raises ValueError naming the option."""
    from quire.bench.endpoints import BACKENDS, RequestOptions
    from quire.bench.server_bench import ServerOptions
    from quire.util.http_client import target

    headers = {}
    for text in args.header:
        name, colon, value = text.partition(":")
        if not colon:
            raise ValueError(f"header: {text!r} does not have the form NAME:VALUE")
        headers[name.strip()] = value.strip()
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    if key:
        headers["authorization"] = f"Bearer {key}"
    if args.backend not in {"auto", *BACKENDS}:
        raise ValueError(f"backend: {args.backend!r} is not one of auto, {', '.join(BACKENDS)}")
    ask = RequestOptions(
        model=args.model,
        temperature=args.temperature,
        ignore_eos=args.ignore_eos,
        stream=args.stream,
        count_tokens=args.count_chunk_tokens,
        extra=args.extra_body,
    )
    return ServerOptions(
        target=target(args.url, headers, insecure=args.insecure),
        backend=args.backend,
        api=args.api,
        ask=ask,
        timeout=args.timeout,
        token_ids=args.prompt_ids,
        counter=_counter(args.tokenizer),
        watch=args.server_metrics,
    )


def public_words(words: Sequence[str]) -> list[str]:
    """Return a command line without its secrets, because result files are shared."""
    shown: list[str] = []
    for word in words:
        option, equals, _ = word.partition("=")
        if shown and shown[-1] in _SECRET:
            shown.append("(hidden)")
        else:
            shown.append(f"{option}=(hidden)" if equals and option in _SECRET else word)
    return shown


_SECRET = ("--api-key", "--header")


def workload(args: argparse.Namespace, requests: int | None, salt: str = "") -> Workload:
    """Return the workload. `requests` limits a trace or file; None takes all of it."""
    from quire.bench.traces import read_trace
    from quire.bench.workloads import Lengths, Scaling, Shape, from_file, from_trace, synthetic

    salt = args.salt + salt
    if args.prompts is not None and args.trace is not None:
        raise ValueError("trace: cannot be combined with --prompts")
    if args.prompts is not None:
        output = Lengths(args.output_len, "output-len") if args.output_len else None
        return from_file(args.prompts, output_len=output, limit=requests, seed=args.seed)
    if args.trace is not None:
        given = {"seed": args.seed, "form": args.trace_format}
        rows = read_trace(args.trace, limit=requests, start=args.trace_start, **given)
        scaling = Scaling(
            length=args.length_scale, max_input=args.max_input_len, max_output=args.max_output_len
        )
        return from_trace(rows, scaling, args.trace.name, seed=args.seed, salt=salt)
    wanted = DEFAULTS | SHAPES.get(args.preset or "", {})
    given = {name: getattr(args, name) for name in DEFAULTS if getattr(args, name) is not None}
    wanted |= given
    return synthetic(
        Shape(
            requests=requests or 100,
            input_len=Lengths(wanted["input_len"], "input-len"),
            output_len=Lengths(wanted["output_len"], "output-len"),
            prefix_len=wanted["prefix_len"],
            families=args.prefix_families,
            turns=wanted["turns"],
            think=args.think_time,
            seed=args.seed,
            salt=salt,
        )
    )


def objectives(args: argparse.Namespace, default: str = "") -> SLO | None:
    """Return the objectives of --goodput, of the preset or of `default`, or None."""
    import dataclasses

    from quire.bench.goodput import PRESETS
    from quire.objectives import parse_slo

    if args.goodput:
        return parse_slo(args.goodput, args.slo_share)
    name = args.preset or default
    return dataclasses.replace(PRESETS[name][0], share=args.slo_share) if name else None


def _counter(folder: Path | None) -> Callable[[str], int] | None:
    if folder is None:
        return None
    from quire.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_dir(folder)
    return lambda text: len(tokenizer.encode(text))


def id_range(text: str) -> range:
    """Argument type: a range of token ids."""
    low, dash, high = text.partition("-")
    try:
        found = range(int(low), int(high) + 1)
    except ValueError:
        found = range(0)
    if not dash or not found or found[0] < 0:
        raise argparse.ArgumentTypeError(f"{text!r} does not have the form 100-999")
    return found


def json_object(text: str) -> dict[str, Any]:
    """Argument type: a JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return found


def seconds(text: str) -> float:
    """Argument type: a time above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value
