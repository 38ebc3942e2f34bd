"""Settings of the whole suite."""

import os

# torch works on tiny models here and several test processes share the cores: more threads only wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
