"""`kvconnect keys`: make the key pair that lets a fleet's ranks talk to each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def keys(
    out: Annotated[Path, typer.Option("--out", help="New file to write; mode 0600.")],
) -> None:
    """Make a CURVE key pair for the control channel. An existing file is never overwritten."""
    from kvconnect.disagg import keys as key_files  # noqa: PLC0415 - only when the command runs

    pair = key_files.generate()
    key_files.save(pair, out)
    typer.echo(
        f"wrote {out}, public key {pair.public}\n"
        f"Copy the file to every prefill and decode rank, readable by its owner alone, and pass\n"
        f'keys=kvconnect.disagg.keys.load(Path("{out.name}")) to both endpoints. Whoever holds '
        f"it\nmay read and write the pools that are granted; make a new one to lock others out."
    )
