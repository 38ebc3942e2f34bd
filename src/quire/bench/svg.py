"""Plots as SVG text. Colours are CSS classes (html_report.py gives them in light and dark), sizes are in user units."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 640, 280
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 14, 44


@dataclass(frozen=True, slots=True)
class AxisScale:
    """Maps values to positions along an axis. `log` needs values above 0."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        share = (at - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self) -> list[float]:
        """Round values within the scale, about five of them."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if self.high / self.low < 1e3 else (1,)
            found = [step * 10.0**power for power in powers for step in steps]
        else:
            step = _step((self.high - self.low) / 5)
            first = math.ceil(self.low / step - 1e-9)
            found = [i * step for i in range(first, first + 12)]
        return [tick for tick in found if self.low * (1 - 1e-9) <= tick <= self.high * (1 + 1e-9)]


def _step(rough: float) -> float:
    if not rough > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough * (1 - 1e-9))


def number(value: float) -> str:
    """Format a number for a tick or a label."""
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-")
    return f"{value:,.3f}".rstrip("0").rstrip(".") if abs(value) < 1e3 else f"{value:,.0f}"


@dataclass(frozen=True, slots=True)
class Series:
    """A line of points (x, y) with a name; `kind` is its colour class: c1 … c5."""

    name: str
    points: Sequence[tuple[float, float]]
    kind: str = "c1"
    dots: bool = True


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars from `edges[i]` to `edges[i+1]`; several stack in order."""

    name: str
    heights: Sequence[float]
    kind: str = "c1"


@dataclass(slots=True)
class Plot:
    """A plot: add marks, then call `svg()`. Text describes it for screen readers."""

    title: str
    x_label: str
    y_label: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    log_x: bool = False
    log_y: bool = False
    marks: list[str] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)

    @property
    def x(self) -> AxisScale:
        return AxisScale(*_open(self.x_range, log=self.log_x), LEFT, WIDTH - RIGHT, self.log_x)

    @property
    def y(self) -> AxisScale:
        return AxisScale(*_open(self.y_range, log=self.log_y), HEIGHT - BOTTOM, TOP, self.log_y)

    def line(self, series: Series) -> None:
        """A polyline through the points, with a dot and its values at each."""
        x, y = self.x, self.y
        at = [(x(a), y(b)) for a, b in series.points]
        path = " ".join(f"{a},{b}" for a, b in at)
        self.marks.append(f'<polyline class="line {series.kind}" points="{path}"/>')
        if series.dots:
            for (a, b), (px, py) in zip(series.points, at, strict=True):
                tip = escape(f"{series.name}: {number(b)} at {number(a)}")
                self.marks.append(
                    f'<circle class="dot {series.kind}" cx="{px}" cy="{py}" r="3.5"><title>{tip}</title></circle>'
                )
        self.legend.append((series.name, series.kind))

    def bars(self, edges: Sequence[float], stacks: Sequence[Bars]) -> None:
        """Bars over the intervals between edges, stacked."""
        x, y = self.x, self.y
        base = [0.0] * (len(edges) - 1)
        for stack in stacks:
            for i, height in enumerate(stack.heights):
                if height > 0:
                    left, right = x(edges[i]), x(edges[i + 1])
                    top, bottom = y(base[i] + height), y(base[i])
                    tip = escape(
                        f"{stack.name}: {number(height)} ({number(edges[i])} to {number(edges[i + 1])})"
                    )
                    self.marks.append(
                        f'<rect class="bar {stack.kind}" x="{left}" y="{top}" width="{max(0.5, right - left - 1):.2f}" '
                        f'height="{max(0.0, bottom - top):.2f}"><title>{tip}</title></rect>'
                    )
                base[i] += height
            if len(stacks) > 1:
                self.legend.append((stack.name, stack.kind))

    def rule(
        self, value: float, text: str, *, vertical: bool = False, kind: str = "rule", row: int = 0
    ) -> None:
        """A labelled line across the plot at a value."""
        if vertical:
            at = self.x(value)
            right = at > WIDTH - RIGHT - 70
            self.marks.append(f'<line class="{kind}" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
            place = f'x="{at - 4 if right else at + 4}" y="{TOP + 10 + 13 * row}"'
            self.marks.append(f'<text class="note{" end" if right else ""}" {place}>{escape(text)}</text>')
            return
        at = self.y(value)
        self.marks.append(f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        self.marks.append(
            f'<text class="note end" x="{WIDTH - RIGHT - 4}" y="{at - 4}">{escape(text)}</text>'
        )

    def zone(self, top: float, text: str) -> None:
        """Shade everything up to a value of the y axis."""
        at = self.y(top)
        width, height = WIDTH - LEFT - RIGHT, max(0, HEIGHT - BOTTOM - at)
        shape = f'<rect class="zone" x="{LEFT}" y="{at}" width="{width}" height="{height}">'
        self.marks.insert(0, f"{shape}<title>{escape(text)}</title></rect>")
        if height > 24:
            self.marks.append(f'<text class="label" x="{LEFT + 6}" y="{at + 16}">{escape(text)}</text>')

    def svg(self) -> str:
        """Render the plot."""
        return _frame(self, HEIGHT, self._axes() + self.marks)

    def _axes(self) -> list[str]:
        x, y = self.x, self.y
        found = []
        for tick in y.ticks():
            at = y(tick)
            found.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
            found.append(f'<text class="tick end" x="{LEFT - 6}" y="{at + 4}">{number(tick)}</text>')
        bottom = HEIGHT - BOTTOM
        found += [
            f'<text class="tick mid" x="{x(tick)}" y="{bottom + 16}">{number(tick)}</text>'
            for tick in x.ticks()
        ]
        middle = (LEFT + WIDTH - RIGHT) / 2
        found.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
        found.append(f'<text class="label mid" x="{middle}" y="{HEIGHT - 8}">{escape(self.x_label)}</text>')
        height = (TOP + bottom) / 2
        found.append(f'<text class="label mid" x="14" y="{height}" transform="rotate(-90 14 {height})">'
                     f"{escape(self.y_label)}</text>")  # fmt: skip
        return found


def _open(ends: tuple[float, float], *, log: bool) -> tuple[float, float]:
    low, high = ends
    if log:
        low = max(low, 1e-9)
        return (low, high) if high > low * 1.001 else (low / 2, low * 2)
    return (low, high) if high > low else (low, low + 1.0)


def _frame(plot: Plot, height: float, marks: Sequence[str]) -> str:
    legend = "".join(
        f'<span class="key"><i class="swatch {kind}"></i>{escape(name)}</span>' for name, kind in plot.legend
    )
    return (
        f'<figure><figcaption>{escape(plot.title)}</figcaption><div class="keys">{legend}</div>'
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(plot.title, quote=True)}">'
        f"{''.join(marks)}</svg></figure>"
    )


def histogram(
    title: str,
    samples: Sequence[float],
    unit: str,
    rules: Sequence[tuple[float, str, str]] = (),
    bins: int = 40,
) -> str:
    """The distribution of samples, with rules (value, text, class) such as percentiles. Long tails get a log axis.

    The axis extends to a rule beyond the samples unless that is very far.
    """
    low, high = min(samples), max(samples)
    high = max([high, *(value * 1.02 for value, _, _ in rules if high < value <= 4 * high)])
    log = low > 0 and high / max(low, 1e-9) > 30
    place: Callable[[float], float] = math.log if log else float
    first, last = place(max(low, 1e-9) if log else low), place(high)
    if last <= first:
        first, last = (first - 0.5, last + 0.5) if log else (low * 0.9, high * 1.1 + 1e-9)
    width = (last - first) / bins
    counts = [0] * bins
    for sample in samples:
        counts[min(bins - 1, max(0, int((place(sample) - first) / width)))] += 1
    edges = [math.exp(first + i * width) if log else first + i * width for i in range(bins + 1)]
    plot = Plot(title, unit, "count", (edges[0], edges[-1]), (0, max(counts) * 1.08), log_x=log)
    plot.bars(edges, [Bars("count", counts)])
    for row, (value, text, kind) in enumerate(rules):
        if edges[0] <= value <= edges[-1]:
            plot.rule(value, text, vertical=True, kind=kind, row=row)
    return plot.svg()


MOST_LANES = 160


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of a timeline: spans as (from, to, class, text)."""

    spans: Sequence[tuple[float, float, str, str]]


def timeline(title: str, lanes: Sequence[Lane], end: float, legend: Sequence[tuple[str, str]]) -> str:
    """Rows of spans over time in seconds. If there are many, every n-th is shown, and the title says so."""
    every = -(-len(lanes) // MOST_LANES)
    if every > 1:
        title, lanes = f"{title} (every {every}th)", lanes[::every]
    row = min(12.0, max(3.0, 420 / max(1, len(lanes))))
    height = TOP + row * len(lanes) + BOTTOM
    plot = Plot(title, "seconds", "", (0, end), (0, 1), legend=list(legend))
    x, marks = plot.x, []
    for tick in x.ticks():
        at = x(tick)
        marks.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        marks.append(f'<text class="tick mid" x="{at}" y="{height - BOTTOM + 16:g}">{number(tick)}</text>')
    for i, lane in enumerate(lanes):
        y = TOP + i * row
        for start, stop, kind, text in lane.spans:
            left = x(start)
            marks.append(
                f'<rect class="bar {kind}" x="{left}" y="{y:.2f}" width="{max(0.5, x(stop) - left):.2f}" '
                f'height="{row * 0.8:.2f}"><title>{escape(text)}</title></rect>'
            )
    middle = (LEFT + WIDTH - RIGHT) / 2
    marks.append(
        f'<text class="label mid" x="{middle}" y="{height - 8:g}">seconds from the start of the run</text>'
    )
    return _frame(plot, height, marks)
