"""Tests neither read nor write the user's cache of profiles; tests of the cache name a folder of their own."""

import os

os.environ["MESHWRIGHT_CACHE"] = "off"
