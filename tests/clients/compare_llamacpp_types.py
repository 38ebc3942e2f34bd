"""Logits of Quire and of llama.cpp on one tiny llama that llama.cpp quantized to each type.

    python tests/clients/compare_llamacpp_types.py

Needs llama-cpp-python and Quire in a separate environment. Both read the same numbers, and Quire computes them
as floats and, as it does by default, in their own codes. What differs is how inputs are rounded: not at all; to int8 by
groups of the weights (Quire), to int8 by 32 or 256 (llama.cpp). Distances are root mean squares in parts of the
logits' own. Exits 1 when one is over LIMIT; a number read wrongly would be as far off as the type is from F32.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np
import torch

from helpers.checkpoints import VOCAB, TinyModel, save, tiny_model
from helpers.gguf_files import write_model
from helpers.stepper import Stepper
from quire.config.schema import EngineConfig
from quire.engine.build.assemble import choose, machine_facts, open_weights, weight_origin
from quire.engine.build.opening import open_model
from quire.executor.base import Limits
from quire.executor.native import NativeExecutor
from quire.loader import load

LIMIT = 0.06
LENGTH = 40
LIMITS = Limits(max_tokens=LENGTH, max_rows=1, max_logit_rows=LENGTH, max_len=LENGTH, num_blocks=20)
# llama_ftype by name; the K mixtures use several types each.
FTYPES = {
    "F16": 1, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_M": 12, "Q4_K_M": 15,
    "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30,
}  # fmt: skip


def plain_file(folder: Path) -> Path:
    base = tiny_model("llama2")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2, "head_dim": 64}
    save(TinyModel("wide", base.config_class, dict(base.overrides) | sizes), folder, torch.float32)
    keys = {"tokenizer.ggml.model": "no_vocab", "llama.vocab_size": VOCAB}
    return write_model(folder, folder / "plain.gguf", "llama", **keys)


def quantized(plain: Path, name: str) -> Path:
    out = plain.with_name(f"{name}.gguf")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = FTYPES[name], 1
    if llama_cpp.llama_model_quantize(str(plain).encode(), str(out).encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp does not write {name}")
    return out


def llama_cpp_logits(path: Path, prompt: list[int]) -> np.ndarray:
    """Of every position, [tokens, vocabulary]."""
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_threads, options.n_threads_batch = 256, 1, 1
    options.type_k = options.type_v = 0  # F32
    context = llama_cpp.llama_init_from_model(model, options)
    rows = []
    for token in prompt:
        array = (llama_cpp.llama_token * 1)(token)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, 1)):
            raise SystemExit(f"{path}: llama.cpp does not run it")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), shape=(VOCAB,))
        rows.append(logits.copy())
    return np.array(rows)


def quire_logits(path: Path, prompt: list[int], quantization: str) -> tuple[np.ndarray, str]:
    """The same, and the formats that linears are computed in."""
    model = open_model(path, tokenizer=False)
    asked = EngineConfig(quantization=quantization, dtype="float32", kv_cache_dtype="float32", threads=1)
    _, program = choose(model, asked, machine_facts())
    executor = NativeExecutor(program, threads=1)
    with open_weights(model) as source:
        load(program.params, source, executor, rules=weight_origin(model).rules)
    stepper = Stepper(program, LIMITS)
    executor.bind(LIMITS, stepper.arrays)
    number = stepper.add(prompt)
    formats = sorted({str(param.format) for param in program.params if param.groups})
    return stepper.step(executor, {number: len(prompt)})[number], ", ".join(formats) or "floats"


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(((a - b) ** 2).mean() / (b**2).mean()))


def main() -> int:
    llama_cpp.llama_backend_init()
    prompt = np.random.default_rng(0).integers(3, VOCAB, LENGTH).tolist()
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        plain = plain_file(Path(folder))
        reference = llama_cpp_logits(plain, prompt)
        for name in FTYPES:
            path = quantized(plain, name)
            theirs = llama_cpp_logits(path, prompt)
            floats, _ = quire_logits(path, prompt, "none")
            codes, formats = quire_logits(path, prompt, "auto")
            far = distance(floats, theirs), distance(codes, theirs)
            status |= max(far) > LIMIT
            print(f"RESULT {name}: floats {far[0]:.5f}, codes {far[1]:.5f} from llama.cpp ({formats}); "
                  f"llama.cpp itself is {distance(theirs, reference):.3f} from F32", flush=True)  # fmt: skip
    return status


if __name__ == "__main__":
    sys.exit(main())
