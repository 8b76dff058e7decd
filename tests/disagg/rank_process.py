"""One endpoint in a process of its own, driven by JSON over a pipe, for tests that kill it."""

import os
import random
import threading
import time
from pathlib import Path

import msgspec
import numpy as np

from kvconnect.disagg import messages
from kvconnect.disagg.decode import DecodeEndpoint
from kvconnect.disagg.keys import Keys
from kvconnect.disagg.options import EndpointOptions
from kvconnect.disagg.prefill import PrefillEndpoint
from kvconnect.disagg.transports import open_transport
from kvconnect.errors import KVConnectError
from kvconnect.hostpool import HostPool
from kvconnect.identity import Identity
from kvconnect.placement import Placement

GEOMETRY = {"page_size": 16, "layers": 4, "heads": 4, "head_dim": 64}
LAYOUTS = {"prefill": "page_first", "decode": "page_head"}
PAGES = 40


class Pace:
    """Stands before a transport's `submit`: batches start no faster than one in `pace` seconds,
    from batch `slow` on in thirty times that; tells how many have.
    """

    def __init__(self, transport, pace):
        self.submit, transport.submit = transport.submit, self
        self.pace, self.batches, self.slow = pace, 0, None
        self.changed = threading.Condition()

    def __call__(self, *arguments):
        slow = self.slow is not None and self.batches >= self.slow
        time.sleep(self.pace * (30 if slow else 1))
        transfer = self.submit(*arguments)
        with self.changed:
            self.batches += 1
            self.changed.notify_all()
        return transfer


def attached(transport):
    """How many peers hold on to this rank's memory, and how many batches are under way."""
    if transport.name == "shm":
        return transport._listener.attached(), len(transport._mover.under_way())
    return transport.life.attached(), len(transport._under_way())


def truth(component, tokens, seed):
    """(token, layer, head, dim) int16 by plain arithmetic of the indices."""
    shape = np.arange(tokens), np.arange(4), np.arange(4), np.arange(64)
    token, layer, head, dim = np.meshgrid(*shape, indexing="ij")
    mixed = token * 7919 + layer * 611953 + head * 104729 + dim * 31 + ord(component) * 1299709
    return ((mixed + seed * 15485863) % 65521).astype(np.uint16)


class Rank:
    """What the test may ask for."""

    def __init__(self, role, name, keys, carrier, options, pace):
        identity = Identity(
            model="m", weights="w", dtype="int16", page_size=16, layers=4, heads=4,
            head_dim=64, v_head_dim=64,
        )  # fmt: skip
        name_of, settings, environment = carrier
        os.environ.update(environment)
        self.transport = open_transport(name_of, settings)
        self.pace = Pace(self.transport, pace)
        plan = HostPool.plan(layout=LAYOUTS[role], pages=PAGES, dtype="int16", **GEOMETRY)
        self.pool = plan.place(self.transport.allocate(plan.nbytes, "pool"))
        kind = PrefillEndpoint if role == "prefill" else DecodeEndpoint
        self.end = kind(
            self.pool,
            Placement.whole(layers=4, heads=4),
            identity,
            self.transport,
            keys=Keys(*keys) if keys else None,
            options=EndpointOptions(name=name, fleet=options.pop("fleet", name), **options),
        )
        self.requests = {}

    def listen(self, address):
        return self.end.listen(address)

    def connect(self, addresses, timeout):
        self.end.connect(addresses, timeout)

    def fill(self, tokens, seed):
        for c in "kv":
            rows = self.pool.array(c)[: -(-tokens // 16)]
            rows[...] = truth(c, tokens, seed).reshape(-1, 16, 4, 4, 64).transpose(0, 2, 1, 3, 4)

    def paint(self, pages, value):
        """Use pages for something else."""
        for c in "kv":
            self.pool.array(c)[pages] = value

    def painted(self, pages, value):
        return all(bool((self.pool.array(c)[pages] == value).all()) for c in "kv")

    def holds(self, pages, seed, others):
        """Whether pages hold the truth, and all others one value."""
        tokens, good = len(pages) * 16, True
        for c in "kv":
            array = self.pool.array(c)
            rows = array[pages].transpose(0, 2, 1, 3, 4).reshape(tokens, 4, 4, 64)
            good &= bool((rows == truth(c, tokens, seed)).all())
            good &= bool((np.delete(array, pages, axis=0) == others).all())
        return good

    def send(self, name, pages, timeout):
        self.requests[name] = self.end.send(name, pages, timeout=timeout)

    def receive(self, name, pages, timeout, way):
        self.requests[name] = self.end.receive(name, pages, timeout=timeout, way=way)

    def wait(self, name, timeout):
        outcome = self.requests[name].wait(timeout)
        return outcome.state.value, outcome.reason

    def quiet(self, name, timeout):
        return self.requests[name].quiet(timeout)

    def abort(self, name):
        self.end.abort(name, "the user has left")

    def why(self):
        """How the last push was sent, and why so."""
        return self.end.trips()[-1].why

    def quarantined(self):
        return self.end.quarantined()

    def slow(self, start):
        self.pace.slow = start

    def batches(self, count, timeout):
        """Wait until so many batches have been started; returns how many."""
        with self.pace.changed:
            self.pace.changed.wait_for(lambda: self.pace.batches >= count, timeout)
            return self.pace.batches

    def counts(self):
        """Everything that must come back to where it was."""
        end = self.end
        links, moves = attached(self.transport)
        return {
            "fds": sum(1 for _ in Path("/proc/self/fd").iterdir()),
            "tasks": sum(1 for _ in Path("/proc/self/task").iterdir()),
            "peers": len(end.peers),
            "slots": end.ring.free,
            "links": links,
            "moves": moves,
            "regions": len(self.transport.regions),
            "requests": len(getattr(end, "_sendings", ())) + len(getattr(end, "_receivings", ())),
            "orders": len(getattr(end, "_orders", ())),
            "maps": sum("memfd" in line for line in Path("/proc/self/maps").open()),
        }

    def counters(self):
        return self.end.counters()

    def lie(self, kind, number):
        """Say something about memory that is not ours to name; to the first peer or address."""
        end = self.end
        peer = next(iter(end.peers.values()), None)
        if kind == "grant":
            said = messages.Grant(
                f"lie{number}", messages.pack_pages(np.array([PAGES + number], dtype=np.uint64)),
                16, "push", 5.0, False,
            )  # fmt: skip
        elif kind == "back":
            said = messages.Back(number)
        elif kind == "staged":
            said = messages.Staged(f"lie{number}", (0, 4), 0, 1, number)
        else:
            hello = end.hello()
            region, staging = hello.side.regions[0], hello.staging
            if kind == "staging":
                staging = msgspec.structs.replace(staging, address=staging.address + (64 << 20))
            else:
                region = msgspec.structs.replace(region, address=region.address + (64 << 20))
            side = msgspec.structs.replace(hello.side, regions=(region, *hello.side.regions[1:]))
            said = msgspec.structs.replace(hello, staging=staging, side=side)
        end.in_thread(lambda: end.send_to(peer, said))

    def shout(self, kind, number):
        """Send a peer frames that are none: noise, changed messages, or one that is too long."""
        end, rng = self.end, random.Random(number)
        peer = next(iter(end.peers.values()))
        said = bytearray(messages.encode(messages.Envelope(
            end.generation, peer.generation, messages.Abort(f"none{number}", "it never was")
        )))  # fmt: skip
        frames = [b"\x01" * (messages.MAX_FRAME_BYTES + 1)]
        if kind == "garbage":
            frames = [said[: number % 2] + rng.randbytes(rng.randrange(300)) for _ in range(20)]
        elif kind == "changed":
            frames = [said.copy() for _ in range(20)]
            for frame in frames:
                frame[rng.randrange(len(frame))] = rng.randrange(256)

        def send():
            channel = end._channel
            client = channel._clients.get(peer.route)
            for frame in map(bytes, frames):
                if client is not None:
                    client.send(frame)
                else:
                    channel._server.send_multipart([bytes.fromhex(peer.route), frame])

        end.in_thread(send)

    def close(self):
        self.end.close()
        self.transport.close()
        self.pool.close()


def main(conn, *arguments):
    try:
        rank = Rank(*arguments)
        conn.send_bytes(msgspec.json.encode(["ok", None]))
        while True:
            word, *arguments = msgspec.json.decode(conn.recv_bytes())
            try:
                answer = ["ok", getattr(rank, word)(*arguments)]
            except KVConnectError as error:
                answer = [type(error).__name__, str(error)]
            conn.send_bytes(msgspec.json.encode(answer))
            if word == "close" and answer[0] == "ok":
                return
    except (EOFError, OSError):
        os._exit(3)  # the test is gone
