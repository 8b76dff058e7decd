import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.disagg import keys as key_files
from kvconnect.disagg.bootstrap import Directory, DirectoryServer, Entry, server
from kvconnect.disagg.bootstrap.table import Table
from kvconnect.errors import CapacityError, ConfigError, UnavailableError

KEYS, OTHER = key_files.generate(), key_files.generate()


def entry(number=0, **changes):
    fields = {
        "fleet": "f", "name": f"p{number}", "ranks": 2,
        "address": f"tcp://127.0.0.1:{5000 + number}", "public_key": KEYS.public,
        "generation": f"{number:032x}", "started": 100,
    }  # fmt: skip
    return Entry(**fields | changes)


@pytest.fixture
def directory():
    with DirectoryServer() as running:
        yield Directory(running.url)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_fleet_is_found_once_it_is_complete(directory):
    with pytest.raises(UnavailableError, match="none of the ranks of fleet 'f'"):
        directory.find("f", timeout=0.1)
    assert directory.register(entry(1)) == 30
    with pytest.raises(UnavailableError, match="1 of 2 ranks of fleet 'f'"):
        directory.find("f", timeout=0.1)
    directory.register(entry(0))
    assert directory.find("f", keys=KEYS) == [entry(0), entry(1)]
    with pytest.raises(UnavailableError):
        directory.find("another", timeout=0.1)


def test_find_waits_for_the_last_rank(directory):
    directory.register(entry(0))
    late = threading.Timer(0.3, directory.register, (entry(1),))
    late.start()
    assert len(directory.find("f", keys=KEYS, timeout=10)) == 2
    late.join()


def test_registration_is_idempotent_and_a_restarted_rank_replaces_itself(directory):
    for _ in range(3):
        directory.register(entry(0))
        directory.register(entry(1))
    again = entry(0, generation="f" * 32, started=200, address="tcp://127.0.0.1:6000")
    directory.register(again)
    assert directory.find("f", keys=KEYS) == [again, entry(1)]
    with pytest.raises(ConfigError, match=r"started at 100, not after .* started at 200"):
        directory.register(entry(0))
    assert directory.find("f", keys=KEYS)[0] == again


def test_a_rank_is_never_overwritten_by_another_key(directory):
    directory.register(entry(0))
    directory.register(entry(1))
    for thief in (OTHER.public, None):
        with pytest.raises(ConfigError) as caught:
            directory.register(entry(0, public_key=thief, generation="f" * 32, started=900))
        assert KEYS.public in str(caught.value)
        assert str(thief) in str(caught.value)
        assert "409" in str(caught.value)
    assert directory.find("f", keys=KEYS)[0] == entry(0)


def test_contradicting_rank_counts_and_one_rank_too_many_are_refused(directory):
    directory.register(entry(0))
    with pytest.raises(ConfigError, match="has 2 ranks by 'p0' and 3 by 'p1'"):
        directory.register(entry(1, ranks=3))
    directory.register(entry(1))
    with pytest.raises(ConfigError, match="complete with 2 ranks; 'p2' is one more"):
        directory.register(entry(2))


def test_other_keys_than_ours_are_named_before_anything_is_dialled(directory):
    directory.register(entry(0))
    directory.register(entry(1))
    with pytest.raises(ConfigError, match="give the same keys file to both sides"):
        directory.find("f", keys=OTHER)
    with pytest.raises(ConfigError, match="this side None"):
        directory.find("f")


def test_entries_expire_unless_refreshed():
    clock = Clock()
    table = Table(10.0, clock)
    table.register(entry(0))
    clock.now = 6.0
    table.register(entry(1))
    assert table.find("f").complete
    clock.now = 9.9
    table.register(entry(1))
    clock.now = 10.0
    answer = table.find("f")
    assert (answer.have, answer.ranks, answer.entries, answer.complete) == (1, 2, [], False)
    # What has expired may be taken, by any key.
    table.register(entry(0, public_key=OTHER.public, generation="f" * 32))
    assert table.find("f").complete
    clock.now = 99.0
    assert table.find("f").ranks == 0


def test_the_directory_has_a_size(monkeypatch):
    from kvconnect.disagg.bootstrap import table as tables

    monkeypatch.setattr(tables, "MAX_ENTRIES", 3)
    table = Table(10.0, Clock())
    for number in range(3):
        table.register(entry(number, ranks=9))
    with pytest.raises(CapacityError, match="full: 3 ranks"):
        table.register(entry(3, ranks=9))
    table.register(entry(0, ranks=9))


def test_an_announcement_keeps_a_rank_there_and_says_when_it_has_lost_its_place():
    with DirectoryServer(ttl=0.3) as running:
        directory = Directory(running.url)
        with directory.announce(entry(0, ranks=1)) as announcement:
            time.sleep(0.8)
            assert len(directory.find("f", keys=KEYS, timeout=0.1)) == 1
            directory.register(entry(0, ranks=1, generation="f" * 32, started=200))
            deadline = time.monotonic() + 5
            while not announcement.failure:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert "not after generation" in announcement.failure
        announcement.close()
        deadline = time.monotonic() + 5
        while running.table.find("f").ranks:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_many_ranks_at_once_all_get_in(directory):
    problems = []

    def one(number):
        try:
            for _ in range(5):
                directory.register(entry(number, ranks=24))
        except Exception as error:  # noqa: BLE001
            problems.append(error)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(24)]
    [t.start() for t in threads]
    found = directory.find("f", keys=KEYS, timeout=20)
    [t.join() for t in threads]
    assert not problems
    assert {e.name for e in found} == {f"p{n}" for n in range(24)}


def test_two_keys_that_race_for_one_name_have_one_winner(directory):
    for turn in range(10):
        won, barrier = [], threading.Barrier(2)

        def claim(keys, won=won, barrier=barrier, turn=turn):
            barrier.wait()
            try:
                directory.register(entry(0, fleet=f"f{turn}", ranks=1, public_key=keys.public))
                won.append(keys)
            except ConfigError:
                pass

        threads = [threading.Thread(target=claim, args=(k,)) for k in (KEYS, OTHER)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert len(won) == 1
        assert directory.find(f"f{turn}", keys=won[0])[0].public_key == won[0].public


TOKEN = "0123456789abcdef"


@pytest.mark.parametrize("token", [None, "", "0123456789abcdee", TOKEN[:-1], "é" * 16])
def test_without_the_token_nothing_is_said_or_taken(token):
    with DirectoryServer(token=TOKEN) as running:
        if token is None or token.isascii():
            with pytest.raises(ConfigError, match="token is missing or wrong"):
                Directory(running.url, token=token).register(entry(0, ranks=1), 2)
            with pytest.raises(ConfigError, match="401"):
                Directory(running.url, token=token).find("f", timeout=2)
        else:
            said = b"POST /find HTTP/1.0\r\nAuthorization: Bearer " + token.encode() + b"\r\n\r\n"
            assert b"401" in raw(running.url, said)
        assert running.table.find("f").ranks == 0
        friend = Directory(running.url, token=TOKEN)
        friend.register(entry(0, ranks=1))
        assert friend.find("f", keys=KEYS) == [entry(0, ranks=1)]


def where(url):
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


def raw(url, data, seconds=8.0):
    with socket.create_connection(where(url), seconds) as connection:
        out = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                out += part
        except TimeoutError:
            raise
        except OSError:
            pass  # the server has closed what it did not want to read
        return out


def post(path, body, length=None):
    head = f"POST {path} HTTP/1.0\r\nContent-Length: {len(body) if length is None else length}"
    return head.encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (post("/register", b"{}"), b" 400 "),
        (post("/register", b"\xff\xfe"), b" 400 "),
        (post("/register", b"[" * 10_000), b" 400 "),
        (post("/register", msgspec.json.encode(entry(0)).replace(b"tcp:", b"http:")), b" 400 "),
        (post("/register", msgspec.json.encode(entry(0))[:-1] + b',"x":1}'), b" 400 "),
        (post("/find", b'{"fleet": ""}'), b" 400 "),
        (post("/else", b"{}"), b" 404 "),
        (post("/find", b"{}", length=server.MAX_BODY + 1), b" 413 "),
        (post("/find", b"{}", length=10**11), b" 413 "),
        (post("/find", b"{}", length="-1"), b" 411 "),
        (post("/find", b"{}", length="1" * 500), b" 411 "),
        (b"POST /find HTTP/1.0\r\n\r\n", b" 411 "),
        (b"GET / HTTP/1.0\r\n\r\n", b" 501 "),
    ],
)
def test_bad_requests_have_their_status_and_change_nothing(directory, request_, status):
    assert status in raw(directory.url, request_).split(b"\r\n")[0]
    directory.register(entry(0, ranks=1))
    assert directory.find("f", keys=KEYS) == [entry(0, ranks=1)]


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=3000), st.sampled_from([b"", b"POST /register HTTP/1.0\r\n"]))
def test_noise_is_survived(shared_server, data, head):
    raw(shared_server.url, head + data)
    assert Directory(shared_server.url).find("f", keys=KEYS) == [entry(0, ranks=1)]


@pytest.fixture(scope="module")
def shared_server():
    with DirectoryServer() as running:
        Directory(running.url).register(entry(0, ranks=1))
        yield running


def test_endless_headers_are_cut_off_and_cost_no_memory(directory):
    line = b"X-A: " + b"a" * 1000 + b"\r\n"
    answer = raw(directory.url, b"POST /find HTTP/1.0\r\n" + line * 500)
    assert b" 200 " not in answer
    directory.register(entry(0, ranks=1))


def test_slow_clients_are_cut_after_their_time_and_keep_nobody_waiting(monkeypatch):
    """Every connection is taken by clients that send a byte now and then."""
    monkeypatch.setattr(server, "REQUEST_SECONDS", 1.0)
    with DirectoryServer() as running:
        stop = threading.Event()
        slow = [
            socket.create_connection(where(running.url), 5) for _ in range(server.MAX_CONNECTIONS)
        ]

        def drip():
            while not stop.wait(0.1):
                for connection in slow:
                    try:
                        connection.send(b"P")
                    except OSError:
                        continue

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            began = time.monotonic()
            Directory(running.url).register(entry(0, ranks=1), timeout=20)
            assert time.monotonic() - began < 10
        finally:
            stop.set()
            dripping.join()
            for connection in slow:
                connection.close()


def test_closing_leaves_no_thread_and_no_descriptor():
    def count():
        names = [t.name for t in threading.enumerate() if "bootstrap" in t.name]
        return len(names), len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    for _ in range(3):
        running = DirectoryServer()
        held = socket.create_connection(where(running.url), 5)
        held.sendall(b"POST")
        Directory(running.url).register(entry(0, ranks=1))
        running.close()
        running.close()
        held.close()
    assert count() == before


def test_nobody_there_is_an_error_in_time():
    with DirectoryServer() as running:
        url = running.url
    began = time.monotonic()
    with pytest.raises(UnavailableError, match="no directory answers at"):
        Directory(url).register(entry(0), timeout=0.5)
    assert time.monotonic() - began < 3


def test_a_directory_that_comes_later_or_restarts_is_found(directory):
    with DirectoryServer() as running:
        address = "{}:{}".format(*where(running.url))
    late = []
    timer = threading.Timer(0.3, lambda: late.append(DirectoryServer(address)))
    timer.start()
    try:
        Directory(f"http://{address}").register(entry(0, ranks=1), timeout=10)
    finally:
        timer.join()
        late[0].close()
