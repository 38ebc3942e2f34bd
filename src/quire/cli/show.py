"""Show a model: where it is from, its licence, its files with their digests, and what `quire inspect` says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from quire.types import QuireError
from quire.util.printable import printable
from quire.util.sizes import format_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a name that quire list shows, a folder, or a GGUF file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from quire.cli import inspect
    from quire.cli.main import command_parser
    from quire.loader import resolve_model

    path = resolve_model(args.model)
    origin = _origin(args.model, path)
    asked = command_parser("inspect").parse_args([str(path), "--no-measure", "--quiet"])
    try:
        report, problem = inspect.describe_named(str(path), asked), None
    except QuireError as error:  # the files are here all the same
        report, problem = None, str(error)
    if args.json:
        print(json.dumps({**origin, "inspect": report, "problem": problem}))
        return 0
    print("\n".join(map(printable, _lines(origin))))
    print()
    if report is not None:
        print("\n".join(map(printable, inspect.report_lines(report, all_ops=False))))
    else:
        print(printable(f"quire cannot run it: {problem}"))
    return 0


def _origin(name: str, path: Path) -> dict[str, Any]:
    """Source, licence and files of a model; without a manifest, its path and files."""
    from quire.store.gguf_names import shards
    from quire.store.stored import stored_manifest

    manifest = None if Path(name).expanduser().exists() else stored_manifest(name)
    if manifest is None:
        files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else shards(path)
        listed = [{"name": file.name, "size": file.stat().st_size, "digest": ""} for file in files]
        return {
            "name": name,
            "path": str(path),
            "source": str(path),
            "commit": "",
            "licence": "",
            "files": listed,
        }
    return {
        "name": manifest.reference, "path": str(path), "source": manifest.source, "commit": manifest.commit,
        "licence": manifest.licence,
        "files": [{"name": file.name, "size": file.size, "digest": f"sha256:{file.sha256}"} for file in manifest.files],
    }  # fmt: skip


def _lines(origin: dict[str, Any]) -> list[str]:
    facts = {name: origin[name] for name in ("name", "source", "commit", "licence", "path") if origin[name]}
    lines = [f"{name:<8} {value}" for name, value in facts.items()]
    return lines + [
        f"  {format_size(file['size']):>11}  {file['name']}  {file['digest']}".rstrip()
        for file in origin["files"]
    ]
