"""One engine with and without drafts at one stream, in its own environment: a JSON line for each run.

    python run_speculation.py ENGINE --target MODEL --draft MODEL --format F --threads N --runs N --output N

ENGINE is quire, llama.cpp (its server, from LLAMA_CPP_BIN), transformers or vllm (drafts by n-grams: its wheel for
processors has no draft models). `rate` is (n - 1) / (time of the last token - time of the first); every engine gets the
same prompts. `drafts` is "off", "default" or the number that the engine was told; "ngram" on Quire is prompt lookup.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import workloads

Stream = Callable[[list[int], int], tuple[float, float]]  # prompt, tokens -> rate, acceptance (0: not known)
COUNT = 4  # drafts, where they are told


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--format", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=int, default=128)
    args = parser.parse_args()
    workloads.limit_threads(args.threads)
    for drafts in ("off", "default", str(COUNT), *(["ngram"] if args.engine == "quire" else [])):
        with ENGINES[args.engine](args, drafts) as stream:
            source = random.Random(0)
            for number in range(-1, args.runs):  # the first one warms up
                rate, acceptance = stream(workloads.prompt(workloads.PROMPT, source), args.output)
                if number >= 0:
                    row = {"engine": args.engine, "format": args.format, "drafts": drafts, "rate": rate}
                    print(json.dumps({**row, "acceptance": acceptance}), flush=True)


def rate_of(times: list[float], count: int) -> float:
    return (count - 1) / (times[-1] - times[0])


@contextmanager
def quire(args: argparse.Namespace, drafts: str) -> Iterator[Stream]:
    from quire import LLM, SamplingParams

    config: dict[str, Any] = {"method": "draft_model", "model": args.draft}
    if drafts.isdigit():
        config["num_speculative_tokens"] = int(drafts)
    elif drafts == "ngram":
        config = {"method": "ngram"}
    with LLM(
        args.target, threads=args.threads, quantization={"bf16": "none"}.get(args.format, args.format),
        max_model_len=2048, enable_prefix_caching=False, progress=False,
        weight_cache_dir=str(Path(args.target) / "packed"), speculative_config=None if drafts == "off" else config,
    ) as llm:  # fmt: skip

        def stream(prompt: list[int], count: int) -> tuple[float, float]:
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            made = llm.stream(prompt, params)
            rate = rate_of([time.perf_counter() for _ in made], count)
            usage = made.output.usage
            return rate, usage.accepted_draft_tokens / max(usage.draft_tokens, 1)

        yield stream


@contextmanager
def llama_cpp(args: argparse.Namespace, drafts: str) -> Iterator[Stream]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(Path(os.environ["LLAMA_CPP_BIN"]) / "llama-server"), "-m", args.target, "-t", str(args.threads),
        "-c", "2048", "-np", "1", "--port", str(port),
    ]  # fmt: skip
    if drafts != "off":
        command += ["-md", args.draft, "-td", str(args.threads), "--spec-type", "draft-simple"]
    if drafts.isdigit():
        command += ["--spec-draft-n-max", drafts]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    base = f"http://127.0.0.1:{port}"

    def stream(prompt: list[int], count: int) -> tuple[float, float]:
        body = {
            "prompt": prompt,
            "n_predict": count,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        request = urllib.request.Request(
            f"{base}/completion", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            timings = json.load(answer)["timings"]
        drafted = timings.get("draft_n", 0)
        return timings["predicted_per_second"], timings["draft_n_accepted"] / drafted if drafted else 0.0

    try:
        _wait(f"{base}/health", server)
        yield stream
    finally:
        server.terminate()
        server.wait()


def _wait(url: str, server: subprocess.Popen[bytes]) -> None:
    """Until a server answers. Raises RuntimeError if it ends."""
    while True:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        try:
            urllib.request.urlopen(url).close()
            return
        except OSError:
            time.sleep(0.2)


@contextmanager
def transformers(args: argparse.Namespace, drafts: str) -> Iterator[Stream]:
    import torch
    from transformers import AutoModelForCausalLM, logging

    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    load = AutoModelForCausalLM.from_pretrained
    model = load(args.target, dtype=torch.bfloat16).eval()
    assistant = None if drafts == "off" else load(args.draft, dtype=torch.bfloat16).eval()
    if assistant is not None and drafts.isdigit():
        assistant.generation_config.num_assistant_tokens = int(drafts)
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0

    @torch.inference_mode()
    def stream(prompt: list[int], count: int) -> tuple[float, float]:
        ids, streamer = torch.tensor([prompt]), workloads.Times()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), streamer=streamer, max_new_tokens=count, min_new_tokens=count,
            do_sample=False, eos_token_id=None, pad_token_id=0, assistant_model=assistant,
        )  # fmt: skip
        return rate_of(streamer.times[1:], count), 0.0

    yield stream


@contextmanager
def vllm(args: argparse.Namespace, drafts: str) -> Iterator[Stream]:
    run_vllm = importlib.import_module("run_vllm")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", run_vllm.KV_GB)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{args.threads - 1}")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    run_vllm.name_the_wheel()
    # vLLM looks for kernels in what every object says is its `__dict__`; numba, which its n-grams load, brings one that
    # says a function, and vLLM ends.
    importlib.import_module("llvmlite.binding.ffi").lib._fntab["__dict__"] = {}
    import vllm

    count = int(drafts) if drafts.isdigit() else 8
    config = {"method": "ngram", "num_speculative_tokens": count, "prompt_lookup_max": 4}
    llm = vllm.LLM(
        model=args.target, dtype="bfloat16", max_model_len=2048, max_num_seqs=1, enable_prefix_caching=False,
        speculative_config=None if drafts == "off" else config,
    )  # fmt: skip

    def timed(prompt: list[int], count: int) -> float:
        params = vllm.SamplingParams(temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True)
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return time.perf_counter() - start

    def stream(prompt: list[int], count: int) -> tuple[float, float]:
        first = timed(prompt, 1)  # the offline API gives no time for each token
        return (count - 1) / (timed(prompt, count) - first), 0.0

    try:
        yield stream
    finally:  # now: a later end of this engine would end what the next one has set up
        llm.llm_engine.engine_core.shutdown()
        llm.llm_engine = None
        gc.collect()


ENGINES = {"quire": quire, "llama.cpp": llama_cpp, "transformers": transformers, "vllm": vllm}

if __name__ == "__main__":
    main()
