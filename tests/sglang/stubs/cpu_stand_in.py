"""What SGLang's hierarchical cache lacks on a CPU: copies between its two pools, in place of kernels that do the same.

SGLang finds register through its own plugins. Nothing here computes anything, and nothing of SGLang is replaced
but that its pool in host memory is not pinned, which requires a driver and has no switch.
"""

import ctypes
import sys

_POOL = "sglang.srt.mem_cache.pool_host.mha"


def register():
    """Have SGLang call unpinned when it makes its pool."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__", unpinned, HookType.AROUND)


def unpinned(init, pool, *args, **kwargs):
    """Make a pool that is not pinned, in a module that has the copies."""
    for copy in COPIES:
        vars(sys.modules[_POOL]).setdefault(copy.__name__, copy)
    init(pool, *args, **{**kwargs, "pin_memory": False})


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    """Copy rows, layer by layer."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer_pf_lf(src_k, dst_k, src_v, dst_v, src_indices, dst_indices, layer_id, item_size, src_layout_dim):
    """Copy one layer of rows that hold all layers."""
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        dst[dst_indices] = src[src_indices, layer_id].reshape(-1, *dst.shape[1:])


def transfer_kv_all_layer_lf_pf(src_k_layers, dst_k, src_v_layers, dst_v, src_indices, dst_indices, item_size, dst_layout_dim, num_layers):
    """Copy all layers into rows that hold all layers. The layers come as addresses."""
    pairs = list(zip(src_indices.tolist(), dst_indices.tolist(), strict=True))
    for layers, dst in ((src_k_layers.tolist(), dst_k), (src_v_layers.tolist(), dst_v)):
        for layer, src in enumerate(layers[:num_layers]):
            to = dst.data_ptr() + layer * item_size
            for row, place in pairs:
                ctypes.memmove(to + place * dst_layout_dim, src + row * item_size, item_size)


def _pages(paged, rows, page_size):
    """Give each page's number, and the rows that it is copied from or to."""
    return zip((paged[::page_size] // page_size).tolist(), rows.split(page_size), strict=True)


def transfer_kv_per_layer_direct_pf_lf(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    """Copy one layer of pages that hold all layers."""
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        for page, rows in _pages(src_indices, dst_indices, page_size):
            dst[rows] = src[page, layer_id]


def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """Copy all layers into pages that hold all layers."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for i, src in enumerate(src_ptrs):
        for page, rows in _pages(dst_indices, src_indices, page_size):
            dst_ptrs[i // layers][page, i % layers] = src[rows]


COPIES = (
    transfer_kv_direct,
    transfer_kv_per_layer_pf_lf,
    transfer_kv_all_layer_lf_pf,
    transfer_kv_per_layer_direct_pf_lf,
    transfer_kv_all_layer_direct_lf_pf,
)
