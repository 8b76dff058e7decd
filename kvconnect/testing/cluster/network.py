"""Cables and the switch of a local cluster: veth pairs between namespaces, and a bridge.

The bridge lives in a namespace of its own, so that the machine's own network sees nothing of a
cluster: no device, no address, no route, no rule. Nor can a host reach anything outside.
"""

from __future__ import annotations

from kvconnect.testing.cluster.names import BRIDGE, DEVICE, Names
from kvconnect.testing.cluster.tools import call


def make_switch(names: Names) -> None:
    """Make the bridge."""
    call(["ip", "netns", "add", names.switch])
    _batch(
        names.switch,
        f"link add name {BRIDGE} type bridge forward_delay 0",
        f"link set dev {BRIDGE} addrgenmode none",
        f"link set dev {BRIDGE} up",
    )


def attach(names: Names, index: int) -> None:
    """Make a host's namespace and put its cable into the switch.

    A host keeps its hardware address for life, as a machine does that was switched off and on.
    """
    host, port = names.host(index), names.port(index)
    hardware = f"02:6b:76:63:00:{index:02x}"
    call(["ip", "netns", "add", host])
    _batch(
        names.switch,
        f"link add name {port} type veth peer name {DEVICE} address {hardware} netns {host}",
        f"link set dev {port} addrgenmode none",
        f"link set dev {port} master {BRIDGE}",
        f"link set dev {port} up",
    )
    _batch(
        host,
        "link set dev lo up",
        f"link set dev {DEVICE} addrgenmode none",
        f"address add {names.address(index)}/24 dev {DEVICE}",
        f"link set dev {DEVICE} up",
    )


def unplug(names: Names, index: int) -> None:
    """Remove a host's cable: from now on nothing it sends or is sent arrives, nor is refused."""
    call(["ip", "-n", names.switch, "link", "delete", names.port(index)])


def delete(namespace: str) -> None:
    """Remove a namespace with all that is in it."""
    call(["ip", "netns", "delete", namespace])


def namespaces(prefix: str) -> list[str]:
    """List the network namespaces whose name begins so."""
    lines = call(["ip", "netns", "list"]).splitlines()
    return [line.split()[0] for line in lines if line.startswith(prefix)]


def _batch(namespace: str, *commands: str) -> None:
    call(["ip", "-n", namespace, "-batch", "-"], given="\n".join(commands) + "\n")
