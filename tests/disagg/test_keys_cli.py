import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvconnect.disagg import keys as key_files

ROOT = Path(__file__).resolve().parents[2]


def run(tmp_path, *arguments, umask=0o022):
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    return subprocess.run(
        [sys.executable, "-m", "kvconnect.cli.main", "keys", *arguments],
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "120", "NO_COLOR": "1"},
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60, umask=umask,
    )  # fmt: skip


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_a_pair_is_written_for_its_owner_alone_and_is_told_how_to_use(tmp_path, umask):
    done = run(tmp_path, "--out", "fleet.keys", umask=umask)
    assert done.returncode == 0, done.stderr
    file = tmp_path / "fleet.keys"
    assert file.stat().st_mode & 0o777 == 0o600
    pair = key_files.load(file)
    import zmq

    assert zmq.curve_public(pair.secret.encode()).decode() == pair.public
    assert pair.public in done.stdout
    assert pair.secret not in done.stdout + done.stderr
    assert "keys.load" in done.stdout


def test_what_exists_is_never_overwritten(tmp_path):
    (tmp_path / "fleet.keys").write_bytes(b"precious")
    done = run(tmp_path, "--out", "fleet.keys")
    assert done.returncode == 2
    assert "never overwritten" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "fleet.keys").read_bytes() == b"precious"


def test_a_directory_that_is_not_there_is_one_line(tmp_path):
    done = run(tmp_path, "--out", "none/fleet.keys")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "none/fleet.keys" in done.stderr
