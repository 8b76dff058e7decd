"""What a model directory says: total layers and KV heads, and a fingerprint of its weights.

Read without the engine, without torch and without pickle: ``config.json``, the index and the
headers of the safetensors files, and a bounded sample of each weights file. The sample is what
tells two fine-tunes of one base apart, whose configuration, index and file sizes are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvconnect.engines.sglang.settings import Settings
from kvconnect.errors import ConfigError

MOST_JSON_BYTES = 64 << 20
"""Larger than any index or header there is; a file beyond it is not what its name says."""

BLOCK_BYTES, BLOCKS = 4096, 1024
"""The sample: about BLOCKS blocks over all weights files, at least LEAST_BLOCKS of each."""
LEAST_BLOCKS = 8

MOST_HEADER_BYTES = 2 << 20
"""A longer header is not parsed; those of the largest shards there are have a tenth of that."""

WEIGHTS_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
"""In order of preference: a directory that has the first kind is judged by it alone."""

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)
"""Names of the number of KV heads, as SGLang looks for them. The number of attention heads is
no stand-in: models that name their KV heads otherwise would be taken for pure MHA."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model; None where its directory does not say.

    `layers` and `kv_heads` count the whole model; `weights` is the fingerprint (hex), `draft`
    that of the draft model served beside it, or its name; `settings` are those of the engine
    that serves it.
    """

    layers: int | None = None
    kv_heads: int | None = None
    weights: str | None = None
    path: str | None = None
    draft: str | None = None
    settings: Settings = field(default_factory=Settings)


def read_model(path: str | Path, *, weights: bool = True) -> ModelFacts:
    """Read a model directory; `weights` False leaves the weights files alone.

    Raises `ConfigError` naming the file that is missing or unreadable.
    """
    folder = Path(path)
    text = _text_config(_config(folder))
    return ModelFacts(
        layers=_count(text, *_LAYERS),
        kv_heads=1 if _multi_query(text) else _count(text, *_HEADS),
        weights=fingerprint(folder) if weights else None,
        path=str(folder),
    )


def _multi_query(config: Mapping[str, Any]) -> bool:
    """Tell the older models that have one KV head whatever their other numbers say."""
    return config.get("multi_query") is True and not config.get("new_decoder_architecture")


def fingerprint(folder: Path) -> str:
    """Return 32 hex characters that stand for configuration and weights.

    Covers config.json, the safetensors index, and name, size and a sample of blocks (among
    them the header and small tensors) of every weights file. Reads about 8 MiB, and the headers,
    however large the model is.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"kvconnect-model")
    for name in ("config.json", "model.safetensors.index.json"):
        if (folder / name).is_file():
            _feed(digest, name, _read(folder / name))
    files = weights_files(folder)
    if not files:
        raise ConfigError(
            f"model_path={str(folder)!r} holds no weights ({', '.join(WEIGHTS_SUFFIXES)}); give "
            f"weights= with a name of your own for them"
        )
    blocks = max(BLOCKS // len(files), LEAST_BLOCKS)
    for file in files:
        _feed(digest, file.name, _sample(file, blocks))
    return digest.hexdigest()


def weights_files(folder: Path) -> list[Path]:
    """Return the weights files by name: those of the first suffix that is there."""
    for suffix in WEIGHTS_SUFFIXES:
        if found := sorted(p for p in folder.glob(f"*{suffix}") if p.is_file()):
            return found
    return []


def _sample(file: Path, blocks: int) -> bytes:
    """Return size and blocks of a file: evenly spaced, first and last among them, and of tensors.

    Of small ones (norms, biases, scales), which lie between and may be all that a fine-tune
    changed.
    """
    try:
        with file.open("rb", buffering=0) as handle:
            size = os.fstat(handle.fileno()).st_size
            last = max(size - BLOCK_BYTES, 0)
            places = {last * i // max(blocks - 1, 1) for i in range(blocks)}
            if file.suffix == ".safetensors":
                places |= _small_tensors(handle.fileno(), size, blocks)
            parts = [os.pread(handle.fileno(), BLOCK_BYTES, place) for place in sorted(places)]
    except OSError as error:
        raise ConfigError(f"weights file {str(file)!r} cannot be read: {error}") from error
    return size.to_bytes(8, "little") + b"".join(parts)


def _small_tensors(handle: int, size: int, most: int) -> set[int]:
    """Return where tensors begin that evenly spaced blocks may miss, `most` of them at most."""
    length = int.from_bytes(os.pread(handle, 8, 0), "little")
    if length > min(size, MOST_HEADER_BYTES):
        return set()
    try:
        header = json.loads(os.pread(handle, length, 8))
        header.pop("__metadata__", None)
        spans = sorted((int(a), int(b)) for a, b in (x["data_offsets"] for x in header.values()))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return set()  # no safetensors, whatever its name says
    small = [8 + length + start for start, stop in spans if stop - start < size // most]
    step = max(-(-len(small) // most), 1)
    return {place for place in small[::step] if 0 <= place < size}


def _feed(digest: Any, name: str, data: bytes) -> None:
    for part in (name.encode(), data):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)


def _config(folder: Path) -> Mapping[str, Any]:
    file = folder / "config.json"
    try:
        found = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{str(file)!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{str(file)!r} holds {type(found).__name__}, not an object")
    return found


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as handle:
            data = handle.read(MOST_JSON_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"model file {str(file)!r} cannot be read: {error}; model_path must be a model's "
            f"directory"
        ) from error
    if len(data) > MOST_JSON_BYTES:
        raise ConfigError(f"{str(file)!r} is larger than {MOST_JSON_BYTES} B: no model has that")
    return data


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part that describes the language model of a multimodal one."""
    for name in ("text_config", "llm_config", "language_config"):
        inner = config.get(name)
        if isinstance(inner, dict) and _count(inner, *_LAYERS):
            return inner
    return config


def _count(config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if type(value) is int and value >= 1:
            return value
    return None
