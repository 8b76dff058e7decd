#!/usr/bin/env python3
"""Run an external correctness judge of SGLang storage backends against kvconnect.

    scripts/judge_sglang.py --harness DIR [--url URL] [arguments of the judge]

`DIR/judge.py` is a program that tests one backend and damages files whose name holds a page's
hash. Pages of kvconnect lie in slabs instead, so its ``_damage`` is replaced by one that asks
the store where a page's bytes are. Everything else of the judge runs as it is. Without --url
the store is a temporary folder; a store that is not made of files keeps the judge's own answer
to a missing --dir.
"""

# ruff: noqa: SLF001 - the judge is a program, none of whose names is public

from __future__ import annotations

import argparse
import ast
import importlib.machinery
import importlib.util
import json
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = "kvconnect.engines.sglang:KVConnectStorage"


class Judge(importlib.machinery.SourceFileLoader):
    """Loads the judge without running it: its last statement calls its ``main``."""

    def source_to_code(self, data, path, **options):  # noqa: ARG002
        """Compile all but the call of ``main``."""
        tree = ast.parse(data, filename=str(path))
        last = tree.body[-1]
        if isinstance(last, ast.Expr) and ast.unparse(last) == "main()":
            tree.body.pop()
        return compile(tree, str(path), "exec", dont_inherit=True)


def load(harness: Path):
    sys.path.insert(0, str(harness))
    sys.dont_write_bytecode = True
    loader = Judge("sglang_judge", str(harness / "judge.py"))
    spec = importlib.util.spec_from_file_location(loader.name, loader.path, loader=loader)
    judge = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = judge
    loader.exec_module(judge)
    return judge


def raw_pages_for(common):
    """Return the judge's view of a pool's pages, right for page_unified as well.

    There a page is one piece with K and V inside; the judge, which has never seen a backend
    serve it, takes the first two pages for K and V.
    """
    plain = common.raw_pages

    def raw_pages(pool):
        if pool.layout != "page_unified":
            return plain(pool)
        return [pool.kv_buffer.view(common.torch.uint8).reshape(pool.page_num, -1).numpy()]

    return raw_pages


def damage_for(judge, url: str):
    """Return what takes the place of the judge's ``_damage``, and how it damages a slab."""
    from tests.engines import sglang_damage

    ours = {
        judge._trunc: sglang_damage.truncate_half,
        judge._zero: sglang_damage.zero,
        judge._flip: sglang_damage.flip,
        judge._grow: sglang_damage.lengthen,
    }

    def damage(how, heal=True):  # noqa: ARG001 - the judge's signature
        if not judge.A.dir:
            raise judge.Refused("needs --dir")
        common, pool = judge.C, judge.pool()
        count = 6
        control = judge.opened(pool)
        try:
            common.fill_random(pool, range(count), 2)
            keys = common.keys_for(judge.tag("dm"), count)
            source = common.page_idx(range(count), pool.page_size)
            target = common.page_idx(range(20, 20 + count), pool.page_size)
            control.backup(keys, source)
            ours[how](sglang_damage.places(url, keys[3])[0])
            return _verdict(judge, pool, keys, source, target)
        finally:
            judge.shut(control)

    return damage


def _verdict(judge, pool, keys, source, target):
    """Read through a fresh client, write again, read again; the judge's own measure."""
    common, count = judge.C, len(keys)
    judge.zero(pool, list(range(20, 20 + count)))
    fresh = judge.opened(pool)
    try:
        exists = fresh.exists(keys)
        loaded = fresh.prefetch(keys, target)
        for page in range(loaded):
            if common.page_bytes(pool, page) != common.page_bytes(pool, 20 + page):
                return "FAIL", f"page {page} loaded with wrong bytes"
        whole = loaded == count  # a slab that is only longer has lost nothing
        fresh.backup(keys, source)
        again = fresh.prefetch(keys, target)
        for page in range(again):
            if common.page_bytes(pool, page) != common.page_bytes(pool, 20 + page):
                return "FAIL", f"page {page} healed with wrong bytes"
        text = f"exists {exists}, loaded {loaded}; after writing the pages again {again}/{count}"
        return ("PASS" if (whole or loaded == 3) and again == count else "WEAK"), text
    finally:
        judge.shut(fresh)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--harness", type=Path, required=True, help="folder of judge.py")
    parser.add_argument("--url", help="store to test; a temporary nvme one by default")
    parser.add_argument("--extra", default="{}", help="further options of the adapter, JSON")
    mine, rest = parser.parse_known_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "backends")]
    # The judge starts itself again for its crash test.
    paths = [str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    with tempfile.TemporaryDirectory(prefix="kvconnect-judge-", dir="/var/tmp") as folder:
        url = mine.url or f"nvme://{folder}/store?capacity=4GiB"
        extra = {"url": url} | json.loads(mine.extra)
        arguments = ["--backend", OURS, "--extra", json.dumps(extra)]
        if url.startswith("nvme://") and "--dir" not in rest:
            arguments += ["--dir", url.removeprefix("nvme://").partition("?")[0]]
        judge = load(mine.harness.resolve())
        judge._damage = damage_for(judge, url)
        judge.C.raw_pages = raw_pages_for(judge.C)
        sys.argv = ["judge.py", *arguments, *rest]
        with suppress(SystemExit):
            judge.main()
    bad = [r for r in judge.RES if r["verdict"] in {"FAIL", "WEAK"}]
    return 1 if bad or not judge.RES else 0


if __name__ == "__main__":
    sys.exit(main())
