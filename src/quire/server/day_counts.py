"""What tenants have used of the day's tokens, in a file: a quota outlives the server that counts it.

{"day": 20416, "tokens": {"research": 1200}}            the day since 1970, in UTC
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from quire.config.tenants import MAX_FILE_BYTES, TenantsFileError
from quire.util.files import written_anew

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class _Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    day: _Count
    tokens: dict[str, _Count]


def read_counts(path: Path, day: int) -> dict[str, int]:
    """Tokens by tenant of a day; none if the file is not there or of another day. Raises TenantsFileError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES)
        found = msgspec.json.decode(data, type=_Counts)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise TenantsFileError(f"tenants: counts: {path}: cannot be read: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TenantsFileError(
            f"tenants: counts: {path}: is not a file of counts: {error}; remove it to begin the day anew"
        ) from None
    return found.tokens if found.day == day else {}


def write_counts(path: Path, day: int, tokens: Mapping[str, int]) -> None:
    """Put the counts of a day in place of what the file has. Raises OSError."""
    with written_anew(path) as file:
        file.write(msgspec.json.encode(_Counts(day, dict(tokens))))
