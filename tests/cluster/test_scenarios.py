"""The scenarios of pairs and of stores that need no master, each in its short length.

Those of Mooncake stores are in a file of their own: files run beside each other.
"""

import pytest

from kvconnect.testing.cluster import catalog
from tests.cluster import test_scenarios_mooncake
from tests.cluster.scenario_case import check

HERE = ("disk-full", "pd-mooncake", "pd-nixl", "power-cut", "random", "rolling-restart", "s3-cut")


def test_no_scenario_of_the_catalogue_is_left_out():
    everything = [one.name for one in catalog.everything()]
    assert sorted((*HERE, *test_scenarios_mooncake.HERE)) == everything


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_scenario(name, request, tmp_path):
    check(name, request, tmp_path)
