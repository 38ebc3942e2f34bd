"""The simulations: what the defaults show, limits of the controls, the same over HTTP and by the command."""

from __future__ import annotations

import json

import pytest

from quire import _native
from quire.cli.main import main
from quire.learn import calculated
from quire.learn.catalog import _MODELS, size
from quire.learn.quiz import questions
from quire.learn.scene import Scene
from quire.learn.simulations import simulation
from quire.planner import time_sums
from quire.planner.devices import devices
from quire.planner.figure import Figure
from quire.planner.step_bound import RankLayout, StepBound


def shown(name: str, **values: str) -> dict[str, str]:
    return {one.label: one.shown() for one in simulation(name).scene(values).figures}


def number(scene: Scene, label: str) -> float:
    return next(float(one.value) for one in scene.figures if one.label == label)


def test_temperature_and_candidates_shape_the_chances() -> None:
    three = shown("decode-loop", top_k="3")
    assert [three[token] for token in ("mat", "floor", "bed", "roof")] == ["0.6087", "0.2174", "0.1739", "0"]
    assert shown("decode-loop", top_p="0.7")["candidates kept"] == "4 of the listed ones"
    sharp = simulation("decode-loop").scene({"temperature": "0.5"})
    squares = [chance**2 for chance in (0.42, 0.15, 0.12, 0.08, 0.06)]
    assert number(sharp, "mat") == pytest.approx(squares[0] / sum(squares), abs=1e-4)
    assert shown("decode-loop", temperature="0")["mat"] == "1"


def test_phases_are_bound_by_arithmetic_and_memory() -> None:
    assert shown("phases", device="NVIDIA A100 SXM4 80 GB")["ridge"] == "153 FLOP/byte"
    rounded = {one.label: one.value for one in time_sums.intensity(tflops=312, bandwidth_gb_s=2000)}
    assert rounded["ridge"] == 156  # as lessons print it
    scene = simulation("phases").scene({})
    first, token = number(scene, "prefill (TTFT)"), number(scene, "a token (TPOT)")
    assert number(scene, "whole request") == pytest.approx(first + 199 * token)
    assert number(scene, "ridge") == pytest.approx(295, abs=0.5)
    assert (number(scene, "compute in prefill"), number(scene, "bandwidth in decode")) == pytest.approx(
        (100, 100)
    )


def test_the_cache_of_a_70b_equals_its_weights() -> None:
    assert shown("kv-growth")["of a sequence"] == "1.25 GiB"
    assert shown("kv-growth", tokens="131072")["of a sequence"] == "40 GiB"
    assert shown("kv-growth")["tokens at which the caches equal the weights"] == "427,246 tokens"
    assert shown("kv-growth", kv_heads="64")["of a sequence"] == "10 GiB"
    with pytest.raises(ValueError, match="kv_heads: 128 is above the 64 query heads"):
        simulation("kv-growth").scene({"kv_heads": "128"})


def test_a_gigabyte_takes_one_over_the_bandwidth() -> None:
    for name in calculated.level_names():
        scene = simulation("memory-hierarchy").scene({"level": name})
        assert number(scene, "time to read 1 GB") == pytest.approx(1000 / number(scene, "bandwidth"))


def test_tiles_move_less_and_are_exact() -> None:
    small = simulation("attention-tiling").scene({"tokens": "512", "tile": "128"})
    assert number(small, "score matrices in memory, naive") == 3 * 512 * 512 * 2 / 2**20
    assert number(small, "bytes moved, in tiles") * 2**20 == (2 * 512 + 4 * 2 * 512) * 64 * 2
    assert number(small, "largest difference from float64") < 1e-6
    twice = simulation("attention-tiling").scene({"tokens": "1024", "tile": "128"})
    extra = "memory beside inputs and outputs, {}".format
    assert number(twice, extra("in tiles")) == number(small, extra("in tiles"))
    assert number(twice, extra("naive")) == 4 * number(small, extra("naive"))
    with pytest.raises(ValueError, match=r"tile: 512 × 512 scores.* 256 KiB"):
        simulation("attention-tiling").scene({"tile": "512"})


def test_tiles_are_those_of_the_engines_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shown is what the kernel counts and computes."""
    own = _native.attend_tiles

    def other(core: _native.Executor, q: int, k: int, v: int, out: int, *sizes: int) -> int:
        tokens, head_dim, rows = sizes
        return own(core, q, k, q, out, tokens, head_dim, rows) + 2**19

    before = simulation("attention-tiling").scene({"tokens": "256"})
    monkeypatch.setattr(_native, "attend_tiles", other)
    after = simulation("attention-tiling").scene({"tokens": "256"})
    moved = [number(one, "bytes moved, in tiles") for one in (before, after)]
    assert moved[1] == moved[0] + 1
    assert number(after, "largest difference from float64") > 0.1


def test_blocks_waste_less_than_one_and_need_no_gap() -> None:
    paged, contiguous = shown("block-table"), shown("block-table", mode="contiguous")
    assert contiguous["wasted, contiguous"] == "97.56 %"
    assert contiguous["sequences in the same memory"] == "40.96 ×"
    most = number(simulation("block-table").scene({"sequences": "24"}), "the most that one wastes")
    assert most <= 15
    assert shown("block-table", mode="contiguous", sequences="24")["sequences that found room"] == "4"
    key = "a sequence of 3,072 more finds room"
    gaps = shown("block-table", mode="contiguous", finished="2")
    assert (gaps[key], gaps["free in all"]) == ("no", "4,096 tokens")
    assert (paged[key], shown("block-table", finished="2")[key]) == ("yes", "yes")
    assert int(paged["blocks that a copy shares"]) >= 1


@pytest.mark.parametrize(("alpha", "gamma"), [("0.8", "5"), ("0", "5"), ("1", "4"), ("0.6", "0")])
def test_rounds_of_speculation_reach_the_formula(alpha: str, gamma: str) -> None:
    scene = simulation("speculation").scene({"alpha": alpha, "gamma": gamma, "rounds": "4000"})
    drawn = next(one for one in scene.figures if one.label == "tokens of a round, drawn")
    spread = float(drawn.remark.split()[1])
    assert float(drawn.value) == pytest.approx(number(scene, "tokens of a round"), abs=spread + 1e-9)


def test_the_published_speed_up() -> None:
    assert shown("speculation")["tokens of a round"] == "3.689 tokens"
    assert shown("speculation")["speed-up"] == "2.869 ×"


def test_what_fits() -> None:
    seven = [
        shown("memory", model="Llama 2 7B", precision=one)["weights"]
        for one in ("FP32", "FP16", "INT8", "INT4", "INT2")
    ]
    assert seven == ["28 GB", "14 GB", "7 GB", "3.5 GB", "1.75 GB"]
    assert shown("memory", model="Llama 2 13B", precision="INT4")["weights"] == "6.5 GB"
    assert shown("memory")["fits"] == "no"


def test_what_each_device_holds() -> None:
    tensor = shown("parallelism", model="Llama 3 8B")
    assert tensor["slice of an up projection"] == "29.36 MB"
    assert shown("parallelism", strategy="pipeline")["layers of a stage"] == "20"
    both = shown("parallelism", devices="4", copies="2")
    assert both["independent replicas"] == "2"
    experts = simulation("parallelism").scene({"strategy": "expert", "devices": "8", "model": "DeepSeek V3"})
    assert number(experts, "experts of a device") == 32
    whole, known = size("DeepSeek V3")[1] * 2, size("DeepSeek V3")[0]
    assert number(experts, "weights of a device") == pytest.approx(whole - 2 * known.expert_b * 7 / 8)
    assert 600 < known.expert_b < known.params_b
    for words in (
        {"strategy": "expert"},
        {"devices": "7"},
        {"strategy": "expert", "model": "Mixtral 8x7B", "devices": "3"},
    ):
        with pytest.raises(ValueError, match=r"strategy: |devices: "):
            simulation("parallelism").scene(words)


@pytest.mark.parametrize(
    ("strategy", "layout"), [("tensor", RankLayout(tensor=4)), ("pipeline", RankLayout(pipeline=4))]
)
def test_bytes_between_devices_are_those_of_a_plan(strategy: str, layout: RankLayout) -> None:
    scene = simulation("parallelism").scene({"strategy": strategy})
    known, _ = size("Llama 3 70B")
    (planned,) = StepBound(model=known, device=devices()["h100"], layout=layout).exchanged_bytes(1).values()
    assert number(scene, "sent by a device in a step") == pytest.approx(planned / 1e6)
    (flow,) = scene.flows
    away = [what for sender, _, what in flow.arrows if sender == 1]
    assert away == [Figure("", planned / 1e6, "MB").shown()]
    assert len(flow.arrows) == (4 if strategy == "tensor" else 3)
    stream = known.hidden * 2 / 1e6
    by_hand = stream if strategy == "pipeline" else 2 * known.layers * 2 * 3 / 4 * stream
    assert number(scene, "sent by a device in a step") == pytest.approx(by_hand)


def test_arrows_show_all_that_a_plan_counts() -> None:
    scene = simulation("parallelism").scene(
        {"strategy": "expert", "devices": "8", "model": "Mixtral 8x7B", "copies": "2"}
    )
    (flow,) = scene.flows
    assert len(flow.arrows) == 8 * 7
    each = {float(what.split()[0]) for _, _, what in flow.arrows}
    assert 7 * each.pop() == pytest.approx(number(scene, "sent by a device in a step"), rel=1e-3)
    assert not each
    assert not simulation("parallelism").scene({"strategy": "data"}).flows[0].arrows
    assert not simulation("parallelism").scene({"devices": "1"}).flows[0].arrows


def test_a_cached_prefix_is_not_computed() -> None:
    assert shown("prefix-cache")["time to the first token"] == "40 ms"
    assert shown("prefix-cache", cached="false")["time to the first token"] == "1,040 ms"


def test_every_model_has_its_numbers() -> None:
    for name in _MODELS:
        known, params = size(name)
        assert known.params_b == pytest.approx(params, rel=0.05)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("phases", {"promt": "5"}, "promt: phases has no such control; did you mean prompt"),
        ("phases", {"prompt": "0"}, "prompt: '0' must be a number from 1 to 131072"),
        ("phases", {"prompt": "nan"}, "prompt: 'nan' must be a number"),
        ("phases", {"prompt": "2.5"}, "prompt: 2.5 must be a whole number"),
        ("phases", {"device": "abacus"}, "device: 'abacus' must be one of"),
        ("prefix-cache", {"cached": "maybe"}, "cached: 'maybe' must be true or false"),
    ],
)
def test_values_out_of_range_are_named(name: str, values: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        simulation(name).scene(values)
    assert message in str(caught.value)


def test_the_command_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learn"]) == 0
    assert "kv-growth" in capsys.readouterr().out
    assert main(["learn", "kv-growth", "--tokens", "131072", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"][1]["shown"] == "40 GiB"
    assert main(["learn", "memory", "--precision", "INT3"]) == 2
    assert "precision: 'INT3' must be one of" in capsys.readouterr().err


def test_answers_of_the_quiz_are_computed(capsys: pytest.CaptureFixture[str]) -> None:
    by_chapter = {one.chapter: one for one in questions()}
    assert [*by_chapter] == [*range(11)]
    assert [by_chapter[n].right for n in (3, 4, 7, 8)] == [
        "295.2 FLOP/byte", "40.82 ms", "3.689 tokens", "6.5 GB",
    ]  # fmt: skip
    for one in by_chapter.values():
        assert len(set(one.choices)) == 4
        assert one.right in one.choices
        simulation(one.simulation)
        place = one.choices.index(one.right) + 1
        assert main(["learn", "quiz", str(one.chapter), "--answer", str(place)]) == 0
        assert main(["learn", "quiz", str(one.chapter), "--answer", str(place % 4 + 1)]) == 1
    assert main(["learn", "quiz"]) == 0
    assert "14 tokens a second" in capsys.readouterr().out
    assert main(["learn", "quiz", "11"]) == 2
    assert main(["learn", "quiz", "--answer", "1"]) == 2
    assert main(["learn", "quiz", "0", "--answer", "5"]) == 2
