"""Runs the P/D demo: starts the ranks, brings them together, watches, compares."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live

from kvconnect.cli.pd_demo_fleet import Fleet
from kvconnect.cli.pd_demo_job import (
    KEYS,
    TOKEN,
    Addresses,
    Bye,
    Ended,
    Event,
    First,
    Go,
    Job,
    Listening,
    Ready,
    Role,
    Token,
)
from kvconnect.cli.pd_demo_report import show, transfers
from kvconnect.cli.pd_demo_state import State
from kvconnect.disagg import keys as key_files
from kvconnect.disagg.transports import known
from kvconnect.errors import ConfigError

SINGLE, DIRECTORY = "single 0", "directory 0"
ROLES: tuple[Role, Role] = ("prefill", "decode")


def run(job: Job, *, bootstrap: bool = False) -> int:
    """Run everything and print; return the exit code. `bootstrap`: with a directory of ranks."""
    check(job)
    until = time.monotonic() + job.timeout
    key_files.save(key_files.generate(), Path(job.scratch) / KEYS)
    console = Console()
    names = [f"{role} {number}" for role in ROLES for number in range(job.ranks(role))]
    with Fleet(job, until) as fleet:
        if bootstrap:
            fleet.job = job = msgspec.structs.replace(job, directory=_directory(fleet))
        state = State(job)
        for name in (*names, SINGLE):
            fleet.start(name)
        with Live(transfers(state), console=console) as live:
            for name, event in fleet.events([*names, DIRECTORY] if bootstrap else names):
                state.take(name, event)
                _answer(fleet, state, names, event)
                live.update(transfers(state))
        console.print()
        # Afterwards, so that the sides have the machine to themselves.
        fleet.tell(SINGLE, Go())
        for name, event in fleet.events([SINGLE]):
            state.take(name, event)
    problems = state.problems()
    show(console, state, problems)
    return 1 if problems else 0


def _directory(fleet: Fleet) -> str:
    """Start the directory and return its URL."""
    token = Path(fleet.job.scratch) / TOKEN
    token.touch(0o600)
    token.write_text(secrets.token_hex())
    fleet.start(DIRECTORY)
    _, event = next(fleet.events([DIRECTORY]))
    assert isinstance(event, Listening)
    return event.address


def _answer(fleet: Fleet, state: State, names: list[str], event: Event) -> None:
    """Tell ranks what others had to say first."""
    decodes = [name for name in names if name.startswith("decode")]
    if isinstance(event, Listening) and len(state.addresses) == state.job.ranks("prefill"):
        for name in decodes if not state.job.directory else ():
            fleet.tell(name, Addresses(sorted(state.addresses.values())))
    elif isinstance(event, Ready) and len(state.ready) == len(names):
        for name in names:
            fleet.tell(name, Go())
    elif isinstance(event, Ended) and len(state.ended) == len(names):
        for name in [*names, DIRECTORY] if state.job.directory else names:
            fleet.tell(name, Bye())
    elif isinstance(event, Token) and state.first is event:
        for name in decodes:
            fleet.tell(name, First(event.value))


def check(job: Job) -> None:
    """Refuse at once what could only fail later; `ConfigError` names the option."""
    job.config()
    if job.transport not in known():
        raise ConfigError(f"--transport {job.transport!r} is not one of: {', '.join(known())}")
    if not Path(job.text_file).is_file():
        raise ConfigError(f"--text {job.text_file}: no such file")
    if not job.prompt():
        raise ConfigError(f"--text {job.text_file} is empty")
    if job.pp_prefill > job.layers:
        raise ConfigError(f"--pp-prefill {job.pp_prefill} is more than --layers {job.layers}")
    for role in ROLES:
        for number in range(job.ranks(role)):
            job.placement(role, number)
