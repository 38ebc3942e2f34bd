"""adapter_config.json of PEFT: https://huggingface.co/docs/peft, LoraConfig.

What changes the computation is read or refused by its key; keys about training are ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from quire.lora.module_pairs import MAX_RANK
from quire.records import dataclass
from quire.spec.config_reader import ConfigReader, show
from quire.types import CheckpointError

MAX_CONFIG_BYTES = 4 * 2**20
MAX_ALPHA = 1e6
MAX_PATTERNS = 64  # that are no plain names
_MAX_QUANTIFIERS = 2
_MAX_PATTERN = 256
# How training began or ran, who made it, what is found in the tensors anyway.
_IGNORED = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "lora_dropout", "lora_ga_config", "megatron_core",
    "modules_to_save", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
_READ = {
    "alpha_pattern", "bias", "init_lora_weights", "layers_to_transform", "lora_alpha", "peft_type", "r", "rank_pattern",
    "target_parameters", "use_dora", "use_rslora",
}  # fmt: skip
_REFUSED = {
    "ensure_weight_tying": "an adapter of a tied embedding leaves the head as it is",
    "lora_bias": "biases of B are not implemented",
    "use_qalora": "QA-LoRA pools the inputs of A, which is not implemented",
    "trainable_token_indices": "rows of an embedding are not implemented; train it as one of modules_to_save",
    "layer_replication": "it makes another model of the base",
    "alora_invocation_tokens": "activated LoRA is not implemented",
    "megatron_config": "modules of Megatron are not implemented",
    "loftq_config": "LoftQ changes the weights of the base",
}
# Initialisations that also change the weights of the base.
_INITS_OF_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
_PLAIN = re.compile(r"[\w.\-]+", re.ASCII)
# From this release on, A of stacked experts takes what the linear takes, for all layouts of the stack.
_RIGHT_SIDES = (0, 19)
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})\.(?!0\.dev)")
_LAYER = re.compile(r"\.(?:layers?|h)\.(\d{1,6})\.")


class _Patterns:
    """`rank_pattern` or `alpha_pattern`: the value of the first key that is the end of a module's name.

    A key is a regular expression for PEFT; most are names, which are looked up. In others the number of quantifiers is
    bounded, because a key of the file decides how long matching takes.
    """

    def __init__(self, config: ConfigReader, key: str, *, high: float, whole: bool) -> None:
        self._names: dict[str, tuple[int, float]] = {}
        self._expressions: list[tuple[int, re.Pattern[str], float]] = []
        child = config.child(key)
        for place, name in enumerate(() if child is None else child.values):
            assert child is not None
            value = child.integer(name, high=int(high)) if whole else child.number(name, low=0.0, high=high)
            if _PLAIN.fullmatch(name):
                self._names[name] = place, value
            else:
                self._expressions.append((place, _expression(config, key, name), value))
        if len(self._expressions) > MAX_PATTERNS:
            raise config.error(
                key, f"{len(self._expressions)} regular expressions, more than the limit of {MAX_PATTERNS}"
            )

    def of(self, module: str, default: float) -> float:
        if not self._names and not self._expressions:
            return default
        found = [(place, value) for place, regex, value in self._expressions if regex.fullmatch(module)]
        words = module.split(".")
        ends = (".".join(words[start:]) for start in range(len(words)))
        found += [self._names[end] for end in ends if end in self._names]
        return min(found)[1] if found else default


def _expression(config: ConfigReader, key: str, text: str) -> re.Pattern[str]:
    quantifiers = sum(text.count(sign) for sign in "*+{?")
    if len(text) > _MAX_PATTERN or quantifiers > _MAX_QUANTIFIERS or re.search(r"\)[*+{?]", text):
        raise config.error(
            key,
            f"{show(text)} is not a regular expression of at most {_MAX_PATTERN} characters and {_MAX_QUANTIFIERS} "
            "quantifiers, none after a group",
        )
    try:
        return re.compile(rf"(?:.*\.)?(?:{text})")
    except (re.error, OverflowError, RecursionError) as error:
        raise config.error(key, f"{show(text)} is not a regular expression: {error}") from None


@dataclass(frozen=True, slots=True, eq=False)
class PeftConfig:
    """What a config says of the tensors beside it. `layers`: the only layers that it changes; None for all.

    `right_sides`: the release of PEFT that wrote it is known to have A of stacked experts over their inputs.
    """

    base: str
    rank: int
    alpha: float
    rslora: bool
    dora: bool
    saved: tuple[str, ...]
    parameters: tuple[str, ...]
    layers: frozenset[int] | None
    right_sides: bool
    ranks: _Patterns
    alphas: _Patterns

    @classmethod
    def of(cls, values: Mapping[str, object], where: str) -> PeftConfig:
        """Read a config. Raises CheckpointError or UnsupportedModelError naming the key."""
        config = ConfigReader(values, where)
        kind = config.string("peft_type")
        if kind != "LORA":
            raise config.unsupported("peft_type", "only LORA is implemented")
        _refuse(config)
        return cls(
            base=config.string("base_model_name_or_path", ""),
            rank=config.integer("r", 8, high=MAX_RANK),
            alpha=config.number("lora_alpha", 8.0, low=0.0, high=MAX_ALPHA),
            rslora=config.boolean("use_rslora", False),
            dora=config.boolean("use_dora", False),
            saved=tuple(config.strings("modules_to_save") or ()),
            parameters=tuple(config.strings("target_parameters") or ()),
            layers=_layers(config),
            right_sides=_version(config) >= _RIGHT_SIDES,
            ranks=_Patterns(config, "rank_pattern", high=MAX_RANK, whole=True),
            alphas=_Patterns(config, "alpha_pattern", high=MAX_ALPHA, whole=False),
        )

    def rank_of(self, module: str) -> int:
        return int(self.ranks.of(module, self.rank))

    def alpha_of(self, module: str) -> float:
        return self.alphas.of(module, self.alpha)

    def scale_of(self, module: str) -> float:
        """What multiplies B·A of a module."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(rank) if self.rslora else rank)

    def check_layer(self, module: str, where: str) -> None:
        """Raise CheckpointError for a module of a layer that `layers_to_transform` leaves out."""
        match = _LAYER.search(module)
        if self.layers is not None and match is not None and int(match[1]) not in self.layers:
            raise CheckpointError(
                f"{where}: layers_to_transform: has no layer {match[1]}, but {module} is there"
            )


def _refuse(config: ConfigReader) -> None:
    """Refuse what would change the computation and is not implemented."""
    if config.string("bias", "none") != "none":
        raise config.unsupported("bias", "biases of the base must be those of the base")
    init = config.values.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_INITS_OF_BASE):
        raise config.unsupported(
            "init_lora_weights",
            "it changed the weights of the base; save the adapter again with path_initial_model_for_weight_conversion",
        )
    for key, value in config.values.items():
        if key in _IGNORED or key in _READ or not value:
            continue
        raise config.unsupported(key, _REFUSED.get(key, "it is not known here, and may change the answers"))


def _layers(config: ConfigReader) -> frozenset[int] | None:
    value = config.values.get("layers_to_transform")
    if isinstance(value, int) and not isinstance(value, bool):
        return frozenset([config.integer("layers_to_transform", low=0, high=10**6)])
    found: Iterable[int] = config.integers("layers_to_transform", low=0, high=10**6)
    return frozenset(found) or None


def _version(config: ConfigReader) -> tuple[int, int]:
    """Major and minor number of the PEFT that wrote the config; (0, 0) if it is older than the key, or unreleased."""
    match = _VERSION.match(config.string("peft_version", ""))
    return (int(match[1]), int(match[2])) if match else (0, 0)
