"""Loading: fetch object and trailer in one request into a slot, prove it, copy it to its page.

One request of the object into a slot, not one for the page and one for the trailer: a second
request costs the server and the connection as much as the first, the copy a tenth of that, and
only bytes that passed their checksum ever reach a page.
"""

from __future__ import annotations

from kvconnect.backend import Op, Status
from kvconnect_nixl.s3 import seal
from kvconnect_nixl.s3.control import Seen
from kvconnect_nixl.s3.moving import Moving, Task
from kvconnect_nixl.s3.slots import Slot


class Loading(Moving):
    """Loads a batch."""

    op = Op.LOAD

    def length(self, task: Task) -> int:
        """Ask for more than there should be, to see an object that is too long."""
        return task.size + seal.NBYTES + seal.MARK

    def prepare(self, task: Task, slot: Slot) -> None:
        """Clear the place of the trailer: an earlier load may have left a right one there."""
        task.mark = seal.clear_tail(slot.view[task.size :])

    def landed(self, task: Task, slot: Slot) -> bool:
        """Prove what came; what is not an object of exactly this size asks for a look."""
        end = task.size + seal.NBYTES
        if bytes(slot.view[end : end + seal.MARK]) != task.mark:
            return False
        tail = bytes(slot.view[task.size : end])
        found = seal.unpack(tail)
        if found is None:
            return False
        status, cause = seal.verdict(end, tail, task.key, task.size, seal.now_ms())
        if (
            status is Status.OK
            and seal.checksum(task.key, slot.view[: task.size]) != found.checksum
        ):
            status, cause = Status.CHECKSUM, f"{task.size} B are not what was stored"
        if status is Status.OK and self.job.stop_reason() is Status.TIMEOUT:
            status, cause = Status.TIMEOUT, "it came after the deadline"
        if status is Status.OK:
            self.job.memory.scatter(task.index, slot.address, slot.region)
            self.core.count("load.objects")
            self.core.count("load.bytes", task.size)
        self.job.settle(task.index, status, cause)
        return True

    def looked(self, task: Task, seen: Seen) -> bool:
        """Name the reason; an object that looks right is fetched again."""
        now = seal.now_ms()
        status, cause = seal.verdict(seen.size, seen.tail, task.key, task.size, now)
        if status is Status.OK:
            return False
        self.job.settle(task.index, status, cause)
        return True
