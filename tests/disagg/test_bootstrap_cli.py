"""The directory's command, and what it and its client refuse before anything is reached."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvconnect.disagg import keys as key_files
from kvconnect.disagg.bootstrap import Directory, DirectoryServer, Entry
from kvconnect.disagg.bootstrap.client import load_token
from kvconnect.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "0123456789abcdef"


@pytest.mark.parametrize("address", ["0.0.0.0:0", "10.0.0.1:1", "somewhere:1"])
def test_without_a_token_only_loopback_is_served(address):
    with pytest.raises(ConfigError, match="not loopback: it needs a token"):
        DirectoryServer(address)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:x", ":5", "127.0.0.1:70000"])
def test_addresses_that_are_none_are_refused(address):
    with pytest.raises(ConfigError, match="write HOST:PORT"):
        DirectoryServer(address)


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://x", "ftp://x:1", "http://x:y"])
def test_urls_that_are_none_are_refused(url):
    with pytest.raises(ConfigError, match="write http://HOST:PORT"):
        Directory(url)


def test_token_files(tmp_path):
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(f"{TOKEN}\n")
    assert load_token(path) == TOKEN
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 0644"):
        load_token(path)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(ConfigError, match="16 or more"):
        load_token(path)


def test_the_command_serves_until_it_is_told_to_end(tmp_path):
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    command = [sys.executable, "-m", "kvconnect.cli.main", "bootstrap", "--address", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, "--token-file", str(token)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("directory at http://127.0.0.1:")
            assert TOKEN not in line
            directory = Directory(line.split()[2].rstrip(","), token=TOKEN)
            keys = key_files.generate()
            entry = Entry(
                fleet="f", name="p0", ranks=1, address="tcp://127.0.0.1:5", generation="0" * 32,
                public_key=keys.public, started=1,
            )  # fmt: skip
            directory.register(entry)
            assert directory.find("f", keys=keys) == [entry]
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            process.kill()
