"""The scenarios of Mooncake stores, each in its short length."""

import pytest

from tests.cluster.scenario_case import check

HERE = (
    "l3-share", "link-cut", "master-failover", "owner-killed", "packet-loss", "slow-link",
    "split-brain",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_scenario(name, request, tmp_path):
    check(name, request, tmp_path)
