"""Which wishes of a request cannot be kept, and how that is said."""

from __future__ import annotations

import pytest

from quire.core.admission_rules import check_wishes
from quire.core.forecast import Forecast


def test_limits_and_predictions_count_from_the_arrival() -> None:
    """A request that has waited 5 ms is told the deadline that it would have had to name."""
    forecast = Forecast(start=0.001, ttft=0.004, tpot=0.001)
    assert forecast.finish(10) == pytest.approx(0.013)
    assert check_wishes(forecast, 10, None, elapsed=0.005, finish=0.014) is None
    broken = check_wishes(forecast, 10, None, elapsed=0.005, finish=0.012)
    assert broken is not None
    assert (broken.what, broken.wait) == ("deadline_ms", pytest.approx(0.001))
    assert (broken.limit, broken.predicted) == (pytest.approx(0.017), pytest.approx(0.018))
    assert str(broken) == "deadline_ms of 17 ms cannot be kept: 18 ms predicted"
    # reading it took 3 ms before
    read = check_wishes(forecast, 10, None, elapsed=0.005, waited=0.008, finish=0.012)
    assert str(read) == "deadline_ms of 20 ms cannot be kept: 21 ms predicted"
