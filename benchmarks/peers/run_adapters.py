"""One engine with adapters in its own environment: a JSON line for each case.

    python run_adapters.py ENGINE --model MODEL --adapters FOLDER --format F --threads N --cases 1:1,8:8 --output N

ENGINE is quire, llama.cpp (its server, from LLAMA_CPP_BIN; adapters are GGUF files), transformers (with PEFT) or vllm.
A case is STREAMS:ADAPTERS, 0 adapters being the model alone. `rate` is all output tokens / time from the first request
to the last token, prompts of 64 tokens among them; every engine gets the same prompts, and has run each adapter before.
FOLDER has a0, a1 …

transformers runs the streams of one adapter after those of another; "transformers, mixed" gives PEFT the adapter of
each row of one batch. llama.cpp's server gets each request's adapter as its only one with a scale.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import workloads

PROMPT, RANK, WIDEST = 64, 16, 32
Run = Callable[
    [list[list[int]], list[str], int], int
]  # prompts, adapters ("" for none), tokens -> output tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--model", required=True)
    parser.add_argument("--adapters", type=Path, required=True)
    parser.add_argument("--format", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cases", required=True)
    parser.add_argument("--output", type=int, default=32)
    args = parser.parse_args()
    workloads.limit_threads(args.threads)
    cases = [tuple(map(int, case.split(":"))) for case in args.cases.split(",")]
    count = max(adapters for _, adapters in cases)
    with ENGINES[args.engine](args, count) as run:
        source = random.Random(0)
        run([workloads.prompt(PROMPT, source)], [""], 4)  # warms up
        if count:  # every adapter is where it is computed from before time is taken
            run([workloads.prompt(PROMPT, source) for _ in range(count)], [f"a{n}" for n in range(count)], 4)
        for streams, adapters in cases:
            prompts = [workloads.prompt(PROMPT, source) for _ in range(streams)]
            names = [f"a{number % adapters}" if adapters else "" for number in range(streams)]
            start = time.perf_counter()
            made = run(prompts, names, args.output)
            rate = made / (time.perf_counter() - start)
            row = {"engine": args.engine, "format": args.format, "streams": streams, "adapters": adapters}
            print(json.dumps({**row, "rate": rate}), flush=True)


@contextmanager
def quire(args: argparse.Namespace, count: int) -> Iterator[Run]:
    from quire import LLM, SamplingParams

    adapters = {f"a{number}": args.adapters / f"a{number}" for number in range(count)}
    with LLM(
        args.model, threads=args.threads, quantization={"bf16": "none"}.get(args.format, args.format),
        dtype="bfloat16", max_model_len=512, max_num_seqs=WIDEST, enable_prefix_caching=False, progress=False,
        adapters=adapters, enable_lora=True, max_loras=count, max_lora_rank=RANK,
    ) as llm:  # fmt: skip

        def run(prompts: list[list[int]], names: list[str], tokens: int) -> int:
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            outputs = llm.generate(prompts, params, adapter=names, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        yield run


@contextmanager
def llama_cpp(args: argparse.Namespace, count: int) -> Iterator[Run]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = ",".join(str(args.adapters / f"a{number}.gguf") for number in range(count))
    command = [
        str(Path(os.environ["LLAMA_CPP_BIN"]) / "llama-server"), "-m", args.model, "-t", str(args.threads),
        "-c", str(256 * WIDEST), "-np", str(WIDEST), "--lora", files, "--lora-init-without-apply", "--port", str(port),
    ]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    base = f"http://127.0.0.1:{port}"

    def one(prompt: list[int], name: str, tokens: int) -> int:
        body = {
            "prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False,
            "lora": [{"id": int(name[1:]), "scale": 1.0}] if name else [],
        }  # fmt: skip
        request = urllib.request.Request(
            f"{base}/completion", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return int(json.load(answer)["tokens_predicted"])

    def run(prompts: list[list[int]], names: list[str], tokens: int) -> int:
        with ThreadPoolExecutor(len(prompts)) as clients:
            return sum(clients.map(one, prompts, names, [tokens] * len(prompts)))

    try:
        importlib.import_module("run_speculation")._wait(f"{base}/health", server)
        yield run
    finally:
        server.terminate()
        server.wait()


def transformers(mixed: bool) -> Callable[[argparse.Namespace, int], Any]:
    """PEFT over transformers: adapters one after another, or as the adapter of each row of a batch."""

    @contextmanager
    def opened(args: argparse.Namespace, count: int) -> Iterator[Run]:
        import peft
        import torch
        from transformers import AutoModelForCausalLM, logging

        torch.set_num_threads(args.threads)
        logging.set_verbosity_error()
        base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
        model = peft.PeftModel.from_pretrained(base, args.adapters / "a0", adapter_name="a0").eval()
        for number in range(1, count):
            model.load_adapter(args.adapters / f"a{number}", adapter_name=f"a{number}")

        @torch.inference_mode()
        def generate(prompts: list[list[int]], tokens: int, **more: Any) -> int:
            ids = torch.tensor(prompts)
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                do_sample=False, eos_token_id=None, pad_token_id=0, **more,
            )  # fmt: skip
            return int(out.shape[0] * (out.shape[1] - ids.shape[1]))

        def run(prompts: list[list[int]], names: list[str], tokens: int) -> int:
            if not any(names):
                with model.disable_adapter():
                    return generate(prompts, tokens)
            if mixed:
                return generate(prompts, tokens, adapter_names=names)
            made = 0
            for name in dict.fromkeys(names):
                model.set_adapter(name)
                made += generate([p for p, of in zip(prompts, names, strict=True) if of == name], tokens)
            return made

        yield run

    return opened


@contextmanager
def vllm(args: argparse.Namespace, count: int) -> Iterator[Run]:
    run_vllm = importlib.import_module("run_vllm")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", run_vllm.KV_GB)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{args.threads - 1}")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    run_vllm.name_the_wheel()
    import vllm
    from vllm.lora.request import LoRARequest

    llm = vllm.LLM(
        model=args.model, dtype="bfloat16", max_model_len=512, max_num_seqs=WIDEST, enable_prefix_caching=False,
        enable_lora=True, max_loras=count, max_lora_rank=RANK,
    )  # fmt: skip

    def run(prompts: list[list[int]], names: list[str], tokens: int) -> int:
        params = vllm.SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True)
        asked: Any = [{"prompt_token_ids": ids} for ids in prompts]
        adapters: Any = [
            LoRARequest(name, int(name[1:]) + 1, str(args.adapters / name)) if name else None
            for name in names
        ]
        outputs = llm.generate(asked, params, lora_request=adapters, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    yield run


ENGINES = {
    "quire": quire, "llama.cpp": llama_cpp, "transformers": transformers(mixed=False),
    "transformers, mixed": transformers(mixed=True), "vllm": vllm,
}  # fmt: skip

if __name__ == "__main__":
    main()
