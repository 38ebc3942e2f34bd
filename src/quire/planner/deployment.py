"""How to spread a model over devices: which layouts fit, which of them is best, and how many replicas a load needs.

The order is that of the decision tree: does it fit one device; else tensor parallelism within a host; else pipeline
stages across hosts; then replicas with what is left; experts of a mixture over all ranks. Bounds decide, so what is
ruled out is out; what is chosen is to be simulated and measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from quire.objectives import SLO
from quire.planner import formulas
from quire.planner.devices import Device
from quire.planner.model_size import ModelSize
from quire.planner.step_bound import RankLayout, StepBound, decoding
from quire.records import dataclass

RESERVE = 0.1  # of the memory of a device, for activations, kernels and fragmentation
_BUSY = 0.9  # of the time of a replica


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadDemand:
    """A load: requests a second, tokens of prompt and output, and what is promised."""

    rate: float = 0.0
    prompt: int = 2000
    output: int = 200
    slo: SLO | None = None
    users: int = 0  # at a time, beside those that the rate makes

    @property
    def context(self) -> float:
        """Tokens that a sequence has on average while it is decoded."""
        return self.prompt + self.output / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOption:
    """A layout of one replica, and what it gives. Times in seconds; `batch` sequences run at a time under the load."""

    bound: StepBound
    replicas: int
    fits: bool
    sequences: int
    batch: float = 0.0
    tpot: float = 0.0
    ttft: float = 0.0
    busy: float = 0.0
    capacity: float = 0.0  # requests a second of one replica
    limit: str = ""  # memory, bandwidth, compute, links: what more replicas would be for
    reason: str = ""

    @property
    def layout(self) -> RankLayout:
        return self.bound.layout

    @property
    def devices(self) -> int:
        return self.layout.devices * self.replicas


def layouts(model: ModelSize, count: int, per_host: int) -> Iterator[RankLayout]:
    """Every division of at most `count` devices: tensor ranks divide the heads, stages the layers at most."""
    for tensor in _powers(count):
        if model.heads % tensor:
            continue
        for pipeline in (stages for stages in range(1, count // tensor + 1) if stages <= model.layers):
            if pipeline & (pipeline - 1) and pipeline * per_host != count:
                continue
            yield RankLayout(tensor, pipeline)
    if model.experts:
        for ranks in _powers(count)[1:]:
            if model.experts % ranks == 0:
                yield RankLayout(1, 1, ranks)


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def judged(bound: StepBound, demand: LoadDemand, count: int, reserve: float = RESERVE) -> LayoutOption:
    """What a layout gives under a load, on at most `count` devices."""
    layout, model = bound.layout, bound.model
    reserve_gb = reserve * bound.device.memory_gb
    sequences = bound.sequences(demand.prompt + demand.output, reserve_gb)
    replicas = count // max(layout.devices, layout.expert)
    if layout.expert > 1:
        replicas = count // layout.expert * layout.expert  # each rank of the group serves requests of its own
    fits = sequences > 0 and replicas > 0
    if not fits:
        spare = bound.room(reserve_gb)
        what = f"{bound.weight_bytes / 1e9:.1f} GB of weights on each device of {bound.device.memory_gb:g} GB"
        if not replicas:
            what = f"{max(layout.devices, layout.expert)} devices are needed, {count} are there"
        elif spare > 0:
            what += f" leave {spare / 1e9:.1f} GB for caches"
        return LayoutOption(
            bound=bound, replicas=replicas, fits=False, sequences=0, reason=f"does not fit: {what}"
        )
    rate = demand.rate / replicas
    found = steady(bound, demand, rate, sequences)
    reason = f"{bound.weight_bytes / 1e9:.1f} GB of weights on each device, caches of {sequences} sequences"
    if layout.tensor > bound.per_host:
        reason += f"; {2 * model.layers} all-reduces a step go between hosts"
    return replace(found, replicas=replicas, reason=reason)


def steady(bound: StepBound, demand: LoadDemand, rate: float, sequences: int) -> LayoutOption:
    """One replica under `rate` requests a second: the batch that Little's law gives, and what times follow."""
    prefill = bound.prefill(demand.prompt)
    capacity, limit = _most(bound, demand, prefill, sequences)
    users = max(1.0, float(demand.users))
    batch = min(float(sequences), users) if not rate else 1.0
    for _ in range(60 if rate else 0):
        free = max(1e-3, 1 - rate * prefill)
        step = bound.decode(batch, demand.context) / free
        batch = min(float(sequences), max(1.0, 0.5 * batch + 0.5 * rate * demand.output * step))
    busy = min(1.0, rate * prefill)
    free = max(1e-3, 1 - busy)
    step = bound.decode(batch, demand.context)
    used = rate / capacity if capacity else 0.0
    # the wait for prompts that came before: M/D/1 with the share of prefill
    wait = busy * prefill / (2 * free) if used < 1 else float("inf")
    return LayoutOption(
        bound=bound, replicas=1, fits=True, sequences=sequences, batch=batch, tpot=step / free,
        ttft=wait + prefill + step / 2, busy=used, capacity=capacity, limit=limit if used >= _BUSY else _bound_of(
            bound, batch, demand.context),
    )  # fmt: skip


def _most(bound: StepBound, demand: LoadDemand, prefill: float, sequences: int) -> tuple[float, str]:
    """Requests a second at which a replica is full, the batch then, and what limits it."""
    best, why = 0.0, "memory"
    batch = 1.0
    slo = demand.slo
    limit = slo.tpot / 1e3 if slo is not None and slo.tpot else float("inf")
    while batch <= sequences:
        step = bound.decode(batch, demand.context)
        # tokens of a batch, with its prompts in between: each request takes a prefill and output steps of its share
        rate = 1 / (prefill + demand.output * step / batch)
        if step / max(1e-9, 1 - rate * prefill) > limit:
            why = "service level"
            break
        if rate <= best * 1.001:
            why = _bound_of(bound, batch, demand.context)
            break
        best = rate
        batch = batch * 2 if batch * 2 <= sequences or batch == sequences else float(sequences)
    return best, why


def _bound_of(bound: StepBound, batch: float, context: float) -> str:
    compute, memory, linked = bound.parts(decoding(batch, context))
    if linked > max(compute, memory):
        return "links"
    return "compute" if compute > memory else "bandwidth"


def meets(option: LayoutOption, demand: LoadDemand) -> bool:
    """Whether a layout carries a load and its bounds keep the service level."""
    slo = demand.slo
    if not option.fits or option.busy > _BUSY or demand.users > option.sequences * option.replicas:
        return False
    if slo is None:
        return True
    return not (
        (slo.ttft and 1e3 * option.ttft > slo.ttft)
        or (slo.tpot and 1e3 * option.tpot > slo.tpot)
        or (slo.e2el and 1e3 * (option.ttft + demand.output * option.tpot) > slo.e2el)
    )


def fewest(bound: StepBound, demand: LoadDemand, most: int, reserve: float = RESERVE) -> LayoutOption:
    """The fewest replicas of a layout that carry a load on `most` devices; all of them if none does."""
    size = max(bound.layout.devices, bound.layout.expert)
    options = (judged(bound, demand, size * n, reserve) for n in range(1, max(1, most // size) + 1))
    last = None
    for option in options:
        last = option
        if not option.fits or meets(option, demand):
            break
    assert last is not None
    return last


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The choice and its steps in words, with the other options; None if nothing fits."""

    chosen: LayoutOption | None
    steps: list[str]
    options: list[LayoutOption]


def deploy(
    model: ModelSize, device: Device, count: int, demand: LoadDemand, *, bits: tuple[float, ...] = (16,),
    kv_bits: float = 16, per_host: int = 8, reserve: float = RESERVE,
) -> Deployment:  # fmt: skip
    """Choose a precision and a layout on at most `count` devices. Raises ValueError for a device without arithmetic.

    The first precision that carries the load wins, the highest first; of its layouts the one with the fewest tensor
    ranks and stages that fits and keeps the service level, then of those the one that needs the fewest devices.
    """
    options, steps = [], []
    chosen: LayoutOption | None = None
    for width in bits:
        bounds = [
            StepBound(model=model, device=device, layout=one, bits=width, kv_bits=kv_bits, per_host=per_host)
            for one in layouts(model, count, per_host)
        ]
        own = [fewest(one, demand, count, reserve) for one in bounds]
        options += own
        fitting = [one for one in own if one.fits and one.layout.tensor <= per_host]
        if not fitting:
            gb = model.params_b * width / 8
            steps.append(
                f"{width:g} bits: {gb:.0f} GB of weights do not fit {count} × {device.title} in any layout"
            )
            continue
        good = [one for one in fitting if meets(one, demand)]
        steps += _said(model, device, fitting, per_host, width)
        best = min(
            good or fitting,
            key=lambda one: (not good and -one.capacity * one.replicas, one.devices, one.tpot),
        )
        if good:
            chosen = best
            steps.append(f"{best.layout}, {best.replicas} ×: the fewest devices that carry the load")
            break
        if chosen is None or best.capacity * best.replicas > chosen.capacity * chosen.replicas:
            chosen = best
        steps.append(
            f"{width:g} bits: no layout keeps the service level at this load; {_missed(best, demand)}"
        )
    return Deployment(chosen=chosen, steps=steps, options=options)


def _said(
    model: ModelSize, device: Device, fitting: list[LayoutOption], per_host: int, width: float
) -> Iterator[str]:
    gb = model.params_b * width / 8
    least = min(fitting, key=lambda one: (one.layout.devices, one.layout.pipeline))
    if least.layout.devices == 1 and least.layout.expert == 1:
        yield f"{width:g} bits: {gb:.1f} GB of weights fit one {device.title}: neither TP nor PP is needed"
    elif least.layout.expert > 1:
        yield f"{width:g} bits: {gb:.1f} GB of weights fit when experts are spread over {least.layout.expert} devices"
    elif least.layout.pipeline == 1:
        yield (
            f"{width:g} bits: {gb:.1f} GB of weights do not fit one {device.title}: "
            f"TP={least.layout.tensor} within a host is the least that fits"
        )
    else:
        yield (
            f"{width:g} bits: {gb:.1f} GB of weights do not fit one host of {per_host} × {device.title}: "
            f"TP within hosts, PP={least.layout.pipeline} across them"
        )


def _missed(option: LayoutOption, demand: LoadDemand) -> str:
    words = []
    if option.busy > _BUSY:
        words.append(f"{option.busy:.0%} of what it can carry")
    slo = demand.slo
    if slo is not None and slo.tpot and 1e3 * option.tpot > slo.tpot:
        words.append(f"TPOT at least {1e3 * option.tpot:.1f} ms")
    if slo is not None and slo.ttft and 1e3 * option.ttft > slo.ttft:
        words.append(f"TTFT at least {1e3 * option.ttft:.0f} ms")
    return f"best is {option.layout} × {option.replicas}: " + (
        ", ".join(words) or "too few places for its users"
    )


def scaling(
    model: ModelSize, device: Device, demand: LoadDemand, most: int, bits: float, per_host: int
) -> Iterator[tuple[int, float, float]]:
    """Devices that share each layer, how much faster a step of one sequence is than with the fewest, and the share of
    the perfect speed-up: less than linear, as all-reduces do not shrink."""
    first: tuple[int, float] | None = None
    for tensor in _powers(most):
        if model.heads % tensor:
            continue
        bound = StepBound(model=model, device=device, layout=RankLayout(tensor), bits=bits, per_host=per_host)
        step = bound.decode(1, demand.context)
        if first is None:
            first = tensor, step
        yield tensor, first[1] / step, first[1] / step / (tensor / first[0])


def comparison(
    model: ModelSize, device: Device, demand: LoadDemand, count: int, bits: float, per_host: int
) -> list[dict[str, object]]:
    """The same devices as replicas, tensor ranks, stages or holders of experts, side by side."""
    kinds = {"data": RankLayout(), "tensor": RankLayout(count), "pipeline": RankLayout(1, count)}
    if model.experts and model.experts % count == 0:
        kinds["expert"] = RankLayout(1, 1, count)
    found: list[dict[str, object]] = []
    for kind, layout in kinds.items():
        bound = StepBound(model=model, device=device, layout=layout, bits=bits, per_host=per_host)
        option = judged(bound, demand, count)
        batch = min(option.sequences * max(1, option.replicas), 64) or 64
        own = batch / max(1, option.replicas)
        step = bound.decode(own, demand.context)
        found.append({
            "kind": kind, "fits": option.fits, "weights_gb": bound.weight_bytes / 1e9,
            "sent_mb": sum(bound.exchanged_bytes(own).values()) / 1e6, "step_ms": 1e3 * step,
            "tokens_per_second": batch / step if option.fits else 0.0,
        })  # fmt: skip
    return found


def money(option: LayoutOption, demand: LoadDemand, price: float, price_kwh: float = 0.0) -> float | None:
    """Of a million output tokens under the load, or at capacity without a rate; None without a price."""
    hourly = price + price_kwh * option.bound.device.watts / 1000
    rate = (demand.rate or option.capacity * option.replicas) * demand.output
    return formulas.cost_per_million(hourly, option.devices, rate) if hourly and rate else None
