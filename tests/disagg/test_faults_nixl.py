"""Faults with real processes over NIXL."""

from tests.disagg.fault_base import rounds
from tests.disagg.fault_cases import ProcessFaults
from tests.disagg.fault_talk import TalkFaults


class TestNixl(ProcessFaults, TalkFaults):
    transport = "nixl"
    rounds = rounds(8)
    kept = 4
