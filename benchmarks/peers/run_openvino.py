"""OpenVINO GenAI's continuous-batching pipeline."""

from __future__ import annotations

import itertools
import time

import workloads

CACHE_GB = 3


def main() -> None:
    args = workloads.arguments()
    workloads.limit_threads(args.threads)
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = 64
    scheduler.max_num_batched_tokens = 2048
    scheduler.cache_size = CACHE_GB
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    properties = {"INFERENCE_NUM_THREADS": args.threads, "NUM_STREAMS": 1}
    pipeline = genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)
    numbers = itertools.count()

    def run(prompts: list[list[int]], count: int) -> tuple[list[float], int]:
        """When each step ended, and the tokens that were made."""
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = count
        config.ignore_eos = True
        config.do_sample = False
        handles = [
            pipeline.add_request(next(numbers), openvino.Tensor(np.array([ids], dtype=np.int64)), config)
            for ids in prompts
        ]
        times = []
        while pipeline.has_non_finished_requests():
            pipeline.step()
            times.append(time.perf_counter())
        return times, sum(len(handle.read_all()[0].generated_ids) for handle in handles)

    class Engine:
        def stream(self, prompt: list[int], count: int) -> list[float]:
            times, made = run([prompt], count)
            return times[-made:]

        def batch(self, prompts: list[list[int]], count: int) -> int:
            return run(prompts, count)[1]

    workloads.main(args, Engine())


if __name__ == "__main__":
    main()
