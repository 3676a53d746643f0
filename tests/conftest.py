"""Tests neither read nor write the user's cache of profiles, and run torch on one thread: ranks share the cores, and
one process that is compared with them rounds as they do."""

import os

os.environ["MESHWRIGHT_CACHE"] = "off"
os.environ.setdefault("OMP_NUM_THREADS", "1")
