"""Which NIXL plugins load here, and what each of the others lacks."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

from kvconnect_nixl.library import Library, load

_FIX = {
    "libcudart": "nvidia-cuda-runtime-cu12 (pip), on LD_LIBRARY_PATH",
    "libcufile": "nvidia-cufile-cu12 (pip), on LD_LIBRARY_PATH",
    "libcuda.": "the NVIDIA driver",
    "libnvidia": "the NVIDIA driver",
    "libfabric": "libfabric1 (Debian)",
    "libhwloc": "libhwloc15 (Debian)",
    "libdoca": "NVIDIA DOCA",
    "libred": "the client of DDN Infinia",
}


@dataclass(frozen=True, slots=True)
class Plugin:
    """One plugin: does it load, what memory does it take, which libraries are missing.

    `fixes`: what to install, one sentence a package.
    """

    name: str
    loads: bool
    memories: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def fixes(self) -> tuple[str, ...]:
        """What to install for the missing libraries, each once."""
        return tuple(dict.fromkeys(_fix(name) for name in self.missing))


def doctor(library: Library | None = None) -> list[Plugin]:
    """Try every plugin; `UnavailableError` where NIXL itself is not there."""
    library = library or load()
    agent = library.agent("kvconnect-doctor")
    return [_plugin(library, agent, name) for name in sorted(agent.plugin_list)]


def why_not(library: Library, name: str) -> str:
    """Say why a plugin does not load."""
    missing = _missing(library, name)
    if not missing:
        return f"does not come with {library.package}"
    plugin = Plugin(name, loads=False, missing=missing)
    return f"does not load: {', '.join(missing)} missing; install {'; '.join(plugin.fixes)}"


def _plugin(library: Library, agent: object, name: str) -> Plugin:
    memories = tuple(agent.get_plugin_mem_types(name))  # type: ignore[attr-defined]
    if memories:
        return Plugin(name, loads=True, memories=memories)
    return Plugin(name, loads=False, missing=_missing(library, name))


def _missing(library: Library, name: str) -> tuple[str, ...]:
    """Return the libraries that the loader does not find for a plugin."""
    ldd = shutil.which("ldd")
    if library.plugins is None or ldd is None:
        return ()
    file = library.plugins / f"libplugin_{name}.so"
    listed = subprocess.run(  # noqa: S603 - the loader, asked about a file of the wheel
        [ldd, str(file)], check=False, capture_output=True, text=True, timeout=30
    )
    names = set(re.findall(r"^\s*(\S+) => not found", listed.stdout, re.MULTILINE))
    # NIXL's own libraries are loaded before its plugins are, from a folder ldd does not search.
    own = {path.name for path in library.plugins.parent.parent.glob(".nixl*.libs/*.so*")}
    return tuple(sorted(names - own))


def _fix(name: str) -> str:
    return next((fix for start, fix in _FIX.items() if name.startswith(start)), name)
