"""Settings of the whole suite."""

import os

import hypothesis

# torch works on tiny models here and several test processes share the cores: more threads only wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run, and no verdict of a clock: neither on an example nor on what draws it.
hypothesis.settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")
