"""Faults of the network between hosts: which packets a host lets in, how fast it sends.

Packets are dropped where they arrive, never where they leave: a sender whose own kernel drops is
told so and behaves as if its queue were full, a sender of lost packets must find out by itself.
So a cut or a loss of host A is a rule on A against every peer, and one on each peer against A.
A rate is set where packets leave: by a token bucket, with a queue of 50 ms.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvconnect.errors import CapabilityError, ConfigError

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}

_QUEUE_SECONDS = 0.05
_BURST_SECONDS = 0.002
_BURST_BYTES = 65536
# At least one packet as it comes out of TCP, which leaves its cutting to the device.


@dataclass(frozen=True, slots=True)
class Sources:
    """What a host drops: all of what comes from `cut`, and a fraction of `lossy`'s.

    A source may have several losses: each is drawn on its own.
    """

    cut: tuple[str, ...] = ()
    lossy: tuple[tuple[str, float], ...] = ()


def rate_bits(rate: str) -> int:
    """Return bits per second of a rate as in "200mbit" or "1gbit"; `ConfigError` if it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate)
    if not found or float(found[1]) == 0:
        raise ConfigError(f"rate={rate!r} is none: write a number and kbit, mbit or gbit")
    return round(float(found[1]) * _UNITS[found[2]])


def fraction(percent: float) -> float:
    """Return a share of packets as a fraction; `ConfigError` unless 0 < percent <= 100."""
    if not 0 < percent <= 100:
        raise ConfigError(f"percent={percent:g} of packets is not in (0, 100]")
    return percent / 100


@dataclass(frozen=True, slots=True)
class Spared:
    """A connection of the runner's that no fault may touch, as the ssh server sees its ends.

    The runner may be on one of the hosts: then its end is among the addresses that faults are for.
    """

    client: str
    server: str
    port: int  # the server's


def jump(chain: str, device: str) -> str:
    """Return the input of `iptables-restore --noflush` that sends all of a device to `chain`."""
    return f"*filter\n:{chain} - [0:0]\n-I INPUT -i {device} -j {chain}\nCOMMIT\n"


def rules(chain: str, sources: Sources, spared: Sequence[Spared] = ()) -> str:
    """Return the input of `iptables-restore --noflush` that makes `chain` hold just these rules.

    One transaction: no packet meets a chain half written.
    """
    lines = ["*filter", f":{chain} - [0:0]"]
    for one in spared:
        ends = ((one.client, one.server, "dport"), (one.server, one.client, "sport"))
        lines += [
            f"-A {chain} -s {source} -d {target} -p tcp --{port} {one.port} -j RETURN"
            for source, target, port in ends
        ]
    lines += [f"-A {chain} -s {source} -j DROP" for source in sources.cut]
    lines += [
        f"-A {chain} -s {source} -m statistic --mode random --probability {share:.6f} -j DROP"
        for source, share in sources.lossy
    ]
    return "\n".join([*lines, "COMMIT", ""])


def dropped(saved: str, chain: str) -> int:
    """Count the packets that `chain` has dropped, from the output of `iptables-save -c`."""
    found = re.findall(rf"^\[(\d+):\d+\] -A {re.escape(chain)} .*-j DROP$", saved, re.MULTILINE)
    return sum(int(packets) for packets in found)


def limit(
    device: str, rate: str, handle: str = "1:", default: str = "10", *, there: bool = False
) -> list[list[str]]:
    """Return the `tc` commands that let a device send at most this fast.

    `handle` names the discipline; its class 10 is the slow one, `default` the class of packets
    that no filter sends elsewhere, where 0 is none: they are sent at once. A discipline that is
    `there` is changed, and keeps what waits in it.
    """
    bits = rate_bits(rate)
    burst = max(int(bits / 8 * _BURST_SECONDS), _BURST_BYTES)
    queue = max(int(bits / 8 * _QUEUE_SECONDS), 2 * _BURST_BYTES)
    add, slow = ["dev", device, "parent"], f"{handle}10"
    htb = ["htb", "burst", str(burst), "cburst", str(burst), "quantum", "60000", "rate"]
    commands = [
        ["tc", "class", "replace", *add, handle, "classid", slow, *htb, f"{bits}bit"],
        ["tc", "qdisc", "replace", *add, slow, "bfifo", "limit", str(queue)],
    ]
    if not there:
        root = ["dev", device, "root", "handle", handle, "htb", "default", default]
        commands.insert(0, ["tc", "qdisc", "replace", *root])
    return commands


def limit_to(
    device: str, rate: str, peers: Sequence[str], spared: Sequence[Spared], handle: str
) -> list[list[str]]:
    """Return the `tc` commands that limit what a device sends to these addresses, in sum.

    Everything else passes as before, and so do the runner's connections.
    """
    add = ["tc", "filter", "add", "dev", device, "parent", handle, "protocol", "ip", "prio"]
    to = ["u32", "match", "ip", "dst"]
    commands = limit(device, rate, handle, "0")
    for one in spared:
        for target, port in ((one.client, "sport"), (one.server, "dport")):
            tcp = ["match", "ip", "protocol", "6", "0xff", "match", "ip", port, str(one.port)]
            direct = ["0xffff", "flowid", f"{handle}0"]
            commands.append([*add, "1", *to, f"{target}/32", *tcp, *direct])
    commands += [[*add, "2", *to, f"{peer}/32", "flowid", f"{handle}10"] for peer in peers]
    return commands


def unlimit(device: str) -> list[str]:
    """Return the `tc` command that lifts a rate; it fails where there is none."""
    return ["tc", "qdisc", "del", "dev", device, "root"]


class Cuts:
    """Who asked for which link to be cut or lossy; a link is open when nobody asks.

    Two faults at once on one link do not lift each other: each has an owner, a host's index, or
    None for a partition of the whole.
    """

    def __init__(self, addresses: Sequence[str], spared: Mapping[int, str] | None = None) -> None:
        """Start with every link open between hosts with these addresses.

        `spared` tells of the hosts that take no faults why; cutting or losing there raises
        `CapabilityError`, and changes nothing.
        """
        self._addresses, self._spared = list(addresses), dict(spared or {})
        self._cut: dict[int | None, frozenset[frozenset[int]]] = {}
        self._loss: dict[int, float] = {}

    def cut(
        self, owner: int | None, links: Mapping[int, Sequence[int]], *, instead: bool = False
    ) -> None:
        """Cut the links from each key to its values, for this owner, beside what it has cut.

        Or `instead` of that.
        """
        pairs = {frozenset((a, b)) for a, others in links.items() for b in others if a != b}
        self._need(frozenset[int]().union(*pairs))
        before = frozenset() if instead else self._cut.get(owner, frozenset())
        self._cut[owner] = before | pairs

    def heal(self, owner: int | None) -> None:
        """Lift what this owner cut."""
        self._cut.pop(owner, None)

    def heal_all(self) -> None:
        """Lift every cut, whoever asked."""
        self._cut.clear()

    def lose(self, index: int, share: float | None) -> None:
        """Have a share of a host's packets lost, both ways; None ends it."""
        if share is None:
            self._loss.pop(index, None)
        else:
            self._need(range(len(self)))
            self._loss[index] = share

    def _need(self, indexes: Iterable[int]) -> None:
        why = [self._spared[i] for i in indexes if i in self._spared]
        if why:
            raise CapabilityError("; ".join(why))

    def __len__(self) -> int:
        """Return the number of hosts."""
        return len(self._addresses)

    def of(self, index: int) -> Sources:
        """Return what this host has to drop."""
        cut = frozenset().union(*self._cut.values())
        peers = [i for i in range(len(self._addresses)) if i != index]
        closed = [self._addresses[i] for i in peers if frozenset((i, index)) in cut]
        lossy = [
            (self._addresses[i], share)
            for i in peers
            for at in (i, index)
            if (share := self._loss.get(at)) is not None
        ]
        return Sources(tuple(closed), tuple(lossy))
