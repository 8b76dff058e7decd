"""`kvconnect bootstrap`: the directory where decode ranks find prefill ranks."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer


def bootstrap(
    address: Annotated[str, typer.Option(help="HOST:PORT to listen on.")] = "127.0.0.1:7850",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token; needed beyond loopback. Mode 0600.")
    ] = None,
    ttl: Annotated[float, typer.Option(help="Seconds an entry lives unless refreshed.")] = 30.0,
) -> None:
    """Serve the directory of ranks until SIGINT or SIGTERM. Everything is in memory."""
    from kvconnect.disagg.bootstrap import DirectoryServer  # noqa: PLC0415 - only when it runs
    from kvconnect.disagg.bootstrap.client import load_token  # noqa: PLC0415

    token = load_token(token_file) if token_file is not None else None
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with DirectoryServer(address, token=token, ttl=ttl) as server:
        typer.echo(f"directory at {server.url}{'' if token is None else ', with a token'}")
        ended.wait()
