"""Trains what tells easy requests from hard ones, and says what routing by it costs at which quality.

Lines of JSON: a request (`prompt`, or `messages` and what else is in a chat), `small`: how good the answer of the small
model was, from 0 to 1 (or false and true), and `large`: the same of the large one, 1 if it is left out. The label is
whether small was as good as large. All figures are out of fold: each line is judged by a model that has not seen it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.records import dataclass
from quire.routing.difficulty import AskedFeatures, DifficultyModel, features_of

RequestNumbers = NDArray[np.float64]

LEAST_LINES = 50
_FOLDS, _BINS = 5, 10
_MOST_FEATURES, _LEAST_SEEN = 8192, 3
_RIDGES = (1.0, 3.0, 10.0, 30.0)  # of which the one is taken that predicts best out of fold
_STEPS, _SMALLEST_STEP = 400, 1e-4


@dataclass(frozen=True, slots=True)
class LabelledRequests:
    """Requests by their features, and how good the answers of both models were."""

    features: list[AskedFeatures]
    small: RequestNumbers
    large: RequestNumbers

    @property
    def suffices(self) -> RequestNumbers:
        """Where small was as good as large: 1, else 0."""
        return (self.small >= self.large).astype(np.float64)


def read_labels(path: Path) -> LabelledRequests:
    """The lines of a file. Raises ValueError naming the line."""
    features, rights = list[AskedFeatures](), list[tuple[float, float]]()
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
            small, large = float(fields["small"]), float(fields.get("large", 1.0))
        except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: line {number}: is not a request with small, from 0 to 1: {error}"
            ) from None
        made = features_of(fields)
        if made is None or not (0 <= small <= 1 and 0 <= large <= 1):
            raise ValueError(
                f"{path}: line {number}: needs messages or a prompt of texts, and small and large from 0 to 1"
            )
        features.append(made)
        rights.append((small, large))
    if len(features) < LEAST_LINES:
        raise ValueError(f"{path}: {len(features)} lines are fewer than the {LEAST_LINES} that are needed")
    both = np.array(rights)
    found = LabelledRequests(features, both[:, 0], both[:, 1])
    if found.suffices.min() == found.suffices.max():
        raise ValueError(f"{path}: the small model was always, or never, as good as the large one")
    return found


class _Matrix:
    """Features of requests as a sparse matrix; sizes are scaled to a mean square of one, words stay 1."""

    def __init__(
        self, rows: Sequence[AskedFeatures], names: Sequence[str], scales: RequestNumbers | None = None
    ) -> None:
        columns = {name: number for number, name in enumerate(names)}
        entries = [
            (row, columns[name], value)
            for row, features in enumerate(rows) for name, value in features.items() if name in columns
        ]  # fmt: skip
        self._shape = len(rows), len(names)
        self._rows = np.array([row for row, _, _ in entries], np.int64)
        self._columns = np.array([column for _, column, _ in entries], np.int64)
        values = np.array([value for _, _, value in entries], np.float64)
        if scales is None:
            squares = np.bincount(self._columns, values**2, len(names)) / max(len(rows), 1)
            scales = 1 / np.sqrt(np.maximum(squares, 1.0))
        self.scales = scales
        self._values = values * scales[self._columns]

    def times(self, weights: RequestNumbers) -> RequestNumbers:
        """(rows,) sums of weighted features."""
        return np.bincount(self._rows, self._values * weights[self._columns], self._shape[0]).astype(
            np.float64
        )

    def transposed(self, residuals: RequestNumbers) -> RequestNumbers:
        """(columns,) sums of weighted rows."""
        return np.bincount(self._columns, self._values * residuals[self._rows], self._shape[1]).astype(
            np.float64
        )


def _logistic(logits: RequestNumbers) -> RequestNumbers:
    return np.asarray(0.5 * (1 + np.tanh(logits / 2)))


def _fit(matrix: _Matrix, labels: RequestNumbers, ridge: float, columns: int) -> tuple[RequestNumbers, float]:
    """Weights and bias of least logistic loss with a ridge, by Nesterov's method."""
    count = len(labels)
    probe = np.ones(columns)
    for _ in range(20):  # the largest eigenvalue bounds the step
        probe = matrix.transposed(matrix.times(probe / np.linalg.norm(probe)))
    rate = 1 / (0.25 * (1.1 * float(np.linalg.norm(probe)) / count + 1) + ridge / count)
    weights, ahead = np.zeros(columns), np.zeros(columns)
    bias = bias_ahead = 0.0
    for step in range(_STEPS):
        residuals = _logistic(matrix.times(ahead) + bias_ahead) - labels
        new = ahead - rate * (matrix.transposed(residuals) + ridge * ahead) / count
        new_bias = bias_ahead - rate * float(residuals.mean())
        pace = step / (step + 3)
        ahead, bias_ahead = new + pace * (new - weights), new_bias + pace * (new_bias - bias)
        moved = max(float(np.abs(new - weights).max()), abs(new_bias - bias))
        weights, bias = new, new_bias
        if moved < _SMALLEST_STEP:
            break
    return weights, bias


def _loss(probabilities: RequestNumbers, labels: RequestNumbers) -> float:
    clipped = np.clip(probabilities, 1e-9, 1 - 1e-9)
    return float(-np.mean(labels * np.log(clipped) + (1 - labels) * np.log(1 - clipped)))


def _names(rows: Sequence[AskedFeatures]) -> list[str]:
    """The features that are seen often enough to learn from."""
    counts = Counter(name for features in rows for name in features)
    return sorted(name for name, count in counts.most_common(_MOST_FEATURES) if count >= _LEAST_SEEN)


def _folds(rows: Sequence[AskedFeatures], seed: int) -> NDArray[np.int64]:
    """A fold for each line; lines with equal features, such as the same question once more, have the same one."""
    groups: dict[frozenset[tuple[str, float]], int] = {}
    group = np.array([groups.setdefault(frozenset(each.items()), len(groups)) for each in rows])
    return np.asarray((np.random.default_rng(seed).permutation(len(groups)) % _FOLDS)[group])


def _out_of_fold(
    rows: Sequence[AskedFeatures], labels: RequestNumbers, folds: NDArray[np.int64], ridge: float
) -> RequestNumbers:
    """The logit of each line by a model of the other folds."""
    logits = np.empty(len(labels))
    for fold in range(_FOLDS):
        inside, outside = (np.flatnonzero(chosen).tolist() for chosen in (folds != fold, folds == fold))
        known = [rows[row] for row in inside]
        names = _names(known)
        matrix = _Matrix(known, names)
        weights, bias = _fit(matrix, labels[inside], ridge, len(names))
        held = _Matrix([rows[row] for row in outside], names, matrix.scales)
        logits[outside] = held.times(weights) + bias
    return logits


def _calibration(logits: RequestNumbers, labels: RequestNumbers) -> tuple[float, float]:
    """Slope and shift by which logits become probabilities that hold (Platt 1999), by Newton's method."""
    line, best = np.array([0.0, 0.0]), np.inf
    for _ in range(50):
        p = _logistic(line[0] * logits + line[1])
        gradient = np.array([np.dot(p - labels, logits), np.sum(p - labels)])
        curve = p * (1 - p)
        a, b, c = np.dot(curve, logits**2), np.dot(curve, logits), np.sum(curve)
        step = np.linalg.solve(np.array([[a + 1e-6, b], [b, c + 1e-6]]), gradient)
        while (loss := _loss(_logistic((line - step)[0] * logits + (line - step)[1]), labels)) >= best:
            step /= 2
            if np.abs(step).max() < 1e-9:
                break
        line, best = line - step, min(best, loss)
    slope, shift = line
    return max(float(slope), 0.0), float(shift)


def train_difficulty(
    labels: LabelledRequests, choose: Callable[[RoutingTable], float], small_cost: float, seed: int = 0
) -> tuple[DifficultyModel, RoutingTable]:
    """A model, and what routing by it does out of fold. `choose` picks the threshold; see RoutingTable."""
    rows, suffices = labels.features, labels.suffices
    folds = _folds(rows, seed)
    best = np.inf
    for tried in _RIDGES:
        logits = _out_of_fold(rows, suffices, folds, tried)
        line = _calibration(logits, suffices)
        held = _logistic(line[0] * logits + line[1])
        if (loss := _loss(held, suffices)) < best:
            best, ridge, (slope, shift), probabilities = loss, tried, line, held
    table = RoutingTable(probabilities, labels, small_cost)
    names = _names(rows)
    matrix = _Matrix(rows, names)
    weights, bias = _fit(matrix, suffices, ridge, len(names))
    scaled = slope * weights * matrix.scales
    model = DifficultyModel(
        "quire difficulty 1", choose(table), slope * bias + shift,
        {name: float(f"{weight:.6g}") for name, weight in zip(names, scaled, strict=True) if weight},
        table.summary() | {"ridge": ridge},
    )  # fmt: skip
    return model, table


class RoutingTable:
    """What sending the easiest requests to the small model does, by how many they are.

    `probabilities` are those that small suffices, by request; `small_cost` is what a request costs there, where it
    costs 1 at the large one.
    """

    def __init__(self, probabilities: RequestNumbers, labels: LabelledRequests, small_cost: float) -> None:
        self.probabilities, self._labels, self.small_cost = probabilities, labels, small_cost
        order = np.argsort(-probabilities, kind="stable")
        gains = (labels.small - labels.large)[order]
        self.small, self.large = float(labels.small.mean()), float(labels.large.mean())
        # [k]: the quality if the k easiest ones go to the small model
        self._quality = self.large + np.concatenate(([0.0], np.cumsum(gains))) / len(order)
        self._sorted = probabilities[order]

    def at(self, threshold: float) -> tuple[float, float]:
        """The share that goes to the small model, and the quality."""
        easy = int(np.sum(self.probabilities >= threshold))
        return easy / len(self.probabilities), float(self._quality[easy])

    def for_quality(self, part: float) -> float:
        """The threshold at which most go to the small model with at least this part of the large one's quality."""
        ends = np.concatenate(
            ([True], self._sorted[1:] < self._sorted[:-1], [True])
        )  # equal ones go together
        able = np.flatnonzero((self._quality >= part * self.large - 1e-12) & ends)
        return self._threshold(int(able[-1]))

    def for_small_share(self, share: float) -> float:
        """The threshold at which this share goes to the small model."""
        return self._threshold(round(share * len(self._sorted)))

    def _threshold(self, easy: int) -> float:
        return 1.0 if easy == 0 else float(self._sorted[easy - 1])

    def cost(self, small_share: float) -> float:
        """What a request costs, if this share goes to the small model."""
        return 1 - small_share * (1 - self.small_cost)

    def random_share(self, quality: float) -> float | None:
        """The share that may go to the small model at random with this quality; None if even none is too much."""
        lost = self.large - self.small
        if quality > self.large or lost <= 0:
            return None
        return min(1.0, (self.large - quality) / lost)

    def bins(self) -> list[tuple[float, float, int]]:
        """Ten groups of requests of like probability: its mean, how often small sufficed, and their number."""
        order = np.argsort(self.probabilities, kind="stable")
        suffices = self._labels.suffices
        return [
            (float(self.probabilities[part].mean()), float(suffices[part].mean()), len(part))
            for part in np.array_split(order, _BINS)
        ]

    @property
    def calibration_error(self) -> float:
        """The mean distance of probability and frequency over the groups."""
        return float(
            np.average([abs(p - real) for p, real, _ in self.bins()], weights=[n for *_, n in self.bins()])
        )

    def summary(self) -> dict[str, Any]:
        """The figures of the file."""
        return {
            "requests": len(self.probabilities), "small": round(self.small, 4), "large": round(self.large, 4),
            "calibration_error": round(self.calibration_error, 4),
        }  # fmt: skip

    def lines(self) -> list[str]:
        """Both tables in Markdown."""
        lines = [
            f"small alone is right by {self.small:.3f}, large by {self.large:.3f}, of {len(self._sorted)} requests",
            "", "| to small | probability from | quality | at random | cost | at random, for this quality |",
            "|--:|--:|--:|--:|--:|--:|",
        ]  # fmt: skip
        for tenth in range(11):
            threshold = self.for_small_share(tenth / 10)
            share, quality = (0.0, self.large) if tenth == 0 else self.at(threshold)
            chance = self.large + share * (self.small - self.large)
            other = self.random_share(quality)
            cost = "–" if other is None else f"{self.cost(other):.3f}"
            lines.append(
                f"| {share:.0%} | {threshold:.3f} | {quality:.3f} | {chance:.3f} | {self.cost(share):.3f} | {cost} |"
            )
        lines += ["", "| predicted that small suffices | it did | requests |", "|--:|--:|--:|"]
        lines += [f"| {p:.3f} | {real:.3f} | {n} |" for p, real, n in self.bins()]
        return [*lines, "", f"calibration error: {self.calibration_error:.3f}"]
