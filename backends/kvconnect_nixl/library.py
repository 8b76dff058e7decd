"""The NIXL library, loaded late and under either of its names.

``nixl-cu12`` installs the package ``nixl_cu12``; ``nixl`` is a shim that finds it. Which one is
there does not matter: the shim needs packages that a CPU host lacks, so the real one goes first.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvconnect.errors import UnavailableError
from kvconnect_nixl.in_turn import InTurn

NAMES = ("nixl_cu12", "nixl_cu13", "nixl")
PROGRESS_MICROSECONDS = 100
"""Between two looks of an agent's progress thread that finds nothing to do. Without a pause it
takes a core, whether anything moves or not, from those that move the bytes; with this one 1 % of
it, and a small transfer takes its 90 us in either case."""
_making = threading.Lock()


@dataclass(frozen=True, slots=True)
class Library:
    """What is used of the package: `api` is its module of agents; `plugins` where they lie."""

    package: str
    api: Any
    plugins: Path | None = None

    def agent(self, name: str, *, parallel: bool = False) -> Any:
        """Make an agent without plugins that several threads may use.

        `parallel`: its transfers go at the same time, for plugins that bear it. Others take
        turns.
        """
        # The default of NIXL is no locking: threads then lose completions, or hang in io_uring.
        modes = self.api.nixl_thread_sync_t
        mode = modes.NIXL_THREAD_SYNC_RW if parallel else modes.NIXL_THREAD_SYNC_STRICT
        config = self.api.nixl_agent_config(backends=[], sync_mode=mode)
        with _unhurried(self.api):
            agent = self.api.nixl_agent(name, config)
        return agent if parallel else InTurn(agent)


@contextmanager
def _unhurried(api: Any) -> Iterator[None]:
    """Have agents that are made inside sleep `PROGRESS_MICROSECONDS` where NIXL's would not.

    Its Python API sets the pause of the progress thread to 0 and has no argument for it.
    """
    bindings = getattr(api, "nixlBind", None)
    if bindings is None:
        yield
        return
    with _making:
        plain = bindings.nixlAgentConfig

        class Config(plain):  # type: ignore[misc, valid-type]
            def __setattr__(self, name: str, value: object) -> None:
                if name == "pthrDelay" and value == 0:
                    value = PROGRESS_MICROSECONDS
                super().__setattr__(name, value)

        bindings.nixlAgentConfig = Config
        try:
            yield
        finally:
            bindings.nixlAgentConfig = plain


def load() -> Library:
    """Load NIXL; `UnavailableError` names the package to install."""
    # Every failure comes back as an exception and is reported by us; NIXL would print each to
    # stderr as well. Whoever sets the variable sees its messages again.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    errors = []
    for name in NAMES:
        try:
            api = importlib.import_module(f"{name}._api")
        except (ImportError, OSError) as error:
            errors.append(f"{name}: {error}")
        else:
            return Library(name, api, _plugin_folder(api))
    raise UnavailableError(
        f"nixl is not usable: {'; '.join(errors)}. Install it with pip install "
        f"'kvconnect[nixl]'; on Debian it also needs libssl3 and zlib1g"
    )


def _plugin_folder(api: Any) -> Path | None:
    if named := os.environ.get("NIXL_PLUGIN_DIR"):
        return Path(named)
    # A wheel keeps them beside the package; the shim's `_api` may be the real one's.
    package = Path(api.__file__).parent
    folder = package.with_name(f"{package.name}.libs") / "nixl"
    return folder if folder.is_dir() else None
