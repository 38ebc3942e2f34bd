"""What it costs to time every op of a step: python -m benchmarks.stage_times [MODEL] [--rounds 12]

The same requests with `profile` on and off in turn, on the engine of `quire bench`: seconds on over seconds off.
"""

from __future__ import annotations

import argparse
import statistics

from quire.bench.engine_run import BenchEngine, Prompts
from quire.config.schema import EngineConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="quire-mini")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--output", type=int, default=128, help="tokens of each answer")
    asked = parser.parse_args()
    print(
        "| requests | ms of a step, not timed | timed, over that: median | least | most |\n|--:|--:|--:|--:|--:|"
    )
    with BenchEngine(asked.model, EngineConfig(enable_prefix_caching=False), tokenizer=False) as engine:
        prompts, executor = Prompts(engine.program.vocab, 0), engine.built.executor
        for rows in (1, 8, 32):
            made, lengths = prompts.make(rows, 64), [asked.output] * rows
            engine.run(made, lengths)
            plain, ratios = [], []
            for _ in range(asked.rounds):
                seconds = []
                for on in (False, True):
                    executor.profile(on)
                    run = engine.run(made, lengths)
                    seconds.append(statistics.median(step.wall for step in run.steps))
                executor.profile(False)
                plain.append(1e3 * seconds[0])
                ratios.append(seconds[1] / seconds[0])
            figures = [statistics.median(ratios), min(ratios), max(ratios)]
            print(
                f"| {rows} | {statistics.median(plain):.3f} | {' | '.join(f'{one:.3f}' for one in figures)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
