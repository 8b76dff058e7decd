"""What both demos let a user choose about the model and its prompt."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

Text = Annotated[Path | None, typer.Option(help="Text to prefill; the README by default.")]
HeadDim = Annotated[int, typer.Option(min=2, help="Width of a K head; even.")]
VHeadDim = Annotated[int | None, typer.Option(min=1, help="Width of a V head; as K by default.")]
Layers = Annotated[int, typer.Option(min=1, help="Layers of the model.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32 KV.")]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens to decode.")]


@contextmanager
def scratch_of(text: Path | None) -> Iterator[tuple[Path, Path]]:
    """Yield a directory for one run, and the text: what was given, or the README put there."""
    from kvconnect.cli.demo_run import default_text  # noqa: PLC0415 - only when a demo runs

    with tempfile.TemporaryDirectory(prefix="kvconnect-demo-") as name:
        scratch = Path(name)
        if text is None:
            text = scratch / "README.md"
            text.write_text(default_text(), encoding="utf-8")
        yield scratch, text
