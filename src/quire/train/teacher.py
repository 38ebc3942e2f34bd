"""A target as its draft's teacher: the features of texts, and the token that it would say after each of theirs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quire.config.schema import EngineConfig
from quire.engine.build.assemble import choose, machine_facts, open_weights, weight_origin
from quire.engine.build.load_weights import load_weights
from quire.engine.build.opening import Model
from quire.executor.base import F32, I32, Limits, StepArrays
from quire.executor.kinds import executor_kind
from quire.loader.load import widened
from quire.spec.draft import Features

HEAD_ROWS = 256  # rows of logits at a time


class Teacher:
    """Runs batches of up to `rows` texts of `length` tokens. Without `features` a draft takes none."""

    def __init__(
        self, model: Model, asked: EngineConfig, features: Features | None, rows: int, length: int
    ) -> None:
        config, self.program = choose(
            model, asked.replace(max_model_len=length, max_num_seqs=rows), machine_facts(), features=features
        )
        groups, each = len(self.program.cache_groups), -(-length // asked.cache.block_size)
        self.limits = Limits(
            rows * length, rows, HEAD_ROWS, length, rows * each * groups, asked.cache.block_size
        )
        self._names = [output.name for output in self.program.outputs if output.name.startswith("features")]
        self._arrays = StepArrays(self.limits, groups)
        for group, table in enumerate(self._arrays.block_tables):
            table[:, :each] = np.arange(rows * each).reshape(rows, each) + group * rows * each
        self._executor = executor_kind(config).make(self.program)
        load_weights(weight_origin(model), self.program, config, self._executor, None)
        self._executor.bind(self.limits, self._arrays)

    def answer(self, texts: I32) -> tuple[F32, npt.NDArray[np.int64]]:
        """Features [texts, length, width], and the likeliest token after each [texts, length]."""
        arrays, (rows, length) = self._arrays, texts.shape
        count = rows * length
        arrays.token_ids[:count] = texts.reshape(-1)
        arrays.positions[:count] = np.tile(np.arange(length, dtype=np.int32), rows)
        arrays.query_start[: rows + 1] = np.arange(rows + 1) * length
        arrays.slots[:rows] = range(rows)
        labels = np.empty(count, np.int64)
        for first in range(0, count, HEAD_ROWS):
            wanted = min(HEAD_ROWS, count - first)
            arrays.logit_rows[:wanted] = range(first, first + wanted)
            made = self._executor.run_head(wanted) if first else self._executor.run(count, rows, wanted)
            labels[first : first + wanted] = made["logits"].argmax(-1)
        parts = [made[name] for name in self._names] or [np.empty((count, 0), np.float32)]
        features = np.concatenate(parts, axis=1)
        return features.reshape(rows, length, features.shape[1]), labels.reshape(rows, length)

    def close(self) -> None:
        """Free the executor."""
        self._executor.close()


def read_tables(model: Model) -> tuple[F32, F32]:
    """The embedding and the head of a model, in float32."""
    spec = model.facts.spec
    with open_weights(model) as opened:
        source: Any = weight_origin(model).rules.view(opened)
        names = spec.names.embed, spec.names.embed if spec.tied else spec.names.head
        embed, head = (widened(source.read(name), source.info(name).dtype) for name in names)
        return embed.astype(np.float32), head.astype(np.float32)
