"""Faults with real processes over Mooncake."""

import time
from typing import ClassVar

from tests.disagg.fault_cases import ProcessFaults
from tests.disagg.fault_talk import TalkFaults


class TestMooncake(ProcessFaults, TalkFaults):
    transport = "mooncake"
    pages = 12
    environment: ClassVar = {"MC_TCP_PROGRESS_TIMEOUT_SEC": "1"}
    quiet_seconds = 6.0
    kept = 4

    def while_stopped(self, source, name, number):
        """In one round the library gives up, with bytes in the sockets of who stands still."""
        if number == 0:
            time.sleep(2.5)
