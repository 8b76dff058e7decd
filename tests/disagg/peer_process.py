"""A rank in a process of its own: one shared pool on the shm transport, driven by lines."""

import sys

import numpy as np

from kvconnect.disagg.shm import ShmTransport
from kvconnect.hostpool import HostPool


def main() -> None:
    geometry = {"layout": "page_first", "page_size": 4, "layers": 2, "heads": 2, "head_dim": 64}
    pages = int(sys.argv[1])
    with HostPool.allocate(pages=pages, dtype="int16", shared=True, **geometry) as pool:
        bytes_of = np.ndarray(
            [pool.regions[0].nbytes], dtype=np.uint8, buffer=pool.memory.keep_alive()
        )
        bytes_of[:] = np.arange(len(bytes_of), dtype=np.uint64) % 251
        with ShmTransport([pool]) as transport, transport.register(pool.regions):
            print(transport.describe().hex(), pool.regions[0].address, len(bytes_of), flush=True)
            for line in sys.stdin:
                word, *numbers = line.split()
                if word == "sum":
                    print(int(bytes_of.astype(np.uint64).sum()), flush=True)
                elif word == "byte":
                    print(int(bytes_of[int(numbers[0])]), flush=True)
                elif word == "attached":
                    print(transport._listener.attached(), flush=True)


if __name__ == "__main__":
    main()
