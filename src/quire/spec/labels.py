"""The labels of a classifier, from its config.json."""

from __future__ import annotations

from quire.spec.config_reader import ConfigReader

MAX_LABELS = 2**16


def label_names(config: ConfigReader) -> tuple[str, ...]:
    """Names of the labels in their order; LABEL_0 and so on where the config has none, two of them by default."""
    named = config.child("id2label")
    if named is None:
        count = config.integer("num_labels", 2, high=MAX_LABELS)
        return tuple(f"LABEL_{number}" for number in range(count))
    if not 0 < len(named.values) <= MAX_LABELS:
        raise config.error("id2label", f"has {len(named.values)} labels, not 1 to {MAX_LABELS}")
    return tuple(named.string(str(number)) for number in range(len(named.values)))


def classifies(config: ConfigReader) -> bool:
    """Whether a checkpoint has a head for labels."""
    return any(name.endswith("ForSequenceClassification") for name in config.strings("architectures") or ())
