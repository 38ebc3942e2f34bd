"""The adapter of a generation or chat: --adapter, or the name of a shipped one in the place of the model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from quire.config.shipped import shipped_adapters

_NAME = "adapter"


def add_adapter_option(parser: argparse.ArgumentParser) -> None:
    """--adapter, for a command that runs a model."""
    parser.add_argument(
        "--adapter", metavar="ADAPTER",
        help="adapter (LoRA) that answers: a PEFT folder, a GGUF adapter, or a shipped one such as quire-mini:pirate",
    )  # fmt: skip


def take_adapter_name(args: argparse.Namespace) -> None:
    """A model that is the name of a shipped adapter becomes its base with this adapter."""
    if args.adapter is None and args.model in shipped_adapters() and not Path(args.model).exists():
        args.model, args.adapter = args.model.partition(":")[0], args.model


def adapter_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of LLM for the adapter, and the largest rank that it has. Raises CheckpointError."""
    if args.adapter is None:
        return {}
    from quire.lora.read import find_adapter, open_adapter, targets_of

    with open_adapter(find_adapter(args.adapter)) as file:
        ranks, targets = [target.rank for target in file.targets()], targets_of(file)
    return {
        "adapters": {_NAME: args.adapter},
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": max([args.max_lora_rank, *ranks]),
        "lora_target_modules": (*args.lora_target_modules, *targets),
    }


def chosen_adapter(args: argparse.Namespace) -> str:
    """What calls name the adapter; "" for the model alone."""
    return "" if args.adapter is None else _NAME
