"""Where the model lies that is being served, and what it says about itself.

The options come first; what they leave open is asked of the running engine, which may not be
there (tests, tools): then it stays open.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvconnect.engines.sglang.model_facts import ModelFacts, fingerprint, read_model
from kvconnect.engines.sglang.options import Options
from kvconnect.engines.sglang.settings import read_settings
from kvconnect.errors import ConfigError

log = logging.getLogger("kvconnect.sglang")


def find_facts(options: Options) -> ModelFacts:
    """Return the facts of the model in `options`, else of the one the engine serves.

    Raises `ConfigError` if ``model_path`` was given and cannot be read. A served model that
    cannot be read is no error: its facts stay unknown, and that is logged.
    """
    arguments = _server_arguments()
    settings = read_settings(arguments)
    return replace(_target(options, arguments), draft=_draft(arguments), settings=settings)


def _target(options: Options, arguments: Any) -> ModelFacts:
    sampled = options.weights is None
    if options.model_path is not None:
        return read_model(options.model_path, weights=sampled)
    path = _local(arguments, "model_path", "revision")
    if path is None:
        return ModelFacts()
    try:
        return read_model(path, weights=sampled)
    except ConfigError as error:
        log.warning("kvconnect: the served model says nothing about itself: %s", error)
        return ModelFacts()


def _draft(arguments: Any) -> str | None:
    """Return the fingerprint of the draft model, its name where it cannot be read."""
    name = getattr(arguments, "speculative_draft_model_path", None)
    path = _local(arguments, "speculative_draft_model_path", "speculative_draft_model_revision")
    if path is None:
        return name
    try:
        return fingerprint(Path(path))
    except ConfigError:
        return name


def _local(arguments: Any, field: str, revision: str) -> str | None:
    """Return the local directory of a model that the engine names, None if not known."""
    named = getattr(arguments, field, None)
    if not isinstance(named, str) or not named:
        return None
    if Path(named).is_dir():
        return named
    return _downloaded(named, getattr(arguments, revision, None), arguments)


def _server_arguments() -> Any:
    try:
        from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415 - optional

        return get_server_args()
    except Exception:  # noqa: BLE001 - no engine, or not started: nothing to learn from it
        return None


def _downloaded(name: str, revision: str | None, arguments: Any) -> str | None:
    """Return where the hub's cache keeps a model that the engine has already loaded."""
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - optional

        folder = getattr(arguments, "download_dir", None)
        return str(
            snapshot_download(name, revision=revision, cache_dir=folder, local_files_only=True)
        )
    except Exception:  # noqa: BLE001 - not in the cache: the name is all there is
        return None
