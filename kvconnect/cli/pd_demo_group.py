"""How the ranks of one side talk among themselves: gloo, found through a file of the run."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from kvconnect.backend import Closing


class Group(Closing):
    """Ranks of one side: `stages` stages of `tp` ranks, numbered stage by stage."""

    def __init__(self, store: Path, rank: int, tp: int, stages: int, seconds: float) -> None:
        """Meet the others; raises where one does not come within `seconds`."""
        self.rank, self.tp, self.stages = rank, tp, stages
        self.stage = rank // tp
        self._joined = tp * stages > 1
        self._tensor_ranks: Any = None
        if not self._joined:
            return
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are of this host
        wait = timedelta(seconds=seconds)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=tp * stages, timeout=wait
        )
        for stage in range(stages):
            ranks = list(range(stage * tp, (stage + 1) * tp))
            made = dist.new_group(ranks, timeout=wait)
            if stage == self.stage:
                self._tensor_ranks = made

    def gather(self, own: Tensor) -> list[Tensor]:
        """Give one's own tensor, get those of all ranks of the stage in their order."""
        if self.tp == 1:
            return [own]
        parts = [torch.empty_like(own) for _ in range(self.tp)]
        dist.all_gather(parts, own, group=self._tensor_ranks)
        return parts

    def take(
        self, shapes: list[tuple[int, int]], first: Callable[[], list[Tensor]]
    ) -> list[Tensor]:
        """Return the chunks that this stage begins with: `first()`, or those of the one before."""
        if self.stage == 0:
            return first()
        chunks = [torch.empty(shape) for shape in shapes]
        for chunk in chunks:
            dist.recv(chunk, src=self.rank - self.tp)
        return chunks

    def hand_on(self, chunks: list[Tensor]) -> None:
        """Give chunks to the next stage, where there is one."""
        if self.stage + 1 < self.stages:
            for chunk in chunks:
                dist.send(chunk, dst=self.rank + self.tp)

    def close(self) -> None:
        """Leave; the second call does nothing."""
        if self._joined:
            self._joined = False
            dist.destroy_process_group()
