"""What each technique of serving gives for a model, devices and a load: computed on these numbers.

The effects come from the formulas of the planner and from simulations with the real scheduler; each says which.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from quire.bench.request_metrics import Summary, summarize
from quire.bench.simulated_server import Arrival, SimulatedServer
from quire.core.scheduler_config import SchedulerConfig
from quire.planner.deployment import LoadDemand, steady
from quire.planner.devices import links
from quire.planner.formulas import accepted_length, attention_traffic_bytes
from quire.planner.step_bound import RankLayout, StepBound
from quire.records import dataclass
from quire.routing.transfer import transfer_seconds

_BLOCK, _REQUESTS, _LONGEST = 16, 120, 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class TechniqueEffect:
    """`factor`: how many times better (above 1) or worse; None where the technique does not apply."""

    name: str
    factor: float | None
    says: str
    source: str


def effects(bound: StepBound, demand: LoadDemand, sequences: int, shared: int) -> Iterator[TechniqueEffect]:
    """The twelve techniques, for one replica with room for `sequences`; `shared` tokens begin every prompt."""
    yield _batching(bound, demand, sequences)
    naive = attention_traffic_bytes(bound.model.heads, demand.prompt)
    fused = 4.0 * bound.model.heads * demand.prompt * bound.model.head_dim * 2
    yield TechniqueEffect(
        name="FlashAttention", factor=naive / fused, source="formula",
        says=f"a layer moves {fused / 1e9:.3g} GB for a prompt of {demand.prompt} tokens, not {naive / 1e9:.3g} GB",
    )  # fmt: skip
    whole = max(_LONGEST, demand.prompt + demand.output)
    paged = -(-int(demand.context) // _BLOCK) * _BLOCK
    yield TechniqueEffect(
        name="PagedAttention", factor=whole / paged, source="formula",
        says=f"a sequence holds {paged} tokens of blocks on average, not {whole} set aside",
    )  # fmt: skip
    batch = max(1.0, min(float(sequences), steady(bound, demand, demand.rate, sequences).batch))
    yield _speculation(bound, demand, batch)
    step = bound.decode(batch, demand.context)
    narrow = replace(bound, bits=bound.bits / 2).decode(batch, demand.context)
    yield TechniqueEffect(
        name="quantization", factor=step / narrow, source="bound",
        says=f"{bound.bits / 2:g} bits: a step of {batch:.0f} takes {1e3 * narrow:.2f} ms, not {1e3 * step:.2f}",
    )  # fmt: skip
    yield from _parallel(bound, demand, batch, step)
    yield _prefixes(bound, demand, sequences, shared)
    prompt = bound.prefill(demand.prompt)
    size = bound.token_bytes * bound.layout.devices * demand.prompt
    moved = transfer_seconds(size, links()["infiniband-ndr"])
    yield TechniqueEffect(
        name="PD disaggregation", factor=prompt / moved, source="bound",
        says=f"streams no longer wait {1e3 * prompt:.1f} ms for a prompt; its cache moves in {1e3 * moved:.1f} ms",
    )  # fmt: skip
    back = transfer_seconds(size, links()["pcie5-x16"])
    yield TechniqueEffect(
        name="KV offloading", factor=prompt / back, source="bound",
        says=f"a prompt that gave way comes back in {1e3 * back:.1f} ms, not computed again in {1e3 * prompt:.1f}",
    )  # fmt: skip


def _served(bound: StepBound, arrivals: list[Arrival], sequences: int, *, wait: float | None = None,
            caching: bool = False) -> Summary:  # fmt: skip
    longest = max(len(one.prompt) + one.output for one in arrivals) + 1
    config = SchedulerConfig(
        num_blocks=max(2, min(1 << 20, sequences * -(-longest // _BLOCK))), block_size=_BLOCK,
        max_num_seqs=max(1, min(64, sequences)), max_model_len=longest, enable_prefix_caching=caching,
    )  # fmt: skip
    server = SimulatedServer(config, bound.seconds, noise=0.0, batch_wait=wait)
    return summarize(server.run(arrivals).records)


def _batching(bound: StepBound, demand: LoadDemand, sequences: int) -> TechniqueEffect:
    rng = random.Random(1)
    lengths = [max(1, int(rng.expovariate(1 / demand.output))) for _ in range(_REQUESTS)]
    prompt = min(demand.prompt, 256)
    made = [Arrival(0.0, range(i * prompt + 1, (i + 1) * prompt + 1), n) for i, n in enumerate(lengths)]
    together = _served(bound, made, sequences).metrics()["output_token_rate"].value or 0.0
    whole = _served(bound, made, sequences, wait=0.0).metrics()["output_token_rate"].value or 1.0
    return TechniqueEffect(
        name="continuous batching", factor=together / whole, source="simulated",
        says=f"{together:,.0f} tokens/s, not {whole:,.0f} in whole batches, for answers of exponential length",
    )  # fmt: skip


def speculation_gain(bound: StepBound, demand: LoadDemand, batch: float) -> float:
    """Tokens a second with 4 drafts, of which 7 in 10 are right and each costs a 20th of a step, over those without."""
    step = bound.decode(batch, demand.context)
    checked = bound.seconds((1, batch, 0, batch * demand.context, 0, 0, 0, 4 * batch))
    return accepted_length(0.7, 4) * step / (checked + 4 * step / 20)


def _speculation(bound: StepBound, demand: LoadDemand, batch: float) -> TechniqueEffect:
    return TechniqueEffect(
        name="speculative decoding", factor=speculation_gain(bound, demand, batch), source="bound",
        says=f"4 drafts, 7 in 10 right, a 20th of the cost each, at {batch:.0f} sequences",
    )  # fmt: skip


def _parallel(bound: StepBound, demand: LoadDemand, batch: float, step: float) -> Iterator[TechniqueEffect]:
    model, layout = bound.model, bound.layout
    twice = RankLayout(2 * layout.tensor, layout.pipeline)
    if model.heads % twice.tensor:
        yield TechniqueEffect(
            name="tensor parallelism", factor=None, says="heads cannot be cut further", source="bound"
        )
    else:
        faster = replace(bound, layout=twice).decode(batch, demand.context)
        yield TechniqueEffect(
            name="tensor parallelism", factor=step / faster, source="bound",
            says=f"twice the ranks: a step takes {1e3 * faster:.2f} ms, not {1e3 * step:.2f}",
        )  # fmt: skip
    staged = replace(bound, layout=RankLayout(layout.tensor, 2 * layout.pipeline))
    yield TechniqueEffect(
        name="pipeline parallelism", factor=bound.weight_bytes / staged.weight_bytes, source="bound",
        says=f"twice the stages: {staged.weight_bytes / 1e9:.1f} GB of weights on each device; a step of "
        f"{batch:.0f} takes {1e3 * staged.decode(batch, demand.context):.2f} ms",
    )  # fmt: skip
    yield TechniqueEffect(
        name="data parallelism",
        factor=2.0,
        source="bound",
        says="a second replica carries as much again, for as much",
    )
    if not model.experts:
        yield TechniqueEffect(
            name="expert parallelism", factor=None, says="the model has no experts", source="bound"
        )
        return
    spread = replace(bound, layout=RankLayout(1, 1, min(8, model.experts)))
    yield TechniqueEffect(
        name="expert parallelism", factor=bound.weight_bytes / spread.weight_bytes, source="bound",
        says=f"over {spread.layout.expert} devices {spread.weight_bytes / 1e9:.1f} GB of weights on each",
    )  # fmt: skip


def _prefixes(bound: StepBound, demand: LoadDemand, sequences: int, shared: int) -> TechniqueEffect:
    if not shared:
        return TechniqueEffect(
            name="prefix caching",
            factor=None,
            source="simulated",
            says="no shared start of prompts was given",
        )
    start = list(range(1, min(shared, demand.prompt - 1) + 1))
    gap = 2 * (bound.prefill(demand.prompt) + demand.output * bound.decode(1, demand.context))
    own = demand.prompt - len(start)
    made = [
        Arrival(i * gap, [*start, *range(10**6 + i * own, 10**6 + (i + 1) * own)], demand.output)
        for i in range(20)
    ]
    first = [
        _served(bound, made, sequences, caching=on).distributions["ttft"].at(50.0) or 0.0
        for on in (False, True)
    ]
    return TechniqueEffect(
        name="prefix caching", factor=first[0] / first[1], source="simulated",
        says=f"TTFT {first[1]:.1f} ms, not {first[0]:.1f}, with {len(start)} of {demand.prompt} tokens shared",
    )  # fmt: skip
