"""Pools of others: engines' host pools read by duck typing, and plain tensors with axis names.

No engine is imported here. What a pool is follows from the attributes it has; its geometry
follows from its buffers' own shapes and strides and is cross-checked against what it declares.
"""

from kvconnect.foreign.kinds import wrap
from kvconnect.foreign.tensors import pool_from_tensors

__all__ = ["pool_from_tensors", "wrap"]
