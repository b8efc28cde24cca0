"""What all libraries share: a kernel that lowers tiles to library calls and merges their blocks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from ...plan.tiles import Tile
from ..base import BLOCK, FIRST, LAST, Call, Grads, Saved, State
from ..device_cache import DeviceCache, to_device
from ..merge import merge_rows
from .lowering import LibraryCall, in_order, lower

MLA = (192, 128)  # headdim and headdim_v of multi-head latent attention


@dataclass(frozen=True, slots=True)
class Block:
    """What a library is told of a call, besides the tensors.

    Attributes:
        window: keys seen left and right of the diagonal that ends in the last corner; −1: all.
        cu_seqlens_q, cu_seqlens_k: (blocks + 1,) int32 on the device; None for a single block.
        max_seqlen_q, max_seqlen_k: rows of the longest block, or more.
        gaps: some rows are in no block, so that cu_seqlens name blocks of queries or keys alone.
    """

    window: tuple[int, int]
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    gaps: bool = False

    @property
    def causal(self) -> bool:
        """Everything up to the diagonal."""
        return self.window == (-1, 0)

    def packed(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """As libraries want them: without a batch dimension where there are cu_seqlens."""
        return tensors if self.cu_seqlens_q is None else tuple(tensor[0] for tensor in tensors)

    def unpacked(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The way back."""
        return tensors if self.cu_seqlens_q is None else tuple(tensor[None] for tensor in tensors)

    def for_gradients(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Where gradients of these go; 0 where there are rows that the library may skip."""
        make = torch.zeros if self.gaps else torch.empty
        return tuple(make(x.shape, dtype=x.dtype, device=x.device) for x in tensors)


class Library(Protocol):
    """A library of attention kernels.

    Tensors are (batch, rows, nheads, headdim), with batch 1 where there are cu_seqlens; rows that
    only one of the two sides has come out as they please, gradients of them as 0.
    """

    name: str
    packs: bool  # takes several blocks at once
    square: bool  # its causal form wants as many keys as queries

    def why_not(self, call: Call) -> list[str]:
        """Every reason why it cannot do this call; empty if it can."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, call: Call
    ) -> tuple[Tensor, Tensor]:
        """out, like q, and lse (batch, nheads, rows)."""
        ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
        call: Call,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv in the dtype of q, from out and lse of the whole softmax."""
        ...


class LibraryKernel:
    """A library as a `BlockKernel`.

    Attributes:
        name: that of the library.
        library: it itself.
    """

    blocks = True

    def __init__(self, library: Library) -> None:
        self.name, self.library = library.name, library
        self._launches: DeviceCache[Launch] = DeviceCache()

    def why_not(self, call: Call) -> list[str]:
        """Every reason why it cannot do this call; empty if it can."""
        return self.library.why_not(call)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], state: State, call: Call
    ) -> None:
        """Advance `state` by the keys of `tiles`."""
        launch = self._launch(tiles, q)
        q, k, v = map(_side_by_side, (q, launch.gathered(k), launch.gathered(v)))
        for lowered, block in launch.calls:
            rows, columns = slice(*lowered.query_rows), slice(*lowered.key_rows)
            out, lse = self.library.forward(q[:, rows], k[:, columns], v[:, columns], block, call)
            merge_rows(state, out, lse, rows.start, lowered.rows, call.sink)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Sequence[Tile],
        saved: Saved,
        grads: Grads,
        call: Call,
    ) -> None:
        """Add the gradients that `tiles` contribute to `grads`."""
        launch = self._launch(tiles, q)
        k, v = launch.gathered(k), launch.gathered(v)
        dout, q, k, v = map(_side_by_side, (dout, q, k, v))
        single = launch.calls[0][0] if len(launch.calls) == 1 else None
        writes_q = grads.fresh_q and single is not None and single.query_rows == (0, q.shape[1])
        writes_k = grads.fresh_k and single is not None and single.key_rows == (0, k.shape[1])
        if grads.fresh_q and not writes_q:
            grads.dq.zero_()
        if grads.fresh_k and not writes_k:
            grads.dk.zero_()
            grads.dv.zero_()
        for lowered, block in launch.calls:
            dq, dk, dv = self._gradients(dout, q, k, v, saved, lowered, block, call)
            columns = slice(*lowered.key_rows)
            if writes_q:
                grads.dq.copy_(dq)
            else:
                grads.dq[:, slice(*lowered.query_rows)] += dq
            for into, grad in ((grads.dk, dk), (grads.dv, dv)):
                if writes_k:
                    launch.put(into, grad)
                else:
                    launch.add(into, grad, columns)

    def alone(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], call: Call
    ) -> tuple[Tensor, Tensor] | None:
        """(out, lse) of a whole call on one device if there is nothing to merge, else None."""
        launch = self._launch(tiles, q)
        if not launch.is_single or not _is_whole(launch.calls[0][0], q.shape[1]):
            return None
        lowered, block = launch.calls[0]
        columns = slice(*lowered.key_rows)
        q, k, v = map(_side_by_side, (q, k, v))
        out, lse = self.library.forward(q, k[:, columns], v[:, columns], block, call)
        return out.contiguous(), lse

    def alone_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Sequence[Tile],
        saved: Saved,
        call: Call,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """(dq, dk, dv) likewise, if there is nothing to add up."""
        launch = self._launch(tiles, q)
        if not launch.is_single:
            return None
        lowered, block = launch.calls[0]
        if lowered.query_rows != (0, q.shape[1]) or lowered.key_rows != (0, k.shape[1]):
            return None
        dout, q, k, v = map(_side_by_side, (dout, q, k, v))
        return self._gradients(dout, q, k, v, saved, lowered, block, call)

    def _gradients(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        saved: Saved,
        lowered: LibraryCall,
        block: Block,
        call: Call,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert saved.out is not None, "the kernel asks for it"
        rows, columns = slice(*lowered.query_rows), slice(*lowered.key_rows)
        dout, q, out = (x[:, rows] for x in (dout, q, saved.out))
        k, v = k[:, columns], v[:, columns]
        lse = saved.lse[:, :, rows].contiguous()
        return self.library.backward(dout, q, k, v, out, lse, block, call)

    def block_of(self, call: LibraryCall, device: torch.device) -> Block:
        """What the library is told of a call; made once for a launch of a plan."""
        return _block(call, device)

    def _launch(self, tiles: Sequence[Tile], q: Tensor) -> Launch:
        """The calls of a launch; plans hand out the same tiles each time."""
        # The packed form has no batch: its rows would have to lie behind each other.
        form = self.library.packs and q.shape[0] == 1, self.library.square

        def make() -> Launch:
            calls, rows = lower(tiles, *form), None
            ordered, wanted = in_order(tiles)
            better = lower(ordered, *form)
            if len(better) < len(calls):  # a copy of the keys costs less than a block more to merge
                calls, rows = better, _index(wanted, q.device)
            return Launch([(call, self.block_of(call, q.device)) for call in calls], rows)

        return self._launches.get(tiles, q.device, form, make)


@dataclass(frozen=True, slots=True)
class Launch:
    """The calls of a launch.

    Attributes:
        calls: what the library is asked for.
        rows: which rows of the keys these speak of, one after the other; None: all as they are.
    """

    calls: list[tuple[LibraryCall, Block]]
    rows: Tensor | None

    @property
    def is_single(self) -> bool:
        """One call, on tensors as they are."""
        return len(self.calls) == 1 and self.rows is None

    def gathered(self, x: Tensor) -> Tensor:
        """Keys or values, as the calls want them."""
        return x if self.rows is None else x.index_select(1, self.rows)

    def put(self, into: Tensor, grad: Tensor) -> None:
        """Write the gradient of all of these rows, which are all that there are."""
        if self.rows is None:
            into.copy_(grad)
        else:
            into.index_copy_(1, self.rows, grad.to(into.dtype))

    def add(self, into: Tensor, grad: Tensor, columns: slice) -> None:
        """Add the gradient of some of these rows."""
        if self.rows is None:
            into[:, columns] += grad
        else:
            into.index_add_(1, self.rows[columns], grad.to(into.dtype))


def _index(rows: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    return to_device(
        torch.cat([torch.arange(start, end, device="cpu") for start, end in rows]), device
    )


def _side_by_side(x: Tensor) -> Tensor:
    """Libraries want the numbers of a row next to each other; other strides are as they please."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _is_whole(call: LibraryCall, length: int) -> bool:
    """Whether a call's result is the final one for all rows."""
    (first, *more) = call.rows
    return not more and (first.start, first.end, first.bits) == (0, length, FIRST | LAST | BLOCK)


def _block(call: LibraryCall, device: torch.device) -> Block:
    longest_q = max(rect.q_end - rect.q for rect in call.rects)
    longest_k = max(rect.k_end - rect.k for rect in call.rects)
    if len(call.rects) == 1:
        return Block(call.window, None, None, longest_q, longest_k)
    cu_q, cu_k = _offsets(call)
    cu_seqlens_q, cu_seqlens_k = (
        to_device(torch.tensor(offsets, dtype=torch.int32, device="cpu"), device)
        for offsets in (cu_q, cu_k)
    )
    longest_q, longest_k = (max(b - a for a, b in pairwise(offsets)) for offsets in (cu_q, cu_k))
    gaps = any(a == b for offsets in (cu_q, cu_k) for a, b in pairwise(offsets))
    # FlashAttention-2 takes 1 to mean that every block has one query; here some may have none.
    return Block(call.window, cu_seqlens_q, cu_seqlens_k, max(longest_q, 2), longest_k, gaps)


def _offsets(call: LibraryCall) -> tuple[list[int], list[int]]:
    """cu_seqlens; what lies between two blocks becomes one of queries or of keys alone."""
    (q, _), (k, _) = call.query_rows, call.key_rows
    cu_q, cu_k = [0], [0]
    for rect in call.rects:
        for start_q, start_k in ((rect.q - q, cu_k[-1]), (rect.q - q, rect.k - k)):
            if (start_q, start_k) != (cu_q[-1], cu_k[-1]):
                cu_q.append(start_q)
                cu_k.append(start_k)
        cu_q.append(rect.q_end - q)
        cu_k.append(rect.k_end - k)
    return cu_q, cu_k


def require(function: Any, arguments: Sequence[str], version: str) -> None:
    """ImportError if a library's function does not take all of these arguments."""
    found = inspect.signature(getattr(function, "_init_fn", function)).parameters
    missing = [name for name in arguments if name not in found]
    if missing:
        name = f"{function.__module__}.{getattr(function, '__name__', function)}"
        raise ImportError(f"{name} has no {', '.join(missing)}: it is not that of {version}")


def reasons(
    call: Call,
    softcap: bool = False,
    window: bool = True,
    deterministic: bool = False,
    widths: Sequence[tuple[int, int]] = (),
) -> list[str]:
    """Why a library of half-precision kernels for NVIDIA GPUs cannot do a call.

    Args:
        call: the call.
        softcap: whether it has a softcap.
        window: whether it has sliding windows.
        deterministic: whether its gradients can be made to repeat.
        widths: headdim and headdim_v that it has where they differ.
    """
    found = []
    if call.device.type != "cuda" or torch.version.hip is not None:
        found.append(f"it needs an NVIDIA GPU, not {call.device}")
    elif torch.cuda.get_device_capability(call.device)[0] < 8:
        found.append("it needs an Ampere GPU or a later one")
    if call.dtype not in (torch.float16, torch.bfloat16):
        found.append(f"it computes in fp16 and bf16, not {call.dtype}")
    dims = call.headdim, call.headdim_v
    if dims[0] != dims[1] and dims not in widths:
        found.append(f"headdim {call.headdim} of q and k differs from {call.headdim_v} of v")
    if call.headdim % 8 or call.headdim > 256:
        found.append(f"headdim {call.headdim} is not a multiple of 8 up to 256")
    if call.softcap and not softcap:
        found.append("it has no softcap")
    if not window and (call.mask.left is not None or call.mask.right not in (None, 0)):
        found.append("it has no sliding windows")
    if call.alibi_slopes is not None:
        found.append("its ALiBi counts from the end of a block, not from the token's position")
    if call.dropout_p:
        found.append("its dropout draws other entries than ours, and others for each rank")
    if call.deterministic and not deterministic:
        found.append("its gradients do not repeat bit by bit")
    return found
