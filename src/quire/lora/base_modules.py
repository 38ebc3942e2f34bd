"""The matrices of a base model that an adapter can change, and the names that adapters have for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from quire.loader.renamed import renamed
from quire.loader.stacked import Stack, stacks_of
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.program.tensors import Param
from quire.records import dataclass
from quire.spec import Attention, ModelSpec, MoE
from quire.spec.model import MLP


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows [first, first + count) of a module."""

    module: str
    first: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class BaseModules:
    """The modules of a base model by their names in ModelSpec.names.

    `params`: those of its program, by which weights are loaded. `shapes`: [out, in] of every matrix; of embedding and
    head [vocabulary, width]. `whole`: the modules that an adapter may replace: embedding and head. `fused`: names of
    linears that the checkpoint stores as rows of another one. `stacks`: tensors of transformers that hold all experts
    of a layer, by name.
    """

    spec: ModelSpec
    params: Sequence[Param]
    shapes: Mapping[str, tuple[int, int]]
    whole: frozenset[str]
    fused: Mapping[str, RowRange]
    stacks: Mapping[str, Stack]
    aliases: Mapping[str, str]

    @classmethod
    def of(cls, spec: ModelSpec) -> BaseModules:
        """The modules of a model. A tied head is one of its own here, which starts as the embedding."""
        tables = [name.removesuffix(".weight") for name in (spec.names.embed, spec.names.head) if name]
        shapes: dict[str, tuple[int, int]] = dict.fromkeys(
            tables[: 1 + (spec.pooling is None)], (spec.vocab, spec.dim)
        )
        params = lower(spec, NumberFormats()).params
        for param in params:
            if param.kind == "linear":
                for part in param.parts:
                    rows, cols = part.shape
                    shapes[part.tensor.removesuffix(".weight")] = (rows, cols)
        stacks = {stack.name: stack for stack in stacks_of(spec) if stack.cols}
        aliases = {}
        if spec.stacks.router:
            for i in (i for i, layer in enumerate(spec.layers) if isinstance(layer.mlp, MoE)):
                aliases[spec.stacks.router.format(i=i)] = spec.names.router.format(i=i)
        whole = frozenset(name for name in tables if name in shapes)
        return cls(spec, params, shapes, whole, dict(_fused(spec)), stacks, aliases)

    def name(self, module: str) -> str:
        """The name in ModelSpec.names of a module by its name in transformers or in the checkpoint."""
        if module in self.shapes or module in self.fused or module in self.stacks:
            return module
        wanted = renamed(module, self.spec.prefixes)
        return self.aliases.get(wanted, wanted)


def linears(stack: Stack, expert: int) -> Iterator[tuple[str, slice]]:
    """The modules of an expert in a stack, and the rows that each has of the expert's matrix."""
    tensors = stack.experts[expert]
    each = stack.rows // len(tensors)
    for k, name in enumerate(tensors):
        rows = slice(k, None, len(tensors)) if stack.interleaved else slice(k * each, (k + 1) * each)
        yield name.removesuffix(".weight"), rows


def _fused(spec: ModelSpec) -> Iterator[tuple[str, RowRange]]:
    """The rows of fused linears by the names that the parts have elsewhere."""
    names = spec.names
    for i, layer in enumerate(spec.layers):
        groups: list[tuple[str, list[tuple[str, int]]]] = []
        if names.qkv and isinstance(layer.mixer, Attention):
            att = layer.mixer
            of_kv = att.kv_heads * att.head_dim
            groups.append(
                (names.qkv, [(names.q, att.heads * att.head_dim), (names.k, of_kv), (names.v, of_kv)])
            )
        if isinstance(layer.mlp, MLP) and layer.mlp.gated:
            gate, up = (names.gate, layer.mlp.width), (names.up, layer.mlp.width)
            if names.gate_up:
                groups.append((names.gate_up, [gate, up]))
            elif names.up_gate:
                groups.append((names.up_gate, [up, gate]))
        for fused, parts in groups:
            first = 0
            for name, count in parts:
                if name:
                    yield name.format(i=i), RowRange(fused.format(i=i), first, count)
                first += count
