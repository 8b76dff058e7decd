"""What stores with a catalog answer alike, whatever moves their bytes.

The catalog of a store is a module of functions over its core; the store adds that it is open,
and the refusals that must read the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvconnect.backend import Batch, Closing
from kvconnect.errors import ConfigError

C = TypeVar("C")
C_contra = TypeVar("C_contra", contravariant=True)


class Catalog(Protocol[C_contra]):
    """The functions of such a module; each is a method of `StoreFront` without the core."""

    def exists(
        self, core: C_contra, keys: Sequence[str], nbytes: Sequence[int]
    ) -> NDArray[np.bool_]:
        """Tell which keys are present with exactly these sizes."""

    def remove(self, core: C_contra, keys: Sequence[str]) -> NDArray[np.bool_]:
        """Remove keys; True where one was there."""

    def list_keys(self, core: C_contra, prefix: str) -> list[str]:
        """Return the keys that begin with `prefix`, sorted."""

    def clear(self, core: C_contra, prefix: str) -> int:
        """Remove all keys that begin with `prefix`, which is not empty."""

    def put_record(self, core: C_contra, name: str, value: bytes) -> None:
        """Store or replace a record."""

    def records(self, core: C_contra) -> dict[str, bytes]:
        """Return all records."""


class StoreFront(Closing, Generic[C]):
    """The half of a `Backend` that asks its catalog. A store sets `name`, `catalog` and `core`.

    Every method raises `ClosedError` after `close`.
    """

    name: str
    core: C
    catalog: ClassVar[Catalog[C]]

    def exists(self, keys: Sequence[str], nbytes: Sequence[int]) -> NDArray[np.bool_]:
        """Tell which keys are present with exactly these sizes: (keys,) bool."""
        self._check_open("exists")
        return self.catalog.exists(self.core, keys, nbytes)

    def remove(self, keys: Sequence[str]) -> NDArray[np.bool_]:
        """Remove keys; True where one was there: (keys,) bool."""
        self._check_open("remove")
        return self.catalog.remove(self.core, keys)

    def list_keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with `prefix`, sorted."""
        self._check_open("list_keys")
        return self.catalog.list_keys(self.core, prefix)

    def clear(self, prefix: str) -> int:
        """Remove all keys that begin with `prefix`; `ConfigError` if it is empty."""
        self._check_open("clear")
        need_prefix(self.name, prefix)
        return self.catalog.clear(self.core, prefix)

    def put_record(self, name: str, value: bytes) -> None:
        """Store or replace a record of at most 64 KiB."""
        self._check_open("put_record")
        self.catalog.put_record(self.core, name, value)

    def records(self) -> dict[str, bytes]:
        """Return all records."""
        self._check_open("records")
        return self.catalog.records(self.core)

    def _check_open(self, operation: str) -> None:
        """Raise `ClosedError` where nothing can be asked any more."""
        raise NotImplementedError


def need_prefix(owner: str, prefix: str) -> None:
    """Raise `ConfigError` for a `clear` that would drop what others have stored."""
    if not prefix:
        raise ConfigError(f"{owner}: clear needs a prefix; an empty one would drop everything")


def need_distinct(owner: str, batch: Batch) -> None:
    """Raise `ConfigError` for a batch that names a key twice: one of the two would be late."""
    if len(set(batch.keys)) != len(batch.keys):
        raise ConfigError(f"{owner}: {len(batch)} keys are not distinct; ask for each once")
