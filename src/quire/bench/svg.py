"""Plots as SVG text. Colours are CSS classes (html_report.py gives them in light and dark), sizes are in user units."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import field
from html import escape

from quire.records import dataclass

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
    """A line of points (x, y) with a name; `kind` is its colour class: c1 … c5. `spans`: the interval of each y."""

    name: str
    points: Sequence[tuple[float, float]]
    kind: str = "c1"
    dots: bool = True
    spans: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars from `edges[i]` to `edges[i+1]`; several stack in order."""

    name: str
    heights: Sequence[float]
    kind: str = "c1"


def _mark(tag: str, kind: str, tip: str = "", **places: float | str) -> str:
    """An SVG element of a class, with a text that a reader sees when pointing at it."""
    numbers = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in places.items())
    return f'<{tag} class="{kind}"{numbers}>' + (f"<title>{escape(tip)}</title>" if tip else "") + f"</{tag}>"


def _text(kind: str, x: float, y: float, text: str, more: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}"{more}>{escape(text)}</text>'


_STYLE = (
    "svg{background:#fff;font:12px sans-serif}.grid{stroke:#ddd}.axis{stroke:#333}.line{fill:none;stroke-width:1.6}"
    ".mid{text-anchor:middle}.end{text-anchor:end}text{fill:#333}"
    ".line.c1{stroke:#c0392b}.line.c2{stroke:#b7791f}.line.c3{stroke:#2563a8}"
    ".line.c4{stroke:#2f855a}.line.c5{stroke:#6b46c1}.line.c6{stroke:#4a5568}"
    ".bar.c1{fill:#c0392b}.bar.c2{fill:#b7791f}.bar.c3{fill:#2563a8}"
    ".bar.c4{fill:#2f855a}.bar.c5{fill:#6b46c1}.bar.c6{fill:#4a5568}"
)


@dataclass(slots=True)
class Plot:
    """A plot: add marks, then call `svg()`. Text describes it for screen readers. `x_ticks` replace round values."""

    title: str
    x_label: str
    y_label: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    log_x: bool = False
    log_y: bool = False
    x_ticks: Sequence[float] = ()
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
        x, y, kind = self.x, self.y, series.kind
        path = " ".join(f"{x(a)},{y(b)}" for a, b in series.points)
        for (a, _), (low, high) in zip(series.points, series.spans, strict=False):
            self.marks.append(_line(f"line {kind}", x(a), x(a), y(low), y(high)))
        self.marks.append(_mark("polyline", f"line {kind}", points=path))
        for a, b in series.points if series.dots else ():
            tip = f"{series.name}: {number(b)} at {number(a)}"
            self.marks.append(_mark("circle", f"dot {kind}", tip, cx=x(a), cy=y(b), r=3.5))
        self.legend.append((series.name, kind))

    def bars(self, edges: Sequence[float], stacks: Sequence[Bars]) -> None:
        """Bars over the intervals between edges, stacked."""
        x, y = self.x, self.y
        base = [0.0] * (len(edges) - 1)
        for stack in stacks:
            for i, height in enumerate(stack.heights):
                if height > 0:
                    tip = f"{stack.name}: {number(height)} ({number(edges[i])} to {number(edges[i + 1])})"
                    spans = (x(edges[i]), x(edges[i + 1]) - 1), (y(base[i] + height), y(base[i]))
                    self.marks.append(_bar(stack.kind, *spans, tip))
                base[i] += height
            if len(stacks) > 1:
                self.legend.append((stack.name, stack.kind))

    def rule(
        self, value: float, text: str, *, vertical: bool = False, kind: str = "rule", row: int = 0
    ) -> None:
        """A labelled line across the plot at a value."""
        if vertical:
            at = self.x(value)
            right, x, y = at > WIDTH - RIGHT - 70, at, TOP + 10.0 + 13 * row
            self.marks.append(_line(kind, at, at, TOP, HEIGHT - BOTTOM))
        else:
            at = self.y(value)
            right, x, y = True, WIDTH - RIGHT, at - 4
            self.marks.append(_line(kind, LEFT, WIDTH - RIGHT, at, at))
        self.marks.append(_text("note end" if right else "note", x - 4 if right else x + 4, y, text))

    def zone(self, top: float, text: str) -> None:
        """Shade everything up to a value of the y axis."""
        at = self.y(top)
        height = max(0, HEIGHT - BOTTOM - at)
        self.marks.insert(
            0, _mark("rect", "zone", text, x=LEFT, y=at, width=WIDTH - LEFT - RIGHT, height=height)
        )
        if height > 24:
            self.marks.append(_text("label", LEFT + 6, at + 16, text))

    def svg(self) -> str:
        """Render the plot."""
        x, y, bottom = self.x, self.y, HEIGHT - BOTTOM
        found = []
        for tick in y.ticks():
            found.append(_line("grid", LEFT, WIDTH - RIGHT, y(tick), y(tick)))
            found.append(_text("tick end", LEFT - 6, y(tick) + 4, number(tick)))
        found += [_text("tick mid", x(tick), bottom + 16, number(tick)) for tick in self.x_ticks or x.ticks()]
        found.append(_line("axis", LEFT, WIDTH - RIGHT, bottom, bottom))
        found.append(_text("label mid", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, self.x_label))
        middle = (TOP + bottom) / 2
        found.append(_text("label mid", 14, middle, self.y_label, f' transform="rotate(-90 14 {middle:g})"'))
        return self.figure(HEIGHT, found + self.marks)

    def standalone(self) -> str:
        """The plot as an SVG file, with colours and legend of its own."""
        keys = "".join(
            f'<rect class="bar {kind}" x="{LEFT + 8}" y="{TOP + 4 + 16 * i}" width="10" height="10"/>'
            + _text("tick", LEFT + 24, TOP + 13 + 16 * i, name)
            for i, (name, kind) in enumerate(self.legend)
        )
        body = self.svg()
        inner = body[body.index("<svg") : body.index("</svg>")]
        head, _, marks = inner.partition(">")
        title = _text("label mid", WIDTH / 2, 12, self.title)
        return (
            f'{head} xmlns="http://www.w3.org/2000/svg"><style>{_STYLE}</style>{marks}{title}{keys}</svg>\n'
        )

    def figure(self, height: float, marks: Sequence[str]) -> str:
        """Marks under the title and the legend."""
        legend = "".join(
            f'<span class="key"><i class="swatch {kind}"></i>{escape(name)}</span>'
            for name, kind in self.legend
        )
        return (
            f'<figure><figcaption>{escape(self.title)}</figcaption><div class="keys">{legend}</div>'
            f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(self.title, quote=True)}">'
            f"{''.join(marks)}</svg></figure>"
        )


def _line(kind: str, x1: float, x2: float, y1: float, y2: float) -> str:
    return _mark("line", kind, x1=x1, x2=x2, y1=y1, y2=y2)


def _bar(kind: str, xs: tuple[float, float], ys: tuple[float, float], tip: str) -> str:
    """A rectangle that can be seen however narrow its span is."""
    width, height = f"{max(0.5, xs[1] - xs[0]):.2f}", f"{max(0.0, ys[1] - ys[0]):.2f}"
    return _mark("rect", f"bar {kind}", tip, x=xs[0], y=round(ys[0], 2), width=width, height=height)


def _open(ends: tuple[float, float], *, log: bool) -> tuple[float, float]:
    low, high = ends
    if log:
        low = max(low, 1e-9)
        return (low, high) if high > low * 1.001 else (low / 2, low * 2)
    return (low, high) if high > low else (low, low + 1.0)


def stacked(
    title: str, y_label: str, edges: Sequence[float], stacks: Sequence[Bars], *, least: float = 0.0
) -> str:
    """Stacked bars over time in seconds; the axis reaches `least` at least."""
    top = max(map(sum, zip(*(stack.heights for stack in stacks), strict=True)))
    plot = Plot(title, "seconds", y_label, (edges[0], edges[-1]), (0, max(least, 1.1 * top)))
    plot.bars(edges, stacks)
    return plot.svg()


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
class TimelineRow:
    """One row of a timeline: spans as (from, to, class, text)."""

    spans: Sequence[tuple[float, float, str, str]]


def timeline(title: str, lanes: Sequence[TimelineRow], end: float, legend: Sequence[tuple[str, str]]) -> str:
    """Rows of spans over time in seconds. If there are many, every n-th is shown, and the title says so."""
    every = -(-len(lanes) // MOST_LANES)
    if every > 1:
        title, lanes = f"{title} (every {every}th)", lanes[::every]
    row = min(12.0, max(3.0, 420 / max(1, len(lanes))))
    height = TOP + row * len(lanes) + BOTTOM
    plot = Plot(title, "seconds", "", (0, end), (0, 1), legend=list(legend))
    x, marks = plot.x, []
    for tick in x.ticks():
        marks.append(_line("grid", x(tick), x(tick), TOP, height - BOTTOM))
        marks.append(_text("tick mid", x(tick), height - BOTTOM + 16, number(tick)))
    for i, lane in enumerate(lanes):
        y = TOP + i * row
        marks += [_bar(kind, (x(at), x(to)), (y, y + row * 0.8), text) for at, to, kind, text in lane.spans]
    marks.append(
        _text("label mid", (LEFT + WIDTH - RIGHT) / 2, height - 8, "seconds from the start of the run")
    )
    return plot.figure(height, marks)
