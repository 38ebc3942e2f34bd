"""vLLM's CPU wheel as a server: `python serve_vllm.py MODEL --port 8100 …`, with the options of `vllm serve`.

Processes that it starts import this file again, so each of them knows the wheel's name.
"""

from __future__ import annotations

import sys

import run_vllm

run_vllm.name_the_wheel()

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    main()
