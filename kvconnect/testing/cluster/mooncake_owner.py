"""A process that gives memory to a Mooncake Store until it is told to end.

python -m kvconnect.testing.cluster.mooncake_owner URL, where the URL says `segment=`. It says
"up" once its memory is part of the store, and ends by SIGTERM or with its stdin.
"""

from __future__ import annotations

import signal
import sys
import time

from kvconnect.errors import BackendError
from kvconnect.registry import open_url
from kvconnect.testing.cluster.voice import own_stdout

_AGAIN_SECONDS = 0.5


def main(url: str) -> None:
    """Open the store, trying until it works, and wait."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    out = own_stdout()
    while True:
        try:
            store = open_url(url)
            break
        except BackendError as error:
            sys.stderr.write(f"{error}\n")
            time.sleep(_AGAIN_SECONDS)
    with store:
        out.write("up\n")
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
