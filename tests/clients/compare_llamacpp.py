"""Greedy tokens of Quire and of llama.cpp on the same GGUF files, side by side.

    python tests/clients/compare_llamacpp.py FILE.gguf … [--prompt 5,6,7] [--tokens 32]

Needs llama-cpp-python and Quire in a separate environment. No file: tiny models with random weights are written
(F32, F16, BF16 and Q8_0). Exits 1 when tokens differ where llama.cpp's choice leads by more than NEAR: both programs
round, in other places, so a nearer tie may fall either way.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

NEAR = 0.05  # logits
CONTEXT = 256  # longrope models choose their frequencies by it
DEFAULT_PROMPT = "5,17,33,90,4,61,12,7,99,23"


def llama_cpp_tokens(path: Path, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy continuation by llama.cpp (one thread, float32 cache), and each token's lead over the next in logits."""
    import llama_cpp

    llama_cpp.llama_backend_init()
    model_options = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_options)
    if not model:
        raise SystemExit(f"{path}: llama.cpp does not load it")
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_threads, options.n_threads_batch = CONTEXT, 1, 1
    options.type_k = options.type_v = 0  # F32
    context = llama_cpp.llama_init_from_model(model, options)
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    found: list[int] = []
    leads: list[float] = []
    step = prompt
    while len(found) < count:
        array = (llama_cpp.llama_token * len(step))(*step)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(step))):
            raise SystemExit(f"{path}: llama.cpp does not run it")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), shape=(vocab,))
        second, first = np.partition(logits, -2)[-2:]
        leads.append(float(first - second))
        found.append(int(np.argmax(logits)))
        step = found[-1:]
    return found, leads


def quire_tokens(path: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation by Quire, weights as floats."""
    from quire.engine.build.opening import open_model
    from quire.llm import LLM
    from quire.types import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    options = {
        "dtype": "float32",
        "quantization": "none",
        "threads": 1,
        "max_model_len": min(CONTEXT, open_model(path).facts.longest),
    }
    with LLM(path, progress=False, **options) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


# llama.cpp leaves out Phi-3's windows and Qwen3's biases, has no dense layers among Qwen3's experts, and takes some
# things by the number of layers: head norms of Command R, queries without latents of DeepSeek-V2.
NOT_COMPARED = {"phi3", "qwen3-biases-mha", "qwen3-moe-dense-layer", "cohere-head-norms", "deepseek2"}


def tiny_files(folder: Path) -> list[Path]:
    """Every family with random weights in F32, and a llama in several types."""
    import torch

    from helpers.checkpoints import VOCAB, save
    from helpers.gguf_files import MODELS, made_model, write_model
    from quire.cli.main import main

    found = []
    for name, (_, _, arch) in MODELS.items():
        if name not in NOT_COMPARED:
            save(made_model(name), folder / name, torch.float32)
            keys = {"tokenizer.ggml.model": "no_vocab", f"{arch}.vocab_size": VOCAB}
            found.append(write_model(folder / name, folder / f"{name}.gguf", arch, **keys))
    for dtype in ("float16", "bfloat16", "q8_0"):
        out = folder / f"llama-{dtype}.gguf"
        main(["convert", str(folder / "llama"), str(out), "--dtype", dtype, "--quiet"])
        found.append(out)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--prompt", default=DEFAULT_PROMPT)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    prompt = [int(token) for token in args.prompt.split(",")]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for path in args.files or tiny_files(Path(folder)):
            ours = quire_tokens(path, prompt, args.tokens)
            theirs, leads = llama_cpp_tokens(path, prompt, args.tokens)
            same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
            near = (
                f"; there llama.cpp's choice leads by {leads[same]:.4f} in logits" if same < len(ours) else ""
            )
            print(f"{path.name}: {same} of {len(ours)} tokens equal{near}", flush=True)
            wrong += same < len(ours) and leads[same] > NEAR
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
