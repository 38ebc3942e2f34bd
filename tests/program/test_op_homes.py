"""An op has one home: everything about it follows from its class, and few files name it."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import quire
from helpers.specs import F32, decoder_spec, moe_spec, with_latents
from quire.executor.base import Limits, StepArrays
from quire.executor.native import NativeExecutor
from quire.executor.torch import TorchExecutor, operands
from quire.executor.torch.operands import Operands, defines
from quire.loader import RandomWeights, load
from quire.program.cost import Row, step_cost
from quire.program.lower import lower
from quire.program.memory import live_buffers, plan_arena
from quire.program.op import Change, Op, Read, Weight, Write, param_names, reads, roles, writes
from quire.program.ops.linear import Linear
from quire.program.ops.rows import Norm
from quire.program.program import Program
from quire.program.work import Cost, Work
from quire.records import dataclass
from quire.spec import Router

SOURCE = Path(quire.__file__).parents[2]
LIMITS = Limits(max_tokens=8, max_rows=1, max_logit_rows=2, max_len=16, num_blocks=1)


@dataclass(frozen=True, slots=True)
class Mirror(Op):
    """out = -x; not an op of any model."""

    x: Read
    out: Write
    table: Weight | None = None
    beside: Change | None = None

    def cost(self, work: Work, n: int) -> Cost:
        return Cost(n * work.buffers[self.x].cols, activation_bytes=n * work.rows_bytes(self.x, self.out))


def with_toy() -> tuple[Program, Program]:
    """A program, and the same with its logits mirrored twice at the end."""
    plain = lower(decoder_spec(40, 16, 24, (2, 1, 8), [0]), F32)
    back = replace(plain.buffer("logits"), name="mirror")
    ops = (*plain.head, Mirror("logits", "mirror"), Mirror("mirror", "logits"))
    return plain, replace(plain, head=ops, buffers=(*plain.buffers, back))


def logits(program: Program) -> np.ndarray:
    executor = TorchExecutor(program)
    load(program.params, RandomWeights(program.params), executor)
    arrays = StepArrays(LIMITS, 1)
    executor.bind(LIMITS, arrays)
    arrays.query_start[1] = 2
    arrays.positions[:2] = 0, 1
    arrays.logit_rows[:2] = 0, 1
    return executor.run(2, 1, 2)["logits"].copy()


def test_roles_follow_from_fields() -> None:
    op = Mirror("a", "b", "w")
    assert (reads(op), writes(op), param_names(op)) == (("a",), ("b",), ("w",))
    both = replace(op, beside="c")
    assert (reads(both), writes(both)) == (("a", "c"), ("b", "c"))
    assert list(roles(Mirror)) == ["x", "out", "table", "beside"]
    # only when another field is set
    norm = Norm("x", None, None, 1e-6, "y")
    assert (reads(norm), writes(norm)) == (("x",), ("y",))
    assert writes(replace(norm, delta="d")) == ("x", "y")
    linear = Linear("x", "w", None, "y")
    assert (reads(linear), reads(replace(linear, first=64))) == (("x",), ("x", "y"))


def test_an_op_is_added_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory, cost and the definition need nothing but the op's own class; the native executor refuses it by name."""
    plain, program = with_toy()
    with pytest.raises(NotImplementedError, match="Mirror"):
        logits(program)
    monkeypatch.setattr(operands, "_DEFINITIONS", dict(operands._DEFINITIONS))

    @defines(Mirror)
    def _mirror(on: Operands, op: Mirror) -> None:
        on.buffer(op.out).copy_(-on.buffer(op.x))

    assert live_buffers(program)[-1] >= {"logits", "mirror"}
    offsets = plan_arena(program, 8, 2).offsets
    assert offsets["mirror"] != offsets["logits"]
    assert step_cost(program, [Row(2, 0)], 2).ops[-1] == Cost(2 * 40, activation_bytes=2 * 2 * 40 * 4)
    np.testing.assert_array_equal(logits(program), logits(plain))
    native = NativeExecutor(program, threads=1)
    with pytest.raises(ValueError, match="no op of kind 'Mirror'"):
        native.bind(LIMITS, StepArrays(LIMITS, 1))


def test_every_op_has_a_native_struct_that_reads_its_fields() -> None:
    """A field that a struct does not read, or that it misses, is refused when the op is made."""
    router = Router(4, 2)
    specs = decoder_spec(40, 16, 24, (2, 1, 8), [0]), moe_spec(router), with_latents(moe_spec(router))
    kinds = set()
    for spec in specs:
        program = lower(spec, F32, fused=False)
        kinds |= {type(op) for op in program.ops}
        executor = NativeExecutor(program, threads=1)
        executor.bind(LIMITS, StepArrays(LIMITS, len(program.cache_groups)))
        core, fields = executor.core, {"x": "residual", "delta": "residual", "scale": 1.0, "act": None}
        core.add_op("Add", fields)
        with pytest.raises(ValueError, match=r"Add\.scale: missing"):
            core.add_op("Add", {"x": "residual", "delta": "residual"})
        with pytest.raises(ValueError, match=r"Add\.cap: this op has no such field"):
            core.add_op("Add", fields | {"cap": 0.0})
        with pytest.raises(ValueError, match=r"Add\.delta: no buffer is named 'nothing'"):
            core.add_op("Add", fields | {"delta": "nothing"})
        with pytest.raises(ValueError, match=r"Add\.scale: must be a number"):
            core.add_op("Add", fields | {"scale": "1"})
    assert len(kinds) >= 12


def op_homes() -> dict[str, str]:
    """The module of every op by its name, from the files of program/ops."""
    files = (SOURCE / "src/quire/program/ops").glob("*.py")
    kinds = re.compile(r"^class (\w+)\(Op\)", re.M)
    return {
        kind: f"quire.program.ops.{path.stem}" for path in files for kind in kinds.findall(path.read_text())
    }


def test_only_its_definition_and_lowering_name_an_op() -> None:
    """Its class is imported by one file of definitions and by lowering; one C++ file registers it."""
    homes = op_homes()
    definitions: dict[str, list[str]] = {kind: [] for kind in homes}
    for path in (SOURCE / "src/quire").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "quire.program.ops" in text else ():
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "quire.program.ops"
            ):
                continue
            for kind in {alias.name for alias in node.names} & set(homes):
                if path.parent.name == "torch":
                    definitions[kind].append(path.name)
                elif (
                    path.relative_to(SOURCE / "src/quire").parts[0] != "offline"
                ):  # which looks at what linears read
                    assert re.match("lower|fuse", path.name), f"{path} imports {kind}"
    natives_alone = {"ShareTokens", "ReturnRows"}  # replicas share experts in the native executor
    assert {kind: len(found) for kind, found in definitions.items()} == {
        kind: int(kind not in natives_alone) for kind in homes
    }
    if (SOURCE / "csrc").exists():
        natives = "".join(path.read_text() for path in (SOURCE / "csrc/ops").glob("*.cpp"))
        assert sorted(re.findall(r"^QUIRE_OP\((\w+)\)", natives, re.M)) == sorted(homes)
