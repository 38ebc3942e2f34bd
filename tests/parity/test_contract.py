"""What every executor promises besides numbers: logit rows, limits, stopping, memory, refusals."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.backends import BACKENDS, Backend
from helpers.specs import BF16, F32, decoder_spec
from quire.executor.base import Embeddings, Executor, Limits, StepArrays
from quire.executor.native import NativeKind
from quire.executor.plans import StepSize, decode_sizes
from quire.executor.torch import TorchExecutor, TorchKind
from quire.executor.torch.executor import TorchOutputs
from quire.executor.torch.state import workspace_bytes
from quire.program.formats import Groups, NumberFormats, WeightFormat
from quire.program.lower import lower
from quire.program.memory import kv_block_bytes, plan_arena, rope_table_bytes
from quire.program.program import Program
from quire.spec import ModelSpec
from quire.types import NewSeq, SamplingParams

LIMITS = Limits(max_tokens=32, max_rows=3, max_logit_rows=4, max_len=40, num_blocks=6)
SPEC = decoder_spec(100, 48, 40, (4, 2, 16), [0, 8], tied=True, qk_norm=True)


def put_random(executor: Executor) -> None:
    random = np.random.default_rng(0)
    for param in executor.program.params:
        shape = (param.rows,) if param.kind == "vector" else (param.rows, param.cols)
        executor.put(param, 0, (random.standard_normal(shape) * 0.3).astype(np.float32), "F32")


def ready(
    make: Callable[[Program], Executor], formats: NumberFormats = F32, spec: ModelSpec = SPEC
) -> tuple[Executor, StepArrays]:
    """A bound executor, and arrays that hold one row of ten tokens in slot 2."""
    executor = make(lower(spec, formats))
    put_random(executor)
    arrays = StepArrays(LIMITS, len(executor.program.cache_groups))
    executor.bind(LIMITS, arrays)
    arrays.token_ids[:10] = range(10, 20)
    arrays.positions[:10] = range(10)
    arrays.query_start[:2] = 0, 10
    arrays.slots[0] = 2
    for group, table in enumerate(arrays.block_tables):
        table[2] = 2 * group, 2 * group + 1, 5
    return executor, arrays


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
class TestEveryExecutor:
    def test_logit_rows_may_be_any_rows_in_any_order(self, backend: Backend) -> None:
        executor, arrays = ready(backend.make)
        arrays.logit_rows[:4] = 9, 0, 4, 9
        logits = executor.run(10, 1, 4)["logits"].copy()
        assert logits.shape == (4, 100)
        np.testing.assert_array_equal(logits[0], logits[3])
        arrays.logit_rows[:2] = 4, 0
        np.testing.assert_allclose(executor.run_head(2)["logits"], logits[[2, 1]], atol=1e-5)

    def test_a_step_without_logits_can_be_asked_for_them_later(self, backend: Backend) -> None:
        executor, arrays = ready(backend.make)
        arrays.logit_rows[0] = 9
        expected = executor.run(10, 1, 1)["logits"].copy()
        assert executor.run(10, 1, 0)["logits"].shape == (0, 100)
        np.testing.assert_allclose(executor.run_head(1)["logits"], expected, atol=1e-5)

    def test_a_repeated_step_gives_the_same_bits(self, backend: Backend) -> None:
        executor, _ = ready(backend.make, BF16)
        first = executor.run(10, 1, 1)["logits"].copy()
        np.testing.assert_array_equal(executor.run(10, 1, 1)["logits"], first)

    def test_stopping_leaves_the_buffers_of_that_op(self, backend: Backend) -> None:
        executor, _ = ready(backend.make, BF16)
        executor.stop_after(0)
        executor.run(10, 1, 1)
        embedding = executor.read("residual", 10)
        executor.stop_after(1)
        executor.run(10, 1, 1)
        hidden = executor.read("hidden", 10)
        assert embedding.shape == hidden.shape == (10, 48)
        assert embedding.dtype == hidden.dtype == np.float32
        assert not (hidden.view(np.uint32) & 0xFFFF).any()  # bfloat16 values
        executor.stop_after(None)
        assert np.isfinite(executor.run(10, 1, 1)["logits"]).all()

    @pytest.mark.parametrize("formats", [F32, BF16], ids=["f32", "bf16"])
    def test_embeddings_take_the_place_of_ids(self, formats: NumberFormats, backend: Backend) -> None:
        """Rows that the table and the multiplier give for ids are as good as the ids; no op runs twice."""
        spec = replace(SPEC, embed_scale=3.0)
        executor, arrays = ready(backend.make, formats, spec)
        arrays.logit_rows[:4] = 9, 0, 4, 6
        expected = executor.run(10, 1, 4)["logits"].copy()
        executor.stop_after(1)
        executor.run(10, 1, 4)
        rows = executor.read("residual", 10)
        executor.stop_after(None)
        arrays.token_ids[2:9] = 0
        assert (executor.run(10, 1, 4)["logits"] != expected).any()
        arrays.embeddings = [Embeddings(2, rows[2:5]), Embeddings(5, rows[5:9])]
        np.testing.assert_array_equal(executor.run(10, 1, 4)["logits"], expected)
        assert executor.run(10, 1, 0)["logits"].shape == (0, 100)
        np.testing.assert_allclose(executor.run_head(4)["logits"], expected, atol=1e-5)

    def test_embeddings_of_another_shape_or_place_are_refused(self, backend: Backend) -> None:
        executor, arrays = ready(backend.make)
        for given, message in (
            (
                Embeddings(0, np.zeros((2, 47), np.float32)),
                r"float32 \[2, 47\] is not float32 \[tokens, 48\]",
            ),
            (Embeddings(0, np.zeros((2, 48), np.float64)), r"float64 \[2, 48\] is not"),
            (Embeddings(9, np.zeros((2, 48), np.float32)), "tokens 9 to 10 are not in the step's 10"),
        ):
            arrays.embeddings = [given]
            with pytest.raises(ValueError, match=f"embeddings: {message}"):
                executor.run(10, 1, 1)

    def test_a_program_that_takes_no_embeddings_refuses_them(self, backend: Backend) -> None:
        executor, arrays = ready(backend.make)
        executor.program = replace(executor.program, entry=None)
        arrays.embeddings = [Embeddings(0, np.zeros((2, 48), np.float32))]
        with pytest.raises(ValueError, match="embeddings: the program takes none"):
            executor.run(10, 1, 1)

    @pytest.mark.parametrize("sizes", [(33, 1, 1), (10, 4, 1), (10, 1, 5), (10, 1, -1)])
    def test_a_step_beyond_the_limits_is_refused(self, backend: Backend, sizes: tuple[int, int, int]) -> None:
        executor, _ = ready(backend.make)
        with pytest.raises(ValueError):
            executor.run(*sizes)
        executor.run(10, 1, 1)
        with pytest.raises(ValueError):
            executor.run_head(5)

    @pytest.mark.parametrize("formats", [BF16, NumberFormats("bf16", "i8")], ids=["bf16", "i8"])
    def test_a_block_copied_out_and_in_elsewhere_is_that_block(
        self, formats: NumberFormats, backend: Backend
    ) -> None:
        """A step that reads copies under other block ids, in another executor, gives the same bits."""
        executor, arrays = ready(backend.make, formats)
        arrays.logit_rows[0] = 9
        expected = executor.run(10, 1, 1)["logits"].copy()
        other, arrays = ready(backend.make, formats)
        contents = np.zeros((2, kv_block_bytes(executor.program, 16)), np.uint8)
        executor.read_blocks([0, 2], contents)
        other.write_blocks([5, 4], contents)
        arrays.block_tables[0][2, 0], arrays.block_tables[1][2, 0] = 5, 4
        arrays.token_ids[0], arrays.positions[0], arrays.query_start[1] = 19, 9, 1
        arrays.logit_rows[0] = 0
        np.testing.assert_allclose(other.run(1, 1, 1)["logits"], expected, atol=1e-5)
        again = np.zeros_like(contents)
        other.read_blocks([4, 5], again[::-1])
        assert (contents == again).mean() > 0.99  # the step wrote position 9 again
        for blocks, message in (([6, 0], "not all in"), ([-1, 0], "not all in"), ([0], "is not uint8")):
            with pytest.raises(ValueError, match=message):
                executor.read_blocks(blocks, contents)

    def test_a_prepared_step_gives_the_bits_of_any_other(self, backend: Backend) -> None:
        executor, arrays = ready(backend.make, BF16)
        arrays.logit_rows[0] = 9
        expected = executor.run(10, 1, 1)["logits"].copy()
        executor.prepare([StepSize(10, 1, 1), *decode_sizes(3)])
        before = executor.plans
        np.testing.assert_array_equal(executor.run(10, 1, 1)["logits"], expected)
        hits, fallbacks = executor.plans.hits - before.hits, executor.plans.fallbacks - before.fallbacks
        assert (hits, fallbacks) == ((1, 0) if before.sizes else (0, 1))
        assert before.sizes == (4 if backend.name == "native" else 0)

    def test_ranges_of_ops_make_a_step(self, backend: Backend) -> None:
        executor, arrays = ready(backend.make, BF16)
        arrays.logit_rows[0] = 9
        expected = executor.run(10, 1, 1)["logits"].copy()
        count, half = len(executor.program.ops), len(executor.program.body) // 2
        arrays.token_ids[9] = 77
        executor.run(10, 1, 1)
        arrays.token_ids[9] = 19
        executor.run_range(10, 1, 1, 0, half)
        executor.run_range(10, 1, 1, half, count)
        np.testing.assert_array_equal(executor.read("logits", 1), expected)
        with pytest.raises(ValueError):
            executor.run_range(10, 1, 1, 0, count + 1)

    def test_other_threads_run_python_during_a_step(self, backend: Backend) -> None:
        """With no other reason to take turns: a thread gets on only where the main thread lets go."""
        executor, _ = ready(backend.make)
        turns, ended, interval = [0], threading.Event(), sys.getswitchinterval()

        def count() -> None:
            while not ended.is_set():
                turns[0] += 1
                time.sleep(0)

        thread = threading.Thread(target=count)
        sys.setswitchinterval(100.0)
        try:
            thread.start()
            before = turns[0]
            sum(range(10**6))  # keeps it
            assert turns[0] == before
            for _ in range(10_000):
                executor.run(10, 1, 1)
                if turns[0] > before:
                    break
            assert turns[0] > before
        finally:
            sys.setswitchinterval(interval)
            ended.set()
            thread.join()

    def test_a_profile_has_seconds_of_every_op(self, backend: Backend) -> None:
        executor, _ = ready(backend.make)
        assert executor.take_profile() == ([], [])
        executor.profile(True)
        executor.run(10, 1, 1)
        seconds, waited = executor.take_profile()
        assert len(seconds) == len(waited) == len(executor.program.ops)
        assert min(seconds) > 0
        executor.profile(False)
        executor.run(10, 1, 1)
        assert executor.take_profile() == ([], [])

    def test_a_sampler_reads_the_outputs_of_its_executor(self, backend: Backend) -> None:
        executor, arrays = ready(backend.make)
        with pytest.raises(RuntimeError):
            backend.make(executor.program).sampler()
        arrays.logit_rows[0] = 9
        sampler, outputs = executor.sampler(), executor.run(10, 1, 1)
        sampler.add(2, NewSeq(0, [1] * 10, 10, SamplingParams(temperature=0), 0, 0, ()))
        sampled = sampler.sample(outputs, np.array([2], np.int32), np.array([10], np.int32))
        assert sampled.token_ids.tolist() == [int(outputs["logits"][0].argmax())]

    def test_binding_twice_is_an_error(self, backend: Backend) -> None:
        executor, arrays = ready(backend.make)
        with pytest.raises(RuntimeError):
            executor.bind(LIMITS, arrays)

    @pytest.mark.parametrize("formats", [BF16, NumberFormats("bf16", "i8")], ids=["bf16", "i8"])
    def test_memory_names_the_parts(self, formats: NumberFormats, backend: Backend) -> None:
        executor, _ = ready(backend.make, formats)
        memory, program = executor.memory(), executor.program
        assert set(memory) == {"weights", "kv", "activations", "tables", "adapters"}
        assert 0 <= memory["kv"] - 6 * kv_block_bytes(program, 16) < 4096  # whole pages
        assert memory["tables"] == rope_table_bytes(program, 40)
        assert memory["activations"] >= plan_arena(program, 32, 4).total
        executor.close()

    @pytest.mark.parametrize("linears", [None, WeightFormat("i8", Groups(32, "bf16"))], ids=["bf16", "i8"])
    def test_memory_is_what_its_own_kind_planned(
        self, linears: WeightFormat | None, backend: Backend
    ) -> None:
        executor, _ = ready(backend.make, replace(BF16, linears=linears, head=linears))
        kind = NativeKind(2) if backend.name == "native" else TorchKind("cpu", 1)
        planned, held = kind.planned_bytes(executor.program, LIMITS), executor.memory()
        assert planned.keys() == held.keys()
        for part in ("weights", "kv", "tables"):
            assert 0 <= held[part] - planned[part] < 4096, part  # whole pages
        assert held["activations"] < planned["activations"] + 8 * 4096
        assert kind.sampler_bytes(executor.program, LIMITS) > 0


class _Held(TorchDispatchMode):
    """Counts the bytes of tensors that live at once, beyond those that existed before."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        for tensor in (t for t in tree_leaves(made) if isinstance(t, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given | self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return made

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class TestTorchExecutor:
    """The reference refuses what breaks the contract of StepArrays instead of computing nonsense."""

    def test_outputs_stay_on_the_device_until_they_are_looked_up(self) -> None:
        executor, _ = ready(TorchExecutor)
        outputs = executor.run(10, 1, 2)
        assert isinstance(outputs, TorchOutputs)
        assert set(outputs) == {output.name for output in executor.program.outputs}
        assert isinstance(outputs.tensors["logits"], torch.Tensor)
        np.testing.assert_array_equal(outputs["logits"], outputs.tensors["logits"].numpy())
        assert outputs.get("maximum") is None

    @pytest.mark.parametrize("linears", [None, WeightFormat("i8", Groups(32, "bf16"))], ids=["bf16", "i8"])
    def test_a_step_allocates_no_more_than_planned(self, linears: WeightFormat | None) -> None:
        executor, _ = ready(TorchExecutor, replace(BF16, linears=linears, head=linears))
        held = _Held()
        with held:
            executor.run(10, 1, 4)
        assert 0 < held.most < workspace_bytes(executor.program, LIMITS)

    @pytest.mark.parametrize(
        ("name", "index", "value"),
        [
            ("token_ids", 3, 100), ("token_ids", 0, -1), ("positions", 9, 40), ("positions", 0, -1),
            ("slots", 0, 3), ("query_start", 1, 9), ("query_start", 0, 1), ("logit_rows", 0, 10),
        ],
    )  # fmt: skip
    def test_arrays_out_of_range(self, name: str, index: int, value: int) -> None:
        executor, arrays = ready(TorchExecutor)
        getattr(arrays, name)[index] = value
        with pytest.raises(ValueError, match=name):
            executor.run(10, 1, 1)

    @pytest.mark.parametrize(("sizes", "name"), [((0, 1, 1), "num_tokens"), ((10, 0, 1), "num_rows")])
    def test_empty_steps(self, sizes: tuple[int, int, int], name: str) -> None:
        executor, _ = ready(TorchExecutor)
        with pytest.raises(ValueError, match=name):
            executor.run(*sizes)

    def test_blocks_are_checked_where_they_are_read(self) -> None:
        executor, arrays = ready(TorchExecutor)
        arrays.block_tables[0][2, 1] = 6  # positions 16 … are not in the step
        executor.run(10, 1, 1)
        arrays.block_tables[0][2, 0] = 6
        with pytest.raises(ValueError, match=r"block_tables\[0\]\[2\].*\[0, 6\)"):
            executor.run(10, 1, 1)

    def test_order_of_calls(self) -> None:
        executor = TorchExecutor(lower(SPEC, F32))
        arrays = StepArrays(LIMITS, 2)
        with pytest.raises(RuntimeError, match="bind"):
            executor.run(1, 1, 1)
        with pytest.raises(ValueError, match="not put whole"):
            executor.bind(LIMITS, arrays)
        put_random(executor)
        executor.bind(LIMITS, arrays)
        with pytest.raises(RuntimeError, match="run before"):
            executor.run_head(1)
        with pytest.raises(ValueError, match="op_index"):
            executor.stop_after(len(executor.program.ops))

    def test_parts_that_do_not_fit(self) -> None:
        executor = TorchExecutor(lower(SPEC, F32))
        head = executor.program.param("head")
        good = np.zeros((50, 48), np.float32)
        executor.put(head, 50, good, "F32")
        with pytest.raises(ValueError, match="put before"):
            executor.put(head, 99, good[:1], "F32")
        with pytest.raises(ValueError, match="does not fit"):
            executor.put(head, 1, np.zeros((50, 47), np.float32), "F32")
        with pytest.raises(ValueError, match="does not fit"):
            executor.put(head, 51, good, "F32")
        with pytest.raises(ValueError, match="not one of"):
            executor.put(head, 0, good.astype(np.float64), "F64")
        with pytest.raises(ValueError, match="not one of"):
            executor.put(head, 0, good, "BF16")
        with pytest.raises(ValueError, match="no parameter"):
            executor.put(lower(decoder_spec(9, 8, 8, (1, 1, 8), [0]), F32).param("embed"), 0, good, "F32")
