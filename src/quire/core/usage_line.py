"""What one account has used under a tag."""

from __future__ import annotations

from quire.records import dataclass


@dataclass(slots=True, eq=False)
class UsageLine:
    """Totals of one account and tag. `prompt` has the tokens of all requests that started, `cached` those of them that
    were found in the cache; `seconds` are of steps, `block_seconds` blocks times seconds."""

    account: str
    tag: str
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    seconds: float = 0.0
    block_seconds: float = 0.0
