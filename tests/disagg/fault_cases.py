"""Faults of processes in mid-transfer: killed, stopped, started again, aborted."""

import time
from contextlib import closing

import pytest

from tests.disagg.fault_base import EVERYTHING, PAINT, STAGES, FaultBase

ENDED = "its process has ended", "another start", "the peer has", "the peer is gone", "failed ("
"""By the rank itself, or by whatever the transport noticed first."""


class ProcessFaults(FaultBase):
    """Each in `rounds` rounds; the side that lives is the same in all of them."""

    @pytest.mark.parametrize("stage", STAGES)
    def test_sigkill_of_prefill_and_restart_on_the_same_address(self, stage):
        with self.decode() as target:
            with self.prefill(stage=stage) as first:
                address = first.address
                self.meet(first, target)
                self.good(first, target, "warm")
                first.kill()
            baseline = self.alone(target)
            for number in range(self.rounds // 2):
                with self.prefill(stage=stage, address=address, seed=number) as source:
                    self.meet(source, target)
                    self.good(source, target, f"good{number}", number)
                    target.paint(self.target, PAINT)
                    started = self.middle(source)
                    self.begin(source, target, f"r{number}")
                    started()
                    source.kill()
                    self.fails(target, f"r{number}", *ENDED)
                    self.pages_come_back(target, f"r{number}")
                    assert target.painted(EVERYTHING, PAINT)
            self.back_to(target, baseline)
            assert target.quarantined() == []

    @pytest.mark.parametrize("stage", STAGES)
    def test_sigkill_of_decode(self, stage):
        with self.prefill(stage=stage) as source:
            baseline = None
            for number in range(self.rounds // 2):
                with self.decode(f"d{number}") as target:
                    self.meet(source, target)
                    self.good(source, target, f"good{number}")
                    started = self.middle(source)
                    self.begin(source, target, f"r{number}")
                    started()
                    target.kill()
                    self.fails(source, f"r{number}", *ENDED)
                    self.rests(source, f"r{number}")
                baseline = baseline or self.alone(source)
            self.back_to(source, baseline)

    def stopped_rounds(self, stage):
        """Yield both sides and a number while a transfer moves; then all must be well again."""
        patience = {"peer_timeout": self.silence}
        with self.prefill(stage=stage, **patience) as source, self.decode(**patience) as target:
            self.meet(source, target)
            self.good(source, target, "warm")
            baseline = source.counts(), target.counts()
            for number in range(self.rounds // 2):
                target.paint(self.target, PAINT)
                started = self.middle(source)
                self.begin(source, target, f"r{number}")
                started()
                yield source, target, number
                self.good(source, target, f"good{number}")
            self.back_to(source, baseline[0])
            self.back_to(target, baseline[1])

    @pytest.mark.parametrize("stage", STAGES)
    def test_sigstop_of_prefill_keeps_its_pages_out_of_use_until_it_goes_on(self, stage):
        with closing(self.stopped_rounds(stage)) as rounds:
            for source, target, number in rounds:
                source.freeze()
                self.fails(target, f"r{number}", f"silent for {self.silence} s")
                assert not target.quiet(f"r{number}", 0.1)
                assert target.quarantined() == self.target
                self.go_on(source)
                self.pages_come_back(target, f"r{number}")
                self.fails(source, f"r{number}", "gave up", "lost")
                self.rests(source, f"r{number}")
                assert target.painted(EVERYTHING, PAINT)
                self.meet(source, target)

    @pytest.mark.parametrize("stage", STAGES)
    def test_sigstop_of_decode(self, stage):
        with closing(self.stopped_rounds(stage)) as rounds:
            for source, target, number in rounds:
                target.freeze()
                state, reason = self.ends(source, f"r{number}")
                assert state == "failed" or stage == "never"
                self.while_stopped(source, f"r{number}", number)
                self.go_on(target)
                self.rests(source, f"r{number}")
                if state == "failed":
                    assert f"silent for {self.silence} s" in reason
                    self.fails(target, f"r{number}", "gave up", "lost")
                    self.pages_come_back(target, f"r{number}")
                    assert target.painted(EVERYTHING, PAINT)
                    self.meet(source, target)
                else:
                    # Everything was written while it stood still, so it may be counted in.
                    assert target.wait(f"r{number}", 10.0)[0] == "done"
                    assert target.holds(self.target, 1, PAINT)

    def while_stopped(self, source, name, number):
        """What holds on the prefill side while the decode process stands still."""
        self.rests(source, name)

    @pytest.mark.parametrize("way", ["push", "pull"])
    @pytest.mark.parametrize("side", ["prefill", "decode"])
    def test_abort_in_mid_transfer(self, side, way):
        with self.prefill(stage="never") as source, self.decode() as target:
            self.meet(source, target)
            self.good(source, target, "warm", way=way)
            baseline = source.counts(), target.counts()
            mover = source if way == "push" else target
            for number in range(self.rounds):
                target.paint(self.target, PAINT)
                started = self.middle(mover)
                self.begin(source, target, f"r{number}", way)
                started()
                (source if side == "prefill" else target).abort(f"r{number}")
                for rank in (target, source):
                    self.fails(rank, f"r{number}", "the user has left")
                self.pages_come_back(target, f"r{number}")
                self.rests(source, f"r{number}")
                assert target.painted(EVERYTHING, PAINT)
                if number % 5 == 0:
                    self.good(source, target, f"good{number}", way=way)
            self.back_to(source, baseline[0])
            self.back_to(target, baseline[1])

    def test_deadlines_about_when_it_is_over(self):
        """A deadline that passes close to the end gives one outcome or the other, no mixture."""
        with self.prefill(pace=0.0) as source, self.decode() as target:
            self.meet(source, target)
            self.good(source, target, "first")
            began = time.monotonic()
            self.begin(source, target, "warm")
            target.wait("warm", 15.0)
            usual = time.monotonic() - began
            self.arrives(source, target, "warm")
            states = set()
            for number in range(self.rounds * 2):
                target.paint(self.target, PAINT)
                name = f"r{number}"
                seconds = max(usual * self.rng.uniform(0.05, 2.0), 1e-3)
                self.begin(source, target, name, seconds=seconds)
                self.began = time.monotonic()
                state, reason = self.ends(target, name)
                states.add(state)
                if state == "done":
                    assert target.quiet(name, 1.0)
                    assert target.holds(self.target, 1, PAINT)
                else:
                    self.pages_come_back(target, name)
                self.ends(source, name)
                self.rests(source, name)
                assert state == "done" or target.painted(EVERYTHING, PAINT), reason
            assert states == {"done", "failed"}
