"""A checkpoint folder to a bfloat16 GGUF file, by llama.cpp's own converter.

    python convert_gguf.py LLAMA_CPP_SOURCE MODEL_FOLDER OUT.gguf

The converter knows tokenizers by a hash of what they make of a test text. A tokenizer made for a benchmark is
unknown to it, and named "gpt-2" here, which changes how text would be cut and no speed.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    source, model, out = (Path(word) for word in sys.argv[1:4])
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    for module in ("conversion.base", "convert_hf_to_gguf"):
        try:
            _accept_tokenizer(importlib.import_module(module))
        except ImportError:
            continue
    sys.argv = ["convert_hf_to_gguf.py", str(model), "--outfile", str(out), "--outtype", "bf16"]
    runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")


def _accept_tokenizer(module: Any) -> None:
    for value in vars(module).values():
        if isinstance(value, type) and "get_vocab_base_pre" in vars(value):
            value.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
