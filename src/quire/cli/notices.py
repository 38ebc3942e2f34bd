"""What commands print on standard error about their engine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from quire.util.printable import printable, printable_lines

if TYPE_CHECKING:
    from quire.llm import LLM


def notice(llm: LLM) -> None:
    """Print the memory plan and the notices."""
    built = llm.built
    config = built.config
    how = f"{config.quantized or config.weights} weights, {config.kv} KV, {config.threads} threads"
    print(f"{printable(built.model.facts.architecture)}: {how}, {built.executor.isa}", file=sys.stderr)
    for line in llm.memory_report():
        print(f"  {line}", file=sys.stderr)
    for text in llm.notices:
        print(f"note: {printable_lines(text)}", file=sys.stderr)
