"""docs/sglang.md names every option of the adapter with its default, and no other."""

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path

from kvconnect.cli.main import app
from kvconnect.engines.sglang.options import Options, parse
from kvconnect.explain import size

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")
OPTIONS = TEXT.partition("## Options")[2].partition("\n## ")[0]
ROWS = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", OPTIONS, re.MULTILINE))


def test_every_option_is_in_the_table_in_its_order():
    assert list(ROWS) == [field.name for field in fields(Options)]


def test_defaults_are_those_of_the_code():
    for field in fields(Options):
        said = ROWS[field.name].strip()
        if field.default is MISSING:
            assert said == "required"
        elif field.default in (None, ()):
            assert said == "none" or not said.replace(".", "").isdigit()
        elif isinstance(field.default, bool):
            assert said in {str(field.default).lower(), str(int(field.default))}
        elif field.default == 256 << 20:
            assert said == size(field.default)
        else:
            assert said == f"{field.default:g}" if said[0].isdigit() else said == field.default


def test_the_command_line_shown_can_be_attached():
    (shown,) = re.findall(r"extra-config '(\{.*?\})'", TEXT, re.DOTALL)
    options = parse(json.loads(shown))
    assert options.interface_v1
    assert options.url == "nvme:///mnt/kv?capacity=200GiB"


def test_the_commands_named_exist():
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    named = set(re.findall(r"`?kvconnect ([a-z]+) (?:URL|nvme://)", TEXT))
    assert named
    assert named <= known


def test_the_scripts_named_exist():
    named = set(re.findall(r"`?(scripts/[a-z_-]+(?:\.py)?)", TEXT))
    assert len(named) >= 5
    assert all((ROOT / name).exists() for name in named)
