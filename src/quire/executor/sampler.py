"""Logits to tokens: sampling state per sequence slot, over the native sampler.

Order of operations on a row of raw logits:

1. A row that holds NaN or +inf fails. With a negative prompt the row becomes u + guidance_scale · (c - u), of the
   log-probabilities c of the row and u of that after the negative prompt (Sanchez et al., arXiv:2306.17806).
   Log-probabilities and ranks are taken here, before any change.
2. allowed_token_ids, the bitmask of a grammar, banned_token_ids, min_tokens (stop ids cannot be sampled yet),
   logit_bias, the watermark (Kirchenbauer et al., arXiv:2301.10226), bad_words.
3. repetition_penalty over prompt and output (a positive logit is divided, another multiplied: Keskar et al.,
   CTRL, arXiv:1909.05858), then frequency_penalty and presence_penalty over the output (OpenAI's API
   reference).
4. temperature 0 takes the greatest logit. Otherwise logits are divided by the temperature; top_k keeps the k
   greatest; top_p the fewest whose probabilities reach p; min_p those at least min_p times as likely as the likeliest;
   and one token is drawn. Equal logits rank by id, the lower first, so each of these sets is
   unique.

A sequence that asks for other steps (typical_p, XTC, mirostat, …) or another order has 3 and 4 in a chain of its own.

The draw is an exponential race: every token id has an exponential number from Philox4x32-10, whose key is the seed of
the request and whose counter holds the sample index, the position of the token and the id; the token with the least
number divided by its weight wins. So a token depends on its logits, the state of its sequence and its position: not on
other rows, the index of the row, threads or instruction set. And a draft drawn with the same numbers from a similar
distribution is often the same token.

See docs/sampling.md for where transformers and vLLM use another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np

from quire import _native
from quire.executor.base import F32, I32, Bitmask, Guesses, Judging, Limits, Outputs, SampledRows
from quire.logprobs import LogprobTable
from quire.parameters import TextTokens
from quire.program.ops.linear import MAXIMA_COLS
from quire.types import MAX_LOGPROBS, MAX_NAMED_TOKENS, SAMPLERS, FinishReason, NewSeq

_NOTHING_LEFT = 2  # status of a row in which every logit is -inf; 1: NaN or infinity
_NO_TOKENS: I32 = np.empty(0, np.int32)


class HostSampler:
    """The sampler of every executor whose outputs are in host memory; see base.Sampler.

    For `max_slots` sequences over a vocabulary of `vocab` tokens, `max_rows` rows in a call (None: one of each).
    `isa` picks an instruction set, "" the best. Rows are spread over `threads`, or over the threads of a native
    `executor` if one is given. Raises ValueError for sizes out of range.
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
        """Take a slot for a sequence; see Sampler.add."""
        params = _slot_params(new)
        tokens = np.array(new.token_ids, np.int32) if params.needs_tokens else _NO_TOKENS
        self._native.add(slot, params, tokens)
        self._top_n[slot] = new.params.prompt_logprobs or 0
        if new.params.logprobs is not None:
            self._asked.add(slot)
        if params.restricted or params.banned or params.bad_ends or new.params.min_tokens:
            self._limited.add(slot)

    def drop(self, slot: int) -> None:
        """Free a slot; see Sampler.drop."""
        self._native.drop(slot)
        self._asked.discard(slot)
        self._limited.discard(slot)

    def top_n(self, slot: int) -> int:
        """The number of likely tokens that the slot's prompt_logprobs asks for."""
        return self._top_n[slot]

    def sample(
        self,
        outputs: Outputs,
        slots: I32,
        positions: I32,
        bitmask: Bitmask | None = None,
        places: I32 | None = None,
        guides: I32 | None = None,
    ) -> SampledRows:
        """Sample one token for every row; see Sampler.sample.

        Reads "logits", C-contiguous and left unchanged, and "maxima" if they are there: then it need not read all of
        the logits.
        """
        return self._sample(outputs, slots, positions, bitmask, places=places, guides=guides)

    def verify(
        self,
        outputs: Outputs,
        slots: I32,
        positions: I32,
        drafts: I32,
        bitmask: Bitmask | None = None,
        *,
        judging: Judging | None = None,
        guides: I32 | None = None,
    ) -> SampledRows:
        """Sample one token for every row and count none; see Sampler.verify."""
        how = None
        if judging is not None:
            how = _native.Judging(judging.acceptance, judging.epsilon, judging.proposals, judging.lines)
        return self._sample(outputs, slots, positions, bitmask, drafts=drafts, judging=how, guides=guides)

    def guess(
        self, outputs: Outputs, slots: I32, positions: I32, count: int, distributions: F32 | None = None
    ) -> Guesses:
        """What every row would sample, and the tokens behind; see Sampler.guess."""
        rows = len(slots)
        made = Guesses(np.empty((rows, count), np.int32), np.empty((rows, count), np.float32))
        self._native.sample(
            outputs["logits"],
            slots,
            positions,
            None,
            None,
            outputs.get("maxima"),
            np.full(rows, -1, np.int32),
            distributions=distributions,
            guesses=made.token_ids,
            chances=made.sure,
        )
        return made

    def commit(self, slots: I32, tokens: I32) -> None:
        """Count tokens as output of their slots; see Sampler.commit."""
        self._native.commit(slots, tokens)

    def surprise(self, slot: int) -> float:
        """Mirostat's mu of a slot; see Sampler.surprise."""
        return self._native.surprise(slot)

    def _sample(
        self,
        outputs: Outputs,
        slots: I32,
        positions: I32,
        bitmask: Bitmask | None,
        *,
        drafts: I32 | None = None,
        places: I32 | None = None,
        judging: _native.Judging | None = None,
        guides: I32 | None = None,
    ) -> SampledRows:
        logits = outputs["logits"]
        words, lines = (None, None) if bitmask is None else (bitmask.words, bitmask.lines)
        failures = self._native.sample(
            logits,
            slots,
            positions,
            words,
            lines,
            outputs.get("maxima"),
            drafts,
            places,
            judging,
            guides=guides,
        )
        rows = len(slots)
        token_ids = self._tokens[:rows].copy()
        failed: dict[int, FinishReason] = {}
        if failures:
            limited = [slot in self._limited for slot in slots.tolist()]
            if lines is not None:
                limited = [before or line >= 0 for before, line in zip(limited, lines.tolist(), strict=True)]
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

    def likeliest(self, outputs: Outputs, rows: slice) -> list[int]:
        """The token with the greatest logit in each of some rows; see Sampler.likeliest."""
        logits, maxima = outputs["logits"][rows], outputs.get("maxima")
        if maxima is None:
            return [int(token) for token in logits.argmax(1)]
        starts = (maxima[rows].argmax(1) * MAXIMA_COLS).tolist()
        return [at + int(row[at : at + MAXIMA_COLS].argmax()) for at, row in zip(starts, logits, strict=True)]

    def prompt_logprobs(self, outputs: Outputs, target_token_ids: I32, top_n: int) -> LogprobTable | None:
        """Log-probabilities of given tokens; see Sampler.prompt_logprobs."""
        scored = self._native.score(outputs["logits"], target_token_ids, top_n, outputs.get("maxima"))
        if scored is None:
            return None
        table = LogprobTable()
        for token, entry in zip(target_token_ids.tolist(), scored, strict=True):
            _add(table, token, entry)
        return table

    def memory(self) -> int:
        """Bytes held now."""
        return self._native.memory()

    def close(self) -> None:
        """Free everything, and let go of the executor; the sampler cannot be used again."""
        del self._native, self._tokens, self._status

    @staticmethod
    def memory_bound(
        vocab: int, max_slots: int, threads: int, max_len: int, named: int, max_rows: int | None = None
    ) -> int:
        """The most bytes ever held for sequences of up to max_len tokens.

        named: the most tokens that one request names in logit_bias, banned_token_ids, stop ids and texts together.
        """
        max_rows = max_slots if max_rows is None else max_rows
        sizes = _native.SamplerSizes(vocab, max_slots, max_rows, MAX_LOGPROBS)
        return _native.Sampler.bound(sizes, threads, max_len, named)


def sampler_bytes(vocab: int, limits: Limits, threads: int) -> int:
    """The most bytes that the sampler of an executor of these limits will hold."""
    return HostSampler.memory_bound(
        vocab, limits.max_rows, threads, limits.max_len, MAX_NAMED_TOKENS, limits.max_logit_rows
    )


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
    texts = new.texts or TextTokens()
    biases = [(token, bias) for token, bias in asked.logit_bias.items() if not isinstance(token, str)]
    biases += texts.biases
    params.bias_ids, params.bias_values = [token for token, _ in biases], [bias for _, bias in biases]
    params.bad_tokens = list(chain.from_iterable(texts.bad_words))
    params.bad_ends = list(accumulate(map(len, texts.bad_words)))
    params.breakers = _unique(texts.breakers)
    if asked.samplers is not None:
        params.ordered, params.order = True, [SAMPLERS.index(name) for name in asked.samplers]
    # Basu et al., section 4: mu begins as twice the target.
    params.surprise = 2 * asked.mirostat_tau if new.surprise is None else new.surprise
    return params


def _unique(ids: Sequence[int]) -> list[int]:
    return sorted(set(ids))


def _add(table: LogprobTable, token: int, entry: tuple[float, int, list[int], list[float]]) -> None:
    logprob, rank, ids, values = entry
    table.add([token, *ids], [logprob, *values], rank)
