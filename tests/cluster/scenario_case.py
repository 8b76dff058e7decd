"""Running one scenario of the catalogue as a test: its short length, or over ssh with --hosts."""

import os
from pathlib import Path

import pytest

from kvconnect.errors import CapabilityError, UnavailableError
from kvconnect.testing.cluster import catalog, running, tools
from kvconnect.testing.cluster.inventory import Inventory


def check(name, request, tmp_path):
    """Run it; a failure tells each finding, its event and the command that runs it again."""
    inventory = request.config.getoption("--hosts", None)
    wanted = running.Wanted(
        scenario=catalog.find(name), inventory=Path(inventory) if inventory else None
    )
    _refuse(wanted)
    said = []
    done = running.perform(wanted, tmp_path / name, said.append)
    if not done.report.passed:
        pytest.fail("\n".join([*said, *running.summary(done)]), pytrace=False)
    assert done.report.traces or not wanted.scenario.faults
    assert sum(one.calls for one in done.report.latencies) >= wanted.scenario.limits.calls


def _refuse(wanted):
    """Skip what cannot be here; as root on this machine nothing can not."""
    if wanted.inventory is not None:
        found = len(Inventory.read(wanted.inventory).host)
        if found < wanted.scenario.hosts:
            pytest.skip(f"hardware: takes {wanted.scenario.hosts} hosts, --hosts has {found}")
        try:
            running.refuse_over_ssh(wanted.scenario)
        except CapabilityError as error:
            pytest.skip(f"hardware: {error}")
        return
    try:
        tools.need_root()
        tools.need(tools.LOCAL)
    except UnavailableError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
