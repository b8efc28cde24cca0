"""Launching: arguments that are worked out once and kept, as in `../launches.py`.

The compiled function takes addresses and numbers alone, makes the TMA descriptors itself (some
100 ns each) and launches; so a call that was made before costs the host the addresses.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...cache import Cache
from ...plan.tiles import Tile
from ..base import Call, State
from ..device_cache import DeviceCache, on_device, stream_handle
from ..dropout import threshold
from ..scheduler import counter, duration, free_processors, section
from ..tables import Table, launch_size, table
from ..tma import fit, tma_strides
from .sizes import SHARED, WIDTHS, ForwardSizes, forward_sizes, padded, width_of

if TYPE_CHECKING:  # it needs CuTe DSL
    from .traits import Traits

VARIABLE = "RFA_CUTE"
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_KEPT = 512  # launches
_ROWS = 64  # of a consumer
_RELEASE = "4.8"  # of nvidia-cutlass-dsl; others have other names
_INSTALL = '`pip install "ring-flash-attn[cute]"`'


def why_not(call: Call) -> list[str]:
    """Every reason why it cannot do a call."""
    found = list(_unavailable(call.device))
    if call.dtype not in _DTYPES:
        found.append(f"dtype {call.dtype} is not fp16 or bf16")
    if call.softmax_scale <= 0:
        found.append(f"softmax_scale {call.softmax_scale} is not positive")
    if call.slopes_by_document:
        found.append("its ALiBi has the same slopes in all documents")
    d, dv = call.headdim, call.headdim_v
    if d % 8 or dv % 8:
        found.append(f"head dimensions {d} and {dv} are not multiples of 8")
    elif max(d, dv) > WIDTHS[-1] or padded(dv) > padded(d):
        found.append(f"head dimensions {d} and {dv} are not ones that it has blocks for")
    return found


@cache
def _unavailable(device: torch.device) -> tuple[str, ...]:
    value = os.environ.get(VARIABLE, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, not {value!r}")
    if value == "0":
        return (f"it is off: {VARIABLE}=0 is set",)
    if device.type != "cuda" or torch.version.hip is not None:
        return (f"it needs a Hopper GPU, not {device}",)
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return (f"it needs compute capability 9.0, not {capability[0]}.{capability[1]}",)
    return tuple(_missing())


def _missing() -> Iterator[str]:
    """What has to be installed; a module `cutlass` alone may be another package's."""
    try:
        found = version("nvidia-cutlass-dsl")
    except PackageNotFoundError:
        found = ""
    if not found or importlib.util.find_spec("cutlass") is None:
        yield f"nvidia-cutlass-dsl is not installed: {_INSTALL}"
    elif not found.startswith(f"{_RELEASE}."):
        yield f"nvidia-cutlass-dsl is {found}, and it needs {_RELEASE}: {_INSTALL}"
    if importlib.util.find_spec("tvm_ffi") is None:
        yield f"apache-tvm-ffi is not installed: {_INSTALL}"


@dataclass(frozen=True, slots=True)
class _CompiledLaunch:
    """A launch that was made before.

    Attributes:
        run: launches the compiled kernel.
        numbers: arguments behind the tensors' addresses, without the stream.
        work: kept alive: the cache goes by its identity, and `numbers` has its addresses.
    """

    run: Callable[..., None]
    numbers: tuple[Any, ...]
    work: Table

    def again(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """With other tensors of the same shapes and strides."""
        addresses = [x.data_ptr() for x in tensors]
        with on_device(device):
            self.run(*addresses, *self.numbers, stream_handle(device))


_launches: Cache[tuple[object, ...], _CompiledLaunch] = Cache(_KEPT)
_sizes: DeviceCache[ForwardSizes] = DeviceCache()


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Sequence[Tile],
    state: State,
    call: Call,
    sizes: ForwardSizes | None = None,
) -> None:
    """Advance `state` by the keys of `tiles`, in one launch; `sizes` is for measurements."""
    out, result = state.out, state.out if state.result is None else state.result
    single = out.dtype is not torch.float32  # nothing is carried: out is not touched
    if single:
        out = state.lse  # stands in for it
    if sizes is None:
        sizes = sizes_of(tiles, call, q)
    work = table(tiles, sizes.consumers * _ROWS, sizes.block, False, q.device)
    slopes, seed = call.alibi_slopes, call.seed
    given = result
    if result is not out:
        result = fit(result)
    tensors = [
        fit(q),
        fit(k),
        fit(v),
        out,
        state.lse,
        result,
        work.blocks if slopes is None else slopes.float().contiguous(),  # never read where it
        work.blocks if seed is None else seed,  # stands in for what is not there
        counter(q.device),
    ]
    key = (
        id(work),
        sizes,
        call.key,
        result is out,
        *[(x.shape, x.stride(), x.dtype) for x in tensors[:6]],
    )
    launch = _launches.get(key)
    if launch is None:
        traits = traits_of(work, call, sizes, single, result is out)
        launch = _launches.add(key, _first(tensors, work, call, traits))
    launch.again(tensors, q.device)
    if result is not out and result is not given:
        given.copy_(result)


def sizes_of(tiles: Sequence[Tile], call: Call, q: Tensor) -> ForwardSizes:
    """How a launch is cut up: so that it takes the least time."""
    known = candidates(call)
    if len(known) == 1:
        return known[0][0]
    pairs = q.shape[0] * call.nheads
    wanted = call.headdim, call.headdim_v, pairs
    return _sizes.get(tiles, q.device, wanted, lambda: _fastest(known, tiles, pairs, q.device))


def candidates(call: Call) -> tuple[tuple[ForwardSizes, float], ...]:
    """How its launches may be cut up, and what a query and a key cost then."""
    d, dv = padded(call.headdim), padded(call.headdim_v)
    return forward_sizes(d, dv, call.dropout_p > 0, call.alibi_slopes is not None)


def _fastest(
    known: Sequence[tuple[ForwardSizes, float]],
    tiles: Sequence[Tile],
    pairs: int,
    device: torch.device,
) -> ForwardSizes:
    def time(choice: tuple[ForwardSizes, float]) -> float:
        sizes, cost = choice
        size = launch_size(tiles, sizes.consumers * _ROWS, sizes.block)
        return cost * duration(size, pairs, device)

    return min(known, key=time)[0]


def traits_of(work: Table, call: Call, sizes: ForwardSizes, single: bool, in_state: bool) -> Traits:
    """What the kernel of a launch is compiled for.

    Args:
        work: the launch's table.
        call: the call.
        sizes: how it is cut up.
        single: it is the only launch.
        in_state: the output stays in fp32, with the state.
    """
    from .traits import Traits

    d, dv = padded(call.headdim), padded(call.headdim_v)
    traits = Traits(
        dtype=_DTYPES[call.dtype],
        d=d,
        dv=dv,
        width=width_of(d),
        **sizes._asdict(),
        even=dv == call.headdim_v,
        window=work.windowed,
        softcap=call.softcap > 0,
        alibi=call.alibi_slopes is not None,
        dropout=call.dropout_p > 0,
        sink=call.sink,
        result=not in_state,
        single=single,
        short=work.short,
    )
    assert traits.shared <= SHARED, traits
    return traits


def _first(tensors: Sequence[Tensor], work: Table, call: Call, traits: Traits) -> _CompiledLaunch:
    """Compile or load the kernel, and work out its arguments."""
    from .compiled import forward_kernel

    q, k, v, out, lse, result = tensors[:6]
    batch, pairs = q.shape[0], q.shape[0] * call.nheads
    count = len(work.blocks)
    dropped = threshold(call.dropout_p)
    numbers = (
        work.blocks.data_ptr(),
        work.tiles.data_ptr(),
        batch,
        q.shape[1],
        k.shape[1],
        call.nheads,
        call.nheads_k,
        call.headdim,
        call.headdim_v,
        count,
        section(pairs, call.nheads, work, call),
        min(count * pairs, free_processors(call.device)),
        call.slopes_stride,
        *(number for x in (q, k, v) for number in tma_strides(x)),
        *(number for x in (out, lse, result) for number in _strides(x)),
        float(call.softmax_scale),
        float(call.softcap or 1.0),
        dropped - (1 << 32) if dropped >= 1 << 31 else dropped,
        1 / (1 - call.dropout_p),
        call.head_start,
    )
    return _CompiledLaunch(forward_kernel(traits), numbers, work)


def _strides(x: Tensor) -> tuple[int, int, int]:
    """(batch, row, head), of (batch, row, head, d) or, for lse, (batch, head, row)."""
    if x.dim() == 3:
        return x.stride(0), x.stride(2), x.stride(1)
    return x.stride(0), x.stride(1), x.stride(2)
