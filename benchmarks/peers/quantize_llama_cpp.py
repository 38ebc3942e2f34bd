"""A GGUF file in one type by llama.cpp, for `quire eval kl`.

    python quantize_llama_cpp.py MODEL.gguf OUT.gguf TYPE [Q6_K|Q8_0]

MODEL is in floats (`quire convert MODEL model.gguf`), TYPE such as Q4_K or IQ4_NL. As `quire quantize --method gguf`
does, all linears have the type, or what llama.cpp has for rows that are no whole blocks, and embedding and head the
second one: Q8_0 where 256 does not divide the width. Without an importance matrix. Runs in an environment with
`pip install --no-deps llama-cpp-cffi==0.4.42 cffi`, whose library needs the libstdc++ of GCC 13.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

# Names that llama.cpp has for files whose tensors are all of one type.
FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "Q5_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18, "IQ4_NL": 25,
              "IQ4_XS": 30}  # fmt: skip
GGML_TYPES = {"Q8_0": 8, "Q6_K": 14}


def library() -> Any:
    """llama.cpp's functions, without the package's modules for chats, which need others."""
    package = importlib.util.find_spec("llama")
    assert package is not None
    places = [Path(place) for place in package.submodule_search_locations or ()]
    path = next(path for place in places for path in place.glob("_llama_cpp_cpu.*.so"))
    spec = importlib.util.spec_from_file_location("_llama_cpp_cpu", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    model, out, kind, *rest = sys.argv[1:]
    module = library()
    module.lib.llama_backend_init()
    params = module.lib.llama_model_quantize_default_params()
    params.nthread, params.pure, params.ftype = 1, True, FILE_TYPES[kind]
    params.output_tensor_type = params.token_embedding_type = GGML_TYPES[rest[0] if rest else "Q6_K"]
    begin = time.process_time()
    failed = module.lib.llama_model_quantize(model.encode(), out.encode(), module.ffi.addressof(params))
    if failed:
        raise SystemExit(f"llama.cpp: status {failed}")
    print(
        f"llama.cpp {kind}: {time.process_time() - begin:.1f} s of CPU time, {Path(out).stat().st_size:,} bytes"
    )


if __name__ == "__main__":
    main()
