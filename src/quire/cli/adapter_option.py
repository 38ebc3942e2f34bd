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
    """The arguments of LLM for the adapter."""
    if args.adapter is None:
        return {}
    return {"adapters": {_NAME: args.adapter}, "enable_lora": True, "max_loras": 1, "max_lora_rank": None}


def chosen_adapter(args: argparse.Namespace) -> str:
    """What calls name the adapter; "" for the model alone."""
    return "" if args.adapter is None else _NAME
