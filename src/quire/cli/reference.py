"""Show an algorithm of inference in plain numpy: the loop, attention, a speculative step, batches, allocation."""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Callable
from typing import Any

# name -> (module, object)
NAMES = {
    "generate": ("decoder", "generate"),
    "decoder": ("decoder", "Transformer"),
    "attention": ("plain_attention", "attention"),
    "online-softmax": ("plain_attention", "online_softmax"),
    "tiled-attention": ("plain_attention", "tiled_attention"),
    "attention-gradient": ("plain_attention", "attention_gradient"),
    "speculative-step": ("speculative_step", "accept"),
    "static-batching": ("static_serving", "static_batches"),
    "contiguous-allocation": ("static_serving", "Contiguous"),
    "paged-waste": ("static_serving", "paged_waste"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="the algorithm whose source to print (default: list them)")


def run(args: argparse.Namespace) -> int:
    from quire.cli.parser import nearest

    if args.name is None:
        for name in NAMES:
            about = (inspect.getdoc(_found(name)) or "").splitlines()[0]
            print(f"{name:<24}{about}")
        return 0
    if args.name not in NAMES:
        raise ValueError(f"name: no algorithm {args.name!r}{nearest(args.name, NAMES)}")
    module, _ = NAMES[args.name]
    print(f"# quire.reference.{module}\n")
    print(inspect.getsource(_found(args.name)), end="")
    return 0


def _found(name: str) -> Callable[..., Any]:
    module, found = NAMES[name]
    algorithm: Callable[..., Any] = getattr(importlib.import_module(f"quire.reference.{module}"), found)
    return algorithm
