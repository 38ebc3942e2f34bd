"""Send times of requests: seconds from the start of the run, ascending, fixed before it begins.

An open loop sends at these times whatever the server does. A closed loop has no such times: a fixed number of
clients each send the next request when the previous one has ended (see load.py).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Literal

Process = Literal["constant", "poisson", "gamma"]
PROCESSES: tuple[Process, ...] = ("constant", "poisson", "gamma")


def arrivals(
    process: Process, rate: float, count: int, seed: int = 0, burstiness: float = 1.0
) -> list[float]:
    """Return `count` send times at `rate` requests per second, the first at 0.

    constant    evenly spaced
    poisson     exponential gaps
    gamma       gaps with shape `burstiness` (vLLM's word): 1 is poisson, below 1 comes in bursts, above 1 is
                smoother; the coefficient of variation of the gaps is 1 / sqrt(burstiness)

    Random gaps are scaled so that the last request is due at (count - 1) / rate: the offered rate is exactly the
    requested one, and runs with different seeds are comparable. With an infinite rate all requests are due at once.
    Raises ValueError naming the parameter.
    """
    if process not in PROCESSES:
        raise ValueError(f"arrival: {process!r} is not one of {', '.join(PROCESSES)}")
    if not rate > 0:
        raise ValueError(f"rate: {rate} is not above 0")
    if count < 0:
        raise ValueError(f"count: {count} is below 0")
    if not 0 < burstiness < math.inf:
        raise ValueError(f"burstiness: {burstiness} is not above 0")
    if math.isinf(rate):
        return [0.0] * count
    if process == "constant":
        return [i / rate for i in range(count)]
    shape = 1.0 if process == "poisson" else burstiness
    rng = random.Random(seed)
    times = [0.0]
    for _ in range(count - 1):
        times.append(times[-1] + rng.gammavariate(shape, 1.0))
    return stretch(times[:count], (count - 1) / rate)


def stretch(times: Sequence[float], end: float) -> list[float]:
    """Scale a pattern to 0 … `end`. Times that are all equal become 0."""
    if not times:
        return []
    first, span = times[0], times[-1] - times[0]
    scale = end / span if span > 0 else 0.0
    return [(at - first) * scale for at in times]


def at_rate(times: Sequence[float], rate: float) -> list[float]:
    """Scale the pattern of a trace to `rate` requests per second; bursts remain.

    Raises ValueError when `rate` is not above 0.
    """
    if not rate > 0:
        raise ValueError(f"rate: {rate} is not above 0")
    return stretch(times, (len(times) - 1) / rate)


def variation(times: Sequence[float]) -> float:
    """Coefficient of variation of the gaps: 0 is constant, 1 is Poisson, more is bursty."""
    found = [after - before for before, after in itertools.pairwise(times)]
    mean = math.fsum(found) / len(found) if found else 0.0
    if not mean:
        return 0.0
    return math.sqrt(math.fsum((gap - mean) ** 2 for gap in found) / len(found)) / mean
