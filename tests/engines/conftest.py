"""Tests against real engines: skipped where the engine is not installed, unless required.

With KVCONNECT_REQUIRE_SGLANG=1 a missing SGLang is an error; one that is there but fails to
import is an error always.
"""

import importlib.util
import os

import pytest

from tests.engines import sglang_pools


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("sglang")]
    if not marked or importlib.util.find_spec("sglang"):
        return
    if os.environ.get("KVCONNECT_REQUIRE_SGLANG") == "1":
        raise pytest.UsageError(
            "KVCONNECT_REQUIRE_SGLANG=1, but sglang is not installed here: run "
            "scripts/setup-sglang and use its environment"
        )
    reason = "SGLang is not installed in this environment (scripts/setup-sglang makes one)"
    for item in marked:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def sglang():
    """SGLang's host pool modules, imported once, as attributes of one namespace."""
    return sglang_pools.load()
