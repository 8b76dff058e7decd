"""Tools to test backends, shipped: a conformance suite, guarded memory, strategies, an oracle.

Needs the ``testing`` extra (pytest, hypothesis); nothing else in kvconnect imports this.
"""

import pytest

# Before the suite is imported, so that its plain asserts say what was compared.
pytest.register_assert_rewrite("kvconnect.testing.suite", "kvconnect.testing.machine")
