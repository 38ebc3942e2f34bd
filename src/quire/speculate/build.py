"""From the options to a proposer, and what it takes."""

from __future__ import annotations

from quire.config.schema import ResolvedConfig
from quire.speculate.ngram import NgramProposer
from quire.speculate.speculation import Speculation

MAX_DRAFT_TOKENS = 64  # of a step: positions with logits beside those of sequences


def max_draft_tokens(config: ResolvedConfig) -> int:
    """Drafts that a step may run, over all sequences."""
    return MAX_DRAFT_TOKENS if config.asked.speculation.chosen() else 0


def proposer_bytes(config: ResolvedConfig) -> int:
    """The most bytes that the proposer holds."""
    return NgramProposer.memory_bound(config.max_num_seqs) if config.asked.speculation.chosen() else 0


def make_speculation(config: ResolvedConfig, vocab: int) -> Speculation | None:
    """The speculation that was asked for."""
    chosen = config.asked.speculation.chosen()
    if chosen is None:
        return None
    return Speculation(
        NgramProposer(chosen.prompt_lookup_min, chosen.prompt_lookup_max),
        vocab=vocab,
        max_rows=config.max_num_seqs,
        most=MAX_DRAFT_TOKENS,
        depth=chosen.num_speculative_tokens,
    )
