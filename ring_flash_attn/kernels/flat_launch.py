"""A launch without Triton: the call into C that Triton makes in the end, recorded and made again.

Triton's launcher walks through all arguments, makes TMA descriptors one by one and looks for hooks,
each time; only addresses differ. It has no interface to that last call. So its launcher is taken
apart, for the versions that are known; with others, launches go through Triton.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import CellType, FunctionType
from typing import Any

import torch
import triton
from torch import Tensor

_VERSIONS = ("3.6.", "3.7.")
_STREAM = 3  # of the arguments of the function in C: after the grid, before the kernel
_MAPS = 64  # addresses whose TMA descriptors are kept, of an argument
_DESCRIBED = "tensordesc_meta"  # free variables of Triton's function that makes TMA descriptors
_LAUNCHER = "launcher"


class FlatLaunch:
    """A launch that was recorded, of which addresses and stream may differ.

    Attributes:
        function: in C, of the driver or of the kernel.
        arguments: all of its arguments, but for `nested`.
        nested: those of the kernel, if they are a list of their own: the last argument.
        places: of each tensor, where its address stands among the kernel's arguments, or that of
            its TMA descriptor.
        makers: of each tensor with a TMA descriptor, what makes one.
    """

    __slots__ = ("_made", "arguments", "function", "makers", "nested", "places")

    def __init__(
        self,
        function: Callable[..., None],
        arguments: Sequence[Any],
        nested: Sequence[Any] | None,
        places: Sequence[int],
        makers: Sequence[Callable[[Tensor], Any]],
    ) -> None:
        self.function, self.arguments, self.nested = function, list(arguments), nested
        self.places, self.makers = tuple(places), tuple(makers)
        self._made: list[dict[int, Any]] = [{} for _ in makers]

    def __call__(self, tensors: Sequence[Tensor], stream: int) -> None:
        whole = self.arguments.copy()
        whole[_STREAM] = stream
        arguments = whole
        if self.nested is not None:
            arguments = list(self.nested)
            whole.append(arguments)
        described = len(self.makers)
        for number, (place, tensor) in enumerate(zip(self.places, tensors, strict=True)):
            address = tensor.data_ptr()
            arguments[place] = self._map(number, address, tensor) if number < described else address
        self.function(*whole)

    def _map(self, number: int, address: int, tensor: Tensor) -> Any:
        """The TMA descriptor of a tensor: it depends on the address alone."""
        made = self._made[number]
        found = made.get(address)
        if found is None:
            if len(made) >= _MAPS:
                made.clear()
            found = made[address] = self.makers[number](tensor)
        return found


def record(
    compiled: Any, grid: tuple[int, int, int], arguments: Sequence[Any], count: int
) -> FlatLaunch | None:
    """What a launch with these arguments passes to C; nothing is launched.

    The first `count` arguments are tensors, or TMA descriptors of tensors, which may be others in
    later launches. None where this version of Triton, or this GPU, launches otherwise.
    """
    if torch.version.hip is not None or not triton.__version__.startswith(_VERSIONS):
        return None
    return _recorded(compiled, grid, arguments, count)


def _recorded(
    compiled: Any, grid: tuple[int, int, int], arguments: Sequence[Any], count: int
) -> FlatLaunch | None:
    launcher = copy.copy(compiled.run)
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None  # memory that is allocated for each launch
    calls: list[tuple[Any, ...]] = []
    function, launcher.launch = launcher.launch, lambda *given: calls.append(given)
    hooks = None, None, None  # and what they would be told
    launcher(*grid, 0, compiled.function, compiled.packed_metadata, *hooks, *arguments)
    if [each[:5] for each in calls] != [(*grid, 0, compiled.function)]:
        return None
    makers: list[Callable[[Tensor], Any]] = []
    if isinstance(function, FunctionType):  # which makes TMA descriptors, and goes on to C
        names, cells = function.__code__.co_freevars, function.__closure__ or ()
        free = dict(zip(names, cells, strict=True))
        free[_LAUNCHER], inner = CellType(lambda *given: calls.append(given)), free[_LAUNCHER]
        code, known = function.__code__, function.__globals__
        FunctionType(code, known, closure=tuple(free.values()))(*calls[-1])
        metas, make = free[_DESCRIBED].cell_contents, known["make_tensordesc_arg"]
        if None in metas:  # a descriptor is passed as a pointer and numbers
            return None
        described = [each for each in arguments[:count] if not isinstance(each, Tensor)]
        makers = [_maker(make, *each) for each in zip(described, metas, strict=True)]
        function = inner.cell_contents
    given = list(calls[-1])
    nested = isinstance(given[-1], (list, tuple))
    flat = list(given.pop()) if nested else given
    places = _places(flat, arguments[:count], len(makers))
    if len(places) < count:
        return None
    for number, value in enumerate(flat):
        if isinstance(value, Tensor):  # of the launch table, which lives as long as the launch
            flat[number] = value.data_ptr()
    for place in places:  # not kept alive
        flat[place] = None
    return FlatLaunch(function, given, flat if nested else None, places, makers)


def _maker(make: Callable[[Any, Any], list[Any]], descriptor: Any, meta: Any) -> Any:
    """What makes the TMA descriptor of a tensor like that of another."""
    like = with_base(None, descriptor)

    def of(tensor: Tensor) -> Any:
        return make(with_base(tensor, like), meta)[0]

    return of


def _places(flat: Sequence[Any], tensors: Sequence[Any], described: int) -> list[int]:
    """Where the tensors, or their TMA descriptors, stand, in their order; all of them, or fewer."""
    places: list[int] = []
    numbers = iter(range(len(flat)))
    for number, tensor in enumerate(tensors):
        for place in numbers:
            if number < described:
                found = type(flat[place]).__name__ == "PyCUtensorMap"
            else:
                found = flat[place] is tensor
            if found:
                places.append(place)
                break
    return places


def with_base(x: Tensor | None, other: Any) -> Any:
    """The other's descriptor for x, unchecked."""
    descriptor = object.__new__(type(other))
    descriptor.__dict__.update(other.__dict__, base=x)
    return descriptor


def hooked() -> bool:
    """Whether somebody wants to be told of launches (Proton): then they go through Triton."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
