"""What the engine's command line changes in the pages, and no pool or model file says.

A host pool keeps float8 values as bytes, so that its dtype is ``uint8`` for e4m3 and e5m2
alike. Rotary scaling that is overridden changes every K, scales read from a file change every
float8, weights quantised on loading are other weights: the model's directory shows none of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIELDS: Mapping[str, tuple[Any, ...]] = {
    "json_model_override_args": (None, "", "{}"),
    "modelopt_quant": (None,),
    "quantization": (None,),
    "quantization_param_path": (None,),
    "weight_version": (None, "default"),
}
"""Settings by name, each with the values that change nothing."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a running engine says; all of it is empty where none runs.

    `pairs` are sorted (name, value) pairs for the identity of every pool; `kv` and `draft`
    name the values that a pool of bytes holds, the draft model's where it has its own.
    """

    pairs: tuple[tuple[str, str], ...] = ()
    kv: str | None = None
    draft: str | None = None


def read_settings(arguments: Any) -> Settings:
    """Read the settings of the engine that was started with `arguments`, None where none was."""
    if arguments is None:
        return Settings()
    pairs = [
        (name, _said(name, value))
        for name, plain in FIELDS.items()
        if (value := _resolved(arguments, name)) not in plain
    ]
    if _resolved(arguments, "load_format") == "dummy":
        pairs.append(("load_format", "dummy"))
    kv = _resolved(arguments, "kv_cache_dtype")
    draft = _resolved(arguments, "speculative_draft_kv_cache_dtype")
    return Settings(tuple(sorted(pairs)), _values(kv), _values(draft) or _values(kv))


def _values(dtype: Any) -> str | None:
    # Left to itself the engine keeps bytes for float8 checkpoints alone, and these are e4m3.
    return "fp8_e4m3" if dtype == "auto" else dtype


def _said(name: str, value: Any) -> str:
    """Return a setting as text that is the same wherever it means the same."""
    if name == "quantization_param_path":
        try:
            return hashlib.blake2b(Path(value).read_bytes(), digest_size=16).hexdigest()
        except OSError:
            return str(value)
    if name == "json_model_override_args":
        try:
            return json.dumps(json.loads(value), sort_keys=True)
        except ValueError:
            return str(value)
    return str(value)


def _resolved(arguments: Any, name: str) -> Any:
    """Return a setting as the engine resolved it, else as it was given on its command line."""
    try:
        from sglang.srt.runtime_context import get_context  # noqa: PLC0415 - optional

        return get_context().config_leaf(name)
    except Exception:  # noqa: BLE001 - not published in this process: what was given is known
        return getattr(arguments, name, None)
