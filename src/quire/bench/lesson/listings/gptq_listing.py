"""GPTQ in four bits: columns are rounded one after another, and those to come make up for the error."""

import numpy as np

from quire.offline.quantize.error_feedback import Factor, gptq_codes
from quire.offline.quantize.gram import GramMatrix
from quire.offline.quantize.grid import GridKind, find_grid


def main() -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(scale=0.05, size=(64, 256)).astype(np.float32)
    inputs = GramMatrix(256)  # of 128 rows of calibration, whose features are not independent
    inputs.add((rng.normal(size=(128, 64)) @ rng.normal(size=(64, 256))).astype(np.float32))
    grid = find_grid(weight, GridKind(bits=4, group=128, symmetric=True), inputs.h)
    nearest = inputs.error(weight - grid.values(grid.codes(weight))).sum()
    codes = gptq_codes(weight, grid, inputs, Factor.of(inputs))
    feedback = inputs.error(weight - grid.values(codes)).sum()
    print(
        "codes from", codes.min(), "to", codes.max(), "with a scale for each", weight.size // grid.scales.size
    )
    print("less than half the error of rounding to nearest:", bool(feedback < nearest / 2))
