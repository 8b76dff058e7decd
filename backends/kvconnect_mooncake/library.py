"""The Mooncake library: settings that must be there before it loads, and what it needs.

Its defaults wait for minutes; they are read from the environment once, when it loads. What
the caller has set stays.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from kvconnect.errors import UnavailableError

PROGRESS_SECONDS = 2
"""Default of the time after which a connection on which nothing moves is given up."""

_DEFAULTS = {
    # One attempt takes 4 s where nobody answers, and 0 never tries at all.
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": str(PROGRESS_SECONDS),
    "MC_TCP_STATUS_TIMEOUT_SEC": str(PROGRESS_SECONDS),
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "1",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    # Without it a peer that restarted on the same port fails for ever.
    "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS": "1",
    "MC_LOG_LEVEL": "ERROR",
}
_PACKAGES = {
    "libibverbs": "libibverbs1",
    "libnuma": "libnuma1",
    "libcurl": "libcurl4",
}


def load(protocol: str, module: str = "mooncake.store") -> Any:
    """Return `module` of the library; `UnavailableError` with what to install."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if protocol == "tcp":
        # The library takes RDMA wherever it finds a card, whatever protocol it is told.
        os.environ.setdefault("MC_FORCE_TCP", "1")
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise UnavailableError(explain(error)) from error


def explain(error: BaseException) -> str:
    """Say what an error at import means and how to mend it."""
    text = str(error)
    if "libcuda" in text or "libcudart" in text:
        return (
            f"mooncake: {text}. The CUDA build of Mooncake is installed on a host without CUDA: "
            f"pip uninstall mooncake-transfer-engine, then pip install 'kvconnect[mooncake-cpu]'"
        )
    for library, package in _PACKAGES.items():
        if library in text:
            return f"mooncake: {text}. Install it: apt-get install {package}"
    return (
        f"mooncake: {text}. Install it with pip install 'kvconnect[mooncake-cpu]' (no CUDA) or "
        f"'kvconnect[mooncake]' (CUDA); on Debian also apt-get install "
        f"{' '.join(_PACKAGES.values())}"
    )


def master_binary() -> Path:
    """Return the master's program; `UnavailableError` if the package has none.

    Not the command of that name: it is a script that starts the program as a child and leaves
    it running when it is stopped.
    """
    load("tcp")
    folder = Path(str(importlib.import_module("mooncake").__file__)).parent
    binary = folder / "mooncake_master"
    if not os.access(binary, os.X_OK):
        raise UnavailableError(f"mooncake: {binary} is not there; reinstall the package")
    return binary


def setting(name: str, default: int) -> int:
    """Return a numeric setting of the library as it is in the environment."""
    try:
        return max(int(os.environ.get(name, "")), 1)
    except ValueError:
        return default
