"""The files of a checkpoint folder beside its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from quire.engine.build.opening import Model
from quire.offline.convert import COPIED
from quire.spec.gguf_keys import Config


def write_folder_files(model: Model, config: Config, out: Path) -> None:
    """config.json, and the files of the tokenizer as the model has them."""
    for name in COPIED:
        if (model.folder / name).exists():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(model.folder / name, out / name)
    (out / "config.json").write_text(json.dumps(config, indent=1))
