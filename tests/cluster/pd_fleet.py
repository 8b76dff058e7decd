"""Prefill and decode ranks as processes on the hosts of a cluster, paired by the test."""

import msgspec

from kvconnect.disagg import keys
from kvconnect.testing.cluster.pd_messages import RankConfig
from kvconnect.testing.cluster.pd_rank_driver import Driven

GEOMETRY = {
    "layers": 4, "heads": 4, "head_dim": 64, "v_head_dim": 32, "dtype": "int16", "unit": 16,
    "pages": 24, "seed": 7, "deadline": 15.0,
}  # fmt: skip
ENDPOINT = {"ping": 0.1, "peer_timeout": 2.0, "staging": 1 << 20, "slot": 64 << 10}


def start(host, config, timeout=60.0):
    """Start one rank; returns it and what it said first."""
    argv = [host.python, "-m", "kvconnect.testing.cluster.pd_rank"]
    rank = Driven(host.spawn(argv, name=config.name))
    rank.process.send(msgspec.json.encode(config).decode())
    return rank, rank.answer(0, timeout)


class Fleet:
    """`prefill` and `decode` are lists of (host, settings), one for each rank of that side."""

    def __init__(self, cluster, transport, prefill, decode, **settings):
        self.cluster, self.keys = cluster, keys.generate()
        self.configs, self.ranks, self.addresses = {}, {}, []
        for role, side in (("prefill", prefill), ("decode", decode)):
            for number, (index, own) in enumerate(side):
                host = cluster.host(index)
                listen = f"tcp://{host.address}:{host.free_port()}" if role == "prefill" else ""
                fields = {
                    "name": f"{role}{number}", "role": role, "transport": transport,
                    "host": host.address, "listen": listen, "keys": self.keys, "fleet": role,
                    "ranks": len(side), "tp_rank": number, "tp_size": len(side),
                    "endpoint": ENDPOINT,
                }  # fmt: skip
                config = RankConfig(**GEOMETRY | fields | settings | own)
                self.configs[config.name] = host, config
        for name in self.configs:
            self.start(name)

    def start(self, name):
        """Start a rank, also again: same address, new generation."""
        host, config = self.configs[name]
        self.ranks[name], said = start(host, config)
        if config.listen:
            assert said["address"] == config.listen
            self.addresses = [*{*self.addresses, config.listen}]
        return said["generation"]

    def connect(self, timeout=15.0):
        for rank in self.side("decode"):
            rank.ask("connect", timeout + 5, addresses=self.addresses, timeout=timeout)

    def side(self, role):
        return [rank for name, rank in self.ranks.items() if name.startswith(role)]

    def transfer(self, request, ids, send=(), receive=()):
        """Have all ranks do their part; returns the events of their ends by rank."""
        for rank in self.side("prefill"):
            rank.ask("send", request=request, ids=ids, **dict(send))
        for rank in self.side("decode"):
            rank.ask("receive", request=request, ids=ids, **dict(receive))
        return {name: rank.call(request, 25) for name, rank in self.ranks.items()}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in self.ranks.values():
            rank.close()
