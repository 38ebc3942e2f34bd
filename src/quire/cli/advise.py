"""Walk the decision tree of a deployment: parallelism, then prefix caching, speculation, quantization, batching, pools.

Answers come from the options, from a question where one is missing, or from a running server's metrics (--url)."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from quire.cli.plan import add_load_options, demand_of, hardware, precisions
from quire.cli.running_server import add_client_key
from quire.util.standard_error import say

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from quire.bench.technique_effects import TechniqueEffect
    from quire.planner.deployment import LayoutOption, LoadDemand


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a released shape, or a checkpoint; asked if missing")
    add_load_options(parser)
    parser.add_argument("--shared-prefix", type=int, metavar="N", help="tokens with which all prompts begin")
    parser.add_argument("--interactive", action=argparse.BooleanOptionalAction, default=None,
                        help="somebody waits for every token")  # fmt: skip
    parser.add_argument(
        "--url", metavar="URL", help="take what is not given from the metrics of a running server"
    )
    add_client_key(parser)
    parser.add_argument(
        "--explain",
        action="store_true",
        help="what each of twelve techniques gives, computed on these numbers",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="also run the model here, with each technique and without, in turns: minutes",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Exit status 1 when nothing fits."""
    from quire.cli.calc import named_size
    from quire.planner.deployment import deploy

    seen = _seen(args) if args.url else {}
    _complete(args, seen)
    demand = demand_of(args)
    device, count = hardware(args.hardware)
    model = named_size(args.model)
    made = deploy(
        model, device, count, demand, bits=precisions(args.bits), kv_bits=args.kv_bits, per_host=args.per_host,
        reserve=args.reserve,
    )  # fmt: skip
    report: dict[str, Any] = {
        "model": args.model,
        "server": seen,
        "parallelism": made.steps,
        "techniques": [],
    }
    if made.chosen is not None:
        chosen = made.chosen
        report["layout"], report["bits"], report["replicas"] = (
            str(chosen.layout),
            chosen.bound.bits,
            chosen.replicas,
        )
        report["techniques"] = [
            {"technique": name, "use": use, "because": because}
            for name, use, because in _branches(args, chosen, demand, seen)
        ]
        if args.explain:
            from quire.bench.technique_effects import effects

            found = effects(chosen.bound, demand, chosen.sequences, args.shared_prefix)
            report["effects"] = [_effect(one) for one in found]
    if args.measure:
        report["measured"] = _measured(args, demand)
    print(json.dumps(report) if args.json else "\n".join(_lines(report)))
    return int(made.chosen is None)


def _measured(args: argparse.Namespace, demand: LoadDemand) -> list[dict[str, Any]]:
    """What the techniques change on this machine; of a released shape, with random weights, which take as long."""
    from quire.bench.measured_effects import measured_effects, work_of
    from quire.planner import shapes

    def announce(name: str) -> None:
        if not args.json:
            say(f"quire: measuring {name}")

    model = f"{shapes.PREFIX}{args.model}" if args.model in shapes.SHAPES else args.model
    found = measured_effects(work_of(model, demand, args.shared_prefix), announce)
    return [_effect(one) for one in found]


def _effect(one: TechniqueEffect) -> dict[str, Any]:
    return {"technique": one.name, "factor": one.factor, "says": one.says, "source": one.source}


def _complete(args: argparse.Namespace, seen: dict[str, float]) -> None:
    """Fill what is missing: from the server, then by asking. Raises ValueError where nobody can be asked."""
    if args.url and not args.rate:
        args.rate = seen.get("requests_per_second", 0.0)
        args.prompt = int(seen.get("prompt_tokens") or args.prompt)
        args.output = int(seen.get("output_tokens") or args.output)
    if args.shared_prefix is None:
        args.shared_prefix = int(seen.get("hit_share", 0.0) * args.prompt)
        if not args.url:
            args.shared_prefix = int(_ask("tokens with which all prompts begin", "0"))
    if args.interactive is None:
        args.interactive = _ask("does somebody wait for every token (y/n)", "y").lower().startswith("y")
    if args.model is None:
        args.model = _ask("model (a released shape, or a checkpoint)", "")
        if not args.model:
            raise ValueError("model: needed")


def _ask(question: str, default: str) -> str:
    """The answer of a person; the default where there is none to ask."""
    if not sys.stdin.isatty():
        return default
    shown = f" [{default}]" if default else ""
    print(f"{question}{shown}: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip() or default


def _seen(args: argparse.Namespace) -> dict[str, float]:
    """What the metrics of a server say of its load since it began."""
    from quire.bench.doctor.metrics_window import Window
    from quire.cli.doctor import server_page

    window = Window({}, server_page(args), 1.0)
    began = window.now("process_start_time_seconds")
    ended = window.grown("quire_request_success_total", "vllm:request_success_total")
    requests = max(1.0, ended)
    asked = window.grown("quire_prefix_cache_queries_total", "vllm:prefix_cache_queries_total")
    hits = window.grown("quire_prefix_cache_hits_total", "vllm:prefix_cache_hits_total")
    return {
        "requests_per_second": ended / max(1.0, time.time() - began) if began else 0.0,
        "prompt_tokens": window.grown("quire_prompt_tokens_total", "vllm:prompt_tokens_total") / requests,
        "output_tokens": window.grown("quire_generation_tokens_total", "vllm:generation_tokens_total")
        / requests,
        "hit_share": hits / asked if asked else 0.0,
        "preemptions": window.grown("quire_preemptions_total", "vllm:num_preemptions_total"),
    }


def _branches(
    args: argparse.Namespace, chosen: LayoutOption, demand: LoadDemand, seen: dict[str, float]
) -> Iterator[tuple[str, bool, str]]:
    """Technique, whether to use it, and why."""
    from quire.bench.technique_effects import speculation_gain
    from quire.routing.transfer import transfer_seconds

    bound = chosen.bound
    yield "continuous batching, paged cache", True, "always: requests differ in length"
    share = args.shared_prefix / demand.prompt
    yield (
        "prefix caching",
        True,
        (
            f"{args.shared_prefix} of {demand.prompt} tokens of a prompt are shared: {share:.0%} of prefill is saved"
            if args.shared_prefix
            else "on by default, and costs nothing; no shared start of prompts was given"
        ),
    )
    gain = speculation_gain(bound, demand, max(1.0, chosen.batch))
    use = bool(args.interactive) and gain > 1.15
    yield (
        "speculative decoding",
        use,
        (
            f"about {gain:.2f} × at {chosen.batch:.0f} sequences a step"
            + ("" if args.interactive else "; nobody waits for single tokens")
        ),
    )
    tight = (
        demand.context * max(1.0, chosen.batch) * bound.token_bytes
        > 0.7 * bound.room(args.reserve * bound.device.memory_gb)
        or seen.get("preemptions", 0) > 0
    )
    yield (
        "int8 KV cache",
        tight,
        ("caches fill most of what weights leave" if tight else "caches have room: keep 16 bits"),
    )
    prompt = bound.prefill(demand.prompt)
    moved = transfer_seconds(bound.token_bytes * chosen.layout.devices * demand.prompt, args.link_gb_s)
    pools = chosen.replicas > 1 and moved < prompt and bool(args.interactive)
    yield (
        "PD disaggregation",
        pools,
        (
            f"a prompt holds up streams for {1e3 * prompt:.0f} ms, its cache moves in {1e3 * moved:.0f} ms"
            if chosen.replicas > 1
            else "one replica cannot be split in two pools"
        ),
    )


def _ranked(effects: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What helps most first, and last what there is no factor of."""
    return sorted(effects, key=lambda one: -(one["factor"] or 0.0))


def _lines(report: dict[str, Any]) -> list[str]:
    made = [f"{report['model']}:"] + [f"  {i}. {text}" for i, text in enumerate(report["parallelism"], 1)]
    if "layout" not in report:
        made.append("nothing fits")
    else:
        made.append(f"  -> {report['layout']}, {report['replicas']} ×, {report['bits']:g} bits")
    made += [
        f"  {'use ' if one['use'] else 'no  '} {one['technique']}: {one['because']}"
        for one in report["techniques"]
    ]
    for one in [*_ranked(report.get("effects", ())), *_ranked(report.get("measured", ()))]:
        factor = "-" if one["factor"] is None else f"{one['factor']:.2f} ×"
        made.append(f"  {one['technique']:<22}{factor:>10}  {one['says']} ({one['source']})")
    return made
