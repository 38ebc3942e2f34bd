"""The rooms of the architecture: which room may import which, checked for every import."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import quire

ROOT = Path(quire.__file__).parent
RANKS = [
    {"records", "_native"},
    {
        "answers",
        "beams",
        "cache_kinds",
        "draft_paths",
        "logprobs",
        "objectives",
        "output_hook",
        "parameters",
        "routing",
    },
    {"types"},
    {"util"},
    {"config", "context_window", "outputs"},
    {"core", "mcp", "spec", "text"},
    {"program", "steplog", "structured"},
    {"planner", "quant", "store"},
    {"loader"},
    {"executor", "reference"},
    {"learn", "lora"},
    {"worker"},
    {"speculate"},
    {"engine"},
    {"server", "offline", "train"},
    {"llm", "bench", "router"},
    {"lang", "ray"},
    {"cli"},
    {"__main__"},
]
RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}
# Broad exception handlers stand only at edges: file -> why.
BROAD = {
    "loader/hub.py": "the network edge: three HTTP libraries without a common base",
    "worker/nixl_area.py": "NIXL's errors have no common base; they become those of a connection",
    "text/tokenizer.py": "the tokenizers library raises plain Exception and panics",
    "engine/front/given_texts.py": "a request whose output cannot be read, for whatever reason, ends with an error",
    "engine/front/stream.py": "what a reader's sink raises must not end the step of all the others",
    "server/tracing.py": "the network edge: a collector must not end the thread that posts",
    "speculate/speculation.py": "a proposer that fails must not end the requests it guesses for",
    "util/supervised.py": "a question that fails, in whatever way, must not end the watch over the process",
    "server/output_hooks.py": "an operator's code: whatever it raises is a failure of that call alone",
    "server/fleet/fleet_app.py": "the edge of a request, as in server/app.py",
    "server/kserve/grpc_connection.py": "the edge of a call, as in server/app.py",
    "router/router_app.py": "the edge of a request, as in server/app.py",
    "server/app.py": "the edge of a request: whatever fails becomes one error response and a log line",
}


def python_files() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0].removesuffix(".py") if len(parts) == 1 else parts[0]


@dataclass
class Facts:
    """What the rules ask of a file, found in one walk: a tree itself would take much memory."""

    imports: list[ast.Import | ast.ImportFrom] = field(default_factory=list)
    asked: list[tuple[int, set[str]]] = field(
        default_factory=list
    )  # line of an isinstance, the names of classes
    names: set[str] = field(default_factory=set)
    broad: bool = False  # it has a handler of any exception
    functions: list[tuple[str, int, int]] = field(default_factory=list)  # name, lines, positional arguments

    def add(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            self.imports.append(node)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            self.asked.append((node.lineno, {getattr(name, "id", "") for name in ast.walk(node.args[1])}))
        elif isinstance(node, ast.Name):
            self.names.add(node.id)
        elif isinstance(node, ast.Attribute):
            self.names.add(node.attr)
        elif isinstance(node, ast.ExceptHandler):
            kinds = [n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)] if node.type else ["bare"]
            self.broad |= not {"Exception", "BaseException", "bare"}.isdisjoint(kinds) and not reraises(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            own = node.args.args[:1] != [] and node.args.args[0].arg in {"self", "cls"}
            length = node.end_lineno - node.lineno + 1
            self.names.add(node.name)
            self.functions.append((node.name, length, len(node.args.args) - own))


@functools.cache
def facts(path: Path) -> Facts:
    """Also of what is inside functions and under TYPE_CHECKING."""
    found = Facts()
    for node in ast.walk(ast.parse(path.read_text())):
        found.add(node)
    return found


def imported_rooms(path: Path) -> Iterator[tuple[str, int]]:
    """Rooms named by any import."""
    for node in facts(path).imports:
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module] if node.module != "quire" else [f"quire.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "quire" and len(parts) > 1 and parts[1] in RANK:
                yield parts[1], node.lineno


@pytest.mark.parametrize("path", python_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_rooms_import_downwards(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":  # the package's public names, resolved on first use
        return
    assert room in RANK, f"{room} has no rank: add it to the architecture and here"
    for target, line in imported_rooms(path):
        below = target == room or RANK[target] < RANK[room]
        assert below, f"{path.relative_to(ROOT)}:{line}: {room} (rank {RANK[room]}) imports {target}"


PARTS_OF_ENGINE = (
    "policies", "request_forms", "usage_ledger", "view", "cache_log", "api", "beam_sequences", "whole_batches",
    "planned_step", "core",
    "build", "host", "front", "sync_engine", "shared_engine",
)  # fmt: skip


def test_parts_of_the_engine_import_downwards() -> None:
    ranks = {name: rank for rank, name in enumerate(PARTS_OF_ENGINE)}
    for module, targets in import_graph().items():
        part = module.split(".")[2:3] if module.startswith("quire.engine.") else []
        for target in targets if part else ():
            if target.startswith("quire.engine."):
                below = target.split(".")[2]
                assert below == part[0] or ranks[below] < ranks[part[0]], f"{module} imports {target}"


def test_modules_do_not_import_each_other_in_circles() -> None:
    """Also inside a room, inside functions and under TYPE_CHECKING."""
    graph = import_graph()
    graph.pop("quire")  # the package's public names, resolved on first use
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"circle: {' -> '.join(reversed(error.args[1]))}")


def import_graph() -> dict[str, set[str]]:
    """Modules of the package, and the modules that each imports."""
    modules = {
        ".".join(("quire", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in python_files()
    }
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = graph[module] = set()
        for node in facts(path).imports:
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {name if name in modules else node.module for name in names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        found &= modules.keys() - {module, "quire"}
    return graph


def test_the_scheduling_half_needs_only_the_standard_library() -> None:
    import sys

    for path in (ROOT / "core").glob("*.py"):
        for node in facts(path).imports:
            names = []
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                top = name.split(".")[0]
                assert top in sys.stdlib_module_names or name.split(".")[:2] in (
                    ["quire", "core"],
                    ["quire", "beams"],
                    ["quire", "records"],
                    ["quire", "cache_kinds"],
                    ["quire", "context_window"],
                    ["quire", "logprobs"],
                    ["quire", "objectives"],
                    ["quire", "types"],
                ), f"{path.name} imports {name}"


@pytest.mark.parametrize("path", python_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_torch_stays_in_its_room(path: Path) -> None:
    if path.is_relative_to(ROOT / "executor" / "torch") or path.is_relative_to(ROOT / "train"):
        return
    for node in facts(path).imports:
        if isinstance(node, ast.Import):
            assert all(a.name.split(".")[0] not in {"torch", "transformers"} for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.module.split(".")[0] not in {"torch", "transformers"}


KINDS = {"NativeExecutor", "NativeKind", "TorchExecutor", "TorchKind"}


def test_one_module_knows_which_executors_there_are() -> None:
    """Others use the protocols of executor/base: they import no kind of executor, and ask none for its class."""
    graph, homes = import_graph(), ("quire.executor.native", "quire.executor.torch")
    importers = {
        module
        for module, targets in graph.items()
        if not module.startswith(homes) and any(target.startswith(homes) for target in targets)
    }
    assert importers == {"quire.executor.kinds"}
    for path in python_files():
        for line, asked in facts(path).asked:
            assert not asked & {*KINDS, "Executor"}, f"{path.relative_to(ROOT)}:{line}"


def test_models_are_named_only_in_families() -> None:
    """A model's name in generic code would be a special case for it. Ollama and llama-server are APIs."""
    names = ("llama", "mistral", "qwen", "gemma", "deepseek", "mixtral")
    for path in python_files():
        room = room_of(path)
        if room in {"spec", "text"}:  # families; tokenizer pipelines known by the model that brought them
            continue
        for found in facts(path).names:
            name = re.sub("ollama|llama_?server", "", found.lower())
            assert not any(n in name for n in names), f"{path.relative_to(ROOT)}: {name}"


def test_broad_handlers_are_known() -> None:
    found = {str(path.relative_to(ROOT)) for path in python_files() if facts(path).broad}
    assert found <= set(BROAD), f"new broad exception handlers: {found - set(BROAD)}"


def reraises(node: ast.ExceptHandler) -> bool:
    last = node.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


MAX_FILE, MAX_FUNCTION, MAX_ARGUMENTS = 600, 60, 8


@pytest.mark.parametrize("path", python_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_sizes(path: Path) -> None:
    """Files, functions and argument lists stay small enough to hold in the head."""
    assert path.read_text().count("\n") <= MAX_FILE
    for name, length, positional in facts(path).functions:
        assert length <= MAX_FUNCTION, f"{name} has {length} lines"
        assert positional <= MAX_ARGUMENTS, f"{name} takes {positional} arguments"


def test_what_breaks_a_rule_is_found(tmp_path: Path) -> None:
    """Negative control of what is asked of a file."""
    path = tmp_path / "wrong.py"
    path.write_text(
        "async def f(self, a, b):\n    import torch\n    isinstance(a, (TorchExecutor, x))\n"
        "    try:\n        qwen.g()\n    except (ValueError, Exception):\n        pass\n"
    )
    found = facts(path)
    assert [node.names[0].name for node in found.imports] == ["torch"]
    assert found.asked == [(3, {"", "TorchExecutor", "x"})]
    assert found.names >= {"f", "qwen", "g"}
    assert found.broad
    assert found.functions == [("f", 7, 2)]
    path = tmp_path / "right.py"
    path.write_text("try:\n    f()\nexcept Exception:\n    g()\n    raise\n")
    assert not facts(path).broad


NATIVE = sorted(p for p in (ROOT.parents[1] / "csrc").rglob("*") if p.suffix in {".cpp", ".h"})


def native_functions(source: str) -> Iterator[tuple[str, int]]:
    """First lines of functions in formatted C++, and their lengths: those of namespaces, and those of classes."""
    lines = source.splitlines()
    for i, line in enumerate(lines):
        if not line.endswith("{") or ")" not in line:
            continue
        first, head = i, line  # of a signature on several lines
        while (
            head.count(")") > head.count("(")
            or head.lstrip().startswith(":")
            or lines[first - 1].endswith(",")
        ):
            first -= 1
            head = lines[first] + head
        indent = len(head) - len(head.lstrip())
        if indent in {0, 2} and head.split()[0] not in {"for", "if", "while", "switch", "//", "#define"}:
            end = next(j for j in range(i, len(lines)) if lines[j].startswith(" " * indent + "}"))
            yield lines[first].strip(), end - first + 1


@pytest.mark.parametrize("path", NATIVE, ids=lambda p: p.name)
def test_sizes_of_native_files(path: Path) -> None:
    source = path.read_text()
    assert source.count("\n") <= MAX_FILE
    assert {name: length for name, length in native_functions(source) if length > MAX_FUNCTION} == {}


def test_a_long_native_function_would_be_seen() -> None:
    """Negative control, of a function, and of a member whose parameters take two lines."""
    body = "  run();\n" * 60
    member = "class A {\n  int run(int a,\n          int b) {\n" + body + "  }\n};\n"
    assert list(native_functions("void run() {\n" + body + "}\n")) == [("void run() {", 62)]
    assert list(native_functions(member)) == [("int run(int a,", 63)]
    assert list(native_functions("A::A(int a)\n    : b(a),\n      c(a) {\n" + body + "}\n")) == [
        ("A::A(int a)", 64)
    ]
