"""`S3Backend`: objects in a bucket, moved by NIXL, any number of processes and hosts.

What a reader may rely on: a load that is OK returned exactly the bytes of one whole store under
this key, and no byte that was not proved reached its memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import ClassVar

from kvconnect.backend import Backend, Batch, Capabilities, Op, Registration, Status
from kvconnect.errors import ClosedError, RegistrationError
from kvconnect.region import Region
from kvconnect.registrations import Registrations
from kvconnect.store_front import Catalog, StoreFront, need_distinct
from kvconnect_nixl.s3 import catalog
from kvconnect_nixl.s3.circuit import Circuit
from kvconnect_nixl.s3.control import Control
from kvconnect_nixl.s3.core import Core, Job
from kvconnect_nixl.s3.get import Loading
from kvconnect_nixl.s3.names import Names
from kvconnect_nixl.s3.options import Place, S3Options, parse, parse_place
from kvconnect_nixl.s3.put import Storing
from kvconnect_nixl.s3.wire import Wire

MIN_RUN_BYTES = 256
"""Below this the connector's repacking is faster than gathering here."""

_JOBS = 4
"""Batches under way at once: as many as the connector's window."""


class S3Backend(StoreFront[Core]):
    """A store in a bucket.

    Invariants: the caller's memory is touched only by copies from and to proved slots, never by
    the network, and not after `done()`; what a stalled server still holds is bounded by
    `threads` objects; a process that was forked off cannot use it.
    """

    catalog: ClassVar[Catalog[Core]] = catalog

    def __init__(self, place: Place, options: S3Options) -> None:
        """Open; see `kvconnect_nixl.s3.open_backend` for what may be raised."""
        self.name = "nixl+s3"
        self.options, self.place = options, place
        self.capabilities = Capabilities(min_run_bytes=MIN_RUN_BYTES, durable=True)
        self._pid = os.getpid()
        self._closed = False
        self._under_way: list[Job] = []
        self._closing = threading.Lock()
        self._registrations = Registrations(self.name, lambda: self._under_way, options.timeout)
        self.core = _open_core(place, options)
        self._jobs = ThreadPoolExecutor(_JOBS, thread_name_prefix="kvconnect-s3-job")

    def register(self, regions: Sequence[Region]) -> Registration:
        """Register host memory; see `kvconnect.backend.Backend.register`."""
        self._check_open("register")
        for region in regions:
            if region.device not in self.capabilities.devices:
                raise RegistrationError(
                    f"nixl+s3: {region} is on device {region.device!r}; objects move from and to "
                    f"host memory (cpu): stage through a host buffer"
                )
        return self._registrations.add(regions)

    def submit(self, batch: Batch) -> Job:
        """Start a batch; see `kvconnect.backend.Backend.submit`."""
        self._check_open(batch.op.value)
        need_distinct(self.name, batch)
        with self._registrations.lock:
            self._check_open(batch.op.value)
            self._registrations.check(batch)
            regions = self._registrations.regions
            job = Job(batch, self.core.names, regions, self.options.timeout)
            self._under_way = [one for one in self._under_way if not one.done()]
            self._under_way.append(job)
            self._jobs.submit(_run, self.core, job)
        return job

    def stats(self) -> dict[str, int | float | str]:
        """Return this process's counts and bytes; the server is not asked."""
        self._check_open("stats")
        core = self.core
        with core.lock:
            counts = dict(core.counts)
        return {
            "place": str(self.place),
            "bounce_bytes": core.wire.slots.touched,
            "bounce_out_bytes": core.wire.slots.out,
            "given_up": core.wire.sweep(),
            "circuit_open": int(core.circuit.error() is not None),
            "circuit_trips": core.circuit.trips,
            **counts,
        }

    def close(self) -> None:
        """Cancel what is queued, wait for what is moving, disconnect.

        Raises `TransferTimeoutError` if a transfer does not end; close again later.
        """
        if os.getpid() != self._pid:
            return  # a forked child has neither the threads nor anything to give back
        with self._registrations.lock:
            self._closed = True
            under_way = list(self._under_way)
        for job in under_way:
            job.cancel()
        self._registrations.drain()
        with self._closing:
            self._jobs.shutdown(wait=True)
            self.core.wire.close()
            self.core.control.close()

    def _check_open(self, operation: str) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"nixl+s3: {operation} in a process that was forked off; open the store there"
            )
        if self._closed:
            raise ClosedError(f"nixl+s3: {operation} after close; open {self.place} again")

    def __repr__(self) -> str:
        where = self.options.endpoint or f"AWS {self.core.control.region}"
        return f"S3Backend({self.place} at {where}{', closed' if self._closed else ''})"


def _open_core(place: Place, options: S3Options) -> Core:
    names, circuit = Names(place.prefix), Circuit(options.cooldown)
    with ExitStack() as undo:
        control = undo.enter_context(Control(options, place, circuit))
        control.check_bucket(names.objects)
        wire = undo.enter_context(Wire(options, place, control.region))
        core = Core(options, place, names, circuit, control, wire)
        undo.pop_all()
        return core


def _run(core: Core, job: Job) -> None:
    # Not a method: a thread that holds the backend would keep it from being collected.
    try:
        moving = Storing(core, job) if job.batch.op is Op.STORE else Loading(core, job)
        moving.run()
    except Exception as error:  # noqa: BLE001 - it has nobody to be raised to
        job.settle_rest(Status.BACKEND_ERROR, f"nixl+s3: {error!r}", dirty=True)
    finally:
        job.finish()


def open_store(location: str, options: Mapping[str, str]) -> S3Backend:
    """Open; see `kvconnect_nixl.s3.open_backend`."""
    return S3Backend(parse_place(location), parse(options))


_: type[Backend] = S3Backend
