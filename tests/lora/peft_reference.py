"""What PEFT makes of an adapter: run with PEFT on the path, in a process of its own.

peft_reference.py BASE OUT: reads a JSON object of LoraConfig's arguments, saves an adapter of random numbers for the
checkpoint BASE to OUT, and the logits of a text with it to OUT/logits.npy (unmerged) and OUT/merged.npy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import peft
import torch
import transformers


def main() -> None:
    base, out = Path(sys.argv[1]), Path(sys.argv[2])
    asked = json.load(sys.stdin)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(base, dtype=torch.float32, attn_implementation="eager").eval()
    adapted = peft.get_peft_model(model, peft.LoraConfig(**asked["config"])).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if not weight.requires_grad:
                continue
            noise = torch.randn(weight.shape, generator=generator)
            if "magnitude" in name:
                weight.mul_(1 + 0.2 * noise)
            elif "modules_to_save" in name:
                weight.add_(0.1 * noise * weight.std())
            else:
                weight.copy_((noise / weight.shape[-1] ** 0.5).bfloat16())
    adapted.save_pretrained(out, save_embedding_layers=False)
    tokens = torch.tensor([asked["tokens"]])
    with torch.inference_mode():
        np.save(out / "logits.npy", adapted(input_ids=tokens, use_cache=False).logits[0].numpy())
        if "target_parameters" not in asked["config"]:
            merged = adapted.merge_and_unload()
            np.save(out / "merged.npy", merged(input_ids=tokens, use_cache=False).logits[0].numpy())


main()
