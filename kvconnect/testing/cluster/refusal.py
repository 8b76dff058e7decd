"""Why a file was refused, with what would have been taken: msgspec names only what it met."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import inspect

_WHERE = re.compile(r"at `\$(?P<path>[^`]*)`")
_STEP = re.compile(r"\.(?P<field>\w+)|\[[^\]]*\]")
_UNKNOWN = re.compile(r"unknown field `(?P<field>\w+)`")


def explained(error: msgspec.MsgspecError, root: type) -> str:
    """Return the words of an error in reading a `root`, with the fields or words there are."""
    words = str(error)
    where = _WHERE.search(words)
    there = _walk(inspect.type_info(root), where["path"] if where else "")
    unknown = _UNKNOWN.search(words)
    if unknown and isinstance(there, inspect.StructType):
        return f"{words}; there are {', '.join(field.encode_name for field in there.fields)}"
    if "enum value" in words and isinstance(there, inspect.LiteralType):
        return f"{words}; it must be one of {', '.join(sorted(map(repr, there.values)))}"
    return words


def _walk(there: Any, path: str) -> Any:
    """Return the type that lies at a path such as ``.faults[0].kind``."""
    for step in _STEP.finditer(path):
        there = _one(there)
        if not step["field"]:
            there = there.item_type
        elif isinstance(there, inspect.StructType):
            there = next(f.type for f in there.fields if f.encode_name == step["field"])
        else:
            there = there.value_type
    return _one(there)


def _one(there: Any) -> Any:
    """Return what is not None of a field that may be left out."""
    if isinstance(there, inspect.UnionType):
        rest = [each for each in there.types if not isinstance(each, inspect.NoneType)]
        return rest[0] if len(rest) == 1 else there
    return there
