"""A `mooncake_master` of this process's own, for a store that nobody else started.

It runs under a shell that reads from us: when this process ends, killed or not, the shell
reads the end and stops the master by its id.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvconnect.backend import Closing
from kvconnect.errors import ConfigError, UnavailableError
from kvconnect_mooncake.library import master_binary
from kvconnect_mooncake.options import MooncakeOptions

log = logging.getLogger("kvconnect.mooncake")

START_SECONDS = 15.0
STOP_SECONDS = 10.0
_SHELL = '"$@" </dev/null & echo $!; read -r _; kill $! 2>/dev/null; wait $!'


class MasterProcess(Closing):
    """A master on loopback with free ports; its log stays in `folder`.

    Invariant: it does not outlive this process.
    """

    def __init__(
        self, folder: str | None, *, lease: float, ssd: bool = False, flags: tuple[str, ...] = ()
    ) -> None:
        """Start it and wait until it answers; `UnavailableError` with its last words if not.

        `folder`: where the log goes, a temporary directory if None; `lease` in seconds.
        """
        self.folder = _folder(folder)
        self.log = self.folder / "mooncake_master.log"
        port, admin = _free_ports(2)
        self.address, self.admin = f"127.0.0.1:{port}", f"127.0.0.1:{admin}"
        command = [
            str(master_binary()),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={admin}",
            f"--default_kv_lease_ttl={round(lease * 1000)}",
            *(["--enable_offload=true"] if ssd else []),
            "--logtostderr",
            *flags,
        ]
        with self.log.open("ab") as output:
            self._shell = subprocess.Popen(  # noqa: S603 - the library's own program
                ["/bin/sh", "-c", _SHELL, "mooncake_master", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
            )
        assert self._shell.stdout is not None
        self.pid = int(self._shell.stdout.readline())
        try:
            self._await(port)
        except BaseException:
            self.close()
            raise
        log.info("mooncake: started a master at %s, log %s", self.address, self.log)

    def known_to(self, options: MooncakeOptions) -> MooncakeOptions:
        """Return the options of a client of it."""
        return replace(options, admin=self.admin)

    def _await(self, port: int) -> None:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and _runs(self.pid):
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            time.sleep(0.02)
        tail = self.log.read_text(errors="replace")[-400:]
        raise UnavailableError(
            f"mooncake: the master did not answer at {self.address} in {START_SECONDS:g} s; "
            f"{self.log} ends with: {tail}"
        )

    def close(self) -> None:
        """Stop it by its id and wait; the second call does nothing."""
        for pipe in (self._shell.stdin, self._shell.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._shell.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._shell.kill()
            self._shell.wait()

    def __repr__(self) -> str:
        return f"MasterProcess({self.address}, pid {self.pid}, log {self.log})"


def _folder(folder: str | None) -> Path:
    if folder is None:
        return Path(tempfile.mkdtemp(prefix="kvconnect-mooncake-"))
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"mooncake+local: {path} cannot hold the master's log: {error}") from None
    return path


def _runs(pid: int) -> bool:
    """Tell whether a process runs; one that has ended stays a zombie until the shell waits."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    # Not by its command line, which is empty for a moment while it starts.
    return state.rpartition(")")[2].split()[0] not in {"Z", "X"}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
