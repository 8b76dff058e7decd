"""One chunk on one of the threads: move it, settle it, keep what is not quiet."""

from __future__ import annotations

from kvconnect.backend import Op, Status
from kvconnect.errors import BackendError
from kvconnect_mooncake.core import Core
from kvconnect_mooncake.get import load
from kvconnect_mooncake.hold import quarantine
from kvconnect_mooncake.job import Chunk
from kvconnect_mooncake.put import store


def run(core: Core, chunk: Chunk) -> None:
    """Move a chunk. Never raises: what went wrong is in the statuses."""
    job, hold = chunk.job, None
    try:
        stop = job.stop_reason()
        if stop is not None:
            chunk.settle_rest(stop, "")
        else:
            hold = (store if job.batch.op is Op.STORE else load)(core, chunk)
    except BackendError as error:
        chunk.settle_rest(Status.BACKEND_ERROR, str(error), dirty=True)
    except Exception as error:  # noqa: BLE001 - it has nobody to be raised to
        chunk.settle_rest(Status.BACKEND_ERROR, f"mooncake: {error!r}", dirty=True)
    finally:
        if hold is None:
            job.let_go()
        else:
            quarantine(core, chunk, hold)
        job.answered()
