"""The `kvconnect` command. Starting it imports typer alone; a command imports what it needs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import kvconnect
from kvconnect.cli import cluster, store
from kvconnect.cli.bootstrap import bootstrap
from kvconnect.cli.demo import demo
from kvconnect.cli.doctor import doctor
from kvconnect.cli.keys import keys
from kvconnect.cli.pd_demo import pd_demo
from kvconnect.cli.store_find import find_page
from kvconnect.errors import KVConnectError

app = typer.Typer(
    name="kvconnect",
    help="Storage-backend connector for disaggregated LLM KV caches.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    bootstrap,
    demo,
    doctor,
    keys,
    pd_demo,
    store.schemes,
    store.stats,
    store.namespaces,
    store.clear,
    store.verify,
    store.compact,
):
    app.command()(command)
app.command("find")(find_page)
app.add_typer(cluster.app, name="cluster")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvconnect {kvconnect.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and exit.")
    ] = False,
) -> None:
    """Storage-backend connector for disaggregated LLM KV caches."""


def main() -> None:
    """Run the command; what kvconnect refuses is one line on stderr and exit code 2."""
    try:
        app()
    except KVConnectError as error:
        print(f"kvconnect: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
