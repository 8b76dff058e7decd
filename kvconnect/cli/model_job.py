"""The part of a demo's job that says what is computed: plain values, sent as JSON."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvconnect.cli.model_config import Config


class ModelJob(msgspec.Struct, frozen=True, kw_only=True):
    """Model and prompt of one run."""

    text_file: str
    limit: int
    """Most prompt tokens taken from the text."""
    layers: int
    head_dim: int
    v_head_dim: int
    dtype: str
    new_tokens: int
    seed: int = 0
    threads: int = 1
    """The same in all processes: how a sum is cut among threads may change its last bit. One,
    because torch's threads wait for each other by spinning, which a busy machine makes slow."""

    def config(self) -> Config:
        """Return the model's sizes."""
        return Config(
            layers=self.layers,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            dtype=self.dtype,
        )

    def prompt(self) -> list[int]:
        """Read the prompt: the first `limit` bytes of the text."""
        with Path(self.text_file).open("rb") as file:
            return list(file.read(self.limit))
