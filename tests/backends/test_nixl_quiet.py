"""The real NIXL POSIX: when a transfer has failed, nothing of it is under way any more.

All that follows a failure rests on this: memory that is given back, and system calls that move
the same bytes. Versions of NIXL in which the first error ended a transfer at once are known.
"""

import numpy as np
import pytest

from kvconnect.backend import Op
from kvconnect.errors import BackendError
from kvconnect_nixl.agent import Agent
from kvconnect_nixl.rows import device_ids, file_name, plain
from kvconnect_nvme.bounce import address_of, aligned

pytest.importorskip("nixl_cu12")

MIB, COUNT = 1 << 20, 48


@pytest.mark.parametrize("api", ["aio", "uring"])
@pytest.mark.parametrize("bad", [0, COUNT // 2])
def test_after_a_failure_no_byte_lands(tmp_path, api, bad):
    path = tmp_path / "file"
    with path.open("wb") as file:
        for number in range(COUNT):
            file.write(bytes([1 + number]) * MIB)
    memory, other = aligned(COUNT * MIB), aligned(COUNT * MIB)
    bytes_of = np.frombuffer(memory, dtype=np.uint8)
    offsets = np.arange(COUNT, dtype=np.uint64) * np.uint64(MIB)
    wrong = offsets.copy()
    wrong[bad] = COUNT * MIB  # behind the end of the file
    with Agent({"POSIX": {f"use_{api}": "true"}}) as agent:
        device = device_ids(1)
        for one in (memory, other):
            agent.register("POSIX", "DRAM", plain(address_of(one), COUNT * MIB))
        size = 2 * COUNT * MIB
        agent.register("POSIX", "FILE", plain(0, size, device), [file_name(path, direct=True)])

        def read(into, at):
            rows = plain(offsets + np.uint64(address_of(into)), MIB)
            return agent.submit("POSIX", Op.LOAD, ("DRAM", rows), ("FILE", plain(at, MIB, device)))

        good, failing = read(other, offsets), read(memory, wrong)
        with pytest.raises(BackendError, match="plugin failed"):
            failing.wait(30)
        bytes_of[:] = 0xEE  # handed out again
        good.wait(30)
        # Polled further: what was still queued would be submitted by this.
        read(other, offsets).wait(30)
        assert (bytes_of == 0xEE).all(), "bytes landed after the failure was reported"
        assert (np.frombuffer(other, dtype=np.uint8)[::MIB] == np.arange(1, COUNT + 1)).all()
