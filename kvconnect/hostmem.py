"""Host memory for pools: page-aligned, optionally in huge pages, on a NUMA node, shared, pinned.

Every wish is checked where it is made and fails with what to change on the machine; nothing is
silently left out. Memory is unmapped when the last view of it is gone, so closing a pool never
pulls the ground from under a tensor.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvconnect.backend import Closing
from kvconnect.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    LayoutError,
    RegistrationError,
    UnavailableError,
)
from kvconnect.memory_limits import available_bytes, free_huge_pages, online_nodes

_MAP_HUGETLB, _HUGE_SHIFT, _MFD_HUGETLB = 0x40000, 26, 0x4
_MPOL_BIND = 2
_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the mbind system call, which libc does not wrap."""

HUGE_PAGE_BYTES = {"2MiB": 2 << 20, "1GiB": 1 << 30}


class HostMemory(Closing):
    """One mapping of `nbytes` bytes at `address`; closes twice safely.

    `fd` is the memfd of shared memory, None otherwise; it is closed with this object, and other
    processes that attached keep their own.
    """

    def __init__(self, mapping: mmap.mmap, nbytes: int, fd: int | None = None) -> None:
        """Take over a mapping of at least `nbytes` and its descriptor."""
        self._mapping: mmap.mmap | None = mapping
        self.nbytes = nbytes
        self.fd = fd
        self.pinned = False
        anchor = ctypes.c_char.from_buffer(mapping)
        self.address = ctypes.addressof(anchor)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._mapping is None

    def keep_alive(self) -> mmap.mmap:
        """Return what a view must hold on to; `ClosedError` after `close`."""
        if self._mapping is None:
            raise ClosedError("the pool's memory is closed; allocate or attach it again")
        return self._mapping

    def pin(self) -> None:
        """Register the memory with CUDA; `RegistrationError` with the code if that fails."""
        status = int(_cudart().cudaHostRegister(self.address, self.nbytes, 1))
        if status:
            raise RegistrationError(
                f"cudaHostRegister of {self.nbytes} B at {self.address:#x} failed with code "
                f"{status}; check the memlock limit (ulimit -l), or allocate with pin=False"
            )
        self.pinned = True

    def bind(self, node: int) -> None:
        """Keep all pages of the memory on NUMA node `node`, before any of them is touched."""
        number = _MBIND.get(platform.machine())
        if number is None:
            raise ConfigError(f"numa_node={node}: not supported on {platform.machine()}")
        libc = ctypes.CDLL(None, use_errno=True)
        words = node // 64 + 1
        mask = (ctypes.c_uint64 * words)()
        mask[node // 64] = 1 << node % 64
        arguments = (self.address, self._mapped(), _MPOL_BIND, ctypes.byref(mask), words * 64 + 1)
        if libc.syscall(number, *map(_word, arguments), _word(0)):
            code = ctypes.get_errno()
            raise ConfigError(
                f"numa_node={node}: mbind failed with {os.strerror(code)} ({code}); leave "
                f"numa_node out, or allow the mbind system call in this container"
            )

    def _mapped(self) -> int:
        return len(self.keep_alive())

    def close(self) -> None:
        """Unpin and let go of the memory; the second call does nothing."""
        if self._mapping is None:
            return
        self._mapping = None
        if self.pinned:
            self.pinned = False
            _cudart().cudaHostUnregister(self.address)
        if self.fd is not None:
            fd, self.fd = self.fd, None
            os.close(fd)


def allocate(
    nbytes: int,
    label: str,
    *,
    huge_pages: str | bool = False,
    numa_node: int | None = None,
    shared: bool = False,
    pin: bool | None = None,
) -> HostMemory:
    """Map `nbytes` of zeroed memory.

    `huge_pages`: ``"thp"`` asks the kernel for transparent ones, ``"2MiB"`` and ``"1GiB"`` take
    them from the reserve. `shared` maps a memfd. `pin` None pins where CUDA is present.
    `CapacityError` if there is not that much memory, `ConfigError` on wishes that cannot be.
    """
    page = _huge_page_bytes(huge_pages)
    _check_node(numa_node)
    pinning = _has_cuda() if pin is None else pin
    if pinning and pin:
        _require_cuda()
    size = -(-nbytes // (page or mmap.PAGESIZE)) * (page or mmap.PAGESIZE)
    _check_room(size, page, label)
    memory = _map_shared(size, nbytes, page, label) if shared else _map_private(size, nbytes, page)
    try:
        if huge_pages == "thp":
            memory.keep_alive().madvise(mmap.MADV_HUGEPAGE)
        if numa_node is not None:
            memory.bind(numa_node)
        if pinning:
            memory.pin()
    except BaseException:
        memory.close()
        raise
    return memory


def attach(fd: int, nbytes: int) -> HostMemory:
    """Map the memory behind another process's `fd` (inherited, or passed over a socket).

    `LayoutError` if it is smaller than `nbytes`: then the geometries differ.
    """
    have = os.fstat(fd).st_size
    if have < nbytes:
        raise LayoutError(
            f"fd {fd} holds {have} B, this geometry takes {nbytes} B; attach with the geometry "
            f"the pool was allocated with"
        )
    own = os.dup(fd)
    try:
        return HostMemory(mmap.mmap(own, have), nbytes, own)
    except BaseException:
        os.close(own)
        raise


def _map_private(size: int, nbytes: int, page: int) -> HostMemory:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if page:
        flags |= _MAP_HUGETLB | (page.bit_length() - 1) << _HUGE_SHIFT
    return HostMemory(_mapped(lambda: mmap.mmap(-1, size, flags=flags), size, page), nbytes)


def _map_shared(size: int, nbytes: int, page: int, label: str) -> HostMemory:
    flags = os.MFD_CLOEXEC
    if page:
        flags |= _MFD_HUGETLB | (page.bit_length() - 1) << _HUGE_SHIFT
    fd = os.memfd_create(f"kvconnect-{label}"[:200], flags)
    try:
        os.ftruncate(fd, size)
        return HostMemory(_mapped(lambda: mmap.mmap(fd, size), size, page), nbytes, fd)
    except BaseException:
        os.close(fd)
        raise


def _mapped(make: Callable[[], mmap.mmap], size: int, page: int) -> mmap.mmap:
    try:
        return make()
    except (OSError, ValueError, OverflowError) as error:
        raise CapacityError(
            f"mapping {size} B{f' in pages of {page} B' if page else ''} failed: {error}; ask for "
            f"fewer pages, or raise the limit (ulimit -v, /proc/sys/vm/nr_hugepages)"
        ) from error


def _huge_page_bytes(huge_pages: object) -> int:
    if huge_pages is False or huge_pages == "thp":
        return 0
    if huge_pages not in HUGE_PAGE_BYTES:
        raise ConfigError(
            f"huge_pages={huge_pages!r} is not one of: False, 'thp', "
            f"{', '.join(map(repr, HUGE_PAGE_BYTES))}"
        )
    return HUGE_PAGE_BYTES[str(huge_pages)]


def _check_node(node: int | None) -> None:
    if node is None:
        return
    nodes = online_nodes()
    if type(node) is not int or node not in nodes:
        raise ConfigError(f"numa_node={node!r} is not one of the nodes online: {sorted(nodes)}")


def _check_room(size: int, page: int, label: str) -> None:
    if page:
        free = free_huge_pages(page)
        if free * page < size:
            raise CapacityError(
                f"pool {label!r} takes {size // page} huge pages of {page} B, {free} are free; "
                f"reserve more in /proc/sys/vm/nr_hugepages (for 1GiB: "
                f"/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages), or use "
                f"huge_pages='thp'"
            )
        return
    room = available_bytes()
    if size > room:
        raise CapacityError(
            f"pool {label!r} takes {size} B ({size / 2**30:.2f} GiB), {room} B "
            f"({room / 2**30:.2f} GiB) of memory are available; ask for fewer pages"
        )


def _has_cuda() -> bool:
    # Looking for the driver first: importing torch takes seconds where there is no GPU anyway.
    if not Path("/dev/nvidiactl").exists():
        return False
    import torch  # noqa: PLC0415 - importing kvconnect must not import torch

    return bool(torch.cuda.is_available())


def _require_cuda() -> None:
    if not _has_cuda():
        raise UnavailableError("pin=True needs CUDA, and no usable device was found; leave pin out")


def _cudart() -> Any:
    import torch  # noqa: PLC0415

    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _word(value: Any) -> Any:
    return ctypes.c_ulong(value) if isinstance(value, int) else value
