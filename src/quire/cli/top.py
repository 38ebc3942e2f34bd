"""Watch a running server: requests by class and tenant, KV cache, steps, tokens and goodput."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.util.printable import printable

if TYPE_CHECKING:
    from quire.bench.metrics_page import MetricsPage

_BAR = 40
_TABLE = ("running", "waiting", "prompt", "output", "longest wait")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from quire.cli.running_server import add_key_options

    parser.add_argument(
        "url",
        nargs="?",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="the server (default: %(default)s)",
    )
    add_key_options(parser)
    parser.add_argument(
        "--seconds", type=float, default=1.0, metavar="S", help="time between two views (default: 1)"
    )
    parser.add_argument("--requests", type=int, default=10, metavar="N",
                        help="show the N oldest requests (default: 10)")  # fmt: skip
    parser.add_argument("--once", action="store_true", help="show one view and end")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each view")


def run(args: argparse.Namespace) -> int:
    import msgspec

    if not 0.1 <= args.seconds <= 3600:
        raise ValueError(f"seconds: {args.seconds:g} must be from 0.1 to 3600")
    if args.requests < 0:
        raise ValueError(f"requests: {args.requests} is below 0")
    live = sys.stdout.isatty() and not args.json and not args.once
    before, began = _page(args), time.monotonic()
    try:
        while True:
            time.sleep(args.seconds)
            after, now = _page(args), time.monotonic()
            found = view(before, after, now - began, _requests(args), args.requests)
            before, began = after, now
            if args.json:
                print(msgspec.json.encode(found).decode(), flush=True)
            else:
                lines = render(args.url, found)
                print("\x1b[H\x1b[J" * live + "\n".join(lines), flush=True)
            if args.once:
                return 0
    except KeyboardInterrupt:
        return 0


def _page(args: argparse.Namespace) -> MetricsPage:
    from quire.bench.metrics_page import read_page
    from quire.cli.running_server import fetch

    return read_page(fetch(args, "/metrics").decode("utf-8", "replace"))


def _requests(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The requests in progress that the key may see."""
    import msgspec

    from quire.cli.running_server import ServerRefusedError, fetch

    try:
        found = msgspec.json.decode(fetch(args, "/v1/requests", administrator=True))["data"]
    except (msgspec.DecodeError, KeyError, TypeError):
        raise ServerRefusedError(f"{args.url}: it is no server of Quire") from None
    return [one for one in found if isinstance(one, dict)]


def view(
    before: MetricsPage, after: MetricsPage, seconds: float, requests: Sequence[Mapping[str, Any]], most: int
) -> dict[str, Any]:
    """What the server did between two pages of metrics, and its requests now."""
    from quire.bench.doctor.metrics_window import Window

    window = Window(before, after, seconds)
    steps = window.grown("quire_steps_total")
    blocks = window.now("quire_kv_blocks")
    queried = window.grown("quire_prefix_cache_queries_total")
    return {
        "seconds": seconds,
        "running": window.now("quire_num_requests_running"),
        "waiting": window.now("quire_num_requests_waiting"),
        "kv_blocks": blocks,
        "kv_used": window.now("quire_kv_blocks_used") / blocks if blocks else 0.0,
        "kv_cached": window.now("quire_kv_blocks_cached") / blocks if blocks else 0.0,
        "step_ms": 1e3 * window.grown("quire_step_seconds_total") / steps if steps else None,
        "steps_per_second": steps / seconds,
        "output_tokens_per_second": window.grown("quire_step_decode_tokens_total") / seconds,
        "prompt_tokens_per_second": window.grown("quire_step_prefill_tokens_total") / seconds,
        "cached_share": window.grown("quire_prefix_cache_hits_total") / queried if queried else None,
        "preemptions": window.grown("quire_num_preemptions_total"),
        "goodput": window.now_by("service_class", "quire_goodput_requests_per_second"),
        "degraded": [step for step, on in window.now_by("step", "quire_degrade_step").items() if on],
        "by_class": grouped(requests, "service_class"),
        "by_tenant": grouped(requests, "tenant"),
        "requests": list(requests[:most]),
    }


def grouped(requests: Sequence[Mapping[str, Any]], name: str) -> dict[str, dict[str, float]]:
    """Counts of requests by the value of a field; those without one are left out."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for one in requests:
        if one.get(name) is not None:
            counts = found[str(one[name])]
            counts[str(one.get("status"))] += 1
            counts["prompt"] += one.get("prompt_tokens", 0)
            counts["output"] += one.get("completion_tokens", 0)
            if one.get("status") == "waiting":
                counts["longest wait"] = max(counts["longest wait"], one.get("queued", 0))
    return {key: {name: float(counts[name]) for name in _TABLE} for key, counts in found.items()}


def render(url: str, found: Mapping[str, Any]) -> list[str]:
    """A view as lines of text."""
    used, cached = found["kv_used"], found["kv_cached"]
    filled = round(_BAR * used), round(_BAR * (used + cached))
    bar = "#" * filled[0] + "=" * (filled[1] - filled[0]) + "." * (_BAR - filled[1])
    step = "none" if found["step_ms"] is None else f"{found['step_ms']:.1f} ms"
    hits = "–" if found["cached_share"] is None else f"{found['cached_share']:.0%}"
    good = ", ".join(f"{name} {rate:.2f}" for name, rate in found["goodput"].items()) or "no classes"
    lines = [
        f"{printable(url)}   running {found['running']:.0f}   waiting {found['waiting']:.0f}   "
        f"degraded: {', '.join(found['degraded']) or 'no'}",
        f"KV [{bar}] {used:.0%} used (#), {cached:.0%} cached (=) of {found['kv_blocks']:.0f} blocks",
        f"step {step}, {found['steps_per_second']:.1f}/s   tokens/s {found['output_tokens_per_second']:.1f} out, "
        f"{found['prompt_tokens_per_second']:.1f} in   cached {hits}   preempted {found['preemptions']:.0f}",
        f"goodput of the last minute, requests/s: {printable(good)}",
    ]
    for title, groups in (("class", found["by_class"]), ("tenant", found["by_tenant"])):
        if groups:
            rows = [(name, *(f"{counts[key]:.3g}" for key in _TABLE)) for name, counts in groups.items()]
            lines += ["", *_columns([(title, *_TABLE), *rows])]
    if found["requests"]:
        heads = ("request", "status", "class", "age", "ttft", "prompt", "cached", "output", "of")
        keys = (
            "id", "status", "service_class", "age", "ttft", "prompt_tokens", "cached_tokens", "completion_tokens",
            "max_tokens",
        )  # fmt: skip
        rows = [tuple(_cell(one.get(key)) for key in keys) for one in found["requests"]]
        lines += ["", *_columns([heads, *rows])]
    return lines


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        printable("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        for row in rows
    ]
