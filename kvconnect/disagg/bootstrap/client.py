"""The ranks' side of the directory: register and stay registered, find a fleet."""

from __future__ import annotations

import http.client
import logging
import threading
import time
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvconnect.backend import Closing
from kvconnect.disagg.bootstrap.table import Answer, Entry, Question, Registered
from kvconnect.disagg.keys import Keys, check_private
from kvconnect.errors import ConfigError, UnavailableError

log = logging.getLogger("kvconnect.disagg")

_AGAIN_SECONDS = 0.2
_ATTEMPT_SECONDS = 5.0
_MAX_ANSWER = 64 << 20
MIN_TOKEN = 16

T = TypeVar("T")


def load_token(path: Path) -> str:
    """Read a token file; `ConfigError` if others can read it, or if it is too short to be one."""
    token = check_private(path, "token file", "write 16 or more random characters to it").strip()
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable():
        raise ConfigError(f"token file {path}: {MIN_TOKEN} or more characters of ASCII are needed")
    return token


class Directory:
    """A directory service at a URL ``http://HOST:PORT``. Safe to use from many threads."""

    def __init__(self, url: str, *, token: str | None = None) -> None:
        """Check the URL; nothing is reached yet."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme not in {"http", "https"} or not parts.hostname or port is None:
            raise ConfigError(f"directory {url!r}: write http://HOST:PORT")
        self.url = url
        self._host, self._port, self._secure = parts.hostname, port, parts.scheme == "https"
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def register(self, entry: Entry, timeout: float = 30.0) -> float:
        """Register a rank; returns for how many seconds, unless it is refreshed.

        Tries again until `timeout`. Raises `ConfigError` where the directory refuses, and
        `UnavailableError` where it cannot be reached.
        """
        until = time.monotonic() + timeout
        return self._ask("/register", entry, Registered, until).ttl

    def announce(self, entry: Entry, timeout: float = 30.0) -> Announcement:
        """Register a rank and keep it registered until the `Announcement` is closed."""
        return Announcement(self, entry, self.register(entry, timeout))

    def find(self, fleet: str, *, keys: Keys | None = None, timeout: float = 30.0) -> list[Entry]:
        """Wait until every rank of a fleet is there; returns them sorted by name.

        Raises `UnavailableError` saying how many of them were there at `timeout`, and
        `ConfigError` where one has other keys than `keys`: it would never answer.
        """
        until = time.monotonic() + timeout
        while True:
            answer = self._ask("/find", Question(fleet), Answer, until)
            if answer.complete:
                break
            if time.monotonic() + _AGAIN_SECONDS > until:
                of = f"{answer.have} of {answer.ranks}" if answer.ranks else "none of the"
                raise UnavailableError(
                    f"{of} ranks of fleet {fleet!r} are registered at {self.url}; are all of them "
                    f"running?"
                )
            time.sleep(_AGAIN_SECONDS)
        ours = keys.public if keys is not None else None
        for entry in answer.entries:
            if entry.public_key != ours:
                raise ConfigError(
                    f"rank {entry.name!r} of fleet {fleet!r} has key {entry.public_key}, this "
                    f"side {ours}; give the same keys file to both sides"
                )
        return answer.entries

    def _ask(self, path: str, said: Any, kind: type[T], until: float) -> T:
        body = msgspec.json.encode(said)
        while True:
            try:
                status, data = self._post(path, body, until)
            except (OSError, http.client.HTTPException) as error:
                problem = str(error) or type(error).__name__
            else:
                if status == http.client.OK:
                    return self._decode(data, kind)
                problem = _words(status, data)
                if status < http.client.INTERNAL_SERVER_ERROR:
                    raise ConfigError(f"the directory at {self.url} refuses: {problem}")
            if time.monotonic() + _AGAIN_SECONDS > until:
                raise UnavailableError(f"no directory answers at {self.url}: {problem}")
            time.sleep(_AGAIN_SECONDS)

    def _post(self, path: str, body: bytes, until: float) -> tuple[int, bytes]:
        wait = min(max(until - time.monotonic(), 0.05), _ATTEMPT_SECONDS)
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=wait)
        try:
            connection.request("POST", path, body, self._headers)
            response = connection.getresponse()
            return response.status, response.read(_MAX_ANSWER)
        finally:
            connection.close()

    def _decode(self, data: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.url} is no directory of ranks: {error}") from None


def _words(status: int, data: bytes) -> str:
    try:
        return f"{msgspec.json.decode(data, type=dict[str, str])['error']} ({status})"
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError):
        return f"status {status}"


class Announcement(Closing):
    """A registration that is refreshed three times in its time to live.

    `failure` says why it is refused by now, where it is: another rank has taken the name.
    """

    def __init__(self, directory: Directory, entry: Entry, ttl: float) -> None:
        """Begin to refresh what has just been registered."""
        self._directory, self._entry, self._ttl = directory, entry, ttl
        self.failure = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvconnect-announce", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._ttl / 3):
            try:
                self._ttl = self._directory.register(self._entry, self._ttl / 3)
            except UnavailableError as error:
                log.warning("kvconnect: %s is not refreshed: %s", self._entry.name, error)
            except ConfigError as error:
                self.failure = str(error)
                log.error("kvconnect: %s is not registered any more: %s", self._entry.name, error)  # noqa: TRY400
                return

    def close(self) -> None:
        """Refresh no more; the entry goes by itself. The second call does nothing."""
        self._stop.set()
        self._thread.join(_ATTEMPT_SECONDS + 1)
