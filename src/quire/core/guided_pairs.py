"""Requests with classifier-free guidance: each sample is a pair of sequences that sample together.

    leader      prompt, a, b, c      goes by the request: its row's token is drawn from the logits of both
    follower    negative prompt, a, b, c      takes what the leader got, and no event comes of it

The follower is a sample of a request of its own, which only the scheduler knows. It ranks right behind its leader. Both
are admitted and preempted together, and one that has reached its last token before the other waits: a half never runs
that token alone. So a pair under way holds blocks only while it can go on, or while sequences ahead of it can.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import add

from quire.core.sequence import Sequence, Status
from quire.core.step_plan import StepPlan


def link(leaders: Seq[Sequence], followers: Seq[Sequence]) -> None:
    """Make pairs of the samples of two requests."""
    for leader, follower in zip(leaders, followers, strict=True):
        leader.partner, follower.partner = follower, leader
        follower.follows = True
        follower.rank = (*leader.rank, 0.0)


def follow(seq: Sequence) -> None:
    """Give a follower the tokens that its leader got."""
    leader = seq.partner
    assert leader is not None
    seq.tokens += leader.tokens[leader.prompt_len + len(seq.tokens) - seq.prompt_len :]


def halves(seq: Sequence, status: Status) -> list[Sequence]:
    """A sequence, and with it the other one of its pair, if that has a certain status."""
    return [seq] if seq.partner is None or seq.partner.status is not status else [seq, seq.partner]


def halved(running: Seq[Sequence], step: StepPlan) -> list[Sequence]:
    """Leaders whose followers wait, but for those that start in this step, which the worker does not know yet."""
    new = {new.seq_id for new in step.new}
    return [seq for seq in running if len(halves(seq, Status.WAITING)) > 1 and seq.seq_id not in new]


def hold_back(step: StepPlan) -> None:
    """Take the last token out of the row of each half whose other half does not sample in this step.

    A row without a token is taken out. The sequence keeps its new blocks, of which the worker hears with its next row.
    """
    rows = [(seq, row) for seq, row in zip(step.seqs, step.rows, strict=True) if seq.partner is not None]
    sampling = {seq for seq, row in rows if row.sample}
    for seq, row in rows:
        if seq.unsent is not None:
            row.new_blocks, seq.unsent = tuple(map(add, seq.unsent, row.new_blocks)), None
        if not row.sample or seq.partner in sampling:
            continue
        left = len(row.token_ids) - 1
        step.context -= 1 if left else row.start + 1
        step.budget += 1
        step.decode += (row.start >= seq.prompt_len) * ((left == 1) - (left == 0))
        row.token_ids, row.logits = row.token_ids[:-1], 0
        if not left:
            seq.unsent = row.new_blocks
            index = step.seqs.index(seq)
            del step.rows[index], step.seqs[index]
