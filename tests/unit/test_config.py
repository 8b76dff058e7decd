"""Options: every type in every spelling, and an error that says what would have been right."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.config import Bytes, parse_bool, parse_bytes, parse_options, unknown_option
from kvconnect.errors import ConfigError


@dataclass(frozen=True)
class Options:
    path: str
    use_direct_io: bool = True
    depth: int = 8
    capacity: Bytes = 1 << 30
    deadline: float = 30.0
    engine: Literal["threads", "posix"] = "threads"
    limit: Bytes | None = None
    node: int | None = None
    salt: str | None = None
    rate: float | None = None
    fsync: bool | None = None
    kind: Literal["a", "b"] | None = None


def parsed(**options):
    return parse_options({"path": "/x", **options}, Options, "nvme")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("path", "/mnt/kv", "/mnt/kv"),
        *[("use_direct_io", v, True) for v in (True, 1, "true", "True", "1", "yes", "ON", " on ")],
        *[("use_direct_io", v, False) for v in (False, 0, "False", "false", "0", "no", "Off")],
        *[("depth", v, 16) for v in (16, "16", " 16 ", 16.0)],
        ("depth", "-3", -3),
        *[("deadline", v, 2.5) for v in (2.5, "2.5", "25e-1")],
        ("deadline", 2, 2.0),
        *[("capacity", v, 4096) for v in (4096, "4096", "4KiB", "4k", "4 KiB", "4096b", "4.096kB")],
        ("engine", "posix", "posix"),
        *[(name, v, None) for name in ("limit", "node", "salt", "rate", "fsync", "kind")
          for v in (None, "", "none", "None")],
        ("limit", "1MB", 1_000_000),
        ("node", "3", 3),
        ("salt", "tenant", "tenant"),
        ("rate", "0.5", 0.5),
        ("fsync", "no", False),
        ("kind", "b", "b"),
    ],
)  # fmt: skip
def test_a_value_has_its_declared_type_however_it_is_written(name, value, expected):
    got = getattr(parsed(**{name: value}), name)
    assert (got, type(got)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("path", 7),
        ("path", None),
        ("use_direct_io", "Flase"),
        ("use_direct_io", 2),
        ("use_direct_io", ""),
        ("use_direct_io", None),
        ("use_direct_io", {"use_direct_io": True}),
        ("depth", "8.0"),
        ("depth", 8.5),
        ("depth", True),
        ("depth", "eight"),
        ("depth", [8]),
        ("depth", float("inf")),
        ("deadline", "soon"),
        ("deadline", False),
        ("capacity", "200 apples"),
        ("capacity", "-1"),
        ("capacity", -1),
        ("capacity", True),
        ("capacity", "1.0005kB"),
        ("capacity", {"capacity": 1}),
        ("engine", "Posix"),
        ("limit", "much"),
        ("node", "one"),
    ],
)
def test_a_wrong_value_is_refused_with_option_and_value(name, value):
    with pytest.raises(ConfigError) as refused:
        parsed(**{name: value})
    assert str(refused.value).startswith(f"nvme: {name}={value!r}")


def test_choices_are_listed():
    with pytest.raises(ConfigError, match="threads, posix"):
        parsed(engine="uring")


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("capcity", "capacity"), ("use_directio", "use_direct_io"), ("Depth", "depth")],
)
def test_an_unknown_option_is_refused_with_close_matches(typo, meant):
    with pytest.raises(ConfigError) as refused:
        parsed(**{typo: "1"})
    text = str(refused.value)
    assert text.startswith(f"nvme: unknown option '{typo}'; did you mean ")
    assert meant in text.split("did you mean ")[1].split("?", maxsplit=1)[0]


def test_an_option_like_no_other_lists_what_is_known():
    with pytest.raises(ConfigError, match=r"'zzz' \(known: capacity, deadline, depth"):
        parsed(zzz=1)


def test_options_nested_one_level_too_deep_are_refused():
    with pytest.raises(ConfigError, match="unknown option 'nvme'"):
        parsed(nvme={"depth": 4})


def test_a_required_option_is_asked_for():
    with pytest.raises(ConfigError, match="nvme: option 'path' is missing"):
        parse_options({}, Options, "nvme")


def test_defaults_stand_where_nothing_is_given():
    assert parsed() == Options("/x")


UNITS = {"": 0, "b": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


@settings(deadline=None)
@given(
    number=st.decimals(0, 9999, places=3),
    letter=st.sampled_from("kmgtp"),
    tail=st.sampled_from(["", "b", "ib"]),
    upper=st.booleans(),
)
def test_sizes_are_exact_or_refused(number, letter, tail, upper):
    """Against exact fractions: 64.1kB is 64100 bytes, whatever floating point makes of it."""
    unit = (letter + tail).upper() if upper else letter + tail
    base = 1000 if tail == "b" else 1024
    exact = Fraction(number) * base ** UNITS[letter]
    if exact.denominator == 1:
        assert parse_bytes(f"{number}{unit}") == exact
    else:
        with pytest.raises(ConfigError, match="whole number"):
            parse_bytes(f"{number}{unit}")


@settings(deadline=None)
@given(st.integers(0, 1 << 70))
def test_large_sizes_keep_every_digit(value):
    assert parse_bytes(value) == parse_bytes(str(value)) == parse_bytes(f"{value}B") == value


@settings(deadline=None)
@given(st.text(max_size=8))
def test_a_truth_value_is_never_guessed(text):
    words = {"true": True, "1": True, "yes": True, "on": True}
    words |= {"false": False, "0": False, "no": False, "off": False}
    if (known := words.get(text.strip().lower())) is not None:
        assert parse_bool(text) is known
    else:
        with pytest.raises(ConfigError):
            parse_bool(text)


def test_a_type_that_cannot_be_an_option_is_the_programmers_error():
    @dataclass
    class Wrong:
        sizes: list = ()

    with pytest.raises(ConfigError, match="cannot be an option"):
        parse_options({"sizes": "1,2"}, Wrong)


def test_unknown_option_errors_can_be_built_from_a_list():
    assert str(unknown_option("ttimeout", ["timeout", "retries"], "Connector")) == (
        "Connector: unknown option 'ttimeout'; did you mean timeout? (known: retries, timeout)"
    )
