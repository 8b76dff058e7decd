#!/usr/bin/env python3
"""Hit rates of eviction policies on a synthetic chat trace, with and without scans.

scripts/replay_eviction.py [ACCESSES]
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

from kvconnect_nvme.eviction import POLICIES, chat_trace, hit_rate  # noqa: E402


def main() -> int:
    accesses = int(sys.argv[1]) if len(sys.argv) > 1 else 300_000
    print(f"{'trace':12}{'cache':>8}" + "".join(f"{name:>9}" for name in POLICIES))
    for scans in (False, True):
        trace = list(chat_trace(accesses, scans=scans))
        distinct = len(set(trace))
        for part in (0.01, 0.05, 0.2):
            size = int(distinct * part)
            rates = [hit_rate(make(size), trace) for make in POLICIES.values()]
            label = "chat + scans" if scans else "chat"
            print(f"{label:12}{part:>8.0%}" + "".join(f"{rate:>9.3f}" for rate in rates))
    return 0


if __name__ == "__main__":
    sys.exit(main())
