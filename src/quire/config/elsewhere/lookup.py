"""Find what an option of another server means here."""

from __future__ import annotations

from functools import cache

from quire.config.elsewhere.foreign import ForeignOption, ForeignOptionError, Settings
from quire.config.elsewhere.known import ROWS


@cache
def _by_name() -> dict[str, list[ForeignOption]]:
    found: dict[str, list[ForeignOption]] = {}
    for row in ROWS:
        for name in row.names:
            found.setdefault(name, []).append(row)
    return found


def rows_of(name: str, server: str = "") -> list[ForeignOption]:
    """The rows of an option, with its dashes, of one server or of any."""
    return [row for row in _by_name().get(name, ()) if not server or server in row.servers]


def explain(name: str) -> str:
    """What an option of another server means here, in words; "" if no known server has it."""
    rows = rows_of(name)
    if len(rows) < 2:
        return rows[0].explanation() if rows else ""
    return "; ".join(f"that of {' and '.join(row.servers)} {row.explanation()}" for row in rows)


def translate(name: str, value: str | None, server: str = "") -> Settings:
    """Options of Quire with the effect of one of another server.

    Raises ForeignOptionError, also if servers mean different things by it and `server` does not say which, and KeyError
    for an option that no known server has.
    """
    outcomes: list[Settings | ForeignOptionError] = []
    for row in rows_of(name, server):
        try:
            outcomes.append(row.translated(value))
        except ForeignOptionError as error:
            outcomes.append(error)
    if not outcomes:
        raise KeyError(name)
    first = outcomes[0]
    if any(str(other) != str(first) for other in outcomes[1:]):
        raise ForeignOptionError(f"means different things: {explain(name)}", essential=True)
    if isinstance(first, ForeignOptionError):
        raise first
    return first
