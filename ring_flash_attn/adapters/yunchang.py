"""What users of yunchang (long-context-attention) import, on this library's routes.

`set_seq_parallel_pg` makes the groups; `LongContextAttention` is route "mesh" (USP) and
`UlyssesAttention` route "all_to_all". Heads need not divide by anything. Shards are those of
`EXTRACT_FUNC_DICT`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from typing import Any

from torch import Tensor, nn

from ..api import (
    ring_attention,
    ring_flash_attn_qkvpacked_func,
    stripe_flash_attn_qkvpacked_func,
    zigzag_ring_flash_attn_qkvpacked_func,
)
from ..api.sharding import shard
from ..comm import Group, rank_and_size
from ..comm.nodes import NodeGroups, make_node_groups
from ..engine.checks import check_flag, check_integer, unpack
from ..plan.layout import SplitLayout, get_layout, remember_layout

__all__ = [
    "EXTRACT_FUNC_DICT",
    "PROCESS_GROUP",
    "RING_IMPL_QKVPACKED_DICT",
    "AttnType",
    "LongContextAttention",
    "LongContextAttentionQKVPacked",
    "UlyssesAttention",
    "basic_extract_local",
    "set_seq_parallel_pg",
    "stripe_extract_local",
    "zigzag_extract_local",
]


class AttnType(Enum):
    """Who does the arithmetic, by yunchang's names."""

    AITER = "aiter"
    FA = "fa"
    FA3 = "fa3"
    FLASHINFER = "flashinfer"
    TORCH_MATH = "torch_math"
    TORCH_FLASH = "torch_flash"
    TORCH_EFFICIENT = "torch_efficient"
    TORCH_CUDNN = "torch_cudnn"
    SAGE_AUTO = "sage_auto"
    SAGE_FP16 = "sage_fp16"
    SAGE_FP16_TRITON = "sage_fp16_triton"
    SAGE_FP8 = "sage_fp8"
    SAGE_FP8_SM90 = "sage_fp8_sm90"
    SPARSE_SAGE = "sparse_sage"
    NPU = "npu"

    @classmethod
    def from_string(cls, s: str) -> AttnType:
        return cls(s)


# FlashAttention has many implementations; the others name one.
_KERNELS = {
    AttnType.FA: "auto",
    AttnType.FA3: "fa3",
    AttnType.TORCH_MATH: "reference",
    AttnType.TORCH_FLASH: "fa2",
    AttnType.TORCH_CUDNN: "cudnn",
}
_LAYOUTS = {  # by ring_impl_type: who holds what, node by node
    "basic": "contiguous",
    "basic_pytorch": "contiguous",
    "zigzag": "zigzag",
    "strip": "stripe",
}


class _ProcessGroups:
    """What `set_seq_parallel_pg` has made."""

    ULYSSES_PG: Group | None = None
    RING_PG: Group | None = None
    SP_PG: Group | None = None  # both together

    def set(self, groups: NodeGroups) -> None:
        self.ULYSSES_PG, self.RING_PG = groups.node, groups.across
        self.SP_PG = groups.everybody


PROCESS_GROUP = _ProcessGroups()


def set_seq_parallel_pg(
    sp_ulysses_degree: int,
    sp_ring_degree: int,
    rank: int,
    world_size: int,
    use_ulysses_low: bool = True,
) -> None:
    """Make the groups of sequence parallelism; all ranks of the default group call it.

    Args:
        sp_ulysses_degree: ranks that exchange heads, next to each other.
        sp_ring_degree: how many of these there are to a sequence.
        rank, world_size: of the default group.
        use_ulysses_low: must be true.
    """
    ours = rank_and_size(None)
    if (rank, world_size) != ours:
        raise ValueError(
            f"rank = {rank} of world_size = {world_size}: in the default group this is rank "
            f"{ours[0]} of {ours[1]}"
        )
    if not check_flag("use_ulysses_low", use_ulysses_low):
        raise NotImplementedError(
            "use_ulysses_low=False: ranks that exchange heads are next to each other in the group"
        )
    degrees = [
        check_integer(name, value, 1)
        for name, value in (
            ("sp_ulysses_degree", sp_ulysses_degree),
            ("sp_ring_degree", sp_ring_degree),
        )
    ]
    PROCESS_GROUP.set(make_node_groups(*degrees))


@functools.cache
def _layout(ring_impl_type: str, ranks_per_node: int) -> SplitLayout:
    """A layout of nodes, of which each rank holds a contiguous part of what its node holds."""
    if ring_impl_type not in _LAYOUTS:
        raise ValueError(
            f"ring_impl_type {ring_impl_type!r}: choose one of {', '.join(_LAYOUTS)}; kernels of "
            "others are chosen by attn_type"
        )
    base = get_layout(_LAYOUTS[ring_impl_type])
    assert isinstance(base, SplitLayout)

    def split(length: int, rank: int, world_size: int) -> list[range]:
        node, place = divmod(rank, ranks_per_node)
        pieces = base.split(length, node, world_size // ranks_per_node)
        total = sum(map(len, pieces))
        first, last = (total * n // ranks_per_node for n in (place, place + 1))
        found, before = [], 0
        for piece in pieces:
            found.append(piece[max(0, first - before) : max(0, last - before)])
            before += len(piece)
        return [piece for piece in found if piece]

    found = SplitLayout(f"{base.name} over nodes of {ranks_per_node}", split)
    remember_layout(found)  # torch.compile finds it by its name
    return found


def _extract(
    kind: str, value: Tensor, rank: int, world_size: int, rd: int, ud: int, dim: int
) -> Tensor:
    if rd * ud != world_size:
        raise ValueError(f"rd = {rd} times ud = {ud} must be world_size = {world_size}")
    return shard(value, _layout(kind, ud), rank=rank, world_size=world_size, dim=dim)


def basic_extract_local(
    value: Tensor, rank: int, world_size: int, rd: int = 1, ud: int | None = None, dim: int = 1
) -> Tensor:
    """A rank's tokens of (batch, seqlen, …): consecutive ones. Without a gradient."""
    return shard(value, "contiguous", rank=rank, world_size=world_size, dim=dim).detach()


def zigzag_extract_local(
    value: Tensor, rank: int, world_size: int, rd: int, ud: int, dim: int = 1
) -> Tensor:
    """Zigzag over the ring's `rd` ranks, each part cut for the `ud` ranks that exchange heads."""
    return _extract("zigzag", value, rank, world_size, rd, ud, dim)


def stripe_extract_local(
    value: Tensor, rank: int, world_size: int, rd: int, ud: int, dim: int = 1
) -> Tensor:
    """Every `rd`-th token, cut for the `ud` ranks that exchange heads."""
    return _extract("strip", value, rank, world_size, rd, ud, dim)


EXTRACT_FUNC_DICT: dict[str, Callable[..., Tensor]] = {
    "basic": basic_extract_local,
    "strip": stripe_extract_local,
    "zigzag": zigzag_extract_local,
    "basic_pytorch": basic_extract_local,
}
RING_IMPL_QKVPACKED_DICT = {
    "basic": ring_flash_attn_qkvpacked_func,
    "zigzag": zigzag_ring_flash_attn_qkvpacked_func,
    "strip": stripe_flash_attn_qkvpacked_func,
}


class _AttentionModule(nn.Module):
    """What the modules share: arguments that are honoured or refused, and the call."""

    def __init__(
        self,
        scatter_idx: int,
        gather_idx: int,
        heads: int,
        use_sync: bool,
        attn_type: AttnType,
        attn_processor: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if (scatter_idx, gather_idx) != (heads, 1):
            raise ValueError(
                f"scatter_idx = {scatter_idx}, gather_idx = {gather_idx}: heads are dimension "
                f"{heads}, tokens dimension 1"
            )
        check_flag("use_sync", use_sync)  # messages are awaited where they are needed, either way
        if attn_type not in _KERNELS:
            names = ", ".join(f"AttnType.{each.name}" for each in _KERNELS)
            raise NotImplementedError(f"attn_type = {attn_type}: choose one of {names}")
        if attn_processor is not None:
            raise NotImplementedError(
                "attn_processor: it is for sparse SageAttention, and attention here is exact"
            )
        self.attn_type = attn_type
        self._kernel = _KERNELS[attn_type]

    def _where(self) -> dict[str, Any]:
        """Layout, route and group."""
        raise NotImplementedError

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        *args: Any,
    ) -> Tensor:
        """(batch, seqlen, nheads, headdim) of this rank → out, and out alone, whatever is asked."""
        if args:
            raise TypeError(f"{len(args)} more arguments than the module takes")
        out = ring_attention(
            query,
            key,
            value,
            kernel=self._kernel,
            dropout_p=dropout_p,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            deterministic=deterministic,
            return_attn_probs=return_attn_probs,
            **self._where(),
        )
        return out if isinstance(out, Tensor) else out[0]


class _OverMesh(_AttentionModule):
    """Over the groups of `set_seq_parallel_pg`, as they are when the module is made."""

    def __init__(self, ring_impl_type: str, *args: Any) -> None:
        super().__init__(*args)
        self.ulysses_pg, self.ring_pg = PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG
        self._group = PROCESS_GROUP.SP_PG
        if self._group is None:
            raise ValueError("there are no groups yet: call set_seq_parallel_pg first")
        _, self._ranks_per_node = rank_and_size(self.ulysses_pg)
        self._layout = _layout(ring_impl_type, self._ranks_per_node)

    def _where(self) -> dict[str, Any]:
        nodes = {"group": self._group, "ranks_per_node": self._ranks_per_node}
        return {"layout": self._layout, "route": "mesh", **nodes}


class LongContextAttention(_OverMesh):
    """Attention over ranks that exchange heads and pass keys on: USP.

    Args:
        scatter_idx, gather_idx: dimensions of heads and tokens, 2 and 1.
        ring_impl_type: who holds what, as in `EXTRACT_FUNC_DICT`: "basic", "zigzag" or "strip".
        use_pack_qkv, use_sync: make no difference; k and v are one message anyway.
        attn_type: FA (any kernel), FA3, TORCH_MATH, TORCH_FLASH or TORCH_CUDNN.
        attn_processor: must be None.
    """

    def __init__(
        self,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_pack_qkv: bool = False,
        use_sync: bool = False,
        attn_type: AttnType = AttnType.FA,
        attn_processor: nn.Module | None = None,
    ) -> None:
        check_flag("use_pack_qkv", use_pack_qkv)
        where = (scatter_idx, gather_idx, 2)
        super().__init__(ring_impl_type, *where, use_sync, attn_type, attn_processor)

    forward = _AttentionModule._attend


class LongContextAttentionQKVPacked(_OverMesh):
    """The same for packed qkv, (batch, seqlen, 3, nheads, headdim)."""

    def __init__(
        self,
        scatter_idx: int = 3,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_sync: bool = False,
        attn_type: AttnType = AttnType.FA,
    ) -> None:
        super().__init__(ring_impl_type, scatter_idx, gather_idx, 3, use_sync, attn_type)

    def forward(self, qkv: Tensor, *args: Any, **options: Any) -> Tensor:
        """Of this rank → out; arguments after qkv as in `LongContextAttention`."""
        q, k, v = unpack(qkv, "qkv", False)
        return self._attend(q, k, v, *args, **options)


class UlyssesAttention(_AttentionModule):
    """Attention over ranks that exchange heads.

    Args:
        sequence_process_group: whose ranks hold consecutive tokens; the default group if None.
        scatter_idx, gather_idx, use_sync, attn_type: as in `LongContextAttention`.
    """

    def __init__(
        self,
        sequence_process_group: Group | None = None,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        use_sync: bool = False,
        attn_type: AttnType = AttnType.FA,
    ) -> None:
        super().__init__(scatter_idx, gather_idx, 2, use_sync, attn_type)
        self.spg = sequence_process_group

    def _where(self) -> dict[str, Any]:
        return {"layout": "contiguous", "route": "all_to_all", "group": self.spg}

    forward = _AttentionModule._attend
