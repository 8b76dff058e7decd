"""One rank of the P/D demo, in a process of its own.

A prefill rank computes and sends layer by layer, a decode rank receives and goes on decoding,
``single`` does both in one process with the plain decoder, as the truth to compare with, and
``directory`` is where the others find each other.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvconnect.cli.model import PRINTABLE, Decoder, KVCache, greedy, prefill
from kvconnect.cli.pd_demo_group import Group
from kvconnect.cli.pd_demo_job import (
    KEYS,
    TOKEN,
    Addresses,
    Bye,
    Computed,
    Ended,
    First,
    Go,
    Held,
    Job,
    Listening,
    Moved,
    Ready,
    Role,
    Single,
    Token,
)
from kvconnect.cli.pd_demo_model import ShardDecoder
from kvconnect.cli.pd_demo_pipe import Pipe
from kvconnect.disagg import keys as key_files
from kvconnect.disagg.bootstrap import Directory, DirectoryServer, Entry
from kvconnect.disagg.bootstrap.client import load_token
from kvconnect.disagg.decode import DecodeEndpoint
from kvconnect.disagg.options import EndpointOptions
from kvconnect.disagg.prefill import PrefillEndpoint, Sending
from kvconnect.disagg.requests import Request
from kvconnect.disagg.transports import open_transport
from kvconnect.errors import KVConnectError
from kvconnect.hostpool import HostPool
from kvconnect.identity import Identity
from kvconnect.layouts import order_of
from kvconnect.placement import Placement

REQUEST = "prompt"
_STAGING = 32 << 20
_SLOT = 4 << 20


class _Rank:
    """What both kinds of rank have: decoder, cache, pool, transport, endpoint."""

    def __init__(self, job: Job, role: Role, number: int, pipe: Pipe, stack: ExitStack) -> None:
        self.job, self.role, self.pipe, self.stack = job, role, pipe, stack
        self.prompt = job.prompt()
        self.place = job.placement(role, number)
        stages = job.ranks(role) // job.tp(role)
        store = Path(job.scratch) / f"{role}.group"
        left = pipe.until - time.monotonic()
        self.group = stack.enter_context(Group(store, number, job.tp(role), stages, left))
        self.decoder = ShardDecoder(job.config(), job.seed, self.place, self.group.gather)
        pages = job.pages(role, len(self.prompt))
        self.capacity = pages * job.page_size(role)
        self.cache = self.decoder.cache(max(self.capacity, len(self.prompt) + job.new_tokens))
        transport = stack.enter_context(open_transport(job.transport))
        plan = _pool_plan(job, role, self.place, pages + 1, f"{role} {number}")
        self.pool: Any = stack.enter_context(
            plan.place(transport.allocate(plan.nbytes, plan.label))
        )
        # The first page stays empty, so that pages have other numbers on the two sides.
        self.pages = range(role == "decode", pages + (role == "decode"))
        self.keys = key_files.load(Path(job.scratch) / KEYS)
        kind = PrefillEndpoint if role == "prefill" else DecodeEndpoint
        self.endpoint: Any = stack.enter_context(
            kind(
                self.pool,
                self.place,
                _identity(job, role, self.decoder),
                transport,
                keys=self.keys,
                options=EndpointOptions(
                    name=f"{role} {number}",
                    fleet=role,
                    ranks=job.ranks(role),
                    timeout=max(pipe.until - time.monotonic(), 1.0),
                    peer_timeout=10.0,  # a starved laptop is no lost peer
                    staging=_STAGING,
                    slot=_SLOT,
                    stage=job.stage,
                ),
            )
        )

    def views(self, layers: slice) -> list[tuple[Tensor, Tensor]]:
        """Return (pool view, cache view) of K and V of some local layers, page by page."""
        cut = slice(self.pages.start, self.pages.stop)
        pairs = []
        for name, values in (("k", self.cache.k), ("v", self.cache.v)):
            pool = self.pool.component(name)
            paged = values[layers, : self.capacity].view(
                -1, len(self.pages), self.job.page_size(self.role), *pool.shape[3:]
            )
            pairs.append((pool[cut, layers], paged.transpose(0, 1)))
        return pairs


def _pool_plan(job: Job, role: Role, place: Placement, pages: int, label: str) -> Any:
    c, blocks = job.config(), None
    if "head_block" in order_of(job.layout(role)):
        # One block for each piece that a rank of either side may hold.
        group = max(c.kv_heads // max(job.prefill_tp, job.decode_tp), 1)
        blocks = max(place.heads.extent // group, 1)
    return HostPool.plan(
        layout=job.layout(role),
        pages=pages,
        page_size=job.page_size(role),
        layers=place.layers.extent,
        heads=place.heads.extent,
        head_dim=c.head_dim,
        v_head_dim=c.v_head_dim,
        dtype=c.dtype,
        head_blocks=blocks,
        label=label,
    )


def _identity(job: Job, role: Role, decoder: Decoder) -> Identity:
    c = decoder.config
    return Identity(
        model=f"kvconnect-demo/{c.layers}x{c.d_model}",
        weights=decoder.fingerprint(),
        dtype=c.dtype,
        page_size=job.page_size(role),
        layers=c.layers,
        heads=c.kv_heads,
        head_dim=c.head_dim,
        v_head_dim=c.v_head_dim,
    )


def prefill_rank(rank: _Rank) -> None:
    """Compute this rank's layers; send each as it finishes."""
    pipe, job, held = rank.pipe, rank.job, rank.place.layers
    pipe.say(Listening(_listen(rank)))
    pipe.say(Ready(rank.pool.memory.nbytes))
    pipe.hear(Go)
    started, seen, sendings = time.monotonic(), 0, list[Sending]()

    def tell() -> None:
        nonlocal seen
        for trip in rank.endpoint.trips(seen):
            seen = trip.number
            pipe.say(
                Moved(
                    trip.peer, trip.layers, trip.nbytes, trip.seconds, trip.packed, trip.why,
                    trip.failure,
                )
            )  # fmt: skip

    def finished(layer: int) -> None:
        local = slice(layer - held.start, layer - held.start + 1)
        for pool, cache in rank.views(local):
            pool.copy_(cache)
        layers = layer, layer + 1
        sendings.append(rank.endpoint.send(REQUEST, rank.pages, layers=layers))
        pipe.say(Computed(layer, time.monotonic() - started))
        tell()

    bounds, decoder = job.bounds(len(rank.prompt)), rank.decoder
    shapes = [(b - a, decoder.config.d_model) for a, b in itertools.pairwise(bounds) if b > a]
    chunks = rank.group.take(shapes, lambda: decoder.embed(rank.prompt, bounds))
    decoder.prefill(chunks, rank.cache, bounds, finished)
    rank.group.hand_on(chunks)
    if rank.group.rank == job.ranks("prefill") - 1:
        token = PRINTABLE.start + int(decoder.logits(chunks[-1])[PRINTABLE].argmax())
        pipe.say(Token(token, time.monotonic() - started))
    while not sendings[0].wait(0.05).state.final and time.monotonic() < pipe.until:
        tell()
    tell()
    _end(rank, sendings[0])


def _listen(rank: _Rank) -> str:
    """Listen for decode ranks, and say so in the directory where there is one."""
    job, address = rank.job, str(rank.endpoint.listen())
    if job.directory:
        entry = Entry(
            fleet="prefill",
            name=rank.endpoint.options.name,
            ranks=job.ranks("prefill"),
            address=address,
            public_key=rank.keys.public,
            generation=rank.endpoint.generation,
            started=time.time_ns(),
        )
        rank.stack.enter_context(_directory(job).announce(entry))
    return address


def _addresses(rank: _Rank) -> list[str]:
    """Return where the prefill ranks are: as the directory has it, or the parent."""
    if not rank.job.directory:
        return rank.pipe.hear(Addresses).addresses
    left = max(rank.pipe.until - time.monotonic(), 0)
    found = _directory(rank.job).find("prefill", keys=rank.keys, timeout=left)
    return [entry.address for entry in found]


def _directory(job: Job) -> Directory:
    return Directory(job.directory, token=load_token(Path(job.scratch) / TOKEN))


def decode_rank(rank: _Rank) -> None:
    """Receive the prompt's pages, then decode with what came."""
    pipe, job = rank.pipe, rank.job
    rank.endpoint.connect(_addresses(rank))
    pipe.say(Ready(rank.pool.memory.nbytes))
    pipe.hear(Go)
    started, tokens = time.monotonic(), len(rank.prompt)
    receiving = rank.endpoint.receive(REQUEST, rank.pages, slots=job.slots(tokens))
    outcome = receiving.wait()
    if outcome.ok:
        seconds = time.monotonic() - started
        if job.tamper and rank.group.rank == 0:
            value = rank.pool.component("k")[rank.pages.start]
            value[(0,) * value.dim()] += 1
        for pool, cache in rank.views(slice(None)):
            cache.copy_(pool)
        pipe.say(Held(seconds, outcome.nbytes, digest(rank.cache, tokens, slice(None))))
        _decode(rank, tokens, started)
    _end(rank, receiving)


def _decode(rank: _Rank, tokens: int, started: float) -> None:
    """Go on after the token that the prefill side found."""
    rank.cache.length = tokens
    first = rank.pipe.hear(First).value
    if rank.job.new_tokens > 1:
        logits = rank.decoder.forward([first], rank.cache)
        for token in greedy(rank.decoder, rank.cache, logits, rank.job.new_tokens - 1):
            if rank.group.rank == 0:
                rank.pipe.say(Token(token, time.monotonic() - started))


def _end(rank: _Rank, request: Request) -> None:
    quiet = request.quiet(max(rank.pipe.until - time.monotonic(), 0))
    rank.pipe.say(Ended(request.state.value, request.reason, request.nbytes, quiet))
    rank.pipe.hear(Bye)


def single(job: Job, pipe: Pipe) -> None:
    """Prefill and decode in this process alone."""
    decoder, prompt = Decoder(job.config(), job.seed), job.prompt()
    pipe.hear(Go)
    cache, started = KVCache(decoder.config, len(prompt) + job.new_tokens), time.monotonic()
    logits = torch.empty(0)
    for _, logits in prefill(decoder, cache, prompt, job.bounds(len(prompt))):  # noqa: B007
        pass
    steps = greedy(decoder, cache, logits, job.new_tokens)
    tokens = [next(steps)]
    seconds = time.monotonic() - started
    tokens += steps
    places = [job.placement("decode", number) for number in range(job.decode_tp)]
    digests = [digest(cache, len(prompt), slice(p.heads.start, p.heads.stop)) for p in places]
    pipe.say(Single(tokens, digests, seconds))


def directory(job: Job, pipe: Pipe) -> None:
    """Serve the directory, as `kvconnect bootstrap` does."""
    with DirectoryServer(token=load_token(Path(job.scratch) / TOKEN)) as server:
        pipe.say(Listening(server.url))
        pipe.hear(Bye)


def digest(cache: KVCache, tokens: int, heads: slice) -> str:
    """Return a digest of K and V of the first `tokens` tokens, bit for bit."""
    state = hashlib.blake2b(digest_size=16)
    for values in (cache.k, cache.v):
        state.update(values[:, :tokens, heads].contiguous().view(torch.uint8).numpy().data)
    return state.hexdigest()


def run(job: Job, role: str, number: int) -> int:
    """Run one rank; 2 with one line on stderr if kvconnect refuses."""
    torch.set_num_threads(job.threads)
    pipe = Pipe(time.monotonic() + job.timeout)
    try:
        with ExitStack() as stack:
            if role == "single":
                single(job, pipe)
            elif role == "directory":
                directory(job, pipe)
            elif role == "prefill":
                prefill_rank(_Rank(job, "prefill", number, pipe, stack))
            else:
                decode_rank(_Rank(job, "decode", number, pipe, stack))
    except KVConnectError as error:
        print(f"kvconnect: {error}", file=sys.stderr)
        return 2
    return 0
