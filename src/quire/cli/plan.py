"""Plan a deployment: does a model fit, how is it spread over devices and why, how many replicas does a load need.

Bounds rule out what cannot work; what is left is simulated with the real scheduler. Figures of devices are the makers',
so times are bounds: a real deployment takes longer. --hardware local measures this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.bench.request_metrics import Summary
    from quire.planner.deployment import Deployment, LayoutOption, LoadDemand
    from quire.planner.devices import Device

_SHOWN = 14


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a released shape (quire plan llama-3-70b), or a checkpoint")
    add_load_options(parser)
    parser.add_argument(
        "--details",
        action="store_true",
        help="also all layouts, kinds of parallelism side by side, scaling, transfers",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="an SVG: where moving a cache eats the gain of disaggregation",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="a sample of your texts, for words a second: with a checkpoint, whose tokenizer counts",
    )
    parser.add_argument("--no-simulation", action="store_true", help="bounds alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Hardware and load of `plan` and `advise`."""
    parser.add_argument("--hardware", required=True, metavar="NAME[:N]",
                        help="h100:8, see quire calc devices; local: this machine, measured")  # fmt: skip
    parser.add_argument("--rate", type=float, default=0.0, metavar="R", help="requests a second")
    parser.add_argument(
        "--prompt", type=int, default=2000, metavar="N", help="tokens of a prompt (default: 2000)"
    )
    parser.add_argument(
        "--output", type=int, default=200, metavar="N", help="tokens of an answer (default: 200)"
    )
    parser.add_argument("--users", type=int, default=0, metavar="N", help="sequences at a time that must fit")
    parser.add_argument("--slo", default="", metavar="SLO", help="ttft=500ms,tpot=50ms")
    parser.add_argument(
        "--bits", default="", metavar="N[,N]", help="bits of a weight to try (default: 16, 8, 4)"
    )
    parser.add_argument(
        "--kv-bits", type=float, default=16, metavar="N", help="bits of a number in the cache"
    )
    parser.add_argument("--per-host", type=int, default=8, metavar="N", help="devices of a host (default: 8)")
    parser.add_argument("--reserve", type=float, default=0.1, metavar="S",
                        help="share of memory for activations and kernels (default: 0.1)")  # fmt: skip
    parser.add_argument("--link-gb-s", type=float, default=50.0, metavar="R",
                        help="link over which caches would move (default: 50)")  # fmt: skip
    parser.add_argument("--price", type=float, default=0.0, metavar="P", help="of a device for an hour")
    parser.add_argument("--price-kwh", type=float, default=0.0, metavar="P", help="of a kilowatt-hour")


def demand_of(args: argparse.Namespace) -> LoadDemand:
    """The load of the options. Raises ValueError naming the field."""
    from quire.objectives import parse_slo
    from quire.planner.deployment import LoadDemand

    for name, least in (
        ("prompt", 1),
        ("output", 1),
        ("rate", 0),
        ("users", 0),
        ("per_host", 1),
        ("price", 0),
    ):
        if not least <= getattr(args, name) <= 1e8:
            raise ValueError(f"{name}: {getattr(args, name):g} must be at least {least}")
    if not 0 <= args.reserve < 1:
        raise ValueError(f"reserve: {args.reserve:g} must be from 0 to 1")
    return LoadDemand(
        rate=args.rate, prompt=args.prompt, output=args.output, users=args.users,
        slo=parse_slo([args.slo]) if args.slo else None,
    )  # fmt: skip


def precisions(text: str) -> tuple[float, ...]:
    """The bits to try, in order. Raises ValueError."""
    try:
        found = tuple(float(word) for word in text.split(",")) if text else (16.0, 8.0, 4.0)
    except ValueError:
        raise ValueError(f"bits: {text!r} must be numbers between commas") from None
    if not all(1 <= bits <= 64 for bits in found):
        raise ValueError(f"bits: {text!r} must be from 1 to 64")
    return found


def hardware(name: str) -> tuple[Device, int]:
    """A device and how many; "local" is this machine, measured now."""
    from quire.planner.devices import Device, counted

    if name != "local":
        return counted(name)
    from quire.bench.limits import LimitsProbe
    from quire.config import env
    from quire.util.platform import total_memory

    limits = LimitsProbe(env.isa(), 0).limits()
    return Device(
        name="local", title="this machine", memory_gb=total_memory() / 1e9,
        bandwidth_gb_s=limits.bandwidth.median / 1e9,
        tflops={name: peak.median / 1e12 for name, peak in limits.compute.items()}, source="measured now",
    ), 1  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Exit status 1 when nothing fits."""
    from quire.cli.calc import named_size
    from quire.planner.deployment import deploy

    demand, widths = demand_of(args), precisions(args.bits)
    device, count = hardware(args.hardware)
    model = named_size(args.model)
    made = deploy(
        model,
        device,
        count,
        demand,
        bits=widths,
        kv_bits=args.kv_bits,
        per_host=args.per_host,
        reserve=args.reserve,
    )
    report = _report(args, made, demand, device, count)
    if args.plot is not None and made.chosen is not None:
        from quire.bench.transfer_plot import transfer_plot

        args.plot.write_text(transfer_plot(_transfers(made.chosen), f"{args.model} on {report['hardware']}"))
    print(json.dumps(report) if args.json else "\n".join(_lines(report)))
    return int(made.chosen is None)


def _report(
    args: argparse.Namespace, made: Deployment, demand: LoadDemand, device: Device, count: int
) -> dict[str, Any]:
    from quire.cli.calc import named_size
    from quire.planner.deployment import comparison, scaling

    report: dict[str, Any] = {
        "model": args.model, "hardware": f"{count} × {device.title} [{device.source}]", "steps": list(made.steps),
        "figures": "bound only" if device.name != "local" else "bounds of measured limits", "chosen": None,
    }  # fmt: skip
    chosen = made.chosen
    if chosen is not None and demand.rate and not args.no_simulation:
        from quire.bench.planned_load import enough_replicas

        before = chosen.replicas
        chosen, summary = enough_replicas(chosen, demand, count, args.reserve)
        report["simulated"] = _simulated(summary)
        if chosen.replicas > before:
            report["steps"].append(
                f"the simulation needs {chosen.replicas} replicas: requests come by chance"
            )
        if chosen.replicas > 1 and chosen.layout.expert == 1:
            report["pools"] = _pools(args, chosen, demand, summary)
    if chosen is not None:
        report["chosen"] = _option(args, chosen, demand) | _words(args, chosen, demand)
        report["advice"] = list(_advice(args, chosen, demand))
    report["options"] = [_option(args, one, demand) for one in made.options]
    if args.details:
        width, model = (chosen.bound.bits if chosen else 16), named_size(args.model)
        report["kinds"] = comparison(model, device, demand, min(count, args.per_host), width, args.per_host)
        report["scaling"] = [
            {"devices": n, "speed_up": gain, "of_perfect": share}
            for n, gain, share in scaling(model, device, demand, count, width, args.per_host)
        ]
        if chosen is not None:
            report["transfers"] = _transfers(chosen)
    return report


def _option(args: argparse.Namespace, one: LayoutOption, demand: LoadDemand) -> dict[str, Any]:
    from quire.planner.deployment import meets, money
    from quire.planner.step_bound import decoding, prefilling

    found: dict[str, Any] = {
        "layout": str(one.layout), "bits": one.bound.bits, "fits": one.fits, "reason": one.reason,
        "weights_gb": one.bound.weight_bytes / 1e9,
    }  # fmt: skip
    if one.fits:
        found |= {
            "replicas": one.replicas, "devices": one.devices, "sequences": one.sequences, "batch": one.batch,
            "ttft_ms": 1e3 * one.ttft if one.ttft < 1e6 else None,
            "tpot_ms": 1e3 * one.tpot if one.ttft < 1e6 else None,
            "busy": one.busy,
            "requests_per_second": one.capacity * one.replicas, "limit": one.limit, "meets": meets(one, demand),
            "memory_gb": _memory(args, one, demand),
            "per_million_tokens": money(one, demand, args.price, args.price_kwh),
            "step_ms": _parts(one, decoding(one.batch, demand.context)),
            "prompt_ms": _parts(one, prefilling(demand.prompt)),
            "exchanged_mb": sum(one.bound.exchanged_bytes(one.batch).values()) / 1e6,
        }  # fmt: skip
        if one.bound.device.watts:
            rate = (demand.rate or one.capacity * one.replicas) * demand.output
            found["joules_per_token"] = one.bound.device.watts * one.devices / rate
    return found


def _memory(args: argparse.Namespace, one: LayoutOption, demand: LoadDemand) -> dict[str, float]:
    """GB of each device by what takes them, under the load: the caches of the sequences of a step, and the activations
    of a step that has them and a whole prompt, which come out of the reserve. They sum to the memory of the device.
    """
    from quire.planner.formulas import activation_bytes

    bound = one.bound
    found = {
        "weights": bound.weight_bytes / 1e9,
        "caches": one.batch * demand.context * bound.token_bytes / 1e9,
        "activations": activation_bytes(bound.model.hidden, demand.prompt + one.batch) / 1e9,
    }
    found["rest of the reserve"] = max(0.0, args.reserve * bound.device.memory_gb - found["activations"])
    return found | {"free": bound.device.memory_gb - sum(found.values())}


def _parts(one: LayoutOption, features: Sequence[float]) -> dict[str, float]:
    """Milliseconds of a step that computes so much, by each bound; the longer of the first two, and links besides."""
    return dict(
        zip(
            ("arithmetic", "memory", "links"), (1e3 * part for part in one.bound.parts(features)), strict=True
        )
    )


def _words(args: argparse.Namespace, one: LayoutOption, demand: LoadDemand) -> dict[str, Any]:
    """Output tokens a second under the load, or at most, and how many words they are."""
    ratio, source = tokens_per_word(args.model, args.text)
    tokens = (demand.rate or one.capacity * one.replicas) * demand.output
    return {
        "tokens_per_second": tokens, "words_per_second": tokens / ratio, "tokens_per_word": ratio,
        "tokens_per_word_of": source,
    }  # fmt: skip


def tokens_per_word(model: str, sample: Path | None) -> tuple[float, str]:
    """Tokens for each word of a text as the model's tokenizer cuts it, or a rule without one; and which of both. Raises
    ValueError for a text that cannot be read or counted.
    """
    from quire.planner.formulas import TOKENS_PER_WORD
    from quire.planner.shapes import SHAPES

    if sample is None:
        return TOKENS_PER_WORD, "assumed"
    from quire.engine.build.opening import open_model

    tokenizer = None if model in SHAPES else open_model(model).tokenizer
    if tokenizer is None:
        raise ValueError(f"text: {model} has no tokenizer that could count; name a checkpoint")
    try:
        text = sample.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"text: {error}") from None
    if not (words := len(text.split())):
        raise ValueError(f"text: {sample} has no words")
    return len(tokenizer.encode(text, add_special_tokens=False)) / words, f"measured in {sample.name}"


def _simulated(summary: Summary) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("ttft", "tpot", "itl", "e2el"):
        one = summary.distributions.get(name)
        if one is not None:
            found[name] = {f"p{p}": one.at(float(p)) for p in (50, 90, 99)}
    if summary.goodput is not None:
        found["met"] = summary.goodput.share
    return found


def _pools(
    args: argparse.Namespace, chosen: LayoutOption, demand: LoadDemand, together: Summary
) -> list[dict[str, Any]]:
    from quire.bench.planned_load import split_pools

    found = [{"prefill": 0, "decode": chosen.replicas} | _simulated(together)]
    for prefill, summary in split_pools(chosen, demand, args.link_gb_s, args.reserve).items():
        found.append({"prefill": prefill, "decode": chosen.replicas - prefill} | _simulated(summary))
    return found


def _advice(args: argparse.Namespace, chosen: LayoutOption, demand: LoadDemand) -> Iterator[str]:
    """What else would help, in words."""
    from quire.bench.technique_effects import speculation_gain
    from quire.routing.transfer import layout, transfer_seconds

    bound, batch = chosen.bound, max(1.0, chosen.batch)
    gain = speculation_gain(bound, demand, batch)
    verdict = "worth trying" if gain > 1.15 else "would not pay"
    yield (
        f"speculation: 4 drafts of which 7 in 10 are right, by a draft of a 20th of the cost: {gain:.2f} × "
        f"at {batch:.0f} sequences; {verdict}"
    )
    prefill = 1e3 * bound.prefill(demand.prompt)
    moved = 1e3 * transfer_seconds(bound.token_bytes * chosen.layout.devices * demand.prompt, args.link_gb_s)
    yield (
        f"disaggregation: a prompt holds up running streams for {prefill:.0f} ms, its cache moves in {moved:.0f} ms: "
        f"{layout(prefill, moved)}"
    )
    memory = _memory(args, chosen, demand)
    if memory["activations"] > args.reserve * bound.device.memory_gb:
        yield (
            f"memory: a step with a whole prompt has about {memory['activations']:.1f} GB of activations, more than "
            "the reserve; compute prompts in chunks, or raise --reserve"
        )
    if bound.bits > 8 and chosen.limit == "bandwidth":
        yield f"quantization: decoding is bound by reading weights; 8 bits read {bound.weight_bytes / 2e9:.1f} GB less"


def _transfers(chosen: LayoutOption) -> list[dict[str, Any]]:
    """Where moving a cache takes longer than the interference that it avoids."""
    from quire.planner.devices import links
    from quire.routing.transfer import transfer_seconds

    size = chosen.bound.token_bytes * chosen.layout.devices
    return [
        {"prompt": prompt, "prefill_ms": 1e3 * chosen.bound.prefill(prompt),
         "links": {name: 1e3 * transfer_seconds(size * prompt, rate) for name, rate in links().items()}}
        for prompt in (250, 1000, 4000, 16000, 64000)
    ]  # fmt: skip


def _lines(report: dict[str, Any]) -> list[str]:
    made = [f"{report['model']} on {report['hardware']}; {report['figures']}", ""]
    made += [f"  {i}. {text}" for i, text in enumerate(report["steps"], 1)]
    chosen = report["chosen"]
    if chosen is None:
        made += ["", "nothing fits"]
    else:
        cost = chosen["per_million_tokens"]
        made += [
            "",
            f"{chosen['layout']}, {chosen['replicas']} × on {chosen['devices']} devices, {chosen['bits']:g} bits: "
            f"{chosen['reason']}",
            f"  by bounds: TTFT {_ms(chosen['ttft_ms'])}, TPOT {_ms(chosen['tpot_ms'])} at {chosen['batch']:.0f} "
            f"sequences a replica; {chosen['busy']:.0%} busy, at most {chosen['requests_per_second']:.2f} requests/s; "
            f"limit: {chosen['limit']}",
        ]
        for what, parts in ((f"a step of {chosen['batch']:.0f}", "step_ms"), ("a prompt", "prompt_ms")):
            bounds = ", ".join(f"{name} {_ms(value)}" for name, value in chosen[parts].items() if value)
            made.append(f"  {what} takes at least: {bounds}")
        memory = ", ".join(f"{name} {gb:.3g}" for name, gb in chosen["memory_gb"].items())
        made.append(f"  GB of a device: {memory} (activations roughly, of a step with a whole prompt)")
        made.append(
            f"  {chosen['tokens_per_second']:,.0f} output tokens/s, {chosen['words_per_second']:,.0f} words/s "
            f"({chosen['tokens_per_word']:.2f} tokens a word, {chosen['tokens_per_word_of']})"
        )
        if cost is not None:
            made.append(f"  {cost:.3g} for a million output tokens")
        if "joules_per_token" in chosen:
            made.append(f"  {chosen['joules_per_token']:.2f} J a token at full power")
    if "simulated" in report:
        made.append(f"  simulated: {_said(report['simulated'])}")
    for pool in report.get("pools", ())[1:]:
        made.append(f"  {pool['prefill']} for prompts, {pool['decode']} to decode: {_said(pool)}")
    made += [f"  {text}" for text in report.get("advice", ())]
    made += ["", f"  {'layout':<16}{'bits':>5}{'devices':>9}{'TTFT':>10}{'TPOT':>9}{'requests/s':>12}  why"]
    ranked = sorted(
        report["options"], key=lambda one: (not one["fits"], not one.get("meets"), one.get("devices", 0))
    )
    for one in ranked[: None if "kinds" in report else _SHOWN]:
        if one["fits"]:
            made.append(
                f"  {one['layout']:<16}{one['bits']:>5g}{one['devices']:>9}{_ms(one['ttft_ms']):>10}"
                f"{_ms(one['tpot_ms']):>9}{one['requests_per_second']:>12.2f}  {one['reason']}"
            )
        else:
            made.append(
                f"  {one['layout']:<16}{one['bits']:>5g}{'-':>9}{'-':>10}{'-':>9}{'-':>12}  {one['reason']}"
            )
    return made + _detail_lines(report)


def _detail_lines(report: dict[str, Any]) -> list[str]:
    made = []
    if "kinds" in report:
        made += ["", f"  {'kind':<10}{'weights of each':>16}{'sent a step':>13}{'step':>11}{'tokens/s':>11}"]
        for one in report["kinds"]:
            rate = f"{one['tokens_per_second']:,.0f}" if one["fits"] else "no room"
            made.append(
                f"  {one['kind']:<10}{one['weights_gb']:>13.1f} GB{one['sent_mb']:>10.2f} MB"
                f"{one['step_ms']:>8.2f} ms{rate:>11}"
            )
        made += ["", "  devices for each layer: how much faster a token is, of the perfect speed-up"]
        made += [
            f"  {n['devices']:>4} {n['speed_up']:>6.2f} ×  {n['of_perfect']:>5.0%}" for n in report["scaling"]
        ]
    if "transfers" in report:
        names = list(report["transfers"][0]["links"])
        made += ["", "  ms to move the cache of a prompt; * where that is longer than computing the prompt"]
        made.append(f"  {'prompt':>8}{'compute':>10}" + "".join(f"{name:>16}" for name in names))
        for one in report["transfers"]:
            cells = "".join(
                f"{f'{ms:,.1f}' + ('*' if ms > one['prefill_ms'] else ' '):>16}"
                for ms in one["links"].values()
            )
            made.append(f"  {one['prompt']:>8}{one['prefill_ms']:>10,.1f}{cells}")
    return made


def _ms(value: float | None) -> str:
    return "no end" if value is None else f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def _said(found: dict[str, Any]) -> str:
    words = [
        f"{name.upper()} " + ", ".join(f"{p} {_ms(v)}" for p, v in found[name].items() if v is not None)
        for name in ("ttft", "tpot", "itl")
        if name in found
    ]
    if "met" in found:
        words.append(f"{found['met']:.0%} keep the service level")
    return "; ".join(words)
