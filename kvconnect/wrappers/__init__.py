"""Backends around a backend: faults, delays, limits and counters, each its own small class.

Why wrappers: a backend under test or in production is never changed to be observed, slowed
or broken, and everything that takes a backend takes a wrapped one.
"""

from kvconnect.wrappers.base import Wrapper
from kvconnect.wrappers.broken import Dirt, Lie
from kvconnect.wrappers.delayed import Delayed
from kvconnect.wrappers.faulty import Faulty
from kvconnect.wrappers.limited import Limited
from kvconnect.wrappers.metered import Metered

__all__ = ["Delayed", "Dirt", "Faulty", "Lie", "Limited", "Metered", "Wrapper"]
