"""Chat with a model by its name: it is pulled if it is not on this machine, verified, and run in this process."""

from __future__ import annotations

import argparse

from quire.cli import chat
from quire.cli.adapter_option import take_adapter_name
from quire.cli.pull import add_pull_options, pull_named
from quire.types import CheckpointError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    chat.add_arguments(parser)
    add_pull_options(parser)


def run(args: argparse.Namespace) -> int:
    take_adapter_name(args)
    if args.model is not None and not _is_here(args.model) and not _offline():
        from quire.store.references import ModelReference

        pull_named(args, ModelReference.parse(args.model))
    return chat.run(args)


def _offline() -> bool:
    """Whether the hub must not be asked; its cache may have the model."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _is_here(name: str) -> bool:
    """Whether a model is found without a network."""
    from pathlib import Path

    from quire.config.shipped import shipped_models
    from quire.store.stored import stored_model

    if Path(name).expanduser().exists() or name in shipped_models():
        return True
    try:
        return stored_model(name) is not None
    except CheckpointError:
        return False  # a pull repairs it
