"""Lowering of latent attention, absorbed: queries are taken into the latent space, sums of latents out of it."""

from __future__ import annotations

from quire.program.formats import WeightFormat
from quire.program.lowering import Lowering
from quire.program.ops.attention import LatentAttend, LatentShape, LatentWrite
from quire.program.ops.rows import Norm
from quire.program.ranks import Share
from quire.program.tensors import AdaptedPart, KVLayer, Param, Part
from quire.spec import LatentAttention


def latent_input(to: Lowering, index: int, att: LatentAttention) -> str:
    """The buffer that the norm before a layer's mixer fills; float32 when its linears want other formats."""
    wanted = {to.formats.of(f"layers.{index}.{name}").inputs for name in ("kv_a", _queries(att))}
    return to.buffer("hidden", to.spec.dim, wanted.pop() if len(wanted) == 1 else "f32")


def kept_latent(to: Lowering, index: int, att: LatentAttention) -> tuple[KVLayer, ...]:
    """A latent, and the key that all heads share."""
    del to
    return (KVLayer(index, 1, att.cached, att.window, latent=True),)


def lower_latent(to: Lowering, index: int, att: LatentAttention, hidden: str) -> str:
    """Append a layer's latent attention over `hidden`; returns the buffer of the branch."""
    names, at, layer = to.spec.names, f"layers.{index}", to.kv_numbers[index]
    to.axes["heads"] = share = to.plan.heads(att.heads, att.heads)[0]
    heads = share.count
    form = WeightFormat(to.formats.weights).inputs  # of what the linears by head take
    shape = LatentShape(heads, att.kv_rank, att.nope_dim, att.rope_dim)
    q = _project_queries(to, index, att, hidden)
    kv = to.buffer("kv", att.cached, "f32")
    _linear(to, f"{at}.kv_a", hidden, kv, names.kv_a.format(i=index), att.cached, bias=att.bias)
    norm = to.vector(f"{at}.kv_a_norm", (Part(f"{names.kv_a_norm.format(i=index)}.weight", att.kv_rank),))
    q_nope = to.buffer("q_nope", heads * att.nope_dim, form)
    to.body.append(LatentWrite(q, kv, q_nope, shape, layer, to.rope(att.rope), norm, att.norm.eps))

    keys_up, values_up = _up(to, index, att, share)
    q_latent = to.buffer("q_latent", heads * att.kv_rank, "f32")
    latents = to.buffer("latents", heads * att.kv_rank, form)
    values = to.part("values", Share(*(n * att.v_dim for n in (share.start, share.stop, share.total))))
    module, each = names.kv_b.format(i=index), att.nope_dim + att.v_dim
    firsts = [h * each for h in range(share.start, share.stop)]
    of_keys = tuple(
        AdaptedPart(module, att.kv_rank, ((first, first + att.nope_dim),), turned=True) for first in firsts
    )
    of_values = tuple(
        AdaptedPart(module, att.v_dim, ((first + att.nope_dim, first + each),)) for first in firsts
    )
    to.head_linear(keys_up, q_nope, q_latent, of_keys, "b")
    to.body.append(LatentAttend(q_latent, q, latents, shape, layer, att.scale))
    to.head_linear(values_up, latents, values, of_values, "a")
    out, cols = to.part("delta", to.axes["hidden"]), att.heads * att.v_dim
    to.branch(
        f"{at}.o",
        values,
        out,
        names.o.format(i=index),
        axis="heads",
        cols=cols,
        unit=att.v_dim,
        bias=att.bias,
    )
    return out


def _queries(att: LatentAttention) -> str:
    """The linear of queries that takes a layer's normed input."""
    return "q_a" if att.q_rank else "q"


def _project_queries(to: Lowering, index: int, att: LatentAttention, hidden: str) -> str:
    """Queries of all heads, by way of a latent where the model has one; returns their buffer."""
    names, at = to.spec.names, f"layers.{index}"
    cols, q = att.heads * att.q_dim, to.buffer("q", to.axes["heads"].count * att.q_dim, "f32")
    if not att.q_rank:
        _linear(to, f"{at}.q", hidden, q, names.q.format(i=index), cols, axis="heads")
        return q
    latent = to.buffer("q_a", att.q_rank, "f32")
    _linear(to, f"{at}.q_a", hidden, latent, names.q_a.format(i=index), att.q_rank, bias=att.bias)
    norm = to.vector(f"{at}.q_a_norm", (Part(f"{names.q_a_norm.format(i=index)}.weight", att.q_rank),))
    normed = to.input("q_a_normed", att.q_rank, f"{at}.q_b")
    to.body.append(Norm(latent, None, norm, att.norm.eps, normed))
    _linear(to, f"{at}.q_b", normed, q, names.q_b.format(i=index), cols, axis="heads")
    return q


def _linear(
    to: Lowering, name: str, x: str, out: str, source: str, rows: int, *, bias: bool = False, axis: str = ""
) -> None:
    """out = x @ weightᵀ from one tensor, whose `rows` are split by `axis`."""
    to.linear(name, to.rounded(x, name), out, (source,), (rows,), axes=(axis,), bias=bias)


def _up(to: Lowering, index: int, att: LatentAttention, heads: Share) -> tuple[str, str]:
    """kv_b by head: what takes queries into the latent space, and sums of latents out of it. Never quantized."""
    at, each = f"layers.{index}", att.nope_dim + att.v_dim
    tensor, stored = f"{to.spec.names.kv_b.format(i=index)}.weight", (att.heads * each, att.kv_rank)
    keys = tuple(
        Part(tensor, att.kv_rank, att.nope_dim, first=h * each, stored=stored, transposed=True)
        for h in range(heads.start, heads.stop)
    )
    values = tuple(
        Part(tensor, att.v_dim, att.kv_rank, "heads", first=h * each + att.nope_dim, stored=stored)
        for h in range(heads.start, heads.stop)
    )
    for name, parts in (("keys_up", keys), ("values_up", values)):
        form = to.formats.weights
        to.params[f"{at}.{name}"] = Param(f"{at}.{name}", "linear", parts, form, experts=heads.count)
    return f"{at}.keys_up", f"{at}.values_up"
