"""The owner of the NIXL agent, on a library made here; test_nixl_posix.py has the real one."""

import contextlib
import gc
import resource
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from kvconnect.backend import Op
from kvconnect.errors import (
    BackendError,
    ClosedError,
    RegistrationError,
    TransferTimeoutError,
    UnavailableError,
)
from kvconnect_nixl import library as library_module
from kvconnect_nixl.agent import Agent
from kvconnect_nixl.library import Library, load
from kvconnect_nixl.rows import FIRST_ID, check, device_ids, plain, split, strided


class nixlBackendError(Exception):  # noqa: N801 - NIXL's own name
    """As NIXL raises it."""


class FakeAgent:
    """NIXL as far as it is used: transfers end when `end` is called, and no sooner."""

    plugin_list = ("POSIX", "GDS")

    def __init__(self, name):
        self.name, self.log, self.state, self.made = name, [], {}, 0

    def get_plugin_mem_types(self, plugin):
        return ["DRAM_SEG", "FILE_SEG"] if plugin == "POSIX" else []

    def create_backend(self, plugin, parameters):
        self.log.append(("create", plugin, parameters))

    def register_memory(self, rows, memory, plugins):
        self.log.append(("register", memory, tuple(plugins)))
        return f"descs{len(self.log)}"

    def deregister_memory(self, descs, plugins):
        self.log.append(("deregister", descs, tuple(plugins)))

    def get_xfer_descs(self, rows, memory):
        return rows

    def initialize_xfer(self, verb, local, remote, name, message, plugins):
        self.made += 1
        self.state[self.made] = "PROC"
        return self.made

    def transfer(self, handle):
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle):
        state = self.state[handle]
        if isinstance(state, Exception):
            raise state
        return state

    def release_xfer_handle(self, handle):
        assert self.state[handle] != "PROC", "released while bytes still move"
        self.log.append(("release", handle))

    def released(self):
        return [handle for what, handle, *_ in self.log if what == "release"]


@pytest.fixture
def fake():
    """Yield (agent, the fake behind it)."""
    made = []

    def make(name, config):
        assert config == {"backends": [], "sync_mode": "strict"}
        made.append(FakeAgent(name))
        return made[-1]

    api = SimpleNamespace(
        nixl_agent=make,
        nixl_agent_config=lambda **options: options,
        nixl_thread_sync_t=SimpleNamespace(NIXL_THREAD_SYNC_STRICT="strict"),
    )
    with Agent({"POSIX": {"a": "b"}}, library=Library("fake", api), timeout=5.0) as agent:
        yield agent, made[0]
        for handle in made[0].state:
            if made[0].state[handle] == "PROC":
                made[0].state[handle] = "DONE"


ROW = plain(4096, 512)


def submit(agent):
    return agent.submit("POSIX", Op.LOAD, ("DRAM", ROW), ("FILE", ROW))


def test_a_handle_lives_until_its_transfer_has_ended(fake):
    agent, nixl = fake
    posted = submit(agent)
    with pytest.raises(TransferTimeoutError, match="leased"):
        posted.wait(0.01)
    assert (posted.done, nixl.released(), agent.under_way) == (False, [], 1)
    posted.close()
    posted.close()
    del posted
    gc.collect()
    assert (nixl.released(), agent.under_way) == ([], 1)
    nixl.state[1] = "DONE"
    agent.close()
    agent.close()
    assert (nixl.released(), agent.under_way) == ([1], 0)


def test_an_agent_is_not_dropped_while_bytes_move(fake):
    agent, nixl = fake
    agent._timeout = 0.05
    posted = submit(agent)
    with pytest.raises(TransferTimeoutError, match="1 transfers still move bytes"):
        agent.close()
    assert not posted.done
    nixl.state[1] = nixlBackendError("NIXL_ERR_BACKEND")
    agent.close()
    assert posted.done
    with pytest.raises(BackendError, match="the plugin failed"):
        posted.wait(0)
    with pytest.raises(ClosedError):
        submit(agent)


@pytest.mark.parametrize("state", [nixlBackendError("NIXL_ERR_BACKEND"), "ERR"])
def test_an_error_is_mapped_and_frees_the_handle(fake, state):
    agent, nixl = fake
    posted = submit(agent)
    nixl.state[1] = state
    with pytest.raises(BackendError, match="load of 1 x FILE by POSIX"):
        posted.wait(1)
    assert nixl.released() == [1]


def test_a_handle_that_is_not_released_costs_nothing_else(fake, monkeypatch, caplog):
    # The transfer has ended; who polls it must not be thrown off, nor the keeper's thread end.
    agent, nixl = fake
    refused = nixlBackendError("NIXL_ERR_BACKEND")

    def refuse(handle):
        raise refused

    monkeypatch.setattr(nixl, "release_xfer_handle", refuse)
    first, second = submit(agent), submit(agent)
    first.close(), second.close()
    nixl.state = dict.fromkeys(nixl.state, "DONE")
    agent._keeper.drain(5)
    assert first.done
    assert second.done
    assert agent.under_way == 0
    assert "not released" in caplog.text


def test_many_threads_poll_one_transfer(fake):
    agent, nixl = fake
    posted = submit(agent)
    threads = [threading.Thread(target=posted.wait, args=(10,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    nixl.state[1] = "DONE"
    for thread in threads:
        thread.join(10)
    assert nixl.released() == [1]


def test_everything_held_is_given_back_once_and_last_first(fake):
    agent, nixl = fake
    first = agent.register("POSIX", "DRAM", ROW)
    second = agent.register("POSIX", "FILE", ROW, ["rw:/tmp/file"])
    third = agent.register("POSIX", "DRAM", ROW)
    second.close()
    second.close()
    assert agent.held == 2
    agent.close()
    first.close()
    third.close()
    given = [what[1] for what in nixl.log if what[0] == "deregister"]
    assert given == [second.handle, third.handle, first.handle]
    assert {what[2] for what in nixl.log if what[0] == "register"} == {("POSIX",)}


def test_a_plugin_that_does_not_load(fake):
    made = {"agent": lambda name, **_: FakeAgent(name), "package": "nixl_cu12", "plugins": None}
    library = SimpleNamespace(**made)
    for plugin in ("GDS", "NONE"):
        with pytest.raises(UnavailableError, match=plugin):
            Agent({plugin: {}}, library=library)


def test_without_nixl(monkeypatch):
    monkeypatch.setattr(library_module, "NAMES", ("no_such_nixl",))
    with pytest.raises(UnavailableError, match=r"pip install 'kvconnect\[nixl\]'"):
        load()


def test_rows_that_nixl_would_misread_are_refused():
    assert check(strided(0, 512, 4096, 10)).shape == (1, 5)
    for rows, word in [
        (np.zeros((0, 3), dtype=np.uint64), "shape"),
        (np.ones((2, 4), dtype=np.uint64), "shape"),
        (np.ones((2, 3), dtype=np.int32), "int32"),
        (np.ones((4, 6), dtype=np.uint64)[:, ::2], "packed"),
        (plain([1, 2], [5, 0]), "descriptor 1 of 2"),
    ]:
        with pytest.raises(RegistrationError, match=word):
            check(rows)


def test_rows_are_split_without_gaps():
    rng = np.random.default_rng(3)
    nbytes = rng.integers(1, 5000, 50)
    rows = plain(rng.integers(1, 1 << 50, 50), nbytes, np.cumsum(nbytes))
    pieces = split(rows, 512)
    assert pieces[:, 1].max() <= 512
    covered = {
        (int(d), int(a) + i) for a, n, o in pieces.tolist() for i in range(n) for d in [o + i]
    }
    wanted = {(o + i, a + i) for a, n, o in rows.tolist() for i in range(n)}
    assert covered == wanted
    assert len(pieces) == sum(-(-int(n) // 512) for n in nbytes)


def test_device_ids_are_no_file_descriptors():
    ids = np.concatenate([device_ids(3), device_ids(2)])
    assert len(set(ids.tolist())) == 5
    assert ids.min() >= FIRST_ID > resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@pytest.mark.parametrize(("said", "kept"), [(0, library_module.PROGRESS_MICROSECONDS), (7, 7)])
def test_progress_threads_pause(said, kept):
    class Config:
        pthrDelay = None  # noqa: N815 - NIXL's own name

    made = []

    def nixl_agent(name, config):
        made.append(bindings.nixlAgentConfig())
        made[-1].pthrDelay = said
        return name

    bindings = SimpleNamespace(nixlAgentConfig=Config)
    modes = SimpleNamespace(NIXL_THREAD_SYNC_STRICT=1, NIXL_THREAD_SYNC_RW=2)
    api = SimpleNamespace(
        nixlBind=bindings, nixl_agent=nixl_agent, nixl_agent_config=dict, nixl_thread_sync_t=modes
    )
    assert Library("fake", api).agent("a", parallel=True) == "a"
    assert made[0].pthrDelay == kept
    assert isinstance(made[0], Config)
    assert bindings.nixlAgentConfig is Config, "only for agents of ours"


class Counting:
    """Counts how many calls are in it; the first waits for `together` of them, at most 0.2 s."""

    mode = "what it was made with"

    def __init__(self, together):
        self.inside, self.most, self.lock = 0, 0, threading.Lock()
        self.met = threading.Barrier(together)

    def call(self):
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        with contextlib.suppress(threading.BrokenBarrierError):
            self.met.wait(0.2)
        with self.lock:
            self.inside -= 1


@pytest.mark.parametrize(("parallel", "most"), [(False, 1), (True, 2)])
def test_calls_go_one_at_a_time_unless_the_plugin_bears_more(parallel, most):
    agent, modes = Counting(2), []
    api = SimpleNamespace(
        nixl_agent=lambda _, config: modes.append(config["sync_mode"]) or agent,
        nixl_agent_config=dict,
        nixl_thread_sync_t=SimpleNamespace(NIXL_THREAD_SYNC_STRICT=1, NIXL_THREAD_SYNC_RW=2),
    )
    made = Library("fake", api).agent("a", parallel=parallel)
    assert modes == [most], "NIXL's own locks: STRICT, or RW"
    assert made.mode == Counting.mode
    threads = [threading.Thread(target=made.call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert agent.most == most
