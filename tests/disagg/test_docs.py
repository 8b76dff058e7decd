"""The guide names every option with its default, every message, and code that runs."""

import dataclasses
import re
import runpy
import typing
from pathlib import Path

from kvconnect.config import parse_bytes
from kvconnect.disagg import messages
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
        if not isinstance(default, str):
            value = parse_bytes(value) if value.endswith("iB") else float(value)
        assert value == default, name


def test_every_message_is_there():
    for kind in typing.get_args(messages.Message):
        assert f"`{kind.__name__}`" in GUIDE, kind


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
