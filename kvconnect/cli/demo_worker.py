"""One side of the demo, as a process of its own.

``python -m kvconnect.cli.demo_worker write|read JOB.json REPORT.json`` reads a `Job`, prints
its progress as JSON lines and leaves its report in a file.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

import kvconnect
from kvconnect.backend import Outcome
from kvconnect.cli.demo_job import Job, Read, Written
from kvconnect.cli.demo_ranks import Ranks, wrong_values
from kvconnect.cli.model import Decoder, KVCache, greedy, prefill
from kvconnect.cli.model_config import chunk_bounds, usable_prefix
from kvconnect.cli.picture import strips
from kvconnect.errors import KVConnectError
from kvconnect.identity import page_hashes
from kvconnect.registry import open_url

Progress = Callable[[str, int, int], None]


def write(job: Job, progress: Progress) -> Written:
    """Prefill the prompt, and store its whole pages from every rank of the writing side."""
    decoder, prompt = Decoder(job.config(), job.seed), job.prompt()
    cache = KVCache(decoder.config, len(prompt))
    started = time.perf_counter()
    _prefill(job, decoder, cache, prompt, progress, "writer computes the prompt")
    prefill_seconds = time.perf_counter() - started
    hashes = page_hashes(prompt, job.page_size)[: job.pages(len(prompt))]
    with (
        open_url(job.url) as backend,
        Ranks(job, decoder, job.tp_write, len(hashes), backend) as ranks,
    ):
        ranks.connectors[0].clear()  # a run before this one, so that bytes are really written
        ranks.backup(cache)
        started = time.perf_counter()
        outcomes = ranks.put(hashes)
        seconds = time.perf_counter() - started
        plan = ranks.connectors[0].plan
        return Written(
            tokens=len(prompt),
            pages=len(hashes),
            objects=sum(c.plan.objects for c in ranks.connectors) * len(hashes),
            statuses=dict(sum((Counter(o.counts()) for o in outcomes), Counter())),
            causes=_causes(outcomes),
            nbytes=sum(o.nbytes for o in outcomes),
            seconds=seconds,
            prefill_seconds=prefill_seconds,
            attach_seconds=ranks.seconds,
            explain=plan.explain(),
            sample=_row(cache.k[-1, (len(hashes) - 1) * job.page_size, 0]),
        )


def read(job: Job, progress: Progress) -> Read:
    """Look the prompt up, load, decode; then do the same without the store and compare."""
    decoder, prompt = Decoder(job.config(), job.seed), job.prompt()
    decoder.forward(prompt[:2], KVCache(decoder.config, 2))  # first-call costs of torch
    hashes = page_hashes(prompt, job.page_size)[: job.pages(len(prompt))]
    with (
        open_url(job.url) as backend,
        Ranks(job, decoder, job.tp_read, len(hashes), backend) as ranks,
    ):
        started = time.perf_counter()
        hits = ranks.hits(hashes)
        asked = time.perf_counter()
        outcomes = ranks.get(hashes[:hits])
        seconds = time.perf_counter() - asked
        loaded = min((o.prefix for o in outcomes), default=0)
        if job.tamper == "memory":
            value = ranks.members[0].pool.component("k")
            value[(0,) * value.dim()] += 1
        warm = KVCache(decoder.config, len(prompt) + job.new_tokens)
        ranks.restore(warm, loaded)
        warm.length = usable_prefix(loaded, len(prompt), job.page_size, job.chunk_pages)
        logits = _prefill(job, decoder, warm, prompt, progress, "reader computes the rest")
        first_with, tokens_with = _decode(job, decoder, warm, logits, started)
        misses = _misses(ranks, hashes, hits, outcomes)
        first = ranks.connectors[0]
        head_group = first.plan.head_group or first.pool.heads
        pictures = strips(first.pool, head_group)
        explain = first.explain()

    cold = KVCache(decoder.config, len(prompt) + job.new_tokens)
    started = time.perf_counter()
    logits = _prefill(job, decoder, cold, prompt, progress, "reader again, without the store")
    first_without, tokens_without = _decode(job, decoder, cold, logits, started)
    return Read(
        pages=len(hashes),
        hits=hits,
        loaded=loaded,
        misses=misses,
        nbytes=sum(o.nbytes for o in outcomes),
        seconds=seconds,
        attach_seconds=ranks.seconds,
        first_token_with=first_with,
        first_token_without=first_without,
        tokens_with=tokens_with,
        tokens_without=tokens_without,
        wrong_values=wrong_values(warm, cold, loaded * job.page_size),
        explain=explain,
        head_group=head_group,
        strips=pictures,
    )


def _prefill(
    job: Job,
    decoder: Decoder,
    cache: KVCache,
    prompt: Sequence[int],
    progress: Progress,
    words: str,
) -> Tensor:
    logits, bounds = None, chunk_bounds(len(prompt), job.page_size, job.chunk_pages)
    for done, logits in prefill(decoder, cache, prompt, bounds):  # noqa: B007
        progress(words, done, len(prompt))
    assert logits is not None
    return logits


def _decode(
    job: Job, decoder: Decoder, cache: KVCache, logits: Tensor, started: float
) -> tuple[float, list[int]]:
    """Return the seconds from `started` to the first token, and all tokens."""
    steps = greedy(decoder, cache, logits, job.new_tokens)
    first = next(steps)
    return time.perf_counter() - started, [first, *steps]


def _misses(
    ranks: Ranks, hashes: Sequence[bytes], hits: int, outcomes: Sequence[Outcome]
) -> list[str]:
    """Say in words why the first missing page of each rank is missing."""
    out = []
    if hits < len(hashes):
        words = [c.why(hashes[hits]) for c in ranks.connectors]
        out += [f"rank {r}, page {hits}: {w}" for r, w in enumerate(words) if w[:3] != "hit"]
    for rank, outcome in enumerate(outcomes):
        bad = np.flatnonzero(~outcome.ok)
        if len(bad):
            page = int(bad[0])
            status = kvconnect.Status(int(outcome.status[page])).name
            cause = outcome.causes.get(page, "")
            out.append(f"rank {rank}, page {page}: {status} {cause}".rstrip())
    return out


def _causes(outcomes: Sequence[Outcome]) -> list[str]:
    return list(dict.fromkeys(cause for o in outcomes for cause in o.causes.values()))[:5]


def _row(values: Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


def _say(stage: str, done: int, total: int) -> None:
    print(msgspec.json.encode([stage, done, total]).decode(), flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run one side; 2 with one line on stderr if kvconnect refuses."""
    side, job_file, report_file = arguments
    job = msgspec.json.decode(Path(job_file).read_bytes(), type=Job)
    torch.set_num_threads(job.threads)
    try:
        report = {"write": write, "read": read}[side](job, _say)
    except KVConnectError as error:
        print(f"kvconnect: {side}: {error}", file=sys.stderr)
        return 2
    Path(report_file).write_bytes(msgspec.json.encode(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
