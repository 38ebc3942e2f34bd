"""A 4-bit checkpoint of a model by another program, from the same windows of calibration tokens, for `quire eval kl`.

    python run_quantize.py gptqmodel|auto-round MODEL OUT WINDOWS.json GROUP_SIZE [STEPS]

Runs in that program's environment: `pip install torch==2.13.0 transformers==5.23.0 gptqmodel` or `auto-round`. WINDOWS
is a list of lists of token ids. STEPS: of auto-round (200, or 50 in its light recipe). Symmetric grids; prints the CPU
seconds.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def gptqmodel(model: str, out: str, windows: list[list[int]], group: int, _: int) -> None:
    """GPTQModel's GPTQ with its defaults."""
    import gptqmodel as package
    from gptqmodel import GPTQModel, QuantizeConfig

    package._default_cpu_workers = lambda: 2  # on two cores its pools do not fit into each other

    loaded = GPTQModel.load(model, QuantizeConfig(bits=4, group_size=group, sym=True), device="cpu")
    loaded.quantize([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in windows], batch_size=1)
    loaded.save(out)


def auto_round(model: str, out: str, windows: list[list[int]], group: int, steps: int) -> None:
    """auto-round's steps of signed gradients."""
    import torch
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    data: Any = torch.utils.data.DataLoader([torch.tensor(ids) for ids in windows], batch_size=1)
    AutoRound(
        loaded, tokenizer, scheme="W4A16", group_size=group, sym=True, dataset=data, nsamples=len(windows),
        seqlen=len(windows[0]), iters=steps, device_map="cpu", enable_torch_compile=False,
    ).quantize_and_save(out, format="auto_gptq")  # fmt: skip


def main() -> None:
    tool, model, out, windows, group, *steps = sys.argv[1:]
    begin = time.process_time()
    make = {"gptqmodel": gptqmodel, "auto-round": auto_round}[tool]
    make(model, out, json.loads(Path(windows).read_text()), int(group), int(steps[0]) if steps else 200)
    print(f"{tool}: {time.process_time() - begin:.0f} s of CPU time")


if __name__ == "__main__":
    main()
