"""Options of `quire serve` from a YAML, TOML or JSON file."""

from __future__ import annotations

import argparse
import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quire.cli.options import value_type
from quire.cli.parser import nearest, switch
from quire.config.elsewhere.foreign import ForeignOptionError
from quire.config.elsewhere.lookup import explain, translate
from quire.config.schema import OPTIONS
from quire.config.serving import ServingConfig
from quire.types import CheckpointError
from quire.util.strict_json import parse_json_object

# Options without a config field.
_EXTRA: dict[str, Any] = {"model": str, "gpu_memory_utilization": float}
_YAML = (".yaml", ".yml")
_LISTS = {f.name for f in dataclasses.fields(ServingConfig) if f.default == ()}


def read_config(path: Path, further: type | None = None) -> dict[str, Any]:
    """Read the options of a file, by field name; those of `further`, too. Raises ValueError for unknown options."""
    try:
        values = _parse(path.read_bytes(), path)
    except (OSError, ValueError, CheckpointError) as error:
        raise ValueError(f"config: {path}: {error}") from None
    return options_of(values, f"config: {path}", further, texts=path.suffix in _YAML)


def options_of(
    values: Mapping[str, Any], where: str, further: type | None = None, *, texts: bool = False
) -> dict[str, Any]:
    """Options by field name, from those of a file; with `texts` all values are texts. Raises ValueError."""
    known = OPTIONS | _fields(ServingConfig) | ({} if further is None else _fields(further))
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        own = {name: value} if name in known or name in _EXTRA else _translated(where, key, value, known)
        for field, given in own.items():
            if field in found:
                raise ValueError(f"{where}: {key!r} is given twice")
            try:
                found[field] = _value(given, field, known.get(field), texts=texts or field != name)
            except (argparse.ArgumentTypeError, ValueError) as error:
                raise ValueError(f"{where}: {key}: {error}") from None
    return found


def option_value(value: Any, name: str) -> Any:
    """A value of a TOML file as that of an option of Quire. Raises ValueError for an unknown one and a wrong type."""
    known = OPTIONS | _fields(ServingConfig)
    if name not in known:
        raise ValueError(f"{name!r} is unknown{nearest(name, known)}")
    made = _value(value, name, known[name], texts=False)
    return tuple(made) if isinstance(made, list) else made


def _fields(config: type) -> dict[str, Any]:
    return {f.name: f for f in dataclasses.fields(config)}


def _translated(where: str, key: str, value: Any, known: Iterable[str]) -> dict[str, Any]:
    """An option of another server as options of Quire, by field name. Raises ValueError."""
    name = key.replace("_", "-")
    flag = f"--{name}" if len(name) > 3 or explain(f"--{name}") else f"-{name}"
    if not explain(flag):
        raise ValueError(f"{where}: {key!r} is unknown{nearest(key, [*known, *_EXTRA])}")
    found: dict[str, Any] = {}
    for item in value if isinstance(value, list) else [value]:
        text = ("true" if item else "false") if isinstance(item, bool) else str(item)
        try:
            words = translate(flag, text)
        except ForeignOptionError as error:
            raise ValueError(f"{where}: {key!r} {error}") from None
        for option, given in words:
            on = not option.startswith("--no-")
            field = option.removeprefix("--" if on else "--no-").replace("-", "_")
            if given is None:
                found[field] = str(on).lower()
            elif field in _LISTS:
                found.setdefault(field, []).append(given)
            else:
                found[field] = given
    return found


def _parse(data: bytes, path: Path) -> dict[str, Any]:
    if path.suffix in _YAML:
        return _parse_yaml(data)
    return tomllib.loads(data.decode()) if path.suffix == ".toml" else parse_json_object(data, path.name)


def _parse_yaml(data: bytes) -> dict[str, Any]:
    """Parse a mapping whose scalars are all strings; the option decides whether one is a number or a switch."""
    import yaml  # not needed without such a file

    try:
        root = yaml.compose(data, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {error}") from None
    if root is None:  # nothing but comments
        return {}
    if root.id != "mapping":
        raise ValueError("expected a mapping, like port: 8000")
    found: dict[str, Any] = {}
    for key, node in root.value:
        if key.id != "scalar" or key.value in found:
            raise ValueError(f"line {key.start_mark.line + 1}: a key must be a string and occur once")
        found[key.value] = [item.value for item in node.value] if node.id == "sequence" else node.value
    return found


def _value(value: Any, name: str, field: dataclasses.Field[Any] | None, *, texts: bool) -> Any:
    """Convert a value to the type of its option. With `texts`, every scalar is a string, as on the command line."""
    if field is not None and field.default == ():
        values = value if isinstance(value, list) else [value]
        if all(isinstance(item, str) for item in values):
            return values
        raise ValueError(f"{value!r} is not a string or a list of strings")
    annotation = _EXTRA[name].__name__ if field is None else str(field.type)
    if isinstance(value, str):
        if texts or "str" in annotation or (field is not None and field.metadata["size"]):
            read = _EXTRA[name] if field is None else switch if annotation == "bool" else value_type(field)
            return read(value)
    elif annotation == "bool":
        if isinstance(value, bool):
            return value
    elif "float" in annotation and type(value) in {int, float}:
        return float(value)
    elif "int" in annotation and type(value) is int:
        return value
    raise ValueError(f"{value!r} has the wrong type")
