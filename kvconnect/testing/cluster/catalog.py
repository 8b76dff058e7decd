"""Scenario files: those that come with the package, and any other."""

from __future__ import annotations

import difflib
from pathlib import Path

import msgspec

from kvconnect.errors import ConfigError
from kvconnect.testing.cluster.refusal import explained
from kvconnect.testing.cluster.scenario import Scenario
from kvconnect.testing.cluster.scenario_check import check

_PACKAGED = Path(__file__).parent / "scenarios"
_CHECKOUT = Path(__file__).parents[3] / "tests" / "cluster" / "scenarios"


def folder() -> Path:
    """Return where the scenarios lie: in the wheel, or in a checkout with the tests."""
    for place in (_PACKAGED, _CHECKOUT):
        if place.is_dir():
            return place
    raise ConfigError(f"no scenarios in {_PACKAGED} or {_CHECKOUT}; give a file, NAME.toml")


def everything() -> list[Scenario]:
    """Read all scenarios of the catalogue, by name."""
    return [load(path) for path in sorted(folder().glob("*.toml"))]


def find(name: str) -> Scenario:
    """Read a scenario by its name, or any file by its path, which ends in .toml."""
    if name.endswith(".toml"):
        return load(Path(name))
    path = folder() / f"{name}.toml"
    if not path.exists():
        known = sorted(p.stem for p in folder().glob("*.toml"))
        close = difflib.get_close_matches(name, known, n=2)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
        raise ConfigError(f"no scenario {name!r}; {hint}")
    return load(path)


def parse(text: str | bytes, source: str) -> Scenario:
    """Read a scenario's TOML; `ConfigError` names `source`, the field and what is wrong."""
    try:
        scenario = msgspec.toml.decode(text, type=Scenario)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"scenario {source}: {explained(error, Scenario)}") from error
    check(scenario, source)
    return scenario


def load(path: Path) -> Scenario:
    """Read a scenario file, whose name is the scenario's; `ConfigError` where it is none."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"scenario {path} cannot be read: {error}") from error
    scenario = parse(text, str(path))
    if scenario.name != path.stem:
        raise ConfigError(f"scenario {path}: name is {scenario.name!r}, the file says {path.stem}")
    return scenario
