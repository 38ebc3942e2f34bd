"""A trained model made larger without changing what it says: more blocks, wider MLPs.

A new block is the block before it whose attention and MLP say nothing yet; a new neuron of an MLP reads at random and
says nothing yet (Chen et al. 2016, arXiv 1511.05641). Training goes on from there, so nothing learned is lost.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .model import Decoder
from .shape import Shape


def grown(model: Decoder, shape: Shape, generator: torch.Generator) -> Decoder:
    """The model in another shape. Raises ValueError where more than blocks and neurons differs, or less is asked."""
    old = model.shape
    if replace(shape, layers=old.layers, intermediate=old.intermediate) != old:
        raise ValueError("shape: only layers and intermediate may differ from those of the trained model")
    if shape.layers < old.layers or shape.intermediate < old.intermediate:
        raise ValueError("shape: smaller than the trained model")
    made = Decoder(shape)
    sources = [at * old.layers // shape.layers for at in range(shape.layers)]
    weights = model.state_dict()
    with torch.no_grad():
        for name, weight in made.state_dict().items():
            parts = name.split(".")
            silent = False
            if parts[0] == "layers":
                at = int(parts[1])
                silent = at > 0 and sources[at] == sources[at - 1]
                name = ".".join(("layers", str(sources[at]), *parts[2:]))  # noqa: PLW2901
            trained = weights[name]
            if weight.shape != trained.shape:
                weight.normal_(std=shape.hidden**-0.5, generator=generator)
                if "down_proj" in name:
                    weight.zero_()
            weight[tuple(map(slice, trained.shape))] = trained
            if silent and ("o_proj" in name or "down_proj" in name):
                weight.zero_()
    return made
