"""Quantized checkpoints that auto-round writes, against the weights they were made from.

    python tests/clients/compare_quantized.py

Needs auto-round, compressed-tensors, bitsandbytes, torch and Quire in a separate environment. Each format
rounds a tiny Llama to the nearest code, so the numbers that Quire reads must be within 1.6 steps of a group's range of
the plain ones, and 0.4 in the mean: a wrong order of codes, a zero point that is one off, a scale of another group are
several times that. Where the writer's own layers can be loaded, their weights (what they make of an identity matrix)
must be Quire's to the rounding of float16. Exits 1 when anything is further away.
"""

from __future__ import annotations

import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from auto_round import AutoRound

from helpers.tokenizers import write_byte_tokenizer
from quire.engine.build.assemble import open_weights
from quire.engine.build.opening import open_model
from quire.loader import Checkpoint
from quire.quant.bitsandbytes import four_bit
from quire.quant.linear_codes import Stored

GROUP = 32
# name: format of the writer, bits, options
FORMATS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gptq": ("auto_gptq", 4, {"scheme": "W4A16"}),
    "gptq, zero points": ("auto_gptq", 4, {"scheme": "W4A16", "sym": False}),
    "awq": ("auto_awq", 4, {"scheme": "W4A16", "sym": False}),
    "auto-round": ("auto_round", 4, {"scheme": "W4A16", "sym": False}),
    "auto-round, 8 bits": ("auto_round", 8, {"scheme": "W8A16"}),
    "auto-round, 3 bits": ("auto_round", 3, {"scheme": "W3A16"}),
    "auto-round, 2 bits": ("auto_round", 2, {"scheme": "W2A16"}),
    "pack-quantized": ("llm_compressor", 4, {"scheme": "W4A16"}),
    "int-quantized": ("llm_compressor", 8, {"scheme": "INT8_W8A8"}),
}


def plain_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    write_byte_tokenizer(folder)


def quantize(plain: Path, out: Path, form: str, options: dict[str, Any]) -> Path:
    """Write a format; its folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(plain)
    group = {} if form == "llm_compressor" and "INT8" in options["scheme"] else {"group_size": GROUP}
    AutoRound(model, tokenizer, iters=0, disable_opt_rtn=True, **options, **group).quantize_and_save(
        str(out), format=form
    )
    return next(path.parent for path in out.rglob("config.json"))


def steps_away(plain: Path, folder: Path, bits: int) -> tuple[str, float, float]:
    """How Quire calls the format; largest and root mean square distance in steps of each group's range."""
    label, largest, squares, count = "", 0.0, 0.0, 0
    with open_weights(open_model(folder)) as source, Checkpoint(plain) as checkpoint:
        for name in source.names():
            info = source.info(name)
            if not info.stored:
                continue
            label = info.stored
            weight = np.asarray(checkpoint.read(name), np.float32)
            whole = "per output" in label
            groups = weight.reshape(len(weight), -1, weight.shape[1] if whole else GROUP)
            reach = 2 * np.abs(groups).max(axis=2, keepdims=True) / (2**bits - 1)
            found = np.abs(source.read(name).reshape(groups.shape) - groups) / reach
            largest, squares, count = (
                max(largest, float(found.max())),
                squares + float((found**2).sum()),
                count + found.size,
            )
    return label, largest, (squares / count) ** 0.5


def writer_distance(folder: Path) -> float | None:
    """Largest distance between the weights of the writer's own layers and Quire's, relative to the largest weight."""
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, device_map="cpu", dtype=torch.float32
        )
        model(torch.tensor([[1, 2]]))  # some decompress when they first run
    except (ImportError, TypeError) as error:  # packages that are for GPUs only
        print(f"its own layers do not run here: {error}")
        return None
    worst = 0.0
    with open_weights(open_model(folder)) as source, torch.no_grad():
        for name in source.names():
            if not source.info(name).stored:
                continue
            layer = model.get_submodule(name.removesuffix(".weight"))
            ours = torch.from_numpy(source.read(name))
            scheme = getattr(layer, "quantization_scheme", None)
            if scheme is not None:
                scheme.input_activations = None
            theirs = layer(torch.eye(ours.shape[1])).T.float()
            worst = max(worst, float((theirs - ours).abs().max() / ours.abs().max()))
    return worst


def bitsandbytes_distance(kind: str, *, nested: bool) -> float:
    """Largest distance between what bitsandbytes makes of its own codes, and what Quire does."""
    import bitsandbytes

    packed, state = bitsandbytes.functional.quantize_4bit(
        torch.randn(96, 128), quant_type=kind, compress_statistics=nested, blocksize=64
    )
    arrays = {"weight": packed.numpy()}
    arrays |= {f"weight.{name}": array.numpy() for name, array in state.as_dict(packed=True).items()}
    dtypes = {"float32": "F32", "uint8": "U8"}
    infos = {name: Stored(dtypes[array.dtype.name], array.shape) for name, array in arrays.items()}
    linear = four_bit(infos, arrays[f"weight.quant_state.bitsandbytes__{kind}"].tobytes(), "m")
    theirs = bitsandbytes.functional.dequantize_4bit(packed, state).numpy()
    return float(np.abs(linear.dequantize(arrays, 0, 96) - theirs).max())


def main() -> int:
    status = 0
    for kind, nested in product(("nf4", "fp4"), (False, True)):
        far = bitsandbytes_distance(kind, nested=nested)
        status |= far != 0
        print(
            f"RESULT bitsandbytes {kind}, nested {nested}: differs by {far:.1e}: {'WRONG' if far else 'ok'}"
        )
    with tempfile.TemporaryDirectory() as place:
        plain = Path(place) / "plain"
        plain_model(plain)
        for number, (name, (form, bits, options)) in enumerate(FORMATS.items()):
            folder = quantize(plain, Path(place) / str(number), form, options)
            label, largest, mean = steps_away(plain, folder, bits)
            own = writer_distance(folder)
            ok = largest < 1.6 and mean < 0.4 and (own is None or own < 2e-3)
            status |= not ok
            told = "" if own is None else f"; its own layers differ by {own:.1e} of the largest"
            print(f"RESULT {name}: {label}: at most {largest:.2f} steps, {mean:.2f} in the mean{told}: "
                  f"{'ok' if ok else 'WRONG'}", flush=True)  # fmt: skip
    return status


if __name__ == "__main__":
    sys.exit(main())
