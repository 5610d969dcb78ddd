"""Settings of every test process and of what it starts."""

import os

# OpenMP's threads spin where they wait for each other. With another process on the same cores that made a file of tests
# take nine minutes instead of 15 seconds.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
