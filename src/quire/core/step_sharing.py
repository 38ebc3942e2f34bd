"""Steps that share the sequences, for stages of a pipeline that run two of them at a time.

A step begins in the first half of the stages while the one before it ends in the second half. A sequence that samples
is in every other step, since its next token is known only at the end:

    sequences that decode   a b c d     first half    ab  cd  ab  cd
    a prompt in chunks      p           second half       ab  cd  ab      p1 p2 p3: a chunk in each step

Both halves are busy if steps take equally long. So each has half of the sequences that decode, and prompts come in
chunks that are a small part of what waits.

A step that nothing ran beside, because of what is in it, is followed by one that has all sequences. The next one that
shares passes over those which the last one had:

    moves     x x x x - -
    step      ab abcd abcd abcd cd ab …    none is ahead of another by more than a token or two
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from quire.core.sequence import Sequence
from quire.types import ScheduledSeq

CHUNK = 64  # tokens of prompts in a step that shares


def share_of_streams(running: Iterable[Sequence], ahead: Mapping[Sequence, ScheduledSeq]) -> int:
    """How many of the sequences that decode a step may have: half of them, with those that sample in a step ahead."""
    count = sum([seq.computed >= seq.prompt_len for seq in running])
    for seq, row in ahead.items():
        count += row.sample and seq.computed < seq.prompt_len
    return -(-count // 2)


def passed_over(running: Iterable[Sequence], had: Collection[int]) -> Collection[int]:
    """Which sequences that decode a step passes over that shares and has none ahead: those that the last one had, if
    others decode, too. Both by their ids at the worker."""
    others = any(seq.seq_id not in had for seq in running if seq.computed >= seq.prompt_len)
    return had if others else ()
