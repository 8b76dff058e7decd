"""Bugs to put in on purpose: what each changes, and what must then fail, and how it must say so.

A suite that cannot fail shows nothing. Each of these breaks one rule that the store, the
connector or the endpoints keep; `kvconnect.testing.cluster.mutating` puts them in, one at a time,
and looks whether the right invariant notices. Old text that is not found exactly once is an error:
the code has moved on, and its mutation has to follow.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from kvconnect.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Edit:
    """One change: `old` occurs exactly once in `file`, which is relative to the checkout."""

    file: str
    old: str
    new: str

    def edited(self, root: Path) -> str:
        """Return the file as changed; `ConfigError` where `old` is not there exactly once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if (count := text.count(self.old)) != 1:
            raise ConfigError(f"{self.file} has {count} times, not once: {self.old!r}")
        return text.replace(self.old, self.new)

    def apply(self, root: Path) -> None:
        """Make the change below `root`."""
        text = self.edited(root)
        (root / self.file).write_text(text, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Mutation:
    """A bug: its edits, the check that must fail, and a pattern that its output must have.

    `check` is what follows ``python -m``. Without the bug it passes.
    """

    name: str
    about: str
    edits: tuple[Edit, ...]
    check: tuple[str, ...]
    shows: str


def _test(file: str, which: str) -> tuple[str, ...]:
    """Return the check that runs those tests of a file whose names match `which`."""
    run = ("pytest", "-q", "-p", "no:cacheprovider", "-x", "--tb=short")
    return (*run, "-k", which, f"tests/cluster/{file}")


def _scenario(name: str, options: str = "") -> tuple[str, ...]:
    """Return the check that runs a scenario; its report goes where the checks run."""
    run = ("kvconnect.cli.main", "cluster", "run", name, "--out", "mutated")
    return (*run, *shlex.split(options))


MUTATIONS = (
    Mutation(
        "pd-checksum-skipped",
        "What arrived is not compared with what was sent.",
        (
            Edit(
                "kvconnect/disagg/arrivals.py",
                "if found != message.checksum:",
                "if found == b'':",
            ),
        ),
        _test("test_pd_worker.py", "a_byte_that_changed_on_its_way and mooncake"),
        r"assert \(\(.*\), \(\d+,\), \{\}\) == \(\(\), \(\), \{'CHECKSUM': 11\}\)",
    ),
    Mutation(
        "pd-quarantine-dropped",
        "Pages of a failed request are used again while the sender may still write to them.",
        (
            Edit(
                "kvconnect/disagg/requests.py",
                "return self._quiet.wait(timeout)",
                "return self._ended.wait(timeout)",
            ),
        ),
        _test("test_pd_rules.py", "late_bytes and mooncake"),
        r"assert \(\d.*\) == \(\)",
    ),
    Mutation(
        "pd-generation-ignored",
        "A rank that was started again is taken for the one that was there before.",
        (
            Edit(
                "kvconnect/disagg/endpoint.py",
                "self.generation = transport, transport.generation",
                "self.generation = transport, options.name.encode().ljust(16)[:16].hex()",
            ),
        ),
        _test("test_pd_rules.py", "not_taken and decode0 and mooncake"),
        r"assert \(\) == \(3, 4, 5,",
    ),
    Mutation(
        "pd-wrong-heads",
        "Heads of the second rank land where those of the first belong.",
        (
            Edit(
                "kvconnect/disagg/pair_plan.py",
                "starts = [part.heads.start - s.placement.heads.start for s in (source, target)]",
                "starts = [0, 0]",
            ),
        ),
        _scenario("pd-mooncake"),
        # Both ranks write to one place: the later one's bytes are wrong, or fail the other's sum.
        "FAILED (bytes|damage)",
    ),
    Mutation(
        "nvme-checksum-skipped",
        "What is read from the disk is not compared with its checksum.",
        (Edit("backends/kvconnect_nvme/get.py", "if index in work.bad:", "if index in ():"),),
        _test("test_l3_rules.py", "a_bit_that_changed"),
        r"assert \(\(5,\), \{\}\) == \(\(\), \{'CHECKSUM': 1\}\)",
    ),
    Mutation(
        "nvme-published-before-sync",
        "Objects are published and acknowledged while their bytes are not on the disk yet.",
        (
            Edit(
                "backends/kvconnect_nvme/put.py",
                "core.slabs.sync(g.slab for g in groups)",
                "pass",
            ),
        ),
        _test("test_l3_rules.py", "published"),
        r"assert \(\(.*\{'CHECKSUM': \d+\}\) == \(\(3, ",
    ),
    Mutation(
        "quarantine-dropped",
        "Pages of a load that timed out are used again while the store may still write to them.",
        (Edit("kvconnect/mover.py", "self._late.append(flight)", "del flight"),),
        _scenario("link-cut"),
        # Late bytes show in a page that lies waiting, or spoil what the next load puts there.
        "FAILED (reuse|damage)",
    ),
    Mutation(
        "nvme-index-unsynced",
        "A store is acknowledged before the index that names its objects is on the disk.",
        (
            Edit(
                "backends/kvconnect_nvme/env.py",
                'sync=durability != "none", metasync=durability == "index"',
                "sync=False, metasync=False",
            ),
        ),
        _scenario("power-cut"),
        "FAILED durable",
    ),
    Mutation(
        "deadline-ignored",
        "A call waits for its store as long as that takes.",
        (
            Edit(
                "kvconnect/mover.py",
                "flight.transfer.wait(max(deadline - self.clock(), 0.0))",
                "flight.transfer.wait(60.0)",
            ),
        ),
        _scenario("link-cut"),
        "FAILED deadline",
    ),
    Mutation(
        "half-a-page-is-a-hit",
        "A page counts as a hit when any of its objects is there.",
        (Edit("kvconnect/outcome.py", "worst = rows.max(axis=1)", "worst = rows.min(axis=1)"),),
        _test("test_l3_rules.py", "half_a_page"),
        r"assert \(\(3,.*\{\}\) == \(\(\), \{'PARTIAL': 11\}\)",
    ),
    Mutation(
        "wrong-head-block",
        "Each object of a page holds the first heads of its rank.",
        (
            Edit(
                "kvconnect/objects.py",
                "narrow_heads(layout, start, start + cell.heads.extent)",
                "narrow_heads(layout, 0, cell.heads.extent)",
            ),
        ),
        _test("test_l3_rules.py", "half_a_page"),
        r"assert \(\(\), \(3,.*\{\}\) == \(\(3,",
    ),
)
"""All mutations, by the part that they break."""
