"""The guide names every option with its default, every message, and code that runs."""

import dataclasses
import re
import runpy
import typing
from pathlib import Path

from kvconnect.config import parse_bytes
from kvconnect.disagg import messages
from kvconnect.disagg.cause import Cause
from kvconnect.disagg.options import EndpointOptions

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "disaggregation.md").read_text("utf-8")


def rows():
    """Option name -> default, of the table of options."""
    table = GUIDE.split("## Options")[1].split("## Requests")[0]
    found = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            names = re.findall(r"`(\w+)`", cells[0])
            values = [value.strip().strip("`") for value in cells[1].split(",")]
            found |= dict(zip(names, values, strict=True))
    return found


def test_every_option_is_there_with_its_default():
    said = rows()
    fields = {field.name: field.default for field in dataclasses.fields(EndpointOptions)}
    assert set(said) == set(fields)
    for name, default in fields.items():
        value = said[name]
        if default is None:
            value = None if value == "none" else value
        elif not isinstance(default, str):
            value = parse_bytes(value) if value.endswith("iB") else float(value)
        assert value == default, name


def test_every_message_is_there():
    for kind in typing.get_args(messages.Message):
        assert f"`{kind.__name__}`" in GUIDE, kind


def test_every_cause_is_there():
    for cause in Cause:
        assert f"`{cause.name}`" in GUIDE, cause


def test_the_example_runs(tmp_path, monkeypatch):
    """As it stands, but for addresses and the name of the transport, in one process."""
    from kvconnect.disagg import keys as key_files
    from kvconnect.disagg.bootstrap import DirectoryServer
    from kvconnect.identity import Identity
    from kvconnect.placement import Placement

    monkeypatch.chdir(tmp_path)
    key_files.save(key_files.generate(), Path("fleet.keys"))
    Path("token").touch(0o600)
    Path("token").write_text("0123456789abcdef")
    code = re.search(r"```python\n(.*?)```", GUIDE, re.DOTALL)[1]
    geometry = {
        "layout": "page_head", "pages": 31, "page_size": 64, "layers": 1, "heads": 1,
        "head_dim": 8, "dtype": "float16",
    }  # fmt: skip
    names = {
        "geometry": geometry,
        "placement": Placement.whole(layers=1, heads=1),
        "identity": Identity(
            model="m", weights="w", dtype="float16", page_size=64, layers=1, heads=1, head_dim=8,
            v_head_dim=8,
        ),
        "page_ids": range(31),
    }  # fmt: skip
    with DirectoryServer(token="0123456789abcdef") as running:
        for old, new in (
            ("http://10.0.0.1:7850", running.url), ("tcp://10.0.0.5:*", "tcp://127.0.0.1:*"),
            ('"nixl", {"host": "10.0.0.5"}', '"shm"'), ("ranks=2", "ranks=1"),
            ("ranks=4", "ranks=1"),
        ):  # fmt: skip
            assert old in code
            code = code.replace(old, new)
        try:
            Path("example.py").write_text(code)
            names = runpy.run_path("example.py", init_globals=names)
            assert names["outcome"].ok, names["outcome"]
            assert names["free"]
        finally:
            for name in ("announcement", "decode", "prefill", "transport", "pool"):
                if name in names:
                    names[name].close()


def test_the_example_of_side_pools_runs(tmp_path):
    """In one process, from some pages of each pool to others of it."""
    from kvconnect.disagg.conform import Side
    from kvconnect.disagg.decode import DecodeEndpoint
    from kvconnect.disagg.prefill import PrefillEndpoint
    from kvconnect.disagg.shm import ShmTransport
    from tests.disagg.endpoints import identity_of
    from tests.disagg.fleet import Fleet
    from tests.disagg.side_fleet import Kind, expected, fill, rows_of

    code = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)[1]
    fleet = Fleet("page_first", 1, 64, 62, (1,), 1, (8, None))
    kv = fleet.sides()[0]
    state = Kind("mamba", ("page", "layer", "dim"), {"state": 8}, (1,)).on(0, 0, 1)
    order = ("page", "slot", "layer", "head", "dim")
    window = Kind("swa", order, {"k": 8}, (1,), 1, 64, 40).on(0, 0, 1)
    pages = {"kv": range(31), "mamba": [3], "swa": range(5, 20)}
    free = {"kv": range(31, 62), "mamba": [5], "swa": range(20, 35)}
    sides = {"kv": kv} | {
        one.identity.pool: Side(one.pool, one.placement) for one in (state, window)
    }
    tokens = {"kv": range(31 * 64), "mamba": range(1), "swa": range(15 * 64)}
    for name, side in sides.items():
        fill(name, side, pages[name], tokens[name])
    with ShmTransport() as transport:
        names = {
            "PrefillEndpoint": PrefillEndpoint, "DecodeEndpoint": DecodeEndpoint, "pool": kv.pool,
            "placement": kv.placement, "identity": identity_of(fleet), "transport": transport,
            "page_ids": pages["kv"], "free_ids": free["kv"], "window_ids": pages["swa"],
            "free_window_ids": free["swa"],
        }  # fmt: skip
        for short, one in (("mamba", state), ("swa", window)):
            for part in ("pool", "placement", "identity"):
                names[f"{short}_{part}"] = getattr(one, part)
        try:
            (tmp_path / "example.py").write_text(code)
            names = runpy.run_path(str(tmp_path / "example.py"), init_globals=names)
            assert names["outcome"].ok, names["outcome"]
        finally:
            for name in ("decode", "prefill"):
                if name in names:
                    names[name].close()
    for name, side in sides.items():
        for component in side.pool.components:
            found = rows_of(side, component, free[name])
            assert (found.view("i2") == expected(name, side, component, tokens[name])).all()
