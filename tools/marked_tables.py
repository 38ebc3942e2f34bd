"""Tables that are generated into a page: they stand between `<!-- NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re


def replaced(page: str, name: str, table: str) -> str:
    """The page with another table of this name. Raises ValueError unless there is one place for it."""
    place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    page, found = place.subn(lambda match: f"{match[1]}{table}{match[2]}", page)
    if found != 1:
        raise ValueError(f"{found} markers for the table {name}, expected one")
    return page
