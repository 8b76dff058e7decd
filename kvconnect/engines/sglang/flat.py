"""The generic interface: pages that SGLang copies to flat tensors of its own.

Those tensors are no registered memory and come anew with every call, so pages go through a
bounded buffer of whole pages that is registered once. Where the order of a flat page is known
(see `kvconnect.engines.sglang.flat_order`) that buffer is a pool like the engine's own, and
the objects are the same as those of pages that move in place. Elsewhere flat pages are opaque,
under an identity of their own with the name of the pool's layout in it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvconnect import hostmem
from kvconnect.backend import Closing
from kvconnect.engines.sglang.attached import (
    Attached,
    Bools,
    Context,
    Moved,
    announced,
    connect,
    is_held,
)
from kvconnect.engines.sglang.flat_order import opaque_plane, ordered_plane
from kvconnect.engines.sglang.identity import KV, Identified, identify
from kvconnect.engines.sglang.notices import Notices
from kvconnect.errors import CapabilityError, ConfigError, TransferTimeoutError
from kvconnect.foreign import wrap
from kvconnect.region import Region

MOST_SLOTS = 256
"""Pages of the buffer; SGLang asks for at most 128 at once, for loads and stores each."""

ALIGNMENT = 4096

Places = NDArray[np.intp]
Slots = NDArray[np.int64]


class FlatPages(Closing):
    """Flat pages of one host pool on the store; safe to use from SGLang's threads at once."""

    def __init__(self, host_pool: Any, context: Context) -> None:
        """Attach; raises `KVConnectError`, `CapabilityError` where the pool has no flat pages."""
        self._host_pool = host_pool
        self._timeout = context.options.timeout
        self._nbytes = _nbytes(_example(host_pool))
        self._notices = Notices(f"flat pages on {context.backend.name}")
        self._stride = -(-self._nbytes // ALIGNMENT) * ALIGNMENT
        slots = min(context.options.flat_bytes // self._stride, MOST_SLOTS)
        if slots < 1:
            raise ConfigError(
                f"flat_bytes={context.options.flat_bytes} B is too small: one page takes "
                f"{self._stride} B; give at least that"
            )
        self._memory = hostmem.allocate(slots * self._stride, "flat pages", pin=False)
        self._free = list(range(slots))
        self._part = max(slots // 2, 1)
        self._changed = threading.Condition()
        try:
            self.attached = self._attach(context, slots)
        except BaseException:
            if not is_held(self._memory):
                self._memory.close()
            raise

    def _attach(self, context: Context, slots: int) -> Attached:
        host_pool, options = self._host_pool, context.options
        pool = wrap(host_pool, KV)
        found = identify(pool, host_pool, KV, context.storage_config, options, context.facts)
        region = Region("flat pages", self._memory.address, slots * self._stride)
        plane = ordered_plane(host_pool, pool, self._nbytes, region, self._stride)
        if plane is None:
            plane = opaque_plane(self._nbytes, region, self._stride)
            found = _apart(found, str(host_pool.layout))
        # The token index of this pool is the number of a slot of the buffer.
        flat = replace(
            pool,
            planes=(plane,),
            label="flat pages",
            owner=self._memory,
            index_step=1,
            translate=None,
        )
        # The buffer is nobody else's, so that any page of it can be tested at any time.
        connector = connect(flat, found, context, 0 if options.self_test else None)
        return announced(Attached(KV, connector, options), found)

    def get(self, keys: Sequence[str], targets: Sequence[Any]) -> Moved:
        """Load pages into flat tensors, one for each key; a page not loaded leaves its alone."""

        def part(places: Places, slots: Slots) -> Moved:
            moved = self.attached.get([keys[i] for i in places.tolist()], slots)
            for place, slot in zip(
                places[moved.ok].tolist(), slots[moved.ok].tolist(), strict=True
            ):
                ctypes.memmove(targets[place].data_ptr(), self._address(slot), self._nbytes)
            return moved

        return self._in_parts("get", keys, targets, part)

    def set(self, keys: Sequence[str], values: Sequence[Any]) -> Moved:
        """Store pages from flat tensors, one for each key."""

        def part(places: Places, slots: Slots) -> Moved:
            for place, slot in zip(places.tolist(), slots.tolist(), strict=True):
                ctypes.memmove(self._address(slot), values[place].data_ptr(), self._nbytes)
            return self.attached.set([keys[i] for i in places.tolist()], slots)

        return self._in_parts("set", keys, values, part)

    def new_page(self) -> Any:
        """Return a tensor that takes one page."""
        return self._host_pool.get_dummy_flat_data_page()

    def _in_parts(
        self,
        what: str,
        keys: Sequence[str],
        tensors: Sequence[Any],
        part: Callable[[Places, Slots], Moved],
    ) -> Moved:
        """Move the keys whose tensors fit, as many at once as half of the buffer takes."""
        ok, nbytes = np.zeros(len(keys), dtype=np.bool_), 0
        fit = np.flatnonzero(self._fitting(what, keys, tensors))
        deadline = time.monotonic() + self._timeout
        for start in range(0, len(fit), self._part):
            places = fit[start : start + self._part]
            try:
                with self._slots(len(places), deadline) as slots:
                    moved = part(places, slots)
            except TransferTimeoutError as error:
                self._notices.say(what, f"{what}: {error}")
                break
            ok[places] = moved.ok
            nbytes += moved.nbytes
        return Moved(ok, nbytes)

    def _fitting(self, what: str, keys: Sequence[str], tensors: Sequence[Any]) -> Bools:
        """Tell which tensors are exactly one page of host memory in one piece: (keys,) bool."""
        fitting = np.zeros(len(keys), dtype=np.bool_)
        if len(tensors) != len(keys):
            self._notices.say(what, f"{what}: {len(keys)} keys for {len(tensors)} tensors")
            return fitting
        for place, tensor in enumerate(tensors):
            have = _nbytes(tensor) if getattr(tensor, "is_cpu", False) else 0
            fitting[place] = have == self._nbytes and tensor.is_contiguous()
        if not fitting.all():
            self._notices.say(
                what,
                f"{what}: {int((~fitting).sum())} of {len(keys)} tensors are not the "
                f"{self._nbytes} B of a page in one piece of host memory",
            )
        return fitting

    @contextmanager
    def _slots(self, count: int, deadline: float) -> Iterator[Slots]:
        """Take `count` slots of the buffer; `TransferTimeoutError` if none are free in time."""
        with self._changed:
            while len(self._free) < count:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise TransferTimeoutError(
                        f"{count} flat pages wanted, {len(self._free)} of the buffer are free "
                        f"after {self._timeout:g} s; raise flat_bytes"
                    )
            taken, self._free = self._free[:count], self._free[count:]
        try:
            yield np.array(taken, dtype=np.int64)
        finally:
            with self._changed:
                self._free.extend(taken)
                self._changed.notify_all()

    def _address(self, slot: int) -> int:
        return self._memory.address + slot * self._stride

    def close(self, timeout: float | None = None) -> None:
        """Detach and give the buffer back; `TransferTimeoutError` while pages are in flight."""
        self.attached.close(timeout)
        self._memory.close()


def _apart(found: Identified, layout: str) -> Identified:
    """Keep opaque pages under an identity of their own: no key of theirs names other bytes."""
    extra = dict(found.identity.extra) | {"flat": layout}
    return replace(
        found,
        identity=replace(found.identity, extra=tuple(sorted(extra.items()))),
        tp_sizes=(),
        head_group=None,
        layer_chunk=None,
        object_layout="native",
    )


def _example(host_pool: Any) -> Any:
    """Return a new flat page of the pool; `CapabilityError` where it has none."""
    try:
        host_pool.get_data_page(0)
        return host_pool.get_dummy_flat_data_page()
    except (AttributeError, NotImplementedError, ValueError) as error:
        raise CapabilityError(
            f"{type(host_pool).__name__} has no flat pages ({error}): write "
            f'"interface_v1": 1 in the extra config to move its pages in place'
        ) from error


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel()) * int(tensor.element_size())
