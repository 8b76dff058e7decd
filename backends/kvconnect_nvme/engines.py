"""The choice of an engine: the one that `io=` names, or the fastest by a probe at open."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from functools import partial

from kvconnect.errors import KVConnectError, UnavailableError
from kvconnect_nvme import probe
from kvconnect_nvme.engine import IoEngine
from kvconnect_nvme.options import Io, NvmeOptions, UringOrAio
from kvconnect_nvme.slabs import Slabs
from kvconnect_nvme.threads import ThreadsEngine

log = logging.getLogger("kvconnect.nvme")

MARGIN = 1.10
"""How many times faster than threads, which need nothing, another engine has to be."""

_CANDIDATES: tuple[tuple[Io, UringOrAio], ...] = (
    ("threads", "aio"),
    ("nixl-posix", "aio"),
    ("nixl-posix", "uring"),
)

_Choice = tuple[Io, UringOrAio, str]
_chosen: dict[tuple[int, int], _Choice] = {}
"""By file system and threads: what the probe said, for the life of the process."""
_choosing = threading.Lock()


def open_engine(options: NvmeOptions, slabs: Slabs) -> IoEngine:
    """Make the engine for a store.

    Raises `UnavailableError` where an engine that was asked for by name does not load, and
    `ConfigError` where it does not fit the store.
    """
    if options.io != "auto":
        return _make(options, slabs, f"io={options.io} was asked for")
    if not slabs.direct:
        # What is posted on the page cache is moved before the call returns, one after another.
        return _make(replace(options, io="threads"), slabs, "the page cache is in between")
    where = slabs.path.stat()
    place = (where.st_rdev if slabs.device else where.st_dev, options.io_threads)
    with _choosing:
        if place not in _chosen:
            _chosen[place] = io, api, reason = _choose(options, slabs)
            log.info("nvme: %s: io=%s by %s", slabs.path, _label(io, api), reason)
        io, api, reason = _chosen[place]
    return _make(replace(options, io=io, nixl_api=api), slabs, reason)


def _make(options: NvmeOptions, slabs: Slabs, reason: str = "") -> IoEngine:
    if options.io == "threads":
        return ThreadsEngine(options.io_threads, reason, cached=not slabs.direct)
    try:
        # Late: a store on threads neither needs kvconnect_nixl nor pays for importing NIXL.
        from kvconnect_nvme.nixl_engine import NixlEngine  # noqa: PLC0415
        from kvconnect_nvme.nixl_plans import plan  # noqa: PLC0415
    except ImportError as error:
        raise UnavailableError(
            f"nvme: io={options.io} needs {error.name}: install kvconnect[nixl]"
        ) from error
    return NixlEngine(
        plan(options, slabs), slabs, options.io_threads, reason=reason, timeout=options.timeout
    )


def _choose(options: NvmeOptions, slabs: Slabs) -> _Choice:
    """Measure what runs here. Whatever goes wrong, threads will do."""
    try:
        from kvconnect_nixl.library import load  # noqa: PLC0415

        load()
    except (ImportError, UnavailableError):
        return "threads", "aio", "NIXL is not installed"
    makers = {
        candidate: partial(_make, replace(options, io=candidate[0], nixl_api=candidate[1]))
        for candidate in _CANDIDATES
    }
    try:
        rates = probe.measure(makers, slabs)
    except (KVConnectError, OSError) as error:
        return "threads", "aio", f"the probe failed: {error}"
    words = ", ".join(f"{_label(*one)} {rate / 1e9:.2f} GB/s" for one, rate in rates.items())
    best = max(rates, key=lambda one: rates[one])
    if rates[best] < MARGIN * rates[_CANDIDATES[0]]:
        best = _CANDIDATES[0]
    return *best, f"probe of {probe.BYTES >> 20} MiB: {words}"


def _label(io: Io, api: UringOrAio) -> str:
    return io if io == "threads" else f"{io} {api}"
