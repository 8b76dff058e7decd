"""Inventories: what a file says, and what is wrong with it in one error."""

from pathlib import Path

import pytest

from kvconnect.errors import ConfigError
from kvconnect.testing.cluster.inventory import Inventory

ONE = """
[[host]]
name = "a"
ssh = "kv@a.example"
address = "10.0.0.1"
directory = "/mnt/kv"
"""
TWO = ONE + ONE.replace('"a"', '"b"').replace("0.1", "0.2")


def read(folder, text):
    path = folder / "hosts.toml"
    path.write_text(text)
    return Inventory.read(path)


def test_what_is_not_said_has_a_default(tmp_path):
    inventory = read(tmp_path, TWO)
    first, second = inventory.host
    assert (first.name, first.ssh, first.address) == ("a", "kv@a.example", "10.0.0.1")
    assert (second.python, second.faults, second.fill_bytes, second.port) == (
        *("python3", False, 0, None),
    )
    assert inventory.options.connect_timeout == 10
    assert [host.name for host in inventory.first(1).host] == ["a"]
    with pytest.raises(ConfigError, match="hosts=3, the inventory has 2"):
        inventory.first(3)


def test_everything_may_be_said(tmp_path):
    more = """
    python = "/opt/kv/bin/python"
    faults = true
    fill = "20GiB"
    port = 2222
    identity = "id"
    known_hosts = "~/hosts"
    proxy_command = "ssh -W %h:%p jump"
    [options]
    connect_timeout = 3
    lease = 60
    """
    inventory = read(tmp_path, ONE + more)
    (host,) = inventory.host
    assert host.identity == str(tmp_path.resolve() / "id")
    assert host.known_hosts == str(Path.home() / "hosts")
    assert (host.fill_bytes, host.port, host.faults) == (20 << 30, 2222, True)
    assert (inventory.options.connect_timeout, inventory.options.lease) == (3, 60)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ONE + 'addr = "10.0.0.1"', r"unknown field `addr` - at `\$.host\[0\]`"),
        (ONE.replace("name", "# name"), "missing required field `name`"),
        (ONE.replace("10.0.0.1", "a.example"), "host a: .*'a.example'"),
        (ONE.replace("10.0.0.1", "fe80::1"), "host a: .*'fe80::1'"),
        (ONE.replace("/mnt", "mnt"), r"`\$.host\[0\].directory`"),
        (ONE.replace("kv@a.example", "-oProxyCommand=x"), r"`\$.host\[0\].ssh`"),
        (ONE.replace('"a"', '"../a"'), r"`\$.host\[0\].name`"),
        (ONE + 'fill = "much"', "host a: fill='much' is no size"),
        (ONE + ONE, "name of two hosts is a"),
        (TWO.replace("0.2", "0.1"), "address of two hosts is 10.0.0.1"),
        ("host = []", "length >= 1"),
        ("[[host", "hosts.toml: "),
        (ONE + "[options]\nlease = 0", "lease"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        read(tmp_path, text)
    assert "hosts.toml" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        Inventory.read(tmp_path / "none.toml")
