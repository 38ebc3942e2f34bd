"""How often a draft is right on the model's own answers to held-out prompts, in the engine, whatever it costs.

python -m tools.default_model.acceptance DIR '{"method": "eagle3", "model": "HEAD"}' --drafts 3 --threads 1

`quire bench speculation` measures what a draft gains: there the engine runs as many drafts as are worth it, often none.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

from quire.bench.engine_run import BenchEngine
from quire.bench.speculation_bench import expected_tokens, recorded, speculation_with
from quire.config.schema import EngineConfig

from .corpus.draw import Split
from .said import prompts

MOST_TOKENS = 128  # of an answer
ROWS = 8


@dataclass(frozen=True, slots=True)
class Acceptance:
    """`rates`: the chance of the draft at each position, if all before it are right. `tokens`: of a sequence a step."""

    rates: list[float]
    tokens: float


def acceptance(
    folder: str, config: str, drafts: int, asked: Sequence[str], threads: int | None
) -> Acceptance:
    """Of so many drafts in every step, greedily."""
    engine_config = EngineConfig().replace(
        speculative_config=config, max_num_seqs=ROWS, threads=threads, max_model_len=1024
    )
    with BenchEngine(folder, engine_config) as engine:
        tokenizer, own = engine.built.model.tokenizer, engine.built.core.speculation
        assert tokenizer is not None
        assert own is not None
        ids = [tokenizer.encode(text) for text in asked]
        ids = [prompt for prompt in ids if len(prompt) + MOST_TOKENS <= 1024]
        stops = set(engine.built.model.facts.generation.eos_token_ids)
        ends = [_length(output, stops) for output in recorded(engine, ids, MOST_TOKENS)]
        speculation = speculation_with(engine, own.proposer, repeat(drafts))
        engine.speculating(speculation).run(ids, ends, concurrency=ROWS)
        reached = [speculation.rows, *speculation.accepted[: drafts - 1]]
        rates = [
            right / tried if tried else 0.0
            for right, tried in zip(speculation.accepted[:drafts], reached, strict=True)
        ]
        return Acceptance(rates, expected_tokens(rates))


def _length(output: Sequence[int], stops: set[int]) -> int:
    """The tokens of an answer, with the one that ends it."""
    return next((at for at, token in enumerate(output, 1) if token in stops), len(output))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("config", help="as for --speculative-config")
    parser.add_argument("--drafts", type=int, default=3, help="in every step")
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    asked = prompts(Split.EVAL, args.conversations)
    found = acceptance(args.folder, args.config, args.drafts, asked, args.threads)
    print(" ".join(f"{rate:.3f}" for rate in found.rates), f"by position, {found.tokens:.2f} tokens a step")


if __name__ == "__main__":
    main()
