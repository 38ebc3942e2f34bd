"""What exchanges of experts are worth where loads are uneven: `python -m benchmarks.skewed_experts [--rounds 3]`.

Two replicas of one thread that share the experts of a model with GLM-4.5's architecture and random weights, whose
routers have corrections that make some experts busier. The engine looks at the loads after 256 steps: requests before
that run with the experts where they were at the start, the same requests 256 steps later with those that have changed
places. A rank waits in each layer for the one with the most tokens, so a step should take less time. Each round starts
the replicas anew. The load of the busiest rank over the mean is what was counted, not what was computed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from quire import AsyncLLM, SamplingParams
from quire.engine.api import EngineStats
from quire.loader import RandomWeights
from quire.loader.safetensors_writer import write_safetensors
from quire.loader.source import Array, TensorInfo
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.records import dataclass
from quire.spec import read_model

EXPERTS = 32
CONFIG: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "vocab_size": 1024, "hidden_size": 512,
    "intermediate_size": 1024, "moe_intermediate_size": 512, "num_hidden_layers": 4, "first_k_dense_replace": 0,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
# What is added to the scores of experts, which random weights spread by 0.1.
SKEWS = {
    "all of the experts of one rank": np.repeat([1.0, 0.0], EXPERTS // 2),
    "the more, the lower their number": np.linspace(0.15, -0.15, EXPERTS),
}
OPTIONS: dict[str, Any] = {
    "data_parallel_size": 2, "enable_expert_parallel": True, "threads": 1, "max_num_seqs": 32, "max_model_len": 128,
    "enable_prefix_caching": False, "memory": 4 * 2**30,
}  # fmt: skip
REQUESTS, TOKENS, WAVES = 64, 40, 3


@dataclass(frozen=True, slots=True)
class Round:
    """Tokens a second, and the load of the busiest rank over the mean, before and after."""

    rates: tuple[float, float]
    loads: tuple[float, float]
    moves: int


def write_model(folder: Path, skew: Array) -> None:
    """A checkpoint whose routers add these to the scores of experts."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    source = RandomWeights(lower(read_model(folder).spec, NumberFormats("bf16", "bf16")).params)
    bits = (skew.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    def numbers(info: TensorInfo) -> list[Array]:
        return [bits if info.name.endswith("correction_bias") else source.read(info.name)]

    write_safetensors(folder / "model.safetensors", [source.info(name) for name in source.names()], numbers)


async def rate(llm: AsyncLLM, waves: int) -> float:
    """Tokens a second of so many times the same requests, as many as both replicas run at once."""
    prompts = [[3 + (row * 7 + k) % 1000 for k in range(8)] for row in range(REQUESTS)]
    began = time.perf_counter()
    for _ in range(waves):
        await llm.generate(prompts, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    return waves * REQUESTS * TOKENS / (time.perf_counter() - began)


async def next_look(llm: AsyncLLM, was: EngineStats) -> EngineStats:
    """What the engine reports once it has looked at the loads again, which requests make it do."""
    while (found := llm._engine.stats).expert_pairs == was.expert_pairs:
        await rate(llm, 1)
    return found


def busiest(later: EngineStats, earlier: EngineStats) -> float:
    """The pairs of (token, expert) of the busiest rank over the mean of ranks, between two reports."""
    before = earlier.expert_pairs or (0,) * len(later.expert_pairs)
    pairs = [now - was for now, was in zip(later.expert_pairs, before, strict=True)]
    return max(pairs) / statistics.fmean(pairs)


async def measure(folder: Path) -> Round:
    """Start the replicas, and measure them before the first look at the loads and after the second one."""
    async with AsyncLLM(folder, **OPTIONS) as llm:
        await rate(llm, 1)
        slow, none = await rate(llm, WAVES), llm._engine.stats
        if none.expert_pairs:
            raise RuntimeError("the loads were looked at before these requests had ended")
        first = await next_look(llm, none)
        moved = await next_look(llm, first)
        fast = await rate(llm, WAVES)
        last = await next_look(llm, moved)
        return Round((slow, fast), (busiest(first, none), busiest(last, moved)), last.expert_moves)


def main() -> None:
    """Print a row for each skew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(
        "| busy are | load before | after | tokens/s before | after | ratio: median | least | most | exchanges |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name, skew in SKEWS.items():
        with tempfile.TemporaryDirectory() as place:
            write_model(Path(place), skew)
            rounds = [asyncio.run(measure(Path(place))) for _ in range(args.rounds)]
        ratios = [each.rates[1] / each.rates[0] for each in rounds]
        loads, rates = (
            [f"{statistics.median(values):{form}}" for values in zip(*pairs, strict=True)]
            for pairs, form in (
                ([each.loads for each in rounds], ".2f"),
                ([each.rates for each in rounds], ",.0f"),
            )
        )
        spread = [f"{found:.2f}" for found in (statistics.median(ratios), min(ratios), max(ratios))]
        moves = f"{statistics.median(each.moves for each in rounds):.0f}"
        print(f"| {name} | {' | '.join([*loads, *rates, *spread, moves])} |", flush=True)


if __name__ == "__main__":
    main()
