"""Commands about a store: ``kvconnect stats|namespaces|clear|verify|compact URL``."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvconnect.backend import SupportsClear, SupportsListing, SupportsRecords, SupportsStats
from kvconnect.errors import CapabilityError, ConfigError
from kvconnect.explain import size
from kvconnect.identity import NAMESPACE_HEX, Identity
from kvconnect.registry import known_schemes, open_url

Url = Annotated[str, typer.Argument(help="Store URL, as in nvme:///mnt/kv?capacity=200GiB")]

console = Console()


def schemes() -> None:
    """List the backends that can be opened."""
    for scheme in known_schemes():
        console.print(scheme)


def stats(url: Url) -> None:
    """Print what a store says about itself."""
    with open_url(url) as backend:
        console.print(repr(backend), highlight=False)
        if not isinstance(backend, SupportsStats):
            raise CapabilityError(f"backend {backend.name!r} keeps no statistics")
        table = Table("figure", "value")
        for name, value in sorted(backend.stats().items()):
            text = f"{value} ({size(int(value))})" if _is_size(name, value) else str(value)
            table.add_row(name, text)
        console.print(table)


def _is_size(name: str, value: object) -> bool:
    return "bytes" in name and isinstance(value, int) and value >= 1024


def namespaces(url: Url) -> None:
    """List the identities that ever wrote to a store, and their objects."""
    with open_url(url) as backend:
        if not isinstance(backend, SupportsRecords):
            raise CapabilityError(f"backend {backend.name!r} keeps no identity records")
        counts: Counter[str] = Counter()
        if isinstance(backend, SupportsListing):
            counts.update(key[:NAMESPACE_HEX] for key in backend.list_keys())
        table = Table("namespace", "objects", "model", "dtype", "page size", "layout", "pool")
        for name, data in sorted(backend.records().items()):
            if name.startswith("identity/"):
                it = Identity.from_json(data)
                own = name.removeprefix("identity/")
                row = (it.model, it.dtype, str(it.page_size), it.object_layout, it.pool)
                table.add_row(own, str(counts.pop(own, 0)), *row)
        for other, number in sorted(counts.items()):
            table.add_row(other, str(number), "(no record)", "", "", "", "")
        console.print(table)


def clear(
    url: Url,
    namespace: Annotated[str, typer.Argument(help="The 16 hex digits `namespaces` prints")],
) -> None:
    """Remove one namespace, and nothing else."""
    if len(namespace) != NAMESPACE_HEX:
        raise ConfigError(f"namespace {namespace!r} must be {NAMESPACE_HEX} hex digits")
    with open_url(url) as backend:
        if not isinstance(backend, SupportsClear):
            raise CapabilityError(f"backend {backend.name!r} cannot clear a namespace")
        console.print(f"{backend.clear(namespace)} objects removed")


def verify(url: Url) -> None:
    """Read every object and check size, checksum and identity; exit 1 if any is bad."""
    _maintain(url, "verify")


def compact(url: Url) -> None:
    """Move objects together and give free space back to the file system."""
    _maintain(url, "compact")


def _maintain(url: str, what: str) -> None:
    with open_url(url) as backend:
        call: Any = getattr(backend, what, None)
        if call is None:
            raise CapabilityError(f"backend {backend.name!r} has no {what!r}")
        report = call()
        console.print(report, highlight=False)
        if getattr(report, "bad", 0):
            raise typer.Exit(1)
