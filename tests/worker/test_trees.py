"""Trees of drafts: every position that is reached has the logits of a plain decode, to the last bit, in every cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.backends import BACKENDS, NATIVE, Backend
from helpers.specs import BF16, F16, F32, decoder_spec, moe_spec, with_latents
from quire._native import supported_isas
from quire.core.scheduler_config import SchedulerConfig
from quire.executor.base import F32 as Floats
from quire.executor.native import NativeExecutor
from quire.program.formats import NumberFormats
from quire.program.lower import lower
from quire.program.memory import kv_block_bytes
from quire.program.program import Program
from quire.spec import ModelSpec, Router
from quire.speculate.proposer import DraftTree
from quire.types import NewSeq, SamplingParams, ScheduledSeq, SchedulerOutput
from quire.worker.trees import PlantedTree, StepBranches
from quire.worker.worker import Worker

from .grammar import ALLOWED, Automata
from .running import BLOCK, VOCAB, Key, Made, Plant, Rig, check_same, draft_limits, executor_of, requests


def automata() -> Automata:
    return Automata(lambda new: int(new.request_id) % 2 == 0, ALLOWED)


def random_tree(rng: random.Random, right: Sequence[int], most: int) -> DraftTree:
    """A tree of up to `most` drafts in which the right tokens are some path, seldom the first, or a part of one."""
    tokens: list[int] = []
    parents: list[int] = []
    on_path = {0: 0}  # drafts that are right, and their depths
    for _ in range(rng.randint(1, most)):
        parent = rng.choice([*on_path, rng.randint(0, len(tokens))])
        depth = on_path.get(parent, -1)
        taken = {token for token, at in zip(tokens, parents, strict=True) if at == parent}
        if 0 <= depth < len(right) and right[depth] not in taken and rng.random() < 0.6:
            token = right[depth]
        else:
            token = rng.randrange(VOCAB)
        if token in taken:
            continue
        tokens.append(token)
        parents.append(parent)
        if 0 <= depth < len(right) and token == right[depth]:
            on_path[len(tokens)] = depth + 1
    return DraftTree(tokens, tuple(parents))


def trees(expected: dict[Key, Made], seed: int = 1, most: int = 12) -> Plant:
    rng = random.Random(seed)
    return lambda sample, outputs: random_tree(rng, expected[sample].tokens[outputs:], most)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_with_trees_every_bit_is_that_without(backend: Backend) -> None:
    asked = requests(10)
    expected = Rig(backend).run(asked)
    drafting = Rig(backend, plant=trees(expected), max_draft_tokens=24)
    check_same(drafting.run(asked), expected, backend)
    assert drafting.accepted > 40


SPEC = decoder_spec(VOCAB, 48, 40, (4, 2, 16), [0, 24], tied=True, qk_norm=True)
CACHES = {
    "f16": (SPEC, NumberFormats("f32", "f16")),
    "bf16": (SPEC, NumberFormats("bf16", "bf16")),
    "i8": (SPEC, NumberFormats("f32", "i8")),
    "e4m3": (SPEC, NumberFormats("f32", "e4m3")),
    "e5m2": (SPEC, NumberFormats("f32", "e5m2")),
    "i4": (SPEC, NumberFormats("f32", "i4")),
    "kvquant3": (SPEC, NumberFormats("f32", "kvquant3")),
    "windows": (decoder_spec(VOCAB, 48, 40, (4, 2, 20), [3, 17, 0]), F32),
    "latents": (with_latents(SPEC), F32),
    "latents bf16": (with_latents(SPEC), BF16),
    "latents f16": (with_latents(SPEC), F16),
    "experts": (moe_spec(Router(5, 2)), F32),
}


LATE: dict[str, tuple[ModelSpec, NumberFormats]] = {
    "kivi4": (SPEC, NumberFormats("f32", "kivi4")),
    "kivi2": (SPEC, NumberFormats("f32", "kivi2")),
}


class Steps:
    """A worker whose rows are written here: sequences are prompts of their own, each in blocks of its own."""

    def __init__(
        self, program: Program, block_size: int, backend: Backend = NATIVE, length: int = 96
    ) -> None:
        config = SchedulerConfig(
            num_blocks=7 * length // block_size * len(program.cache_groups), block_size=block_size, max_num_seqs=4,
            max_num_batched_tokens=length, max_model_len=length, max_draft_tokens=24, groups=program.cache_groups,
        )  # fmt: skip
        self.config = config
        self.executor = executor_of(backend, program)
        self.worker = Worker(self.executor, draft_limits(config))
        self.next = 0

    def logits(self, known: list[int], start: int, drafts: DraftTree | None = None) -> Floats:
        """Of the last token, and of drafts behind it: a chain without parents. Those before `start` are computed a step
        earlier."""
        self.next += 1
        size, groups = self.config.block_size, len(self.config.groups)
        each = self.config.max_model_len // size
        first = self.next % 6 * each * groups
        blocks = tuple(list(range(at, at + each)) for at in range(first, first + each * groups, each))
        new = NewSeq(self.next, known, len(known), SamplingParams(), 0, 0, blocks)
        none: tuple[list[int], ...] = tuple([] for _ in blocks)
        if start:
            self._run(ScheduledSeq(self.next, 0, known[:start], none, 0), [new])
        row = ScheduledSeq(self.next, start, known[start:], none, 1)
        if drafts is not None:
            row.token_ids += drafts.token_ids
            row.logits, row.parents = 1 + len(drafts.token_ids), drafts.parents or None
        found = self._run(row, [] if start else [new])
        self.worker.sample()
        self.worker.begin(SchedulerOutput(0, [], [], [self.next]))
        return found

    def _run(self, row: ScheduledSeq, new: list[NewSeq]) -> Floats:
        if isinstance(self.executor, NativeExecutor):  # what no row of this step writes shows
            content = np.empty((0, kv_block_bytes(self.executor.program, self.config.block_size)), np.uint8)
            self.executor._cache([], content)[self.config.num_blocks :] = 0xFF
        self.worker.begin(SchedulerOutput(0, [row], new, []))
        self.worker.forward(SchedulerOutput(0, [row], new, []))
        assert self.worker._forwarded is not None
        return self.worker._forwarded.outputs["logits"].copy()


def chains(tree: DraftTree) -> Iterator[list[int]]:
    """The drafts down to each leaf, as numbers."""
    for leaf in {*range(1, len(tree.parents) + 1)} - {*tree.parents}:
        chain = [leaf]
        while parent := tree.parents[chain[0] - 1]:
            chain.insert(0, parent)
        yield chain


def check_logits(steps: Steps, rng: random.Random, times: int, least: int = 1) -> None:
    """Random trees behind random texts: each chain of drafts against the same text without a tree or a cache."""
    for _ in range(times):
        most = steps.config.max_model_len - 36
        known = [rng.randrange(VOCAB) for _ in range(rng.randint(least, most))]
        tree = random_tree(rng, [rng.randrange(VOCAB) for _ in range(20)], 24)
        found = steps.logits(known, rng.choice([0, len(known) - 1, rng.randrange(len(known))]), tree)
        assert len(found) == 1 + len(tree.token_ids)
        for chain in chains(tree):
            plain = steps.logits(known, 0, DraftTree([tree.token_ids[draft - 1] for draft in chain], ()))
            np.testing.assert_array_equal(found[[0, *chain]], plain)


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("cache", CACHES)
def test_every_draft_has_the_logits_of_a_plain_decode(cache: str, block_size: int) -> None:
    """Each on one of the machine's instruction sets."""
    isas = supported_isas()
    isa = isas[(list(CACHES).index(cache) + block_size // BLOCK) % len(isas)]
    native = Backend(isa, lambda program: NativeExecutor(program, threads=2, isa=isa), 0.0)
    check_logits(Steps(lower(*CACHES[cache]), block_size, native), random.Random(block_size), 5)


@pytest.mark.parametrize("block_size", [32, 96])
@pytest.mark.parametrize("cache", LATE)
def test_drafts_behind_rounded_tokens_have_the_logits_of_a_plain_decode(cache: str, block_size: int) -> None:
    isas = supported_isas()
    isa = isas[(list(LATE).index(cache) + block_size // 32) % len(isas)]
    native = Backend(isa, lambda program: NativeExecutor(program, threads=2, isa=isa), 0.0)
    check_logits(Steps(lower(*LATE[cache]), block_size, native, 288), random.Random(block_size), 6, least=120)


@pytest.mark.parametrize("cache", LATE)
def test_rounded_tokens_of_drafts_that_are_taken_back_leave_no_trace(cache: str) -> None:
    """Long answers, whose drafts end groups of 32 tokens time and again."""
    asked, program = requests(4, max_tokens=150, n=1, ignore_eos=True), lower(*LATE[cache])
    few: dict[str, Any] = {"program": program, "block_size": 32, "max_model_len": 256, "num_blocks": 200}
    expected = Rig(**few).run(asked)
    assert all(len(made.tokens) == 150 for made in expected.values())
    drafting = Rig(plant=trees(expected), max_draft_tokens=24, **few)
    check_same(drafting.run(asked), expected)
    assert drafting.accepted > 40


@pytest.mark.parametrize("cache", ["bf16", "i8", "e4m3", "i4", "kvquant3", "windows", "latents f16"])
def test_what_is_accepted_stays_in_the_cache(cache: str) -> None:
    asked = requests(10)
    program = lower(*CACHES[cache])
    expected = Rig(program=program).run(asked)
    drafting = Rig(program=program, plant=trees(expected), max_draft_tokens=24)
    check_same(drafting.run(asked), expected)
    assert drafting.accepted > 40


def test_in_chunks_preempted_and_under_grammars() -> None:
    """Few blocks and a small budget: trees shrink, stand beside chunks of prompts, and their sequences give way."""
    asked = [replace(one, stepwise=True) for one in requests(10)]
    few: dict[str, Any] = {"num_blocks": 13, "max_num_batched_tokens": 21}
    expected = Rig(grammars=automata(), **few).run(asked)
    rig = Rig(grammars=automata(), plant=trees(expected, most=24), max_draft_tokens=24, **few)
    check_same(rig.run(asked), expected)
    assert rig.accepted > 40
    assert rig.scheduler.num_preemptions
    assert rig.shrunk


def forget_mirrors(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepBranches, "_mirror", lambda *_: None)


def copy_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NativeExecutor, "copy_blocks", lambda *_: None)


def end_too_late(patch: pytest.MonkeyPatch) -> None:
    """Nobody clears what is behind the path of a branch."""
    mirror = StepBranches._mirror

    def broken(self: StepBranches, tree: PlantedTree, draft: int, low: int, line: int, stop: int) -> None:
        mirror(self, tree, draft, low, line, stop + BLOCK)

    patch.setattr(StepBranches, "_mirror", broken)


def never_share(patch: pytest.MonkeyPatch) -> None:
    """Every branch leaves the sequence's own line."""
    add = StepBranches._add

    def broken(self: StepBranches, tree: PlantedTree, path: list[int], line: int, block: int) -> int:
        tree.lines = tree.lines[:1] * len(tree.lines)
        return add(self, tree, path, line, block)

    patch.setattr(StepBranches, "_add", broken)


@pytest.mark.parametrize("broken", [forget_mirrors, copy_nothing, never_share, end_too_late])
def test_without_what_a_branch_needs_logits_differ(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    steps = Steps(lower(*CACHES["bf16"]), BLOCK)
    rng = random.Random(1)
    with pytest.raises(AssertionError):
        check_logits(steps, rng, 20)


def test_a_path_that_is_not_kept_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests(10)
    expected = Rig().run(asked)
    monkeypatch.setattr(StepBranches, "accepted", lambda *_: ([], []))
    with pytest.raises(AssertionError):
        check_same(Rig(plant=trees(expected), max_draft_tokens=24).run(asked), expected)
