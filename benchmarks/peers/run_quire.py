"""Quire, in process."""

from __future__ import annotations

import time
from pathlib import Path

import workloads
from runs import KV8


def main() -> None:
    args = workloads.arguments()
    from quire import LLM, SamplingParams

    weights = args.format.removesuffix(KV8)
    llm = LLM(
        args.model, threads=args.threads, quantization={"bf16": "none"}.get(weights, weights),
        kv_cache_dtype="auto" if weights == args.format else "int8", max_model_len=2048,
        enable_prefix_caching=False, progress=False, weight_cache_dir=str(Path(args.model) / "packed"),
    )  # fmt: skip

    def params(count: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)

    class Engine:
        def stream(self, prompt: list[int], count: int) -> list[float]:
            return [time.perf_counter() for _ in llm.stream(prompt, params(count))]

        def batch(self, prompts: list[list[int]], count: int) -> int:
            outputs = llm.generate(prompts, params(count), use_tqdm=False)
            return sum(output.usage.completion_tokens for output in outputs)

    with llm:
        workloads.main(args, Engine())


if __name__ == "__main__":
    main()
