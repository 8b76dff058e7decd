"""What is learned from a model's directory, and of the model that an engine serves."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvconnect.engines.sglang import model_facts, served
from kvconnect.engines.sglang.model_facts import ModelFacts, read_model
from kvconnect.engines.sglang.options import Options
from kvconnect.errors import ConfigError

CONFIG = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}


def make(folder, config=CONFIG, files=None, index=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, data in (files or {"model.safetensors": b"w" * 10_000}).items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize(
    ("config", "layers", "heads"),
    [
        (CONFIG, 32, 8),
        ({"text_config": CONFIG, "num_hidden_layers": 12}, 32, 8),
        ({"vision_config": {"num_hidden_layers": 9}, **CONFIG}, 32, 8),
        ({"n_layer": 12, "n_head_kv": 2}, 12, 2),
        ({"num_layers": 28, "multi_query_group_num": 2}, 28, 2),
        ({"num_hidden_layers": 32, "num_kv_heads": 71, "multi_query": True}, 32, 1),
        (
            {"num_hidden_layers": 60, "num_kv_heads": 8, "multi_query": True}
            | {"new_decoder_architecture": True},
            60,
            8,
        ),
        ({"num_hidden_layers": 32, "num_attention_heads": 32}, 32, None),
        ({"num_hidden_layers": True, "num_key_value_heads": "8"}, None, None),
        ({"text_config": None}, None, None),
    ],
)
def test_layers_and_heads_of_the_whole_model(tmp_path, config, layers, heads):
    found = read_model(make(tmp_path / "m", config))
    assert (found.layers, found.kv_heads) == (layers, heads)


def weights(folder):
    return read_model(folder).weights


def test_the_fingerprint_is_of_the_content_not_of_the_place(tmp_path):
    a, b = make(tmp_path / "a"), make(tmp_path / "b")
    assert weights(a) == weights(b)
    assert len(weights(a)) == 32
    (b / "README.md").write_text("no weights")
    assert weights(a) == weights(b)


BIG = bytes(range(256)) * 40_000


@pytest.mark.parametrize(
    "changed",
    [
        {"config": CONFIG | {"rope_theta": 1}},
        {"index": {"weight_map": {"a": "model-1.safetensors"}}},
        {"files": {"model.safetensors": BIG[:-1]}},
        {"files": {"model.safetensors": b"X" + BIG[1:]}},
        {"files": {"model.safetensors": BIG[:-1] + b"X"}},
        {"files": {"model.safetensors": bytes(b ^ 1 for b in BIG)}},
        {"files": {"other.safetensors": BIG}},
        {"files": {"model.safetensors": BIG, "two.safetensors": b"x"}},
    ],
)
def test_what_changes_the_weights_changes_the_fingerprint(tmp_path, changed):
    one = make(tmp_path / "a", files={"model.safetensors": BIG})
    two = make(tmp_path / "b", **({"files": {"model.safetensors": BIG}} | changed))
    assert weights(one) != weights(two)


def test_two_fine_tunes_of_one_base_differ(tmp_path):
    """Equal configuration, names and sizes; other numbers in the middle of the file."""
    tuned = BIG[:100_000] + bytes(1_000_000) + BIG[1_100_000:]
    one = make(tmp_path / "a", files={"model.safetensors": BIG})
    two = make(tmp_path / "b", files={"model.safetensors": tuned})
    assert weights(one) != weights(two)


def with_norms(folder, norm, count=12, apart=40 << 20):
    """A model whose file is empty but for a norm of 64 bytes between its large tensors."""
    header = {"__metadata__": {"format": "pt"}}
    for i in range(count):
        at = i * (apart + len(norm))
        spans = {"w": [at, at + apart], "norm": [at + apart, at + apart + len(norm)]}
        header |= {f"{i}.{n}": {"dtype": "U8", "data_offsets": s} for n, s in spans.items()}
    words = json.dumps(header).encode()
    first = len(words).to_bytes(8, "little") + words
    make(folder, files={"model.safetensors": first})
    with (folder / "model.safetensors").open("r+b") as file:
        for i in range(count):
            file.seek(len(first) + i * (apart + len(norm)) + apart)
            file.write(norm)
        file.truncate(len(first) + (count + 1) * (apart + len(norm)))
    return folder


def test_a_fine_tune_of_the_norms_alone_differs(tmp_path):
    one, two, same = (with_norms(tmp_path / n, n[:1].encode() * 64) for n in ("1", "2", "1b"))
    assert weights(one) != weights(two)
    assert weights(one) == weights(same)


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"a": 1}', b'{"a": {"data_offsets": [1]}}'])
def test_a_header_that_is_none(tmp_path, header):
    data = len(header).to_bytes(8, "little") + header + bytes(100)
    assert weights(make(tmp_path / "m", files={"model.safetensors": data}))


def test_large_files_are_not_read_whole(tmp_path, monkeypatch):
    folder = make(tmp_path / "m")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1 << 40)  # sparse: a terabyte that takes no room
    read = []
    real = model_facts.os.pread
    monkeypatch.setattr(
        model_facts.os, "pread", lambda fd, n, at: read.append(n) or real(fd, n, at)
    )
    assert weights(folder)
    assert sum(read) <= 8 << 20


def test_weights_of_another_kind(tmp_path):
    folder = make(tmp_path / "m", files={"model.gguf": b"g" * 100, "extra.bin": b"b"})
    before = weights(folder)
    (folder / "extra.bin").write_bytes(b"other")
    assert weights(folder) == before, "the first kind of file alone is judged"
    (folder / "model.gguf").write_bytes(b"h" * 100)
    assert weights(folder) != before


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "config.json"), (b"{", "no JSON"), (b"[1]", "not an object"), (b"\xff", "no JSON")],
)
def test_a_directory_that_is_no_model(tmp_path, content, said):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_model(tmp_path)


def test_a_directory_without_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ConfigError, match="weights="):
        read_model(tmp_path)
    assert read_model(tmp_path, weights=False) == ModelFacts(
        layers=32, kv_heads=8, path=str(tmp_path)
    )


def test_a_configuration_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(model_facts, "MOST_JSON_BYTES", 100)
    with pytest.raises(ConfigError, match="larger than 100 B"):
        read_model(make(tmp_path / "m", {"x": "y" * 200}))


@pytest.fixture
def serving(monkeypatch):
    """Pretend that an engine serves with these arguments."""

    def serve(**arguments):
        module = ModuleType("sglang.srt.runtime_context")
        module.get_server_args = lambda: SimpleNamespace(**arguments)
        for name in ("sglang", "sglang.srt"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", module)

    return serve


def options(**given):
    return Options(url="memory://x", **given)


def test_no_engine_knows_nothing(monkeypatch):
    monkeypatch.setattr(served, "_server_arguments", lambda: None)
    assert served.find_facts(options()) == ModelFacts()


def test_the_served_model_is_read(serving, tmp_path):
    folder = make(tmp_path / "m")
    serving(model_path=str(folder), speculative_draft_model_path=None)
    assert served.find_facts(options()) == read_model(folder)
    named = served.find_facts(options(weights="mine"))
    assert (named.layers, named.weights) == (32, None), "a name given saves reading the weights"


def test_the_option_wins(serving, tmp_path):
    serving(model_path=str(make(tmp_path / "served")))
    other = make(tmp_path / "m", CONFIG | {"num_hidden_layers": 7})
    assert served.find_facts(options(model_path=str(other))).layers == 7
    with pytest.raises(ConfigError, match="nowhere"):
        served.find_facts(options(model_path=str(tmp_path / "nowhere")))


def test_a_served_model_that_cannot_be_read(serving, tmp_path, caplog):
    serving(model_path=str(tmp_path))
    assert served.find_facts(options()) == ModelFacts()
    assert "config.json" in caplog.text


def test_a_served_name_that_is_in_no_cache(serving, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    serving(model_path="org/model", revision=None, download_dir=None)
    assert served.find_facts(options()) == ModelFacts()


def test_a_served_name_is_looked_up_in_the_cache(serving, monkeypatch, tmp_path):
    folder, asked = make(tmp_path / "m"), []
    hub = ModuleType("huggingface_hub")
    hub.snapshot_download = lambda name, **how: asked.append((name, how)) or str(folder)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    serving(model_path="org/model", revision="main", download_dir="/cache")
    assert served.find_facts(options()).layers == 32
    how = {"revision": "main", "cache_dir": "/cache", "local_files_only": True}
    assert asked == [("org/model", how)]


def test_the_draft_model_is_known_too(serving, tmp_path):
    draft = make(tmp_path / "draft", CONFIG | {"num_hidden_layers": 1})
    serving(model_path=None, speculative_draft_model_path=str(draft))
    assert served.find_facts(options()).draft == read_model(draft).weights
    (draft / "model.safetensors").unlink()
    assert served.find_facts(options()).draft == str(draft)
