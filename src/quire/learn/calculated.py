"""Simulations that are sums: both phases, caches, memory, parallelism, prefixes."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from quire.learn.catalog import PRECISIONS, card, size
from quire.learn.scene import Chart, ChartSeries, Flow, Scene, Table
from quire.planner import formulas, memory_sums, time_sums
from quire.planner.figure import Figure
from quire.planner.model_size import ModelSize
from quire.planner.step_bound import RankLayout, StepBound

_PHASES = ("prefill", "decode")


def phases(prompt: int, output: int, model: str, precision: str, device: str) -> Scene:
    _, params = size(model)
    chosen, bits = card(device), PRECISIONS[precision]
    peak = chosen.tflops.get("bf16", 0.0)
    figures = _by_label(
        time_sums.phases(
            params_b=params, tflops=peak, bandwidth_gb_s=chosen.bandwidth_gb_s, prompt=prompt, output=output,
            bits=bits,
        )
    )  # fmt: skip
    ridge = _by_label(time_sums.intensity(tflops=peak, bandwidth_gb_s=chosen.bandwidth_gb_s, bits=bits))
    shares = Chart(
        "Shares of the device", "bars", "phase", "%",
        [ChartSeries(kind, _PHASES, [_number(figures[f"{kind} in {phase}"]) for phase in _PHASES])
         for kind in ("compute", "bandwidth")],
    )  # fmt: skip
    first, token = _number(figures["prefill (TTFT)"]), _number(figures["a token (TPOT)"])
    times = Chart(
        "Time of the request", "bars", "phase", "ms",
        [ChartSeries("time", _PHASES, [first, (output - 1) * token])],
    )  # fmt: skip
    remark = "Lessons print a ridge of 156 for the A100, from 2 TB/s." if chosen.name == "a100" else ""
    return Scene([*figures.values(), ridge["ridge"]], [shares, times], remark=remark)


def kv_growth(tokens: int, model: str, kv_heads: int, batch: int) -> Scene:
    known, params = size(model)
    own = kv_heads in {0, known.kv_heads}
    heads = known.kv_heads if own else kv_heads
    if heads > known.heads:
        raise ValueError(f"kv_heads: {kv_heads} is above the {known.heads} query heads of {model}")
    shape: dict[str, Any] = {
        "layers": known.layers, "kv_heads": heads, "head_dim": known.head_dim,
        "kv_values": known.kv_values if own else 0,
    }  # fmt: skip
    figures = [*memory_sums.kv_cache(**shape, tokens=tokens, batch=batch)]
    token = memory_sums.kv_token_bytes(**shape, kv_bits=16)
    weights = params * 2e9
    figures.append(Figure("weights, FP16", weights / 2**30, "GiB"))
    figures.append(
        Figure(
            "tokens at which the caches equal the weights", int(weights / token), "tokens", "of all sequences"
        )
    )
    longest = max(tokens, 131_072)
    xs = [round(longest * part / 32) for part in range(33)]
    line = ChartSeries("KV cache", xs, [batch * x * token / 2**30 for x in xs])
    chart = Chart(
        "Memory by context", "lines", "tokens of each sequence", "GiB", [line], [("weights", weights / 2**30)]
    )
    return Scene(figures, [chart])


@cache
def _levels() -> list[dict[str, Any]]:
    return list(tomllib.loads(Path(__file__).with_name("hierarchy.toml").read_text())["level"])


def memory_hierarchy(level: str) -> Scene:
    levels = _levels()
    at = next(i for i, one in enumerate(levels) if one["name"] == level)
    one = levels[at]
    figures = [
        Figure("capacity", one["capacity"] / 1e9, "GB")
        if one["capacity"] >= 1e9
        else Figure("capacity", one["capacity"] / 2**20, "MiB"),
        Figure("bandwidth", one["bandwidth"], "GB/s", one["source"]),
        Figure("latency", f"{one['latency']} ns"),
        Figure("time to read 1 GB", 1000 / one["bandwidth"], "ms"),
    ]
    if at + 1 < len(levels):
        below = levels[at + 1]
        figures.append(
            Figure(
                "times as fast as the next level", one["bandwidth"] / below["bandwidth"], "×", below["name"]
            )
        )
    table = Table(
        "An H100 and its host", ("level", "GB/s", "1 GB takes", "to the next level"),
        [(each["name"], f"{each['bandwidth']:,}", f"{1000 / each['bandwidth']:.3g} ms",
          f"{each['bandwidth'] / below['bandwidth']:.1f} ×" if below else "")
         for each, below in zip(levels, [*levels[1:], None], strict=True)],
    )  # fmt: skip
    chart = Chart(
        "Time to read 1 GB", "bars", "level", "ms",
        [ChartSeries("time", [each["name"] for each in levels], [1000 / each["bandwidth"] for each in levels])],
    )  # fmt: skip
    return Scene(
        figures, [chart], tables=[table],
        remark="Levels are not ten times apart, as is often said: on the device about three, to the host fifty.",
    )  # fmt: skip


def memory_calculator(model: str, precision: str, device: str) -> Scene:
    known, params = size(model)
    chosen = card(device)
    shape: dict[str, Any] = {
        "layers": known.layers, "kv_heads": known.kv_heads, "head_dim": known.head_dim, "kv_values": known.kv_values,
    }  # fmt: skip
    figures = _by_label(memory_sums.weights(params_b=params, bits=PRECISIONS[precision]))
    room = memory_sums.context(
        memory_gb=chosen.memory_gb, params_b=params, bits=PRECISIONS[precision], tokens=4096, **shape
    )
    chart = Chart(
        "Weights by precision", "bars", "precision", "GB",
        [ChartSeries("weights", [*PRECISIONS], [params * bits / 8 for bits in PRECISIONS.values()])],
        [(chosen.title, chosen.memory_gb)],
    )  # fmt: skip
    remark = (
        "2 bits are an experiment: most models lose much of what they know." if precision == "INT2" else ""
    )
    return Scene([figures["weights"], *room], [chart], remark=remark)


STRATEGIES = ("tensor", "pipeline", "data", "expert")


def parallelism(strategy: str, devices: int, copies: int, model: str, device: str) -> Scene:
    known, params = size(model)
    weights, chosen = params * 2, card(device)
    _check_strategy(strategy, devices, model, known)
    split = {"data": 0.0, "expert": 2 * known.expert_b}.get(strategy, weights)  # GB
    each = weights - split + split / devices
    layout = {
        "tensor": RankLayout(tensor=devices), "pipeline": RankLayout(pipeline=devices),
        "expert": RankLayout(expert=devices), "data": RankLayout(),
    }[strategy]  # fmt: skip
    # What a plan counts: `quire plan` takes the same.
    sent = StepBound(model=known, device=chosen, layout=layout).exchanged_bytes(1.0)
    said = {
        "tensor": [
            Figure("query heads of a device", known.heads // devices),
            Figure("slice of an up projection", known.hidden * (known.width // devices) * 2 / 1e6, "MB",
                   f"of {known.hidden * known.width * 2 / 1e6:.1f} MB"),
        ],
        "pipeline": [
            Figure("layers of a stage", -(-known.layers // devices), "", "the largest"),
            Figure("pipeline bubble", 100 * formulas.pipeline_bubble(devices, 4), "%", "with four micro-batches"),
        ],
        "data": [],
        "expert": [
            Figure("experts of a device", known.experts // devices, "", f"in each layer, of {known.experts}"),
        ],
    }[strategy]  # fmt: skip
    replicas = copies * (devices if strategy == "data" else 1)
    table = Table(
        "Devices of a copy" if copies > 1 else "Devices", ("device", "weights", "holds"),
        [(str(rank), f"{each:.1f} GB", _part(strategy, rank, devices, known)) for rank in range(devices)],
    )  # fmt: skip
    figures = [
        Figure("weights of a device", each, "GB"),
        Figure("fits", each <= chosen.memory_gb, "", f"{chosen.memory_gb:g} GB, without caches"),
        Figure("step at the memory bandwidth", 1000 * each / chosen.bandwidth_gb_s, "ms", "one sequence"),
        *said,
        Figure("sent by a device in a step", sum(sent.values()) / 1e6, "MB", _EXCHANGES[strategy]),
        Figure("independent replicas", replicas, "", f"on {devices * copies} devices"),
    ]
    return Scene(figures, tables=[table], flows=[_sent(strategy, devices, sum(sent.values()), copies)])


def _sent(strategy: str, devices: int, sent: float, copies: int) -> Flow:
    """Who sends what a device sends in a step: tensor parallelism to the next in a ring, as all-reduces do; pipelines
    to the next stage; expert parallelism to all others, an equal part to each."""
    pairs = {
        "tensor": [(rank, (rank + 1) % devices) for rank in range(devices if devices > 1 else 0)],
        "pipeline": [(rank, rank + 1) for rank in range(devices - 1)],
        "expert": [(a, b) for a in range(devices) for b in range(devices) if a != b],
        "data": [],
    }[strategy]
    each = sent / max(1, devices - 1) if strategy == "expert" else sent
    label = Figure("", each / 1e6, "MB").shown()
    title = "What devices of a copy send in a step" if copies > 1 else "What devices send in a step"
    return Flow(title, [f"device {rank}" for rank in range(devices)], [(a, b, label) for a, b in pairs])


_EXCHANGES = {
    "tensor": "two all-reduces a layer",
    "pipeline": "to the next stage",
    "data": "copies need nothing of each other",
    "expert": "two all-to-alls a layer, of the tokens routed away",
}


def _check_strategy(strategy: str, devices: int, model: str, known: ModelSize) -> None:
    if strategy == "expert" and not known.experts:
        raise ValueError(f"strategy: {model} has no experts; choose a mixture, such as Mixtral 8x7B")
    if strategy == "tensor" and known.heads % devices:
        raise ValueError(f"devices: {known.heads} heads of {model} do not divide by {devices}")
    if strategy == "expert" and known.experts % devices:
        raise ValueError(f"devices: {known.experts} experts of {model} do not divide by {devices}")
    if strategy == "pipeline" and devices > known.layers:
        raise ValueError(f"devices: {model} has {known.layers} layers for {devices} stages")


def _part(strategy: str, rank: int, devices: int, known: ModelSize) -> str:
    if strategy == "data":
        return "the whole model"
    what = {"tensor": "heads", "pipeline": "layers", "expert": "experts"}[strategy]
    count = int(getattr(known, what))
    first, after = count * rank // devices, count * (rank + 1) // devices
    rest = {"tensor": ", a slice of every matrix", "pipeline": "", "expert": ", and all the rest"}[strategy]
    return f"{what} {first} to {after - 1}{rest}"


def prefix_timeline(prefix: int, new: int, cached: bool, ms_per_token: float) -> Scene:
    figures = [*memory_sums.prefix_cache(prefix=prefix, new=new, ms_per_token=ms_per_token)]
    miss, hit = (_number(_by_label(figures)[name]) for name in ("without", "with"))
    chart = Chart(
        "Time to the first token", "bars", "request", "ms",
        [ChartSeries("computed", ("miss", "hit"), [miss, hit])],
    )  # fmt: skip
    return Scene([Figure("time to the first token", hit if cached else miss, "ms"), *figures], [chart])


def accepted(alpha: float, gamma: int, draft_ms: float, target_ms: float) -> tuple[list[Figure], Chart]:
    """The sums of speculation, and the speed-up by the number of drafts."""
    counts = range(17)
    line = [formulas.speculative_speedup(alpha, count, draft_ms, target_ms) for count in counts]
    chart = Chart(
        "Speed-up by drafts",
        "lines",
        "drafts of a round",
        "×",
        [ChartSeries("bound", [*counts], line)],
        [("none", 1.0)],
    )
    return [*time_sums.speculation(alpha=alpha, gamma=gamma, draft_ms=draft_ms, target_ms=target_ms)], chart


def _by_label(figures: Iterable[Figure]) -> dict[str, Figure]:
    return {one.label: one for one in figures}


def _number(figure: Figure) -> float:
    return float(figure.value)


def level_names() -> tuple[str, ...]:
    """The levels of memory, from the fastest on."""
    return tuple(one["name"] for one in _levels())


def sram_kib() -> float:
    """Shared memory of one SM, from the table of levels."""
    return float(_levels()[1]["capacity"] / 132 / 1024)
