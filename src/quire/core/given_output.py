"""The output that samples go on behind: another engine has made it. It is computed like a part of the prompt, and
counts where work to come is counted."""

from __future__ import annotations

from quire.types import Request


def first_tokens(request: Request) -> int:
    """What is computed before the first new token, in tokens: the prompt, and the output that is given."""
    return len(request.prompt_token_ids) + sum(map(len, request.given))


def mean_given(request: Request) -> float:
    """Tokens that a sample has from the beginning on, as the mean of the samples."""
    return sum(map(len, request.given)) / len(request.given) if request.given else 0.0


def new_tokens(request: Request, sample: int, tokens: int) -> int:
    """How many of so many tokens of a sample's output were not given."""
    return tokens - len(request.given[sample]) if request.given else tokens
