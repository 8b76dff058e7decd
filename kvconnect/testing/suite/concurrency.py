"""Two threads, and two processes, on one store: no reader ever sees half of anything."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvconnect.backend import Backend, Op, Status
from kvconnect.testing.memory import Objects
from kvconnect.testing.peer import Peer
from kvconnect.testing.suite.base import (
    SuiteBase,
    content,
    expect,
    filled,
    get,
    key,
    keys,
    move,
    needs,
    put,
    stored,
)

SIZE = 2304
VERSIONS = [str(number) for number in range(8)]


class Concurrency(SuiteBase):
    """Writers and readers at once."""

    def test_a_writer_and_a_reader_thread(self, store: Backend) -> None:
        # Case 23. One key is overwritten all the time: a load is one whole version or a miss.
        names = keys(4)
        valid = [{content(name, SIZE, version) for version in VERSIONS} for name in names]
        source, target = Objects([[SIZE]] * 4), Objects([[SIZE // 2, SIZE // 2]] * 4)

        def write(number: int) -> None:
            version = VERSIONS[number % len(VERSIONS)]
            for index, name in enumerate(names):
                source.write(index, content(name, SIZE, version))
            assert move(store, source.batch(Op.STORE, names)).prefix == 4

        def read(number: int) -> None:  # noqa: ARG001
            outcome = move(store, target.batch(Op.LOAD, names))
            for index in outcome.ok.nonzero()[0].tolist():
                assert target.read(index) in valid[index]

        with store.register([source.region, target.region]):
            together(self.rounds, write, read)
        source.check()
        target.check()
        stored(store, names, [SIZE] * 4, VERSIONS[(self.rounds - 1) % len(VERSIONS)])

    def test_threads_of_every_kind(self, store: Backend) -> None:
        # exists, register and a second writer beside the first: nothing raises or is lost.
        def write(number: int) -> None:
            assert put(store, [key(number, "mine")], [480]).prefix == 1

        def other(number: int) -> None:
            assert put(store, [key(number, "theirs")], [SIZE]).prefix == 1

        def look(number: int) -> None:
            store.exists([key(number, "mine")] * 3, [480, 481, SIZE])

        together(40, write, other, look)
        names = [key(number, "mine") for number in range(40)]
        assert store.exists(names, [480] * 40).all()
        stored(store, [key(n, "theirs") for n in range(40)], [SIZE] * 40)

    @needs("multi_process")
    def test_another_process_sees_what_was_stored(self, store: Backend, tmp_path: Path) -> None:
        names, sizes = keys(6), [1, 480, 2304, 4096, 5000, 1 << 16]
        put(store, names[:3], sizes[:3])
        with Peer(*self.peer(tmp_path)) as peer:
            got = peer.ask("get", keys=names, sizes=sizes)
            assert got["status"] == [Status.OK] * 3 + [Status.ABSENT] * 3
            assert got["right"] == [True] * 3 + [False] * 3
            assert peer.ask("put", keys=names[3:], sizes=sizes[3:])["status"] == [Status.OK] * 3
            assert store.exists(names, sizes).all()
            stored(store, names, sizes)
            put(store, names[:1], [7], "new")
            assert peer.ask("exists", keys=names[:1], sizes=[7])["found"] == [True]
        stored(store, names[1:], sizes[1:])

    @needs("multi_process")
    def test_a_writer_and_a_reader_process(self, store: Backend, tmp_path: Path) -> None:
        names = keys(4)
        valid = [{content(name, SIZE, version) for version in VERSIONS} for name in names]
        with Peer(*self.peer(tmp_path)) as peer:
            peer.send("storm", keys=names, sizes=[SIZE] * 4, versions=VERSIONS, rounds=100)
            seen, end = 0, time.monotonic() + 60
            while not peer.answered() and time.monotonic() < end:
                outcome, held = get(store, names, [SIZE] * 4)
                for index in outcome.ok.nonzero()[0].tolist():
                    assert held.read(index) in valid[index]
                    seen += 1
            assert peer.receive()["failed"] == 0
        assert seen, "the reader never saw the writer's objects"
        stored(store, names, [SIZE] * 4, VERSIONS[99 % len(VERSIONS)])

    @needs("multi_process")
    def test_two_processes_store_the_same(self, store: Backend, tmp_path: Path) -> None:
        names, sizes = keys(200), [480] * 200
        held = filled([[480]] * 200, names)
        with Peer(*self.peer(tmp_path)) as peer, store.register([held.region]):
            peer.send("put", keys=names, sizes=sizes)
            outcome = move(store, held.batch(Op.STORE, names))
            assert peer.receive()["status"] == [Status.OK] * 200
            expect(outcome, *[Status.OK] * 200)
        stored(store, names, sizes)


def together(rounds: int, *works: Callable[[int], None]) -> None:
    """Call each work `rounds` times in a thread of its own; raise the first error."""
    errors: list[BaseException] = []

    def loop(work: Callable[[int], None]) -> None:
        try:
            for number in range(rounds):
                if errors:
                    return
                work(number)
        except BaseException as error:  # noqa: BLE001 - re-raised in the test's thread
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
