"""The options of the SGLang adapter: what is taken, what is refused, what is left alone."""

import dataclasses
import subprocess
import sys

import pytest

from kvconnect.engines.sglang.options import SGLANG_KEYS, Options, parse
from kvconnect.errors import ConfigError

URL = {"url": "memory://x"}


def test_only_a_url_is_needed():
    assert parse(URL) == Options(url="memory://x")


def test_typed_values_and_text_mean_the_same():
    typed = {
        "kv_heads": 8,
        "tp_sizes": [1, 2, 4],
        "timeout": 2.5,
        "batch_bytes": 1 << 20,
        "self_test": False,
        "object_layout": "canonical",
        "ttl": 60,
    }
    text = {
        "kv_heads": "8",
        "tp_sizes": "1, 2,4",
        "timeout": "2.5",
        "batch_bytes": "1MiB",
        "self_test": "False",
        "object_layout": "canonical",
        "ttl": "60",
    }
    assert parse(URL | typed) == parse(URL | text)
    found = parse(URL | text)
    assert (found.tp_sizes, found.self_test, found.batch_bytes) == ((1, 2, 4), False, 1 << 20)


def test_what_belongs_to_sglang_is_accepted_and_nothing_is_taken_out():
    extra = URL | dict.fromkeys(SGLANG_KEYS, "theirs") | {"interface_v1": 1, "tp_lcm_size": 4}
    given = dict(extra)
    assert parse(extra) == Options(url="memory://x", interface_v1=True, tp_lcm_size=4)
    assert extra == given


@pytest.mark.parametrize("salt", ["", "none", "None", " a "])
def test_names_are_kept_as_they_are(salt):
    assert parse(URL | {"salt": salt}).salt == salt
    assert parse(URL | {"salt": None}).salt is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, "'url' is missing"),
        (None, "'url' is missing"),
        ({"url": ""}, "url"),
        ({"url": 7}, "url"),
        (URL | {"tp_size": [1]}, "did you mean tp_sizes"),
        (URL | {"weight": "x"}, "did you mean weights"),
        (URL | {"capacity": "1GiB"}, "unknown option 'capacity'"),
        (URL | {"tp_sizes": 4}, "tp_sizes=4"),
        (URL | {"tp_sizes": [0]}, "tp_sizes"),
        (URL | {"tp_sizes": [2.0]}, "tp_sizes"),
        (URL | {"tp_sizes": [True]}, "tp_sizes"),
        (URL | {"tp_sizes": "1;2"}, "tp_sizes"),
        (URL | {"tp_sizes": [1], "head_group": 1}, "head_group=1 both"),
        (URL | {"kv_heads": 0}, "kv_heads=0"),
        (URL | {"kv_heads": 1.5}, "kv_heads"),
        (URL | {"layers": -1}, "layers=-1"),
        (URL | {"timeout": 0}, "timeout"),
        (URL | {"timeout": "inf"}, "timeout"),
        (URL | {"timeout": "nan"}, "timeout"),
        (URL | {"retries": -1}, "retries"),
        (URL | {"ttl": 0}, "ttl"),
        (URL | {"flat_bytes": 0}, "flat_bytes"),
        (URL | {"staging": "lots"}, "staging"),
        (URL | {"self_test": 2}, "self_test"),
        (URL | {"object_layout": "Canonical"}, "object_layout"),
        (URL | {"model": 3}, "model=3"),
        (URL | {"model": ""}, "model=''"),
        (URL | {"weights": ["a"]}, "weights"),
        (URL | {"interface_v1": "0"}, "interface_v1='0' is text"),
    ],
)
def test_what_is_wrong_is_named(wrong, said):
    with pytest.raises(ConfigError, match=said):
        parse(wrong)


def test_every_option_is_said_in_words():
    """An option is a field with a range or a type: none is of a type that text cannot have."""
    for field in dataclasses.fields(Options):
        if field.name == "tp_sizes":
            continue
        with pytest.raises(ConfigError, match=field.name):
            parse(URL | {field.name: {"a": 1}})


def test_the_package_imports_no_engine_and_no_torch():
    code = (
        "import sys, kvconnect.engines.sglang as adapter; "
        "assert callable(adapter.explain); "
        "bad = [m for m in ('sglang', 'torch') if m in sys.modules]; "
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
