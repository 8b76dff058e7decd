"""A state machine that drives any backend beside a plain dict, and compares after every step.

Every expectation is computed anew from the dict. The dict holds, for each key, the set of
values the store may have: more than one only after a store that was not reported OK.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvconnect.backend import (
    Backend,
    Op,
    Status,
    SupportsClear,
    SupportsDelete,
    SupportsListing,
)
from kvconnect.testing.memory import Objects, payload
from kvconnect.testing.strategies import OBJECT_SIZES, objects
from kvconnect.testing.suite.base import key, move

NAMESPACES = ("llama", "llama-2")
NAMES = [key(number, namespace) for namespace in NAMESPACES for number in range(4)]
PREFIXES = [*sorted({name[:16] for name in NAMES}), NAMES[0], NAMES[0][:1]]
VERSIONS = st.tuples(st.integers(0, 3), st.sampled_from(OBJECT_SIZES))

Value = bytes | None


class BackendMachine(RuleBasedStateMachine):
    """Base of the machines; `backend_machine` sets the three attributes."""

    open_store: Callable[[], Callable[[], Backend]]
    durable: bool
    faults: bool

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, set[Value]] = {}
        self.opener = type(self).open_store()
        self.store = self.opener()

    def teardown(self) -> None:
        self.store.close()

    def may_be(self, name: str) -> set[Value]:
        """Return the values that `name` may have: None for absent."""
        return self.model.get(name, {None})

    @initialize()
    def starts_empty(self) -> None:
        assert not self.store.exists(NAMES, [1] * len(NAMES)).any()

    @rule(
        names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=5, unique=True),
        data=st.data(),
    )
    def put(self, names: list[str], data: st.DataObject) -> None:
        """Store new keys, the same bytes again, or other bytes under a key."""
        versions = [data.draw(VERSIONS) for _ in names]
        held: Objects = data.draw(objects([size for _, size in versions]))
        contents = [
            payload(f"{number}:{name}", size)
            for name, (number, size) in zip(names, versions, strict=True)
        ]
        for index, content in enumerate(contents):
            held.write(index, content)
        with self.store.register([held.region]):
            outcome = move(self.store, held.batch(Op.STORE, names))
        held.check()
        note(repr(outcome))
        assert self.faults or outcome.ok.all(), dict(outcome.causes)
        for name, content, ok in zip(names, contents, outcome.ok.tolist(), strict=True):
            self.model[name] = {content} if ok else {None, *self.may_be(name)}

    @rule(
        names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=6, unique=True),
        data=st.data(),
    )
    def get(self, names: list[str], data: st.DataObject) -> None:
        """Load keys at the size they have, or at another."""
        sizes = [self._size(name, data) for name in names]
        held: Objects = data.draw(objects(sizes))
        with self.store.register([held.region]):
            outcome = move(self.store, held.batch(Op.LOAD, names))
        held.check()
        note(repr(outcome))
        assert outcome.dirty is not None
        for index, name in enumerate(names):
            self._check_loaded(name, Status(int(outcome.status[index])), held, index)
            if not outcome.ok[index] and not outcome.dirty[index]:
                assert held.untouched(index)

    def _size(self, name: str, data: st.DataObject) -> int:
        here = sorted({len(value) for value in self.may_be(name) if value is not None})
        return int(data.draw(st.sampled_from(here or OBJECT_SIZES) | st.sampled_from(OBJECT_SIZES)))

    def _check_loaded(self, name: str, status: Status, held: Objects, index: int) -> None:
        size = held.sizes[index]
        allowed = set[Status]()
        for value in self.may_be(name):
            if value is None:
                allowed.add(Status.ABSENT)
            else:
                allowed.add(Status.OK if len(value) == size else Status.SIZE_MISMATCH)
        injected = self.faults and status is not Status.OK
        assert injected or status in allowed, f"{name[-4:]} at {size} B"
        if status is Status.OK:
            assert held.read(index) in self.may_be(name)

    @rule(data=st.data())
    def exists(self, data: st.DataObject) -> None:
        """Ask for all keys at once."""
        sizes = [self._size(name, data) for name in NAMES]
        found = self.store.exists(NAMES, sizes).tolist()
        for name, size, has in zip(NAMES, sizes, found, strict=True):
            answers = {value is not None and len(value) == size for value in self.may_be(name)}
            assert has in answers, f"{name[-4:]} at {size} B"

    @precondition(lambda self: isinstance(self.store, SupportsDelete))
    @rule(names=st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
    def remove(self, names: list[str]) -> None:
        """Remove keys that are there or not."""
        assert isinstance(self.store, SupportsDelete)
        removed = self.store.remove(names).tolist()
        for name, was in zip(names, removed, strict=True):
            assert was in {value is not None for value in self.may_be(name)}
            self.model.pop(name, None)

    @precondition(lambda self: isinstance(self.store, SupportsClear))
    @rule(prefix=st.sampled_from(PREFIXES))
    def clear(self, prefix: str) -> None:
        """Drop a namespace."""
        assert isinstance(self.store, SupportsClear)
        gone = [self.may_be(name) for name in list(self.model) if name.startswith(prefix)]
        least = sum(None not in values for values in gone)
        most = sum(values != {None} for values in gone)
        assert least <= self.store.clear(prefix) <= most
        self.model = {k: v for k, v in self.model.items() if not k.startswith(prefix)}

    @precondition(lambda self: self.durable)
    @rule()
    def reopen(self) -> None:
        """Close the store and open it again."""
        self.store.close()
        self.store = self.opener()

    @invariant()
    def listing_agrees(self) -> None:
        """Compare the whole listing, and each namespace's, with the dict."""
        if not isinstance(self.store, SupportsListing):
            return
        for prefix in ("", NAMES[0][:16]):
            listed = self.store.list_keys(prefix)
            assert listed == sorted(set(listed))
            named = {name for name in self.model if name.startswith(prefix)}
            assert {n for n in named if None not in self.may_be(n)} <= set(listed)
            assert set(listed) <= {n for n in named if self.may_be(n) != {None}}


def backend_machine(
    open_store: Callable[[], Callable[[], Backend]], *, durable: bool, faults: bool = False
) -> type[BackendMachine]:
    """Return a machine class for one backend; its ``TestCase`` attribute is what pytest runs.

    `open_store` is called once per example and returns what opens that example's store: with
    `durable`, opening a second time must find the objects of the first. With `faults` any key
    may fail to be stored or loaded, as long as nothing wrong is returned; else all must work.
    """
    namespace = {"open_store": staticmethod(open_store), "durable": durable, "faults": faults}
    return type("Machine", (BackendMachine,), namespace)
