"""`kvconnect.cover` against the corpus, and the corpus against its generator."""

import ast
import importlib.util
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from kvconnect.cover import cover
from kvconnect.layout import Axis, Layout

HERE = Path(__file__).parent
CORPUS = json.loads((HERE / "descriptors.json").read_text(encoding="utf-8"))
CASES = CORPUS["cases"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_cover_gives_the_descriptors_of_the_corpus(case):
    axes = tuple(Axis(a["name"], a["extent"], a["stride"]) for a in case["axes"])
    layout = Layout(axes, case["itemsize"], case["offset"])
    found = cover(layout, case["cut"])
    assert {axis.name for axis in found.cut} == set(case["cut"])
    steps = [
        case["page_ids"] if name == "page" else range(layout.extents[name]) for name in case["cut"]
    ]
    indices = [dict(zip(case["cut"], i, strict=True)) for i in itertools.product(*steps)]
    assert [entry["index"] for entry in case["objects"]] == indices
    for entry in case["objects"]:
        step = sum(entry["index"][axis.name] * axis.stride for axis in found.cut)
        offsets = found.run_offsets() + np.uint64(step)
        assert [[at, found.run] for at in offsets.tolist()] == entry["runs"]
        assert found.runs == len(entry["runs"])
        assert (found.why_not_one_run() is None) == (len(entry["runs"]) == 1)


def test_the_corpus_covers_every_named_pool_shape():
    names = " ".join(case["name"] for case in CASES)
    for shape in (
        *("layer_first", "page_first", "page_first_direct", "page_head", "page_unified"),
        *("asymmetric K", "asymmetric V", "mla", "mxfp8 data", "mxfp8 scale"),
    ):
        assert shape in names
    assert len({case["name"] for case in CASES}) == len(CASES)
    assert {len(entry["runs"]) == 1 for case in CASES for entry in case["objects"]} == {True, False}
    assert CORPUS["version"] == 1


def test_the_generator_is_independent_and_writes_this_corpus():
    path = HERE / "make_descriptors.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names
    spec = importlib.util.spec_from_file_location("make_descriptors", path)
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.render() == (HERE / "descriptors.json").read_text(encoding="utf-8")
