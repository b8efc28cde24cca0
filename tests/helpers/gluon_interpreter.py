"""Gluon kernels on the CPU: the same source, run by Python, with a thread for each group of warps.

Blocks are torch tensors, shared memory is a torch tensor full of NaN, barriers count arrivals and
bytes as the hardware's do. What is asynchronous happens at once or as late as it may, by chance: a
bulk copy when somebody waits for it, a product when it is waited for. So a kernel that reads too
early or frees memory too soon computes something else; one that nobody wakes ends with an error.

`install()` puts this in place of the module that knows Gluon, before the kernels are imported.
"""

from __future__ import annotations

import inspect
import math
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_PATIENCE = 30.0  # seconds that a thread may wait


class Int(int):
    """A scalar; also has what kernels want of a tensor."""

    def to(self, dtype: torch.dtype) -> Int:
        return self


def _closed(name: str) -> Callable[[Int, Any], Any]:
    plain = getattr(int, name)

    def operation(self: Int, *other: Any) -> Any:
        found = plain(self, *other)
        return found if found is NotImplemented else Int(found)

    return operation


_OPERATIONS = ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "rshift", "lshift")
for _name in (*_OPERATIONS, *(f"r{each}" for each in _OPERATIONS), "neg"):
    setattr(Int, f"__{_name}__", _closed(f"__{_name}__"))


class Block(Tensor):
    """Numbers of all threads; layouts mean nothing here."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]

    def reshape(self, shape: Sequence[int]) -> Block:  # type: ignore[override]
        return _block(Tensor.reshape(self, shape))


def _block(x: Tensor) -> Block:
    return x.as_subclass(Block)


class Pointer:
    """Addresses in a tensor's memory."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to(cls, x: Tensor) -> Pointer:
        start = x.storage_offset()
        size = x.untyped_storage().nbytes() // x.element_size() - start
        return cls(x.as_strided((size,), (1,), start))

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + other)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.memory, self.offset[index])

    def at(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Addresses, which have to exist where the mask is true, and the mask."""
        offsets = torch.as_tensor(self.offset).as_subclass(Tensor)
        wanted = torch.as_tensor(True if mask is None else mask).as_subclass(Tensor)
        offsets, wanted = torch.broadcast_tensors(offsets, wanted)
        used = offsets[wanted]
        inside = used.numel() == 0 or (used.min() >= 0 and used.max() < len(self.memory))
        assert inside, "an address outside of the tensor"
        return offsets, wanted


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, i: int) -> Shared:
        assert 0 <= i < len(self.data)
        return Shared(self.data[i])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        assert dtype == self.dtype
        return Shared(self.data.reshape(-1)[: math.prod(shape)].view(*shape))

    def load(self, layout: Any) -> Block:
        return _block(self.data.clone())

    def store(self, x: Tensor) -> None:
        assert (x.dtype, list(x.shape)) == (self.dtype, self.shape)
        self.data.copy_(x)


@dataclass
class _Barrier:
    """mbarrier: a phase ends when all have arrived and all expected bytes are there."""

    count: int
    missing: int
    phase: int = 0
    bytes: int = 0
    late: list[Callable[[], None]] = field(default_factory=list)

    def settle(self) -> None:
        assert self.missing >= 0, "one arrival too many"
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count
            _program.changed.notify_all()


class _Program:
    """What the threads of one program share."""

    def __init__(self) -> None:
        self.number, self.programs = 0, 1
        self.chance = random.Random(0)
        self.changed = threading.Condition(threading.RLock())
        self.barriers: dict[int, _Barrier] = {}
        self.turns = [0, 0]
        self.failed = False

    def begin(self, number: int, programs: int) -> None:
        self.__init__()
        self.number, self.programs, self.chance = number, programs, random.Random(number)

    def barrier(self, smem: Shared) -> _Barrier:
        return self.barriers[smem.data.data_ptr()]


_program = _Program()


def _init(smem: Shared, count: int) -> None:
    _program.barriers[smem.data.data_ptr()] = _Barrier(count, count)


def _expect(smem: Shared, size: int) -> None:
    with _program.changed:
        barrier = _program.barrier(smem)
        barrier.missing, barrier.bytes = barrier.missing - 1, barrier.bytes + size
        barrier.settle()


def _arrive(smem: Shared, *, count: int = 1, pred: Any = True) -> None:
    with _program.changed:
        if pred:
            barrier = _program.barrier(smem)
            barrier.missing -= count
            barrier.settle()


def _wait(smem: Shared, phase: int, pred: Any = True) -> None:
    if pred:
        _wait_for(_program.barrier(smem), phase)


def _wait_for(barrier: _Barrier, phase: int) -> None:
    """Until the phase of this parity has ended."""
    with _program.changed:
        while barrier.late:
            barrier.late.pop()()
        ended = _program.changed.wait_for(
            lambda: (barrier.phase & 1) != phase or _program.failed or barrier.late, _PATIENCE
        )
        assert ended, "nobody ends the phase that this waits for"
        assert not _program.failed, "another thread failed"
        if barrier.late:
            _wait_for(barrier, phase)


def warp_barriers(first: int, number: int, warps: int) -> None:
    for i in range(first, first + number):
        _program.barriers[i] = _Barrier(warps, warps)


def warp_arrives(i: int) -> None:
    """All warps of a group, which is one thread here; only groups of four do."""
    with _program.changed:
        _program.barriers[i].missing -= 4
        _program.barriers[i].settle()


def wait_for_warps(i: int, phase: int) -> None:
    _wait_for(_program.barriers[i], phase)


def pass_turn(group: int) -> None:
    with _program.changed:
        _program.turns[1 - group] += 1
        assert _program.turns[1 - group] == 1, "a turn is passed twice"
        _program.changed.notify_all()


def vote_above(x: torch.Tensor, limit: float) -> bool:
    """Of all warps of a group, whose numbers it has together."""
    return not bool((x <= limit).all())


def await_turn(group: int) -> None:
    with _program.changed:
        passed = _program.changed.wait_for(
            lambda: _program.turns[group] or _program.failed, _PATIENCE
        )
        assert passed, "nobody passes the turn"
        assert not _program.failed, "another thread failed"
        _program.turns[group] -= 1


@dataclass
class Descriptor:
    """Where bulk copies read and write; beyond the tensor there are zeros."""

    base: Any
    tensor_shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def block_type(self) -> Any:
        size = math.prod(self.block_shape) * self.base.element_size()
        return SimpleNamespace(nbytes=size, shape=self.block_shape)

    def part(self, corner: Sequence[int]) -> tuple[Tensor, tuple[slice, ...]]:
        """What of the tensor a block from this corner on covers, and which part of the block."""
        inner, outer = [], []
        for start, length, size in zip(corner, self.block_shape, self.base.shape, strict=True):
            first, last = max(start, 0), max(min(start + length, size), 0)
            outer.append(slice(first, max(first, last)))
            inner.append(slice(first - start, max(first, last) - start))
        return self.base[tuple(outer)], tuple(inner)


def _copy_in(descriptor: Descriptor, corner: Sequence[int], full: Shared, smem: Shared) -> None:
    barrier = _program.barrier(full)

    def copy() -> None:
        found, inner = descriptor.part(corner)
        block = smem.data.view(descriptor.block_shape)
        block.zero_()
        block[inner] = found.as_subclass(Tensor)
        barrier.bytes -= descriptor.block_type.nbytes
        barrier.settle()

    with _program.changed:
        if _program.chance.random() < 0.5:
            copy()
        else:
            barrier.late.append(copy)
            _program.changed.notify_all()


def load_tile(
    desc: Any, batch: int, head: int, row: int, full: Any, smem: Any, EXPECT: bool = True
) -> None:
    if EXPECT:
        _expect(full, desc.block_type.nbytes)
    _copy_in(desc, [batch, head, row, 0], full, smem)


def load_numbers(
    desc: Any, batch: int, head: int, which: int, row: int, full: Any, smem: Any
) -> None:
    assert row % 4 == 0, "the hardware takes it for an illegal instruction"
    _copy_in(desc, [batch, head, which, row], full, smem)


def add_tile(desc: Any, batch: int, head: int, row: int, column: int, smem: Any) -> None:
    with _program.changed:
        there, inner = desc.part([batch, head, row, column])
        there += smem.data.view(desc.block_shape)[inner]


class _Pending:
    """A product that may not have been computed yet."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool) -> None:
        self._parts, self._found = (a, b, acc, use_acc), None
        self.shape = (a.shape[0], b.shape[1])
        if _program.chance.random() < 0.5:
            self.result()

    def result(self) -> Block:
        if self._found is None:
            a, b, acc, use_acc = self._parts
            left = a.data if isinstance(a, Shared) else a
            found = left.as_subclass(Tensor).float() @ b.data.float()
            if use_acc:
                found = found + (acc.result() if isinstance(acc, _Pending) else acc)
            self._found = _block(found)
        return self._found


def warpgroup_mma(a: Any, b: Any, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
    pending = _Pending(a, b, acc, use_acc)
    return pending if is_async else pending.result()


def warpgroup_mma_wait(outstanding: int, deps: Sequence[Any]) -> Any:
    found = tuple(each.result() if isinstance(each, _Pending) else each for each in deps)
    return found[0] if len(found) == 1 else found


def _warp_specialize(functions: Any, warps: Any, registers: Any) -> None:
    errors: list[BaseException] = []

    def work(function: Any, arguments: Any) -> None:
        try:
            with torch.no_grad():  # which is a thread's own
                function(*arguments)
        except BaseException as error:
            errors.append(error)
            with _program.changed:
                _program.failed = True
                _program.changed.notify_all()

    threads = [threading.Thread(target=work, args=each) for each in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert _program.turns == [0, 0], "a turn that nobody took"


def _load(pointer: Pointer, mask: Any = None, other: Any = 0.0) -> Any:
    offsets, wanted = pointer.at(mask)
    if offsets.dim() == 0:
        value = pointer.memory[offsets]
        return value.item() if value.is_floating_point() else Int(value)
    found = torch.full(offsets.shape, other, dtype=pointer.memory.dtype)
    found[wanted] = pointer.memory[offsets[wanted]]
    return _block(found)


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    offsets, wanted = pointer.at(mask)
    value = torch.broadcast_to(torch.as_tensor(value).as_subclass(Tensor), offsets.shape)
    pointer.memory[offsets[wanted]] = value[wanted].to(pointer.memory.dtype)


def _atomic_add(pointer: Pointer, value: int, sem: str) -> Int:
    with _program.changed:
        before = _load(pointer)
        _store(pointer, before + value)
    if not value:  # whoever asks again and again leaves others to their work
        time.sleep(0.001)
    return before


def _max(x: Tensor, axis: int) -> Any:
    found = x.amax(axis)
    return Int(found) if found.dim() == 0 else found


def _either(pick: Callable[..., Any], function: Callable[..., Tensor]) -> Callable[[Any, Any], Any]:
    def of(a: Any, b: Any) -> Any:
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            return function(torch.as_tensor(a), torch.as_tensor(b))
        return type(a)(pick(a, b)) if isinstance(a, Int) else pick(a, b)

    return of


def _inline(asm: str, constraints: str, args: Sequence[Any], **_: Any) -> Any:
    assert asm == "mov.u32 $0, 0;", asm
    return Int(0)


def _shared_memory(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
    if not dtype.is_floating_point:
        return Shared(torch.zeros(*shape, dtype=dtype))
    return Shared(torch.full(tuple(shape), math.nan, dtype=dtype))


def _check(condition: bool) -> None:
    assert condition


def _nothing(*_: Any, **__: Any) -> None:
    return None


_nothing.get_default_for = _nothing  # type: ignore[attr-defined]

gl = SimpleNamespace(
    constexpr=lambda x: x,
    float32=torch.float32,
    float16=torch.float16,
    bfloat16=torch.bfloat16,
    int32=torch.int32,
    int64=torch.int64,
    program_id=lambda axis: Int(_program.number),
    num_warps=lambda: 4,
    num_programs=lambda axis: Int(_program.programs),
    static_range=range,
    static_assert=_check,
    cdiv=lambda a, b: -(-a // b),
    full=lambda shape, value, dtype, layout: _block(torch.full(shape, value, dtype=dtype)),
    zeros=lambda shape, dtype, layout: _block(torch.zeros(shape, dtype=dtype)),
    arange=lambda a, b, layout: _block(torch.arange(a, b)),
    zeros_like=torch.zeros_like,
    where=lambda seen, a, b: torch.where(torch.as_tensor(seen), a, b),
    maximum=_either(max, torch.maximum),
    minimum=_either(min, torch.minimum),
    max=_max,
    sum=lambda x, axis: x.sum(axis),
    exp2=torch.exp2,
    log2=torch.log2,
    atomic_add=_atomic_add,
    load=_load,
    store=_store,
    convert_layout=lambda x, layout: x,
    inline_asm_elementwise=_inline,
    allocate_shared_memory=_shared_memory,
    warp_specialize=_warp_specialize,
    NVMMADistributedLayout=_nothing,
    NVMMASharedLayout=_nothing,
    SwizzledSharedLayout=_nothing,
    DotOperandLayout=_nothing,
    SliceLayout=_nothing,
    BlockedLayout=_nothing,
)
mbarrier = SimpleNamespace(
    MBarrierLayout=_nothing, init=_init, expect=_expect, arrive=_arrive, wait=_wait
)


class Function:
    """A kernel, or a part of one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.arg_names = list(inspect.signature(function).parameters)

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            given = [_argument(each) for each in args]
            for number in range(grid[0]):
                _program.begin(number, grid[0])
                self._function(*given)

        return launch


def _argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        return Pointer.to(x)
    return Int(x) if isinstance(x, int) and not isinstance(x, bool) else x


def _jit(function: Any = None, **options: Any) -> Any:
    return Function if function is None else Function(function)


def install() -> None:
    """Replace the module that knows Gluon, and say that the kernels can be used."""
    name = "ring_flash_attn.kernels.triton.hopper.gluon"
    module = ModuleType(name)
    vars(module).update(
        gl=gl,
        gluon=SimpleNamespace(jit=_jit),
        mbarrier=mbarrier,
        load_tile=load_tile,
        load_numbers=load_numbers,
        add_tile=add_tile,
        wait_for_adds=_nothing,
        fence_async_shared=_nothing,
        thread_barrier=_nothing,
        await_turn=await_turn,
        pass_turn=pass_turn,
        prefetch=lambda ptrs: ptrs.at(None),
        declare_vote=_nothing,
        declare_warp_barriers=_nothing,
        warp_barriers=warp_barriers,
        warp_arrives=warp_arrives,
        wait_for_warps=wait_for_warps,
        vote_above=vote_above,
        warpgroup_mma=warpgroup_mma,
        warpgroup_mma_wait=warpgroup_mma_wait,
        TensorDescriptor=Descriptor,
    )
    sys.modules[name] = module
    from ring_flash_attn.kernels.triton.hopper import host

    host._unavailable = lambda device: ()
