"""Logits to tokens: sampling state per sequence slot, over the native sampler.

Order of operations on a row of raw logits:

1. A row that holds NaN or +inf fails. Log-probabilities and ranks are taken here, before any change.
2. allowed_token_ids, the grammar bitmask, banned_token_ids, min_tokens (stop ids cannot be sampled yet),
   logit_bias.
3. repetition_penalty over prompt and output (a positive logit is divided, another multiplied: Keskar et al.,
   CTRL, arXiv:1909.05858), then frequency_penalty and presence_penalty over the output (OpenAI's API
   reference).
4. temperature 0 takes the greatest logit. Otherwise logits are divided by the temperature; top_k keeps the k
   greatest; top_p the fewest of those that reach p of their probability; min_p those at least min_p times as
   likely as the likeliest; and one token is drawn. Equal logits rank by id, the lower first, so each of these
   sets is unique.

The draw inverts the cumulative distribution in id order at a uniform from Philox4x32-10 keyed by the
request's seed, with the sample index and the token's position as counter. A token thus depends on its logits,
its sequence's own state and its position: not on other rows, the row's number, threads or instruction set.

See docs/sampling.md for where transformers and vLLM order things differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire import _native
from quire.logprobs import LogprobTable
from quire.types import MAX_LOGPROBS, FinishReason, NewSeq

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

_NOTHING_LEFT = 2  # status of a row in which every logit is -inf; 1: NaN or infinity
_NO_TOKENS: I32 = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What one call sampled, row for row.

    token_ids: int32 [rows], -1 where the row failed. failed: row -> NO_TOKEN where what the request allows has no
    probability, else ERROR. logprobs: per row the chosen token and then the most likely ones, None where the slot did
    not ask or the row failed.
    """

    token_ids: I32
    failed: dict[int, FinishReason]
    logprobs: list[LogprobTable | None]


class Sampler:
    """Sampling for `max_slots` sequences over a vocabulary of `vocab` tokens, `max_rows` rows in a call (None: one of
    each). One call at a time.

    `isa` picks an instruction set, "" the best. Rows are spread over `threads`, or, when a native `executor`
    is given, over its threads. Raises ValueError for sizes out of range.
    """

    def __init__(
        self,
        vocab: int,
        max_slots: int,
        isa: str = "",
        threads: int = 1,
        *,
        executor: _native.Executor | None = None,
        max_rows: int | None = None,
    ) -> None:
        max_rows = max_slots if max_rows is None else max_rows
        sizes = _native.SamplerSizes(vocab, max_slots, max_rows, MAX_LOGPROBS)
        if executor is None:
            self._native = _native.Sampler(sizes, isa, threads)
        else:
            self._native = _native.Sampler(sizes, executor)
        self._tokens = self._native.tokens()
        self._status = self._native.status()
        self._top_n = [0] * max_slots  # prompt_logprobs of each slot
        self._asked: set[int] = set()  # slots that want logprobs
        self._limited: set[int] = set()  # slots that do not allow every token

    def add(self, slot: int, new: NewSeq) -> None:
        """Take a slot for a sequence, new or resumed: penalties see all of new.token_ids.

        Raises ValueError when the slot is taken or a token id is not in the vocabulary.
        """
        params = _slot_params(new)
        tokens = np.array(new.token_ids, np.int32) if params.penalized else _NO_TOKENS
        self._native.add(slot, params, tokens)
        self._top_n[slot] = new.params.prompt_logprobs or 0
        if new.params.logprobs is not None:
            self._asked.add(slot)
        if params.restricted or params.banned or new.params.min_tokens:
            self._limited.add(slot)

    def drop(self, slot: int) -> None:
        """Free a slot. Raises ValueError when it is not in use."""
        self._native.drop(slot)
        self._asked.discard(slot)
        self._limited.discard(slot)

    def top_n(self, slot: int) -> int:
        """How many likely tokens the slot's prompt_logprobs asks for."""
        return self._top_n[slot]

    def sample(
        self, logits: F32, slots: I32, positions: I32, bitmask: I32 | None = None, maxima: F32 | None = None
    ) -> SampledRows:
        """Sample one token for every row and count it as output of its slot.

        logits: [rows, vocab], C-contiguous, left unchanged. slots: [rows], no slot twice. positions: [rows],
        index in its sequence of the token to sample. bitmask: [rows, ceil(vocab / 32)], bit i % 32 of word
        i // 32 set where token i is allowed. maxima: [rows, ceil(vocab / 64)] of the logits (see
        program.Output), which saves reading them all. Raises ValueError, having changed nothing, when these disagree.
        """
        return self._sample(logits, slots, positions, bitmask, maxima, None)

    def verify(
        self,
        logits: F32,
        slots: I32,
        positions: I32,
        drafts: I32,
        bitmask: I32 | None = None,
        maxima: F32 | None = None,
    ) -> SampledRows:
        """Sample one token for every row and count none; `commit` counts those that are accepted.

        As `sample`, but a slot may have several rows, one after the other, for positions that rise by one.
        drafts: [rows], the token assumed at a row's position by the slot's later rows; -1 in the last of them. A row
        gives the token that `sample` would give after the drafts before it. Raises ValueError, as `sample`.
        """
        return self._sample(logits, slots, positions, bitmask, maxima, drafts)

    def commit(self, slots: I32, tokens: I32) -> None:
        """Count tokens[i] as output of slots[i]. Raises ValueError, having changed nothing, for a free slot or a
        token outside the vocabulary."""
        self._native.commit(slots, tokens)

    def _sample(
        self,
        logits: F32,
        slots: I32,
        positions: I32,
        bitmask: I32 | None,
        maxima: F32 | None,
        drafts: I32 | None,
    ) -> SampledRows:
        failures = self._native.sample(logits, slots, positions, bitmask, maxima, drafts)
        rows = len(logits)
        token_ids = self._tokens[:rows].copy()
        failed: dict[int, FinishReason] = {}
        if failures:
            limited = [bitmask is not None or slot in self._limited for slot in slots.tolist()]
            failed = {
                i: FinishReason.NO_TOKEN if code == _NOTHING_LEFT and limited[i] else FinishReason.ERROR
                for i, code in enumerate(self._status[:rows].tolist())
                if code
            }
        logprobs: list[LogprobTable | None] = [None] * rows
        if self._asked:
            for row, (slot, token) in enumerate(zip(slots.tolist(), token_ids.tolist(), strict=True)):
                if slot in self._asked and row not in failed:
                    table = logprobs[row] = LogprobTable()
                    _add(table, token, self._native.logprobs(row))
        return SampledRows(token_ids, failed, logprobs)

    def prompt_logprobs(
        self, logits: F32, target_token_ids: I32, top_n: int, maxima: F32 | None = None
    ) -> LogprobTable | None:
        """Log-probabilities of target_token_ids[i] under row i of the raw logits, and of the top_n likeliest.

        `maxima` as in `sample`. None when a row holds NaN or +inf, or nothing but -inf: the sequence has
        failed. Raises ValueError for a target outside the vocabulary or top_n outside [0, MAX_LOGPROBS].
        """
        scored = self._native.score(logits, target_token_ids, top_n, maxima)
        if scored is None:
            return None
        table = LogprobTable()
        for token, entry in zip(target_token_ids.tolist(), scored, strict=True):
            _add(table, token, entry)
        return table

    def memory(self) -> int:
        """Bytes held now."""
        return self._native.memory()

    @staticmethod
    def memory_bound(
        vocab: int, max_slots: int, threads: int, max_len: int, named: int, max_rows: int | None = None
    ) -> int:
        """The most bytes ever held for sequences of up to max_len tokens.

        named: the most tokens that one request lists in logit_bias, banned_token_ids and stop ids together.
        """
        max_rows = max_slots if max_rows is None else max_rows
        sizes = _native.SamplerSizes(vocab, max_slots, max_rows, MAX_LOGPROBS)
        return _native.Sampler.bound(sizes, threads, max_len, named)


def _slot_params(new: NewSeq) -> _native.SlotParams:
    asked = new.params
    params = _native.SlotParams(asked)  # its numbers, by name
    params.seed = new.seed % 2**64
    params.sample_index = new.sample_index
    params.prompt_len = new.prompt_len
    if asked.allowed_token_ids is not None:
        params.restricted = True
        params.allowed = _unique(asked.allowed_token_ids)
    params.banned = _unique(asked.banned_token_ids)
    params.stop_ids = _unique(new.stop_ids)
    params.bias_ids = list(asked.logit_bias)
    params.bias_values = list(asked.logit_bias.values())
    return params


def _unique(ids: Sequence[int]) -> list[int]:
    return sorted(set(ids))


def _add(table: LogprobTable, token: int, entry: tuple[float, int, list[int], list[float]]) -> None:
    logprob, rank, ids, values = entry
    table.add([token, *ids], [logprob, *values], rank)
