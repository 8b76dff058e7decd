"""Leaving a store without holding up the process.

The library's `close` keeps the interpreter's lock until its threads have ended: a second, and
up to 30 s where it watches etcd, in which nothing else of the process runs. It ends with one
call of C++, which is made here first, by its name and without the lock; what `close` then still
does is done at once.

The call is made only where the object proves to be what the name says: a capsule of the
library's own name holds it, and its first word is the class's table of functions. Elsewhere
`close` is all there is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

_CAPSULE = b"mooncake.PyClient.shared_ptr"
_TEAR_DOWN = "_ZN8mooncake10RealClient11tearDownAllEv"
_TABLE = "_ZTVN8mooncake10RealClientE"
_TABLE_HEAD = 2 * ctypes.sizeof(ctypes.c_void_p)
"""Bytes before the functions: an object points past its offset and type."""

_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def leave(module: Any, store: Any) -> None:
    """Leave the store; any later call of `store` would end the process."""
    tear_down = without_lock(module, store)
    if tear_down is not None:
        tear_down()
    store.close()


def without_lock(module: Any, store: Any) -> Callable[[], int] | None:
    """Return the call that leaves the store without the interpreter's lock, None if unknown."""
    try:
        library = ctypes.CDLL(module.__file__)  # loaded long ago: this is only a handle
        function = library[_TEAR_DOWN]
        table = ctypes.addressof(ctypes.c_char.in_dll(library, _TABLE))
        capsule = store._get_pyclient_capsule()  # noqa: SLF001 - the library's own modules do
        shared = _pointer_in(capsule, _CAPSULE)
    except (AttributeError, OSError, ValueError):
        return None
    client = ctypes.c_void_p.from_address(shared).value
    if not client or ctypes.c_void_p.from_address(client).value != table + _TABLE_HEAD:
        return None
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int

    def tear_down(keeps: Any = capsule) -> int:
        return int(function(client)) if keeps else -1

    return tear_down
