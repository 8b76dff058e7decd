"""The system's tools that clusters are made with: found once, run with a deadline.

All that is missing is named in one error, with the Debian packages to install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence

from kvconnect.errors import TransferTimeoutError, UnavailableError

PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "iptables-restore": "iptables",
    "iptables-save": "iptables",
    "losetup": "mount",
    "mount": "mount",
    "umount": "mount",
    "mkfs.ext4": "e2fsprogs",
    "unshare": "util-linux",
    "cp": "coreutils",
    "ssh": "openssh-client",
    "sudo": "sudo",
}
"""Tool and the Debian package that has it."""

LOCAL = tuple(tool for tool in PACKAGES if tool not in {"ssh", "sudo"})
"""What a cluster on this machine needs."""

_SECONDS = 60.0

_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
# The PATH of a cron job or of a plain user often lacks the administrator's folders.


def need_root() -> None:
    """Raise `UnavailableError` where this process may not make namespaces and mounts."""
    if os.geteuid() != 0:
        raise UnavailableError(
            f"a cluster of namespaces needs root (effective user id 0, here {os.geteuid()}): run "
            "as root"
        )


def need(tools: Iterable[str]) -> None:
    """Raise one `UnavailableError` that names every tool that is missing, with its package."""
    missing = [tool for tool in tools if shutil.which(tool, path=_PATH) is None]
    if missing:
        packages = sorted({PACKAGES[tool] for tool in missing})
        raise UnavailableError(
            f"not found: {', '.join(missing)}; install the Debian package"
            f"{'s' if len(packages) > 1 else ''}: apt-get install {' '.join(packages)}"
        )


def call(argv: Sequence[str], *, given: str = "", timeout: float = _SECONDS) -> str:
    """Run a tool to its end and return its stdout; `given` is its stdin.

    Raises `UnavailableError` with its last words where it fails, `TransferTimeoutError` where
    it takes longer than `timeout` seconds.
    """
    try:
        done = subprocess.run(  # noqa: S603 - argument vectors of our own, no shell
            list(argv),
            input=given,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, "PATH": _PATH, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        need([argv[0]])
        raise
    except subprocess.TimeoutExpired:
        raise TransferTimeoutError(f"{' '.join(argv)} took more than {timeout:g} s") from None
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip()
        raise UnavailableError(f"{' '.join(argv)} failed with {done.returncode}: {words}")
    return done.stdout
