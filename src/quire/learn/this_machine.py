"""The levels of this machine's memory beside those of the lesson's device, as measured here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.learn.offered import offered
from quire.learn.scene import Chart, ChartSeries, Scene, Table
from quire.planner.figure import Figure
from quire.records import dataclass


@dataclass(frozen=True, slots=True)
class MeasuredLevels:
    """Measures bytes a second by the name of a level, from the fastest on. Offered by a room above."""

    measure: Callable[[], Mapping[str, float]]


def this_machine() -> Scene:
    """What was measured of this machine; empty where nobody offers a measurement."""
    rates = {name: rate for one in offered(MeasuredLevels) for name, rate in one.measure().items()}
    if not rates:
        return Scene([])
    times = {name: 1e12 / rate for name, rate in rates.items()}
    figures = [
        Figure(f"this machine: {name}", rate / 1e9, "GB/s", "measured here") for name, rate in rates.items()
    ]
    rows = [(name, f"{rate / 1e9:,.4g}", f"{times[name]:.3g} ms") for name, rate in rates.items()]
    chart = Chart(
        "Time to read 1 GB here", "bars", "level", "ms", [ChartSeries("time", [*times], [*times.values()])]
    )
    missing = "memory" not in rates
    return Scene(
        figures, [chart], tables=[Table("This machine, measured", ("level", "GB/s", "1 GB takes"), rows)],
        remark="quire bench limits measures the memory of this machine, too." if missing else "",
    )  # fmt: skip
