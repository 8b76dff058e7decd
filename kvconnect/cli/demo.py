"""`kvconnect demo`: store with one TP size, load in a new process with another, compare."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer


def demo(
    text: Annotated[
        Path | None, typer.Option(help="Text to prefill; the README by default.")
    ] = None,
    layout: Annotated[str, typer.Option(help="Host pool layout of both sides.")] = "page_head",
    tp_write: Annotated[int, typer.Option(min=1, help="Ranks of the writing process.")] = 4,
    tp_read: Annotated[int, typer.Option(min=1, help="Ranks of the reading process.")] = 2,
    head_dim: Annotated[int, typer.Option(min=2, help="Width of a K head; even.")] = 32,
    v_head_dim: Annotated[
        int | None, typer.Option(min=1, help="Width of a V head; as K by default.")
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 4,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32 KV.")] = "bfloat16",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode.")] = 48,
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
    from kvconnect.cli.demo_run import default_text, run  # noqa: PLC0415

    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvconnect-demo-")))
        if text is None:
            text = scratch / "README.md"
            text.write_text(default_text(), encoding="utf-8")
        job = Job(
            text_file=str(text),
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
