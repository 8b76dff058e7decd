"""`Client`: the library's calls that are used here, with checked answers and no surprises.

Every method before `setup` would end the process, so an object of this class is set up. A list
of answers that is not one number per key is taken for as many failures.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvconnect.backend import Closable, Closing
from kvconnect.errors import RegistrationError, UnavailableError
from kvconnect.region import Region
from kvconnect_mooncake.address import Address
from kvconnect_mooncake.breakers import MASTER, Breakers
from kvconnect_mooncake.foreign import LOST_MASTER, words
from kvconnect_mooncake.leaving import leave
from kvconnect_mooncake.options import MooncakeOptions
from kvconnect_mooncake.rows import Part, starts

LOCAL_BUFFER = 4 << 20
"""Bytes the library takes for calls that copy: records only."""
SETUP_SECONDS = 30.0
LEAVER = "kvconnect-mooncake-leave"
NO_ANSWER = -1

Rows = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Found:
    """An object as the master knows it; `owners` are the endpoints of its memory replicas."""

    nbytes: int
    owners: tuple[str, ...]


class Client:
    """One connection to a store. Every method may be called from any thread, and may block."""

    def __init__(
        self, module: Any, address: Address, options: MooncakeOptions, breakers: Breakers
    ) -> None:
        """Set up; `UnavailableError` where the master does not take this client."""
        self._module, self._options, self.breakers = module, options, breakers
        self._closed = False
        self.host = options.host or address.own_host()
        self._store: Any = module.MooncakeDistributedStore()
        code = _bounded(lambda: self._store.setup(self._setup(address)))
        if code != 0:
            # Its end asks the master once more: now, not when this error is forgotten.
            leave(module, self._store)
            self._store = None
            raise UnavailableError(
                f"mooncake: {address.text} did not take {self.host} with segment="
                f"{options.segment} B, protocol={options.protocol}: {words(code)}; look at the "
                f"messages above and at the master's log"
            )

    def _setup(self, address: Address) -> dict[str, str]:
        options = self._options
        values = {
            "local_hostname": self.host,
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": str(options.segment),
            "local_buffer_size": str(LOCAL_BUFFER),
            "protocol": options.protocol,
            "rdma_devices": options.device,
            "master_server_addr": address.text,
        }
        if options.tenant:
            values["tenant_id"] = options.tenant
        if options.ssd:
            values |= {"enable_ssd_offload": "true", "ssd_offload_path": options.ssd}
        return values

    def config(self, *, pin: bool, groups: Sequence[str] | None = None) -> Any:
        """Return how objects are to be kept; `groups` has one id per key."""
        config, options = self._module.ReplicateConfig(), self._options
        config.replica_num = options.replicas
        config.data_type = self._module.ObjectDataType.KVCACHE
        config.with_hard_pin = pin
        if options.prefer:
            config.preferred_segment = options.prefer
        if options.soft_pin is not None:
            config.soft_pin_action = self._module.SoftPinAction.ENABLE
            config.soft_pin_ttl_ms = max(int(options.soft_pin * 1000), 1)
        if groups is not None:
            config.group_ids = list(groups)
        return config

    def find(self, keys: Sequence[str]) -> dict[str, Found]:
        """Look objects up; what is absent or not complete is left out. Takes leases."""
        # Asking for the replicas of an absent key makes the library print a line for each.
        there = self.call("batch_is_exist", len(keys), list(keys))
        names = [key for key, code in zip(keys, there, strict=True) if code == 1]
        if not names:
            return {}
        replicas = self._store.batch_get_replica_desc(names)
        found = {}
        for name in names:
            if one := self._found(name, replicas.get(name) or ()):
                found[name] = one
        return found

    def _found(self, key: str, replicas: Sequence[Any]) -> Found | None:
        nbytes, owners = -1, []
        complete = self._module.ReplicaStatus.COMPLETE
        for replica in replicas:
            if replica.status != complete:
                continue
            if replica.is_memory_replica():
                place = replica.get_memory_descriptor().buffer_descriptor
                nbytes = place.size
                owners.append(str(place.transport_endpoint))
            elif nbytes < 0 and replica.is_disk_replica():
                nbytes = replica.get_disk_descriptor().object_size
            elif nbytes < 0:
                nbytes = self._store.get_size(key)
        return Found(nbytes, tuple(owners)) if nbytes > 0 else None

    def get(self, keys: list[str], addresses: Rows, sizes: Rows) -> list[int]:
        """Read whole objects into runs; bytes or code per key."""
        name = "batch_get_into_multi_buffers"
        return self.call(name, len(keys), keys, addresses, sizes)

    def get_part(self, key: str, part: Part) -> int:
        """Read some runs of an object; needs `open_get`. Bytes or a code."""
        name, begin = "batch_get_into_multi_buffer_ranges", starts(part.sizes, part.offset)
        return self.call(name, 1, [key], [part.addresses], [part.sizes], [begin])[0]

    def open_get(self, key: str) -> int:
        """Take a lease for `get_part`; 0 or a code."""
        return self.call("batch_get_session_start", 1, [key])[0]

    def close_get(self, key: str) -> None:
        """End what `open_get` began."""
        self._store.batch_get_session_end([key])

    def tails(self, keys: list[str], slots: list[int], begin: list[int], size: int) -> list[int]:
        """Read `size` bytes from `begin` of objects into slots; bytes or code per key."""
        answers = self._store.get_into_ranges(
            slots, [[key] for key in keys], [[[0]]] * len(keys),
            [[[start]] for start in begin], [[[size]]] * len(keys),
        )  # fmt: skip
        try:
            return [int(answer[0][0]) for answer in answers]
        except (IndexError, TypeError, ValueError):
            return [NO_ANSWER] * len(keys)

    def open_put(self, keys: list[str], sizes: list[int], config: Any) -> list[int]:
        """Begin puts: 0, or EXISTS, or another code. Nothing is visible before `end_put`."""
        return self.call("batch_put_session_start", len(keys), keys, sizes, config)

    def put_runs(self, keys: list[str], addresses: Rows, sizes: Rows, begin: Rows) -> list[int]:
        """Write runs at offsets of open puts; bytes or code per key."""
        name = "batch_put_from_multi_buffer_ranges"
        return self.call(name, len(keys), keys, addresses, sizes, begin)

    def end_put(self, keys: list[str]) -> list[int]:
        """Make open puts visible; 0 or a code per key."""
        return self.call("batch_put_session_end", len(keys), keys)

    def revoke_put(self, keys: list[str]) -> None:
        """Give open puts up."""
        self._store.batch_put_session_revoke(keys)

    def remove(self, keys: list[str], *, force: bool) -> list[int]:
        """Remove objects; 0, ABSENT or LEASED per key."""
        return self.call("batch_remove", len(keys), keys, force)

    def remove_matching(self, pattern: str, *, force: bool) -> int:
        """Remove objects by regular expression and return how many."""
        return self.call("remove_by_regex", 0, pattern, force)[0]

    def put_bytes(self, key: str, value: bytes) -> int:
        """Store or replace a small object; 0 or a code."""
        return self.call("upsert", 0, key, value)[0]

    def get_bytes(self, key: str) -> bytes:
        """Return a small object, empty if it is absent."""
        return bytes(self._store.get(key))

    def register(self, address: int, nbytes: int) -> None:
        """Register memory; `RegistrationError` with the library's code."""
        code = int(self._store.register_buffer(address, nbytes))
        if code != 0:
            raise RegistrationError(
                f"mooncake: register_buffer({address:#x}, {nbytes} B): {words(code)}"
            )

    def hold(self, region: Region) -> Closable:
        """Register memory until what is returned is closed."""
        self.register(region.address, region.nbytes)
        return _Held(self, region.address)

    def unregister(self, address: int) -> None:
        """Unregister memory; `RegistrationError` with the library's code."""
        if self._closed:
            return  # closing the store unregistered all, and any call now would end the process
        code = int(self._store.unregister_buffer(address))
        if code != 0:
            raise RegistrationError(f"mooncake: unregister_buffer({address:#x}): {words(code)}")

    def close(self) -> bool:
        """Leave the store; its segment is lost.

        False where the library is still about it after `close_timeout`, in a thread of its own.
        """
        self._closed = True
        # The thread has the last reference: with an SSD the library ends only with its object.
        store, self._store = self._store, None
        leaver = threading.Thread(
            target=leave, args=(self._module, store), name=LEAVER, daemon=True
        )
        del store
        leaver.start()
        leaver.join(self._options.close_timeout)
        return not leaver.is_alive()

    def call(self, name: str, count: int, *arguments: Any) -> list[int]:
        """Call a method that answers for `count` keys (0: with one number).

        Raises `UnavailableError` at once while the master is known not to answer, and when this
        call finds out.
        """
        if not self.breakers.passes(MASTER):
            raise UnavailableError(
                f"mooncake: the master did not answer; it is asked again every "
                f"{self.breakers.seconds:g} s"
            )
        answer = getattr(self._store, name)(*arguments)
        codes = _numbers(answer if count else [answer], max(count, 1))
        lost = [code for code in codes if code in LOST_MASTER]
        if lost:
            self.breakers.trip(MASTER)
            raise UnavailableError(f"mooncake: {name}: {words(lost[0])}")
        self.breakers.heal(MASTER)
        return codes


class _Held(Closing):
    """Memory registered with the library."""

    def __init__(self, client: Client, address: int) -> None:
        self._client: Client | None = client
        self._address = address

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.unregister(self._address)


def _numbers(answer: Any, count: int) -> list[int]:
    try:
        codes = [int(one) for one in answer]
    except (TypeError, ValueError):
        return [NO_ANSWER] * count
    return codes if len(codes) == count else [NO_ANSWER] * count


def _bounded(setup: Any) -> int:
    """Run `setup` in a thread; `UnavailableError` if it takes too long.

    The library keeps the interpreter's lock meanwhile: 2 s where the master does not answer.
    """
    result: Future[int] = Future()
    thread = threading.Thread(target=lambda: result.set_result(setup()), daemon=True)
    thread.start()
    try:
        return int(result.result(SETUP_SECONDS))
    except TimeoutError:
        raise UnavailableError(
            f"mooncake: setup did not end within {SETUP_SECONDS:g} s; is the master healthy?"
        ) from None
