"""A model on many ranks has the bits that it has on one, and a sum that is cut has others."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from helpers.checkpoints import TINY_MODELS, TinyModel
from helpers.ranks import CHUNKS, Ranks, native, prompts, same
from helpers.specs import BF16, F16, F32, I8, decoder_spec, moe_spec, with_latents
from quire.executor.base import Embeddings
from quire.executor.torch import TorchExecutor
from quire.program.formats import Groups, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.program.ops.collectives import AllGather, AllReduce, AllToAll
from quire.program.program import Input
from quire.program.ranks import RankPlan
from quire.spec import MLP, ModelSpec, NormSpec, QKNorm, Router
from quire.spec.facts import read_model
from quire.types import UnsupportedModelError

I8_FORMATS = NumberFormats("bf16", "i8", I8, I8)
ROTATED = NumberFormats("bf16", "bf16", WeightFormat("i4", Groups(32, rotated=True)), I8)
WIDE_GROUPS = NumberFormats("bf16", "bf16", WeightFormat("i8", Groups(128, rotated=True)))
ASYMMETRIC = NumberFormats("f32", "f32", WeightFormat("i4", Groups(64, "f16", "u8")))
FORMATS = {
    "f32": F32,
    "bf16": BF16,
    "f16": F16,
    "i8": I8_FORMATS,
    "i8-rotated": WIDE_GROUPS,
    "i4": ASYMMETRIC,
    "i4-rotated": ROTATED,
}

# Panels of 64 do not divide these evenly: six of the vocabulary, the last one short, and six of the feed-forward.
DENSE = decoder_spec(330, 256, 328, (8, 4, 32), [0, 24, 0], qk_norm=True, bias=True)
TIED = replace(DENSE, tied=True, logits_cap=5.0)
LATENT = with_latents(replace(DENSE, layers=DENSE.layers[:2]), 30, bias=True)
EXPERTS = replace(
    moe_spec(Router(5, 2, bias=True), 200, dim=256, shared=MLP(200), shared_gate=True, bias=True), vocab=330
)
WHOLE_NORM = replace(
    DENSE,
    layers=tuple(
        replace(x, mixer=replace(x.mixer, qk_norm=QKNorm(NormSpec(), whole=True))) for x in DENSE.layers
    ),
)
# Heads are as wide as a group, which travels as codes; panels of the feed-forward are half of one and travel as floats.
WIDE_HEADS = decoder_spec(330, 256, 384, (4, 2, 128), [0])
SPARSE = replace(
    DENSE,
    layers=(
        replace(DENSE.layers[0], mixer=None),
        DENSE.layers[1],
        replace(DENSE.layers[2], mlp=None),
    ),
)


def outputs(
    spec: ModelSpec, formats: NumberFormats, size: int, stages: int = 1, **plan: object
) -> list[dict]:  # type: ignore[type-arg]
    return Ranks(spec, formats, size, stages, **plan).logits(prompts(spec.vocab))


def check(spec: ModelSpec, formats: NumberFormats, size: int, stages: int = 1, **plan: object) -> None:
    for one, many in zip(
        outputs(spec, formats, 1), outputs(spec, formats, size, stages, **plan), strict=True
    ):
        assert np.isfinite(one["logits"]).all()
        same(one, many)


@pytest.mark.parametrize(
    ("spec", "formats", "size", "stages"),
    [
        (DENSE, "bf16", 2, 1),
        (DENSE, "i4-rotated", 3, 1),  # uneven: four key/value heads, four panels of the residual stream
        (DENSE, "f32", 1, 3),
        (TIED, "i8", 4, 1),
        (TIED, "bf16", 2, 2),
        (LATENT, "bf16", 3, 1),
        (EXPERTS, "i8", 2, 1),
        (WHOLE_NORM, "bf16", 2, 1),
        (WIDE_HEADS, "i8-rotated", 2, 1),
        (SPARSE, "bf16", 2, 2),
    ],
    ids=[
        "dense",
        "uneven",
        "three-stages",
        "tied",
        "stages-of-ranks",
        "latent",
        "experts",
        "norm-of-all-heads",
        "wide-groups",
        "layers-of-one-branch",
    ],
)
def test_many_ranks_have_the_bits_of_one(spec: ModelSpec, formats: str, size: int, stages: int) -> None:
    check(spec, FORMATS[formats], size, stages)


def test_ranks_may_hold_whole_experts() -> None:
    check(EXPERTS, ROTATED, 2, expert_parallel=True)


def test_experts_at_several_places() -> None:
    """Three ranks with a place for a copy each, where they are at the start and after others were copied; the control:
    weights of another expert at a place."""
    spec = replace(moe_spec(Router(24, 2), 40, dim=256, layers=1), vocab=330)
    spec = replace(spec, layers=tuple(replace(each, mixer=DENSE.layers[0].mixer) for each in spec.layers))
    alone = outputs(spec, BF16, 1)
    for copied in (None, 26, 25):
        ranks = Ranks(spec, BF16, 3, expert_parallel=True)
        executors = ranks.stages[0]
        (layer,) = executors[0].held_experts.layers
        assert executors[0].held_experts.placed == {layer: [*range(24), 0, 1, 2]}
        if copied:  # expert 20, which is of the last rank, as are these places
            for each in executors:
                each.held_experts.put(layer, [20 if place == 26 else place % 24 for place in range(27)])
            held = executors[2].held_experts
            content = np.zeros(sum(map(executors[2].core.expert_bytes, held.layers[layer].params)), np.uint8)
            held.read(layer, 20, content)
            held.replace(layer, copied, content)
        found = ranks.logits(prompts(330))
        pairs = executors[0].held_experts.take_pairs()[layer]
        differ = [(one["logits"] != many["logits"]).any() for one, many in zip(alone, found, strict=True)]
        assert any(differ) == (copied == 25)
        assert pairs[24:].any()
    with pytest.raises(ValueError, match="experts: 27 places must have all 24"):
        executors[0].held_experts.put(layer, [0] * 27)


def test_one_thread_of_a_rank_meets_the_others() -> None:
    """While the rank's other threads wait for it at the end of the op."""
    check(DENSE, BF16, 2, make=partial(native, threads=2))


def test_more_ranks_than_key_value_heads_share_them() -> None:
    check(decoder_spec(330, 256, 328, (8, 2, 32), [0, 24]), BF16, 4)


def test_rows_travel_as_codes_where_groups_stay_whole() -> None:
    program = lower(WIDE_HEADS, WIDE_GROUPS, RankPlan(2))
    kinds = {op.x: program.buffer(op.x).dtype for op in program.ops if isinstance(op, AllGather)}
    assert kinds["mixed_part_bytes"] == "i8"
    assert kinds["gated_part"] == "f32"


def test_embeddings_of_soft_tokens_are_the_same_on_all_ranks() -> None:
    """They enter behind the meeting at which a rank gets embeddings of ids from another."""
    spec, found = replace(DENSE, embed_scale=3.0), []
    for size in (1, 2):
        ranks = Ranks(spec, BF16, size)
        step = ranks.stepper.fill({ranks.stepper.add(prompts(330)[0]): 9})
        plain = ranks.run(step)[0]
        rows = np.random.default_rng(3).standard_normal((4, spec.dim), np.float32)
        ranks.stepper.arrays.embeddings = [Embeddings(2, rows)]
        one, *others = ranks.run(step)
        for other in others:
            same(one, other)
        assert (one["logits"][0] != plain["logits"][0]).any()
        found.append(one)
    same(found[0], found[1])


def test_a_sum_that_is_cut_has_other_bits() -> None:
    """The control: the numbers are nearly equal, the bits are not."""
    for one, many in zip(outputs(DENSE, F32, 1), outputs(DENSE, F32, 2, reduce="fast"), strict=True):
        np.testing.assert_allclose(many["logits"], one["logits"], atol=1e-5)
        with pytest.raises(AssertionError):
            same(one, many)


def test_the_definition_agrees() -> None:
    """In torch, whose sums may be taken in another order for other widths: equal up to rounding."""
    for plan in ({"size": 2}, {"size": 2, "expert_parallel": True}):
        ranks = Ranks(EXPERTS, ROTATED, make=TorchExecutor, **plan)  # type: ignore[arg-type]
        kinds = {type(op) for op in ranks.stages[0][0].program.ops}
        assert kinds >= (
            {AllGather, AllReduce, AllToAll} if "expert_parallel" in plan else {AllGather, AllReduce}
        )
        alone = outputs(EXPERTS, ROTATED, 1, make=TorchExecutor)
        for one, many in zip(alone, ranks.logits(prompts(330)), strict=True):
            np.testing.assert_allclose(many["logits"], one["logits"], atol=1e-5)


def test_a_rank_that_leaves_ends_the_step_of_the_others() -> None:
    ranks = Ranks(DENSE, F32, 2)
    number = ranks.stepper.add(prompts(330)[0])
    size = ranks.stepper.fill({number: CHUNKS[0][0]})
    absent = ranks.stages[0][1]
    absent.program = replace(absent.program, inputs=(Input("nowhere", "residual"),))
    with pytest.raises(RuntimeError, match="ranks came apart"):
        ranks.run(size)


def test_a_program_of_ranks_does_not_run_alone() -> None:
    ranks = Ranks(DENSE, F32, 2)
    alone = Ranks(DENSE, F32, 1)
    number = ranks.stepper.add(prompts(330)[0])
    size = ranks.stepper.fill({number: 1})
    with pytest.raises(ValueError, match="of a group of 1 does not fit a program of 2 ranks"):
        ranks.stages[0][0].join(alone.groups[0])
    with pytest.raises(ValueError, match="of a group of 2 does not fit a program of 1 ranks"):
        alone.stages[0][0].join(ranks.groups[0])
    assert size.num_tokens == 1


def wider(model: TinyModel, folder: Path) -> ModelSpec:
    """The spec of a family with enough panels to split; its weights are random."""
    changed = {"hidden_size": 192, "intermediate_size": 192, "vocab_size": 330}
    experts = ("moe_intermediate_size", "shared_expert_intermediate_size")
    changed |= {name: 136 for name in experts if name in model.overrides}
    if model.config_class == "Phi3Config":  # rotary factors are for heads of 16
        changed |= {"num_attention_heads": 12, "num_key_value_heads": 6}
    config = replace(model, overrides={**model.overrides, **changed}).config()
    config.save_pretrained(folder)
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    name = model.config_class.replace("TextConfig", "Config").replace("Config", "ForCausalLM")
    path.write_text(json.dumps(stored | {"architectures": [name]}))
    return read_model(folder).spec


@pytest.mark.long
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("model", TINY_MODELS, ids=str)
def test_every_family(model: TinyModel, formats: str, tmp_path: Path) -> None:
    spec = wider(model, tmp_path)
    ran = 0
    for size, stages, whole_experts in (
        (2, 1, False),
        (2, 2, True),
        (3, 1, True),
        (4, 1, False),
        (1, 2, False),
    ):
        with suppress(UnsupportedModelError):  # too few heads or panels; int8 caches of latents
            check(spec, FORMATS[formats], size, stages, expert_parallel=whole_experts)
            ran += 1
    assert ran >= (0 if formats == "i8" and "deepseek" in model.name else 2)
