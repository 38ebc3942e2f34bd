"""Which layouts fit, which is chosen and why: against the arithmetic of the worked example and known limits."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quire.bench.planned_load import enough_replicas, simulated, split_pools
from quire.bench.technique_effects import effects
from quire.cli.main import main
from quire.config.shipped import shipped_models
from quire.objectives import SLO
from quire.planner.deployment import Deployment, LayoutOption, LoadDemand, comparison, deploy, judged, scaling
from quire.planner.devices import device, links
from quire.planner.host_costs import hosts_for
from quire.planner.model_size import ModelSize, size_of_config
from quire.planner.shapes import SHAPES
from quire.planner.step_bound import RankLayout, StepBound
from quire.text.tokenizer import Tokenizer

H100 = device("h100")


def shape(name: str) -> ModelSize:
    return size_of_config(SHAPES[name])


def named(made: Deployment) -> dict[str, LayoutOption]:
    return {str(one.layout): one for one in made.options}


def test_405b_on_two_hosts_of_eight() -> None:
    """Options A (TP=8 PP=2), B (TP=16) and C (TP=4 PP=2, twice) of the worked example."""
    demand = LoadDemand(rate=1.0, slo=SLO(ttft=5000, tpot=100))
    made = deploy(shape("llama-3.1-405b"), H100, 16, demand)
    assert made.chosen is not None
    assert str(made.chosen.layout) == "TP=8 PP=2"
    found = named(made)
    assert found["TP=8 PP=2"].bound.weight_bytes == pytest.approx(50.73e9, rel=1e-3)
    across = found["TP=16 PP=1"]
    assert across.fits
    assert "252 all-reduces a step go between hosts" in across.reason
    assert across.tpot > 2 * found["TP=8 PP=2"].tpot
    assert not found["TP=4 PP=2"].fits
    assert "101.5 GB of weights on each device of 80 GB" in found["TP=4 PP=2"].reason
    assert "PP=2 across them" in made.steps[0]


def test_the_tree_takes_the_first_branch_that_is_enough() -> None:
    small = deploy(shape("llama-3-8b"), H100, 8, LoadDemand(rate=5.0))
    assert small.chosen is not None
    assert (str(small.chosen.layout), small.chosen.replicas) == ("TP=1 PP=1", 1)
    assert "neither TP nor PP is needed" in small.steps[0]
    many = deploy(shape("llama-3-8b"), H100, 8, LoadDemand(rate=60.0))
    assert many.chosen is not None
    assert many.chosen.devices > 1
    large = deploy(shape("llama-3-70b"), H100, 8, LoadDemand(rate=1.0))
    assert large.chosen is not None
    assert large.chosen.layout.tensor >= 2
    assert "TP=2 within a host is the least that fits" in large.steps[0]
    narrow = deploy(shape("llama-3-70b"), H100, 1, LoadDemand(rate=0.5), bits=(16, 8, 4))
    assert narrow.chosen is not None
    assert narrow.chosen.bound.bits == 4
    none = deploy(shape("llama-3.1-405b"), device("rtx4090"), 1, LoadDemand())
    assert none.chosen is None
    mixed = deploy(shape("deepseek-v3"), device("h200"), 16, LoadDemand(rate=2.0))
    assert mixed.chosen is not None
    assert "EP=16" in named(mixed)["TP=1 PP=1 EP=16"].layout.__str__()


def test_a_step_is_the_longer_of_its_bounds_and_then_the_links() -> None:
    model = shape("llama-3-70b")
    one, eight = (StepBound(model=model, device=H100, layout=RankLayout(n)) for n in (1, 8))
    weights = model.params_b * 2 / 3350
    assert one.decode(1, 0) == pytest.approx(weights)
    assert eight.decode(1, 0) == pytest.approx(weights / 8 + eight.link_seconds(1))
    assert one.link_seconds(64) == 0
    # two all-reduces a layer, each 2 (n - 1) / n of the stream
    assert eight.exchanged_bytes(1)["tensor"] == pytest.approx(2 * 80 * 2 * 7 / 8 * 8192 * 2)
    assert eight.token_bytes == one.token_bytes / 8
    assert replace(eight, layout=RankLayout(16)).token_bytes == eight.token_bytes, (
        "8 KV heads are not cut finer"
    )
    staged = StepBound(model=model, device=H100, layout=RankLayout(1, 2))
    assert staged.decode(1, 0) == pytest.approx(weights + staged.link_seconds(1)), (
        "one token passes all stages"
    )
    mixed = StepBound(model=shape("mixtral-8x7b"), device=H100)
    assert mixed.decode(1, 0) == pytest.approx(mixed.model.active_b * 2 / 3350, rel=1e-3)
    assert mixed.decode(64, 0) == pytest.approx(mixed.model.params_b * 2 / 3350, rel=1e-3)


def test_scaling_is_less_than_linear() -> None:
    shares = [share for _, _, share in scaling(shape("llama-3-70b"), H100, LoadDemand(), 16, 16, 8)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1
    assert 0.5 < shares[3] < 0.97
    assert shares[4] < shares[3] - 0.1, "sixteen ranks leave the host"


def test_kinds_side_by_side() -> None:
    found = {row["kind"]: row for row in comparison(shape("mixtral-8x7b"), H100, LoadDemand(), 4, 16, 8)}
    assert found.keys() == {"data", "tensor", "pipeline", "expert"}
    assert not found["data"]["fits"], "93 GB"
    assert found["data"]["sent_mb"] == 0
    assert found["pipeline"]["sent_mb"] < found["tensor"]["sent_mb"] / 50  # type: ignore[operator]


def test_users_are_held_by_caches() -> None:
    """The cost example with the right cache: 1.342 GB of a user at 4,096 tokens, not 320 MB of each card."""
    model = shape("llama-3-70b")
    plain = hosts_for(model, H100, 8, users=1000, tokens=4096, bits=16, kv_bits=16)
    assert (round(plain.cache_gb, 3), plain.users, plain.devices) == (1.342, 371, 24)
    narrow = hosts_for(model, H100, 8, users=1000, tokens=4096, bits=4, kv_bits=8)
    assert (narrow.users, narrow.devices) == (901, 16)
    split = hosts_for(model, H100, 8, users=1000, tokens=4096, bits=4, kv_bits=8, decode_share=0.5)
    assert (split.users, split.devices) == (424, 24)
    assert hosts_for(model, device("rtx4090"), 1, users=1, tokens=1, bits=16, kv_bits=16).hosts == 0


def test_the_simulation_adds_replicas_until_the_service_level_is_kept() -> None:
    demand = LoadDemand(rate=20.0, prompt=1000, output=100, slo=SLO(ttft=300, tpot=30))
    made = deploy(shape("llama-3-8b"), H100, 8, demand)
    assert made.chosen is not None
    option, summary = enough_replicas(made.chosen, demand, 8)
    assert summary.goodput is not None
    assert summary.goodput.share >= 0.9
    assert option.replicas >= made.chosen.replicas
    fewer = judged(made.chosen.bound, demand, 1)
    starved, late = enough_replicas(fewer, replace(demand, rate=200.0), 1)
    assert starved.replicas == 1
    assert late.goodput is not None
    assert late.goodput.share < 0.5
    pools = split_pools(replace(option, replicas=3), demand, 50.0)
    assert pools.keys() == {1, 2}
    assert all(one.completed == 300 for one in pools.values())
    together = simulated(replace(option, replicas=3), demand).distributions["itl"].at(99.0)
    apart = [one.distributions["itl"].at(99.0) for one in pools.values()]
    assert min(apart) < together, "of some ratio, prompts no longer stand between tokens"  # type: ignore[operator, type-var]


def test_twelve_techniques_and_their_effects() -> None:
    demand = LoadDemand(rate=2.0, prompt=600, output=60)
    bound = StepBound(model=shape("llama-3-8b"), device=H100)
    found = {one.name: one for one in effects(bound, demand, 200, 300)}
    assert len(found) == 12
    factors = {name: one.factor for name, one in found.items() if one.factor is not None}
    assert found["expert parallelism"].factor is None
    for name in ("continuous batching", "FlashAttention", "PagedAttention", "speculative decoding", "quantization",
                 "tensor parallelism", "prefix caching"):  # fmt: skip
        assert factors[name] > 1.15, name


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("plan llama-3-8b --hardware h1000", "did you mean h100"),
        ("plan llama-3-8b --hardware h100 --bits x", "bits: 'x'"),
        ("plan llama-3-8b --hardware h100 --prompt 0", "prompt: 0 must be"),
        ("plan llama-3-8b --hardware h100 --reserve 1", "reserve: 1 must be"),
        ("plan llama-3-8b --hardware h100 --slo soon", "goodput: 'soon'"),
        ("plan llama-3-8b --hardware m3-ultra", "has no rate of arithmetic"),
        (
            "plan llama-3-8b --hardware h100 --no-simulation --text README.md",
            "text: llama-3-8b has no tokenizer",
        ),
        ("cost", "either a model or --url"),
        ("cost llama-3-8b --users 0", "users: 0 must be"),
        ("advise --hardware h100", "model: needed"),
    ],
)
def test_mistakes_are_named(command: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    assert said in capsys.readouterr().err


def test_a_plot_shows_where_a_transfer_eats_the_gain(tmp_path: Path) -> None:
    drawn = tmp_path / "transfers.svg"
    command = ["plan", "llama-3-8b", "--hardware", "h100", "--no-simulation", "--plot", str(drawn)]
    assert main(command) == 0
    text = drawn.read_text()
    names = [one.text or "" for one in ElementTree.fromstring(text).iter() if one.tag.endswith("text")]
    assert "computing the prompt" in names
    moved = [name for name in names if name.startswith("moving it over")]
    assert len(moved) == len(links())
    eaten = {name.split(":")[0] for name in moved if "longer from" in name}
    slowest, fastest = (f"moving it over {pick(links(), key=links().__getitem__)}" for pick in (min, max))
    assert slowest in eaten, "this cache moves more slowly than the prompt is computed"
    assert fastest not in eaten


def test_the_binding_bound_and_words_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both bounds of a step and of a prompt: the longer one is its time; and words by what a text really takes."""
    load = ["--hardware", "h100", "--prompt", "100", "--output", "50", "--no-simulation"]
    assert main(["plan", "llama-3-8b", *load, "--json"]) == 0
    one = json.loads(capsys.readouterr().out)["chosen"]
    step, prompt = one["step_ms"], one["prompt_ms"]
    assert one["tpot_ms"] == pytest.approx(max(step["arithmetic"], step["memory"]) + step["links"])
    assert step["memory"] > step["arithmetic"], "few sequences are bound by reading weights"
    assert prompt["memory"] > 0
    memory = one["memory_gb"]
    assert sum(memory.values()) == pytest.approx(H100.memory_gb)
    assert memory["weights"] == pytest.approx(one["weights_gb"])
    assert memory["activations"] == pytest.approx(4 * 2 * 4096 * 101 / 1e9)
    assert memory["activations"] + memory["rest of the reserve"] == pytest.approx(0.1 * H100.memory_gb)
    assert (one["tokens_per_word"], one["tokens_per_word_of"]) == (1.3, "assumed")
    assert one["words_per_second"] == pytest.approx(one["tokens_per_second"] / 1.3)
    text, model = tmp_path / "mine.txt", shipped_models()["quire-mini"]
    text.write_text("unusual words, zyxwvutsrq qponmlkjih\n" * 4)
    tokenizer = Tokenizer.from_dir(model)
    assert main(["plan", str(model), *load, "--text", str(text)]) == 0
    ratio = len(tokenizer.encode(text.read_text(), add_special_tokens=False)) / 16
    told = capsys.readouterr().out
    assert f"({ratio:.2f} tokens a word, measured in mine.txt)" in told
    assert "a step of 1 takes at least: arithmetic " in told
    assert "activations 0." in told
    assert main(["plan", "llama-3-8b", *load, "--reserve", "0", "--prompt", "100000"]) == 0
    assert "GB of activations, more than the reserve" in capsys.readouterr().out
    text.write_text(" \n")
    assert main(["plan", str(model), *load, "--text", str(text)]) == 2
    assert "has no words" in capsys.readouterr().err


def test_this_machine_is_planned_with_its_measured_limits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.bench.limits.LEAST_ARENA", 2**20)
    monkeypatch.setattr("quire.bench.limits.CACHES_READ", 0)
    model = str(shipped_models()["quire-mini"])
    assert (
        main(
            [
                "plan",
                model,
                "--hardware",
                "local",
                "--rate",
                "1",
                "--prompt",
                "50",
                "--output",
                "10",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["figures"] == "bounds of measured limits"
    assert found["hardware"] == "1 × this machine [measured now]"
    chosen = found["chosen"]
    assert (chosen["layout"], chosen["devices"]) == ("TP=1 PP=1", 1)
    assert 0 < chosen["step_ms"]["memory"] < 1000
    assert found["simulated"]["ttft"]["p50"] > 0


def test_advice_asks_for_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody at a terminal is asked; what was given, and a pipe, are not."""
    answers = io.StringIO("600\nn\nllama-3-8b\n")
    answers.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", answers)
    assert main(["advise", "--hardware", "h100", "--rate", "2", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err.count(": ") >= 3
    found = json.loads(said.out)
    assert found["model"] == "llama-3-8b"
    told = {one["technique"]: one for one in found["techniques"]}
    assert "600 of 2000 tokens" in told["prefix caching"]["because"]
    assert "nobody waits for single tokens" in told["speculative decoding"]["because"]
    monkeypatch.setattr("sys.stdin", io.StringIO("700\n"))
    assert main(["advise", "llama-3-8b", "--hardware", "h100", "--json"]) == 0
    told = {one["technique"]: one for one in json.loads(capsys.readouterr().out)["techniques"]}
    assert "no shared start" in told["prefix caching"]["because"]


def test_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--hardware", "h100:8", "--rate", "5", "--slo", "ttft=500ms,tpot=50ms"]
    assert main(["plan", "llama-3-70b", *load, "--price", "2.5", "--details", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["figures"] == "bound only"
    assert found["chosen"]["per_million_tokens"] > 0
    assert found["simulated"]["met"] >= 0.9
    assert [row["prompt"] for row in found["transfers"]] == [250, 1000, 4000, 16000, 64000]
    assert main(["plan", "llama-3-70b", *load, "--details"]) == 0
    assert "of the perfect speed-up" in capsys.readouterr().out
    assert main(["plan", "llama-3.1-405b", "--hardware", "rtx4090", "--no-simulation"]) == 1
    assert "nothing fits" in capsys.readouterr().out
    assert main(["cost", "llama-3-70b", "--price", "2.5", "--json"]) == 0
    hosts = json.loads(capsys.readouterr().out)["hosts"]
    assert [row["devices"] for row in hosts] == [24, 24, 16, 24, 16]
    assert hosts[0]["per_day"] == 1440
    assert main(["cost", "llama-3-70b"]) == 0
    assert main(["advise", "llama-3-70b", *load, "--shared-prefix", "500", "--interactive", "--explain"]) == 0
    text = capsys.readouterr().out
    assert "use  prefix caching: 500 of 2000" in text
    factors = [float(found) for found in re.findall(r"([\d.]+) ×  ", text)]
    assert factors == sorted(factors, reverse=True)
    assert len(factors) >= 9
    assert "continuous batching" in text
