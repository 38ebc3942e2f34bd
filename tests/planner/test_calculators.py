"""Calculators against published figures, known models, and their own limits."""

from __future__ import annotations

import json
import shlex

import pytest

from quire.cli.calc import calc_parser, calculate
from quire.cli.main import main
from quire.planner.calculators import CALCULATORS, PARAMETERS
from quire.planner.devices import counted, devices
from quire.planner.model_size import size_of_config
from quire.planner.shapes import SHAPES
from quire.planner.worked import Worked, worked_figures


def results(command: str) -> dict[str, str]:
    """The figures of `quire calc COMMAND`, by label."""
    name, *words = shlex.split(command)
    options = vars(calc_parser(CALCULATORS[name]).parse_args(words))
    del options["json"]
    return {figure.label: figure.shown() for figure in calculate(CALCULATORS[name], options)}


@pytest.mark.parametrize("case", worked_figures(), ids=lambda case: case.place)
def test_published_figures_are_computed_or_corrected(case: Worked) -> None:
    if case.command:
        assert results(case.command)[case.figure] == case.right
    else:
        assert case.note


def test_every_wrong_figure_is_explained() -> None:
    """Where the first digits differ there is a note, or the place stands beside a case that has one."""
    notes = [bool(case.note) for case in worked_figures()]
    assert sum(notes) >= 20


@pytest.mark.parametrize(
    ("shape", "params_b", "active_b"),
    [
        ("llama-2-7b", 6.738, 6.738),
        ("llama-2-13b", 13.016, 13.016),
        ("llama-3-8b", 8.030, 8.030),
        ("llama-3-70b", 70.554, 70.554),
        ("llama-3.1-405b", 405.853, 405.853),
        ("mixtral-8x7b", 46.703, 12.88),
        ("deepseek-v3", 671.03, 37.55),
    ],
)
def test_parameters_of_released_models(shape: str, params_b: float, active_b: float) -> None:
    size = size_of_config(SHAPES[shape])
    assert size.params_b == pytest.approx(params_b, rel=2e-4)
    assert size.active_b == pytest.approx(active_b, rel=5e-3)


def test_the_cache_of_latent_attention_is_one_latent_a_token() -> None:
    assert size_of_config(SHAPES["deepseek-v3"]).kv_values == 61 * (512 + 64)


def test_every_parameter_is_explained_and_used() -> None:
    used = {name for one in CALCULATORS.values() for name in one.parameters} - {"kv_values"}
    assert used == PARAMETERS.keys() & used
    assert PARAMETERS.keys() == used


def test_every_device_has_a_source_and_a_plausible_ridge() -> None:
    for device in devices().values():
        assert device.source
        assert device.memory_gb > 0 < device.bandwidth_gb_s
        ridge = device.ridge()
        assert device.on_chip or ridge is None or 10 < ridge < 600


@pytest.mark.parametrize(
    ("text", "said"),
    [("h1000", "device: 'h1000'.*did you mean h100"), ("h100:0", "from 1 to"), ("h100:x", "from 1 to")],
)
def test_bad_devices(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        counted(text)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("throughput --device h100", "params_b: needed"),
        ("throughput --params-b 0 --device h100", "params_b: 0 must be above 0"),
        ("speculation --alpha 1.5 --gamma 4 --draft-ms 1 --target-ms 10", "alpha: 1.5 must be from 0 to 1"),
        ("sampling --probabilities 0.9,0.3", "probabilities: .*at most 1"),
        ("sampling --probabilities a,b", "probabilities: 'a,b' must be numbers between commas"),
        ("rejection --target 0.5,0.5 --draft 1", "draft: 1 probabilities for 2 tokens"),
        ("rejection --target 0.5,0.6 --draft 0.5,0.5", "target: probabilities must be .* 1 together"),
        ("goodput --requests 10 --kept 11 --seconds 1", "kept: 11 is above requests 10"),
    ],
)
def test_bad_numbers_are_named(command: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        results(command)


def test_the_command_lists_and_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calc"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in CALCULATORS)
    assert main(["calc", "weights", "--params-b", "7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0] == {
        "label": "weights", "value": 14.0, "unit": "GB", "remark": "",
    }  # fmt: skip
    assert main(["calc", "worked", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(worked_figures())
    assert main(["calc", "devices"]) == 0
    assert "H100 Tensor Core GPU datasheet" in capsys.readouterr().out
    assert main(["calc", "wieghts"]) == 2
    assert "did you mean weights" in capsys.readouterr().err


def test_at_temperature_zero_the_likeliest_token_has_all() -> None:
    assert results("sampling --probabilities 0.4,0.6 --temperature 0") == {
        "0.6": "1", "0.4": "0", "kept": "1 of the listed ones",
    }  # fmt: skip
