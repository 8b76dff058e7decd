"""Real SGLang 0.5.23 host pools on a CPU, of exactly the size asked for."""

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import mmap
import sys
import warnings
from types import ModuleType, SimpleNamespace

import torch

CPU = torch.device("cpu")


class _Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Stub(ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An empty torchvision: its wheel is a CUDA build that does not import beside a CPU torch,
    and SGLang's multimodal modules import it at the top without our ever calling it."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in {"torchvision", "torchaudio"}:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Stub(spec.name)

    def exec_module(self, module):
        pass


def load():
    """Import SGLang's host pool modules; their names here are those of the namespace."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(StubFinder())
        real = importlib.metadata.version
        importlib.metadata.version = lambda name: (
            "0.28.0" if name in {"torchvision", "torchaudio"} else real(name)
        )
    home = "sglang.srt.mem_cache."
    names = {
        "info": "device_pool_info",
        "base": "pool_host.base",
        "mha": "pool_host.mha",
        "mxfp8": "pool_host.mha_mxfp8",
        "mla": "pool_host.mla",
        "dsa": "pool_host.dsa",
        "decl": "pool_host.host_pool_decl",
        "mamba": "pool_host.mamba",
        "nvfp4": "pool_host.minimax_m3_nvfp4",
        "unified": "pool_host.unified",
        "paged": "memory_pool_host",
        "storage": "hicache_storage",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what SGLang and its dependencies say on import
        modules = {key: importlib.import_module(home + name) for key, name in names.items()}
    return SimpleNamespace(**modules)


def untouched(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
    """Stands in for SGLang's allocator: address space that is never touched, of any size."""
    nbytes = torch.Size(dims).numel() * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = mmap.mmap(-1, nbytes, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).reshape(dims)


def _pointers(tensors):
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64)


def budget(sg):
    """SGLang keeps 10 GiB of every machine to itself; not here."""
    return sg.base.host_memory_budget_scope(1 << 62)


def mha_info(sg, *, page_size, layers, heads, dim, v_dim, dtype, scales=None):
    k = tuple(torch.zeros(page_size, heads, dim, dtype=dtype) for _ in range(layers))
    v = tuple(torch.zeros(page_size, heads, v_dim, dtype=dtype) for _ in range(layers))
    buffers = sg.info.KVBuffers(
        k=k,
        v=v,
        k_data_ptrs=_pointers(k),
        v_data_ptrs=_pointers(v),
        layout=sg.info.KVBufferLayout.NHD,
    )
    return sg.info.MHABufferInfo(
        buffers=buffers,
        page_size=page_size,
        head_num=heads,
        head_dim=dim,
        v_head_dim=v_dim,
        dtype=dtype,
        device=CPU,
        scales=scales,
    )


def mha(
    sg, layout, *, pages=6, page_size=4, layers=3, heads=8, dim=16, v_dim=None,
    dtype=torch.bfloat16, **options,
):  # fmt: skip
    v_dim = dim if v_dim is None else v_dim
    info = mha_info(
        sg, page_size=page_size, layers=layers, heads=heads, dim=dim, v_dim=v_dim, dtype=dtype
    )
    kind = sg.mha.get_mha_host_pool_cls(info)
    with budget(sg):
        return kind(
            info,
            2.0,
            0,
            page_size,
            layout,
            pin_memory=False,
            device_capacity_tokens=page_size,
            start_layer=0,
            end_layer=layers,
            host_token_capacity=pages * page_size,
            **options,
        )


def mxfp8(sg, monkeypatch, *, pages=6, page_size=128, layers=3, heads=4, dim=64):
    """The class wants a GPU for its transfer kernels; its buffers do not."""

    def no_staging(self, *_):
        self.can_use_write_back_jit = True
        self.staging_page_capacity = 1

    monkeypatch.setattr(
        sg.mxfp8.MHATokenToKVPoolMXFP8Host, "_init_write_back_staging_buffers", no_staging
    )
    monkeypatch.setattr(sg.mxfp8, "can_use_write_back_jit_kernel", lambda **_: True)
    blocks = tuple(
        torch.zeros(1, heads, 32, page_size // 32, dim // 32, dtype=torch.uint8)
        for _ in range(layers)
    )
    scales = sg.info.KVScaleBuffers(
        k=blocks, v=blocks, layout=sg.info.KVScaleLayout.MXFP8_INTERLEAVED
    )
    info = mha_info(
        sg,
        page_size=page_size,
        layers=layers,
        heads=heads,
        dim=dim,
        v_dim=dim,
        dtype=torch.float8_e4m3fn,
        scales=scales,
    )
    with budget(sg):
        return sg.mha.get_mha_host_pool_cls(info)(
            info,
            2.0,
            0,
            page_size,
            "page_first",
            pin_memory=False,
            device_capacity_tokens=page_size,
            start_layer=0,
            end_layer=layers,
            host_token_capacity=pages * page_size,
        )


def mla(sg, layout, *, pages=6, page_size=4, layers=3, lora=32, rope=16, split=None, **options):
    if split is None:
        buffers = tuple(
            torch.zeros(page_size, 1, lora + rope, dtype=torch.bfloat16) for _ in range(layers)
        )
        data_ptrs = _pointers(buffers)
    else:
        buffers, data_ptrs = sg.info.MLASplitBuffers(**split), None
    info = sg.info.MLABufferInfo(
        buffers=buffers,
        data_ptrs=data_ptrs,
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=page_size,
        kv_lora_rank=lora,
        qk_rope_head_dim=rope,
        kv_cache_dim=lora + rope,
        dtype=torch.bfloat16,
        device=CPU,
    )
    with budget(sg):
        return sg.mla.MLATokenToKVPoolHost(
            info,
            2.0,
            0,
            page_size,
            layout,
            pin_memory=False,
            device_capacity_tokens=page_size,
            start_layer=0,
            end_layer=layers,
            target_layer_num=layers,
            host_token_capacity=pages * page_size,
            **options,
        )


def mamba(sg, layout, *, slots=6, layers=2, temporal=(4, 16), convs=((6, 3), (5, 3)), extra=()):
    info = sg.info.MambaStateBufferInfo(
        temporal=torch.zeros(layers, slots, *temporal),
        conv=tuple(torch.zeros(layers, slots, *c, dtype=torch.bfloat16) for c in convs),
        extra_checkpoint_buffers=extra,
    )
    with budget(sg):
        return sg.mamba.MambaPoolHost(
            info, 1.0, 0, device_capacity=slots, pin_memory=False, layout=layout
        )


def indexer(sg, anchor, *, layers=3, nbytes=12):
    device = SimpleNamespace(
        store_dtype=torch.uint8,
        start_layer=0,
        end_layer=layers,
        layer_num=layers,
        layer_shard_enabled=False,
        device="cpu",
        index_k_with_scale_buffer=[torch.zeros(2, 8, dtype=torch.uint8) for _ in range(layers)],
    )
    decl = sg.decl.HostPoolDecl(
        pool_name=sg.storage.PoolName.INDEXER,
        device_pool=device,
        indices_from_pool=sg.storage.PoolName.KV,
        layout_source=sg.storage.PoolName.KV,
        storage_info=sg.decl.HostPoolStorageInfo(
            bytes_per_token_per_layer=nbytes, dtype=torch.uint8
        ),
        host_pool_builder=None,
    )
    with budget(sg):
        return sg.dsa.DSAIndexerPoolHost(decl, anchor, pin_memory=False)


def nvfp4(sg, layout, *, main, pages=6, page_size=4, layers=5, row=48):
    slab = torch.zeros(layers, 2, row, dtype=torch.uint8)
    info = sg.info.PageRowBufferInfo(
        slab=slab, rows=tuple(slab), row_bytes=row, page_size=page_size, num_pages=2
    )
    with budget(sg):
        if main:
            return sg.nvfp4.MiniMaxM3Nvfp4MainKVPoolHost(
                info,
                (pages - 1) * page_size / 8,
                0,
                page_size,
                layout,
                pin_memory=False,
                device_capacity_tokens=8,
                start_layer=0,
                end_layer=layers,
            )
        anchor = SimpleNamespace(page_size=page_size, size=pages * page_size, page_num=pages)
        return sg.nvfp4.MiniMaxM3Nvfp4IndexKPoolHost(
            info, anchor, layout, pin_memory=False, start_layer=0, end_layer=layers
        )


def paged(sg, layout, *, pages=6, page_size=4, layers=3, row=48):
    device = [torch.zeros(2, row, dtype=torch.uint8) for _ in range(layers)]
    with budget(sg):
        return sg.paged.DeepSeekV4PagedHostPool(
            "c4", device, row, pages, page_size, layout, pin_memory=False, page_aligned_only=True
        )


def k_only(sg, layout, *, pages=6, page_size=4, layers=3, heads=2, dim=16):
    device = SimpleNamespace(
        store_dtype=torch.bfloat16,
        start_layer=0,
        end_layer=layers,
        head_num=heads,
        head_dim=dim,
        layer_num=layers,
        device="cpu",
        k_buffer=[torch.zeros(page_size, heads, dim) for _ in range(layers)],
    )
    anchor = SimpleNamespace(page_size=page_size, size=pages * page_size, page_num=pages)
    with budget(sg):
        return sg.mha.MHATokenToKOnlyPoolHost(device, anchor, layout, pin_memory=False)


def envelope(sg, *, pages=6, page_size=4, nbytes=96):
    buffer = torch.zeros(pages, nbytes, dtype=torch.uint8)
    device = SimpleNamespace(
        get_page_envelope_buffer=lambda: SimpleNamespace(shape=buffer.shape, ndim=2, device="cpu"),
        get_contiguous_buf_infos=lambda: ([buffer.data_ptr()], [buffer.nbytes], [nbytes]),
        page_size=page_size,
        grow_direction="up",
        host_capacity_tokens=None,
        size=pages * page_size,
        start_layer=0,
        end_layer=1,
    )
    with budget(sg):
        return sg.unified.UnifiedPageEnvelopeHostPool(
            device, 1.0, 0, page_size, "page_first", pin_memory=False
        )
