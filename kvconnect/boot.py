"""Which boot of the machine this is: what was not synced is to be believed only within it."""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the kernel's name for this boot: 36 characters, another one after every boot."""
    return _BOOT_ID.read_text(encoding="ascii").strip()
