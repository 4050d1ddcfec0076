"""What holds for every test: one thread, no hub, the same random examples each time."""

import os

from hypothesis import settings

# Before anything imports torch; the ranks that tests start inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

# The first call of a numba kernel compiles, which no deadline of milliseconds survives.
settings.register_profile("dynapar", deadline=None, derandomize=True, database=None)
settings.load_profile("dynapar")
