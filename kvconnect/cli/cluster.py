"""`kvconnect cluster`: scenarios of several hosts, on this machine or on an existing cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvconnect.testing.cluster.running import Wanted

app = typer.Typer(
    help="Run scenarios of several hosts under faults, and judge what must hold.",
    no_args_is_help=True,
)

Out = Annotated[Path, typer.Option(help="Folder below which each run gets its own.")]


@app.command("list")
def list_scenarios() -> None:
    """List the scenarios: hosts, seconds in short and in full, what they are about."""
    from kvconnect.testing.cluster import catalog  # noqa: PLC0415 - only when the command runs

    for one in catalog.everything():
        length = f"{one.seconds.short:g} s / {one.seconds.full:g} s"
        typer.echo(f"{one.name:<16} {one.hosts}-{one.most} hosts  {length:>13}  {one.about}")


@app.command("run")
def run_scenario(
    name: Annotated[str, typer.Argument(help="A scenario's name, or a file of yours, X.toml.")],
    hosts: Annotated[
        str | None,
        typer.Option(
            help="How many, as few as it takes by default; or hosts.toml, as --inventory."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws pages, requests and random faults.")] = 1,
    duration: Annotated[
        float | None, typer.Option(min=1, help="Seconds of load; the short length by default.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="The full length.")] = False,
    inventory: Annotated[
        Path | None, typer.Option(help="hosts.toml of an existing cluster, over ssh.")
    ] = None,
    out: Out = Path("cluster-runs"),
) -> None:
    """Run a scenario and write its report; exit code 1 unless all invariants held."""
    from kvconnect.testing.cluster import catalog, running  # noqa: PLC0415

    if full and duration is not None:
        raise typer.BadParameter("--full is a length of its own", param_hint="--duration")
    count, found = _hosts(hosts, inventory)
    scenario = catalog.find(name)
    seconds = scenario.seconds.full if full else duration
    _perform(
        running.Wanted(scenario=scenario, seed=seed, seconds=seconds, hosts=count, inventory=found),
        out,
    )


@app.command()
def replay(
    result: Annotated[Path, typer.Argument(help="RESULT.json or folder of an earlier run.")],
    out: Out = Path("cluster-runs"),
) -> None:
    """Run the same scenario again, with the same seed, length and hosts."""
    from kvconnect.testing.cluster import running  # noqa: PLC0415

    _perform(running.again(result), out)


@app.command()
def table(
    results: Annotated[list[Path], typer.Argument(help="RESULT.json or folders of runs.")],
) -> None:
    """Print runs as one Markdown table: what each fault did, how soon it was seen and over."""
    from kvconnect.testing.cluster import report, summing  # noqa: PLC0415

    typer.echo(summing.table([report.read(result) for result in results]))


@app.command()
def sweep() -> None:
    """Remove what runs that were killed have left on this machine."""
    from kvconnect.testing.cluster.sweep import sweep as remove  # noqa: PLC0415

    for gone in remove():
        typer.echo(f"removed what {gone} left")


def _hosts(hosts: str | None, inventory: Path | None) -> tuple[int | None, Path | None]:
    """Return how many hosts, and the inventory, of which `hosts` says one or the other."""
    if hosts is None:
        return None, inventory
    if hosts.isascii() and hosts.isdigit() and int(hosts) > 0:
        return int(hosts), inventory
    if inventory is not None or not hosts.endswith(".toml"):
        raise typer.BadParameter(
            f"{hosts!r} is neither a number above 0 nor the only .toml file", param_hint="--hosts"
        )
    return None, Path(hosts)


def _perform(wanted: Wanted, out: Path) -> None:
    from kvconnect.testing.cluster import running  # noqa: PLC0415

    done = running.perform(wanted, running.folder_of(wanted, out), typer.echo)
    for line in running.summary(done):
        typer.echo(line)
    raise typer.Exit(0 if done.report.passed else 1)
