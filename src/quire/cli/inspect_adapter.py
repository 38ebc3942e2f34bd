"""Show an adapter: its kind and base, ranks, what it changes, bytes and digest."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.util.printable import printable
from quire.util.sizes import format_size

if TYPE_CHECKING:
    from quire.lora.module_pairs import AdaptedModule, AdapterFile


def adapter_named(name: str) -> Path | None:
    """The adapter that a name means: a path, or the name of a shipped one; None for a model."""
    from quire.config.shipped import shipped_adapters

    path = Path(name).expanduser()
    if not path.exists():
        return shipped_adapters().get(name)
    from quire.lora.read import names_adapter

    return path if names_adapter(path) else None


def inspect_adapter(path: Path, *, as_json: bool) -> int:
    """Print what an adapter is. Raises CheckpointError for what could not be used with any model."""
    from quire.lora.read import open_adapter

    with open_adapter(path) as file:
        report = _report(path, file)
    if as_json:
        json.dump(report, sys.stdout)
        print()
    else:
        print("\n".join(map(printable, _lines(report))))
    return 0


def _report(path: Path, file: AdapterFile) -> dict[str, Any]:
    from quire.lora.read import digest_of

    facts, targets = file.facts(), file.targets()
    return {
        "adapter": str(path),
        "format": facts.format,
        "method": facts.method,
        "base": facts.base,
        "rank": facts.rank,
        "alpha": list(facts.alpha),
        "bytes": facts.nbytes,
        "parameters": sum(target.parameters for target in targets),
        "modules": sum(target.experts for target in targets),
        "targets": _kinds(targets),
        "modules_to_save": {target.module: list(target.shape) for target in targets if not target.rank},
        "digest": digest_of(path, file),
    }


def _kinds(targets: Sequence[AdaptedModule]) -> list[dict[str, Any]]:
    """The modules of one kind, rank and shape together; a kind is the last word of the name."""
    found: dict[tuple[str, int, tuple[int, int], int], dict[str, Any]] = {}
    for target in targets:
        if not target.rank:
            continue
        kind = target.module.rpartition(".")[2]
        entry = found.setdefault(
            (kind, target.rank, target.shape, target.experts),
            {"kind": kind, "rank": target.rank, "shape": list(target.shape), "modules": 0, "parameters": 0},
        )
        entry["modules"] += target.experts
        entry["parameters"] += target.parameters
    return list(found.values())


def _lines(report: dict[str, Any]) -> list[str]:
    alpha = ", ".join(f"{value:g}" for value in report["alpha"]) or "none"
    lines = [
        f"{report['method']} adapter ({report['format']})  {report['adapter']}",
        f"  for {report['base'] or 'a model that it does not name'}; rank {report['rank']}, alpha {alpha}",
        f"  {report['parameters'] / 1e6:.3f} M parameters of {report['modules']} modules, "
        f"{format_size(report['bytes'])}",
        f"  sha256 {report['digest']}",
        "",
        "modules",
    ]
    for entry in report["targets"]:
        out, inputs = entry["shape"]
        lines.append(
            f"  {entry['kind']:<16} x{entry['modules']:<5} rank {entry['rank']:<4} [{out}, {inputs}]"
            f"  {entry['parameters'] / 1e6:.3f} M"
        )
    for module, shape in report["modules_to_save"].items():
        lines.append(f"  {module} is replaced as a whole: {shape}")
    return lines
