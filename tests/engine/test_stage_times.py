"""The stages of a step: what the kernels take op by op, summed; and nothing while nobody asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.tokenizers import Folder
from quire.config.schema import EngineConfig
from quire.engine.api import Ask
from quire.engine.build.assemble import build
from quire.engine.build.opening import open_model
from quire.engine.sync_engine import SyncEngine
from quire.types import SamplingParams


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_stages_are_the_ops_of_a_step(checkpoint: Folder, executor: str) -> None:
    options = EngineConfig(executor=executor, max_model_len=64, threads=1)
    built = build(open_model(Path(checkpoint("llama3.1")), tokenizer=False), options)
    try:
        core, engine = built.core, SyncEngine(built)

        def run() -> None:
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            engine.add(Ask(prompt=[3, 4, 5, 6, 7, 8, 9, 10], params=params))
            while engine.has_work():
                engine.step()

        run()
        assert not any(record.stage_seconds for record in core.records)
        core.time_stages(True)
        before = len(core.records)
        run()
        timed = list(core.records)[before:]
        assert len(timed) == 4
        for record in timed:
            embed, layers, project, sample = record.stage_seconds
            assert min(embed, layers, project, sample) > 0
            assert embed + layers + project + sample <= record.execute_seconds
        core.time_stages(False)
        before = len(core.records)
        run()
        assert not any(record.stage_seconds for record in list(core.records)[before:])
    finally:
        built.close()
