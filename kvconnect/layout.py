"""A layout: named axes with extents and byte strides, an itemsize and an offset. No address.

Why it exists: every engine names its pool shapes ("page_first", "page_head" ...) and then
branches on the name. Here a shape is data. Whether a page is one run, which axis can be cut
for free and what must be staged are all computed from strides (`kvconnect.cover`).

Layouts are immutable values. The axes are stored outermost first as given by the caller; the
order carries no meaning for planning, which looks at strides only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvconnect.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: `extent` steps, `stride` bytes apart.

    >>> Axis("head", 8, 256)
    Axis(name='head', extent=8, stride=256)
    """

    name: str
    extent: int
    stride: int

    def __post_init__(self) -> None:
        """Refuse what no memory can be: extents below 1, strides below 1."""
        for field, value in (("extent", self.extent), ("stride", self.stride)):
            if type(value) is not int or value < 1:
                raise LayoutError(
                    f"axis {self.name!r}: {field} is {value!r}; it must be an int of at least 1"
                )

    @property
    def span(self) -> int:
        """Bytes from the first step to the first byte past the last step's stride."""
        return self.extent * self.stride


@dataclass(frozen=True, slots=True)
class Layout:
    """Axes + itemsize + offset, in bytes; the shape of a plane or of an object.

    Invariants, checked at construction:

    1. axis names are distinct, `itemsize` >= 1, `offset` >= 0;
    2. no two elements overlap: taken by ascending stride, every stride is at least the bytes
       spanned by the axes below it. Padding between axes is allowed.

    `form` tags the byte order inside the innermost block where it is not an axis order (a
    kernel that keeps K transposed inside a head, say). Two forms never exchange bytes.

    >>> Layout.packed({"page": 4, "head": 2, "dim": 8}, itemsize=2).axis("head").stride
    16
    """

    axes: tuple[Axis, ...]
    itemsize: int
    offset: int = 0
    form: str = "axes"

    def __post_init__(self) -> None:
        """Check the invariants of the class."""
        if type(self.itemsize) is not int or self.itemsize < 1:
            raise LayoutError(f"itemsize is {self.itemsize!r}; it must be an int of at least 1")
        if type(self.offset) is not int or self.offset < 0:
            raise LayoutError(f"offset is {self.offset!r}; it must be an int of at least 0")
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            raise LayoutError(f"axis names {names} are not distinct")
        self._check_overlap()

    def _check_overlap(self) -> None:
        filled, below = self.itemsize, "itemsize"
        for axis in self.by_stride():
            if axis.stride < filled:
                raise LayoutError(
                    f"axis {axis.name!r} overlaps {below}: its stride is {axis.stride} B, "
                    f"the elements below it span {filled} B"
                )
            filled = axis.stride * (axis.extent - 1) + filled
            below = f"axis {axis.name!r}"

    @classmethod
    def packed(
        cls,
        extents: Mapping[str, int] | Iterable[tuple[str, int]],
        itemsize: int,
        *,
        offset: int = 0,
        form: str = "axes",
    ) -> Layout:
        """Build the C-order layout of `extents` (outermost first), without padding."""
        items = list(extents.items() if isinstance(extents, Mapping) else extents)
        stride, axes = itemsize, []
        for name, extent in reversed(items):
            axes.append(Axis(name, extent, stride))
            stride *= extent
        return cls(tuple(reversed(axes)), itemsize, offset, form)

    @classmethod
    def of(cls, tensor: Any, names: Sequence[str], *, offset: int = 0) -> Layout:
        """Read the layout of a tensor or array from its own strides.

        `tensor` is a torch tensor (element strides) or a numpy array (byte strides); `names`
        name its dimensions. Axes of extent 1 keep a stride no larger than the tensor gives.
        """
        shape = tuple(int(n) for n in tensor.shape)
        if len(shape) != len(names):
            raise LayoutError(f"{len(names)} axis names {list(names)} for {len(shape)} dimensions")
        if hasattr(tensor, "element_size"):
            itemsize = int(tensor.element_size())
            strides = [int(s) * itemsize for s in tensor.stride()]
        else:
            itemsize = int(tensor.itemsize)
            strides = [int(s) for s in tensor.strides]
        pairs = list(zip(names, shape, strides, strict=True))
        filled = max((n * s for _, n, s in pairs if n > 1), default=itemsize)
        axes = (Axis(name, n, s if n > 1 or 0 < s < filled else filled) for name, n, s in pairs)
        return cls(tuple(axes), itemsize, offset)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, in the stored order."""
        return tuple(axis.name for axis in self.axes)

    @property
    def extents(self) -> dict[str, int]:
        """Extent of each axis, in the stored order."""
        return {axis.name: axis.extent for axis in self.axes}

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, without padding."""
        return self.itemsize * math.prod(axis.extent for axis in self.axes)

    @property
    def end(self) -> int:
        """Offset of the first byte after the last element (padding after it excluded)."""
        reach = sum(axis.stride * (axis.extent - 1) for axis in self.axes)
        return self.offset + reach + self.itemsize

    def __contains__(self, name: object) -> bool:
        return any(axis.name == name for axis in self.axes)

    def axis(self, name: str) -> Axis:
        """Return the axis called `name`; `LayoutError` names the ones there are."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise LayoutError(f"no axis {name!r}; this layout has {list(self.names)}")

    def by_stride(self) -> list[Axis]:
        """Axes of more than one step, by ascending stride."""
        return sorted((a for a in self.axes if a.extent > 1), key=lambda a: a.stride)

    def split(self, name: str, inner: int, outer_name: str, inner_name: str) -> Layout:
        """Replace axis `name` by (`outer_name`, `inner_name`) with `inner` steps inside.

        The elements stay where they are. `LayoutError` if `inner` does not divide the extent.
        """
        axis = self.axis(name)
        if type(inner) is not int or inner < 1 or axis.extent % inner:
            raise LayoutError(
                f"cannot split axis {name!r} of {axis.extent} into blocks of {inner!r}: "
                f"it must be an int that divides {axis.extent}"
            )
        pair = (
            Axis(outer_name, axis.extent // inner, axis.stride * inner),
            Axis(inner_name, inner, axis.stride),
        )
        return self._replaced(name, pair)

    def narrow(self, name: str, start: int, stop: int) -> Layout:
        """Keep the half-open range of steps [`start`, `stop`) of axis `name`."""
        axis = self.axis(name)
        if not 0 <= start < stop <= axis.extent:
            raise LayoutError(
                f"range [{start}, {stop}) of axis {name!r} is not inside [0, {axis.extent})"
            )
        kept = self._replaced(name, (Axis(name, stop - start, axis.stride),))
        return replace(kept, offset=self.offset + start * axis.stride)

    def select(self, name: str, index: int) -> Layout:
        """Fix axis `name` at `index` and drop it."""
        kept = self.narrow(name, index, index + 1)
        return replace(kept, axes=tuple(a for a in kept.axes if a.name != name))

    def rename(self, names: Mapping[str, str]) -> Layout:
        """Give axes other names; unknown names are ignored."""
        axes = (Axis(names.get(a.name, a.name), a.extent, a.stride) for a in self.axes)
        return replace(self, axes=tuple(axes))

    def shifted(self, nbytes: int) -> Layout:
        """Return the same layout `nbytes` further on."""
        return replace(self, offset=self.offset + nbytes)

    def _replaced(self, name: str, by: tuple[Axis, ...]) -> Layout:
        at = self.names.index(name)
        return replace(self, axes=self.axes[:at] + by + self.axes[at + 1 :])

    def order(self, without: Iterable[str] = ()) -> str:
        """Byte order as text, outermost axis first: ``slot.layer.head.dim``.

        Axes of one step have no place in memory and do not appear. Two layouts with equal
        order and extents hold an object's bytes identically once packed.
        """
        gone = set(without)
        kept = [a.name for a in reversed(self.by_stride()) if a.name not in gone]
        return ".".join(kept)
