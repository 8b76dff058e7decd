"""Memory registered with a library: in order, rolled back, counted, and cut to what is taken."""

import pytest

from kvconnect.attach import register_pool
from kvconnect.backend import Closing
from kvconnect.errors import RegionTooLargeError, RegistrationError
from kvconnect.region import Region
from kvconnect.registering import Memory
from kvconnect.registrations import Registrations

from .held_pools import held

BASE = 0x10000


class Library:
    """Notes what is registered (+) and unregistered (-); refuses what it is told to."""

    def __init__(self, most=None, broken=()):
        self.most, self.broken, self.calls = most, broken, []

    def hold(self, region):
        self.calls.append(("+", region.address, region.nbytes))
        if region.address in self.broken or (self.most and region.nbytes > self.most):
            raise RegistrationError("library: register_buffer: -600")
        return Token(self.calls, region)

    def now(self):
        """Return what is registered: +1 and -1 by address, as far as the library took it."""
        taken = [c for c in self.calls if c[1] not in self.broken]
        taken = [c for c in taken if not self.most or c[2] <= self.most]
        plus = [c[1:] for c in taken if c[0] == "+"]
        for call in taken:
            if call[0] == "-":
                plus.remove(call[1:])
        return sorted(plus)


class Token(Closing):
    def __init__(self, calls, region):
        self.calls, self.region = calls, region

    def close(self):
        self.calls.append(("-", self.region.address, self.region.nbytes))


def memory_of(library, most=None):
    table = Registrations("mine", list, 1.0)
    return Memory("mine", table, library.hold, most), table


def regions(*sizes):
    starts = [BASE * (i + 1) for i in range(len(sizes))]
    return [Region(f"pool#{i}", at, n) for i, (at, n) in enumerate(zip(starts, sizes, strict=True))]


def test_regions_are_registered_in_order_and_rolled_back():
    # Case 14: the third chunk fails; then the largest alone is tried, which is not the reason.
    library = Library(broken=[3 * BASE])
    memory, table = memory_of(library, 0x2000)
    with pytest.raises(RegistrationError, match=r"pool#2 .* after 2 of 3 chunks") as failed:
        memory.add(regions(0x2000, 0x1000, 0x1000))
    assert not isinstance(failed.value, RegionTooLargeError)
    first, second, third = BASE, 2 * BASE, 3 * BASE
    assert [(sign, at) for sign, at, _ in library.calls] == [
        ("+", first), ("+", second), ("+", third), ("-", second), ("-", first),
        ("+", first), ("-", first),
    ]  # fmt: skip
    assert table.regions == ()
    assert memory.nbytes == 0


def test_a_region_is_registered_once_for_all_who_use_it():
    library = Library()
    memory, _ = memory_of(library)
    one, two = regions(4096, 8192)
    first, second = memory.add([one, two]), memory.add([one])
    assert memory.nbytes == 12288
    first.close()
    first.close()
    assert library.now() == [(BASE, 4096)]
    assert memory.nbytes == 4096
    second.close()
    assert library.now() == []
    memory.add([one])
    memory.close()
    assert library.now() == []


@pytest.mark.parametrize(
    ("nbytes", "most", "found"),
    [
        (1 << 20, 1 << 18, 1 << 18),
        ((1 << 20) + 1, 1 << 20, 1 << 20),
        (5 << 16, (1 << 18) - 1, 1 << 17),  # no power of two: half of what is possible is found
        (8192, 4096, 4096),
    ],
)
def test_how_much_is_taken_is_found_and_remembered(nbytes, most, found):
    library = Library(most)
    memory, table = memory_of(library)
    (region,) = regions(nbytes)
    with pytest.raises(RegionTooLargeError, match=f"max_region_bytes={found}") as refused:
        memory.add([region])
    assert refused.value.max_region_bytes == memory.most == found
    assert (library.now(), table.regions) == ([], ())
    asked = len(library.calls)
    with pytest.raises(RegionTooLargeError):
        memory.add([region])
    assert len(library.calls) == asked, "the library is asked once"
    with memory.add([Region("part", region.address, found)]):
        assert library.now() == [(region.address, found)]


def test_what_is_refused_in_any_size_is_not_too_large():
    library = Library(broken=[BASE])
    memory, _ = memory_of(library)
    with pytest.raises(RegistrationError, match="-600") as refused:
        memory.add(regions(1 << 20))
    assert not isinstance(refused.value, RegionTooLargeError)
    assert memory.most is None


def test_a_pool_is_cut_until_it_is_taken():
    one = held("pclshd", pages=64)
    page = sum(buffer.region.nbytes for buffer in one.buffers) // 64
    library = Library(most=8192)
    memory, table = memory_of(library)
    with register_pool(memory.add, one.pool, None, None):
        sizes = [nbytes for _, nbytes in library.now()]
        assert max(sizes) <= 8192
        assert sum(sizes) == 64 * page
        # Pages are outermost: whole ones in every chunk.
        assert all(nbytes % page == 0 for nbytes in sizes)
        assert len(table.regions) == len(sizes)
    assert library.now() == []


def test_pages_that_are_larger_than_what_is_taken():
    one = held("pclshd", pages=2, size=512)
    library = Library(most=4096)
    memory, _ = memory_of(library)
    with pytest.raises(RegistrationError, match="use a smaller page_size"):
        register_pool(memory.add, one.pool, None, None)
    assert library.now() == []
