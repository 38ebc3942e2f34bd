"""Adapters of a model that is spread over ranks: the bits that they have on one."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from helpers.low_rank import random_adapter, random_matrix
from helpers.rank_processes import Wide, answered, asked, make
from quire import LLM
from quire.executor.ranked_adapters import RemoteSlots, obey_frames
from quire.lora.adapter import Adapter
from quire.program.tensors import AdapterShape
from quire.spec import read_model
from quire.types import UnsupportedModelError
from ranks.test_matrix import FORMATS

if TYPE_CHECKING:
    from quire.executor.base import AdapterSlots
    from quire.program.program import Program

RANK = 5
LORA: Mapping[str, Any] = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 2}
PLANS: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 3},
    {"pipeline_parallel_size": 2},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
]


def adapters_of(folder: Path, **more: Any) -> dict[str, Adapter]:
    """One more than can be used at once, of different ranks."""
    spec = read_model(folder).spec
    return {f"a{seed}": random_adapter(spec, seed, 2 + seed, **more) for seed in range(3)}


def answers(llm: LLM) -> list[Any]:
    """Of requests with and without adapters beside each other, some of which wait for their adapter."""
    rows, asks = asked()
    names = ["", "a0", "a1", "a2", "a0"]
    return answered(llm.generate(rows, asks, adapter=names))


def check(
    folder: Path, plans: list[dict[str, Any]], adapters: dict[str, Adapter], **options: Any
) -> list[Any]:
    """Returns the answers of one rank, which those of all plans equal."""
    with make(folder, adapters=adapters, **LORA, **options) as llm:
        alone = answers(llm)
    ran = 0
    for plan in plans:
        with suppress(UnsupportedModelError):  # too few heads or panels
            with make(folder, adapters=adapters, **LORA, **options, **plan) as llm:
                assert answers(llm) == alone, plan
            ran += 1
    assert ran
    return alone


def test_adapters_over_ranks(wide: Wide) -> None:
    """Of everything that adapters can change, with magnitudes, beside stages; without them the answers are others."""
    folder = wide("qwen3")
    more = {"every": True, "dora": True}
    room = {"lora_target_modules": ("embed_tokens", "lm_head")}
    found = check(folder, PLANS[3:], adapters_of(folder, **more), quantization="int8", **room)
    with make(folder, quantization="int8") as llm:
        plain = answered(llm.generate(*asked()))
    assert found[0][0] == plain[0][0], (
        "a request without an adapter has the bits of a server without adapters"
    )
    assert all(a != b for a, b in zip(found[0][1:], plain[0][1:], strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize(
    "name",
    ["qwen3", "llama-biases-mqa-tied", "phi3-window", "glm4", "olmo2", "deepseek3", "gpt-oss", "mixtral"],
)
def test_every_plan(wide: Wide, name: str, formats: str) -> None:
    folder = wide(name)
    room = {"lora_target_modules": ("embed_tokens", "lm_head", "experts")}
    with suppress(UnsupportedModelError):  # an int8 cache of latents
        check(folder, PLANS, adapters_of(folder, every=True), **FORMATS[formats], **room)


def test_what_goes_wrong_on_a_rank_is_told_when_it_settles() -> None:
    """Of several things the first; what comes behind it is done. Nobody waits for a rank that has ended."""
    ours, theirs = socket.socketpair()
    done: list[int] = []

    class Slots:
        def open_adapter(self, slot: int, shape: AdapterShape) -> None:
            if shape.parts:
                raise RuntimeError(f"no room for {shape.parts['q']}")

        def put_adapter(self, slot: int, *_: Any) -> None:
            raise ValueError("not opened")

        def clear_adapter(self, slot: int) -> None:
            done.append(slot)

    remote = RemoteSlots(cast("Program", None), ours.sendall)
    slots = cast("AdapterSlots", Slots())
    reader = Thread(target=obey_frames, args=(theirs.makefile("rb"), lambda: slots, remote.answer))
    reader.start()
    remote.open_adapter(1, AdapterShape({"q": [(2, False)]}, []))
    remote.put_adapter(1, "q", 0, np.zeros((2, 3), np.float32), np.zeros((4, 2), np.uint16).T.T)
    remote.clear_adapter(1)
    with pytest.raises(RuntimeError, match=r"no room for \[\(2, False\)\]"):
        remote.settle_adapters()
    remote.settle_adapters()
    assert done == [1]
    remote.put_adapter(1, "q", 0, np.zeros((2, 3), np.float32), np.zeros((4, 2), np.float32))
    remote.open_adapter(1, AdapterShape({}, []))
    remote.settle_adapters()  # of the adapter before, which was given up, nothing is told
    ours.close()
    reader.join()
    with pytest.raises(RuntimeError, match="does not take adapters"):
        remote.clear_adapter(1)
    remote.lose("rank 1 of 2 was killed")
    with pytest.raises(RuntimeError, match="rank 1 of 2 was killed"):
        remote.settle_adapters()


def test_adapters_of_whole_experts_are_refused(wide: Wide) -> None:
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with pytest.raises(UnsupportedModelError, match="lora_target_modules: adapters of experts are not"):
        make(wide("mixtral"), **LORA, **ranks, lora_target_modules=("experts",))
    adapters = adapters_of(wide("mixtral"))
    check(wide("mixtral"), [ranks], adapters)


def test_whole_matrices(wide: Wide) -> None:
    """An embedding and a head of an adapter's own, of which each rank has its rows."""
    folder = wide("qwen3")
    spec = read_model(folder).spec
    modules = [name.removesuffix(".weight") for name in (spec.names.embed, spec.names.head)]
    adapters = {}
    for name, adapter in adapters_of(folder).items():
        random = np.random.default_rng(adapter.rank)
        own = {module: random_matrix(random, spec.vocab, spec.dim) for module in modules}
        adapters[name] = replace(adapter, modules_to_save=own)
    check(folder, PLANS[:1], adapters, lora_target_modules=("modules_to_save",))
