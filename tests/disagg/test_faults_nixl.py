"""Faults with real processes over NIXL."""

from tests.disagg.fault_cases import ProcessFaults
from tests.disagg.fault_talk import TalkFaults


class TestNixl(ProcessFaults, TalkFaults):
    transport = "nixl"
    kept = 4
