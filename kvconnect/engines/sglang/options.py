"""Options of the SGLang adapter: what stands in ``--hicache-storage-backend-extra-config``.

The JSON object is shared with SGLang, which takes some keys out and leaves others in; those
are accepted and not ours. Everything else must be an option below: an unknown or mistyped one
is an error with close matches, and ``"False"`` is not true. Options of the store stay in the
URL. Nothing is taken out of the caller's dict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvconnect.config import Bytes, parse_options
from kvconnect.errors import ConfigError

CONTEXT = "kvconnect for SGLang"

SGLANG_KEYS = frozenset(
    {
        "allocator",
        "backend_name",
        "class_name",
        "hicache_storage_pass_prefix_keys",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
    }
)
"""Keys of the same object that SGLang reads itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options; sizes in bytes, times in seconds. `url` is the only one that must be given."""

    url: str
    """The store, with its own options: ``nvme:///mnt/kv?capacity=200GiB``."""
    interface_v1: bool = False
    """SGLang's own key: whether pages move in place; False copies each page once more."""

    model: str | None = None
    """Name in the keys; the served model name by default."""
    model_path: str | None = None
    """Directory of the model, for its fingerprint and its total of layers and KV heads."""
    weights: str | None = None
    """Fingerprint of the weights; computed from `model_path` by default."""
    draft_weights: str | None = None
    """Fingerprint of a draft model whose pages are kept too; computed where it is served."""
    adapter: str | None = None
    salt: str | None = None
    """Different salts never share pages."""
    kv_heads: int | None = None
    """KV heads of the whole model."""
    layers: int | None = None
    """Layers of the whole model."""
    kv_cache_dtype: str | None = None
    """What a KV pool of bytes holds, as SGLang's flag names it; asked of the engine by default."""

    tp_sizes: tuple[int, ...] = ()
    """All TP sizes that share pages."""
    tp_lcm_size: int | None = None
    """SGLang's own key for the same: the least common multiple of the fleet's TP sizes."""
    head_group: int | None = None
    layer_chunk: int | None = None
    object_layout: Literal["native", "canonical"] | None = None
    """Byte order of stored pages; canonical by default where heads are cut, else native."""

    want: str = "auto"
    timeout: float = 30.0
    """Deadline of one call."""
    batch_bytes: Bytes = 256 << 20
    staging: Bytes = 256 << 20
    """Upper bound of the bounce buffer of one pool, where its plan needs one."""
    flat_bytes: Bytes = 256 << 20
    """Upper bound of the buffer for flat pages (interface_v1 0)."""
    retries: int = 1
    negative_ttl: float = 5.0
    self_test: bool = True
    ttl: float | None = None
    """Seconds until a stored page may be dropped; kept until evicted by default."""

    def __post_init__(self) -> None:
        """Refuse values that can mean nothing; `ConfigError` names the option."""
        for names, fits, must in _RANGES:
            for name in names:
                value = getattr(self, name)
                if value is not None and not fits(value):
                    raise _wrong(name, value, must)
        if self.tp_sizes and self.head_group is not None:
            raise ConfigError(
                f"{CONTEXT}: tp_sizes={list(self.tp_sizes)} and head_group={self.head_group} both "
                f"set the heads of an object; give one of them"
            )


_RANGES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        ("timeout", "batch_bytes", "staging", "flat_bytes", "ttl"),
        lambda value: 0 < value < math.inf,
        "above 0 and finite",
    ),
    (
        ("kv_heads", "layers", "tp_lcm_size", "head_group", "layer_chunk"),
        lambda value: value >= 1,
        "at least 1",
    ),
    (("retries", "negative_ttl"), lambda value: value >= 0, "at least 0"),
    (
        ("url", "model", "model_path", "weights", "draft_weights", "adapter", "kv_cache_dtype"),
        bool,
        "text that is not empty",
    ),
)
"""Options, what their values must satisfy (None is left out), and that in words."""


def parse(extra_config: Mapping[str, Any] | None) -> Options:
    """Parse SGLang's extra config; values may be typed or text.

    Raises `ConfigError` naming the option, the value and, for unknown ones, close matches.
    """
    given = {k: v for k, v in (extra_config or {}).items() if k not in SGLANG_KEYS}
    if "url" not in given:
        raise ConfigError(
            f"{CONTEXT}: option 'url' is missing; say where pages are kept, as in "
            f'"url": "nvme:///mnt/kv?capacity=200GiB"'
        )
    _check_interface(given.get("interface_v1", 0))
    # Parsed apart and put back: sizes have a type that no text has, and names are kept as they
    # are, for a salt that reads "none" is one, and an empty one is another.
    sizes = _sizes(given.pop("tp_sizes", ()))
    apart: dict[str, Any] = {n: _name(n, given.pop(n)) for n in _NAMES if n in given}
    return replace(parse_options(given, Options, CONTEXT), tp_sizes=sizes, **apart)


_NAMES = ("model", "model_path", "weights", "draft_weights", "adapter", "salt", "kv_cache_dtype")


def _name(option: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise _wrong(option, value, "text")
    return value


def _check_interface(value: object) -> None:
    if isinstance(value, str):
        raise ConfigError(
            f"{CONTEXT}: interface_v1={value!r} is text, and SGLang takes any text for true; "
            f'write "interface_v1": 1'
        )


def _sizes(value: object) -> tuple[int, ...]:
    """Read a list of ints, or text as in ``"1,2,4"``."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)):
        raise _wrong("tp_sizes", value, "a list of ints, as in [1, 2, 4]")
    sizes = list[int]()
    for part in parts:
        try:
            number = int(part)
        except (TypeError, ValueError):
            number = 0
        if isinstance(part, (bool, float)) or number < 1:
            raise _wrong("tp_sizes", value, "a list of ints of at least 1, as in [1, 2, 4]")
        sizes.append(number)
    return tuple(sizes)


def _wrong(name: str, value: object, must: str) -> ConfigError:
    return ConfigError(f"{CONTEXT}: {name}={value!r} must be {must}")
