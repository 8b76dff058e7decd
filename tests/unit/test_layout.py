"""Layouts: every operation against a walk over all elements."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kvconnect.errors import KVConnectError, LayoutError
from kvconnect.layout import Axis, Layout
from tests.unit.algebra_oracle import (
    as_bytes,
    elements,
    examples,
    layouts,
    layouts_of,
    shapes,
    spanned,
)

ITEMSIZES = st.sampled_from([1, 2, 3, 4, 8])


@examples(60)
@given(shapes(), ITEMSIZES, st.integers(0, 2**63))
def test_packed_elements_follow_each_other_in_c_order(extents, itemsize, offset):
    layout = Layout.packed(extents, itemsize, offset=offset)
    found = elements(layout)
    names = list(extents)
    expected = offset
    for index in itertools.product(*(range(extents[name]) for name in names)):
        by_name = dict(zip(names, index, strict=True))
        assert found[tuple(by_name[n] for n in sorted(names))] == expected
        expected += itemsize
    assert layout.end == expected
    assert layout == Layout.packed(list(extents.items()), itemsize, offset=offset)
    assert (layout.itemsize, layout.offset, layout.form) == (itemsize, offset, "axes")


@examples(100)
@given(layouts())
def test_sizes_are_those_of_the_walk(layout):
    found = elements(layout)
    assert layout.nbytes == len(found) * layout.itemsize
    assert layout.end == max(found.values()) + layout.itemsize
    assert layout.names == tuple(axis.name for axis in layout.axes)
    assert layout.extents == {axis.name: axis.extent for axis in layout.axes}
    for axis in layout.axes:
        assert layout.axis(axis.name) == axis
    assert [a.stride for a in layout.by_stride()] == sorted(
        a.stride for a in layout.axes if a.extent > 1
    )
    assert hash(layout) == hash(Layout(layout.axes, layout.itemsize, layout.offset))


@examples(300)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 24)), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_construction_refuses_exactly_what_does_not_nest(pairs, itemsize):
    axes = tuple(Axis(f"x{i}", extent, stride) for i, (extent, stride) in enumerate(pairs))
    moving = sorted((a for a in axes if a.extent > 1), key=lambda a: a.stride)
    nests = True
    for i, axis in enumerate(moving):
        # `spanned` builds the layout of what nests so far, so it stops at the first refusal
        nests = nests and axis.stride >= spanned(moving[:i], itemsize)
    if nests:
        taken = as_bytes(elements(Layout(axes, itemsize)).values(), itemsize)
        assert len(set(taken)) == len(taken)
    else:
        with pytest.raises(LayoutError):
            Layout(axes, itemsize)


@examples(200)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 16)), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_overlapping_elements_are_always_refused(pairs, itemsize):
    taken = [
        sum(i * stride for i, (_, stride) in zip(index, pairs, strict=True)) + byte
        for index in itertools.product(*(range(extent) for extent, _ in pairs))
        for byte in range(itemsize)
    ]
    assume(len(set(taken)) < len(taken))
    with pytest.raises(LayoutError):
        Layout(tuple(Axis(f"x{i}", e, s) for i, (e, s) in enumerate(pairs)), itemsize)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Axis("a", 0, 4),
        lambda: Axis("a", -1, 4),
        lambda: Axis("a", 2, 0),
        lambda: Axis("a", 2, -4),
        lambda: Layout((Axis("a", 2, 4), Axis("a", 2, 8)), 4),
        lambda: Layout((Axis("a", 2, 4),), 0),
        lambda: Layout((Axis("a", 2, 4),), -1),
        lambda: Layout((Axis("a", 2, 4),), 4, -1),
        lambda: Layout.packed({"a": 0}, 4),
        lambda: Layout.packed([("a", 2), ("a", 2)], 4),
        lambda: Layout.packed({"a": 2}, 4).shifted(-1),
        lambda: Layout.packed({"a": 2}, 4).axis("b"),
        lambda: Layout.packed({"a": 2, "b": 2}, 4).rename({"a": "b"}),
    ],
)
def test_impossible_layouts_are_typed_errors(build):
    with pytest.raises(LayoutError):
        build()


def test_an_unknown_axis_is_named_with_those_there_are():
    layout = Layout.packed({"page": 2, "head": 4}, 2)
    with pytest.raises(LayoutError, match=r"(?s)layer.*page.*head"):
        layout.axis("layer")


@st.composite
def _views(draw):
    """Slicing steps and a transposition of a small array, extent-1 dims included."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    slices = []
    for extent in shape:
        start = draw(st.integers(0, extent - 1))
        stop = draw(st.integers(start + 1, extent))
        slices.append(slice(start, stop, draw(st.integers(1, 3))))
    return shape, tuple(slices), draw(st.permutations(range(len(shape))))


def _check_view(view, layout, itemsize, offset, names, strides):
    """Elements of a view of arange() carry their own place in memory."""
    first = int(view[(0,) * len(names)])
    found = elements(layout)
    count = 0
    for index in itertools.product(*(range(n) for n in view.shape)):
        by_name = dict(zip(names, index, strict=True))
        expected = offset + (int(view[index]) - first) * itemsize
        assert found[tuple(by_name[n] for n in sorted(names))] == expected
        count += 1
    assert len(found) == count
    assert layout.names == tuple(names)
    assert layout.itemsize == itemsize
    for name, extent, stride in zip(names, view.shape, strides, strict=True):
        assert extent > 1 or layout.axis(name).stride <= stride


@examples(100)
@given(_views(), st.sampled_from([np.int16, np.int32, np.int64]), st.integers(0, 99))
def test_of_numpy_reads_any_view(view, dtype, offset):
    shape, slices, order = view
    array = np.arange(np.prod(shape), dtype=dtype).reshape(shape)[slices].transpose(order)
    names = [f"n{i}" for i in order]
    layout = Layout.of(array, names, offset=offset)
    _check_view(array, layout, array.itemsize, offset, names, array.strides)


@examples(100)
@given(_views(), st.sampled_from([torch.int16, torch.int32, torch.int64]), st.integers(0, 99))
def test_of_torch_reads_any_view(view, dtype, offset):
    shape, slices, order = view
    tensor = torch.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)[slices].permute(*order)
    names = [f"n{i}" for i in order]
    layout = Layout.of(tensor, names, offset=offset)
    size = tensor.element_size()
    _check_view(tensor, layout, size, offset, names, [s * size for s in tensor.stride()])


@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_of_agrees_between_torch_and_numpy(itemsize):
    dtype, tdtype = {
        1: (np.uint8, torch.uint8),
        2: (np.float16, torch.bfloat16),
        4: (np.float32, torch.float32),
    }[itemsize]
    array = np.zeros((3, 1, 4, 6), dtype)[:, :, 1:3, ::2]
    tensor = torch.zeros((3, 1, 4, 6), dtype=tdtype)[:, :, 1:3, ::2]
    names = ("page", "layer", "slot", "dim")
    ours, theirs = Layout.of(array, names), Layout.of(tensor, names)
    assert elements(ours) == elements(theirs)
    assert ours.order() == theirs.order() == "page.slot.dim"


def test_extent_one_axes_take_whatever_stride_the_library_invents():
    tensor = torch.zeros(24, dtype=torch.int32).as_strided((1, 2, 1, 4), (0, 4, 999, 1))
    layout = Layout.of(tensor, ("page", "slot", "head", "dim"))
    assert layout.axis("head").stride <= 999 * 4
    assert sorted(elements(layout).values()) == [0, 4, 8, 12, 16, 20, 24, 28]
    array = np.lib.stride_tricks.as_strided(np.zeros(4, np.int32), (1, 4), (0, 4))
    assert sorted(elements(Layout.of(array, ("page", "dim"))).values()) == [0, 4, 8, 12]
    backwards = np.zeros((1, 4), np.int32)[::-1]
    assert sorted(elements(Layout.of(backwards, ("page", "dim"))).values()) == [0, 4, 8, 12]


@pytest.mark.parametrize(
    ("tensor", "names"),
    [
        (np.zeros((2, 3)), ("a",)),
        (np.zeros((2, 3)), ("a", "b", "c")),
        (np.zeros((2, 3)), ("a", "a")),
        (np.zeros((2, 0)), ("a", "b")),
        (np.zeros((2, 3))[::-1], ("a", "b")),
        (np.broadcast_to(np.zeros(3), (2, 3)), ("a", "b")),
        (np.lib.stride_tricks.sliding_window_view(np.zeros(6), 3), ("a", "b")),
        (torch.zeros(2, 0), ("a", "b")),
        (torch.zeros(3).expand(2, 3), ("a", "b")),
        (torch.zeros(6).unfold(0, 3, 1), ("a", "b")),
        (torch.zeros(2, 3), ("a",)),
    ],
)
def test_of_refuses_views_that_are_no_layout(tensor, names):
    with pytest.raises(LayoutError):
        Layout.of(tensor, names)


def _value(layout, by_name):
    return layout.offset + sum(by_name[a.name] * a.stride for a in layout.axes)


@examples(100)
@given(layouts(), st.data())
def test_split_leaves_every_element_where_it_is(layout, data):
    name = data.draw(st.sampled_from(layout.names))
    extent = layout.extents[name]
    inner = data.draw(st.sampled_from([i for i in range(1, extent + 1) if extent % i == 0]))
    after = layout.split(name, inner, "outer", "inner")
    assert set(after.names) == set(layout.names) - {name} | {"outer", "inner"}
    assert after.extents["outer"] * inner == extent
    assert after.extents["inner"] == inner
    assert len(elements(after)) == len(elements(layout))
    for index in itertools.product(*(range(e) for e in after.extents.values())):
        by_name = dict(zip(after.names, index, strict=True))
        whole = {**by_name, name: by_name["outer"] * inner + by_name["inner"]}
        assert _value(after, by_name) == _value(layout, whole)


@pytest.mark.parametrize("inner", [2, 0, -1, -2, 3.0, 6])
def test_split_that_does_not_divide_is_a_typed_error(inner):
    with pytest.raises(LayoutError):
        Layout.packed({"page": 2, "head": 3, "dim": 4}, 2).split("head", inner, "group", "head")


def test_split_may_keep_the_name_but_not_take_anothers():
    layout = Layout.packed({"page": 2, "head": 4}, 2)
    assert layout.split("head", 2, "group", "head").extents == {"page": 2, "group": 2, "head": 2}
    with pytest.raises(LayoutError):
        layout.split("head", 2, "page", "head")
    with pytest.raises(LayoutError):
        layout.split("layer", 1, "x", "y")


@examples(100)
@given(layouts(), st.data())
def test_narrow_keeps_exactly_the_steps_of_the_range(layout, data):
    name = data.draw(st.sampled_from(layout.names))
    start = data.draw(st.integers(0, layout.extents[name] - 1))
    stop = data.draw(st.integers(start + 1, layout.extents[name]))
    after = layout.narrow(name, start, stop)
    at = sorted(layout.names).index(name)
    expected = {
        (*index[:at], index[at] - start, *index[at + 1 :]): offset
        for index, offset in elements(layout).items()
        if start <= index[at] < stop
    }
    assert elements(after) == expected
    assert after.names == layout.names


@examples(100)
@given(layouts(), st.data())
def test_select_keeps_exactly_one_step(layout, data):
    name = data.draw(st.sampled_from(layout.names))
    step = data.draw(st.integers(0, layout.extents[name] - 1))
    after = layout.select(name, step)
    assert elements(after) == elements(layout, {name: step})
    assert name not in after.names


@pytest.mark.parametrize(
    "build",
    [
        lambda layout: layout.narrow("head", -1, 2),
        lambda layout: layout.narrow("head", 0, 5),
        lambda layout: layout.narrow("head", 2, 2),
        lambda layout: layout.narrow("head", 3, 1),
        lambda layout: layout.narrow("layer", 0, 1),
        lambda layout: layout.select("head", 4),
        lambda layout: layout.select("head", -1),
        lambda layout: layout.select("layer", 0),
    ],
)
def test_ranges_outside_the_axis_are_typed_errors(build):
    with pytest.raises(LayoutError):
        # the offset leaves room below, so that a negative step is not refused by accident
        build(Layout.packed({"page": 2, "head": 4, "dim": 2}, 2, offset=1000))


@examples(50)
@given(layouts(), st.integers(0, 2**40))
def test_shifted_and_rename_move_and_name_only(layout, nbytes):
    moved = layout.shifted(nbytes)
    assert elements(moved) == {i: o + nbytes for i, o in elements(layout).items()}
    first = layout.names[0]
    renamed = layout.rename({first: "zz", "unknown": "never"})
    assert renamed.names == ("zz", *layout.names[1:])
    assert [(a.extent, a.stride) for a in renamed.axes] == [
        (a.extent, a.stride) for a in layout.axes
    ]
    assert renamed.rename({"zz": first}) == layout


@examples(200)
@given(st.data())
def test_order_is_equal_exactly_where_packed_bytes_are(data):
    extents = data.draw(shapes(4, 60))
    one, two = data.draw(layouts_of(extents, 2)), data.draw(layouts_of(extents, 2))
    packed = [
        [index for index, _ in sorted(elements(layout).items(), key=lambda item: item[1])]
        for layout in (one, two)
    ]
    assert (one.order() == two.order()) == (packed[0] == packed[1])


@examples(100)
@given(layouts(), st.data())
def test_order_names_moving_axes_outermost_first(layout, data):
    without = data.draw(st.lists(st.sampled_from(layout.names), unique=True))
    names = [name for name in layout.order(without).split(".") if name]
    assert set(names) == {a.name for a in layout.axes if a.extent > 1 and a.name not in without}
    steps = [layout.axis(name).stride for name in names]
    assert steps == sorted(steps, reverse=True)


@examples(50)
@given(layouts(), st.data())
def test_the_form_survives_every_operation(layout, data):
    tagged = Layout(layout.axes, layout.itemsize, layout.offset, "k_transposed")
    name = data.draw(st.sampled_from(layout.names))
    derived = [
        tagged.split(name, 1, "outer", "inner"),
        tagged.narrow(name, 0, 1),
        tagged.select(name, 0),
        tagged.shifted(8),
        tagged.rename({name: "other"}),
    ]
    assert {d.form for d in derived} == {"k_transposed"}
    assert tagged != layout


def test_layouts_are_immutable_values():
    layout = Layout.packed({"a": 2}, 2)
    with pytest.raises(AttributeError):
        layout.offset = 3
    assert issubclass(LayoutError, KVConnectError)
    assert issubclass(LayoutError, ValueError)
