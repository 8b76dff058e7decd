"""Which objects are moved together, against a walk that looks at one object after another."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvconnect_nvme.grouping import BOUNCED, SMALLEST, group

BLOCK, SLAB = 4096, 16 << 20


class Files:
    """Slabs of which every one is a file of its own, by number."""

    slab_bytes = SLAB

    def locate(self, address):
        return 100 + address // SLAB, address % SLAB


OBJECTS = st.lists(
    st.tuples(
        st.integers(1, 6 << 20),  # bytes
        st.sampled_from([0, 0, 0, 1, 7]),  # free blocks before it
        st.booleans(),  # short
        st.sampled_from([True, True, False]),  # aligned
    ),
    max_size=24,
)


def laid_out(objects, order):
    """Return sizes, places, short and aligned, no object across the end of a slab."""
    end, places = 0, {}
    for i in order:
        nbytes, gap, _, _ = objects[i]
        start = end + gap * BLOCK
        room = -(-nbytes // BLOCK) * BLOCK
        if start // SLAB != (start + room - 1) // SLAB:
            start = -(-start // SLAB) * SLAB
        places[i], end = start, start + room
    return places


def walked(objects, places, options, largest):
    """Return the groups as lists of objects, by the rules one at a time."""

    def room(i):
        return (objects[i][0] + BLOCK - 1) // BLOCK * BLOCK

    def bounced(i):
        return objects[i][2] or not objects[i][3]

    limit = min(max(sum(map(room, places)) // options.io_threads, SMALLEST), largest)
    out, nbytes = [], 0
    for i in sorted(places, key=lambda i: places[i]):
        most = min(limit, BOUNCED, options.bounce) if bounced(i) else limit
        last = out[-1][-1] if out else None
        if (
            last is not None
            and places[last] + room(last) == places[i]
            and places[last] // SLAB == places[i] // SLAB
            and bounced(last) == bounced(i)
            and nbytes + room(i) <= most
        ):
            out[-1].append(i)
            nbytes += room(i)
        else:
            out.append([i])
            nbytes = room(i)
    return out


@given(OBJECTS, st.randoms(), st.sampled_from([1, 4, 8]), st.sampled_from([4 << 20, 16 << 20]))
def test_groups_are_those_of_a_walk(objects, random, threads, largest):
    order = list(range(len(objects)))
    random.shuffle(order)
    places = laid_out(objects, order)
    memory = SimpleNamespace(
        sizes=np.array([one[0] for one in objects], dtype=np.int64),
        short=np.array([one[2] for one in objects], dtype=np.bool_),
        aligned=np.array([one[3] for one in objects], dtype=np.bool_),
    )
    options = SimpleNamespace(io_threads=threads, bounce=2 << 20)
    groups = group(places, memory, Files(), options, largest)
    assert [list(one.objects) for one in groups] == walked(objects, places, options, largest)
    for one in groups:
        first, last = one.objects[0], one.objects[-1]
        assert one.slab == places[first] // SLAB
        assert (one.fd, one.offset) == (100 + one.slab, places[first] % SLAB)
        assert list(one.starts) == [places[i] - places[first] for i in one.objects]
        end = places[last] + -(-objects[last][0] // BLOCK) * BLOCK
        assert one.nbytes == end - places[first]
        assert all(one.bounced == (objects[i][2] or not objects[i][3]) for i in one.objects)
