"""Remove models from the store. Files that another model of the store uses stay; the rest is freed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from quire.types import CheckpointError, QuireError
from quire.util.sizes import format_size
from quire.util.standard_error import say

if TYPE_CHECKING:
    from quire.store.model_store import Freed
    from quire.store.references import ModelReference


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models", nargs="+", metavar="model", help="name of a pulled model, or of an unfinished pull"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be freed")


def run(args: argparse.Namespace) -> int:
    """Exit status 1 if one of the names is unknown; the others are removed."""
    from quire.store.model_store import ModelStore
    from quire.store.references import ModelReference

    store, failed = ModelStore(), False
    for name in args.models:
        try:
            reference = ModelReference.parse(name)
            _refuse_others(reference)
            print(_said(reference, store.remove(reference, dry=args.dry_run), dry=args.dry_run))
        except QuireError as error:
            say(f"quire: {error}")
            failed = True
    return 1 if failed else 0


def _refuse_others(reference: ModelReference) -> None:
    from quire.store.stored import stored_manifest

    found = stored_manifest(str(reference))
    if found is not None and found.source.startswith("ollama: "):
        raise CheckpointError(f"{reference}: is Ollama's; ollama rm {found.reference} removes it")


def _said(reference: ModelReference, freed: Freed, *, dry: bool) -> str:
    would = "would free" if dry else "removed, freed"
    text = f"{reference}: {would} {format_size(freed.size)} in {freed.files} files"
    if freed.kept:
        text += f"; {freed.kept} files stay for {', '.join(freed.used_by)}"
    return text
