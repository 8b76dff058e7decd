"""Runs the demo's two processes one after the other, shows their progress and the result."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvconnect.cli.demo_job import Job, Read, Written, problems
from kvconnect.cli.demo_report import show
from kvconnect.errors import ConfigError, KVConnectError

T = TypeVar("T")

QUIET_SECONDS = 1.0
"""Progress of what takes less than this is not shown."""


def run(job: Job, scratch: Path, directory: Path | None) -> int:
    """Write, read in a new process, print; return the exit code."""
    check(job)
    console = Console()
    store = directory or scratch / "store"
    job = msgspec.structs.replace(job, url=store_url(store, job, kept=directory is not None))
    written = _worker("write", job, scratch, Written, console)
    if job.tamper == "store":
        console.print(f"flipped one bit of {flip(store, written.sample)}")
    read = _worker("read", job, scratch, Read, console)
    found = problems(job, written, read)
    show(console, job, written, read, found)
    return 1 if found else 0


def check(job: Job) -> None:
    """Refuse at once what could only fail later; `ConfigError` names the option."""
    job.config()
    if not Path(job.text_file).is_file():
        raise ConfigError(f"--text {job.text_file}: no such file")
    tokens = len(job.prompt())
    if not job.pages(tokens):
        raise ConfigError(
            f"--text has {tokens} bytes: more than one page of {job.page_size} tokens is needed; "
            f"give a longer text, a higher --limit or a smaller --page-size"
        )
    if job.tamper not in {"", "store", "memory"}:
        raise ConfigError(f"--tamper {job.tamper!r} is not 'store' or 'memory'")


def default_text() -> str:
    """Return the README: of the checkout, or as the installed package carries it."""
    readme = Path(__file__).resolve().parents[2] / "README.md"
    if readme.is_file():
        return readme.read_text(encoding="utf-8")
    return str(metadata.metadata("kvconnect").json.get("description", ""))


def store_url(directory: Path, job: Job, *, kept: bool) -> str:
    """Return the URL of the demo's store: small if temporary, at least 1 GiB if it is kept."""
    c = job.config()
    pages = job.pages(len(job.prompt()))
    row = c.kv_heads * (c.head_dim + c.v_head_dim) * 4
    objects = pages * c.kv_heads  # at most, each rounded up to a block
    need = pages * job.page_size * c.layers * row + objects * 4096
    capacity = max(2 * need, 1 << 30 if kept else 1 << 26)
    return f"nvme://{quote(str(directory.resolve()))}?capacity={capacity // 4096 * 4096}"


def _worker(side: str, job: Job, scratch: Path, kind: type[T], console: Console) -> T:
    """Run one side in a process of its own and return its report; `KVConnectError` if it failed."""
    job_file, report = scratch / "job.json", scratch / f"{side}.json"
    job_file.write_bytes(msgspec.json.encode(job))
    command = [sys.executable, "-m", "kvconnect.cli.demo_worker", side, str(job_file), str(report)]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(  # noqa: S603 - our own module
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert process.stdout is not None
    with process, _bar(console) as bar:
        started, task = time.monotonic(), None
        for line in process.stdout:
            words, done, total = msgspec.json.decode(line, type=tuple[str, int, int])
            if time.monotonic() - started > QUIET_SECONDS:
                task = _advance(bar, task, words, done, total)
    if process.returncode:
        raise KVConnectError(f"the {side} process ended with code {process.returncode}")
    return msgspec.json.decode(report.read_bytes(), type=kind)


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _advance(bar: Progress, task: TaskID | None, words: str, done: int, total: int) -> TaskID:
    if task is None or bar.tasks[-1].description != words:
        task = bar.add_task(words, total=total)
    bar.update(task, completed=done)
    return task


def flip(store: Path, row: bytes) -> str:
    """Flip one bit of the stored bytes `row`, wherever the store keeps them; say where."""
    for path in sorted(p for p in store.rglob("*") if p.is_file() and p.stat().st_size):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            at = data.find(row)
            if at >= 0:
                data[at] ^= 1
                data.flush()
                return f"{path.name} at byte {at}"
    raise ConfigError(f"--tamper store: the stored row was not found under {store}")
