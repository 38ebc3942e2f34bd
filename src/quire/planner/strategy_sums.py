"""Calculators of what a change of a deployment does to latency and throughput, of goodput, and of a rejected draft."""

from __future__ import annotations

from quire.planner import formulas
from quire.planner.figure import Figure, Figures
from quire.planner.memory_sums import kv_token_bytes

_DRAFT_SHARE = 0.05  # of a step of one row of the target, for one draft
_RANKS = 2


def strategies(
    *,
    params_b: float,
    layers: int,
    hidden: int,
    kv_heads: int,
    head_dim: int,
    tflops: float,
    bandwidth_gb_s: float,
    active_b: float = 0.0,
    link_gb_s: float = 450,
    bits: float = 16,
    kv_bits: float = 16,
    tokens: int = 2000,
    batch: int = 8,
    alpha: float = 0.8,
    gamma: int = 4,
    kv_values: int = 0,
) -> Figures:
    """What six changes do to TPOT and to the tokens a second of one device, by the bounds of decoding.

    A step takes the longer of its arithmetic and of reading weights and caches; with two ranks two all-reduces a layer
    come to it. A draft takes a twentieth of a step. Waiting is not in it: `quire plan` simulates that.
    """
    active = active_b or params_b
    cache = kv_token_bytes(layers, kv_heads, head_dim, kv_bits, kv_values) * tokens

    def step(rows: float, sequences: float, width: float = bits, ranks: int = 1) -> float:
        read = params_b * 1e9 * width / 8 + sequences * cache
        flops = 2e9 * active * rows
        alone = max(flops / (tflops * 1e12), read / (bandwidth_gb_s * 1e9)) / ranks
        sent = 2 * layers * formulas.all_reduce_bytes(rows * hidden * 2.0, ranks) if ranks > 1 else 0.0
        return alone + sent / (link_gb_s * 1e9)

    now = step(batch, batch)
    accepted = formulas.accepted_length(alpha, gamma)
    round_time = step(batch * (gamma + 1), batch) + gamma * _DRAFT_SHARE * step(1, 1)
    half = batch / 2 if batch > 1 else 1
    changes = {
        "twice the batch": (step(2 * batch, 2 * batch), 2.0, "requests wait less, and each step is longer"),
        "half the batch": (step(half, half), half / batch, "requests wait more"),
        "8-bit weights": (step(batch, batch, 8), 1.0, "and room for more caches"),
        "tensor parallelism": (step(batch, batch, bits, _RANKS), 1 / _RANKS, f"{_RANKS} devices"),
        "replicas": (now, 1.0, "of one device: of all it grows with their number"),
        "speculation": (round_time / accepted, 1.0, f"{accepted:.3g} tokens a round"),
    }
    yield Figure("time of a step", 1000 * now, "ms", f"{batch} sequences of {tokens} tokens")
    for name, (seconds, tokens_by, remark) in changes.items():
        yield Figure(f"{name}: TPOT", seconds / now, "×", remark)
        yield Figure(f"{name}: tokens/s of a device", tokens_by * now / seconds, "×")


def goodput(*, requests: int, kept: int, seconds: float) -> Figures:
    """Requests a second that kept every objective, and their share of all."""
    if kept > requests:
        raise ValueError(f"kept: {kept} is above requests {requests}")
    yield Figure("goodput", kept / seconds, "requests/s")
    yield Figure("all requests", requests / seconds, "requests/s")
    yield Figure("share", 100 * kept / requests, "%")
    yield Figure("violations", float(requests - kept), "requests")


def rejection(*, target: str, draft: str) -> Figures:
    """The step of speculative sampling (Leviathan et al. 2023): how often a draft is accepted, and from which
    probabilities the token is drawn otherwise: those of the target less those of the draft, token by token.
    """
    p, q = (_chances(name, text) for name, text in (("target", target), ("draft", draft)))
    if len(p) != len(q):
        raise ValueError(f"draft: {len(q)} probabilities for {len(p)} tokens")
    accepted = sum(map(min, p, q))
    left = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    yield Figure("accepted", 100 * accepted, "%")
    for index, chance in enumerate(left):
        yield Figure(f"token {index + 1} otherwise", chance / sum(left) if sum(left) > 1e-12 else 0.0)


def _chances(name: str, text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name}: {text!r} must be numbers between commas") from None
    if min(found) < 0 or abs(sum(found) - 1) > 1e-6:
        raise ValueError(f"{name}: probabilities must be from 0 to 1, and 1 together")
    return found
