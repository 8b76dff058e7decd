"""`kvconnect pd-demo`: prefill ranks and decode ranks of another shape, as processes."""

from __future__ import annotations

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


def pd_demo(
    text: Text = None,
    prefill_tp: Annotated[int, typer.Option(min=1, help="TP size of the prefill side.")] = 2,
    decode_tp: Annotated[int, typer.Option(min=1, help="TP size of the decode side.")] = 4,
    pp_prefill: Annotated[int, typer.Option(min=1, help="PP size of the prefill side.")] = 1,
    layout_prefill: Annotated[str, typer.Option(help="Pool layout there.")] = "page_first",
    layout_decode: Annotated[str, typer.Option(help="Pool layout there.")] = "page_head",
    page_size_prefill: Annotated[int, typer.Option(min=1, help="Tokens in a page.")] = 16,
    page_size_decode: Annotated[int, typer.Option(min=1, help="Tokens in a page.")] = 16,
    head_dim: HeadDim = 32,
    v_head_dim: VHeadDim = None,
    layers: Layers = 4,
    dtype: Dtype = "bfloat16",
    transport: Annotated[str, typer.Option(help="shm, mooncake or nixl.")] = "shm",
    stage: Annotated[
        str, typer.Option(help="Send packed: auto (what is computed to be faster), always, never.")
    ] = "auto",
    tokens: Tokens = 48,
    limit: Annotated[int, typer.Option(min=1, help="Most bytes of the text to use.")] = 4096,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for the whole run.")] = 60,
    bootstrap: Annotated[
        bool, typer.Option("--bootstrap", help="Find ranks by a directory, not by addresses.")
    ] = False,
    tamper: Annotated[
        bool, typer.Option("--tamper", help="Change one received value, to see it noticed.")
    ] = False,
) -> None:
    """Prefill text on one side, move its KV layer by layer, and decode on the other side.

    Every rank is a process. Exit code 1 if the tokens, or any byte of K and V, differ from
    those of one process doing both.
    """
    from kvconnect.cli.pd_demo_job import job_of  # noqa: PLC0415 - only when the command runs
    from kvconnect.cli.pd_demo_run import run  # noqa: PLC0415

    with scratch_of(text) as (scratch, text_file):
        job = job_of(
            scratch=str(scratch),
            text_file=str(text_file),
            limit=limit,
            layout_prefill=layout_prefill,
            layout_decode=layout_decode,
            page_size_prefill=page_size_prefill,
            page_size_decode=page_size_decode,
            prefill_tp=prefill_tp,
            decode_tp=decode_tp,
            pp_prefill=pp_prefill,
            layers=layers,
            head_dim=head_dim,
            v_head_dim=head_dim if v_head_dim is None else v_head_dim,
            dtype=dtype,
            transport=transport,
            stage=stage,
            new_tokens=tokens,
            timeout=timeout,
            tamper=tamper,
        )
        code = run(job, bootstrap=bootstrap)
    raise typer.Exit(code)
