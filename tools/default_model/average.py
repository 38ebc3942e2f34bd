"""The mean of the weights of checkpoints: what a cooldown from there would about give, without running one.

python -m tools.default_model.average mini RUN/kept/* --tokenizer DIR --out FOLDER

At the peak of the rate the weights swing around a valley; their mean lies near its floor (Izmailov et al. 2018,
arXiv 1803.05407). A new run may begin there: `train --start FOLDER`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from . import hf_folder
from .model import Decoder
from .shape import SHAPES

_WEIGHT = "model."


def mean(files: Sequence[Path]) -> dict[str, Tensor]:
    """Mean weights of checkpoints of one shape, in float32. Raises ValueError where their names differ."""
    total: dict[str, Tensor] = {}
    for file in files:
        with safe_open(str(file), "pt") as run:
            names = [name for name in run.keys() if name.startswith(_WEIGHT)]  # noqa: SIM118
            weights = {name.removeprefix(_WEIGHT): run.get_tensor(name).float() for name in names}
        if total and total.keys() != weights.keys():
            raise ValueError(f"{file}: other weights than {files[0]}")
        total = {name: total[name] + w if total else w for name, w in weights.items()}
    return {name: weight / len(files) for name, weight in total.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = Decoder(SHAPES[args.shape])
    model.load_state_dict(mean(args.checkpoints))
    hf_folder.save(model, args.out, args.tokenizer)


if __name__ == "__main__":
    main()
