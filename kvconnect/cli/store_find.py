"""``kvconnect find URL PAGE_HASH``: what a store keeps of one page, and where."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated

import typer

from kvconnect.backend import Backend, Location
from kvconnect.cli.store import Url
from kvconnect.explain import size
from kvconnect.find import Found, find
from kvconnect.registry import open_url


def find_page(
    url: Url,
    page_hash: Annotated[
        str,
        typer.Argument(help="The engine's hash of the page, as its logs print it; SGLang: 64 hex"),
    ],
) -> None:
    """Print every stored object of a page, where it lies, and whether it is whole.

    Exit code 1 if there is none.
    """
    with open_url(url) as backend:
        found = [one for name in _names(page_hash) for one in find(backend, name)]
        if not found:
            typer.echo(f"nothing is stored of page {page_hash} in {backend!r}")
            raise typer.Exit(1)
        for one in found:
            _show(one, backend)


def _names(text: str) -> Iterator[bytes | str]:
    """Yield the text, and the bytes that it spells: some engines name pages by those."""
    yield text
    try:
        data = bytes.fromhex(text)
    except ValueError:
        return
    if data:
        yield data


def _show(one: Found, backend: Backend) -> None:
    # Lines, not a table: keys and paths are for copying, and a table cuts them to the terminal.
    it, place = one.identity, one.location
    typer.echo(one.key)
    typer.echo(f"  namespace  {it.namespace}: {it.model}, {it.dtype}, pool {it.pool}")
    if place is not None:
        typer.echo(f"  bytes      {place.nbytes} ({size(place.nbytes)})")
        typer.echo(f"  file       {place.path}")
        typer.echo(f"  offset     {place.offset}")
    typer.echo(f"  state      {state(place, backend)}")


def state(place: Location | None, backend: Backend) -> str:
    """Say in words how an object fares."""
    if place is None:
        return f"{backend.name} does not say: removed meanwhile, a damaged entry, or not in files"
    words = [{True: "intact", False: "DAMAGED", None: "no checksum kept"}[place.intact]]
    words += ["pinned"] if place.pinned else []
    if place.expires is not None:
        words.append(f"expires in {place.expires - time.time():.0f} s")
    return ", ".join(words)
