"""Lowering of what guesses for a target: draft layers over its features, and Medusa's heads.

    features ─► fc ─► residual ──────┐
    token ids ─► embed ─► norm ─► [ joined ] ─► first mixer ─► … ─► head          wide: EAGLE-3
    token ids ─► embed ─► norm ─► [ joined ] ─► fc ─► residual ─► layers ─► head  EAGLE, MTP
    features ──────────► norm ───────┘

Of several modules (MTP) each is such a range of ops. It takes rows of the one before in place of features, and ends
with a norm of its own; the head behind the last one serves all.

Embedding and head are parameters of the target's program, which its executor holds, unless the draft has its own.
"""

from __future__ import annotations

from dataclasses import replace

from quire.program.formats import NumberFormats
from quire.program.fuse import fuse
from quire.program.lower import (
    LOGITS,
    MAXIMA,
    lower_head,
    lower_layer,
    made_program,
    plan_cache,
    scale_embedding,
)
from quire.program.lowering import Lowering
from quire.program.mixers import kind_of
from quire.program.ops.linear import MAXIMA_COLS, Linear
from quire.program.ops.rows import Add, Embed, Norm
from quire.program.program import Input, Output, Program
from quire.program.ranks import RankPlan, Share
from quire.program.tensors import Param, Part
from quire.spec import ModelSpec, NormSpec
from quire.spec.draft import DraftSpec, MedusaSpec

_ROWS = "hidden."  # with its number, the input of a module
OWN_HEAD = "draft_head"  # another than the target's "head", which may be its tied embedding


def lower_draft(draft: DraftSpec, formats: NumberFormats, target: Program) -> Program:
    """The program of a draft beside that of its target.

    A step takes the "features" of its tokens, or "hidden" rows of the draft itself where the inputs have that name; it
    leaves "hidden" beside the logits. With further modules input k begins module k, whose range ends where the next
    begins, and "hidden" are rows of all tokens.
    """
    if draft.further:
        return _lower_modules((replace(draft, further=()), *draft.further), formats, target)
    to = _lowering(draft.model, formats, target)
    spec, dim = draft.model, draft.model.dim
    to.axes |= {"vocab": Share(0, draft.vocab, draft.vocab), "hidden": Share(0, dim, dim)}
    head = "head"
    if draft.own_head:
        head = to.weight(OWN_HEAD, (Part(spec.names.head, draft.vocab, dim),))
    else:
        _borrow(to, target, head)
    residual = to.buffer("residual", dim, "f32")
    groups, kept = plan_cache(to)
    features = to.buffer("features", len(draft.features) * draft.target_dim, "f32")
    inputs = [Input("features", features)]
    if draft.wide:
        _fc(to, draft, features, residual)
        inputs.append(Input("hidden", residual, len(to.body)))
    first = spec.layers[0]
    taken = None
    if draft.wide:
        taken = _joined(to, draft, target, residual, "layers.0.qkv")
    else:
        _fc(to, draft, _joined(to, draft, target, features, "fc"), residual)
        inputs.append(Input("hidden", features))
        if not draft.first_norm:
            taken = kind_of(0, first.mixer).input(to, 0, first.mixer)
            to.norm(None, 0, residual, None, taken)
    delta = lower_layer(to, 0, first, residual, None, taken)
    for index, layer in enumerate(spec.layers[1:], 1):
        delta = lower_layer(to, index, layer, residual, delta)
    left = "normed" if draft.normed else "last"
    ops = lower_head(
        to, residual, delta, head, normed="normed" if draft.normed else "", plain=not draft.final_norm
    )
    return fuse(
        made_program(
            to, groups, kept, head=ops, outputs=(*LOGITS, Output("hidden", left)), inputs=tuple(inputs),
            ids=spec.vocab,
        )
    )  # fmt: skip


def _lower_modules(modules: tuple[DraftSpec, ...], formats: NumberFormats, target: Program) -> Program:
    """Modules for multi-token prediction behind one another, with the target's embedding and head."""
    spec = replace(modules[0].model, layers=tuple(layer for draft in modules for layer in draft.model.layers))
    to, dim = _lowering(spec, formats, target), spec.dim
    to.axes |= {"vocab": Share(0, modules[0].vocab, modules[0].vocab), "hidden": Share(0, dim, dim)}
    _borrow(to, target, "head")
    residual, rows = to.buffer("residual", dim, "f32"), to.buffer("normed", dim, "f32")
    groups, kept = plan_cache(to)
    features = to.buffer("features", modules[0].target_dim, "f32")
    for k, draft in enumerate(modules):
        to.spec = replace(spec, names=draft.model.names, stacks=draft.model.stacks)
        at = f"layers.{k}."
        _fc(to, draft, _joined(to, draft, target, features, f"{at}fc", at), residual, at)
        delta = lower_layer(to, k, spec.layers[k], residual, None)
        weight, bias = to.norm_weights(f"{at}final_norm", to.spec.names.final_norm, spec.norm)
        to.body.append(Norm(residual, delta, weight, spec.norm.eps, rows, spec.norm.kind, bias))
    program = fuse(
        made_program(
            to, groups, kept, head=lower_head(to, rows, None, "head", plain=True),
            outputs=(*LOGITS, Output("hidden", rows)), inputs=(Input("features", features),), ids=spec.vocab,
        )
    )  # fmt: skip
    starts = [number for number, op in enumerate(program.body) if isinstance(op, Embed)]
    inputs = (Input("features" if k == 0 else f"{_ROWS}{k}", features, op) for k, op in enumerate(starts))
    return replace(program, inputs=tuple(inputs))


def module_count(program: Program) -> int:
    """Modules of a draft that run one by one."""
    return 1 + sum(given.name.startswith(_ROWS) for given in program.inputs)


def trimmed(program: Program, count: int) -> Program:
    """The program with logits of the first `count` tokens only, from the same head."""
    if count >= program.vocab:
        return program
    cols = {"logits": count, MAXIMA: -(-count // MAXIMA_COLS)}
    return replace(
        program,
        buffers=tuple(replace(buffer, cols=cols.get(buffer.name, buffer.cols)) for buffer in program.buffers),
        head=tuple(
            replace(op, rows=count) if isinstance(op, Linear) and op.out == "logits" else op
            for op in program.head
        ),
        vocab=count,
        ids=program.ids or program.vocab,
    )


def lower_medusa(heads: MedusaSpec, formats: NumberFormats, target: Program, count: int = 0) -> Program:
    """The program of Medusa's heads: a row of it has the logits of one position after the other, of the first `count`
    tokens or of all."""
    count = count or heads.vocab
    spec = ModelSpec(heads.vocab, heads.dim, (), NormSpec(), 1, dtype=heads.dtype)
    to = _lowering(spec, formats, target)
    to.axes |= {"vocab": Share(0, count, count), "hidden": Share(0, heads.dim, heads.dim)}
    features = to.buffer("features", heads.dim, "f32")
    block = to.buffer("block", heads.dim, "f32")
    delta = to.buffer("delta", heads.dim, "f32")
    logits = to.buffer("logits", heads.heads * count, "f32")
    if not heads.own_head:
        _borrow(to, target, "head")
    for h in range(heads.heads):
        to.body.append(Norm(features, None, None, spec.norm.eps, block))
        for at in range(heads.layers):
            name, source = f"heads.{h}.{at}", heads.block.format(h=h, l=at)
            x = to.rounded(block, name)
            to.linear(name, x, delta, (source,), (heads.dim,), axes=("hidden",), bias=heads.bias)
            to.body.append(Add(block, delta, 1.0, "silu"))
        head = "head"
        if heads.own_head:
            name = f"heads.{h}.head"
            source = f"{heads.head.format(h=h, l=heads.layers)}.weight"
            head = to.weight(name, (Part(source, heads.vocab, heads.dim),))
        x = to.quantized(to.body, to.rounded(block, head), head)
        rows = count if count < heads.vocab else 0
        to.body.append(Linear(x, head, None, logits, h * count, rows=rows))
    return fuse(
        made_program(
            to, (), [], head=(), outputs=(Output("logits", logits),), inputs=(Input("features", features),)
        )
    )


def _lowering(spec: ModelSpec, formats: NumberFormats, target: Program) -> Lowering:
    """The target's head keeps the format that it has there; a draft's own has the same where it can."""
    head = target.param("head").format
    params = {**formats.params, "head": head, OWN_HEAD: formats.of("head")}
    return Lowering(spec, replace(formats, params=params), RankPlan())


def _borrow(to: Lowering, target: Program, name: str) -> str:
    """A parameter of the target's, which its executor holds."""
    to.params[name] = target.param(name)
    to.borrowed.add(name)
    return name


def _fc(to: Lowering, draft: DraftSpec, x: str, out: str, at: str = "") -> None:
    """The linear that takes features, or joined rows, to the draft's width; `at` begins the names of parameters."""
    name, dim = f"{at}fc", draft.model.dim
    to.linear(name, to.rounded(x, name), out, (draft.fc,), (dim,), axes=("hidden",), bias=draft.bias)


def _joined(to: Lowering, draft: DraftSpec, target: Program, beside: str, weight: str, at: str = "") -> str:
    """Embeddings of the step's tokens, and rows of `beside` behind them, for the linear of that weight; `at` begins the
    names of parameters."""
    spec, norm = draft.model, draft.model.norm
    if draft.own_embed:
        table = "embed"
        part = Part(spec.names.embed, spec.vocab, spec.dim)
        to.params[table] = Param(table, "table", (part,), to.formats.weights)
    else:
        tied = all(param.name != "embed" for param in target.params)
        table = _borrow(to, target, "head" if tied else "embed")
    embedded = to.buffer("embedded", spec.dim, "f32")
    to.body.append(Embed(table, embedded))
    scale_embedding(to, embedded)
    width = to.buffers[beside].cols
    joined = to.input("joined", spec.dim + width, weight)
    for x, name, first in ((embedded, draft.embed_norm, 0), (beside, draft.feature_norm, spec.dim)):
        scale, bias = to.norm_weights(f"{at}norm.{x}", name, norm) if name else (None, None)
        if draft.norm_residual and x == beside:
            to.body.append(Norm(x, None, scale, norm.eps, x, norm.kind, bias))
            scale = bias = None
        to.body.append(Norm(x, None, scale, norm.eps, joined, norm.kind, bias, first))
    return joined
