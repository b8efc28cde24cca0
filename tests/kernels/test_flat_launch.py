"""Launches without Triton pass on what Triton does; a driver stands in that notes what it gets."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from machine_code import compilers
from torch import Tensor

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

STREAM = 3  # which argument of the driver's function it is
BASE, METADATA = 7, 8  # arguments before those for Triton's hooks; what a hook is told
STREAMS = [70, 71, 72, 73]  # the current one in each pass


@dataclass(frozen=True)
class PyCUtensorMap:
    """A TMA descriptor: what it was made of."""

    made_of: tuple[Any, ...]


class Utils:
    """What Triton calls of the driver."""

    def __init__(self) -> None:
        self.launches: list[list[Any]] = []
        self.stream = 0

    def launch(self, *arguments: Any) -> None:
        *base, kernel = arguments
        metadata, enter = arguments[METADATA : METADATA + 2]
        if enter is not None:
            enter(metadata)
        self.launches.append([*base[:BASE], *map(address_of, kernel)])

    def fill_tma_descriptor_tiled(self, *made_of: Any) -> PyCUtensorMap:
        return PyCUtensorMap(tuple(tuple(x) if isinstance(x, list) else x for x in made_of))

    def build_signature_metadata(self, signature: Any) -> bytes:
        return repr(signature).encode()

    def load_binary(self, name: str, *_: Any) -> tuple[Any, ...]:
        return None, name, 0, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}


def address_of(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, Tensor) else value


def drive() -> Utils:
    """Replace the driver of this process by one of a Hopper GPU that is not there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver

    driver.PyKernelArg = SimpleNamespace
    utils = Utils()
    active = SimpleNamespace(
        utils=utils,
        launcher_cls=driver.CudaLauncher,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: utils.stream,
        get_active_torch_device=lambda: torch.device("cpu"),
    )
    triton.runtime.driver.set_active(active)
    return utils


Passes = list[list[list[Any]]]  # of each pass its launches, of each what the driver got


def passes(headdim: int, headdim_v: int, deterministic: bool) -> tuple[Passes, bool, bool]:
    """Four forward and backward passes on the same tensors, but for the first.

    The second is made without Triton, the third through Triton, because somebody listens, the last
    without again. And whether all launches were recorded, and whether one holds a tensor.
    """
    import triton

    from ring_flash_attn.kernels import grad_parts, launches
    from ring_flash_attn.kernels.base import Call, Grads, Saved, State
    from ring_flash_attn.kernels.triton.hopper import host
    from ring_flash_attn.plan.layout import Span
    from ring_flash_attn.plan.tiles import Mask, make_tiles

    utils, told = drive(), []
    mask, spans = Mask(right=0), [Span(0, 1100, 0, 1, 0, 0)]
    tiles = make_tiles(spans, spans, mask)
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    call = Call(cpu, dtype, 4, 1, headdim, headdim_v, 0.1, mask, deterministic=deterministic)
    sets = []
    for _ in range(2):
        widths = ((4, headdim), (1, headdim), (1, headdim_v), (4, headdim_v))
        q, k, v, dout = (torch.zeros(1, 1100, *each, dtype=dtype) for each in widths)
        lse, delta = torch.zeros(2, 1, 4, 1100).unbind()
        sums = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
        sets.append((q, k, v, dout, State(torch.empty_like(dout), lse), lse, delta, Grads(*sums)))
    copies = tuple(torch.zeros(2, 1, 4, 4, 1100).unbind())
    parts = [torch.zeros(1, 1100, 4, width) for width in (headdim, headdim_v)]
    found = []
    launches.stream_handle = lambda device: utils.stream  # type: ignore[assignment]
    back = host.ordered_backward if deterministic else host.backward
    hook = triton.knobs.runtime.launch_enter_hook
    for number in range(4):
        q, k, v, dout, state, lse, delta, grads = sets[number > 0]
        hook.add(told.append) if number == 2 else hook.calls.clear()
        utils.stream = STREAMS[number]
        host.forward(q, k, v, tiles, state, call)
        stats = Saved(lse, delta)
        stats._memo["copies", 0.0] = copies  # made by a launch otherwise, at other places each time
        back(dout, q, k, v, tiles, stats, grads, call)
        grad_parts.add_up(parts, (grads.dk, grads.dv), False)
        found.append(utils.launches.copy())
        utils.launches.clear()
    assert len(told) == len(found[2])
    flat = [each.flat for each in launches._launches._entries.values()]
    held = [x for each in flat if each for x in (*each.arguments, *(each.nested or ()))]
    return found, all(flat), any(isinstance(x, Tensor) for x in held)


@pytest.mark.parametrize("case", [(64, 64, False), (64, 64, True), (256, 128, False)], ids=str)
def test_the_driver_gets_what_triton_passes_on(case: tuple[int, int, bool]) -> None:
    with compilers() as pool:
        found, recorded, holds = pool.submit(passes, *case).result()
    assert recorded
    assert not holds
    for launches, stream in zip(found, STREAMS, strict=True):
        assert [launch.pop(STREAM) for launch in launches] == [stream] * len(launches)
    first, without, through, again = found
    assert len(first) >= 3
    assert without == through == again
    assert without != first, "these are the tensors of the first launch"
    assert [launch[:3] for launch in without] == [launch[:3] for launch in first]


def test_hooks_of_any_kind_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes a chain of hooks, a function, or None."""
    import triton

    from ring_flash_attn.kernels.flat_launch import hooked

    runtime, chain = triton.knobs.runtime, type(triton.knobs.runtime.launch_enter_hook)
    full = chain()
    full.add(print)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        for hook, heard in ((None, False), (chain(), False), (full, True), (print, True)):
            with monkeypatch.context() as patch:
                patch.setattr(runtime, name, hook)
                assert hooked() is heard
