"""Faults of the control channel: wrong keys, noise, and ranks that name what is not theirs."""

import socket
import time

import pytest

from kvconnect.disagg import keys as key_files
from tests.disagg.fault_base import EVERYTHING, PAINT, FaultBase
from tests.disagg.ranks import RankError


class TalkFaults(FaultBase):
    """Each in `rounds` rounds beside a pair of ranks whose requests must go on."""

    def pair(self):
        keys = key_files.generate()
        return [keys.public, keys.secret]

    def test_wrong_keys_reach_nothing_and_disturb_nobody(self):
        ours = self.pair()
        with self.prefill(keys=ours) as source, self.decode(keys=ours) as target:
            self.meet(source, target)
            self.good(source, target, "warm")
            with self.decode("stranger", keys=self.pair()) as stranger:
                baseline = source.counts()
                for number in range(self.rounds):
                    began = time.monotonic()
                    with pytest.raises(RankError, match="no prefill rank answered"):
                        stranger.connect([source.address], 0.2)
                    assert time.monotonic() - began < 2.0
                    if number in {0, self.rounds - 1}:
                        self.good(source, target, f"good{number}")
            self.back_to(source, baseline)

    def test_noise_from_other_connections_leaves_nothing_behind(self):
        with self.prefill() as source, self.decode() as target:
            self.meet(source, target)
            self.good(source, target, "warm")
            baseline = source.counts()
            host, _, port = source.address.removeprefix("tcp://").rpartition(":")
            for number in range(self.rounds):
                with socket.create_connection((host, int(port)), 2) as connection:
                    connection.sendall(self.rng.randbytes(self.rng.randrange(1, 4000)))
                if number % 5 == 0:
                    self.good(source, target, f"good{number}")
            self.back_to(source, baseline)

    @pytest.mark.parametrize("side", ["prefill", "decode"])
    @pytest.mark.parametrize("kind", ["garbage", "changed"])
    def test_frames_that_cannot_be_change_nothing(self, kind, side):
        """From a rank that holds the keys, in the middle of its own request."""
        keys = self.pair()
        with self.prefill(keys=keys) as source, self.decode(keys=keys) as target:
            liar, hearer = (source, target) if side == "prefill" else (target, source)
            self.meet(source, target)
            self.good(source, target, "warm")
            baseline = hearer.counts()
            for number in range(self.rounds):
                target.paint(self.target, PAINT)
                started = self.middle(source)
                self.begin(source, target, f"r{number}")
                started()
                liar.shout(kind, number)
                source.slow(None)
                self.arrives(source, target, f"r{number}")
            # Of changed frames some are messages still, about requests that never were.
            assert hearer.counters().get("garbage", 0) > self.rounds
            assert not hearer.counters().get("errors")
            self.back_to(hearer, baseline)

    def test_oversized_frames_end_no_request_of_others(self):
        keys = self.pair()
        with (
            self.prefill(keys=keys) as source,
            self.decode(keys=keys) as target,
            self.decode("d2", keys=keys, fleet="another") as liar,
        ):
            self.meet(source, liar)
            self.meet(source, target)
            self.good(source, target, "warm")
            baseline = source.counts()
            for number in range(self.rounds):
                target.paint(self.target, PAINT)
                started = self.middle(source)
                self.begin(source, target, f"r{number}")
                started()
                liar.shout("oversized", number)
                source.slow(None)
                self.arrives(source, target, f"r{number}")
            self.back_to(source, baseline)

    def test_oversized_frames_of_the_sender_leave_a_definite_outcome(self):
        """They break the connection, with whatever else was on its way; it is made anew."""
        patience = {"peer_timeout": self.silence}
        with self.prefill(**patience) as source, self.decode(**patience) as target:
            self.meet(source, target)
            self.good(source, target, "warm")
            baseline = target.counts()
            for number in range(self.rounds // 4):
                target.paint(self.target, PAINT)
                started = self.middle(source)
                self.begin(source, target, f"r{number}", seconds=2.0)
                started()
                source.shout("oversized", number)
                source.slow(None)
                state, reason = self.ends(target, f"r{number}")
                self.ends(source, f"r{number}")
                self.meet(source, target)
                self.began = time.monotonic()
                if state == "failed":
                    self.pages_come_back(target, f"r{number}")
                    assert target.painted(EVERYTHING, PAINT), reason
                else:
                    assert target.holds(self.target, 1, PAINT)
                self.rests(source, f"r{number}")
                self.good(source, target, f"good{number}")
            self.back_to(target, baseline)

    @pytest.mark.parametrize("kind", ["grant", "staging", "pool"])
    def test_memory_that_was_not_granted_is_refused(self, kind):
        with (
            self.prefill() as source,
            self.decode() as liar,
            self.decode("honest", fleet="honest") as target,
        ):
            self.meet(source, target)
            self.meet(source, liar)
            self.good(source, target, "warm")
            baseline = source.counts()
            for number in range(self.rounds):
                refused = source.counters().get("refused", 0)
                liar.lie(kind, number)
                if kind == "grant":
                    wait_for(lambda r=refused: source.counters().get("refused", 0) == r + 1)
            self.good(source, target, "after")
            self.back_to(source, baseline)

    @pytest.mark.parametrize("kind", ["back", "staged"])
    def test_slots_that_were_not_lent_are_refused(self, kind):
        with self.prefill() as liar, self.decode() as target:
            self.meet(liar, target)
            self.good(liar, target, "warm")
            baseline = target.counts()
            for number in range(self.rounds):
                liar.lie(kind, number)
            wait_for(lambda: target.counters().get("refused", 0) == self.rounds)
            self.good(liar, target, "after")
            self.back_to(target, baseline)


def wait_for(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
