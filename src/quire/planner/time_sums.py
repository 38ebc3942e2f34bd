"""Calculators of times and rates, of money, and of chances."""

from __future__ import annotations

from quire.planner import formulas
from quire.planner.figure import Figure, Figures, at_least


def throughput(
    *, params_b: float, bandwidth_gb_s: float, bits: float = 16, batch: int = 1, devices: int = 1
) -> Figures:
    """The bandwidth bound of decoding: a step reads all weights once, whatever the batch."""
    gb = params_b * bits / 8
    rate = formulas.decode_bound(params_b, bits / 8, bandwidth_gb_s * devices, batch)
    yield Figure("weights", gb, "GB")
    yield Figure("time of a step", 1000 * batch / rate, "ms", "at least; TPOT of each sequence")
    yield Figure("tokens", rate, "tokens/s", "at most, before arithmetic and KV reads count")
    yield Figure("words", rate / formulas.TOKENS_PER_WORD, "words/s", "1.3 tokens a word")


def intensity(*, tflops: float, bandwidth_gb_s: float, rows: int = 1, bits: float = 16) -> Figures:
    """FLOPs for each byte of weights, against the ridge of the device: 2 × rows FLOPs for each weight."""
    value, ridge = 2 * rows / (bits / 8), tflops * 1000 / bandwidth_gb_s
    yield Figure("arithmetic intensity", value, "FLOP/byte")
    yield Figure("ridge", ridge, "FLOP/byte")
    yield Figure("bound", "compute" if value >= ridge else "memory")
    yield Figure("rows at the ridge", at_least(ridge * bits / 16), "rows")


def roofline(
    *, inputs: int, outputs: int, tflops: float, bandwidth_gb_s: float, rows: int = 1, bits: float = 16
) -> Figures:
    """One linear layer: time of its arithmetic, of its weights, and the longer one."""
    compute, read = formulas.linear_times_ms(rows, inputs, outputs, bits / 8, tflops, bandwidth_gb_s)
    yield Figure("weights", inputs * outputs * bits / 8 / 1e6, "MB")
    yield Figure("arithmetic", compute * 1000, "µs")
    yield Figure("reading weights", read * 1000, "µs")
    yield Figure("at least", max(compute, read) * 1000, "µs", "compute" if compute >= read else "memory")
    yield Figure("share of compute", min(1.0, compute / read) * 100, "%")


def phases(
    *,
    params_b: float,
    tflops: float,
    bandwidth_gb_s: float,
    prompt: int = 500,
    output: int = 200,
    bits: float = 16,
    devices: int = 1,
    active_b: float = 0.0,
) -> Figures:
    """Prefill and decode of one request: the bounds of both phases, and shares of compute and bandwidth."""
    active = active_b or params_b
    compute, bandwidth = tflops * devices * 1e12, bandwidth_gb_s * devices * 1e9
    read, flops = params_b * 1e9 * bits / 8 / bandwidth, 2 * active * 1e9
    prefill = max(prompt * flops / compute, read)
    step = max(active * 1e9 * bits / 8 / bandwidth, flops / compute)
    yield Figure("prefill (TTFT)", prefill * 1000, "ms", "compute" if prefill > read else "memory")
    yield Figure("a token (TPOT)", step * 1000, "ms", "memory" if step > flops / compute else "compute")
    yield Figure("whole request", (prefill + (output - 1) * step) * 1000, "ms")
    yield Figure("compute in prefill", 100 * prompt * flops / compute / prefill, "%")
    yield Figure("compute in decode", 100 * flops / compute / step, "%")
    yield Figure("bandwidth in prefill", 100 * read / prefill, "%")
    yield Figure("bandwidth in decode", 100 * active / params_b * read / step, "%")
    yield Figure("tokens of a prompt at the crossing", at_least(read * compute / flops), "tokens")


def latency(*, ttft_ms: float, total_ms: float, output: int) -> Figures:
    """Times of one request: TPOT is the time between its first token and its last, for each token after the first."""
    if total_ms < ttft_ms:
        raise ValueError(f"total_ms: {total_ms:g} is below ttft_ms {ttft_ms:g}")
    rest = total_ms - ttft_ms
    if output > 1:
        yield Figure("TPOT", rest / (output - 1), "ms", f"{output - 1} tokens in {rest:g} ms")
    yield Figure("tokens a second", 1000 * output / total_ms, "tokens/s", "of the whole request")


def itl(*, lengths: str, gaps_ms: str) -> Figures:
    """Mean gap between tokens of several requests, beside the mean of their TPOTs: n tokens have n − 1 gaps."""
    try:
        counts, gaps = ([float(part) for part in text.split(",")] for text in (lengths, gaps_ms))
    except ValueError:
        raise ValueError("lengths, gaps_ms: must be numbers between commas") from None
    if len(counts) != len(gaps) or min(counts) < 2:
        raise ValueError("lengths: as many numbers as gaps_ms, each at least 2")
    weights = [count - 1 for count in counts]
    yield Figure("mean ITL", sum(w * gap for w, gap in zip(weights, gaps, strict=True)) / sum(weights), "ms")
    yield Figure("mean TPOT", sum(gaps) / len(gaps), "ms", "each request counts once")


def batching(*, longest: int, output: int, batch: int = 1) -> Figures:
    """Continuous batching beside whole batches, which last as long as their longest answer, and one at a time."""
    yield Figure(
        "over whole batches", longest / output, "×", "at most: the slots of short answers are reused"
    )
    yield Figure(
        "over one at a time",
        float(batch),
        "×",
        "at most: while a step takes as long as one of one row",
    )


def layer(*, hidden: int, width: int, heads: int, kv_heads: int, head_dim: int, layers: int) -> Figures:
    """Parameters of a dense layer: Q, K, V and output projections, and the three of a gated feed-forward."""
    own, shared = 2 * hidden * heads * head_dim, 2 * hidden * kv_heads * head_dim
    yield Figure("attention", (own + shared) / 1e6, "M", f"{2 * own / 1e6:.0f} M with {heads} KV heads")
    yield Figure("feed-forward", 3 * hidden * width / 1e6, "M")
    yield Figure("a layer", (own + shared + 3 * hidden * width) / 1e6, "M")
    yield Figure("all layers", layers * (own + shared + 3 * hidden * width) / 1e9, "B", "without embeddings")


def speculation(*, alpha: float, gamma: int, draft_ms: float, target_ms: float) -> Figures:
    """Tokens of a round, (1 − α^(γ+1)) / (1 − α), and the speed-up, in which drafts cost time."""
    length = formulas.accepted_length(alpha, gamma)
    yield Figure("tokens of a round", length, "tokens")
    yield Figure("time of a round", target_ms + gamma * draft_ms, "ms")
    yield Figure("the same without", length * target_ms, "ms")
    yield Figure("speed-up", formulas.speculative_speedup(alpha, gamma, draft_ms, target_ms), "×")
    best = max(range(33), key=lambda n: formulas.speculative_speedup(alpha, n, draft_ms, target_ms))
    yield Figure(
        "best number of drafts",
        best,
        "",
        f"{formulas.speculative_speedup(alpha, best, draft_ms, target_ms):.2f} ×",
    )


def communication(
    *,
    layers: int,
    hidden: int,
    link_gb_s: float,
    ranks: int = 8,
    rows: int = 1,
    stages: int = 1,
    micro_batches: int = 1,
) -> Figures:
    """Bytes on the wire of a step: two all-reduces a layer (tensor parallel), one send a stage (pipeline)."""
    stream = rows * hidden * 2
    reduced = formulas.all_reduce_bytes(stream, ranks) * 2 * layers
    yield Figure("tensor parallel, of each rank", reduced / 1e6, "MB", f"{2 * layers} all-reduces")
    yield Figure("at the link's rate", reduced / link_gb_s / 1e6, "ms", "without latency")
    yield Figure("pipeline, of each stage", stream / 1e6 if stages > 1 else 0.0, "MB")
    yield Figure("pipeline bubble", 100 * formulas.pipeline_bubble(stages, micro_batches), "%")


def attention_traffic(
    *, heads: int, tokens: int, bandwidth_gb_s: float, layers: int = 1, head_dim: int = 128
) -> Figures:
    """Bytes that attention moves: naive score matrices (written once, read twice) beside what a fused kernel reads."""
    naive = formulas.attention_traffic_bytes(heads, tokens)
    fused = 4.0 * heads * tokens * head_dim * 2  # Q, K, V and the output, once
    yield Figure("a score matrix", tokens * tokens * 2 / 2**20, "MiB")
    yield Figure("naive, of a layer", naive / 1e9, "GB")
    yield Figure("naive, of a layer, at the bandwidth", naive / bandwidth_gb_s / 1e6, "ms")
    yield Figure("naive, of all layers, at the bandwidth", layers * naive / bandwidth_gb_s / 1e6, "ms")
    yield Figure("fused, of a layer", fused / 1e9, "GB", "at least")


def cost(
    *, price: float, tokens_per_second: float, devices: int = 1, watts: float = 0.0, price_kwh: float = 0.0
) -> Figures:
    """Money and energy of tokens."""
    hourly = price * devices + price_kwh * watts * devices / 1000
    million = formulas.cost_per_million(hourly, 1, tokens_per_second)
    yield Figure("an hour", hourly)
    yield Figure("a day", hourly * 24)
    yield Figure("a million tokens", million)
    yield Figure("a thousand tokens", million / 1000)
    if watts:
        yield Figure("energy of a token", watts * devices / tokens_per_second, "J")


def sampling(
    *, probabilities: str, others: int = 128_000, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Figures:
    """Probabilities after temperature, top-k and top-p, in that order, each made to sum to 1 again.

    What the listed ones leave is shared by `others` equally.
    """
    try:
        listed = [float(part) for part in probabilities.split(",")]
    except ValueError:
        raise ValueError(f"probabilities: {probabilities!r} must be numbers between commas") from None
    if min(listed) < 0 or sum(listed) > 1 + 1e-9:
        raise ValueError("probabilities: must be from 0 to 1, and at most 1 together")
    rest = max(0.0, 1 - sum(listed))
    chances, tail = formulas.sharpened(listed, rest, others, temperature)
    order = sorted(range(len(listed)), key=lambda i: (-chances[i], i))
    kept = order[: top_k or len(order)]
    whole = sum(chances[i] for i in kept) + (0.0 if top_k else tail)
    taken: list[int] = []
    for index in kept:
        if taken and sum(chances[i] for i in taken) >= top_p * whole:
            break
        taken.append(index)
    total = sum(chances[i] for i in taken) + (0.0 if top_k or top_p < 1 else tail)
    for index in order:
        yield Figure(f"{listed[index]:g}", chances[index] / total if index in taken else 0.0)
    yield Figure("kept", len(taken), "of the listed ones")
