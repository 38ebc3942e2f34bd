"""Schemes of checkpoints in the field's words."""

from __future__ import annotations

from typing import Any

import pytest

from quire.spec.scheme import scheme
from quire.types import CheckpointError


def _compressed(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("quant", "expected"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, "W4A16 g128 sym"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 64, "sym": False, "desc_act": True},
         "W3A16 g64 asym desc_act"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "W8A16 channel sym"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "W4A16 g128 asym"),
        ({"quant_method": "auto-round", "bits": 2, "group_size": 32, "sym": True}, "W2A16 g32 sym"),
        (_compressed({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}),
         "W4A16 g128 sym"),
        (_compressed({"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
                     {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}), "W8A8 channel sym dynamic"),
        (_compressed({"num_bits": 8, "type": "float", "strategy": "tensor"},
                     {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}),
         "W8A8-FP8 tensor static"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
         "W8A8-FP8 block 128x128 dynamic"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "W4A16 NF4 g64"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "W8A8 LLM.int8 channel"),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 3, "group_size": 64}}},
         "W3A16 g64 asym"),
        ({"quant_method": "mxfp4"}, "W4A16-MXFP4 g32"),
    ],
)  # fmt: skip
def test_schemes(quant: dict[str, Any], expected: str) -> None:
    assert scheme({"quantization_config": quant}) == expected


def test_plain_and_damaged() -> None:
    assert scheme({}) is None
    with pytest.raises(CheckpointError, match="bits: 'four' is not an integer"):
        scheme({"quantization_config": {"quant_method": "gptq", "bits": "four"}})
