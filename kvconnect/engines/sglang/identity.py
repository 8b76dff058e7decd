"""From what SGLang says to what fixes the bytes: identity, placement and grid of one pool.

SGLang's page hashes name tokens and nothing else, and its configuration has ranks, but no
dtype, no head count and no layer range. The pool says what a rank holds; the options or the
model's own files say of how much. Where neither does, the pages are kept private to this
split of the model, under an identity of their own: nothing is shared, and nothing is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvconnect.engines.sglang.model_facts import ModelFacts
from kvconnect.engines.sglang.options import Options
from kvconnect.errors import ConfigError
from kvconnect.identity import Identity
from kvconnect.placement import Placement, Span
from kvconnect.pool import Pool

KV = "kv"
"""SGLang's name of the anchor pool; every other name is a side pool."""

MAMBA = "mamba"
"""Cut over TP ranks even where the KV of the model is replicated: not in WITH_LATENT."""

ATTENTION = ("k", "v", "kv")
"""Components that hold K and V as numbers; others are rows whose format their pool's name says."""

WITH_LATENT = ("auxiliary_swa", "deepseek_v4_", "draft", "indexer", "swa")
"""How the names of side pools begin whose opaque rows are replicated as latent KV is."""


@dataclass(frozen=True, slots=True)
class Identified:
    """What a connector needs to know about one pool, and what its operator should."""

    identity: Identity
    placement: Placement
    tp_sizes: tuple[int, ...]
    head_group: int | None
    layer_chunk: int | None
    object_layout: str
    elect_writer: bool
    """False where SGLang itself lets one rank of the replicas write."""
    warnings: tuple[str, ...]


@dataclass(slots=True)
class _Found:
    """What is gathered on the way: pairs for the identity, shards, warnings."""

    extra: dict[str, str] = field(default_factory=dict)
    shards: list[tuple[str, Span]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def identify(
    pool: Pool, host_pool: Any, name: str, config: Any, options: Options, facts: ModelFacts
) -> Identified:
    """Derive everything for `pool`, known to SGLang as `name`.

    `host_pool` is asked for what its buffers do not show: the range of layers, names of formats.
    Raises `ConfigError` where an option, the model's files and the pool contradict each other,
    naming both numbers and the fix.
    """
    found = _Found()
    weights = _weights(config, options, facts, found)
    layers = _layers(pool, host_pool, name, config, options, facts, found)
    held = _heads(pool, name, config, options, facts, layers, found)
    _draft(pool, host_pool, name, options, facts, found)
    _values(pool, host_pool, name, options, facts, found)
    for axis in ("attn_cp", "dcp"):
        # No proof that two of these ranks hold equal bytes, so their ranges differ.
        _shard(axis, getattr(config, f"{axis}_rank"), getattr(config, f"{axis}_size"), found)
    identity = Identity(
        model=_model(config, options),
        weights=weights,
        dtype=pool.dtype,
        page_size=pool.page_size,
        layers=layers.total,
        heads=held.heads.total,
        head_dim=pool.head_dim,
        v_head_dim=pool.v_head_dim,
        adapter=options.adapter,
        salt=options.salt,
        scale_scheme=pool.scale_scheme,
        pool=name,
        extra=tuple(sorted(found.extra.items())),
    )
    placement = Placement(
        layers, held.heads, held.replica, held.replicas, (*held.shards, *found.shards)
    )
    return _with_grid(pool, name, config, options, identity, placement, found)


def _model(config: Any, options: Options) -> str:
    name = options.model or config.model_name
    if not name:
        raise ConfigError(
            "the served model has no name, and option 'model' is not given: no key can be "
            'derived; write "model": "org/name" in the extra config, or serve with '
            "--served-model-name"
        )
    return str(name)


def _weights(config: Any, options: Options, facts: ModelFacts, found: _Found) -> str:
    if options.weights is not None:
        return options.weights
    if facts.weights is not None:
        return facts.weights
    name = _model(config, options)
    found.warnings.append(
        f"the weights are known by the name {name!r} only: two checkpoints served under one name "
        f"would share pages; give weights= (any text that names them) or model_path="
    )
    return f"name:{name}"


def _layers(
    pool: Pool,
    host_pool: Any,
    name: str,
    config: Any,
    options: Options,
    facts: ModelFacts,
    found: _Found,
) -> Span:
    """Return the global range of layers, or one that is private to this split."""
    count, size, rank = pool.layers, config.pp_size, config.pp_rank
    said = options.layers if name == KV else None
    if size == 1:
        if said not in {None, count}:
            raise ConfigError(
                f"layers={said}, but the pool {name!r} of a model on one stage has {count}; leave "
                f"layers out"
            )
        return Span(0, count, count)
    total = said or (facts.layers if name == KV else None)
    wrong = _not_global(count, host_pool, rank, size, total)
    if total is not None and wrong is None:
        return Span(host_pool.start_layer, host_pool.start_layer + count, total)
    if said is not None:
        raise ConfigError(f"layers={said} contradicts the pool {name!r}: {wrong}")
    start = getattr(host_pool, "start_layer", None)
    found.extra |= {"pp_rank": str(rank), "pp_size": str(size), "start_layer": str(start)}
    if name == KV:
        found.warnings.append(
            f"pages stay private to stage {rank} of pp_size {size}: {wrong}; give layers= (of the "
            f"whole model) or model_path= to share them between pipeline splits"
        )
    return Span(0, count, count)


def _not_global(count: int, host_pool: Any, rank: int, size: int, total: int | None) -> str | None:
    """Say why the pool's range of layers cannot be taken for a global one, or None."""
    start = getattr(host_pool, "start_layer", None)
    end = getattr(host_pool, "end_layer", None)
    if total is None:
        return "the model's total of layers is not known"
    if type(start) is not int or type(end) is not int or end - start != count:
        return f"the pool has {count} layers and names the range [{start}, {end})"
    if not 0 <= start < end <= total:
        return f"the range [{start}, {end}) is not inside the model's {total} layers"
    if (rank == 0) != (start == 0) or (rank == size - 1) != (end == total):
        return f"stage {rank} of {size} cannot hold [{start}, {end}) of {total} layers"
    return None


def _heads(
    pool: Pool,
    name: str,
    config: Any,
    options: Options,
    facts: ModelFacts,
    layers: Span,
    found: _Found,
) -> Placement:
    """Return the global range of heads and the place among replicas, as a placement."""
    rank, size = config.tp_rank, config.tp_size
    if _replicated(pool, name, config):
        return Placement.tensor_parallel(layers=layers, heads=1, rank=rank, size=size)
    if not _has_heads(pool):
        _shard("tp", rank, size, found)
        return Placement(layers, Span(0, 1, 1))
    if name == KV and options.kv_heads is not None:
        said = f"kv_heads={options.kv_heads}"
        return _checked(pool, options.kv_heads, said, rank, size, layers)
    if name == KV and facts.kv_heads is not None:
        said = f"the model in {facts.path!r} has {facts.kv_heads} KV heads"
        try:
            return _checked(pool, facts.kv_heads, said, rank, size, layers)
        except ConfigError as error:
            # A file that describes several kinds of layers may mean others than these.
            found.warnings.append(f"the pool is believed, not the model's files: {error}")
    if pool.heads == 1 and size > 1:
        # One head to a rank: the model may have as many, or fewer that are replicated.
        found.extra["tp_size"] = str(size)
        if name == KV:
            found.warnings.append(
                f"one KV head to a rank of tp_size {size}: whether heads are replicated is not "
                f"known, so pages stay private to this TP size; give kv_heads= (of the whole "
                f"model) or model_path="
            )
    # Two heads or more are never replicated, so the total is certain.
    return Placement.tensor_parallel(layers=layers, heads=pool.heads * size, rank=rank, size=size)


def _replicated(pool: Pool, name: str, config: Any) -> bool:
    """Tell whether every TP rank holds the same bytes: latent rows, and what comes with them.

    A side pool that has heads (a draft model of another kind) is cut over the ranks as ever,
    also beside replicated KV, and also where a rank holds one head only. Rows under a name
    that is not known may be cut, too, as Mamba states are.
    """
    if name == MAMBA or not (config.is_mla_model or pool.components == ("kv",)):
        return False
    if name == KV or pool.components == ("kv",):
        return True
    return not _has_heads(pool) and name.startswith(WITH_LATENT)


def _has_heads(pool: Pool) -> bool:
    return any(plane.heads() is not None for plane in pool.planes)


def _checked(pool: Pool, total: int, source: str, rank: int, size: int, layers: Span) -> Placement:
    placement = Placement.tensor_parallel(layers=layers, heads=total, rank=rank, size=size)
    if placement.heads.extent != pool.heads:
        raise ConfigError(
            f"{source}: a rank of tp_size {size} would hold {placement.heads.extent}, the pool "
            f"has {pool.heads}; give kv_heads= with the KV heads of the whole model"
        )
    return placement


def _shard(axis: str, rank: int, size: int, found: _Found) -> None:
    if size > 1:
        found.shards.append((axis, Span(rank, rank + 1, size)))


def _draft(
    pool: Pool, host_pool: Any, name: str, options: Options, facts: ModelFacts, found: _Found
) -> None:
    """Name the draft model where the pool holds its layers: its own, or packed behind the KV."""
    packed = pool.layers - getattr(host_pool, "target_layer_num", pool.layers)
    if name.startswith("draft") or packed:
        found.extra["draft"] = options.draft_weights or facts.draft or "as weights"
        found.extra["draft_layers"] = str(packed or pool.layers)


def _values(
    pool: Pool, host_pool: Any, name: str, options: Options, facts: ModelFacts, found: _Found
) -> None:
    """Name what the bytes mean beyond their shape: number format, settings, order of the device."""
    found.extra |= dict(facts.settings.pairs)
    # SGLang puts this into the served name, which an option may have replaced.
    if tag := getattr(host_pool, "storage_format_tag", None):
        found.extra["format"] = str(tag)
    if order := _device_order(host_pool):
        found.extra["device_order"] = order
    if pool.dtype != "uint8":
        return
    draft = name.startswith("draft")
    kind = options.kv_cache_dtype or (facts.settings.draft if draft else facts.settings.kv)
    if kind is not None:
        found.extra["kv_cache_dtype"] = kind
    elif pool.components[0] in ATTENTION:
        found.warnings.append(
            "the pool holds bytes, and which float8 they are is not known: servers with "
            "fp8_e4m3 and fp8_e5m2 would share pages; give kv_cache_dtype="
        )


def _device_order(host_pool: Any) -> str | None:
    """Return the order of a page on the device where it is not (token, head, dim), else None.

    SGLang copies pages whole, so that the host has the device's order under its own layout.
    """
    for info in getattr(host_pool, "_buffer_infos", ()):
        layout = getattr(getattr(info, "buffers", None), "layout", None)
        order = str(getattr(layout, "value", "nhd"))
        if order not in {"nhd", "paged_nhd"}:
            return order
    return None


def _with_grid(
    pool: Pool,
    name: str,
    config: Any,
    options: Options,
    identity: Identity,
    placement: Placement,
    found: _Found,
) -> Identified:
    """Choose how pages are cut into objects: only planes of heads can be cut by heads."""
    cut = placement.heads.total > 1 and all(p.heads() is not None for p in pool.planes)
    lcm = config.tp_lcm_size or options.tp_lcm_size
    sizes = options.tp_sizes or ((lcm,) if lcm and options.head_group is None else ())
    # One head's bytes are not where the axes say if the device orders pages otherwise.
    cut = cut and not {"tp_size", "device_order"} & found.extra.keys()
    grid = bool(sizes or options.head_group) and cut
    default = "canonical" if grid else "native"
    # What else the options say about objects is about the anchor; side pools keep their order.
    own = options.object_layout if name == KV else None
    return Identified(
        identity=identity,
        placement=placement,
        tp_sizes=sizes if grid else (),
        head_group=options.head_group if grid else None,
        layer_chunk=options.layer_chunk if name == KV else None,
        object_layout=own or default,
        elect_writer=not config.is_mla_model,
        warnings=tuple(found.warnings),
    )
