"""Remove what clusters left on this machine whose owner is gone, however it ended.

Clusters of living owners are not touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

from kvconnect.errors import UnavailableError
from kvconnect.testing.cluster import disk, names, network
from kvconnect.testing.cluster.names import Names
from kvconnect.testing.cluster.tools import call

_UNFINISHED_SECONDS = 60.0
_PROCESS_SECONDS = 10.0


def sweep() -> list[str]:
    """Remove the clusters of dead owners; return their identifiers."""
    names.drop_unfinished(time.time() - _UNFINISHED_SECONDS)
    dead = [cluster for cluster in names.claimed() if cluster.orphaned()]
    for cluster in dead:
        remove(cluster)
    return [cluster.ident for cluster in dead]


def sweep_folders(base: Path) -> None:
    """Remove the folders below `base` whose owner is gone."""
    names.drop_unfinished(time.time() - _UNFINISHED_SECONDS, base)
    for folder in names.claimed_folders(base):
        if names.orphaned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def remove(cluster: Names) -> None:
    """Remove processes, namespaces, mounts, loop devices and the folder of one cluster.

    What another sweep removes at the same time is not an error; what is left at the end is.
    """
    _end_processes(network.namespaces(cluster.prefix))
    for namespace in network.namespaces(cluster.prefix):
        with contextlib.suppress(UnavailableError):
            network.delete(namespace)
    for point in disk.mounts(cluster.folder):
        with contextlib.suppress(UnavailableError):
            call(["umount", point])
    for device in disk.loops(cluster.folder):
        with contextlib.suppress(UnavailableError):
            call(["losetup", "--detach", device])
    left = network.namespaces(cluster.prefix) + disk.mounts(cluster.folder)
    if left:
        raise UnavailableError(f"cluster {cluster.ident} cannot be removed: {left} are in use")
    shutil.rmtree(cluster.folder, ignore_errors=True)


def _end_processes(namespaces: list[str]) -> None:
    """Kill what still runs in these network namespaces and wait until it is gone."""
    until = time.monotonic() + _PROCESS_SECONDS
    while pids := [pid for name in namespaces for pid in _pids(name)]:
        if time.monotonic() > until:
            raise UnavailableError(f"processes {pids} do not end in {_PROCESS_SECONDS:g} s")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _pids(namespace: str) -> list[int]:
    try:
        wanted = Path(f"/run/netns/{namespace}").stat()
    except FileNotFoundError:
        return []
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            here = (path / "ns" / "net").stat()
            if (here.st_dev, here.st_ino) == (wanted.st_dev, wanted.st_ino):
                found.append(int(path.name))
    return found
