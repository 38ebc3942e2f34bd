"""docs/models.md is what the registry says now, and its sums are the formula's."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.models_table import example_config, table

from quire.spec import MLP, Attention, LatentAttention, Layer, ModelSpec, NormSpec, Rope
from quire.spec.config_reader import ConfigReader
from quire.spec.describe import attention_kind, attention_text, kv_elements, mha_elements, ranges
from quire.spec.families import FAMILIES, read_spec

ROOT = Path(__file__).parents[2]


def test_page_is_current() -> None:
    assert (ROOT / "docs" / "models.md").read_text() == table(), (
        "run python -m tools.models_table > docs/models.md"
    )


@pytest.mark.parametrize(
    ("model_type", "layers", "heads", "kv_heads", "head_dim", "full"),
    [
        ("llama", 32, 32, 8, 128, 32),
        ("gemma", 18, 8, 1, 256, 18),
        ("gemma2", 42, 16, 8, 256, 21),
        ("gemma3_text", 26, 4, 1, 256, 4),
        ("cohere", 40, 64, 64, 128, 40),
        ("glm", 40, 32, 2, 128, 40),
        ("olmo3", 32, 32, 32, 128, 8),
    ],
)  # fmt: skip
def test_kv_of_released_models(
    model_type: str, layers: int, heads: int, kv_heads: int, head_dim: int, full: int
) -> None:
    """2 x layers x kv_heads x head_dim; MHA : GQA : MQA are heads : kv_heads : 1."""
    spec, _ = read_spec(ConfigReader({"model_type": model_type, **example_config(model_type)}))
    assert kv_elements(spec) == 2 * layers * kv_heads * head_dim
    assert mha_elements(spec) * kv_heads == kv_elements(spec) * heads
    assert kv_elements(spec, lambda att: att.window == 0) == 2 * full * kv_heads * head_dim


@pytest.mark.parametrize(
    ("model_type", "layers", "heads", "nbytes"), [("deepseek_v2", 27, 16, 31_104), ("deepseek_v3", 61, 128, 70_272)]
)  # fmt: skip
def test_kv_of_latent_attention(model_type: str, layers: int, heads: int, nbytes: int) -> None:
    """(latent + rotated key) x layers, once: 70,272 bytes per token of DeepSeek-V3 in bfloat16."""
    spec, _ = read_spec(ConfigReader({"model_type": model_type, **example_config(model_type)}))
    assert kv_elements(spec) == layers * (512 + 64)
    assert 2 * kv_elements(spec) == nbytes
    assert mha_elements(spec) == layers * heads * (192 + 128)


def test_ratios_of_the_kinds_of_attention() -> None:
    """DeepSeek-V2, table 1: 2·n·d : 2·g·d : 2·d : 4.5·d numbers per token and layer, here n = 128, g = 8, d = 128."""
    kinds = (heads(128, 128), heads(128, 8), heads(128, 1), LATENT)
    found = [kv_elements(one_layer(att)) for att in kinds]
    assert found == [32_768, 2_048, 256, 576]
    assert [attention_kind(att) for att in kinds] == ["MHA", "GQA", "MQA", "MLA"]
    assert found[0] / found[1] == 128 / 8
    assert found[3] / 128 == 4.5


def heads(query: int, kv: int) -> Attention:
    return Attention(query, kv, 128, None, 1.0)


def one_layer(att: Attention | LatentAttention) -> ModelSpec:
    return ModelSpec(100, 64, (Layer(att, MLP(64)),), NormSpec(), 1024)


LATENT = LatentAttention(128, 1536, 512, 128, 64, 128, Rope(1e4, 64), 1.0)


def test_words() -> None:
    assert [attention_kind(heads(8, n)) for n in (8, 4, 2, 1)] == ["MHA", "GQA", "GQA", "MQA"]
    assert attention_kind(heads(1, 1)) == "MHA"
    assert attention_kind(LATENT) == "MLA"
    assert attention_text(heads(8, 2)) == "GQA 8/2 of 128"
    assert attention_text(LATENT) == "MLA 128 of 128+64, values 128, latent 512+64, queries of 1536"
    assert ranges([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"


def test_every_family_is_shown() -> None:
    assert all(f"`{family.model_type}`" in table() for family in FAMILIES)
