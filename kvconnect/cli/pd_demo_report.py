"""What the P/D demo prints: a live table of transfers, then numbers, tokens and the verdict."""

from __future__ import annotations

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvconnect.cli.model import decode
from kvconnect.cli.pd_demo_state import Lane, State


def transfers(state: State) -> Table:
    """Return the table of transfers as it is now."""
    job = state.job
    found = f"\nranks found by {job.directory}" if job.directory else ""
    table = Table(
        title=(
            f"{job.layout_prefill}, TP {job.prefill_tp}"
            f"{f' x PP {job.pp_prefill}' if job.pp_prefill > 1 else ''}, pages of "
            f"{job.page_size_prefill} to {job.layout_decode}, TP {job.decode_tp}, pages of "
            f"{job.page_size_decode}\nby {job.transport}; {len(state.computed)} of {job.layers} "
            f"layers computed"
            f"{found}"
        )
    )
    table.add_column("from")
    table.add_column("to")
    for name in ("layers", "bytes", "rate"):
        table.add_column(name, justify="right")
    table.add_column("sent")
    for lane in state.lanes.values():
        done = lane.layers == lane.expected
        table.add_row(
            lane.source,
            lane.target,
            Text(f"{lane.layers}/{lane.expected}", style="green" if done else ""),
            f"{lane.nbytes / 2**20:.2f} MiB",
            _rate(lane.nbytes, lane.seconds),
            Text(lane.failure, style="bold red") if lane.failure else _how(lane),
        )
    return table


def _how(lane: Lane) -> str:
    if not lane.packed:
        return ""
    return " and ".join("packed" if packed else "direct" for packed in sorted(lane.packed))


def show(console: Console, state: State, problems: list[str]) -> None:
    """Print descriptors, numbers, tokens and verdict."""
    console.print(_descriptors(state))
    console.print(_numbers(state))
    console.print(_tokens(state))
    for problem in problems:
        console.print(Text(f"✗ {problem}", style="bold red"))
    if not problems:
        words = "✓ the decode side went on with the same tokens as one process doing both"
        console.print(Text(words, style="bold green"))


def _descriptors(state: State) -> Panel:
    body = Table.grid(padding=(0, 2))
    chosen = {(lane.source.split()[0], _how(lane), lane.why): lane for lane in state.lanes.values()}
    for lane in chosen.values():
        pair = f"{lane.source} to {lane.target}"
        body.add_row(pair, _how(lane), Text(f"a layer is {lane.why}" if lane.why else ""))
    return Panel(body, title="descriptors: direct (run by run) or packed, and why")


def _numbers(state: State) -> Table:
    table = Table(title=f"{len(state.job.prompt())} prompt tokens, {state.job.dtype}")
    table.add_column()
    table.add_column("", justify="right")
    nbytes = sum(lane.nbytes for lane in state.lanes.values())
    seconds = sum(lane.seconds for lane in state.lanes.values())
    table.add_row("moved", f"{nbytes / 2**20:.2f} MiB")
    table.add_row("rate, a transfer at a time", _rate(nbytes, seconds))
    if state.computed:
        table.add_row("prefill computed", _ms(max(state.computed.values())))
    if state.held:
        table.add_row(
            "decode side holds everything", _ms(max(h.seconds for h in state.held.values()))
        )
    table.add_section()
    if state.first is not None:
        table.add_row("time to first token (prefill side)", _ms(state.first.seconds))
    if state.tokens:
        table.add_row("time to second token (decode side)", _ms(state.tokens[0].seconds))
    if state.single is not None:
        table.add_row("time to first token, one process", _ms(state.single.first_token))
    return table


def _tokens(state: State) -> Panel:
    truth = state.single.tokens if state.single is not None else []
    equal = state.decoded == truth
    body = Table.grid(padding=(0, 2))
    body.add_row("prefill, then decode", Text(decode(state.decoded)))
    body.add_row("one process", Text(decode(truth)))
    body.add_row(
        "equal", Text("yes" if equal else "NO", style="bold green" if equal else "bold red")
    )
    return Panel(body, title=f"{len(truth)} tokens (random weights: the words mean nothing)")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f} GB/s" if nbytes and seconds else "-"
