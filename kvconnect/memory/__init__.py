"""`memory://` and `memory://NAME`: the reference backend (see `kvconnect.memory.backend`)."""

from kvconnect.memory.backend import MemoryBackend, MemoryOptions, open_backend
from kvconnect.memory.objects import ObjectStore

__all__ = ["MemoryBackend", "MemoryOptions", "ObjectStore", "open_backend"]
