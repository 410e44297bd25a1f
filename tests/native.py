"""Whether native kernels are used here, and the mark of tests that need them."""

import importlib.util
import os

import pytest

USED = os.environ.get("JAXNN_NATIVE") != "off" and importlib.util.find_spec("jaxnn_native") is not None
needed = pytest.mark.skipif(not USED, reason="native kernels are not used here: make native, without JAXNN_NATIVE=off")
