"""List the models on this machine: those of the store, those shipped with Quire, and Ollama's."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

from quire.util.columns import in_columns
from quire.util.printable import printable
from quire.util.sizes import format_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from quire.store.model_store import ModelStore

    store = ModelStore()
    models = list(_models(store))
    if args.json:
        print(json.dumps({"store": str(store.folder), "used": store.used(), "models": models}))
    else:
        _table(models)
        print(f"\n{store.folder}: {format_size(store.used())}")
    return 0


def _models(store: Any) -> Iterator[dict[str, Any]]:
    from quire.config.shipped import shipped_models
    from quire.store.ollama_store import OllamaStore

    for manifest in store.all():
        yield _entry(manifest, "complete")
    for manifest in store.pending():
        yield _entry(manifest, "unfinished")
    for name, folder in shipped_models().items():
        files = [file.stat() for file in folder.iterdir() if file.is_file()]
        yield {
            "reference": name, "name": name, "tag": "latest", "revision": "", "commit": "",
            "size": sum(file.st_size for file in files), "modified": max(file.st_mtime for file in files),
            "source": "shipped", "state": "complete",
        }  # fmt: skip
    for manifest, problem in OllamaStore().all():
        yield _entry(manifest, problem or "complete")


def _entry(manifest: Any, state: str) -> dict[str, Any]:
    from quire.store.references import ModelReference

    reference = ModelReference.parse(manifest.reference)
    return {
        "reference": manifest.reference, "name": reference.name, "tag": reference.tag or "latest",
        "revision": reference.revision, "commit": manifest.commit, "size": manifest.size,
        "modified": manifest.pulled, "source": manifest.source, "state": state,
    }  # fmt: skip


def _table(models: list[dict[str, Any]]) -> None:
    rows = [("NAME", "TAG", "SIZE", "MODIFIED", "SOURCE")]
    for model in models:
        tag = model["tag"] + (f"@{model['revision']}" if model["revision"] else "")
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(model["modified"]))
        state = "" if model["state"] == "complete" else f" ({model['state']})"
        rows.append((model["name"], tag, format_size(model["size"]), when, model["source"] + state))
    for line in in_columns(rows):
        print(printable(line))
