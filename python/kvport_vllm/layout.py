"""Where the blocks of a paged cache lie, from the strides of its tensors.

A tensor is one layer, its first dimension the blocks; how the rest lies in memory depends on the
layout (LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC, or what comes next), so nothing here looks at names:
what is dense inside a block is one segment, and a block in pieces is one segment for each piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvport_agent.errors import UnsupportedError
from kvport_agent.messages import POLICY_ALL, POLICY_TRAILING, message

DIGEST_BYTES = 16  # of each segment of each block, and of the header before them
ALIGN = 64
MAX_SEGMENTS = 1 << 16


@dataclass(frozen=True)
class Group:
    """Layers that share a block table."""

    layers: tuple[str, ...]
    block_tokens: int
    window: int | None = None  # tokens that attention looks back; None: all

    @property
    def trailing(self) -> int:
        """Blocks that a token may look back into, its own included."""
        assert self.window is not None
        return -(-(self.window - 1) // self.block_tokens) + 1


@dataclass(frozen=True)
class View:
    """One layer's tensor, in bytes and without its content."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    item: int  # bytes of an element


@dataclass(frozen=True)
class Segment:
    """One layer's, or a part of a layer's, array of blocks."""

    layer: int
    group: int
    offset: int
    stride: int
    bytes: int


def groups_of(config: Any) -> list[Group]:
    """Read vLLM's KVCacheConfig; raises UnsupportedError naming the spec that cannot be served."""
    groups = []
    for index, group in enumerate(config.kv_cache_groups):
        specs = list(_specs(group.kv_cache_spec))
        for spec in specs:
            _refuse(index, spec, group)
        windows = {getattr(spec, "sliding_window", None) for spec in specs}
        # A full-attention spec with a window needs it only where the model looks back no further.
        whole = any(_is_full(spec) for spec in specs) or len(windows) != 1
        groups.append(Group(tuple(group.layer_names), specs[0].block_size, None if whole else windows.pop()))
    if not groups:
        raise UnsupportedError("the model has no KV cache groups: there is nothing to transfer")
    sizes = sorted({group.block_tokens for group in groups})
    if len(sizes) > 1:
        names = ", ".join(sorted({type(s).__name__ for g in config.kv_cache_groups for s in _specs(g.kv_cache_spec)}))
        raise UnsupportedError(f"KV cache groups with blocks of {sizes} tokens ({names}): kvport needs one size for all")
    return groups


def full_attention(config: Any) -> bool:
    """Say whether there is one group, all of whose layers look at all that was before."""
    groups = config.kv_cache_groups
    return len(groups) == 1 and all(_is_full(spec) for spec in _specs(groups[0].kv_cache_spec))


def _specs(spec: Any) -> Iterator[Any]:
    inner = getattr(spec, "kv_cache_specs", None)
    if isinstance(inner, dict):
        yield from inner.values()
    else:
        yield spec


def _is_full(spec: Any) -> bool:
    return any(base.__name__ == "FullAttentionSpec" for base in type(spec).__mro__)


def _refuse(index: int, spec: Any, group: Any) -> None:
    names = {base.__name__ for base in type(spec).__mro__}
    name = type(spec).__name__
    if "AttentionSpec" not in names:
        raise UnsupportedError(f"KV cache group {index} is a {name}: kvport serves paged attention only")
    if names & {"CrossAttentionSpec", "EncoderOnlyAttentionSpec", "CircularBufferSpec", "ChunkedLocalAttentionSpec"}:
        raise UnsupportedError(f"KV cache group {index} is a {name}, which kvport does not serve")
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        raise UnsupportedError(f"KV cache group {index} ({name}) lives outside the device's block pool")


def dense(view: View, blocks: int) -> Iterator[tuple[int, int, int]]:
    """Give each dense piece of a block: its first byte's address in block 0, stride of blocks, length."""
    if not view.shape or view.shape[0] % blocks:
        raise UnsupportedError(f"a KV cache tensor of shape {list(view.shape)} has no dimension of {blocks} blocks first")
    ratio = view.shape[0] // blocks
    stride = view.strides[0] * ratio
    dims = [(ratio, view.strides[0]), *zip(view.shape[1:], view.strides[1:], strict=True)]
    dims = sorted(((n, s) for n, s in dims if n > 1), key=lambda d: d[1])
    length = view.item
    while dims and dims[0][1] == length:
        length *= dims.pop(0)[0]
    if dims and dims[0][1] < length:
        raise UnsupportedError(f"a KV cache tensor of shape {list(view.shape)} overlaps itself")
    offsets = [0]
    for n, s in dims:
        offsets = [base + i * s for base in offsets for i in range(n)]
    for offset in offsets:
        yield view.address + offset, stride, length


def segments_of(groups: Sequence[Group], views: dict[str, View], blocks: int, offset_of: Any) -> list[Segment]:
    """Lay out all layers; offset_of turns an address into an offset in the region.

    Layers that share a tensor are one: what is there once is moved once.
    """
    segments: list[Segment] = []
    layer = 0
    for index, group in enumerate(groups):
        seen: set[int] = set()
        for name in group.layers:
            view = views.get(name)
            if view is None:
                raise UnsupportedError(f"layer {name} of KV cache group {index} has no tensor")
            if view.address not in seen:
                seen.add(view.address)
                for address, stride, length in dense(view, blocks):
                    segments.append(Segment(layer, index, offset_of(address), stride, length))
            layer += 1
    if len(segments) > MAX_SEGMENTS:
        raise UnsupportedError(f"a cache in {len(segments)} pieces for each block, at most {MAX_SEGMENTS} are served")
    return segments


def layer_numbers(groups: Sequence[Group], views: dict[str, View]) -> dict[str, int]:
    """Give the number that the segments of each layer have; layers of a group that share a tensor have one."""
    numbers: dict[str, int] = {}
    layer = 0
    for group in groups:
        first: dict[int, int] = {}
        for name in group.layers:
            numbers[name] = first.setdefault(views[name].address, layer)
            layer += 1
    return numbers


def digest_room(size: int, segments: Sequence[Segment], blocks: int) -> int:
    """Give the size of a region whose first size bytes are the cache, with room for the host's digests."""
    for group in sorted({s.group for s in segments}):
        each = (1 + sum(1 for s in segments if s.group == group)) * DIGEST_BYTES
        size = -(-size // ALIGN) * ALIGN + blocks * each
    return size + ALIGN


def to_message(name: str, groups: Sequence[Group], segments: Sequence[Segment], blocks: int) -> Any:
    """Make the protocol's Layout."""
    layout = message("Layout")(name=name, blocks=blocks)
    for group in groups:
        if group.window is None:
            layout.groups.add(block_tokens=group.block_tokens, policy=POLICY_ALL)
        else:
            layout.groups.add(block_tokens=group.block_tokens, policy=POLICY_TRAILING, trailing=group.trailing)
    for s in segments:
        layout.segments.add(layer=s.layer, group=s.group, region=0, offset=s.offset, block_stride=s.stride, bytes=s.bytes)
    return layout
