"""Registry of model families: `model_type` or architecture -> the function that reads its config.

A family is a pure function from a ConfigReader to a ModelSpec. To add one, write the function, a line here and a parity
test.
"""

from __future__ import annotations

from importlib import import_module

from quire.records import dataclass
from quire.spec.config_reader import ConfigReader, show
from quire.spec.families.common import GEMMA_READS, refuse_foreign_keys
from quire.spec.headless import headless
from quire.spec.model import ModelSpec
from quire.types import UnsupportedModelError

_DECODER, _HEADLESS = "ForCausalLM", ("Model", "ForSequenceClassification")


@dataclass(frozen=True, slots=True)
class Family:
    """A family: its names in checkpoints, and its reader, as "module.function" in this folder.

    A decoder may also be saved without its head, as …Model, or as …ForSequenceClassification.

    `reads`: keys of rare features that this reader implements; see refuse_foreign_keys.
    """

    model_type: str
    architectures: tuple[str, ...]
    reader: str
    reads: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names of architectures that the family reads."""
        stems = [name.removesuffix(_DECODER) for name in self.architectures if name.endswith(_DECODER)]
        return (*self.architectures, *(f"{stem}{end}" for stem in stems for end in _HEADLESS))

    def read(self, config: ConfigReader) -> ModelSpec:
        """The spec of a config. A model needs one family, so the others are not imported."""
        module, function = self.reader.split(".")
        spec: ModelSpec = getattr(import_module(f"{__name__}.{module}"), function)(config)
        return spec


def _encoders(stem: str) -> tuple[str, ...]:
    return f"{stem}Model", f"{stem}ForMaskedLM", f"{stem}ForSequenceClassification"


FAMILIES: tuple[Family, ...] = (
    Family("llama", ("LlamaForCausalLM", "LLaMAForCausalLM"), "llama.llama"),
    Family("mistral", ("MistralForCausalLM", "MinistralForCausalLM"), "mistral.mistral"),
    Family("ministral", ("MinistralForCausalLM",), "mistral.mistral"),
    Family("qwen2", ("Qwen2ForCausalLM",), "qwen.qwen2"),
    Family("qwen3", ("Qwen3ForCausalLM",), "qwen.qwen3"),
    Family("gemma", ("GemmaForCausalLM",), "gemma.gemma"),
    Family("gemma2", ("Gemma2ForCausalLM",), "gemma.gemma2", (*GEMMA_READS, "attn_logit_softcapping")),
    Family("gemma3_text", ("Gemma3ForCausalLM",), "gemma.gemma3", GEMMA_READS),
    Family("gemma3", ("Gemma3ForConditionalGeneration",), "gemma.gemma3_multimodal"),
    Family("phi3", ("Phi3ForCausalLM",), "phi.phi3"),
    Family("olmo2", ("Olmo2ForCausalLM",), "olmo.olmo2"),
    Family("olmo3", ("Olmo3ForCausalLM",), "olmo.olmo3"),
    Family(
        "granite",
        ("GraniteForCausalLM",),
        "granite.granite",
        ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    ),
    Family("smollm3", ("SmolLM3ForCausalLM",), "smollm.smollm3", ("no_rope_layers",)),
    Family("glm", ("GlmForCausalLM",), "glm.glm"),
    Family("glm4", ("Glm4ForCausalLM",), "glm.glm4"),
    Family("glm4_moe", ("Glm4MoeForCausalLM",), "glm.glm4_moe", ("use_qk_norm",)),
    Family(
        "stablelm", ("StableLmForCausalLM",), "stablelm.stablelm", ("qk_layernorm", "use_parallel_residual")
    ),
    Family("cohere", ("CohereForCausalLM",), "cohere.cohere", ("logit_scale", "use_qk_norm")),
    Family("cohere2", ("Cohere2ForCausalLM",), "cohere.cohere2", ("logit_scale",)),
    Family("deepseek_v2", ("DeepseekV2ForCausalLM",), "deepseek.deepseek_v2"),
    Family("deepseek_v3", ("DeepseekV3ForCausalLM",), "deepseek.deepseek_v3"),
    Family("kimi_k2", ("DeepseekV3ForCausalLM",), "deepseek.deepseek_v3"),
    Family("mixtral", ("MixtralForCausalLM",), "mixtral.mixtral"),
    Family("qwen2_moe", ("Qwen2MoeForCausalLM",), "qwen_moe.qwen2_moe"),
    Family("qwen3_moe", ("Qwen3MoeForCausalLM",), "qwen_moe.qwen3_moe"),
    Family("gpt_oss", ("GptOssForCausalLM",), "gpt_oss.gpt_oss"),
    Family("bert", (*_encoders("Bert"), *_encoders("JinaBert")), "bert.bert"),
    Family("roberta", _encoders("Roberta"), "bert.roberta"),
    Family("xlm-roberta", _encoders("XLMRoberta"), "bert.roberta"),
    Family("distilbert", _encoders("DistilBert"), "bert.distilbert"),
    Family("modernbert", _encoders("ModernBert"), "bert.modernbert"),
    Family("nomic_bert", _encoders("NomicBert"), "bert.nomic_bert"),
    Family("gte", _encoders("Gte"), "bert.gte"),
    Family("new", _encoders("New"), "bert.new_impl"),
    Family("jina_embeddings_v3", _encoders("JinaEmbeddingsV3"), "bert.jina_embeddings_v3"),
)


def find_family(config: ConfigReader) -> tuple[Family, str]:
    """Find the family of a config and the name of its architecture.

    Raises UnsupportedModelError naming model_type or architectures, and the supported ones.
    """
    model_type = config.string("model_type", None)
    architectures = config.strings("architectures") or ()
    if model_type is None:
        family = next((f for f in FAMILIES if set(f.names) & set(architectures)), None)
        if family is None:
            key = "architectures" if architectures else "model_type"
            raise config.unsupported(key, f"supported model types are {_supported()}")
    else:
        family = next((f for f in FAMILIES if f.model_type == model_type), None)
        if family is None:
            raise config.unsupported("model_type", f"supported model types are {_supported()}")
    if not architectures:
        return family, family.architectures[0]
    known = [name for name in architectures if name in family.names]
    if not known:
        expected = " or ".join(family.architectures)
        raise UnsupportedModelError(
            f"{config.where}: architectures = {show(list(architectures))} is not supported: "
            f"model_type {family.model_type!r} is implemented as {expected}"
        )
    return family, known[0]


def read_spec(config: ConfigReader) -> tuple[ModelSpec, str]:
    """ModelSpec and architecture name of a parsed config.json."""
    family, architecture = find_family(config)
    refuse_foreign_keys(config, family.reads)
    spec = family.read(config)
    return (spec if spec.pooling else headless(spec, architecture, config)), architecture


def _supported() -> str:
    return ", ".join(f.model_type for f in FAMILIES)
