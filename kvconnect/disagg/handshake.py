"""Whether two sides fit: checked by both, at connect time, with both values in the message.

A prefill and a decode fleet that disagree on what bytes mean must never exchange any. What may
differ is how the bytes are placed (TP, PP, layout, a page size with a common piece); everything
that fixes their meaning must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvconnect.disagg.conform import Side, check_components, common_slots
from kvconnect.errors import ConfigError, LayoutError
from kvconnect.identity import Identity
from kvconnect.pool import Pool

_PLACED = {"object_layout", "page_size"}
"""Fields of an identity that say how bytes are stored, not what they mean."""


def check_identity(ours: Identity, theirs: Identity) -> None:
    """Raise `ConfigError` naming each field of the identity that differs, with both values."""
    mine, other = dict(ours.fields()), dict(theirs.fields())
    wrong = [
        f"{name} is {mine.get(name)!r} here and {other.get(name)!r} at the peer"
        for name in dict.fromkeys([*mine, *other])
        if name not in _PLACED and mine.get(name) != other.get(name)
    ]
    if wrong:
        raise ConfigError(f"the peer holds other bytes: {'; '.join(wrong)}")


def check_sides(source: Side, target: Side, *, min_slots: int = 1) -> None:
    """Raise `ConfigError` unless a rank pair of these two pools can exchange pages.

    `min_slots`: fewest slots a common piece of both page sizes may have. Naming both values:
    dtype, scales, layers and heads of the whole model, dims, components, page sizes.
    """
    wrong = list(_differences(source, target))
    slots = common_slots(source.pool, target.pool)
    if slots < min_slots:
        wrong.append(
            f"page_size {source.pool.page_size} and {target.pool.page_size} share pieces of "
            f"{slots} slots only, fewer than min_slots {min_slots}"
        )
    try:
        check_components(source.pool, target.pool)
    except LayoutError as error:
        wrong.append(str(error))
    if wrong:
        raise ConfigError(
            f"source {source.pool.label!r} and target {target.pool.label!r} do not fit: "
            f"{'; '.join(wrong)}"
        )


def check_slots(slots: int, source: Pool, target: Pool) -> None:
    """Raise `ConfigError` unless `slots` are whole pieces of both page sizes."""
    piece = common_slots(source, target)
    if slots % piece:
        raise ConfigError(
            f"slots={slots} is no multiple of {piece}, the slots common to pages of "
            f"{source.page_size} and {target.page_size}"
        )


def _differences(source: Side, target: Side) -> Iterator[str]:
    for field in ("dtype", "scale_scheme", "head_dim", "v_head_dim"):
        ours, theirs = getattr(source.pool, field), getattr(target.pool, field)
        if ours != theirs:
            yield f"{field} {ours!r} at the source, {theirs!r} at the target"
    for axis in ("layers", "heads"):
        ours, theirs = getattr(source.placement, axis), getattr(target.placement, axis)
        if ours.total != theirs.total:
            yield f"{axis} of the model {ours.total} at the source, {theirs.total} at the target"
