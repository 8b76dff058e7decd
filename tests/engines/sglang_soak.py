"""Random load on SGLang's own storage threads, every loaded page compared with an oracle.

Each engine is a host pool, kvconnect's storage and the real controller with its backup, hit
query, prefetch and completion threads; this module plays the scheduler: it allocates and frees
pool pages, so that pages are reused all the time, and takes acknowledgements from the queues.
A page's bytes follow from its hash alone, so any engine can check what any other stored.
"""

import contextlib
import logging
import queue
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import kvconnect
from tests.engines import sglang_pools
from tests.engines.sglang_rank import Rank, buffers, engine

PAGE_SLOTS = 16
SHAPE = {"page_size": PAGE_SLOTS, "layers": 4, "heads": 4, "dim": 64}  # 64 KiB a page
POISON = 0xA5
DRAIN_SECONDS = 60.0
PATIENCE = 0.005
"""Seconds to wait for an acknowledgement when there is nothing else to do."""


def page_bytes(page_hash, nbytes):
    """Return what a page holds: (nbytes,) uint8, fixed by its hash."""
    bits = np.random.SFC64(int(page_hash, 16)).random_raw(-(-nbytes // 8))
    return bits.view(np.uint8)[:nbytes]


@dataclass
class Prompt:
    """A token sequence of whole pages; prompts share prefixes as conversations do."""

    tokens: list
    hashes: list


class Prompts:
    """A bounded set of prompts that grow out of one another."""

    def __init__(self, rng, most=200):
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        self._rng, self._most, self._hash = rng, most, get_storage_hash_str
        self.all = [self._grown([], 4)]

    def _grown(self, prefix, pages):
        tokens = prefix + [self._rng.randrange(100_000) for _ in range(pages * PAGE_SLOTS)]
        return Prompt(tokens, list(self._hash(tokens, None, page_size=PAGE_SLOTS)))

    def some(self):
        return self._rng.choice(self.all)

    def more(self):
        """Return a prompt that begins like one of those known, and know it from now on."""
        old = self.some()
        keep = self._rng.randrange(min(len(old.hashes), 40) + 1)
        new = self._grown(old.tokens[: keep * PAGE_SLOTS], self._rng.randrange(1, 24))
        if len(self.all) >= self._most:
            self.all[self._rng.randrange(len(self.all))] = new
        else:
            self.all.append(new)
        return new

    def hashes(self):
        return {name for prompt in self.all for name in prompt.hashes}


@dataclass
class Tally:
    """What happened; `errors` must stay empty."""

    counts: Counter = field(default_factory=Counter)
    errors: list = field(default_factory=list)

    def error(self, text):
        self.counts["errors"] += 1
        if len(self.errors) < 20:
            self.errors.append(text)


class Listener(logging.Handler):
    """Notes what SGLang and kvconnect log: an error there is an error here."""

    def __init__(self, tally):
        super().__init__(logging.WARNING)
        self._tally = tally

    def emit(self, record):
        text = record.getMessage()
        if record.levelno >= logging.ERROR or text.startswith("Write page to storage"):
            self._tally.error(f"{record.name}: {text}")
        elif "failed to retrieve page" not in text:  # counted where the pages are
            self._tally.counts[f"warning: {text[:120]}"] += 1


class Engine:
    """One scheduler with its pool and controller."""

    def __init__(self, sg, url, pages, prompts, stored, tally, rng):
        self.pool = sglang_pools.mha(sg, "page_first", pages=pages, **SHAPE)
        self.rank = Rank(self.pool, url, threads=True, weights="soak", kv_heads=SHAPE["heads"])
        self.control = self.rank._controller
        (view,) = buffers(self.pool)
        self.pages, self.nbytes = view.numpy(), view[0].numel()
        self.prompts, self.stored, self.tally, self.rng = prompts, stored, tally, rng
        self.backups, self.prefetches = {}, {}

    # -- starting ----------------------------------------------------------------------------

    def start(self):
        """Begin a backup or a prefetch; at most eight of each are under way."""
        if self.rng.random() < 0.4:
            if len(self.backups) < 8:
                self._back_up()
        elif len(self.prefetches) < 8:
            self._ask()

    def _back_up(self):
        prompt = self.prompts.more()
        first = self.rng.randrange(len(prompt.hashes))
        hashes = prompt.hashes[first:]
        slots = self.pool.alloc(len(hashes) * PAGE_SLOTS)
        if slots is None:
            self.tally.counts["pool full"] += 1
            return
        for page, name in zip(self._ids(slots), hashes, strict=True):
            self.pages[page] = page_bytes(name, self.nbytes).reshape(self.pages.shape[1:])
        tokens = prompt.tokens[first * PAGE_SLOTS :]
        number = self.control.write_storage(slots, tokens, hashes, prompt.hashes[:first])
        self.backups[number] = hashes

    def _ask(self):
        prompt = self.prompts.some() if self.rng.random() < 0.9 else self.prompts.more()
        first = self.rng.randrange(len(prompt.hashes)) if self.rng.random() < 0.5 else 0
        last = prompt.hashes[first - 1] if first else None
        tokens = prompt.tokens[first * PAGE_SLOTS :]
        known = 0
        while first + known < len(prompt.hashes) and prompt.hashes[first + known] in self.stored:
            known += 1
        prefix = prompt.hashes[:first]
        operation = self.control.prefetch(f"r{self.rng.random()}", tokens, last, prefix)
        self.prefetches[operation.id] = {"known": known, "done": 0}
        self.tally.counts["prefetches"] += 1

    # -- what the threads answer -------------------------------------------------------------

    def drain(self, patience=0.0):
        """Take every answer there is, waiting up to `patience` seconds for the first."""
        for operation in _take(self.control.prefetch_hit_queue):
            self._allocate(operation)
        for ack in _take(self.control.ack_prefetch_queue):
            if ack.completed_tokens is not None:
                self.prefetches[ack.operation.id]["done"] = ack.completed_tokens // PAGE_SLOTS
            if ack.completed_req:
                self._loaded(ack.operation)
        for operation in _take(self.control.ack_backup_queue, patience):
            self._backed_up(operation)

    def _allocate(self, operation):
        found, hits = self.prefetches[operation.id], len(operation.hash_value)
        self.tally.counts["pages hit"] += hits
        if hits < found["known"] and not operation.is_terminated():
            self.tally.counts["pages stored but not found"] += found["known"] - hits
        slots = self.pool.alloc(hits * PAGE_SLOTS) if hits else None
        if slots is None:
            del self.prefetches[operation.id]
            return
        self.pages[self._ids(slots)] = POISON
        operation.host_indices = slots
        self.control.prefetch_buffer.put(operation)
        if self.rng.random() < 0.1:
            self.control.terminate_prefetch(operation)
            self.tally.counts["terminated"] += 1

    def _loaded(self, operation):
        done = self.prefetches.pop(operation.id)["done"]
        if done < len(operation.hash_value) and not operation.is_terminated():
            self.tally.counts["pages gone before they were loaded"] += (
                len(operation.hash_value) - done
            )
        ids = self._ids(operation.host_indices)
        for page, name in zip(ids[:done], operation.hash_value[:done], strict=True):
            if not self._is(page, name):
                self.tally.error(f"page {name} was loaded with wrong bytes into pool page {page}")
        self.tally.counts["pages loaded"] += done
        self.tally.counts["bytes loaded"] += done * self.nbytes
        self.pool.free(operation.host_indices)

    def _backed_up(self, operation):
        hashes = self.backups.pop(operation.id)
        done = operation.completed_tokens // PAGE_SLOTS
        if done != len(hashes):
            self.tally.error(f"backup stored {done} of {len(hashes)} pages")
        for page, name in zip(self._ids(operation.host_indices), hashes, strict=True):
            if not self._is(page, name):
                self.tally.error(f"storing page {name} changed pool page {page}")
        self.stored.update(hashes[:done])
        self.tally.counts["pages stored"] += done
        self.tally.counts["bytes stored"] += done * self.nbytes
        self.pool.free(operation.host_indices)

    def _is(self, page, name):
        return np.array_equal(self.pages[page].reshape(-1), page_bytes(name, self.nbytes))

    @staticmethod
    def _ids(slots):
        return (slots[::PAGE_SLOTS] // PAGE_SLOTS).numpy()

    @property
    def busy(self):
        return bool(self.backups or self.prefetches)

    def close(self):
        if self.pool.available_size() != self.pool.size and not self.busy:
            self.tally.error(f"{self.pool.size - self.pool.available_size()} slots were not freed")
        self.rank.close()


def _take(source, patience=0.0):
    with contextlib.suppress(queue.Empty):
        yield source.get(timeout=patience) if patience else source.get_nowait()
        while True:
            yield source.get_nowait()


def sample():
    """Return what must not grow: open files, threads, anonymous memory in bytes."""
    process = Path("/proc/self")
    lines = (process / "status").read_text(encoding="ascii").splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return {
        "fds": len(list((process / "fd").iterdir())),
        "threads": int(status["Threads"]),
        "rss": int(status["RssAnon"].split()[0]) << 10,
    }


SLACK = {"fds": (1.0, 2), "threads": (1.0, 2), "rss": (1.05, 8 << 20)}
"""How much more the last third of a run may use than the second: factor, and amount."""


def growth(samples):
    """Say what grew between the second and the last third of the samples."""
    third = len(samples) // 3
    if third < 2:
        return []
    out = []
    for name, (factor, more) in SLACK.items():
        middle = max(s[name] for s in samples[third : 2 * third])
        last = max(s[name] for s in samples[2 * third :])
        if last > middle * factor + more:
            out.append(f"{name} grew from {middle} to {last}")
    return out


def soak(sg, url, *, seconds, seed=0, engines=2, pages=256):
    """Run the load for `seconds`; return the report, whose ``errors`` are empty if all is well."""
    engine()
    rng, tally, stored = random.Random(seed), Tally(), set()
    prompts, listener = Prompts(rng), Listener(tally)
    loggers = [logging.getLogger(name) for name in ("sglang", "kvconnect")]
    levels = [(one, one.propagate) for one in loggers]
    for one in loggers:
        one.addHandler(listener)
        one.propagate = False
    try:
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(kvconnect.open(url))
            running = []
            for _ in range(engines):
                running.append(Engine(sg, url, pages, prompts, stored, tally, rng))
                stack.callback(running[-1].close)
            samples = _run(running, prompts, stored, tally, seconds)
            stats = store.stats()
    finally:
        for one, propagate in levels:
            one.removeHandler(listener)
            one.propagate = propagate
    _judge(tally, samples, stats)
    return {
        "seed": seed, "seconds": seconds, "engines": engines, "pool_pages": pages, "url": url,
        "counts": dict(sorted(tally.counts.items())), "errors": tally.errors,
        "first": samples[0], "last": samples[-1], "store": stats,
        "rss_mib": [one["rss"] >> 20 for one in samples[:: max(len(samples) // 24, 1)]],
    }  # fmt: skip


def _run(running, prompts, stored, tally, seconds):
    started = time.monotonic()
    samples, due = [], started
    while (now := time.monotonic()) < started + seconds:
        if now >= due:
            samples.append(sample())
            due = now + min(1.0, seconds / 12)
            stored &= prompts.hashes()  # what is asked for no more need not be known
            for one in running:
                one.rank.backend.get_stats()
        for one in running:
            one.start()
            one.drain()
        if all(len(one.backups) == 8 == len(one.prefetches) for one in running):
            running[0].drain(PATIENCE)
    samples.append(sample())
    deadline = time.monotonic() + DRAIN_SECONDS
    while any(one.busy for one in running) and time.monotonic() < deadline:
        for one in running:
            one.drain(PATIENCE)
    for one in running:
        if one.busy:
            tally.error(f"{one.backups.keys()} {one.prefetches.keys()} did not end in time")
    return samples


def _judge(tally, samples, stats):
    for text in growth(samples):
        tally.error(text)
    for name in ("pages loaded", "pages stored", "pages hit"):
        if not tally.counts[name]:
            tally.error(f"no {name}: the load did not reach the store")
    if stats.get("healed"):
        tally.error(f"{stats['healed']} objects were found damaged")
    if not stats.get("evicted"):
        for name in ("pages stored but not found", "pages gone before they were loaded"):
            if tally.counts[name]:
                tally.error(f"{tally.counts[name]} {name}, and nothing was evicted")
