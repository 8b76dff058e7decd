"""Identity and placement from ranks, pool and model: what is certain, private or contradictory."""

from types import SimpleNamespace

import numpy as np
import pytest

from kvconnect.engines.sglang.identity import identify
from kvconnect.engines.sglang.model_facts import ModelFacts
from kvconnect.engines.sglang.options import Options
from kvconnect.errors import ConfigError
from kvconnect.foreign import pool_from_tensors
from kvconnect.hostpool import HostPool
from kvconnect.placement import Span


def pool(**changed):
    shape = {"layout": "page_first", "pages": 2, "page_size": 4, "layers": 3, "heads": 4}
    return HostPool.allocate(**shape | {"head_dim": 8} | changed)


def latent(**changed):
    return pool(heads=1, v_head_dim=0, **changed)


def rows():
    """A pool of opaque rows, as Mamba states or packed pages are."""
    data = np.zeros((2, 3, 64), dtype=np.uint8)
    return pool_from_tensors({"rows": data}, {"rows": ("page", "layer", "dim")}, page_size=4)


def found(
    pool, name="kv", *, tp=(0, 1), pp=(0, 1), cp=(0, 1), dcp=(0, 1), mla=False, lcm=None,
    served="org/model", facts=None, span=None, packed=0, **options,
):  # fmt: skip
    """Identify `pool`; `span` is the range of layers it names, `packed` its draft layers."""
    config = SimpleNamespace(
        tp_rank=tp[0],
        tp_size=tp[1],
        pp_rank=pp[0],
        pp_size=pp[1],
        attn_cp_rank=cp[0],
        attn_cp_size=cp[1],
        dcp_rank=dcp[0],
        dcp_size=dcp[1],
        is_mla_model=mla,
        model_name=served,
        tp_lcm_size=lcm,
    )
    start, stop = span or (0, pool.layers)
    host = SimpleNamespace(start_layer=start, end_layer=stop, target_layer_num=pool.layers - packed)
    given = Options(url="memory://x", **{"weights": "w"} | options)
    return identify(pool, host, name, config, given, facts or ModelFacts())


def heads(result):
    place = result.placement
    return place.heads, place.replica, place.replicas


# -- heads -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("local", "tp", "known", "want"),
    [
        (4, (0, 1), None, (Span(0, 4, 4), 0, 1)),
        (4, (1, 2), None, (Span(4, 8, 8), 0, 1)),  # two heads or more are never replicated
        (4, (1, 2), 8, (Span(4, 8, 8), 0, 1)),
        (1, (5, 8), 8, (Span(5, 6, 8), 0, 1)),  # 8 heads at TP 8 are not replicated
        (1, (5, 8), 2, (Span(1, 2, 2), 1, 4)),
        (1, (0, 1), None, (Span(0, 1, 1), 0, 1)),
        (1, (3, 4), None, (Span(3, 4, 4), 0, 1)),
    ],
)
def test_heads_of_a_rank(local, tp, known, want):
    result = found(pool(heads=local), tp=tp, kv_heads=known)
    assert heads(result) == want
    by_facts = found(pool(heads=local), tp=tp, facts=ModelFacts(kv_heads=known))
    assert heads(by_facts) == want
    assert by_facts.identity == result.identity


def test_one_head_of_an_unknown_number_is_private_to_the_tp_size():
    result = found(pool(heads=1), tp=(0, 4))
    assert dict(result.identity.extra) == {"tp_size": "4"}
    (warning,) = result.warnings
    assert "kv_heads=" in warning
    for certain in (found(pool(heads=1)), found(pool(heads=1), tp=(0, 4), kv_heads=4)):
        assert not certain.warnings
        assert not certain.identity.extra


@pytest.mark.parametrize("wrong", [32, 4, 6])
def test_the_pool_is_believed_before_the_model_directory(wrong):
    """Its heads are certain from two to a rank on; with one they stay private."""
    facts = ModelFacts(kv_heads=wrong, path="/m")
    result = found(pool(), tp=(0, 2), facts=facts)
    assert heads(result) == (Span(0, 4, 8), 0, 1)
    assert result.identity == found(pool(), tp=(0, 2)).identity
    (warning,) = result.warnings
    assert "kv_heads=" in warning
    lone = found(pool(heads=1), tp=(0, 2), facts=facts)
    assert dict(lone.identity.extra) == {"tp_size": "2"}
    assert found(pool(), tp=(0, 2), facts=facts, kv_heads=8).warnings == ()


@pytest.mark.parametrize("wrong", [4, 16, 6, 1])
def test_heads_that_do_not_fit_the_pool(wrong):
    with pytest.raises(ConfigError, match="heads"):
        found(pool(heads=4), tp=(0, 2), kv_heads=wrong)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_latent_rows_are_the_same_on_every_rank(size):
    """Their identity is the same at every TP size; the config's count of heads is not theirs."""
    result = found(latent(), tp=(size - 1, size), mla=True, facts=ModelFacts(kv_heads=128))
    assert heads(result) == (Span(0, 1, 1), size - 1, size)
    assert result.identity == found(latent(), mla=True).identity


def test_sglang_elects_the_writer_of_latent_rows():
    assert not found(latent(), tp=(0, 8), mla=True).elect_writer
    assert found(latent(), tp=(0, 8)).elect_writer
    assert found(pool(heads=1), tp=(0, 8), kv_heads=2).elect_writer


def test_opaque_rows_belong_to_their_rank_unless_the_model_is_replicated():
    assert found(rows(), "state", tp=(1, 4)).placement.shards == (("tp", Span(1, 2, 4)),)
    assert found(rows(), "state", tp=(0, 1)).placement.shards == ()
    replicated = found(rows(), "indexer", tp=(1, 4), mla=True)
    assert (replicated.placement.shards, replicated.placement.replicas) == ((), 4)
    mamba = found(rows(), "mamba", tp=(1, 4), mla=True)
    assert mamba.placement.shards == (("tp", Span(1, 2, 4)),)


def test_a_draft_with_heads_beside_latent_kv_is_cut():
    for local, total in ((1, 4), (2, 8)):
        result = found(pool(heads=local), "draft", tp=(1, 4), mla=True)
        assert heads(result) == (Span(local, 2 * local, total), 0, 1)


def test_side_pools_have_head_counts_of_their_own():
    result = found(pool(heads=2), "swa", tp=(1, 4), kv_heads=32, facts=ModelFacts(kv_heads=64))
    assert heads(result) == (Span(2, 4, 8), 0, 1)
    assert result.identity.pool == "swa"


# -- layers ------------------------------------------------------------------------------------


def test_layers_on_one_stage():
    assert found(pool()).placement.layers == Span(0, 3, 3)
    # A hybrid model has more layers than this pool.
    assert found(pool(), facts=ModelFacts(layers=48)).placement.layers == Span(0, 3, 3)
    with pytest.raises(ConfigError, match="layers=48"):
        found(pool(), layers=48)
    assert found(pool(), layers=3).placement.layers == Span(0, 3, 3)


@pytest.mark.parametrize("known", [{"layers": 8}, {"facts": ModelFacts(layers=8)}])
@pytest.mark.parametrize(("pp", "span"), [((0, 3), (0, 3)), ((1, 3), (3, 6)), ((2, 3), (5, 8))])
def test_stages_hold_global_ranges(known, pp, span):
    result = found(pool(), pp=pp, span=span, **known)
    assert result.placement.layers == Span(*span, 8)
    assert not result.identity.extra
    assert not result.warnings


WRONG = [
    ((1, 2), (0, 3), 6),  # a stage that is not the first begins at 0
    ((0, 2), (3, 6), 6),
    ((1, 2), (3, 6), 5),
    ((1, 2), (3, 6), 7),  # the last stage ends early
    ((1, 2), (3, 5), 6),  # three layers in a range of two
    ((1, 2), (2, 6), 6),
    ((0, 2), (None, None), 6),
]


@pytest.mark.parametrize(("pp", "span", "total"), WRONG)
def test_ranges_that_cannot_be(pp, span, total):
    """Given as an option it is an error; from the model's files, pages stay private."""
    with pytest.raises(ConfigError, match="layers="):
        found(pool(), pp=pp, span=span, layers=total)
    result = found(pool(), pp=pp, span=span, facts=ModelFacts(layers=total))
    extra = {"pp_rank": str(pp[0]), "pp_size": "2", "start_layer": str(span[0])}
    assert dict(result.identity.extra) == extra
    assert result.placement.layers == Span(0, 3, 3)
    (warning,) = result.warnings
    assert "layers=" in warning


def test_stages_of_an_unknown_total_are_private():
    names = set()
    for rank, start in ((0, 0), (1, 3), (1, 0)):
        result = found(pool(), pp=(rank, 2), span=(start, start + 3))
        assert result.warnings
        names.add(result.identity.namespace)
    names.add(found(pool()).identity.namespace)
    assert len(names) == 4


def test_side_pools_number_their_own_layers():
    result = found(pool(), "swa", pp=(1, 2), span=(0, 3), layers=8, facts=ModelFacts(layers=8))
    assert dict(result.identity.extra)["pp_rank"] == "1"
    assert not result.warnings


# -- the rest of the identity ------------------------------------------------------------------


def test_every_field_comes_from_where_it_is_known():
    made = pool(v_head_dim=4, dtype="float16")
    identity = found(made, tp=(0, 2), adapter="lora", salt="s", model="m", weights="x").identity
    want = {
        "model": "m",
        "weights": "x",
        "dtype": "float16",
        "page_size": 4,
        "layers": 3,
        "heads": 8,
        "head_dim": 8,
        "v_head_dim": 4,
        "adapter": "lora",
        "salt": "s",
        "scale_scheme": None,
        "pool": "kv",
    }
    assert {name: getattr(identity, name) for name in want} == want


@pytest.mark.parametrize("name", [None, ""])
def test_a_model_without_a_name_has_no_key(name):
    with pytest.raises(ConfigError, match="'model'"):
        found(pool(), served=name)


def test_weights_are_named_fingerprinted_or_said_to_be_unknown():
    facts = ModelFacts(weights="f" * 32)
    assert found(pool(), weights="mine", facts=facts).identity.weights == "mine"
    assert found(pool(), weights=None, facts=facts).identity.weights == "f" * 32
    unknown = found(pool(), weights=None)
    assert unknown.identity.weights == "name:org/model"
    assert len(unknown.warnings) == 1
    # A name that somebody gave to weights is not the stand-in for it.
    assert found(pool(), weights="org/model").identity != unknown.identity


def test_ranks_of_context_parallelism_are_shards_not_numbers():
    result = found(pool(), cp=(1, 2), dcp=(0, 2))
    assert result.placement.shards == (("attn_cp", Span(1, 2, 2)), ("dcp", Span(0, 1, 2)))
    assert result.identity == found(pool()).identity


def test_draft_layers_are_of_the_draft_model():
    packed = found(pool(), packed=1, facts=ModelFacts(draft="d1"))
    other = found(pool(), packed=1, facts=ModelFacts(draft="d2"))
    side = found(pool(), "draft_swa", draft_weights="d3", facts=ModelFacts(draft="d1"))
    assert dict(packed.identity.extra) == {"draft": "d1", "draft_layers": "1"}
    assert packed.identity != other.identity
    assert dict(side.identity.extra)["draft"] == "d3"
    assert not found(pool(), facts=ModelFacts(draft="d1")).identity.extra


# -- the grid ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sizes", "group", "layout"),
    [
        ({}, (), None, "native"),
        ({"lcm": 4}, (4,), None, "canonical"),
        ({"tp_lcm_size": 4}, (4,), None, "canonical"),
        ({"tp_sizes": (1, 2)}, (1, 2), None, "canonical"),
        ({"tp_sizes": (1, 2), "lcm": 8}, (1, 2), None, "canonical"),
        ({"head_group": 2}, (), 2, "canonical"),
        ({"head_group": 2, "lcm": 8}, (), 2, "canonical"),
        ({"lcm": 4, "object_layout": "native"}, (4,), None, "native"),
        ({"object_layout": "canonical"}, (), None, "canonical"),
    ],
)
def test_the_head_grid(options, sizes, group, layout):
    result = found(pool(), tp=(0, 2), **options)
    assert (result.tp_sizes, result.head_group, result.object_layout) == (sizes, group, layout)


def test_pools_without_heads_to_cut_have_no_grid():
    for result in (
        found(latent(), mla=True, lcm=4),
        found(rows(), "state", lcm=4, head_group=2),
        found(pool(heads=1), tp=(0, 4), lcm=8),
    ):
        assert (result.tp_sizes, result.head_group) == ((), None)
        assert result.object_layout == "native"


def test_options_about_objects_are_about_the_anchor():
    side = found(pool(), "swa", layer_chunk=1, object_layout="canonical")
    assert (side.layer_chunk, side.object_layout) == (None, "native")
    anchor = found(pool(), layer_chunk=1)
    assert anchor.layer_chunk == 1
