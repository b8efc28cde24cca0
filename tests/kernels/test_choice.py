"""Which kernel `auto` and `native` mean, and why not another."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_library import WRAPPERS, flash_attn_2, wrapper

import ring_flash_attn as rfa
from ring_flash_attn.cache import Cache
from ring_flash_attn.kernels import base
from ring_flash_attn.kernels.base import Call
from ring_flash_attn.plan.tiles import Mask


def call_on(generation: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Call:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (generation, 0))
    fixed = {"headdim": 128, "headdim_v": 128, "dtype": torch.bfloat16, "mask": Mask(right=0)}
    return Call(
        device=torch.device("cuda", 0),
        nheads=4,
        nheads_k=2,
        softmax_scale=0.1,
        **{**fixed, **options},
    )


@pytest.mark.parametrize(
    ("generation", "headdim", "hopper", "first"),
    [
        (9, 256, True, ("cute", "fa4", "fa3", "cudnn", "triton")),
        (9, 192, True, ("cute", "fa4", "fa3", "cudnn", "triton")),
        (9, 128, True, ("triton", "cute", "fa4", "fa3", "cudnn")),
        (9, 128, False, ("cute", "fa4", "fa3", "cudnn", "triton")),
        (9, 112, True, ("triton", "cute", "fa4", "fa3", "cudnn")),
        (9, 96, True, ("cute", "fa4", "fa3", "cudnn", "triton")),
        (9, 64, True, ("cute", "triton", "fa4", "fa3", "cudnn")),
        (9, 32, True, ("triton", "cute", "fa4", "fa3", "cudnn")),
        (9, 64, False, ("cute", "fa4", "fa3", "triton", "cudnn")),
        (10, 128, True, ("fa4", "fa3", "cudnn", "triton")),
        (8, 128, True, ("flash_attn", "fa2", "triton", "cudnn")),
    ],
)
def test_the_order_of_auto(
    monkeypatch: pytest.MonkeyPatch,
    generation: int,
    headdim: int,
    hopper: bool,
    first: tuple[str, ...],
) -> None:
    pytest.importorskip("triton")
    from ring_flash_attn.kernels.triton.hopper import host

    reasons = () if hopper else ("off",)
    monkeypatch.setattr(host, "_unavailable", lambda device: reasons)
    call = call_on(generation, monkeypatch, headdim=headdim, headdim_v=headdim)
    order = base.candidates("auto", call)
    assert order[: len(first)] == first
    assert sorted({*order, "cute"}) == sorted(base.kernel_names())
    assert ("cute" in order) == (generation == 9)
    native = base.candidates("native", call)
    assert native == tuple(name for name in order if name in base.LIBRARIES)


REFUSED = {
    "float32": {"dtype": torch.float32},
    "headdim 60": {"headdim": 60, "headdim_v": 60},
    "differs": {"headdim_v": 64},
    "softcap": {"softcap": 5.0},
    "ALiBi": {"alibi_slopes": torch.ones(4)},
    "dropout": {"dropout_p": 0.1},
    "repeat bit by bit": {"deterministic": True},
    "sliding windows": {"mask": Mask(5, 0)},
    "packed documents": {"packed": True},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_cudnn_says_why_not(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    assert base.why_not("cudnn", call_on(9, monkeypatch)) == []
    (why,) = base.why_not("cudnn", call_on(9, monkeypatch, **REFUSED[reason]))
    assert reason in why
    can = reason in ("sliding windows", "packed documents")
    assert (base.why_not("fa2", call_on(9, monkeypatch, **REFUSED[reason])) == []) is can


def test_cudnn_has_values_of_128_columns_beside_keys_of_192(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    dims = {"headdim": 192, "headdim_v": 128}
    assert base.why_not("cudnn", call_on(9, monkeypatch, **dims)) == []
    assert base.why_not("fa2", call_on(9, monkeypatch, **dims)) != []
    (why,) = base.why_not("cudnn", call_on(8, monkeypatch, **dims))
    assert "Hopper" in why


def test_native_lists_the_reasons_of_all_libraries() -> None:
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(NotImplementedError) as raised:
        rfa.native_flash_attn_func(x, x, x)
    for name in base.LIBRARIES:
        assert f"  {name}: " in str(raised.value)
    assert "triton: " not in str(raised.value)


def test_the_choice_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RFA_LOG", "1")
    monkeypatch.setattr(base, "_logged", set())
    monkeypatch.setattr("ring_flash_attn.engine.entry._ready", Cache(1))
    x = torch.randn(1, 4, 2, 8)
    for _ in range(2):
        rfa.flash_attn_func(x, x, x, causal=True)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("ring_flash_attn: kernel auto is reference for float32, heads 2/2")
    assert "not cudnn: it needs an NVIDIA GPU, not cpu" in line


def test_a_broken_library_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A flash-attn that was built for another torch must not take `auto` down."""
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('undefined symbol: _ZN3c104cuda')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    base.load_kernel.cache_clear()
    try:
        why = base.load_kernel("flash_attn")
        assert why == "it is installed but cannot be imported: undefined symbol: _ZN3c104cuda"
        x = torch.randn(1, 4, 2, 8)
        rfa.flash_attn_func(x, x, x)
    finally:
        base.load_kernel.cache_clear()


def test_an_older_library_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn 2.6 has other arguments."""
    fake = flash_attn_2()

    def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, window_size):
        raise AssertionError

    fake._flash_attn_forward = _flash_attn_forward
    file, parents, module, _ = WRAPPERS["flash_attn"]
    with pytest.raises(ImportError, match="has no window_size_left, softcap"):
        wrapper(monkeypatch, file, parents, module, fake)


def test_fa4_says_what_a_gpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    file, parents, module, fake = WRAPPERS["fa4"]
    kernel = wrapper(monkeypatch, file, parents, module, fake())
    for generation, options, able in (
        (9, {"headdim": 192, "headdim_v": 192}, True),
        (9, {"headdim": 192, "headdim_v": 128, "needs_grad": True}, True),
        (9, {"headdim": 192, "headdim_v": 64}, False),
        (9, {"headdim": 80, "headdim_v": 80, "needs_grad": True}, False),  # a wrong dQ
        (9, {"headdim": 80, "headdim_v": 80}, True),
        (9, {"headdim": 88, "headdim_v": 88, "needs_grad": True}, True),
        (10, {"headdim": 80, "headdim_v": 80, "needs_grad": True}, True),
        (10, {"headdim": 192, "headdim_v": 192}, False),
        (10, {"headdim": 256, "headdim_v": 256}, True),
        (10, {"headdim": 256, "headdim_v": 256, "softcap": 3.0}, False),
        (12, {"deterministic": True}, False),
        (8, {}, False),
    ):
        assert (kernel.why_not(call_on(generation, monkeypatch, **options)) == []) is able


def test_a_kernel_that_is_registered_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a new name or an old one."""
    monkeypatch.setattr(base, "_ENTRIES", dict(base._ENTRIES))
    monkeypatch.setattr(base, "_registered", [])
    call = call_on(9, monkeypatch)
    usual = base.candidates("auto", call)
    for name in ("mine", "fa2"):
        base.register_kernel(name, "anything")
    without = [name for name in usual if name != "fa2"]
    assert base.candidates("auto", call) == ("fa2", "mine", *without)
    base.load_kernel.cache_clear()


def test_a_kernel_under_the_name_of_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is not the library, and need not want a GPU."""
    monkeypatch.setattr(base, "_ENTRIES", dict(base._ENTRIES))
    monkeypatch.setattr(base, "_registered", [])
    base.register_kernel("fa2", "ring_flash_attn.kernels.reference")
    x = torch.randn(1, 4, 2, 8)
    assert torch.equal(
        rfa.flash_attn_func(x, x, x, kernel="fa2"), rfa.flash_attn_func(x, x, x, kernel="reference")
    )
    base.load_kernel.cache_clear()


def test_every_name_is_that_of_a_kernel_that_exists() -> None:
    for name, entry in base._ENTRIES.items():
        assert find_spec(entry.module) is not None, name
    with pytest.raises(ValueError, match="unknown kernel 'cuda'; choose one of auto, native, fa4"):
        base.check_kernel("cuda")


def test_a_kernel_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing falls back to another kernel."""
    monkeypatch.setattr(base, "_ENTRIES", dict(base._ENTRIES))
    monkeypatch.setattr(base, "_registered", [])
    base.register_kernel("mine", "no_such_module", "`pip install mine`")
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(NotImplementedError) as raised:
        rfa.flash_attn_func(x, x, x, kernel="mine")
    assert "kernel 'mine' cannot do this call:\n  mine: " in str(raised.value)
    assert "`pip install mine`" in str(raised.value)
    rfa.flash_attn_func(x, x, x)  # `auto` takes the next one
    base.load_kernel.cache_clear()


def test_a_kernel_cannot_have_the_name_of_a_choice() -> None:
    for name in ("auto", "native"):
        with pytest.raises(ValueError, match="means a choice among others"):
            base.register_kernel(name, "anything")
