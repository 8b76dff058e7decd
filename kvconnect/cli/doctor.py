"""``kvconnect doctor``: which of NIXL's plugins load on this machine, and what the others need."""

from __future__ import annotations

import importlib

from rich.console import Console
from rich.table import Table

from kvconnect.errors import UnavailableError

console = Console()

_USED_BY = {
    "POSIX": "nvme, io=nixl-posix",
    "GDS": "nvme, io=nixl-gds",
    "GDS_MT": "nvme, io=nixl-gds-mt",
    "GUSLI": "nvme on a block device, io=nixl-gusli",
    "OBJ": "nixl+s3://",
}


def doctor() -> None:
    """Say which NIXL plugins load here and what each missing one needs."""
    try:
        # By name: kvconnect itself knows no backend.
        plugins = importlib.import_module("kvconnect_nixl.plugins")
    except ImportError as error:
        raise UnavailableError(f"doctor needs {error.name}: put backends/ on PYTHONPATH") from error
    table = Table("plugin", "loads", "used by", "memory, or what is missing")
    for plugin in plugins.doctor():
        if plugin.loads:
            rest = ", ".join(name.removesuffix("_SEG") for name in plugin.memories)
        else:
            rest = f"no {', '.join(plugin.missing)}: install {'; '.join(plugin.fixes)}"
        loads = "yes" if plugin.loads else "no"
        table.add_row(plugin.name, loads, _USED_BY.get(plugin.name, ""), rest)
    console.print(table)
