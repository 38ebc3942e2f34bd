"""Models and devices that the simulations offer."""

from __future__ import annotations

from functools import cache

from quire.learn.scene import Control
from quire.planner.devices import Device, devices
from quire.planner.model_size import ModelSize, size_of_config
from quire.planner.shapes import SHAPES

# Sizes as people say them: name -> the shape, and parameters in billions.
_MODELS = {
    "Llama 2 7B": ("llama-2-7b", 7.0),
    "Llama 3 8B": ("llama-3-8b", 8.0),
    "Llama 2 13B": ("llama-2-13b", 13.0),
    "Llama 3 70B": ("llama-3-70b", 70.0),
    "Llama 3.1 405B": ("llama-3.1-405b", 405.0),
    "Mixtral 8x7B": ("mixtral-8x7b", 46.7),
    "DeepSeek V3": ("deepseek-v3", 671.0),
}
PRECISIONS = {"FP32": 32, "FP16": 16, "INT8": 8, "INT4": 4, "INT2": 2}


@cache
def size(name: str) -> tuple[ModelSize, float]:
    """The numbers of a model, and its parameters in billions as its name says them."""
    shape, params = _MODELS[name]
    return size_of_config(SHAPES[shape]), params


def _cards() -> dict[str, Device]:
    return {one.title: one for one in devices().values() if one.tflops and not one.on_chip}


def card(title: str) -> Device:
    """The device of a title."""
    return _cards()[title]


def model_control(default: str) -> Control:
    return Control(name="model", label="Model", default=default, choices=tuple(_MODELS))


def device_control(name: str) -> Control:
    """A choice of devices; `name` is the default's in the table of hardware."""
    return Control(name="device", label="Device", default=devices()[name].title, choices=tuple(_cards()))


def precision_control(default: str = "FP16") -> Control:
    return Control(name="precision", label="Precision", default=default, choices=tuple(PRECISIONS))
