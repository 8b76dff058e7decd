"""Faults with real processes over shared memory."""

from tests.disagg.fault_cases import ProcessFaults
from tests.disagg.fault_talk import TalkFaults


class TestShm(ProcessFaults, TalkFaults):
    transport = "shm"
