"""One thread per test process, shape checks on, real processes for the tests that need them."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from hypothesis import settings
from jaxtyping import install_import_hook

install_import_hook("regimes", "shapes.check")  # before any test imports a regimes module
settings.register_profile("untimed", deadline=None)  # a test is no benchmark
settings.load_profile("untimed")
