"""The parameters of an answer as fields of another API's body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.types import PARAMETERS


def parameter_struct(names: Mapping[str, str]) -> Any:
    """A struct with an optional field for each parameter: the API's name -> the name here."""
    fields = [
        (name, Annotated[PARAMETERS[inside].kind | None, Meta(description=PARAMETERS[inside].help)], None)
        for name, inside in names.items()
    ]
    return msgspec.defstruct("Parameters", fields, kw_only=True)
