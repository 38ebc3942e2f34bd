"""Model specs built by hand: released shapes, and random small ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from quire.program.formats import Groups, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.program.program import Program
from quire.spec import MLP, Attention, LatentAttention, Layer, ModelSpec, MoE, NormSpec, QKNorm, Rope, Router
from quire.spec.model import ClampedSwiGLU

EXPERTS = (
    MoE(Router(5, 2), 24),
    MoE(
        Router(8, 3, "sigmoid", correction=True, groups=4, top_groups=2, group_score="top2"),
        70,
        shared=MLP(9),
    ),
    MoE(Router(4, 4, bias=True), 12, ClampedSwiGLU(), bias=True, shared=MLP(30, "gelu"), shared_gate=True),
)
BF16 = NumberFormats("bf16", "bf16")
F16 = NumberFormats("f16", "f16")
F32 = NumberFormats("f32", "f32")
I8 = WeightFormat("i8", Groups(64))


def decoder_spec(
    vocab: int, dim: int, width: int, heads: tuple[int, int, int], windows: Sequence[int], *,
    tied: bool = False, bias: bool = False, qk_norm: bool = False,
) -> ModelSpec:  # fmt: skip
    """A decoder whose layers differ in their window; `heads` is (heads, kv_heads, head_dim)."""
    rope = Rope(theta=1e4, dim=heads[2])
    norms = QKNorm(NormSpec()) if qk_norm else None
    layers = tuple(
        Layer(Attention(*heads, rope, heads[2] ** -0.5, bias, bias, norms, window), MLP(width, bias=bias))
        for window in windows
    )
    return ModelSpec(vocab=vocab, dim=dim, layers=layers, norm=NormSpec(), max_positions=32768, tied=tied)


def moe_spec(
    router: Router, width: int = 40, *, dim: int = 48, dense: Sequence[int] = (), layers: int = 2, **more: Any
) -> ModelSpec:
    """A decoder with experts in all but the dense layers; `more` are fields of MoE."""
    spec = decoder_spec(100, dim, 56, (4, 2, 16), [0] * layers)
    moe = MoE(router, width, **more)
    blocks = (x if i in dense else replace(x, mlp=moe) for i, x in enumerate(spec.layers))
    return replace(spec, layers=tuple(blocks))


def qwen3_0_6b() -> ModelSpec:
    return decoder_spec(151936, 1024, 3072, (16, 8, 128), [0] * 28, tied=True, qk_norm=True)


def llama3_70b() -> ModelSpec:
    return decoder_spec(128256, 8192, 28672, (64, 8, 128), [0] * 80)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs of small random decoders in each float format."""
    kv_heads = draw(st.integers(1, 3))
    heads = (kv_heads * draw(st.integers(1, 3)), kv_heads, 2 * draw(st.integers(1, 20)))
    spec = decoder_spec(
        draw(st.integers(1, 300)),
        draw(st.integers(1, 70)),
        draw(st.integers(1, 200)),
        heads,
        draw(st.lists(st.sampled_from([0, 5, 64]), min_size=1, max_size=5)),
        tied=draw(st.booleans()),
        bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )
    spec = rearranged(draw, spec)
    if draw(st.integers(0, 3)) == 0:
        spec = with_latents(spec, draw(st.sampled_from([0, 30])), draw(st.booleans()))
    return lower(spec, draw(st.sampled_from([BF16, F16, F32])))


def with_latents(spec: ModelSpec, q_rank: int = 0, bias: bool = False) -> ModelSpec:
    """The spec with latent attention in every layer: three heads of 10 + 4, a latent of 22, values of 6."""
    attention = LatentAttention(3, q_rank, 22, 10, 4, 6, Rope(theta=1e4, dim=4), 0.25, bias=bias)
    return replace(spec, layers=tuple(replace(x, mixer=attention) for x in spec.layers))


def rearranged(draw: st.DrawFn, spec: ModelSpec) -> ModelSpec:
    """The spec with other norms, multipliers and an order of branches of its own."""
    norm = NormSpec(
        draw(st.sampled_from(["rms", "layer"])), 1e-5, draw(st.sampled_from([0.0, 1.0])), draw(st.booleans())
    )
    pre, post, parallel = draw(
        st.sampled_from(
            [(True, False, False), (True, True, False), (False, True, False), (True, False, True)]
        )
    )
    rope = draw(st.sampled_from([None, Rope(theta=1e4, dim=2, interleaved=True), spec.layers[0].mixer.rope]))
    qk_norm = draw(st.sampled_from([None, QKNorm(norm, whole=True), QKNorm(norm, shared=False)]))
    layers = tuple(
        replace(x, mixer=replace(x.mixer, rope=rope, qk_norm=qk_norm or x.mixer.qk_norm),
                pre_norm=pre, post_norm=post, parallel=parallel)
        for x in spec.layers
    )  # fmt: skip
    scales = [draw(st.sampled_from([1.0, 0.5])) for _ in range(3)]
    layers = (*layers[:-1], replace(layers[-1], mlp=draw(st.sampled_from([layers[-1].mlp, *EXPERTS]))))
    return replace(
        spec, norm=norm, layers=layers, embed_scale=scales[0], residual_scale=scales[1], logits_scale=scales[2],
        logits_cap=draw(st.sampled_from([0.0, 30.0])),
    )  # fmt: skip
