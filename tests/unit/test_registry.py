"""Stores by URL: splitting, unknown schemes and options, missing libraries, entry points."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvconnect
from kvconnect import registry
from kvconnect.backend import Backend
from kvconnect.errors import ConfigError, UnavailableError
from kvconnect.registry import known_schemes, open_url, split_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("memory://", ("memory", "", {})),
        ("memory://name", ("memory", "name", {})),
        ("nvme:///mnt/kv", ("nvme", "/mnt/kv", {})),
        ("nvme:///mnt/kv?capacity=200GiB&depth=8", ("nvme", "/mnt/kv",
                                                    {"capacity": "200GiB", "depth": "8"})),
        ("mooncake://master:50051", ("mooncake", "master:50051", {})),
        ("nixl+s3://bucket/a/b?endpoint=http%3A%2F%2Fh%3A9000", ("nixl+s3", "bucket/a/b",
                                                                 {"endpoint": "http://h:9000"})),
        ("nvme:///mnt/a%23b%20c", ("nvme", "/mnt/a#b c", {})),
    ],
)  # fmt: skip
def test_a_url_is_scheme_location_and_options(url, expected):
    assert split_url(url) == expected


@settings(deadline=None)
@given(
    location=st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=12),
    options=st.dictionaries(st.text(min_size=1, max_size=5), st.text(min_size=1, max_size=5)),
)
def test_what_is_quoted_comes_back(location, options):
    from urllib.parse import quote, urlencode

    path = "/" + location
    url = f"nvme://{quote(path)}?{urlencode(options)}"
    assert split_url(url) == ("nvme", path, options)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("/mnt/kv", "write scheme://location"),
        ("nvme:/mnt/kv", "write scheme://location"),
        ("", "write scheme://location"),
        ("://x", "write scheme://location"),
        ("nvme://[::1", "no store URL"),
        ("nvme:///mnt/kv#1", "write %23"),
        ("memory://?capacity=1&capacity=2", "'capacity' is given twice"),
        ("memory://?capacity=", "write name=value"),
        ("memory://?capacity", "write name=value"),
        ("memory://?=3", "write name=value"),
    ],
)
def test_a_url_that_is_none_is_refused(url, words):
    with pytest.raises(ConfigError, match=words):
        open_url(url)


def test_an_unknown_scheme_names_the_known_ones_and_the_way_to_add_one():
    with pytest.raises(ConfigError, match=r"'nvmee'; known: .*memory.*nvme.*kvconnect\.backends"):
        open_url("nvmee:///mnt")


def test_an_unknown_option_reaches_the_user_with_a_close_match():
    with pytest.raises(ConfigError, match="memory: unknown option 'capcity'; did you mean cap"):
        open_url("memory://?capcity=1GiB")


def test_the_public_open_gives_a_backend():
    with kvconnect.open("memory://?capacity=1MiB") as store:
        assert isinstance(store, Backend)
        assert store.stats()["capacity"] == 1 << 20


def entry(name, value):
    return EntryPoint(name=name, value=value, group=registry.GROUP)


@pytest.fixture
def installed(monkeypatch):
    """Let a test say which entry points are installed."""

    def install(*entries):
        monkeypatch.setattr(registry, "entry_points", lambda group: entries)

    install()
    return install


def test_a_bare_checkout_serves_the_built_in_backends(installed):
    assert known_schemes() == sorted(registry.BUILT_IN)
    with open_url("memory://") as store:
        assert store.name == "memory"


def opened_here(location, options):
    return (location, dict(options))


@pytest.fixture
def plugin(monkeypatch):
    """Make this module importable under a name an entry point can give."""
    monkeypatch.setitem(sys.modules, "kvconnect_test_plugin", sys.modules[__name__])
    return "kvconnect_test_plugin"


@pytest.mark.parametrize("scheme", ["memory", "my+store"])
def test_an_installed_entry_point_wins_over_the_table(installed, plugin, scheme):
    installed(entry("other", "no.such:thing"), entry(scheme, f"{plugin}:opened_here"))
    assert open_url(f"{scheme}://a/b?c=d") == ("a/b", {"c": "d"})
    assert scheme in known_schemes()


@pytest.mark.parametrize(
    ("target", "missing"),
    [
        ("no_such_library.opener:open_backend", "no_such_library"),
        ("kvconnect_broken:open_backend", "libcudart.so.12"),
        ("kvconnect.errors:open_backend", "open_backend"),
    ],
)
def test_a_missing_library_is_unavailable_with_the_fix(
    installed, tmp_path, monkeypatch, target, missing
):
    """Not installed, the CUDA wheel on a CPU host, a stale entry point (case 28)."""
    (tmp_path / "kvconnect_broken.py").write_text("raise ImportError('libcudart.so.12: no file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    installed(entry("fast", target))
    with pytest.raises(UnavailableError, match=missing) as refused:
        open_url("fast://host")
    assert "backend 'fast' needs" in str(refused.value)
    assert "pip install 'kvconnect[fast]'" in str(refused.value)
    assert isinstance(refused.value.__cause__, (ImportError, AttributeError))


def test_importing_kvconnect_imports_no_backend_and_no_torch():
    program = (
        "import sys, kvconnect, kvconnect.registry, kvconnect.connector;"
        "print([n for n in ('torch', 'mooncake', 'nixl', 'lmdb', 'kvconnect_nvme')"
        " if n in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.strip() == "[]"
