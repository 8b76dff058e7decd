"""`NvmeBackend`: objects in preallocated slabs, their index in LMDB, any number of processes.

What a reader may rely on: a key that is seen was written whole, its bytes were on disk first
(unless durability=none), and a load that is OK returned exactly those bytes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ClassVar

from kvconnect.backend import Backend, Batch, Capabilities, Location, Op, Registration
from kvconnect.errors import (
    ClosedError,
    RegistrationError,
    TransferTimeoutError,
)
from kvconnect.region import Region
from kvconnect.registrations import Registrations
from kvconnect.store_front import Catalog, StoreFront, need_distinct
from kvconnect_nvme import catalog, maintenance, report
from kvconnect_nvme.core import Core, Job
from kvconnect_nvme.env import check_process
from kvconnect_nvme.foreign import status_of, translate
from kvconnect_nvme.get import load
from kvconnect_nvme.known import Known, KnownRegistration
from kvconnect_nvme.locate import locate
from kvconnect_nvme.maintenance import CompactReport, VerifyReport
from kvconnect_nvme.opening import Home, close_core, find_home, open_core
from kvconnect_nvme.options import NvmeOptions, parse
from kvconnect_nvme.put import store

MIN_RUN_BYTES = 256
"""Below this the connector's repacking is faster than gathering here: three times at 128 B."""


class NvmeBackend(StoreFront[Core]):
    """A store on a directory or block device.

    Invariants: a batch is settled and its memory quiet before `done()`; nothing of the caller
    is touched after `close` has returned; a process that was forked off cannot use it.
    """

    catalog: ClassVar[Catalog[Core]] = catalog

    def __init__(self, home: Home, options: NvmeOptions) -> None:
        """Open; see `kvconnect_nvme.open_backend` for what may be raised."""
        self.name = "nvme"
        self.options, self._home = options, home
        self.capabilities = Capabilities(
            min_run_bytes=MIN_RUN_BYTES, durable=options.durability != "none"
        )
        self._pid = os.getpid()
        self._closed = self._released = False
        self._under_way: list[Job] = []
        self._closing = threading.Lock()
        self._maintaining = 0
        self._maintained = threading.Condition()
        self._registrations = Registrations(self.name, lambda: self._under_way, options.timeout)
        self.core = open_core(home, options)
        self._known = Known(self.core.engine.register)
        report.announce(self.core, home.data, device=home.device)
        # Half of them may be waiting for the disk's sync while the others move bytes.
        workers = max(2, options.io_threads)
        self._jobs = ThreadPoolExecutor(workers, thread_name_prefix="kvconnect-nvme-job")

    def register(self, regions: Sequence[Region]) -> Registration:
        """Register host memory; see `kvconnect.backend.Backend.register`."""
        self._check_open("register")
        for region in regions:
            if region.device not in self.capabilities.devices:
                raise RegistrationError(
                    f"nvme: {region} is on device {region.device!r}; io={self.core.engine.name} "
                    f"moves host memory (cpu): stage through a host buffer"
                )
        self._known.add(regions)
        try:
            return KnownRegistration(self._registrations.add(regions), self._known)
        except BaseException:
            self._known.drop(regions)
            raise

    def submit(self, batch: Batch) -> Job:
        """Start a batch; see `kvconnect.backend.Backend.submit`."""
        self._check_open(batch.op.value)
        need_distinct(self.name, batch)
        with self._registrations.lock:
            self._check_open(batch.op.value)
            self._registrations.check(batch)
            regions, options = self._registrations.regions, self.options
            alignment = self.core.slabs.alignment if self.core.engine.in_place else None
            job = Job(batch, regions, alignment, options.timeout)
            self._under_way = [one for one in self._under_way if not one.done()]
            self._under_way.append(job)
            self._jobs.submit(_run, self.core, job)
        return job

    def stats(self) -> dict[str, int | float | str]:
        """Return sizes in bytes and counts; those of moved bytes are this process's own."""
        self._check_open("stats")
        return report.stats(self.core)

    def locate(self, keys: Sequence[str]) -> list[Location | None]:
        """Return where objects lie and whether their bytes are right; reads all of them."""
        with self._maintenance("locate"):
            return locate(self.core, keys)

    def verify(self) -> VerifyReport:
        """Read every object, drop what is damaged, and give lost space back."""
        with self._maintenance("verify"):
            return maintenance.verify(self.core, self._home)

    def compact(self) -> CompactReport:
        """Move objects together and return empty space to the file system."""
        with self._maintenance("compact"):
            return maintenance.compact(self.core, self._home)

    def close(self) -> None:
        """Cancel what is queued, wait for what is moving, give back what is held.

        Raises `TransferTimeoutError` if a transfer does not end, or `verify` or `compact` in
        another thread; close again later.
        """
        if os.getpid() != self._pid:
            # A forked child has nothing to give back: it all is its parent's. Not even a lock
            # is touched, as a thread that is not here may have held it.
            return
        with self._registrations.lock:
            self._closed = True
            under_way = list(self._under_way)
        if self._released:
            return
        for job in under_way:
            job.cancel()
        self._registrations.drain()
        self._await_maintenance()
        with self._closing:
            if not self._released:
                self._released = True
                self._jobs.shutdown(wait=True)
                close_core(self.core, self._home)

    @contextmanager
    def _maintenance(self, operation: str) -> Iterator[None]:
        # It reads and writes by descriptor: closed beneath it, the number may be another file's.
        with self._maintained:
            self._check_open(operation)
            self._maintaining += 1
        try:
            yield
        finally:
            with self._maintained:
                self._maintaining -= 1
                self._maintained.notify_all()

    def _await_maintenance(self) -> None:
        with self._maintained:
            if not self._maintained.wait_for(lambda: not self._maintaining, self.options.timeout):
                raise TransferTimeoutError(
                    f"nvme: verify or compact of {self._home.data} still runs after "
                    f"{self.options.timeout} s; close again later"
                )

    def _check_open(self, operation: str) -> None:
        check_process(self._pid, f"the store at {self._home.data}")
        if self._closed:
            raise ClosedError(f"nvme: {operation} after close; open {self._home.data} again")

    def __repr__(self) -> str:
        if self._closed:
            return f"NvmeBackend({self._home.data}, closed)"
        return report.describe(self.core, self._home.data)


def _run(core: Core, job: Job) -> None:
    # Not a method: a thread that holds the backend would keep it from being collected.
    move = store if job.batch.op is Op.STORE else load
    try:
        stop = job.stop_reason()
        if stop is None:
            move(core, job)
        else:
            job.settle_rest(stop, "")
    except Exception as error:  # noqa: BLE001 - it has nobody to be raised to
        ours = translate(error, f"{job.batch.op.value} of {len(job.batch)} keys")
        job.settle_rest(status_of(ours), str(ours), dirty=True)
    finally:
        job.finish()


def open_store(location: str, options: Mapping[str, str]) -> NvmeBackend:
    """Open; see `kvconnect_nvme.open_backend`."""
    parsed = parse(options)
    return NvmeBackend(find_home(location, parsed), parsed)


_: type[Backend] = NvmeBackend
