"""A pytest plugin: the fixture `cluster`, on this machine or on the hosts of an inventory.

    pytest_plugins = ["kvconnect.testing.cluster.plugin"]   # in the topmost conftest.py

    @pytest.mark.cluster(hosts=2, rate="1gbit")
    def test_mine(cluster):
        assert cluster.host(0).run(["true"], timeout=5).returncode == 0

With ``pytest --hosts hosts.toml`` the same tests run on the hosts of that file, over ssh. Tests of
one module that ask for the same share a cluster; between two tests it is reset. Not loaded by
itself: its option would be in the way of other plugins where nobody uses it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from kvconnect.errors import UnavailableError
from kvconnect.testing.cluster import tools
from kvconnect.testing.cluster.cluster import Cluster
from kvconnect.testing.cluster.inventory import Inventory

_MARKER = (
    "cluster(hosts=3, disk=512 << 20, rate=None, local=False): what the fixture `cluster` gives; "
    "disk in bytes and on this machine alone, rate as in '1gbit', local for tests that no cluster "
    "over ssh can run"
)


class Wanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of the marker."""

    hosts: int = 3
    disk: int = 512 << 20
    rate: str | None = None
    local: bool = False


class Clusters:
    """The cluster of a module, remade where a test wants another one. `logs` are files of tests."""

    def __init__(self, inventory: Inventory | None, temporary: pytest.TempPathFactory) -> None:
        """Have none yet."""
        self._inventory, self._temporary = inventory, temporary
        self._open: tuple[Wanted, Cluster] | None = None
        self._old: dict[str, int] = {}

    def get(self, wanted: Wanted) -> Cluster:
        """Return a cluster as new; skips where there can be none."""
        self._check(wanted)
        wanted = msgspec.structs.replace(wanted, local=False)
        if self._open is not None and self._open[0] == wanted:
            made = self._open[1]
        else:
            self.close()
            made = self._make(wanted)
            self._open = wanted, made
        try:
            made.reset(wanted.rate)
        except BaseException:
            self.close()
            raise
        self._old = {host.name: len(host.processes) for host in made.hosts}
        return made

    def _check(self, wanted: Wanted) -> None:
        if self._inventory is None:
            try:
                tools.need_root()
                tools.need(tools.LOCAL)
            except UnavailableError as error:
                _refuse(str(error))
            return
        if wanted.local:
            pytest.skip("hardware: this test takes hosts of this machine, not of an inventory")
        found = len(self._inventory.host)
        if wanted.hosts > found:
            pytest.skip(f"hardware: this test takes {wanted.hosts} hosts, --hosts has {found}")

    def _make(self, wanted: Wanted) -> Cluster:
        if self._inventory is None:
            return Cluster.local(wanted.hosts, disk=wanted.disk)
        return Cluster.over_ssh(self._inventory.first(wanted.hosts))

    def keep_logs(self, test: str) -> Path | None:
        """Copy what processes of the running test said; return the folder, if any did start."""
        if self._open is None:
            return None
        logs = [(h, log) for h in self._open[1].hosts for log in h.logs()[self._old[h.name] :]]
        folder = self._temporary.mktemp(f"logs-of-{_plain(test)}") if logs else None
        for host, log in logs:
            assert folder is not None
            (folder / host.name).mkdir(exist_ok=True)
            shutil.copy(log, folder / host.name)
        return folder

    def close(self) -> None:
        """Close the cluster, if any; the second call does nothing."""
        if self._open is not None:
            _, made = self._open
            self._open = None
            made.close()


_USED = pytest.StashKey[Clusters]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--hosts``."""
    group = parser.getgroup("kvconnect clusters")
    group.addoption(
        "--hosts",
        metavar="FILE",
        help="inventory of the hosts that the fixture `cluster` uses, over ssh (not with xdist: "
        "a host serves one cluster at a time)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture(scope="module", name="_kvconnect_clusters")
def _clusters(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Clusters]:
    file = request.config.getoption("--hosts")
    clusters = Clusters(Inventory.read(file) if file else None, tmp_path_factory)
    yield clusters
    clusters.close()


@pytest.fixture
def cluster(request: pytest.FixtureRequest, _kvconnect_clusters: Clusters) -> Iterator[Cluster]:
    """Several hosts, free of faults and processes, as the marker `cluster` of the test says.

    Where this machine cannot have them the test is skipped with the reason, and fails in CI.
    """
    marker = request.node.get_closest_marker("cluster")
    try:
        if marker and marker.args:
            raise msgspec.ValidationError("arguments have names")  # noqa: TRY301 - one text for all
        wanted = msgspec.convert(dict(marker.kwargs) if marker else {}, Wanted)
    except msgspec.ValidationError as error:
        raise pytest.UsageError(f"@pytest.mark.cluster: {error}; {_MARKER}") from None
    request.node.stash[_USED] = _kvconnect_clusters
    yield _kvconnect_clusters.get(wanted)
    del request.node.stash[_USED]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, object]:
    """Keep the logs of a failed test's hosts and say where."""
    report = yield
    used = item.stash.get(_USED, None)
    if used is not None and report.failed:
        folder = used.keep_logs(item.name)
        if folder is not None:
            report.sections.append(("logs of the cluster's hosts", f"{folder}\n"))
    return report


def _refuse(reason: str) -> NoReturn:
    """Skip; but a CI that skips what it is there for has to be told."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)[:60]
