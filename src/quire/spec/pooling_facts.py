"""What a model with pooling is for, and how its texts are prepared: its config.json, and the folder of
sentence-transformers around it (modules.json, 1_Pooling, prompts)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Literal

from quire.records import dataclass
from quire.spec.config_reader import ConfigReader
from quire.spec.labels import classifies, label_names
from quire.spec.model import Dense, NormSpec, PlainActivation, PoolKind, RowNorm
from quire.types import UnsupportedModelError
from quire.util.strict_json import parse_json_objects, read_json_object, read_small_file

Task = Literal["embed", "classify", "score"]
Squash = Literal["none", "sigmoid", "softmax"]
MAX_FILE_BYTES = 2**20
MAX_LENGTH = 2**28
MAX_WIDTH = 2**20  # of a layer over pooled rows
_KINDS: dict[str, PoolKind] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_MODES: dict[str, PoolKind] = {"cls": "first", "mean": "mean", "lasttoken": "last"}
_OTHER_MODES = (
    "pooling_mode_max_tokens",
    "pooling_mode_mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens",
)
_MODULES = ("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize")
# Activations of Dense, as classes of torch.nn.
_DENSE_ACTIVATIONS: dict[str, PlainActivation | None] = {
    "Identity": None, "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu",
}  # fmt: skip
_LAYER_NORM = NormSpec("layer", eps=1e-5, bias=True)  # torch's own eps
_ACTIVATIONS: dict[str, Squash] = {"Identity": "none", "Sigmoid": "sigmoid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFacts:
    """`normalise`: vectors have length one. `squash` makes probabilities of labels. `prompts` are put before texts, by
    name; `default_prompt` is the name of the one that is, where a request names none. `dimensions`: of a vector.
    `judge`: a decoder is asked whether two texts go together.
    """

    task: Task
    normalise: bool = True
    squash: Squash = "none"
    labels: tuple[str, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    dimensions: int = 0
    judge: bool = False


@dataclass(frozen=True, slots=True)
class SentenceFolder:
    """What a folder of sentence-transformers says of pooling, which `layers` follow; None where it says nothing."""

    kind: PoolKind | None = None
    normalise: bool | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    max_length: int = 0
    layers: tuple[Dense | RowNorm, ...] = ()


def label_facts(config: ConfigReader) -> PoolingFacts:
    """The facts of a checkpoint by its config alone. A score has one label; several are probabilities."""
    if not classifies(config):
        return PoolingFacts(task="embed")
    labels = label_names(config)
    return PoolingFacts(
        task="score" if len(labels) == 1 else "classify", labels=labels, squash=_squash(config, len(labels))
    )


def _squash(config: ConfigReader, labels: int) -> Squash:
    inner = config.child("sentence_transformers")
    named = inner.string("activation_fn", None) if inner is not None else None
    named = named or config.string("sbert_ce_default_activation_function", None)
    if named is not None:
        kind = named.rsplit(".", 1)[-1]
        if kind not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"{config.where}: the activation {named!r} of scores is not implemented"
            )
        return _ACTIVATIONS[kind]
    several = config.string("problem_type", None) == "multi_label_classification"
    return "sigmoid" if labels == 1 or several else "softmax"


def read_sentence_folder(folder: Path) -> SentenceFolder | None:
    """Read the files of sentence-transformers; None in a folder without modules.json.

    Raises UnsupportedModelError naming a module that is not implemented, CheckpointError for a malformed file.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return None
    kind: PoolKind | None = None
    layers: list[Dense | RowNorm] = []
    names: list[str] = []
    for module in parse_json_objects(read_small_file(path, MAX_FILE_BYTES), "modules.json"):
        entry = ConfigReader(module, "modules.json")
        name = entry.string("type").rsplit(".", 1)[-1]
        if name not in _MODULES:
            raise entry.unsupported("type", f"implemented modules are {', '.join(_MODULES)}")
        if names and _MODULES.index(name) < min(_MODULES.index(names[-1]), _MODULES.index("Dense")):
            raise entry.unsupported("type", f"a module of this kind must not be behind {names[-1]}")
        if "Normalize" in names:
            raise entry.unsupported("type", "Normalize must be the last module")
        names.append(name)
        if name == "Pooling":
            kind = _pool_kind(folder / _inside(entry) / "config.json")
        elif name in {"Dense", "LayerNorm"}:
            layers.append(_layer(folder, _inside(entry), name))
    prompts, default = _prompts(folder / "config_sentence_transformers.json")
    longest = _max_length(folder / "sentence_bert_config.json")
    return SentenceFolder(kind, "Normalize" in names, prompts, default, longest, tuple(layers))


def _layer(folder: Path, module: str, kind: str) -> Dense | RowNorm:
    """A layer over pooled rows. Its tensors are in the module's folder."""
    where = f"{module}/config.json"
    config = ConfigReader(read_json_object(folder / module / "config.json", MAX_FILE_BYTES), where)
    if kind == "LayerNorm":
        return RowNorm(f"{module}/norm", _LAYER_NORM)
    for key in ("module_input_name", "module_output_name"):
        if config.string(key, "sentence_embedding") != "sentence_embedding":
            raise config.unsupported(
                key, "layers over vectors of texts are implemented, not over those of tokens"
            )
    act = config.string("activation_function", "torch.nn.modules.activation.Tanh").rsplit(".", 1)[-1]
    if act not in _DENSE_ACTIVATIONS:
        raise config.unsupported(
            "activation_function", f"implemented activations are {', '.join(_DENSE_ACTIVATIONS)}"
        )
    inputs, outputs = (config.integer(key, high=MAX_WIDTH) for key in ("in_features", "out_features"))
    return Dense(f"{module}/linear", inputs, outputs, config.boolean("bias", True), _DENSE_ACTIVATIONS[act])


def _inside(entry: ConfigReader) -> str:
    """The folder of a module, which is inside the checkpoint's."""
    path = entry.string("path", "")
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise entry.error("path", f"{path!r} is outside of the checkpoint's folder")
    return Path(path).as_posix()


def _pool_kind(path: Path) -> PoolKind:
    config = ConfigReader(read_json_object(path, MAX_FILE_BYTES), "1_Pooling/config.json")
    mode = config.string("pooling_mode", None)
    if mode is not None:
        if mode not in _MODES:
            raise config.unsupported("pooling_mode", f"implemented are {', '.join(_MODES)}")
        return _MODES[mode]
    chosen = [key for key in (*_KINDS, *_OTHER_MODES) if config.boolean(key, False)]
    if len(chosen) != 1 or chosen[0] not in _KINDS:
        raise UnsupportedModelError(
            f"{config.where}: pooling by {' and '.join(chosen) or 'nothing'} is not implemented; one of "
            f"{', '.join(_KINDS)} is"
        )
    return _KINDS[chosen[0]]


def _prompts(path: Path) -> tuple[dict[str, str], str]:
    if not path.is_file():
        return {}, ""
    config = ConfigReader(read_json_object(path, MAX_FILE_BYTES), path.name)
    named = config.child("prompts")
    prompts = {} if named is None else {name: named.string(name, "") for name in named.values}
    default = config.string("default_prompt_name", None) or ""
    if default and default not in prompts:
        raise config.error(
            "default_prompt_name", f"{default!r} is not one of the prompts {', '.join(prompts)}"
        )
    return prompts, default


def _max_length(path: Path) -> int:
    if not path.is_file():
        return 0
    config = ConfigReader(read_json_object(path, MAX_FILE_BYTES), path.name)
    return config.integer("max_seq_length", 0, low=0, high=MAX_LENGTH)
