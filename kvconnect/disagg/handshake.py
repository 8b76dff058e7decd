"""Whether two sides fit: checked by both, at connect time, with both values in the message.

A prefill and a decode fleet that disagree on what bytes mean must never exchange any. What may
differ is how the bytes are placed (TP, PP, layout, a page size with a common piece); everything
that fixes their meaning must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvconnect.disagg.conform import Side, check_components, common_slots
from kvconnect.disagg.pairs import share_of
from kvconnect.disagg.pools import Pools, about
from kvconnect.disagg.sections import KV
from kvconnect.errors import ConfigError, LayoutError
from kvconnect.identity import Identity
from kvconnect.placement import Placement
from kvconnect.pool import Pool

_PLACED = {"object_layout", "page_size"}
"""Fields of an identity that say how bytes are stored, not what they mean."""


def check_pools(
    ours: Pools, theirs: Pools, *, sending: bool, min_slots: int
) -> dict[str, Placement]:
    """Return what moves between two ranks, by pool; `sending`: from ours to theirs.

    Raises `ConfigError` where the two sides do not name the same pools, or one does not fit, and
    `LayoutError` where a pool is cut in a way that no plan joins: all with both values.
    `min_slots` is about pages of the KV: the pages of a side pool may be single states.
    """
    mine, other = sorted(ours.identities), sorted(theirs.identities)
    if mine != other:
        raise ConfigError(f"pools are {mine} here and {other} at the peer; both name the same")
    parts = {}
    for name, identity in ours.identities.items():
        with about(name):
            check_identity(identity, theirs.identities[name])
            if name not in ours.sides or name not in theirs.sides:
                continue
            sides = ours.sides[name], theirs.sides[name]
            source, target = sides if sending else reversed(sides)
            check_sides(source, target, min_slots=min_slots if name == KV else 1)
            part = share_of(source.placement, target.placement)
            if part is not None:
                parts[name] = part
    return parts


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
