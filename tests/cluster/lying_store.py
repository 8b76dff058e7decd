"""A store that lies, for workers that must find it out: an nvme store with one vice.

Opened as ``lying:///folder?vice=…``; what each vice is says the table at the end.
"""

import ctypes
import os
import sys
import threading

import numpy as np

from kvconnect.backend import Op, Outcome, Status
from kvconnect.registry import open_url
from kvconnect.wrappers.base import Wrapper
from kvconnect.wrappers.broken import Lie
from kvconnect.wrappers.faulty import Faulty

LATE_SECONDS = 0.4


def environment(folder):
    """Make the scheme known to programs that are started with what this returns."""
    info = folder / "lying-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lying\nVersion: 1.0\n")
    entry = "[kvconnect.backends]\nlying = tests.cluster.lying_store:open_backend\n"
    (info / "entry_points.txt").write_text(entry)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *(p for p in sys.path if p)])}


def flip(batch, index=0):
    """Change one bit of the batch's memory, at the end of its run `index`."""
    at = int(batch.address[index]) + int(batch.nbytes[index]) - 1
    byte = ctypes.c_uint8.from_address(at)
    byte.value ^= 1


class Ended:
    """A transfer that is over, all well."""

    status, over = Status.OK, True

    def __init__(self, batch):
        self._batch = batch

    def done(self):
        return self.over

    def wait(self, timeout=None):
        count = len(self._batch)
        status = np.full(count, self.status, np.uint8)
        dirty = np.full(count, not self.over) if self._batch.op is Op.LOAD else None
        return Outcome(status, int(self._batch.nbytes.sum()) if self.over else 0, {}, dirty)

    def cancel(self):
        pass


class Stuck(Ended):
    """A transfer that never ends."""

    status, over = Status.TIMEOUT, False

    def wait(self, timeout=None):
        threading.Event().wait(timeout)
        return super().wait()


class Flipping(Wrapper):
    """Loads come with one bit changed."""

    def submit(self, batch):
        transfer = self.inner.submit(batch)
        if batch.op is Op.LOAD:
            transfer.wait(10)
            flip(batch, len(batch.address) - 1)
        return transfer


class WritesLate(Wrapper):
    """Loads touch their memory once more when they have long been done."""

    def submit(self, batch):
        transfer = self.inner.submit(batch)
        if batch.op is Op.LOAD:
            threading.Timer(LATE_SECONDS, flip, [batch]).start()
        return transfer


class ReadsLate(Wrapper):
    """Stores are done at once, and only read their memory a little later."""

    def submit(self, batch):
        if batch.op is Op.LOAD:
            return self.inner.submit(batch)
        threading.Timer(LATE_SECONDS, self.inner.submit, [batch]).start()
        return Ended(batch)


class Forgetting(Faulty):
    """Stores are acknowledged, and nothing is stored."""

    def submit(self, batch):
        if batch.op is Op.STORE:
            self.script(Op.STORE, Lie.FORGOTTEN)
        return super().submit(batch)


class Hanging(Wrapper):
    """Loads never end."""

    def submit(self, batch):
        return Stuck(batch) if batch.op is Op.LOAD else self.inner.submit(batch)


class Raising(Wrapper):
    """Asking raises what no store may raise."""

    def exists(self, keys, nbytes):
        raise ValueError("no store may raise this")


VICES = {
    "flip": Flipping,
    "writes-late": WritesLate,
    "reads-late": ReadsLate,
    "forgets": Forgetting,
    "hangs": Hanging,
    "raises": Raising,
}


def open_backend(location, options):
    return VICES[options["vice"]](open_url(f"nvme://{location}?capacity=8MiB"))
