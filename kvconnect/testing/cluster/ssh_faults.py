"""What breaks the network of a host that is somebody's, and takes it back. Runs on that host.

Everything is under a name of its own: rules in one chain with one jump to it, the rate in a
queueing discipline with a handle that nobody else uses. So all of it can be found and removed
by whoever comes next, and nothing else is ever touched.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvconnect.errors import CapabilityError, ConfigError, UnavailableError
from kvconnect.testing.cluster import shaping, tools

CHAIN = "KVCONNECT-CLUSTER"

HANDLE = "4b56:"

_SECONDS = 20.0
_TOOLS = ("ip", "tc", "iptables-restore", "iptables-save")


def admin(argv: list[str], given: str = "") -> str:
    """Run a tool as an administrator, by sudo where this user is none; return its stdout."""
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    return tools.call([*sudo, *argv], given=given, timeout=_SECONDS)


def interface(address: str) -> str:
    """Find the network interface with an IPv4 address; `ConfigError` where there is none."""
    tools.need(["ip"])
    rows = [line.split() for line in tools.call(["ip", "-o", "-4", "address"]).splitlines()]
    found = {row[3].partition("/")[0]: row[1] for row in rows}
    if address not in found:
        raise ConfigError(f"address={address} is on no interface; there are {sorted(found)}")
    return found[address]


def need() -> None:
    """Raise one `UnavailableError` where a tool is missing or sudo asks for a password."""
    tools.need([*_TOOLS, "sudo"] if os.geteuid() else _TOOLS)
    try:
        admin(["tc", "-V"])
    except UnavailableError as error:
        raise UnavailableError(
            f"faults need root, or sudo that asks for no password (`sudo -n`): {error}"
        ) from error


def begin(device: str) -> None:
    """Remove what another left and have all that a device receives pass our chain."""
    end(device)
    admin(["iptables-restore", "--noflush"], shaping.jump(CHAIN, device))


def end(device: str) -> None:
    """Lift every fault and remove what `begin` made; fine where there is nothing."""
    saved = admin(["iptables-save", "-t", "filter"]).splitlines()
    if any(line.startswith(f":{CHAIN} ") for line in saved):
        jumps = [line for line in saved if line.endswith(f"-j {CHAIN}")]
        drops = [f"-D{line.removeprefix('-A')}" for line in jumps]
        lines = ["*filter", *drops, f"-F {CHAIN}", f"-X {CHAIN}", "COMMIT", ""]
        admin(["iptables-restore", "--noflush"], "\n".join(lines))
    if (Path("/sys/class/net") / device).exists() and _root(device) == HANDLE:
        admin(shaping.unlimit(device))


def limit(device: str, rate: str | None, peers: list[str], spared: list[shaping.Spared]) -> None:
    """Limit what a device sends to these addresses; None lifts it.

    Raises `CapabilityError` where the device has a discipline that somebody set: removing it at
    the end would not bring that back.
    """
    root = _root(device)
    if rate is None:
        if root == HANDLE:
            admin(shaping.unlimit(device))
        return
    if root not in {"", HANDLE}:
        raise CapabilityError(
            f"{device} has a queueing discipline already, {root} as `tc qdisc` shows it; a rate "
            "can be set where the kernel's default is in place"
        )
    if root == HANDLE:
        commands = shaping.limit(device, rate, HANDLE, "0", there=True)
    else:
        commands = shaping.limit_to(device, rate, peers, spared, HANDLE)
    for command in commands:
        admin(command)


def _root(device: str) -> str:
    """Return the handle of a device's root discipline; empty where it is the kernel's default."""
    shown = admin(["tc", "qdisc", "show", "dev", device])
    found = [line.split()[2] for line in shown.splitlines() if "root" in line.split()]
    return next((handle for handle in found if handle != "0:"), "")
