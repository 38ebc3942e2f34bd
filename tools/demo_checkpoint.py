"""Write a small checkpoint with random weights: something to run when no model is at hand. It talks nonsense.

python tools/demo_checkpoint.py FOLDER
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quire.loader import RandomWeights
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.spec.facts import read_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 768,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 259,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    write_tokenizer(folder)
    write_weights(folder)
    print(f"{folder}: random weights, {(folder / 'model.safetensors').stat().st_size / 1e6:.1f} MB")


def write_tokenizer(folder: Path) -> None:
    """One token a byte, and three special tokens."""
    special = ["<pad>", "<s>", "</s>"]
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def write_weights(folder: Path) -> None:
    """model.safetensors: an eight-byte length, a JSON header, the tensors in order."""
    program = lower(read_model(folder).spec, NumberFormats("bf16", "bf16"))
    source = RandomWeights(program.params, seed=0)
    header, offset, parts = {}, 0, []
    for name in sorted(source.names()):
        data = np.ascontiguousarray(source.read(name))
        header[name] = {
            "dtype": "BF16", "shape": list(data.shape), "data_offsets": [offset, offset + data.nbytes]
        }  # fmt: skip
        offset += data.nbytes
        parts.append(data.tobytes())
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


if __name__ == "__main__":
    main()
