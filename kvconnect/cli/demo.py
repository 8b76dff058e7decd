"""`kvconnect demo`: store with one TP size, load in a new process with another, compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvconnect.cli.model_options import (
    Dtype,
    HeadDim,
    Layers,
    Text,
    Tokens,
    VHeadDim,
    scratch_of,
)


def demo(
    text: Text = None,
    layout: Annotated[str, typer.Option(help="Host pool layout of both sides.")] = "page_head",
    tp_write: Annotated[int, typer.Option(min=1, help="Ranks of the writing process.")] = 4,
    tp_read: Annotated[int, typer.Option(min=1, help="Ranks of the reading process.")] = 2,
    head_dim: HeadDim = 32,
    v_head_dim: VHeadDim = None,
    layers: Layers = 4,
    dtype: Dtype = "bfloat16",
    tokens: Tokens = 48,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens in a page.")] = 16,
    limit: Annotated[int, typer.Option(min=2, help="Most bytes of the text to use.")] = 8192,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where the store lies; temporary by default.")
    ] = None,
    tamper: Annotated[
        str,
        typer.Option(
            help="Flip one stored byte between the processes ('store') or change one loaded "
            "value ('memory'), to see it noticed."
        ),
    ] = "",
) -> None:
    """Prefill text with one TP size, store its KV pages, and decode from them in a new process.

    Exit code 1 if the tokens, or any byte, differ from a run without the store.
    """
    from kvconnect.cli.demo_job import Job  # noqa: PLC0415 - only when the command runs
    from kvconnect.cli.demo_run import run  # noqa: PLC0415

    with scratch_of(text) as (scratch, text_file):
        job = Job(
            text_file=str(text_file),
            limit=limit,
            layout=layout,
            page_size=page_size,
            layers=layers,
            head_dim=head_dim,
            v_head_dim=head_dim if v_head_dim is None else v_head_dim,
            dtype=dtype,
            tp_write=tp_write,
            tp_read=tp_read,
            new_tokens=tokens,
            tamper=tamper,
        )
        code = run(job, scratch, directory)
    raise typer.Exit(code)
