"""Real block layers: a raw (loop) block device, and a small file system that fills up."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvconnect.backend import Status
from kvconnect.errors import ConfigError, KVConnectError, UnavailableError
from kvconnect.testing.suite.base import content, expect, get, key, keys, put, stored
from kvconnect_nvme import open_backend

MIB = 1 << 20

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/loop-control").exists() or not shutil.which("losetup"),
    reason="hardware: needs root and loop devices",
)


def run(*command):
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


@pytest.fixture
def disk(tmp_path):
    image = tmp_path / "disk.img"
    with image.open("wb") as file:
        file.truncate(48 * MIB)
    device = run("losetup", "--find", "--show", str(image))
    yield device
    run("losetup", "--detach", device)


@pytest.fixture
def mounted(disk, tmp_path):
    folder = tmp_path / "mnt"
    folder.mkdir()
    run("mkfs.ext4", "-q", "-m", "0", disk)
    run("mount", disk, str(folder))
    yield folder
    run("umount", str(folder))


def test_a_block_device(disk, tmp_path):
    options = {"index": str(tmp_path / "index")}
    with open_backend(disk, options) as store:
        assert store.stats()["capacity_bytes"] == 47 * MIB
        assert put(store, keys(20), [MIB + 5] * 20).prefix == 20
    with open_backend(disk, options) as store:
        stored(store, keys(20), [MIB + 5] * 20)
        for n in range(60):
            expect(put(store, [key(n, "more")], [MIB]), Status.OK)
        assert store.stats()["evicted"] > 0
        assert store.verify().bad == 0
        store.compact()
    with pytest.raises(ConfigError, match="index="):
        open_backend(disk, {})
    # An index that was lost: what is on the device cannot be found, and is given up when asked.
    shutil.rmtree(tmp_path / "index")
    with pytest.raises(ConfigError, match="a kvconnect store whose index is elsewhere"):
        open_backend(disk, options)
    shutil.rmtree(tmp_path / "index", ignore_errors=True)
    with open_backend(disk, options | {"format": "true"}) as store:
        assert store.list_keys() == []
        put(store, keys(1), [100])


def test_a_block_device_with_more_capacity_later(disk, tmp_path):
    options = {"index": str(tmp_path / "index")}
    with open_backend(disk, options | {"capacity": "8MiB"}) as store:
        assert put(store, keys(7), [MIB] * 7).prefix == 7
    with open_backend(disk, options | {"capacity": "24MiB"}) as store:
        assert put(store, keys(20), [MIB] * 20).prefix == 20
        stored(store, keys(20), [MIB] * 20)
        for name, place in zip(keys(20), store.locate(keys(20)), strict=True):
            assert (place.path, place.nbytes, place.intact) == (disk, MIB, True)
            with Path(disk).open("rb") as device:
                device.seek(place.offset)
                assert device.read(MIB) == content(name, MIB)


def test_a_foreign_disk_is_not_overwritten(disk, tmp_path):
    with Path(disk).open("r+b") as file:
        file.seek(1080)
        file.write(b"\x53\xef something else")
    options = {"index": str(tmp_path / "index")}
    with pytest.raises(ConfigError, match="format=true"):
        open_backend(disk, options)
    with Path(disk).open("rb") as file:
        file.seek(1080)
        assert file.read(16) == b"\x53\xef something els"
    with open_backend(disk, options | {"format": "true"}) as store:
        put(store, keys(1), [100])
    with open_backend(disk, options) as store:
        stored(store, keys(1), [100])
    other = {"index": str(tmp_path / "other")}
    with pytest.raises(ConfigError, match="format=true"):
        open_backend(disk, other)
    with open_backend(disk, options) as store:
        stored(store, keys(1), [100])
    with open_backend(disk, other | {"format": "true"}):
        pass
    with pytest.raises(ConfigError, match="another device"):
        open_backend(disk, options)


def test_a_mounted_disk_is_refused(mounted, disk, tmp_path):
    with pytest.raises(UnavailableError, match="in use"):
        open_backend(disk, {"index": str(tmp_path / "index"), "format": "true"})


def test_a_full_disk_refuses_and_recovers(mounted):
    ballast = mounted / "ballast"
    options = {"capacity": "16MiB", "slab": "4MiB"}
    with open_backend(str(mounted / "store"), options) as store:
        assert put(store, keys(3), [MIB] * 3).prefix == 3
        fill_up(ballast)
        # What the slab at hand still takes is evicted into; nothing raises, nothing breaks.
        for n in range(10):
            out = put(store, [key(n, "full")], [MIB])
            assert out.status[0] in {Status.OK, Status.NO_SPACE, Status.BACKEND_ERROR}
            present = store.exists([key(n, "full")], [MIB])[0]
            assert present == (out.status[0] == Status.OK)
        out = put(store, [key("big")], [4 * MIB])
        assert out.status[0] in {Status.OK, Status.NO_SPACE}, out.causes
        assert len(list(mounted.glob("store/slab-*"))) == 1, "no half-made slab stays"
        ballast.unlink()
        names = keys(10, "after")
        assert put(store, names, [MIB] * 10).prefix == 10
        stored(store, names, [MIB] * 10)
        stats = store.stats()
        assert (
            stats["used_bytes"] + stats["free_bytes"] + stats["held_bytes"] == stats["total_bytes"]
        )
    with open_backend(str(mounted / "store"), {}) as store:
        outcome, _ = get(store, names, [MIB] * 10)
        assert outcome.prefix == 10


def test_an_index_that_cannot_grow_is_no_space(mounted):
    ballast = mounted / "ballast"
    with open_backend(str(mounted / "store"), {"capacity": "24MiB"}) as store:
        put(store, keys(10), [512] * 10)
        fill_up(ballast)
        statuses = set()
        for n in range(0, 4000, 500):
            out = put(store, [key(n + i, "many") for i in range(500)], [16] * 500)
            statuses |= {Status(int(s)) for s in out.status}
        assert statuses <= {Status.OK, Status.NO_SPACE, Status.BACKEND_ERROR}
        stored(store, keys(10), [512] * 10)
        ballast.unlink()
        assert put(store, keys(500, "many"), [16] * 500).prefix == 500


def test_a_disk_without_room_for_anything(mounted):
    fill_up(mounted / "ballast")
    with pytest.raises((KVConnectError, OSError)):
        open_backend(str(mounted / "store"), {"capacity": "4MiB"})
    (mounted / "ballast").unlink()
    with open_backend(str(mounted / "store"), {"capacity": "4MiB"}) as store:
        expect(put(store, keys(1), [100]), Status.OK)


def fill_up(path):
    with path.open("wb", buffering=0) as file:
        for size in (MIB, 65536, 4096):
            try:
                while True:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)
            except OSError:
                pass
