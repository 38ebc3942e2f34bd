"""What a grammar may cost: the limits of llguidance, and the memory that a compiled grammar is charged."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_SOURCE_BYTES = 2**19  # of a grammar in its serialized form
MAX_LEXER_STATES = 4096  # of a grammar, for all of its masks together
MAX_ROW_ITEMS = 1000  # ways in which the output so far can be read
STEP_ITEMS = 20_000  # of one mask: a millisecond
STEP_FUEL = 100_000  # of the lexer in one mask: seven milliseconds
COMPILE_FUEL = 1_000_000  # of the lexer while a grammar is compiled: 20 ms
MAX_SYMBOLS = 250_000  # of the rules of a compiled grammar
MAX_INDENTATION = 64  # spaces of JSON_SPACE; one more in arrays of unique items
UNIQUE_BYTES = 2**17  # that the keys and items of open objects and arrays take, of a sequence

# Bytes of a compiled grammar: of a state of its lexer, and of the rest per byte of its source.
STATE_BYTES, SOURCE_FACTOR, BASE_BYTES = 1024, 64, 2**18


def parser_limits() -> LLParserLimits:
    """The limits of every grammar, wherever it is compiled: what one process accepts, the other accepts too."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=MAX_ROW_ITEMS,
        initial_lexer_fuel=COMPILE_FUEL,
        step_lexer_fuel=STEP_FUEL,
        step_max_items=STEP_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_SYMBOLS,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def grammar_bytes(source: str) -> int:
    """The most bytes that a compiled grammar takes, with everything that its masks add."""
    return BASE_BYTES + SOURCE_FACTOR * len(source) + STATE_BYTES * MAX_LEXER_STATES
