"""Models larger than the memory for their weights: the same bits, and never more in memory than the bound."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import TinyModel
from helpers.memory import memory_for
from helpers.tokenizers import save_whole
from quire import LLM, SamplingParams
from quire.executor import paged_weights
from quire.executor.paged_weights import PagedWeights, PagingPlan, WeightUnit
from quire.types import CheckpointError, MemoryBudgetError
from quire.util.resident import resident_parts

MIB = 2**20
DENSE = TinyModel("llama", "LlamaConfig", {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 2048, "max_position_embeddings": 256})  # fmt: skip
EXPERTS = TinyModel("qwen3-moe", "Qwen3MoeConfig", {
    "hidden_size": 128, "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 32,
    "num_hidden_layers": 3, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 512,
    "max_position_embeddings": 256})  # fmt: skip
# Bytes of weights in memory: of 22 MiB, whose largest part has 2; of 21, of whose experts a long prompt needs 4.
BOUNDS = {"llama": 7 * MIB, "qwen3-moe": 8 * MIB}
TABLES = {
    "llama": 2 * MIB,
    "qwen3-moe": MIB // 4,
}  # embeddings, which come by rows
PROMPTS = [[3 + (7 * i + 3 * j) % 90 for j in range(20 + 30 * i)] for i in range(3)]
ASKED = [
    SamplingParams(max_tokens=6, temperature=0.8, seed=seed, logprobs=2, ignore_eos=True) for seed in range(3)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {model.name: save_whole(model, tmp_path_factory.mktemp(model.name)) for model in (DENSE, EXPERTS)}


class Watch(threading.Thread):
    """Looks again and again how many bytes of the weights are in memory."""

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self.most = 0
        self._areas = [area for area in llm._built.executor.areas() if area[0] == "weights"]
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.001):
            self.most = max(self.most, resident_parts(os.getpid(), self._areas)["weights"])

    def end(self) -> int:
        self._ended.set()
        self.join()
        return self.most


def answers(folder: Path, cache: Path, **options: Any) -> tuple[list[Any], int, Any, str]:
    """Tokens and log-probabilities, the most bytes of weights in memory, counts and the source of weights."""
    llm = LLM(folder, weight_cache_dir=str(cache), max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64,
              threads=2, progress=False, memory=memory_for(300 * MIB), **options)  # fmt: skip
    try:
        watch = Watch(llm)
        watch.start()
        made = []
        for output in llm.generate(PROMPTS, ASKED, use_tqdm=False):
            scores = [c.logprob for p in output.outputs[0].logprobs or [] for c in p]
            made.append((output.outputs[0].token_ids, scores))
        paging = llm._built.executor.paging
        return made, watch.end(), None if paging is None else paging.counts, llm._built.weights.source
    finally:
        llm.close()


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_the_same_bits_within_the_bound(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Packed into the file first, then mapped."""
    plain, _, none, _ = answers(folders[name], tmp_path / "other")
    assert none is None
    bound = BOUNDS[name]
    for source in ("checkpoint", "packed"):
        made, most, counts, came = answers(folders[name], tmp_path / "cache", weight_memory=bound)
        assert made == plain
        assert came == source
        assert bound // 2 < most <= bound + TABLES[name]
        assert counts.resident <= bound < counts.total / 2
        assert counts.paged_in > 2 * counts.total if name == "llama" else counts.paged_in > counts.total / 2
        assert counts.seconds > 0
    roomy, most, counts, _ = answers(folders[name], tmp_path / "cache", weight_memory=2**30)
    assert (roomy, counts) == (plain, None), "all of it fits: nothing comes or goes"


def test_without_making_room_the_bound_is_passed(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above would notice."""
    monkeypatch.setattr(PagedWeights, "_make_room", lambda *_: True)
    _, most, _, _ = answers(folders["llama"], tmp_path, weight_memory=BOUNDS["llama"])
    assert most > BOUNDS["llama"] + TABLES["llama"]


def test_a_kernel_that_cannot_populate_reads_pages(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _, _, _ = answers(folders["llama"], tmp_path)
    monkeypatch.setattr(paged_weights, "_POPULATE_READ", 10**6)
    made, most, _, _ = answers(folders["llama"], tmp_path, weight_memory=BOUNDS["llama"])
    assert made == plain
    assert most <= BOUNDS["llama"] + TABLES["llama"]


def test_what_is_needed_last_makes_room(folders: dict[str, Path], tmp_path: Path) -> None:
    """Of a pass over layers again and again, what fits beside what is read ahead stays."""
    llm = LLM(folders["llama"], weight_cache_dir=str(tmp_path), max_model_len=128, progress=False,
              memory=memory_for(300 * MIB), weight_memory=BOUNDS["llama"])  # fmt: skip
    paging, program = llm._built.executor.paging, llm._built.program
    assert paging is not None
    came = []
    for _ in range(4):
        before = paging.counts.paged_in
        paging.run(lambda *_: None, lambda _: [], 0, len(program.ops))
        came.append(paging.counts.paged_in - before)
    total = paging.counts.total
    llm.close()
    tables = sum(end - begin for begin, end in paging._plan.tables)
    bound = BOUNDS["llama"]
    assert sum(came[1:]) / 3 <= total - tables - bound + bound // 2, "a queue would read all of it"


def test_where_it_cannot_be_kept_it_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["qwen3-moe"]
    for options, error, says in (
        (
            {"weight_memory": MIB},
            MemoryBudgetError,
            r"weight_memory: 1(\.0+)? MiB is too little .* are needed at once",
        ),
        ({"weight_cache": "off"}, ValueError, "weight_memory: the others are read from packed weights"),
        ({"load_format": "random"}, ValueError, "weight_memory: the others are read from packed weights"),
        ({"executor": "torch"}, ValueError, "weight_memory: not with executor torch"),
        ({"tensor_parallel_size": 2}, ValueError, "weight_memory: not with ranks"),
        ({"enable_lora": True}, ValueError, "weight_memory: not with enable_lora"),
        ({"weight_cache_size": MIB}, CheckpointError, "weight_memory: packed weights: .*exceed the limit"),
    ):
        asked: dict[str, Any] = {
            "weight_memory": BOUNDS["qwen3-moe"],
            "weight_cache_dir": str(tmp_path),
        } | options
        with pytest.raises(error, match=says):
            LLM(folder, max_model_len=128, progress=False, memory=memory_for(300 * MIB), **asked)
    llm = LLM(folder, max_model_len=128, progress=False, memory=memory_for(300 * MIB), weight_cache_dir=str(tmp_path),
              weight_memory=BOUNDS["qwen3-moe"])  # fmt: skip
    least = PagingPlan(llm._built.program, BOUNDS["qwen3-moe"]).least
    planned = llm._built.plan.parts["weights"]
    llm.close()
    assert 4 * MIB < least < BOUNDS["qwen3-moe"] <= planned


def test_a_full_disk_is_told_before_anything_is_written(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write to a mapping of a file without room would end the process (SIGBUS)."""
    taken = []
    plain = os.posix_fallocate

    def full(fd: int, begin: int, size: int) -> None:
        plain(fd, begin, size)
        taken.append(512 * os.fstat(fd).st_blocks - size)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match=r"weight_memory: packed weights: .*No space left"):
        answers(folders["llama"], tmp_path, weight_memory=BOUNDS["llama"])
    assert taken[0] >= 0, "all of it was reserved"
    assert [*tmp_path.glob("*")] == []


def test_what_could_not_be_read_does_not_count_as_held(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(folders["llama"], weight_cache_dir=str(tmp_path), max_model_len=128, progress=False,
              memory=memory_for(300 * MIB), weight_memory=BOUNDS["llama"])  # fmt: skip
    paging, program = llm._built.executor.paging, llm._built.program
    assert isinstance(paging, PagedWeights)
    paging.forget()
    plain, failing = paging._populate, True

    def populate(unit: WeightUnit) -> None:
        if failing:
            raise OSError(errno.EIO, "Input/output error")
        plain(unit)

    monkeypatch.setattr(paging, "_populate", populate)
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output"):
            paging.run(lambda *_: None, lambda _: [], 0, len(program.ops))
    assert paging.counts.resident <= paging._plan.fixed
    failing = False
    paging.run(lambda *_: None, lambda _: [], 0, len(program.ops))
    assert paging.counts.resident <= BOUNDS["llama"]
    monkeypatch.setattr(paging, "_room", MIB // 2)
    with pytest.raises(MemoryBudgetError, match="weight_memory: too little for a step"):
        paging.run(lambda *_: None, lambda _: [], 0, len(program.ops))
    llm.close()
