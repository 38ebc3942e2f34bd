"""vLLM's CPU wheel as a server: `python serve_vllm.py MODEL --port 8100 …`, with the options of `vllm serve`.

Processes that it starts import this file again, so each of them knows the wheel's name.
"""

from __future__ import annotations

import importlib
import sys

importlib.import_module("run_vllm").name_the_wheel()

if __name__ == "__main__":
    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    importlib.import_module("vllm.entrypoints.cli.main").main()
