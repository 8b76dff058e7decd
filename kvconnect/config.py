"""Options: strings from a URL or JSON, parsed once into a frozen dataclass.

An option that is unknown, mistyped or out of its choices is an error that says what would have
been right; nothing is ignored, and ``"False"`` is not true.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Annotated, Any, Literal, TypeVar

from kvconnect.errors import ConfigError

Bytes = Annotated[int, "bytes"]
"""An int field that also accepts text with a unit: ``"200GiB"``, ``"1.5MB"``, ``"4096"``."""

T = TypeVar("T")

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def parse_bytes(value: object, field: str = "size") -> int:
    """Parse a byte count: an int, or text with a decimal (kB) or binary (KiB, k) unit.

    >>> parse_bytes("1.5GiB")
    1610612736
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
    unit = match and _UNITS.get(match[2].lower())
    if not match or unit is None:
        raise ConfigError(f"{field}={value!r} is no size; write bytes or a unit, as in 200GiB")
    # A fraction, because 64.1 * 1000 is 64099.99999999999 in floating point.
    count = Fraction(match[1]) * unit
    if count.denominator != 1:
        raise ConfigError(f"{field}={value!r} is {float(count)} bytes; it must be a whole number")
    return int(count)


def parse_bool(value: object, field: str = "option") -> bool:
    """Parse a truth value: true/false, yes/no, on/off, 1/0 in any case.

    >>> parse_bool("False")
    False
    """
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ConfigError(f"{field}={value!r} is no truth value; write true or false")


def parse_options(options: Mapping[str, object], spec: type[T], context: str = "") -> T:
    """Build the dataclass `spec` from `options`; values may be text or already typed.

    Field types: bool, int, `Bytes`, float, str, ``Literal[...]`` and each of them ``| None``.
    Raises `ConfigError` naming the option, the value, and close matches for unknown names.
    """
    hints = typing.get_type_hints(spec, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(spec) if f.init}  # type: ignore[arg-type]
    where = f"{context}: " if context else ""
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name not in fields:
            raise unknown_option(name, fields, context)
        values[name] = _convert(value, hints[name], f"{where}{name}")
    missing = [n for n, f in fields.items() if n not in values and _required(f)]
    if missing:
        raise ConfigError(f"{where}option {missing[0]!r} is missing")
    return spec(**values)


def unknown_option(name: str, known: Mapping[str, object] | list[str], context: str) -> ConfigError:
    """Return the error for an unknown name, with close matches."""
    where = f"{context}: " if context else ""
    return ConfigError(f"{where}unknown option {name!r}{_suggest(name, known)}")


def _suggest(name: str, known: Mapping[str, object] | list[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return f"{hint} (known: {', '.join(sorted(known))})"


def _required(field: dataclasses.Field[Any]) -> bool:
    no_default = field.default is dataclasses.MISSING
    return no_default and field.default_factory is dataclasses.MISSING


def _convert(value: object, hint: Any, field: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(hint) if a is not type(None)]
        if value is None or (isinstance(value, str) and value.strip().lower() in ("", "none")):
            return None
        return _convert(value, inner[0], field)
    if origin is Literal:
        return _choice(value, typing.get_args(hint), field)
    if origin is Annotated:
        return parse_bytes(value, field)
    parser = _PARSERS.get(hint)
    if parser is None:
        raise ConfigError(f"{field}: type {hint!r} cannot be an option")
    return parser(value, field)


def _choice(value: object, choices: tuple[Any, ...], field: str) -> Any:
    if value in choices:
        return value
    words = ", ".join(str(c) for c in choices)
    raise ConfigError(f"{field}={value!r} is not one of: {words}")


def _number(kind: type[int | float]) -> Callable[[object, str], Any]:
    def parse(value: object, field: str) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ConfigError(f"{field}={value!r} is no {kind.__name__}")
        try:
            number = kind(value)
        except (ValueError, OverflowError):
            raise ConfigError(f"{field}={value!r} is no {kind.__name__}") from None
        if isinstance(value, float) and number != value:
            raise ConfigError(f"{field}={value!r} is no {kind.__name__}")
        return number

    return parse


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{field}={value!r} must be text, not {type(value).__name__}")
    return value


_PARSERS: dict[Any, Callable[[object, str], Any]] = {
    bool: parse_bool,
    int: _number(int),
    float: _number(float),
    str: _text,
}
