"""What the demo's two processes are told and what they report: plain values, sent as JSON."""

from __future__ import annotations

import msgspec

from kvconnect.cli.model_config import prefix_length
from kvconnect.cli.model_job import ModelJob


class Job(ModelJob, frozen=True, kw_only=True):
    """One demo: model and prompt, the cache's shape, the TP sizes of both sides, and the store."""

    url: str = ""
    layout: str
    page_size: int
    tp_write: int
    tp_read: int
    tamper: str = ""
    chunk_pages: int = 8

    def pages(self, tokens: int) -> int:
        """Return the whole pages of a prompt that a cache can serve."""
        return prefix_length(tokens, self.page_size) // self.page_size


class Strip(msgspec.Struct, frozen=True):
    """The start of one plane of one page in address order, for the picture.

    `cells` are head groups, one per (component, layer, slot, head) row; -1 is a gap: the next
    row lies elsewhere.
    """

    plane: str
    order: str
    cells: list[int]
    left_out: int
    row_nbytes: int


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What the writing process did."""

    tokens: int
    pages: int
    objects: int
    statuses: dict[str, int]
    causes: list[str]
    nbytes: int
    seconds: float
    prefill_seconds: float
    attach_seconds: float
    explain: str
    sample: bytes
    """One row of a stored page, by which `--tamper store` finds the bytes on disk."""


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """What the reading process found, and what the same process computed without the store."""

    pages: int
    hits: int
    loaded: int
    misses: list[str]
    nbytes: int
    seconds: float
    attach_seconds: float
    first_token_with: float
    first_token_without: float
    tokens_with: list[int]
    tokens_without: list[int]
    wrong_values: int
    """Elements of the loaded K and V that differ from the computed ones, bit for bit."""
    explain: str
    head_group: int
    strips: list[Strip]


def problems(job: Job, written: Written, read: Read) -> list[str]:
    """Return what differs from a perfect run, one sentence each."""
    out = []
    allowed = {"OK", "NOT_WRITER"}
    if bad := {name: n for name, n in written.statuses.items() if name not in allowed}:
        out.append(f"not everything was stored: {bad} {'; '.join(written.causes)}".rstrip())
    if read.hits != read.pages:
        out.append(f"{read.hits} of {read.pages} pages were found by the new process")
    if read.loaded != read.hits:
        out.append(f"{read.loaded} of {read.hits} pages found could be loaded")
    out += read.misses
    if read.wrong_values:
        out.append(f"{read.wrong_values} loaded values differ from the computed ones")
    if read.tokens_with != read.tokens_without:
        out.append("the tokens differ from a run without the store")
    if len(read.tokens_with) != job.new_tokens:
        out.append(f"{len(read.tokens_with)} of {job.new_tokens} tokens were decoded")
    return out
