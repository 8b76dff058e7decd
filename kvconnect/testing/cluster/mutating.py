"""Puts bugs in on purpose and looks whether the cluster suite notices, each by the right rule.

    scripts/mutate-cluster [--list] [--only NAME ...] [--trusting]

Works on a copy of the checkout. Every check is run once without a bug first, because one that
fails anyway shows nothing; ``--trusting`` leaves that out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from typer import echo

from kvconnect.errors import ConfigError
from kvconnect.testing.cluster.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[3]
"""The checkout. An installed package has no tests to run."""

_COPIED = ("kvconnect", "backends", "tests", "pyproject.toml")
_SECONDS = 400.0
_SHOWN = 110
_LAST_WORDS = 4000


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a check ended; `line` is the one that shows it."""

    failed: bool
    output: str
    seconds: float

    def shows(self, pattern: str) -> str:
        """Return the line of the output that matches; empty where none does."""
        lines = (line.strip() for line in self.output.splitlines())
        return next((line for line in lines if re.search(pattern, line)), "")


@contextlib.contextmanager
def copied(root: Path) -> Iterator[Path]:
    """Copy what the checks need of a checkout; `ConfigError` where it is none."""
    if not (root / "tests" / "cluster").is_dir():
        raise ConfigError(f"{root} is no checkout of kvconnect: mutations need its tests")
    with tempfile.TemporaryDirectory(prefix="kvc-mutant-", dir="/var/tmp") as folder:
        copy = Path(folder)
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        for name in _COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, copy / name, ignore=ignored)
            else:
                shutil.copy(root / name, copy / name)
        yield copy


def check(folder: Path, arguments: Sequence[str]) -> Verdict:
    """Run a check in a copy, with the copy's code, at most some minutes."""
    path = os.pathsep.join(str(folder / name) for name in ("", "backends"))
    started = time.monotonic()
    with subprocess.Popen(  # noqa: S603 - our own words
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output = f"{process.communicate()[0]}\nnot over after {_SECONDS:g} s"
    return Verdict(process.returncode != 0, output, time.monotonic() - started)


def stale(mutations: Sequence[Mutation], root: Path = ROOT) -> list[str]:
    """Say which edits do not fit the code any more."""
    words = []
    for mutation in mutations:
        for edit in mutation.edits:
            try:
                edit.edited(root)
            except ConfigError as error:
                words.append(f"{mutation.name}: {error}")
    return words


def caught(mutation: Mutation, root: Path = ROOT) -> Verdict:
    """Run a mutation's check on a copy that has the bug."""
    with copied(root) as copy:
        for edit in mutation.edits:
            edit.apply(copy)
        return check(copy, mutation.check)


def sound(mutations: Sequence[Mutation], root: Path = ROOT) -> dict[tuple[str, ...], Verdict]:
    """Run every check once on a copy without a bug."""
    with copied(root) as copy:
        return {words: check(copy, words) for words in dict.fromkeys(m.check for m in mutations)}


def main() -> int:
    """Run them and print a table; 0 where every bug was noticed by its rule."""
    options = _options()
    wanted = [m for m in MUTATIONS if not options.only or m.name in options.only]
    if options.list:
        for mutation in wanted:
            echo(f"{mutation.name:<26} {mutation.about}\n{'':<26} {' '.join(mutation.check)}")
        return 0
    if words := stale(wanted):
        echo("\n".join(words))
        return 2
    good = {} if options.trusting else sound(wanted)
    missed = [m.name for m in wanted if not _show(m, good.get(m.check))]
    echo(f"{len(wanted) - len(missed)} of {len(wanted)} bugs were noticed")
    return int(bool(missed))


def _show(mutation: Mutation, without: Verdict | None) -> bool:
    """Run one mutation, given its check without a bug; print its row, tell whether it is caught."""
    if without is not None and without.failed:
        echo(f"{mutation.name:<26} fails without it: {' '.join(mutation.check)}")
        echo(without.output[-_LAST_WORDS:])
        return False
    verdict = caught(mutation)
    line = verdict.shows(mutation.shows) if verdict.failed else ""
    word = "caught" if line else "MISSED"
    echo(f"{mutation.name:<26} {word} {verdict.seconds:5.1f} s  {line[:_SHOWN]}")
    if not line:
        echo(verdict.output[-_LAST_WORDS:])
    return bool(line)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="mutate-cluster")
    names = [mutation.name for mutation in MUTATIONS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="these alone")
    parser.add_argument("--list", action="store_true", help="say what there is, run nothing")
    parser.add_argument("--trusting", action="store_true", help="do not run checks without a bug")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
