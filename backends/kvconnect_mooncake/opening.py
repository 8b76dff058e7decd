"""Opening and closing what a store is made of."""

from __future__ import annotations

import logging
import time

from kvconnect_mooncake import library, transport
from kvconnect_mooncake.address import parse_address
from kvconnect_mooncake.admin import parse_admin
from kvconnect_mooncake.breakers import Breakers
from kvconnect_mooncake.budget import Budget
from kvconnect_mooncake.client import Client
from kvconnect_mooncake.core import Core
from kvconnect_mooncake.names import Names
from kvconnect_mooncake.options import MooncakeOptions
from kvconnect_mooncake.quiet import Keeper, rule_of
from kvconnect_mooncake.slots import SlotPool
from kvconnect_mooncake.workers import Workers

log = logging.getLogger("kvconnect.mooncake")

ASKERS = 4
CALL_NICE = 10
"""Of the threads that wait in the library. Nicer ones gain no more, and may hold up whoever needs
the interpreter's lock from them on a machine that is busy."""


def open_core(location: str, options: MooncakeOptions) -> Core:
    """Connect to the master; raises as `kvconnect_mooncake.open_backend` says."""
    address = parse_address(location)
    admin = parse_admin(options.admin, address)
    transport.check_cards(options.protocol, allow_fallback=options.allow_fallback)
    module = library.load(options.protocol)
    address.check()
    if options.tenant:
        admin.check_tenant(options.tenant)
    breakers = Breakers(options.breaker)
    client = Client(module, address, options, breakers)
    try:
        used = transport.in_use()
        transport.check_in_use(options.protocol, used, allow_fallback=options.allow_fallback)
        slots = SlotPool(options.side)
        client.register(slots.region.address, slots.region.nbytes)
    except BaseException:
        client.close()
        raise
    keeper = Keeper(rule_of(options.entries))
    keeper.start()
    return Core(
        options,
        client,
        Names(options.prefix, checksum=options.checksum),
        admin,
        slots,
        Budget(options.entries),
        breakers,
        keeper,
        Workers(options.threads, "kvconnect-mooncake"),
        Workers(options.threads, "kvconnect-mooncake-call", nice=CALL_NICE),
        Workers(ASKERS, "kvconnect-mooncake-ask"),
    )


def stop_core(core: Core, timeout: float) -> bool:
    """Stop the threads; False if one hangs in the library, which must not be left under it."""
    until = time.monotonic() + timeout
    # In this order: who moves a chunk waits for who makes its call.
    for workers in (core.movers, core.callers, core.askers):
        if not workers.stop(max(until - time.monotonic(), 0)):
            return False
    core.keeper.stop()
    return True


def leave_core(core: Core) -> None:
    """Leave the store; if the library takes longer than `close_timeout`, that is logged."""
    if not core.client.close():
        log.warning(
            "mooncake: the library is still leaving the store after close_timeout=%g s; it ends by "
            "itself (within 30 s where it watches etcd), and its segment with it",
            core.options.close_timeout,
        )
