"""The owner of the NIXL agent on the real library: POSIX on both of its interfaces."""

import gc
import mmap
import threading
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from kvconnect.backend import Op
from kvconnect.cli.doctor import doctor as command
from kvconnect.errors import BackendError, RegistrationError, UnavailableError
from kvconnect_nixl.agent import Agent
from kvconnect_nixl.library import load
from kvconnect_nixl.plugins import doctor
from kvconnect_nixl.rows import device_ids, file_name, plain, strided

try:
    load()
except UnavailableError as error:
    pytest.skip(f"NIXL is not installed: {error}", allow_module_level=True)

MIB = 1 << 20
APIS = pytest.mark.parametrize("api", ["aio", "uring"])


class Memory:
    """16 MiB of memory and a file of as much, filled with different bytes."""

    nbytes = 16 * MIB

    def __init__(self, folder):
        self.array = np.frombuffer(mmap.mmap(-1, self.nbytes), dtype=np.uint8)
        self.address = self.array.ctypes.data
        self.path = folder / "odd: name"
        rng = np.random.default_rng(1)
        self.bytes = rng.integers(0, 256, self.nbytes, dtype=np.uint8)
        self.path.write_bytes(self.bytes.tobytes())

    def register(self, agent):
        agent.register("POSIX", "DRAM", plain(self.address, self.nbytes))
        ids = device_ids(1)
        names = [file_name(self.path, direct=True)]
        agent.register("POSIX", "FILE", plain(0, self.nbytes, ids), names)
        return int(ids[0])


@pytest.fixture
def memory(tmp_path):
    return Memory(tmp_path)


def open_posix(api):
    return Agent({"POSIX": {f"use_{api}": "true"}})


@APIS
def test_plain_and_prepared_transfers_move_the_right_bytes(memory, api):
    with open_posix(api) as agent:
        file = memory.register(agent)
        order = np.random.default_rng(2).permutation(4096).astype(np.uint64)
        source = order * np.uint64(4096)
        target = np.arange(4096, dtype=np.uint64) * np.uint64(4096)
        local = plain(np.uint64(memory.address) + target, 4096)
        posted = agent.submit(
            "POSIX", Op.LOAD, ("DRAM", local), ("FILE", plain(source, 4096, file))
        )
        posted.wait(30)
        wanted = memory.bytes.reshape(4096, 4096)[order.astype(np.int64)]
        assert np.array_equal(memory.array.reshape(4096, 4096), wanted)
        pages = strided(memory.address, 4096, 4096, 4096)
        blocks = strided(0, 4096, 4096, 4096, file)
        with (
            agent.prepare("POSIX", "local", ("DRAM", pages)) as ours,
            agent.prepare("POSIX", "remote", ("FILE", blocks)) as theirs,
        ):
            some = np.array([7, 4000, 0], dtype=np.int32)
            at = np.array([1, 2, 3], dtype=np.int32)
            agent.submit_prepared("POSIX", Op.LOAD, (ours, at), (theirs, some)).wait(30)
        for page, block in zip(at.tolist(), some.tolist(), strict=True):
            assert np.array_equal(
                memory.array[page * 4096 :][:4096], memory.bytes[block * 4096 :][:4096]
            )
        assert agent.held == 2


@APIS
def test_what_is_not_registered_is_refused(memory, api):
    with open_posix(api) as agent:
        file = memory.register(agent)
        inside, outside = plain(memory.address, 512), plain(memory.address + memory.nbytes, 512)
        beyond = plain(memory.nbytes - 256, 512, file)
        for local, remote in [(outside, plain(0, 512, file)), (inside, beyond)]:
            with pytest.raises(RegistrationError, match="not registered"):
                agent.submit("POSIX", Op.LOAD, ("DRAM", local), ("FILE", remote))
        two = plain([0, 512], 512, file)
        with pytest.raises(RegistrationError, match="2 of FILE"):
            agent.submit("POSIX", Op.LOAD, ("DRAM", inside), ("FILE", two))


@APIS
def test_an_error_belongs_to_its_transfer_and_comes_when_that_is_quiet(memory, tmp_path, api):
    short = tmp_path / "short"
    short.write_bytes(b"x" * 4096)
    with open_posix(api) as agent:
        file, ids = memory.register(agent), device_ids(1)
        names = [file_name(short, direct=True)]
        agent.register("POSIX", "FILE", plain(0, memory.nbytes, ids), names)
        half = np.arange(8, dtype=np.uint64) * np.uint64(MIB)
        remote = plain(half, MIB, file)
        remote[0] = (0, MIB, ids[0])
        bad = agent.submit(
            "POSIX", Op.LOAD, ("DRAM", plain(memory.address + half, MIB)), ("FILE", remote)
        )
        good = agent.submit(
            "POSIX",
            Op.LOAD,
            ("DRAM", plain(memory.address + half + np.uint64(8 * MIB), MIB)),
            ("FILE", plain(half, MIB, file)),
        )
        good.wait(30)
        assert np.array_equal(memory.array[8 * MIB :], memory.bytes[: 8 * MIB])
        with pytest.raises(BackendError, match="the plugin failed"):
            bad.wait(30)
        # Its other seven parts have landed already: nothing comes after the error.
        assert np.array_equal(memory.array[MIB : 8 * MIB], memory.bytes[MIB : 8 * MIB])


@APIS
def test_an_abandoned_transfer_is_polled_to_its_end(memory, api):
    with open_posix(api) as agent:
        file = memory.register(agent)
        offset = np.arange(4096, dtype=np.uint64) * np.uint64(4096)
        order = offset[::-1]
        posted = agent.submit(
            "POSIX",
            Op.LOAD,
            ("DRAM", plain(np.uint64(memory.address) + offset, 4096)),
            ("FILE", plain(order, 4096, file)),
        )
        posted.close()
    assert posted.done, "closing the agent waits for what still moves"
    assert posted.error is None
    wanted = memory.bytes.reshape(4096, 4096)[::-1]
    assert np.array_equal(memory.array.reshape(4096, 4096), wanted)


@APIS
def test_descriptors_return_to_baseline(memory, api):
    def fds():
        return len(list(Path("/proc/self/fd").iterdir()))

    with open_posix(api):
        pass  # What NIXL opens once for the process.
    gc.collect()  # What earlier tests left behind must not go in the midst of this one.
    before = fds()
    for _ in range(20):
        with open_posix(api) as agent:
            memory.register(agent)
            with pytest.raises(BackendError):
                agent.register("POSIX", "FILE", plain(0, 512, device_ids(1)), ["rw:/no/such"])
    assert fds() == before


def test_two_threads_on_one_agent(memory):
    errors = []

    def work(agent, file, half):
        try:
            for number in range(100):
                at = (half * 8 + number % 8) * MIB
                source = plain((number * 37 % 16) * MIB, MIB, file)
                local = plain(memory.address + at, MIB)
                agent.submit("POSIX", Op.LOAD, ("DRAM", local), ("FILE", source)).wait(30)
                wanted = memory.bytes[(number * 37 % 16) * MIB :][:MIB]
                assert np.array_equal(memory.array[at : at + MIB], wanted)
        except Exception as error:  # noqa: BLE001 - shown below
            errors.append(error)

    for api in ("aio", "uring"):
        with open_posix(api) as agent:
            file = memory.register(agent)
            threads = [threading.Thread(target=work, args=(agent, file, h)) for h in (0, 1)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
    assert not errors


def test_what_is_there_is_found(memory):
    with open_posix("aio") as agent:
        names = [str(memory.path), str(memory.path) + "x"]
        assert agent.query("POSIX", "FILE", names) == [True, False]
        assert agent.query("POSIX", "FILE", []) == []
        with pytest.raises(RegistrationError, match="empty"):
            agent.query("POSIX", "FILE", [""])


def test_doctor_says_what_loads_and_what_is_missing():
    found = {plugin.name: plugin for plugin in doctor()}
    assert found["POSIX"].loads
    assert set(found["POSIX"].memories) == {"DRAM_SEG", "FILE_SEG"}
    for plugin in found.values():
        assert plugin.loads == bool(plugin.memories)
        assert plugin.loads or plugin.fixes, f"{plugin.name}: nobody learns what it needs"
        assert not any("nixl" in name for name in plugin.missing)


def test_the_doctor_prints_a_row_a_plugin():
    app = typer.Typer()
    app.command()(command)
    shown = CliRunner().invoke(app, [])
    assert shown.exit_code == 0
    for plugin in doctor():
        assert plugin.name in shown.stdout
    assert "nixl-posix" in shown.stdout
