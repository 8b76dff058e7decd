"""What the demo prints."""

from __future__ import annotations

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvconnect.cli.demo_job import Job, Read, Written
from kvconnect.cli.picture import draw, legend


def show(console: Console, job: Job, written: Written, read: Read, problems: list[str]) -> None:
    """Print tokens, numbers, plan, picture and verdict."""
    console.print(_tokens(read))
    console.print(_numbers(job, written, read))
    console.print(Panel(Text(written.explain), title=f"writer, rank 0 of {job.tp_write}"))
    console.print(Panel(Text(read.explain), title=f"reader, rank 0 of {job.tp_read}"))
    console.print(_picture(job, read))
    if problems:
        for problem in problems:
            console.print(Text(f"✗ {problem}", style="bold red"))
    else:
        console.print(
            Text("✓ the new process decoded the same tokens from the store", style="bold green")
        )


def _tokens(read: Read) -> Panel:
    equal = read.tokens_with == read.tokens_without
    body = Table.grid(padding=(0, 2))
    body.add_row("from the store", Text(bytes(read.tokens_with).decode()))
    body.add_row("without it", Text(bytes(read.tokens_without).decode()))
    body.add_row(
        "equal", Text("yes" if equal else "NO", style="bold green" if equal else "bold red")
    )
    title = f"{len(read.tokens_with)} tokens (random weights: the words mean nothing)"
    return Panel(body, title=title)


def _numbers(job: Job, written: Written, read: Read) -> Table:
    table = Table(
        title=(
            f"{written.tokens} prompt tokens, pages of {job.page_size}, {job.dtype}, model on "
            f"{job.threads} CPU thread{'s' if job.threads > 1 else ''}"
        )
    )
    table.add_column()
    table.add_column(f"write, TP {job.tp_write}", justify="right")
    table.add_column(f"read, TP {job.tp_read}, new process", justify="right")
    table.add_row("pages", f"{written.pages} stored", f"{read.loaded} hits of {read.pages}")
    table.add_row("objects", str(written.objects), "")
    table.add_row("bytes", _mib(written.nbytes), _mib(read.nbytes))
    table.add_row("rate", _rate(written.nbytes, written.seconds), _rate(read.nbytes, read.seconds))
    table.add_row("attach, self-test", _ms(written.attach_seconds), _ms(read.attach_seconds))
    table.add_section()
    table.add_row("first token without the store", "", _ms(read.first_token_without))
    table.add_row("first token with the store", "", _ms(read.first_token_with))
    table.add_row("", "", f"{read.first_token_without / read.first_token_with:.1f} times sooner")
    return table


def _picture(job: Job, read: Read) -> Panel:
    heads = job.config().kv_heads
    local = max(heads // job.tp_read, 1)
    parts: list[Text] = [legend(local // read.head_group, read.head_group)]
    for strip in read.strips:
        parts.append(Text(f"{strip.plane}, {strip.order}, {strip.row_nbytes} B a row"))
        parts.append(draw(strip))
    title = f"a page in memory: {job.layout}, reader rank 0, a colour per head group"
    return Panel(Group(*parts), title=title)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f} GB/s" if nbytes and seconds else "-"
