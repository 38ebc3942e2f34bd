"""What it costs to serve a model: hosts for so many users by precision, or the money and energy of a running server.

With a model: users that fit a host by their KV caches, and hosts, devices and money for all of them. With --url: the
output tokens of a server over some seconds, with measured power where the machine tells it (RAPL), or --watts."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from quire.cli.running_server import add_client_key

_RAPL = "/sys/class/powercap"
_WIDTHS = ((16.0, 16.0), (8.0, 16.0), (8.0, 8.0), (4.0, 16.0), (4.0, 8.0))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a released shape, or a checkpoint")
    parser.add_argument("--hardware", default="h100:8", metavar="NAME[:N]", help="a host (default: h100:8)")
    parser.add_argument(
        "--users", type=int, default=1000, metavar="N", help="users at a time (default: 1000)"
    )
    parser.add_argument(
        "--context", type=int, default=4096, metavar="N", help="tokens of each (default: 4096)"
    )
    parser.add_argument(
        "--reserve-gb", type=float, default=0.0, metavar="GB", help="of each device, for the rest"
    )
    parser.add_argument("--decode-share", type=float, default=1.0, metavar="S",
                        help="share of a host's devices that decode, beside those for prompts")  # fmt: skip
    parser.add_argument("--url", metavar="URL", help="measure a running server instead")
    add_client_key(parser)
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="watch it for so long (default: 10)"
    )
    parser.add_argument(
        "--watts", type=float, default=0.0, metavar="W", help="its power, if the machine does not tell"
    )
    parser.add_argument(
        "--price", type=float, default=0.0, metavar="P", help="of a device, or the server, for an hour"
    )
    parser.add_argument("--price-kwh", type=float, default=0.0, metavar="P", help="of a kilowatt-hour")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    for name, least, most in (
        ("users", 1, 1e9), ("context", 1, 1e9), ("reserve_gb", 0, 1e6), ("seconds", 0.1, 3600), ("watts", 0, 1e6),
        ("price", 0, 1e9), ("price_kwh", 0, 1e6), ("decode_share", 0.01, 1),
    ):  # fmt: skip
        if not least <= getattr(args, name) <= most:
            raise ValueError(f"{name}: {getattr(args, name):g} must be from {least:g} to {most:g}")
    if (args.model is None) == (args.url is None):
        raise ValueError("model: either a model or --url is needed")
    found = _of_server(args) if args.url else {"hosts": _of_model(args)}
    if args.json:
        print(json.dumps(found))
    elif args.url:
        print("\n".join(_server_lines(found)))
    else:
        print("\n".join(_model_lines(args, found["hosts"])))
    return 0


def _of_model(args: argparse.Namespace) -> list[dict[str, Any]]:
    """By bits of weights and of the cache: users of a host, hosts, devices, money."""
    from quire.cli.calc import named_size
    from quire.planner.devices import counted
    from quire.planner.host_costs import hosts_for

    device, count = counted(args.hardware)
    model = named_size(args.model)
    found = []
    for bits, kv_bits in _WIDTHS:
        need = hosts_for(
            model, device, count, users=args.users, tokens=args.context, bits=bits, kv_bits=kv_bits,
            reserve_gb=args.reserve_gb, decode_share=args.decode_share,
        )  # fmt: skip
        hourly = need.devices * (args.price + args.price_kwh * device.watts / 1000)
        found.append(
            {"bits": bits, "kv_bits": kv_bits, "cache_gb": need.cache_gb, "groups": need.groups, "users": need.users,
             "hosts": need.hosts, "devices": need.devices, "per_hour": hourly, "per_day": 24 * hourly}
        )  # fmt: skip
    return found


def _model_lines(args: argparse.Namespace, rows: list[dict[str, Any]]) -> list[str]:
    made = [
        f"{args.model}, {args.users} users of {args.context} tokens, hosts of {args.hardware}; bound only: memory",
        "",
        f"{'weights':>8}{'cache':>7}{'GB a user':>11}{'models a host':>15}{'users a host':>14}{'hosts':>7}"
        f"{'devices':>9}{'an hour':>10}{'a day':>11}{'of the first':>14}",
    ]
    first = next((row["devices"] for row in rows if row["devices"]), 0)
    for row in rows:
        start = f"{row['bits']:>8g}{row['kv_bits']:>7g}{row['cache_gb']:>11.3f}"
        if not row["hosts"]:
            made.append(f"{start}  does not fit a host")
            continue
        made.append(
            f"{start}{row['groups']:>15}{row['users']:>14,}{row['hosts']:>7}{row['devices']:>9}"
            f"{row['per_hour']:>10,.2f}{row['per_day']:>11,.0f}{row['devices'] / first:>14.0%}"
        )
    return made


def _of_server(args: argparse.Namespace) -> dict[str, Any]:
    from quire.bench.doctor.metrics_window import Window
    from quire.cli.doctor import server_page

    energy, began, before = _joules(), time.monotonic(), server_page(args)
    time.sleep(args.seconds)
    after, used, seconds = server_page(args), _joules(), time.monotonic() - began
    tokens = Window(before, after, seconds).grown(
        "quire_generation_tokens_total", "vllm:generation_tokens_total"
    )
    measured = None if energy is None or used is None or used < energy else (used - energy) / seconds
    watts = measured or args.watts or None
    hourly = args.price + args.price_kwh * (watts or 0.0) / 1000
    return {
        "seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds, "watts": watts,
        "power": "measured (RAPL)" if measured else "given" if watts else "unknown",
        "joules_per_token": watts * seconds / tokens if watts and tokens else None,
        "per_thousand_tokens": hourly * seconds / 3600 / tokens * 1000 if hourly and tokens else None,
    }  # fmt: skip


def _server_lines(found: dict[str, Any]) -> list[str]:
    made = [
        f"{found['tokens']:.0f} output tokens in {found['seconds']:.1f} s: {found['tokens_per_second']:.1f} a second"
    ]
    if not found["tokens"]:
        made.append("no tokens, so no cost of one: ask while the server has work")
    if found["watts"] is None:
        made.append("power: this machine does not tell it (RAPL); give --watts")
    else:
        made.append(f"power: {found['watts']:.1f} W, {found['power']}")
    if found["joules_per_token"] is not None:
        made.append(f"energy: {found['joules_per_token']:.3g} J a token")
    if found["per_thousand_tokens"] is not None:
        made.append(f"cost: {found['per_thousand_tokens']:.3g} for 1,000 tokens")
    return made


def _joules() -> float | None:
    """Energy of the processor packages so far; None where it cannot be read."""
    found = 0.0
    try:
        zones = [zone for zone in Path(_RAPL).glob("intel-rapl:*") if zone.name.count(":") == 1]
        for zone in zones:
            found += int((zone / "energy_uj").read_text()) / 1e6
    except (OSError, ValueError):
        return None
    return found if zones else None
