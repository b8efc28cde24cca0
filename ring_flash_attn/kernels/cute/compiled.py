"""Compiled kernels, in this process and on disk.

A kernel is compiled when a call first needs it, in some ten seconds, and its object file is stored,
so that other processes load it instead (`stored.py`). One thread compiles at a time: CuTe DSL ends
the process if two do.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from typing import Any, cast

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from . import stored
from .backward import Backward
from .forward import Forward
from .traits import BackwardTraits, Traits

_FORWARD = 11, 11, 18  # addresses, sizes and strides: see `Forward.__call__`
_BACKWARD = 14, 13, 21
_compiling = Lock()
_LIBRARIES = "nvidia-cutlass-dsl-libs-cu13"


def forward_kernel(traits: Traits) -> Callable[..., None]:
    """What launches the kernel; it takes numbers, in the order of `Forward.__call__`."""
    with _compiling:
        return _forward_kernel(traits)


def backward_kernel(traits: BackwardTraits) -> Callable[..., None]:
    """The same, in the order of `Backward.__call__`."""
    with _compiling:
        return _backward_kernel(traits)


@cache
def _forward_kernel(traits: Traits) -> Callable[..., None]:
    return load_or_compile("forward", traits, lambda: compile_forward(traits))


@cache
def _backward_kernel(traits: BackwardTraits) -> Callable[..., None]:
    return load_or_compile("backward", traits, lambda: compile_backward(traits))


def load_or_compile(name: str, traits: object, compiles: Callable[[], Any]) -> Callable[..., None]:
    """The kernel `name` for these traits: from its object file, or compiled now and stored."""
    warn_of_old_libraries()
    path, function = stored.path_of(name, traits), f"rfa_{name}"
    if path is not None and os.path.exists(path):  # false, too, where it may not look
        loaded = _load(path, function)
        if loaded is not None:
            return loaded
    compiled = compiles()
    if path is not None:
        stored.store(path, lambda file: compiled.export_to_c(str(file), function))
    return cast(Callable[..., None], compiled)


def _load(path: Path, function: str) -> Callable[..., None] | None:
    """What was stored; None if it cannot be loaded, so that it is compiled and stored again."""
    try:
        module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
        loaded: Callable[..., None] = getattr(module, function)
    except Exception:  # anything: a file that was cut off, or is gone by now
        return None
    return loaded


def compile_forward(traits: Traits, options: str = "") -> Any:
    """Compile, whatever is on disk."""
    return _compile(Forward(traits), _FORWARD, options)


def compile_backward(traits: BackwardTraits, options: str = "") -> Any:
    """The same."""
    return _compile(Backward(traits), _BACKWARD, options)


@cache
def warn_of_old_libraries() -> None:
    """CUDA 12's ptxas runs products one by one: the kernel is right, and slow."""
    try:
        version(_LIBRARIES)
    except PackageNotFoundError:
        warnings.warn(
            f"kernel cute: {_LIBRARIES} is not installed; in kernels of CUDA 12 products "
            'wait for each other, so they are slow: `pip install "ring-flash-attn[cute]"`',
            stacklevel=2,
        )


def _compile(kernel: Any, counts: tuple[int, int, int], options: str) -> Any:
    """With numbers that stand for any."""
    addresses, sizes, strides = counts
    arguments = [
        *[Int64(16)] * addresses,
        *[Int32(1)] * sizes,
        *[Int64(64)] * strides,
        Float32(1.0),
        Float32(1.0),
        Int32(0),
        Float32(1.0),
        Int32(0),
        cute.runtime.make_fake_stream(),
    ]
    wanted = f"--enable-tvm-ffi --gpu-arch {stored.ARCH} {options}"
    return cute.compile(kernel, *arguments, options=wanted)
