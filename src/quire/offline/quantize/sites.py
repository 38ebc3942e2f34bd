"""The linears of a layer's program: which tensors of the checkpoint they are, and where their inputs come from."""

from __future__ import annotations

from collections.abc import Sequence

from quire.program.op import Op, reads, writes
from quire.program.ops.attention import Attend
from quire.program.ops.experts import Experts
from quire.program.ops.linear import HeadLinear, Linear
from quire.program.ops.rows import Activate, Add, GatedAct, Norm
from quire.program.program import Program
from quire.program.tensors import Param, Part
from quire.records import dataclass
from quire.spec.model import ClampedSwiGLU

RESIDUAL = "residual"  # the buffer of the residual stream
_FLOAT_LINEARS = (".router", ".shared_gate")  # always computed in float32


@dataclass(frozen=True, slots=True)
class Module:
    """A tensor of the checkpoint that is quantized: [rows, cols]. `expert` is its number, -1 outside of experts."""

    tensor: str
    rows: int
    cols: int
    expert: int = -1

    @property
    def name(self) -> str:
        return self.tensor.removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class AbsorbingRows:
    """Rows [first, first + count) of a tensor, whose outputs a later linear takes times something."""

    tensor: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Absorber:
    """What can divide the inputs of a site by a factor per column, so that its weights are multiplied by it.

    A norm's vectors `vectors` (its weight and bias; `added` is added to the stored weight), or the `rows` of a linear:
    values of attention with `repeats` query heads of `head_dim` to a head of values, or the "up" of a gated product.
    """

    vectors: tuple[str, ...] = ()
    added: float = 0.0
    rows: AbsorbingRows | None = None
    repeats: int = 1
    head_dim: int = 0


@dataclass(frozen=True, slots=True)
class Site:
    """Linears that take one buffer, which op number `op` is the first to read. `ids` and `places`: of experts.

    `followers` are tensors of linears with the same inputs that stay floats. `added`: the buffer of the outputs of its
    only linear, if these are added to the residual stream as they are; else empty.
    """

    op: int
    buffer: str
    cols: int
    modules: tuple[Module, ...]
    followers: tuple[str, ...] = ()
    absorber: Absorber | None = None
    ids: str = ""
    places: str = ""
    added: str = ""

    @property
    def experts(self) -> int:
        """How many get inputs of their own; 1 outside of experts."""
        return max(len({module.expert for module in self.modules}), 1)


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Linears of a layer that are rounded together: those of sites, and those whose inputs are never seen."""

    sites: tuple[Site, ...] = ()
    unseen: tuple[Module, ...] = ()


def together(program: Program, sites: Sequence[Site]) -> list[tuple[Site, ...]]:
    """Sites in groups between which lies more than activations: down goes with gate and up."""
    found: list[tuple[Site, ...]] = []
    for site in sites:
        between = program.body[found[-1][-1].op : site.op] if found else ()
        near = found and all(isinstance(op, Linear | GatedAct | Activate) for op in between)
        if near:
            found[-1] = (*found[-1], site)
        else:
            found.append((site,))
    return found


class _Open:
    """A site whose buffer still has the same content."""

    def __init__(self, op: int, buffer: str, cols: int, ids: str, places: str) -> None:
        self.op, self.buffer, self.cols, self.ids, self.places = op, buffer, cols, ids, places
        self.modules: dict[str, Module] = {}
        self.followers: list[str] = []

    def add(self, parts: tuple[Part, ...], each: int) -> None:
        """Add the tensors of a parameter; `each` parts belong to one expert, 0 without experts."""
        for number, part in enumerate(parts):
            rows, cols = part.shape if len(part.shape) == 2 else (part.rows, part.cols)
            expert = number // each if each else -1
            self.modules.setdefault(part.tensor, Module(part.tensor, rows, cols, expert))


def sites_of(program: Program, index: int) -> tuple[Site, ...]:
    """The sites of the body of layer `index`'s program, in the order of ops."""
    params = {param.name: param for param in program.params}
    found: list[_Open] = []
    last: dict[str, _Open] = {}  # buffer -> its site, while nothing wrote to it
    for at, op in enumerate(program.body):
        if isinstance(op, Linear | Experts) and op.weight.startswith(f"layers.{index}."):
            param = params[op.weight]
            site = last.get(op.x)
            if site is None:
                ids, places = (op.ids, op.places) if isinstance(op, Experts) else ("", "")
                site = last[op.x] = _Open(at, op.x, param.cols, ids, places)
                found.append(site)
            if op.weight.endswith(_FLOAT_LINEARS):
                site.followers += [part.tensor for part in param.parts]
            else:
                site.add(param.parts, len(param.parts) // param.experts if param.experts else 0)
        for buffer in writes(op):
            last.pop(buffer, None)
    return tuple(
        Site(
            site.op, site.buffer, site.cols, tuple(site.modules.values()), tuple(site.followers),
            _absorber(program, site), site.ids, site.places, _added(program, site),
        )
        for site in found if site.modules
    )  # fmt: skip


def _added(program: Program, site: _Open) -> str:
    """See Site."""
    op = program.body[site.op]
    if not isinstance(op, Linear) or len(site.modules) != 1 or site.followers:
        return ""
    if op.act is not None or op.bias is not None or op.first or op.rows or program.buffer(op.out).per != 1:
        return ""
    reader = next((other for other in program.body[site.op + 1 :] if op.out in reads(other)), None)
    if isinstance(reader, Norm):
        as_it_is = (reader.x, reader.delta) == (RESIDUAL, op.out)
    else:
        as_it_is = isinstance(reader, Add) and (reader.x, reader.scale, reader.act) == (RESIDUAL, 1.0, None)
    return op.out if as_it_is else ""


def unseen_modules(program: Program, index: int) -> tuple[Module, ...]:
    """Linears that the program never gives their inputs as the checkpoint's modules have them (latent attention's)."""
    params = {param.name: param for param in program.params}
    found: dict[str, Module] = {}
    for op in program.body:
        if isinstance(op, HeadLinear) and op.weight.startswith(f"layers.{index}."):
            for part in params[op.weight].parts:
                rows, cols = part.shape
                found.setdefault(part.tensor, Module(part.tensor, rows, cols))
    return tuple(found.values())


def _absorber(program: Program, site: _Open) -> Absorber | None:
    """What fills the buffer of a site, if it can absorb factors and nothing else reads them."""
    body, params = program.body, {param.name: param for param in program.params}
    producer = next((at for at in range(site.op - 1, -1, -1) if site.buffer in writes(body[at])), None)
    if site.ids or producer is None:
        return None
    readers = {part.tensor for name in _readers(program, producer, site) for part in params[name].parts}
    if readers != set(site.modules) | set(site.followers):
        return None
    op = body[producer]
    if isinstance(op, Norm):
        return _of_norm(op, params)
    return _of_linear(program, producer, op, params)


def _of_norm(op: Norm, params: dict[str, Param]) -> Absorber | None:
    if op.weight is None or op.out == op.x:
        return None
    weight = params[op.weight].parts[0]
    bias = () if op.bias is None else (params[op.bias].parts[0].tensor,)
    return Absorber((weight.tensor, *bias), weight.added)


def _of_linear(program: Program, at: int, op: Op, params: dict[str, Param]) -> Absorber | None:
    """Values of attention, and the "up" of a gated product: their outputs reach the site times something."""
    before, act = None, None
    if isinstance(op, Attend):
        before = _filled_by(program, at, op.qkv)
    elif isinstance(op, GatedAct):
        before, act = _filled_by(program, at, op.gate_up), op.act
    elif isinstance(op, Linear) and op.act is not None and op.up:
        before, act = op, op.act
    if before is None or isinstance(act, ClampedSwiGLU):
        return None
    parts = params[before.weight].parts
    if not isinstance(op, Attend):
        return (
            Absorber(rows=AbsorbingRows(parts[1].tensor, parts[1].first, parts[1].rows))
            if len(parts) == 2
            else None
        )
    shape = op.shape
    if len(parts) != 3 or parts[2].rows != shape.kv_heads * shape.head_dim:
        return None
    values = AbsorbingRows(parts[2].tensor, parts[2].first, parts[2].rows)
    return Absorber(rows=values, repeats=shape.heads // shape.kv_heads, head_dim=shape.head_dim)


def _readers(program: Program, producer: int, site: _Open) -> list[str]:
    """The weights of all ops that read what the producer left; none if one of them is no linear."""
    found: list[str] = []
    for op in program.body[producer + 1 :]:
        if site.buffer in reads(op):
            if not isinstance(op, Linear):
                return []
            found.append(op.weight)
        if site.buffer in writes(op):
            break
    return found


def _filled_by(program: Program, before: int, buffer: str) -> Linear | None:
    """The linear that filled a buffer whole."""
    for op in reversed(program.body[:before]):
        if isinstance(op, Linear) and op.out == buffer:
            return op if op.first == 0 else None
    return None
