"""`quire serve` with several models: which ones were asked for, with which options."""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.config_file import option_value
from quire.config.schema import OPTIONS, EngineConfig
from quire.config.serving import ServingConfig
from quire.config.shipped import shipped_adapters
from quire.steplog.log_files import log_beside
from quire.types import CheckpointError

if TYPE_CHECKING:
    from quire.server.fleet.shares import ServedModel

_OWN = (
    "chat_template",
    "tool_call_parser",
    "reasoning_parser",
    "lora_modules",
    "lora_dir",
)  # options of a server that each model may have


def served_models(
    names: Sequence[str], config: EngineConfig, serving: ServingConfig, *, shipped: bool = True
) -> list[ServedModel]:
    """The models of the command line, of --models-dir and of the --models file, with --pull-limit those of the store,
    too. Raises ValueError naming what is wrong.

    `config` has the options that all have; its memory is that of all together. `shipped`: models that Quire brings have
    their adapters.
    """
    from quire.server.fleet.shares import ServedModel

    config = config.replace(memory=None)
    found = [ServedModel(name, name, config, serving) for name in names]
    if serving.models_dir is not None:
        found += [
            ServedModel(name, str(path), config, serving)
            for name, path in _of_folder(Path(serving.models_dir))
        ]
    if serving.models is not None:
        found += _of_file(Path(serving.models), config, serving)
    if serving.pull_limit is not None:
        found += _of_store({each.name for each in found}, config, serving)
    if not found:
        raise ValueError("models_dir: has no model")
    return [_with_log(_with_adapters(each, shipped=shipped), config.recording.record) for each in found]


def _with_log(model: ServedModel, record: str | None) -> ServedModel:
    """A log of its own beside that which all were given: an engine writes its file alone."""
    if record is None or model.config.recording.record != record:
        return model
    path = log_beside(record, re.sub(r"[^\w.-]", "-", model.name))
    return replace(model, config=model.config.replace(record=path))


def _with_adapters(model: ServedModel, *, shipped: bool) -> ServedModel:
    """Turn adapters on where they are named; those that come with a model are named as it is, with a colon."""
    serving = model.serving
    if shipped and not (serving.lora_modules or model.config.adapters.enable_lora):
        of = f"{model.model}:"
        named = {name.removeprefix(of): name for name in shipped_adapters() if name.startswith(of)}
        serving = replace(
            serving, lora_modules=tuple(f"{model.name}:{short}={name}" for short, name in named.items())
        )
    if serving.lora_modules or serving.lora_dir:
        return replace(model, config=model.config.replace(enable_lora=True), serving=serving)
    return model


def _of_store(named: set[str], config: EngineConfig, serving: ServingConfig) -> Iterator[ServedModel]:
    """Those that are complete, under the names by which they were pulled."""
    from quire.server.fleet.shares import ServedModel
    from quire.store.model_store import ModelStore

    store = ModelStore()
    for manifest in store.all():
        if manifest.reference not in named:
            try:
                path = str(store.path(manifest))
            except CheckpointError:
                path = manifest.reference  # loading it says what is wrong
            yield ServedModel(manifest.reference, path, config, serving, stored=True)


def _of_folder(folder: Path) -> list[tuple[str, Path]]:
    if not folder.is_dir():
        raise ValueError(f"models_dir: {folder} is not a folder")
    found = [(path.name, path) for path in folder.iterdir() if (path / "config.json").is_file()]
    found += [(path.stem, path) for path in folder.glob("*.gguf")]
    return sorted(found)


def _of_file(path: Path, config: EngineConfig, serving: ServingConfig) -> list[ServedModel]:
    """A section [NAME] for each model: `path` (else the name is it), `aliases`, and options."""
    from quire.server.fleet.shares import ServedModel

    try:
        sections = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"models: {path}: {error}") from None
    found = []
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise ValueError(f"models: {path}: {name}: expected a section [{name}]")
        given = {key.replace("-", "_"): value for key, value in section.items()}
        where, aliases = given.pop("path", name), given.pop("aliases", [])
        if (
            not isinstance(where, str)
            or not isinstance(aliases, list)
            or not all(isinstance(a, str) for a in aliases)
        ):
            raise ValueError(f"models: {path}: {name}: path is a string, and aliases a list of strings")
        nearby = path.parent / where
        where = str(nearby) if nearby.exists() else where
        try:
            own = {key: option_value(value, key) for key, value in given.items()}
            engine = config.replace(**{key: value for key, value in own.items() if key in OPTIONS})
            server = replace(serving, **{key: own[key] for key in _OWN if key in own})
            unknown = [key for key in own if key not in OPTIONS and key not in _OWN]
            if unknown:
                raise ValueError(f"{unknown[0]}: an option of the whole server")
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ValueError(f"models: {path}: {name}: {error}") from None
        found.append(ServedModel(name, where, engine, server, tuple(aliases)))
    return found
