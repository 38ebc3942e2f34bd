"""A sum of floats depends on its order, so that a batch that changes the order changes answers."""

import numpy as np


def main() -> None:
    numbers = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    one_by_one = np.add.accumulate(numbers)[-1]
    halves = np.add.accumulate(numbers[:2048])[-1] + np.add.accumulate(numbers[2048:])[-1]
    print("the same numbers, cut at another place, have the same sum:", bool(one_by_one == halves))
    print("in one order, always:", bool(one_by_one == np.add.accumulate(numbers.copy())[-1]))
