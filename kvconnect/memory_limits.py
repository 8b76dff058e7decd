"""What this machine has left: memory (also under a container's limit), huge pages, NUMA nodes."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def available_bytes() -> int:
    """Return the bytes this process may still take: the machine's, or its cgroup's if less.

    Where neither can be read the answer is the largest address space, so that the kernel has
    the last word.
    """
    room = _from_meminfo()
    for limit, used in _CGROUPS:
        most, now = _number(limit), _number(used)
        if most is not None and now is not None:
            room = min(room, max(most - now, 0))
    return room


def free_huge_pages(page: int) -> int:
    """Return how many huge pages of `page` bytes are free."""
    return _number(f"/sys/kernel/mm/hugepages/hugepages-{page // 1024}kB/free_hugepages") or 0


def online_nodes() -> set[int]:
    """Return the NUMA nodes that are online; {0} where the kernel does not say."""
    text = _text("/sys/devices/system/node/online") or "0"
    nodes = set[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        nodes.update(range(int(first), int(last or first) + 1))
    return nodes


def _from_meminfo() -> int:
    for line in (_text("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 47


def _number(path: str) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.isdigit() else None


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return None
