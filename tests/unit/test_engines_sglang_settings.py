"""What the command line changes in the pages is in their identity, and nothing else is."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvconnect.engines.sglang.identity import identify
from kvconnect.engines.sglang.model_facts import ModelFacts
from kvconnect.engines.sglang.options import Options
from kvconnect.engines.sglang.settings import Settings, read_settings
from kvconnect.hostpool import HostPool

PLAIN = {
    "json_model_override_args": "{}",
    "kv_cache_dtype": "auto",
    "load_format": "auto",
    "quantization": None,
    "quantization_param_path": None,
    "speculative_draft_kv_cache_dtype": None,
    "weight_version": "default",
}


def read(**given):
    return read_settings(SimpleNamespace(**PLAIN | given))


def test_no_engine_says_nothing_and_a_plain_one_changes_nothing():
    assert read_settings(None) == Settings()
    assert read().pairs == ()
    assert read(load_format="safetensors").pairs == ()


@pytest.mark.parametrize(
    "given",
    [
        {"json_model_override_args": '{"rope_scaling": {"factor": 4}}'},
        {"quantization": "fp8"},
        {"modelopt_quant": "fp8"},
        {"quantization_param_path": "/no/such/file"},
        {"weight_version": "2"},
        {"load_format": "dummy"},
    ],
)
def test_what_changes_values_is_named(given):
    ((name, _),) = read(**given).pairs
    assert name in given


def test_one_meaning_is_one_text(tmp_path):
    words = ['{"a": 1, "b": 2}', '{"b":2,"a":1}']
    first, second = (read(json_model_override_args=text) for text in words)
    assert first == second
    scales = [tmp_path / name for name in ("here", "there", "other")]
    for file, data in zip(scales, (b"1", b"1", b"2"), strict=True):
        file.write_bytes(data)
    here, there, other = (read(quantization_param_path=str(file)) for file in scales)
    assert here == there
    assert here != other


@pytest.mark.parametrize(
    ("given", "kv", "draft"),
    [
        ({}, "fp8_e4m3", "fp8_e4m3"),  # left to itself the engine keeps e4m3 in bytes alone
        ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2", "fp8_e5m2"),
        ({"speculative_draft_kv_cache_dtype": "fp8_e5m2"}, "fp8_e4m3", "fp8_e5m2"),
    ],
)
def test_what_a_pool_of_bytes_holds(given, kv, draft):
    said = read(**given)
    assert (said.kv, said.draft) == (kv, draft)


def test_what_the_engine_resolved_wins(monkeypatch):
    module = ModuleType("sglang.srt.runtime_context")
    resolved = {"kv_cache_dtype": "fp8_e4m3"}
    module.get_context = lambda: SimpleNamespace(config_leaf=resolved.__getitem__)
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", module)
    said = read(kv_cache_dtype="fp8_e5m2", quantization="awq")
    assert said.kv == "fp8_e4m3"
    assert said.pairs == (("quantization", "awq"),), "what it does not know was given"


# -- in the identity ---------------------------------------------------------------------------


def pool(dtype="uint8"):
    shape = {"layout": "page_first", "pages": 2, "page_size": 4, "layers": 3, "heads": 4}
    return HostPool.allocate(**shape, head_dim=8, dtype=dtype)


def found(pool, name="kv", *, settings=None, host=None, **options):
    config = SimpleNamespace(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, dcp_rank=0,
        dcp_size=1, is_mla_model=False, model_name="org/model", tp_lcm_size=None,
    )  # fmt: skip
    given = Options(url="memory://x", **{"weights": "w"} | options)
    facts = ModelFacts(settings=settings or Settings())
    return identify(pool, SimpleNamespace(**host or {}), name, config, given, facts)


def test_float8_kept_as_bytes_is_told_apart():
    known = [found(pool(), settings=Settings(kv=kind)) for kind in ("fp8_e4m3", "fp8_e5m2")]
    assert known[0].identity != known[1].identity
    assert found(pool(), kv_cache_dtype="fp8_e5m2").identity == known[1].identity
    assert not known[0].warnings
    (warning,) = found(pool()).warnings
    assert "kv_cache_dtype=" in warning
    side = found(pool(), "draft", settings=Settings(kv="a", draft="b"))
    assert dict(side.identity.extra)["kv_cache_dtype"] == "b"


def test_a_dtype_that_says_it_needs_no_name():
    plain = found(pool("bfloat16"))
    assert found(pool("bfloat16"), settings=Settings(kv="fp8_e5m2")).identity == plain.identity
    assert not plain.identity.extra
    assert not plain.warnings


def test_settings_are_in_the_identity_of_every_pool():
    said = Settings(pairs=(("quantization", "fp8"),))
    for name in ("kv", "swa"):
        extra = found(pool("bfloat16"), name, settings=said).identity.extra
        assert ("quantization", "fp8") in extra


def test_a_format_of_its_own_outlives_the_model_option():
    tagged = found(pool("bfloat16"), host={"storage_format_tag": "token-major"}, model="mine")
    assert tagged.identity != found(pool("bfloat16"), model="mine").identity
    untagged = found(pool("bfloat16"), host={"storage_format_tag": None}, model="mine")
    assert untagged.identity == found(pool("bfloat16"), model="mine").identity


def test_pages_of_another_order_on_the_device_are_apart_and_not_cut_by_heads():
    def ordered(order):
        layout = SimpleNamespace(value=order)
        info = SimpleNamespace(buffers=SimpleNamespace(layout=layout))
        return found(pool("bfloat16"), host={"_buffer_infos": (info,)}, tp_sizes=(1, 2))

    plain = found(pool("bfloat16"), tp_sizes=(1, 2))
    assert ordered("nhd").identity == ordered("paged_nhd").identity == plain.identity
    assert plain.tp_sizes == (1, 2)
    for order in ("hnd", "vectorized_5d"):
        assert dict(ordered(order).identity.extra) == {"device_order": order}
        assert (ordered(order).tp_sizes, ordered(order).object_layout) == ((), "native")
