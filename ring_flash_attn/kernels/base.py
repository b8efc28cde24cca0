"""The kernel protocol, and the registry that says which kernel can do a call and why not."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

from ..plan.tiles import Mask, Tile
from . import costs

Made = TypeVar("Made")

if TYPE_CHECKING:  # the names of kernels are known before torch is imported
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Call:
    """Everything about a call that is the same in all of its steps.

    Attributes:
        device, dtype: of q, k and v.
        nheads, nheads_k: query and KV heads; nheads is a multiple of nheads_k.
        headdim, headdim_v: of q and k, and of v.
        softmax_scale: factor on the scores.
        mask: which keys a query sees (tiles have it worked in; here for `why_not`).
        softcap: scores become softcap · tanh(score / softcap); 0 means off.
        alibi_slopes: (nheads,), or (batch, nheads), of packed documents (documents, nheads), of
            which one row is for all; −slope · |query − key position| is added.
        dropout_p: probability that an entry of the softmax is dropped.
        seed: () int64 on `device`, the key of dropout's draws; None without dropout.
        sink: whether the state a tile marked `first` finds holds an attention sink.
        deterministic: the same input must give the same bits, gradients too.
        packed: there is more than one document.
        with_lse: the caller gets lse, and may differentiate through it.
        needs_grad: there may be a backward pass.
        head_start: number of the first query head here, among all query heads of the call.
        state_dtype: precision of state and gradient accumulators: fp32, for fp64 inputs fp64.
        key: everything but the mask and what is in the tensors; hashable.
    """

    device: torch.device
    dtype: torch.dtype
    nheads: int
    nheads_k: int
    headdim: int
    headdim_v: int
    softmax_scale: float
    mask: Mask
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None
    sink: bool = False
    deterministic: bool = False
    packed: bool = False
    with_lse: bool = False
    needs_grad: bool = False
    head_start: int = 0
    state_dtype: torch.dtype = field(init=False, compare=False, repr=False)
    key: tuple[object, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        import torch

        state_dtype = torch.float64 if self.dtype is torch.float64 else torch.float32
        object.__setattr__(self, "state_dtype", state_dtype)
        slopes = None if self.alibi_slopes is None else self.slopes_stride
        sizes = (self.nheads, self.nheads_k, self.headdim, self.headdim_v, self.head_start)
        numbers = (self.softmax_scale, self.softcap, self.dropout_p)
        key = self.device, self.dtype, sizes, numbers, slopes, self.seed is None, self.sink
        object.__setattr__(self, "key", key)

    @property
    def slopes_by_document(self) -> bool:
        """Whether packed documents may have slopes of their own."""
        return self.packed and self.alibi_slopes is not None and self.alibi_slopes.dim() == 2

    @property
    def slopes_stride(self) -> int:
        """From the slopes of a batch entry or document to those of the next; 0: all have the same.

        A batch has one document, number 0, and packed documents are one batch entry, number 0. So
        the sum of both numbers is the row of `alibi_slopes`.
        """
        slopes = self.alibi_slopes
        return 0 if slopes is None or slopes.dim() == 1 or len(slopes) == 1 else self.nheads

    def of_heads(self, first: int, last: int) -> Call:
        """The part of the call that concerns KV heads first … last."""
        if (first, last) == (0, self.nheads_k):
            return self
        group = self.nheads // self.nheads_k
        low, high = first * group, last * group
        return replace(
            self,
            nheads=high - low,
            nheads_k=last - first,
            alibi_slopes=None if self.alibi_slopes is None else self.alibi_slopes[..., low:high],
            head_start=self.head_start + low,
        )


@dataclass(frozen=True, slots=True)
class State:
    """What the forward pass carries from step to step, for all rows of a query shard.

    Attributes:
        out: (batch, seqlen_q, nheads, headdim_v), normalised so far; fp32 or fp64.
        lse: (batch, nheads, seqlen_q), natural logarithm; −inf where no key was seen. fp32 or fp64.
        result: like `out` in the user's dtype: rows of tiles marked `last` must be written here,
            and need not be in `out`. None where the output is not final here.
    """

    out: Tensor
    lse: Tensor
    result: Tensor | None = None


FIRST, LAST, BLOCK = 1, 2, 4  # bits of `Rows`


@dataclass(frozen=True, slots=True)
class Rows:
    """Query rows start … end, and what a block means to them.

    Attributes:
        start, end: which rows of the state.
        bits: FIRST: there is no state yet. LAST: the output is final after this. BLOCK: the block
            has these rows; without it they only have to be started or finished.
    """

    start: int
    end: int
    bits: int


@dataclass(frozen=True, slots=True)
class Saved:
    """What the backward pass knows of the forward pass, for all rows of a query shard.

    Attributes:
        lse: (batch, nheads, seqlen_q) of the whole softmax, over all steps.
        delta: (batch, nheads, seqlen_q), sum of dout · out, less the gradient of lse; empty where
            `out` is given.
        out: (batch, seqlen_q, nheads, headdim_v) in the user's dtype, for a kernel that computes
            delta itself: a `BlockKernel`, or a `DirectKernel` whose launch is the only one.
    """

    lse: Tensor
    delta: Tensor
    out: Tensor | None = None
    _memo: dict[object, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def remember(self, key: object, make: Callable[[], Made]) -> Made:
        """What `make` returns; made once for all launches that get this object."""
        if key not in self._memo:
            self._memo[key] = make()
        return cast(Made, self._memo[key])


@dataclass(frozen=True, slots=True)
class Grads:
    """Accumulators, shaped like q, k and v.

    Attributes:
        dq, dk, dv: fp32 or fp64; kernels add to them.
        fresh_q, fresh_k: for a `DirectKernel` or `BlockKernel`: dq, or dk and dv, hold nothing yet
            in the rows that tiles name, and 0 in others; these are written.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    fresh_q: bool = False
    fresh_k: bool = False


class Kernel(Protocol):
    """One implementation of a step.

    Tensors are (batch, seqlen, nheads, headdim) with any strides; tiles name rows of them. A row
    that no tile touches is left as it is. Never a NaN for a row that sees no key.
    """

    name: str

    def why_not(self, call: Call) -> list[str]:
        """Every reason why it cannot do this call; empty if it can."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], state: State, call: Call
    ) -> None:
        """Advance `state` by the keys of `tiles`."""
        ...

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
        ...


class DirectKernel(Kernel, Protocol):
    """A kernel that spares passes over memory: nothing is cleared before it or converted after it.

    Queries of tiles marked `first` have no state, whatever `State` holds of them (but lse, if
    `Call.sink`). If a launch is the only one, `State.out` and the gradients are in the user's
    dtype.
    """

    direct: bool  # true

    def delta(self, dout: Tensor, out: Tensor, call: Call) -> Tensor:
        """(batch, nheads, seqlen_q): the sum of dout · out, in the state's precision."""
        ...


def as_direct(kernel: Kernel) -> DirectKernel | None:
    """The kernel, if it is a direct one."""
    return cast(DirectKernel, kernel) if getattr(kernel, "direct", False) else None


class BlockKernel(Kernel, Protocol):
    """A kernel that returns blocks, which are merged; it cannot differentiate through lse.

    Like a `DirectKernel` it takes queries of tiles marked `first` as having no state. It wants
    `Saved.out` instead of `delta`.
    """

    blocks: bool  # true

    def alone(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], call: Call
    ) -> tuple[Tensor, Tensor] | None:
        """(out, lse) of a whole call on one device if there is nothing to merge, else None."""
        ...

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
        ...


def as_block(kernel: Kernel) -> BlockKernel | None:
    """The kernel, if it is one that returns blocks."""
    return cast(BlockKernel, kernel) if getattr(kernel, "blocks", False) else None


class Kernels(NamedTuple):
    """Those of a call: any backward pass can follow any forward pass, as all share (out, lse)."""

    forward: Kernel
    backward: Kernel

    @property
    def name(self) -> str:
        """Of one, or of both."""
        names = self.forward.name, self.backward.name
        return names[0] if names[0] == names[1] else " + ".join(names)


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel by name: `module` defines it as `KERNEL`; `hint` says how to get it."""

    module: str
    hint: str


_ENTRIES: dict[str, Entry] = {
    name: Entry(f"{__package__}.{module}", hint)
    for name, module, hint in (
        ("fa4", "native.fa4", "`pip install flash-attn-4`"),
        ("fa3", "native.fa3", "flash_attn_interface, built from FlashAttention's folder hopper"),
        ("cudnn", "native.cudnn", "comes with torch for NVIDIA GPUs"),
        ("flash_attn", "native.flash_attn2", "`pip install flash-attn --no-build-isolation`"),
        ("fa2", "native.fa2", "comes with torch for NVIDIA GPUs"),
        (
            "triton",
            "triton",
            "it comes with torch for NVIDIA and AMD GPUs, or `pip install triton`",
        ),
        ("cute", "cute", '`pip install "ring-flash-attn[cute]"`'),
        ("reference", "reference", "comes with torch"),
    )
}

NATIVE = "native"  # the first of the libraries, in the order for the GPU, that can do a call
LIBRARIES = ("fa4", "fa3", "cudnn", "flash_attn", "fa2")
AUTO = "auto"
_registered: list[str] = []


def register_kernel(name: str, module: str, hint: str = "") -> None:
    """Make the object `KERNEL` of `module` available as `name`; `auto` tries it first."""
    if name in (AUTO, NATIVE):
        raise ValueError(f"a kernel cannot be called {name!r}: that means a choice among others")
    entries = {name: Entry(module, hint), **{n: e for n, e in _ENTRIES.items() if n != name}}
    _ENTRIES.clear()
    _ENTRIES.update(entries)
    load_kernel.cache_clear()
    _registered.append(name)


def registrations() -> int:
    """How often a kernel was registered: what `auto` means may have changed since."""
    return len(_registered)


def kernel_names() -> tuple[str, ...]:
    """All kernels; those that were registered last come first."""
    return tuple(_ENTRIES)


def check_kernel(name: str) -> None:
    """ValueError that lists the choices if there is no kernel `name`."""
    choices = (AUTO, NATIVE, *_ENTRIES)
    if not isinstance(name, str) or name not in choices:
        raise ValueError(f"unknown kernel {name!r}; choose one of {', '.join(choices)}")


def candidates(name: str, call: Call) -> tuple[str, ...]:
    """The kernels that `name` may mean for a call, in the order in which they are tried."""
    if name not in (AUTO, NATIVE):
        return (name,)
    order = _order(call)
    if name == NATIVE:
        return tuple(each for each in order if each in LIBRARIES)
    ours = [each for each in reversed(_registered) if each in _ENTRIES]
    return tuple(dict.fromkeys((*ours, *order)))


def _order(call: Call) -> tuple[str, ...]:
    """A fixed order: on Hopper by what was measured, elsewhere by what is expected of them."""
    import torch

    generation = 0
    if call.device.type == "cuda" and torch.version.hip is None:
        generation = torch.cuda.get_device_capability(call.device)[0]
    if generation == 9:
        return (*_order_on_hopper(call), "flash_attn", "fa2", "reference")
    if generation == 10:
        return ("fa4", "fa3", "cudnn", "triton", "flash_attn", "fa2", "reference")
    if generation:
        return ("flash_attn", "fa2", "triton", "cudnn", "fa3", "fa4", "reference")
    return ("triton", *LIBRARIES, "reference")


def _order_on_hopper(call: Call) -> tuple[str, ...]:
    """By the sum of both passes, as results/ has them.

    `triton` has blocks as wide as powers of two: it pads 80, 96 or 192 columns, and `cute` does
    not. Without its Hopper kernels it is slower than libraries.
    """
    wide = max(call.headdim, call.headdim_v)
    if call.dropout_p > 0:
        return ("triton", "cute", "fa4", "fa3", "cudnn")
    if wide <= 128 and _has_hopper_kernels(call):
        if wide <= 32 or wide > 96:
            return ("triton", "cute", "fa4", "fa3", "cudnn")
        if wide <= 64:
            return ("cute", "triton", "fa4", "fa3", "cudnn")
    if wide <= 64:
        return ("cute", "fa4", "fa3", "triton", "cudnn")
    return ("cute", "fa4", "fa3", "cudnn", "triton")


def _has_hopper_kernels(call: Call) -> bool:
    """Whether `triton` is more than its portable kernels here."""
    has = getattr(load_kernel("triton"), "has_hopper_kernels", None)
    return has is not None and bool(has(call))


@cache
def load_kernel(name: str) -> Kernel | str:
    """The kernel, or why it is not there."""
    entry = _ENTRIES[name]
    try:
        kernel: Kernel = importlib.import_module(entry.module).KERNEL
    except ModuleNotFoundError as missing:
        ours = missing.name == entry.module
        return entry.hint if ours else f"{missing.name} is not installed: {entry.hint}"
    except Exception as error:  # anything: a flash-attn for another torch, a CUTLASS too old for it
        if name not in LIBRARIES:
            raise
        return f"it is installed but cannot be imported: {error}"
    return kernel


def why_not(name: str, call: Call) -> list[str]:
    """Every reason why the kernel `name` cannot do this call here; empty if it can."""
    ours = name in LIBRARIES and name not in _registered
    if ours and call.device.type != "cuda":  # not worth importing it
        return [f"it needs an NVIDIA GPU, not {call.device}"]
    kernel = load_kernel(name)
    return [kernel] if isinstance(kernel, str) else kernel.why_not(call)


def choose_kernel(name: str, call: Call) -> Kernel:
    """The kernel `name`; for `auto` and `native` the first candidate that can do the call.

    With the environment variable RFA_LOG=1, a line on stderr says what was chosen, and why not what
    would have come before it, once for each kind of call.

    Raises:
        ValueError: there is no such kernel.
        NotImplementedError: it cannot do the call; the message has every reason of every kernel
            that was asked for. An explicit choice never falls back.
    """
    check_kernel(name)
    return _first(name, candidates(name, call), call)


def choose_kernels(name: str, call: Call, size: costs.Size | None) -> Kernels:
    """The same for each pass: `auto` and `native` take what was fastest on measured calls like it.

    Where nothing like it was measured here, they take the same kernel for both.
    """
    check_kernel(name)
    slower = None
    if size is not None and name in (AUTO, NATIVE):
        slower = costs.estimate(call, size)
    if slower is None:
        kernel = _first(name, candidates(name, call), call)
        return Kernels(kernel, kernel)
    forward, backward = (_by_cost(candidates(name, call), each) for each in slower)
    if not call.needs_grad:
        kernel = _first(name, forward, call)
        return Kernels(kernel, kernel)
    alone = replace(call, needs_grad=False, with_lse=False)
    return Kernels(_first(name, forward, alone), _first(name, backward, call))


def _by_cost(names: Sequence[str], slower: costs.Slower) -> tuple[str, ...]:
    """The fastest first; before them what users registered, after them what nobody measured."""
    return tuple(sorted(names, key=lambda n: -inf if n in _registered else slower.get(n, inf)))


def _first(name: str, order: Sequence[str], call: Call) -> Kernel:
    """The first that can do a call; NotImplementedError with every reason if none can."""
    reasons: dict[str, list[str]] = {}
    for candidate in order:
        reasons[candidate] = why_not(candidate, call)
        if reasons[candidate]:
            continue
        kernel = load_kernel(candidate)
        assert not isinstance(kernel, str)
        if name == AUTO and call.with_lse and as_block(kernel) is not None:
            reasons[candidate] = ["it cannot differentiate through lse, which the caller gets"]
            continue
        _log(name, candidate, reasons, call)
        return kernel
    lines = [f"{each}: {reason}" for each, why in reasons.items() for reason in why]
    raise NotImplementedError(f"kernel {name!r} cannot do this call:\n  " + "\n  ".join(lines))


_logged: set[str] = set()


def _log(name: str, chosen: str, reasons: dict[str, list[str]], call: Call) -> None:
    if os.environ.get("RFA_LOG", "0") in ("", "0"):
        return
    kind = (
        f"{str(call.dtype).removeprefix('torch.')}, heads {call.nheads}/{call.nheads_k}, headdim "
        f"{call.headdim}/{call.headdim_v}, mask {call.mask.left}/{call.mask.right}, {call.device}"
    )
    line = f"ring_flash_attn: kernel {name} is {chosen} for {kind}"
    line += "".join(f"; not {each}: {', '.join(why)}" for each, why in reasons.items() if why)
    if line not in _logged:
        _logged.add(line)
        print(line, file=sys.stderr)
