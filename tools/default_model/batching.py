"""From conversations to training steps: token ids, targets, and groups of documents of similar length.

Step `n` is a pure function of the seed and n, so an interrupted run can continue as if it had not stopped.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .corpus.conversation import Conversation
from .corpus.draw import Draw, Split
from .model import Group
from .rendering import END_OF_TEXT, IM_START, segments
from .shape import MAX_POSITIONS
from .tokenizer import MARKS, SPECIAL, id_of

IGNORE = -1
_USER = f"{IM_START}user\n"
Source = Callable[[int], Conversation]  # index -> conversation


@dataclass(slots=True)
class Example:
    """A document: ids, and for every position the id to predict, or IGNORE where nothing is learned."""

    ids: list[int]
    targets: list[int]


@dataclass(slots=True)
class MicroBatch:
    """One forward pass: ids [n] laid out as `groups`, rows [m] that predict, their targets [m]."""

    ids: Tensor
    groups: list[Group]
    rows: Tensor
    targets: Tensor

    def to(self, device: str) -> MicroBatch:
        return MicroBatch(self.ids.to(device), self.groups, self.rows.to(device), self.targets.to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The assembly of a step. `pool` conversations are sorted by length and dealt to `steps_per_pool` steps.

    Of a share `prompts` of the conversations the user's turns are learned too. `repeat_tokens` additional tokens per
    step are random sequences repeated once, see `repeats`.
    """

    seed: int
    pool: int = 512
    steps_per_pool: int = 6
    group_tokens: int = 1024
    micro_tokens: int = 1024
    max_length: int = MAX_POSITIONS
    prompts: float = 0.0
    repeat_tokens: int = 0


def encode(conversation: Conversation, tokenizer: Tokenizer, *, prompts: bool = False) -> Example:
    """Token ids of the rendered conversation, segment by segment, which equals encoding it as a whole."""
    ids: list[int] = []
    learn: list[bool] = []
    pieces = segments(conversation)
    for piece, encoded in zip(pieces, tokenizer.encode_batch([p.text for p in pieces]), strict=True):
        ids += encoded.ids
        learn += [piece.learn or (prompts and piece.text.startswith(_USER))] * len(encoded.ids)
    targets = [i if wanted else IGNORE for i, wanted in zip(ids[1:], learn[1:], strict=True)]
    return Example(ids[:-1], targets)


class Batches:
    """The training steps of one run. With `workers`, as many processes make the pools of the next steps meanwhile."""

    def __init__(self, source: Source, tokenizer: Tokenizer, plan: BatchPlan, workers: int = 0) -> None:
        self._source, self._tokenizer, self._plan = source, tokenizer, plan
        self._pad = id_of(tokenizer, END_OF_TEXT)
        self._pool = -1
        self._groups: list[list[Example]] = []
        self._workers = workers
        self._executor = None
        if workers:
            spawn = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(workers, spawn, initializer=_end_with_parent)
        self._coming: dict[int, Future[list[list[Example]]]] = {}

    def step(self, step: int) -> list[MicroBatch]:
        """The micro-batches of one step."""
        plan = self._plan
        pool, part = divmod(step, plan.steps_per_pool)
        if pool != self._pool:
            self._pool, self._groups = pool, self._make_groups(pool)
        batches: list[list[list[Example]]] = [[]]
        for group in self._groups[part :: plan.steps_per_pool]:
            if batches[-1] and sum(map(_area, batches[-1])) + _area(group) > plan.micro_tokens:
                batches.append([])
            batches[-1].append(group)
        made = [_micro_batch(batch, self._pad) for batch in batches if batch]
        if plan.repeat_tokens:
            vocabulary = range(self._tokenizer.get_vocab_size() - len(SPECIAL + MARKS))  # which come last
            rows = repeats(Draw(f"repeats:{plan.seed}:{step}", Split.TRAIN), vocabulary, plan.repeat_tokens)
            made.append(_micro_batch([rows], self._pad))
        return made

    def _make_groups(self, pool: int) -> list[list[Example]]:
        if self._executor is None:
            return make_groups(self._source, self._tokenizer, self._plan, pool)
        for number in range(pool, pool + self._workers + 1):
            if number not in self._coming:
                self._coming[number] = self._executor.submit(
                    make_groups, self._source, self._tokenizer, self._plan, number
                )
        return self._coming.pop(pool).result()


def make_groups(source: Source, tokenizer: Tokenizer, plan: BatchPlan, pool: int) -> list[list[Example]]:
    """The groups of one pool: a pure function of its arguments."""
    draw = Draw(f"groups:{plan.seed}:{pool}", Split.TRAIN)
    examples = [
        encode(source(index), tokenizer, prompts=draw.chance(plan.prompts))
        for index in range(pool * plan.pool, (pool + 1) * plan.pool)
    ]
    fitting = sorted((e for e in examples if len(e.ids) <= plan.max_length), key=lambda e: len(e.ids))
    return draw.shuffled(_cut(fitting, plan.group_tokens))


def _end_with_parent() -> None:
    """A worker ends when the process that started it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def repeats(draw: Draw, vocabulary: range, tokens: int) -> list[Example]:
    """About `tokens` tokens in rows of one length: a random sequence, a random filler, the sequence again.

    The second saying is learned from its second token on, where the context decides it: practice for the heads that
    `wiring` put in.
    """
    length, gap = draw.between(4, 48), draw.between(0, 24)
    made = []
    for _ in range(max(1, tokens // (2 * length + gap))):
        said = [draw.pick(vocabulary) for _ in range(length)]
        ids = said + [draw.pick(vocabulary) for _ in range(gap)] + said
        made.append(Example(ids[:-1], [IGNORE] * (length + gap) + said[1:]))
    return made


def _cut(examples: Iterable[Example], group_tokens: int) -> list[list[Example]]:
    """Neighbours by length, up to `group_tokens` when padded to the longest."""
    groups: list[list[Example]] = [[]]
    for example in examples:
        if groups[-1] and len(example.ids) * (len(groups[-1]) + 1) > group_tokens:
            groups.append([])
        groups[-1].append(example)
    return groups


def _area(group: list[Example]) -> int:
    return len(group) * max(len(e.ids) for e in group)


def _micro_batch(batch: list[list[Example]], pad: int) -> MicroBatch:
    ids: list[int] = []
    targets: list[int] = []
    groups: list[Group] = []
    for group in batch:
        length = max(len(e.ids) for e in group)
        groups.append((len(group), length))
        for e in group:
            ids += e.ids + [pad] * (length - len(e.ids))
            targets += e.targets + [IGNORE] * (length - len(e.ids))
    target = torch.tensor(targets)
    rows = (target != IGNORE).nonzero()[:, 0]
    return MicroBatch(torch.tensor(ids), groups, rows, target[rows])
