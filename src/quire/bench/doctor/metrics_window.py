"""Two readings of a server's Prometheus page, and what happened between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from quire.bench.metrics_page import LabelledValue, MetricsPage


class Window:
    """What a server did between two readings, `seconds` apart. A metric has the first of its names that is there."""

    def __init__(self, before: MetricsPage, after: MetricsPage, seconds: float) -> None:
        self.seconds = seconds
        self._before, self._after = before, after

    def has(self, *names: str) -> bool:
        """Whether one of the names is on the page."""
        return self._known(names) is not None

    def gauge(self, *names: str) -> float:
        """The mean of both readings; 0 without the metric."""
        name = self._known(names)
        return 0.0 if name is None else (_sum(self._before.get(name, ())) + _sum(self._after[name])) / 2

    def highest(self, *names: str) -> float:
        """The higher of both readings."""
        name = self._known(names)
        return 0.0 if name is None else max(_sum(page.get(name, ())) for page in (self._before, self._after))

    def changed(self, name: str) -> bool:
        """Whether both readings have the metric, and differ."""
        return name in self._before and name in self._after and self._before[name] != self._after[name]

    def now(self, *names: str) -> float:
        """The value of the second reading."""
        name = self._known(names)
        return 0.0 if name is None else _sum(self._after[name])

    def now_by(self, label: str, name: str) -> dict[str, float]:
        """The values of the second reading by those of a label."""
        return {labels.get(label, ""): value for labels, value in self._after.get(name, ())}

    def grown(self, *names: str, **labels: str) -> float:
        """The increase of a counter, of the samples with these labels; of a counter that began anew, its value."""
        name = self._known(names)
        if name is None:
            return 0.0
        before, after = (_sum(_having(page.get(name, ()), labels)) for page in (self._before, self._after))
        return after - before if after >= before else after

    def grown_by(self, label: str, *names: str) -> dict[str, float]:
        """The increases of a counter by the values of a label; those that did not grow are left out."""
        name = self._known(names)
        values = {labels.get(label, "") for labels, _ in self._after[name]} if name else set()
        grown = {value: self.grown(*names, **{label: value}) for value in values}
        return {value: more for value, more in grown.items() if more}

    def mean(self, *names: str) -> float | None:
        """The mean of a histogram's new values; None without new ones."""
        count = self.grown(*(f"{name}_count" for name in names))
        return self.grown(*(f"{name}_sum" for name in names)) / count if count else None

    def quantile(self, share: float, *names: str) -> float | None:
        """A bound that this share of a histogram's new values did not exceed: the upper end of their bucket."""
        grown = self.grown_by("le", *(f"{name}_bucket" for name in names))
        buckets = sorted((float(bound.replace("+Inf", "inf")), more) for bound, more in grown.items())
        if not buckets:
            return None
        whole = buckets[-1][1]
        found = next(bound for bound, more in buckets if more >= share * whole)
        finite = [bound for bound, _ in buckets if math.isfinite(bound)]
        return found if math.isfinite(found) or not finite else finite[-1]

    def _known(self, names: Iterable[str]) -> str | None:
        return next((name for name in names if name in self._after), None)


def _sum(samples: Iterable[LabelledValue]) -> float:
    return sum(value for _, value in samples if math.isfinite(value))


def _having(samples: Iterable[LabelledValue], labels: Mapping[str, str]) -> list[LabelledValue]:
    return [one for one in samples if all(one[0].get(name) == value for name, value in labels.items())]
