"""One name, one thing: public classes are named once in the package, and files are findable by their name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import quire

ROOT = Path(quire.__file__).parent
# Rooms whose files may be called like those of others, each with its reason.
PAIRED = {
    "cli": "a command is named after what it runs: cli/benches/latency runs bench/latency",
    "spec/families": "a family is named after its models",
    "executor/torch": "definitions are named after the room whose part they define: program/ops/experts",
}


def definitions() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Files of each public class, and of each alias of a type, by name."""
    classes, aliases = defaultdict(list), defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            where = str(path.relative_to(ROOT))
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(where)
            elif isinstance(node, ast.Assign) and isinstance(name := node.targets[0], ast.Name):
                aliases[name.id].append(where)
    return classes, aliases


def test_public_classes_are_named_once() -> None:
    classes, aliases = definitions()
    twice = {name: files for name, files in classes.items() if len(files) > 1}
    assert not twice, f"classes of one name: {twice}"
    hidden = {name: [*files, *aliases[name]] for name, files in classes.items() if name in aliases}
    assert not hidden, f"a class and an alias of one name: {hidden}"
    assert len(classes) > 300, "the test does not find the classes"


def test_files_are_named_once() -> None:
    files = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        where = path.relative_to(ROOT)
        if path.name != "__init__.py" and not any(where.is_relative_to(room) for room in PAIRED):
            files[path.name].append(str(where))
    assert not (twice := {name: found for name, found in files.items() if len(found) > 1}), f"{twice}"
