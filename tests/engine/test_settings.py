"""The settings of an engine: in groups inside, flat for users, and few enough to know."""

from __future__ import annotations

from dataclasses import fields

import pytest

from quire.config.schema import GROUPS, OPTIONS, SUBJECTS, EngineConfig

MOST_OPTIONS = 63  # more cannot be tested together, or known


def test_options_are_few_and_each_is_in_one_group() -> None:
    assert sum(len(fields(kind)) for kind in GROUPS.values()) == len(OPTIONS) <= MOST_OPTIONS
    assert all(fields(kind) for kind in GROUPS.values())
    assert [*GROUPS, "replica"] == [group.name for group in fields(EngineConfig)]
    assert len(SUBJECTS) == len(GROUPS)


def test_flat_options_find_their_groups_and_come_back() -> None:
    config = EngineConfig(memory=2**33, block_size=32, dtype="bf16", seed=7)
    assert (config.limits.memory, config.cache.block_size, config.formats.dtype) == (2**33, 32, "bfloat16")
    assert EngineConfig(**config.values()) == config
    assert list(config.values()) == list(OPTIONS)
    changed = config.replace(block_size=16, load_format="dummy")
    assert (changed.cache.block_size, changed.loading.load_format, changed.limits.memory) == (
        16,
        "random",
        2**33,
    )
    assert config.cache.block_size == 32
    assert EngineConfig() == EngineConfig(threads=None) != config


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"threads": 0}, "threads: 0 is not a positive integer"),
        ({"max_num_seqs": True}, "max_num_seqs: True is not a positive integer"),
        ({"threads": 2000}, "threads: 2000 exceeds the limit of 1024"),
        ({"block_size": 24}, "block_size: 24 is not a positive multiple of 16"),
        ({"executor": "tpu"}, "executor: 'tpu' is not one of native, torch"),
        ({"device": "cuda"}, "device: 'cuda' needs --executor torch"),
    ],
)
def test_errors_name_the_option(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EngineConfig(**options)
    with pytest.raises(ValueError, match=says):
        EngineConfig().replace(**options)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="blocksize is not an option of an engine"):
        EngineConfig(blocksize=16)
