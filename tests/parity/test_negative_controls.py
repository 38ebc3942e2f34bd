"""What a parity test would miss, it would miss here: one fact of the config changed gives other logits.

Facts that change which tensors a model has never get that far: the loader refuses the checkpoint.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.backends import BACKENDS, NATIVE, Backend
from helpers.checkpoints import LENGTH, random_tokens, tiny_model
from helpers.golden import Golden, MakeGolden
from helpers.specs import F32
from helpers.stepper import Stepper
from quire.executor.base import Limits
from quire.types import CheckpointError

LIMITS = Limits(max_tokens=LENGTH, max_rows=1, max_logit_rows=LENGTH, max_len=LENGTH, num_blocks=20)
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
# Facts act on the program, which is the same for every executor; tests/parity/test_op_by_op.py compares those.
pytestmark = pytest.mark.parametrize(
    "backend",
    [NATIVE, *(pytest.param(other, marks=pytest.mark.long) for other in BACKENDS if other is not NATIVE)],
    ids=str,
)


def changed(folder: Path, to: Path, changes: dict[str, Any]) -> Path:
    """A copy of a checkpoint with other values in its config.json."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return to


def difference(golden: Golden, folder: Path, backend: Backend) -> float:
    """Largest |logit difference| of one sequence between the changed folder and the true model."""
    executor = backend.load(folder, F32)
    stepper = Stepper(executor.program, LIMITS)
    executor.bind(LIMITS, stepper.arrays)
    number = stepper.add(random_tokens(0))
    logits = stepper.step(executor, {number: LENGTH})[number]
    return float(np.abs(logits - golden.logits(0)).max())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral-window", {"sliding_window": None}),
        ("mistral-window", {"sliding_window": 9}),
        ("qwen2-mixed-windows", {"layer_types": ["full_attention"] * 4}),
        ("qwen2-mixed-windows", {"layer_types": ["sliding_attention"] * 4}),
        ("llama3.1", PLAIN),
        ("llama-linear", PLAIN),
        ("llama-dynamic", PLAIN),
        ("llama-yarn", PLAIN),
        ("llama2", {"rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0}}),
        ("llama2", {"hidden_act": "gelu"}),
        ("llama-wide-heads-gelu", {"hidden_act": "gelu_pytorch_tanh"}),
        ("llama2", {"rms_norm_eps": 1e-3}),
        ("gemma-mqa", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}),
        ("gemma-mqa", {"hidden_act": "silu"}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 24}),
        ("gemma2", {"sliding_window": 9}),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
        ("gemma3", {"final_logit_softcapping": None}),
        ("gemma3", {"rope_parameters": PLAIN["rope_parameters"]}),
        ("gemma3", {"layer_types": ["full_attention"] * 4}),
        ("phi3-window", {"sliding_window": None}),
        ("phi4-partial-longrope", {"partial_rotary_factor": 0.75} | PLAIN),
        ("phi3-long", {"original_max_position_embeddings": 64}),
        ("olmo3", PLAIN),
        ("granite", {"embedding_multiplier": 1.0}),
        ("granite", {"residual_multiplier": 1.0}),
        ("granite", {"attention_multiplier": 0.25}),
        ("granite", {"logits_scaling": 1.0}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}),
        (
            "glm",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
        ),
        (
            "stablelm",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ),
        ("stablelm-parallel-head-norms", {"layer_norm_eps": 1e-2}),
        ("cohere", {"logit_scale": 1.0}),
        ("cohere2", {"layer_types": ["full_attention"] * 4}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("mixtral", {"hidden_act": "gelu"}),
        ("qwen2-moe-dense-layers", {"norm_topk_prob": True}),
        ("qwen2-moe-dense-layers", {"num_experts_per_tok": 2}),
        ("qwen3-moe", {"norm_topk_prob": False}),
        ("qwen3-moe", {"num_experts_per_tok": 4}),
        ("gpt-oss", {"swiglu_limit": 7.0}),
        ("gpt-oss", {"swiglu_alpha": 1.0}),
        ("gpt-oss", {"sliding_window": 9}),
        ("gpt-oss", {"num_experts_per_tok": 3}),
        ("deepseek2-groups", {"topk_method": "greedy"}),
        ("deepseek2-groups", {"topk_group": 3}),
        ("deepseek2-groups", {"routed_scaling_factor": 1.0}),
        ("deepseek3", {"topk_group": 3}),
        ("deepseek3", {"norm_topk_prob": False}),
        ("deepseek3", {"rope_interleave": False}),
        ("deepseek3-dense-halves", {"rope_interleave": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_other_facts_give_other_logits(
    name: str, changes: dict[str, Any], backend: Backend, golden: MakeGolden, tmp_path: Path
) -> None:
    true = golden(tiny_model(name))
    folder = changed(true.folder, tmp_path / "changed", changes)
    assert difference(true, true.folder, backend) <= backend.tolerance
    assert difference(true, folder, backend) > 1e-3


@pytest.mark.parametrize(
    ("name", "changes", "tensor"),
    [
        ("llama-biases-mqa-tied", {"attention_bias": False}, r"self_attn\..*bias"),
        ("llama-biases-mqa-tied", {"mlp_bias": False}, r"mlp\..*bias"),
        ("llama2", {"attention_bias": True}, r"self_attn\..*bias"),
        ("llama2", {"tie_word_embeddings": True}, "lm_head"),
        ("qwen2-tied", {"tie_word_embeddings": False}, "lm_head"),
        ("qwen3", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "norm"),
        ("llama2", {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}, "norm"),
        ("llama2", {"num_key_value_heads": 2}, "k_proj"),
        ("llama2", {"num_hidden_layers": 1}, r"layers\.1"),
        (
            "gemma2",
            {
                "model_type": "gemma",
                "architectures": None,
                "query_pre_attn_scalar": None,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
            },
            "feedforward_layernorm",
        ),
        ("olmo2", {"model_type": "llama", "architectures": None}, "input_layernorm"),
        ("granite", {"mlp_bias": False}, r"mlp\..*bias"),
        ("stablelm", {"use_qkv_bias": False}, r"self_attn\..*bias"),
        ("stablelm-parallel-head-norms", {"qk_layernorm": False}, "norms"),
        ("stablelm", {"use_parallel_residual": True}, "post_attention_layernorm"),
        ("cohere-head-norms", {"use_qk_norm": False}, "q_norm"),
        ("phi3-window", {"model_type": "llama", "architectures": None, "sliding_window": None}, "q_proj"),
        ("mixtral", {"num_local_experts": 4}, r"experts\.4\.|gate\.weight"),
        ("qwen2-moe-dense-layers", {"mlp_only_layers": []}, r"layers\.1\.mlp\.(gate\.|experts)"),
        ("qwen2-moe-dense-layers", {"decoder_sparse_step": 1}, r"layers\.0\.mlp\.(gate\.|experts)"),
        ("qwen2-moe-dense-layers", {"shared_expert_intermediate_size": 40}, "shared_expert"),
        ("qwen2-moe-dense-layers", {"qkv_bias": False}, r"q_proj\.bias"),
        ("qwen3-moe", {"mlp_only_layers": []}, r"layers\.0\.mlp"),
        ("qwen3-moe", {"moe_intermediate_size": 48}, r"experts\.0\.gate_proj"),
        ("gpt-oss", {"num_local_experts": 8}, "experts"),
        ("gpt-oss", {"intermediate_size": 32}, "gate_up_proj"),
        ("gpt-oss", {"attention_bias": False}, r"self_attn\..*bias"),
    ],
)
def test_facts_that_the_tensors_contradict_are_refused(
    name: str, changes: dict[str, Any], tensor: str, *, backend: Backend, golden: MakeGolden, tmp_path: Path
) -> None:
    folder = changed(golden(tiny_model(name)).folder, tmp_path / "changed", changes)
    with pytest.raises(CheckpointError, match=tensor):
        backend.load(folder, F32)
