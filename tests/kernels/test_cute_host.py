"""Kernel "cute" on the host: choice, reasons, launches, stored kernels. No GPU, no CuTe DSL.

What the GPU would do, the reference kernel does here.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any

import cute_device
import pytest
import torch
from torch import Tensor

import ring_flash_attn as rfa
from ring_flash_attn.bench.measure import measure
from ring_flash_attn.bench.workload import Workload
from ring_flash_attn.cache import Cache
from ring_flash_attn.kernels import base, cute
from ring_flash_attn.kernels.base import Call, Grads, Saved, State
from ring_flash_attn.kernels.cute import host, stored
from ring_flash_attn.kernels.reference import KERNEL as REFERENCE
from ring_flash_attn.plan.build import route_names
from ring_flash_attn.plan.layout import Span, layout_names
from ring_flash_attn.plan.tiles import Mask, Tile, make_tile

CPU, HOPPER = torch.device("cpu"), torch.device("cuda", 0)
NO_BACKWARD = "its backward pass needs triton"
CU_SEQLENS = [0, 40, 43, 100]


def call_of(**changes: Any) -> Call:
    heads = {"nheads": 4, "nheads_k": 2, "headdim": 64, "headdim_v": 64}
    plain = {"device": HOPPER, "dtype": torch.bfloat16, "softmax_scale": 0.1, "mask": Mask()}
    return Call(**{**heads, **plain, **changes})


def inputs(grad: bool = False, tokens: int = CU_SEQLENS[-1]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(tokens, heads, 16, generator=generator).bfloat16() for heads in (4, 2, 2))
    return [x.requires_grad_(grad) for x in made]


# What the GPU would do.


def named_rows(x: Tensor, spans: Sequence[Span]) -> Tensor:
    """Which rows of (batch, row, …) tiles name."""
    found = torch.zeros(x.shape[1], dtype=torch.bool)
    for span in spans:
        found[span.start : span.start + span.length] = True
    return found


def emulated_forward(
    q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], state: State, call: Call
) -> None:
    wide = state.out.float()
    begins = named_rows(q, [tile.query for tile in tiles if tile.first])
    ends = named_rows(q, [tile.query for tile in tiles if tile.last])
    wide[:, begins] = 0.0
    if not call.sink:
        state.lse[..., begins] = -torch.inf
    REFERENCE.forward(q, k, v, tiles, State(wide, state.lse), call)
    seen = named_rows(q, [tile.query for tile in tiles])
    state.out[:, seen] = wide[:, seen].to(state.out.dtype)
    if state.result is not None:
        state.result[:, ends] = wide[:, ends].to(state.result.dtype)


def emulated_delta(dout: Tensor, out: Tensor, call: Call) -> Tensor:
    return (dout.float() * out.float()).sum(-1).transpose(1, 2).contiguous()


def emulated_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Sequence[Tile],
    saved: Saved,
    grads: Grads,
    call: Call,
) -> None:
    if saved.out is not None:
        saved = Saved(saved.lse, emulated_delta(dout, saved.out, call))
    found = Grads(*(torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)))
    REFERENCE.backward(dout, q, k, v, tiles, saved, found, call)
    for name, fresh in (("dq", grads.fresh_q), ("dk", grads.fresh_k), ("dv", grads.fresh_k)):
        mine, theirs = getattr(grads, name), getattr(found, name)
        spans = [tile.query if name == "dq" else tile.key for tile in tiles]
        rows = named_rows(mine, spans)
        new = theirs[:, rows] if fresh else mine[:, rows].float() + theirs[:, rows]
        mine[:, rows] = new.to(mine.dtype)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """The calls of forward launches, on a machine that has all that the kernel needs."""
    launches: list[Call] = []

    def forward(*arguments: Any) -> None:
        launches.append(arguments[-1])
        emulated_forward(*arguments)

    monkeypatch.setattr(host, "_unavailable", lambda device: ())
    monkeypatch.setattr(host, "forward", forward)
    monkeypatch.setattr("ring_flash_attn.engine.entry._ready", Cache(64))
    look_up = cute._backward
    look_up.cache_clear()
    yield launches
    look_up.cache_clear()
    torch.compiler.reset()


@pytest.fixture
def without_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute, "_backward", lambda: cute._NO_TRITON)


@pytest.fixture
def with_backward(on_hopper: list[Call], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with the backward pass."""
    module = ModuleType(cute._BACKWARD)
    module.delta, module.backward = emulated_delta, emulated_backward  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, cute._BACKWARD, module)
    return module


# Reasons.


def test_the_reasons_of_a_call(on_hopper: list[Call]) -> None:
    assert base.why_not("cute", call_of()) == []
    for changes, reason in (
        ({"dtype": torch.float32}, "dtype torch.float32 is not fp16 or bf16"),
        ({"softmax_scale": 0.0}, "softmax_scale 0.0 is not positive"),
        ({"headdim": 60}, "head dimensions 60 and 64 are not multiples of 8"),
        ({"headdim": 264}, "head dimensions 264 and 64 are not ones that it has blocks for"),
        ({"headdim_v": 128}, "head dimensions 64 and 128 are not ones that it has blocks for"),
    ):
        assert base.why_not("cute", call_of(**changes)) == [reason]
    features = {"softcap": 5.0, "alibi_slopes": torch.ones(4), "dropout_p": 0.1, "sink": True}
    assert base.why_not("cute", call_of(**features, packed=True, mask=Mask(5, 0))) == []
    of_documents = call_of(alibi_slopes=torch.ones(3, 4), packed=True)
    assert base.why_not("cute", of_documents) == ["its ALiBi has the same slopes in all documents"]


def test_auto_knows_it_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    generation = 9
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (generation, 0))
    monkeypatch.setattr(base, "_registered", [])
    assert "cute" in base.candidates("auto", call_of())
    assert "cute" not in base.candidates("native", call_of())
    generation = 8
    assert "cute" not in base.candidates("auto", call_of())
    assert base.candidates("cute", call_of()) == ("cute",)


@pytest.mark.parametrize(
    ("capability", "missing", "release", "reason"),
    [
        ((9, 0), (), "4.8.1", ""),
        ((8, 0), (), "4.8.1", "it needs compute capability 9.0, not 8.0"),
        ((10, 0), (), "4.8.1", "it needs compute capability 9.0, not 10.0"),
        ((9, 0), ("cutlass",), None, "nvidia-cutlass-dsl is not installed: `pip install "),
        ((9, 0), (), None, "nvidia-cutlass-dsl is not installed: `pip install "),
        ((9, 0), ("cutlass",), "4.8.1", "nvidia-cutlass-dsl is not installed: `pip install "),
        ((9, 0), ("tvm_ffi",), "4.8.1", "apache-tvm-ffi is not installed: `pip install "),
        ((9, 0), (), "4.80.1", "nvidia-cutlass-dsl is 4.80.1, and it needs 4.8: `pip install "),
    ],
)
def test_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    missing: tuple[str, ...],
    release: str | None,
    reason: str,
) -> None:
    def version(package: str) -> str:
        if release is None:
            raise PackageNotFoundError(package)
        return release

    monkeypatch.delenv(host.VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(host, "version", version)
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in missing else object()
    )
    found = host._unavailable.__wrapped__(HOPPER)
    assert len(found) == bool(reason)
    assert not reason or found[0].startswith(reason)


def test_off_and_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFA_CUTE", "0")
    assert host._unavailable.__wrapped__(HOPPER) == ("it is off: RFA_CUTE=0 is set",)
    monkeypatch.setenv("RFA_CUTE", "no")
    with pytest.raises(ValueError, match="RFA_CUTE must be 0 or 1, not 'no'"):
        host._unavailable.__wrapped__(HOPPER)


# Gradients that it cannot compute.


def refused(run: Any) -> None:
    with pytest.raises(Exception, match=NO_BACKWARD) as raised:
        run()
    assert "kernel 'cute' cannot do this call" in str(raised.value)


def test_gradients_are_refused_before_anything_is_computed(
    on_hopper: list[Call], without_backward: None
) -> None:
    q, k, v = (x[None] for x in inputs(grad=True))
    refused(lambda: rfa.cute_flash_attn_func(q, k, v))
    refused(lambda: rfa.flash_attn_func(q.detach(), k, v.detach(), kernel="cute"))
    sink = torch.zeros(4, requires_grad=True)
    plain = [x.detach() for x in (q, k, v)]
    refused(lambda: rfa.cute_flash_attn_func(*plain, sink=sink))
    ways = {"world_size": 2, "layout": "zigzag", "route": "ring", "kernel": "cute"}
    refused(lambda: rfa.virtual_ring_attention(q, k, v, **ways))
    assert not on_hopper
    with torch.no_grad():
        out = rfa.cute_flash_attn_func(q, k, v)
    assert len(on_hopper) == 1
    refused(lambda: rfa.cute_flash_attn_func(q, k, v))  # the call above is not taken for this one
    assert torch.equal(rfa.cute_flash_attn_func(*plain), out)
    assert len(on_hopper) == 2
    assert not any(call.needs_grad for call in on_hopper)


def test_gradients_are_refused_under_torch_compile(
    on_hopper: list[Call], without_backward: None
) -> None:
    run = torch.compile(rfa.cute_flash_attn_func, fullgraph=True, backend="aot_eager")
    plain = [x[None] for x in inputs()]
    out = run(*plain, causal=True)
    assert torch.equal(out, rfa.cute_flash_attn_func(*plain, causal=True))
    launched = len(on_hopper)
    leaves = [x.clone().requires_grad_() for x in plain]
    refused(lambda: run(*leaves, causal=True))
    assert len(on_hopper) == launched
    with torch.no_grad():
        assert torch.equal(run(*leaves, causal=True), out)


def test_measurements_say_that_it_cannot_compute_gradients(
    on_hopper: list[Call], without_backward: None
) -> None:
    workload = Workload(1, 32, 2, 2, 8, True)
    options = {"kind": "compare", "repeats": 1}
    rows = measure(["cute", "reference"], workload, CPU, **options)
    failed = {row.implementation: row.failed for row in rows}
    assert NO_BACKWARD in str(failed["cute"])
    assert failed["reference"] is None
    (row,) = measure(["cute"], workload, CPU, grad=False, **options)
    assert (row.passes, row.failed) == ("forward", None)


def test_a_backward_that_is_asked_for_all_the_same(without_backward: None) -> None:
    with pytest.raises(NotImplementedError, match=NO_BACKWARD):
        cute.KERNEL.delta(torch.empty(0), torch.empty(0), call_of())


def test_the_backward_is_that_of_its_module(
    with_backward: ModuleType, on_hopper: list[Call]
) -> None:
    assert base.why_not("cute", call_of(needs_grad=True)) == []
    assert cute.KERNEL._needed() is with_backward


def test_a_backward_without_triton(
    with_backward: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_module(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    missing = "triton"
    monkeypatch.setattr(cute.importlib, "import_module", import_module)
    (reason,) = base.why_not("cute", call_of(needs_grad=True))
    assert "needs triton, which is not installed" in reason
    assert base.why_not("cute", call_of()) == []
    missing = "something_of_ours"
    cute._backward.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="something_of_ours"):
        base.why_not("cute", call_of(needs_grad=True))


# Layouts and routes, functions, torch.compile: the state and the flags that the kernel gets.


def gradients(out: Tensor, leaves: Sequence[Tensor], dout: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("route", route_names())
@pytest.mark.parametrize("layout", layout_names())
@pytest.mark.usefixtures("with_backward")
def test_every_layout_and_route(layout: str, route: str, on_hopper: list[Call]) -> None:
    leaves = inputs(grad=True)
    dout = torch.randn(leaves[0].shape).bfloat16()
    options: dict[str, Any] = {"causal": True, "softcap": 5.0, "cu_seqlens": CU_SEQLENS}
    options["sink"] = torch.linspace(-1, 1, 4)
    found = {}
    for kernel in ("cute", "reference"):
        out = rfa.virtual_ring_attention(
            *leaves, world_size=3, layout=layout, route=route, kernel=kernel, **options
        )
        found[kernel] = gradients(out, leaves, dout)
    assert on_hopper
    assert all(call.needs_grad for call in on_hopper)
    for a, b in zip(found["cute"], found["reference"], strict=True):
        torch.testing.assert_close(a, b, atol=0.03, rtol=0.03)


@pytest.mark.usefixtures("with_backward")
def test_one_device_and_torch_compile(on_hopper: list[Call]) -> None:
    leaves = [x[None] for x in inputs(grad=True)]
    dout = torch.randn(leaves[0].shape).bfloat16()
    compiled = torch.compile(rfa.cute_flash_attn_func, fullgraph=True, backend="aot_eager")
    want = gradients(rfa.flash_attn_func(*leaves, kernel="reference", causal=True), leaves, dout)
    for run in (rfa.cute_flash_attn_func, compiled):
        got = gradients(run(*leaves, causal=True), leaves, dout)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=0.03, rtol=0.03)
    assert len(on_hopper) == 2
    out, lse, _ = rfa.cute_flash_attn_func(*leaves, causal=True, return_attn_probs=True)
    assert all(
        torch.isfinite(x).all() for x in torch.autograd.grad((out.sum() + lse.sum()), leaves)
    )


# Sizes.


def sizes_for(call: Call, tokens: int, batch: int) -> Any:
    span = Span(0, tokens, 0, 1, 0, 0)
    tile = make_tile(span, span, call.mask)
    assert tile is not None
    return host.sizes_of([tile], call, torch.empty(batch, tokens, call.nheads, call.headdim))


def test_three_consumers_where_they_take_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sequences, or lengths that fill blocks of 192 queries, and enough of them."""
    monkeypatch.setattr("ring_flash_attn.kernels.scheduler.processors", lambda device: 132)
    plain = call_of(device=CPU)
    for tokens, batch, consumers in (
        (8192, 8, 3),
        (512, 48, 2),  # blocks of 192 queries leave an eighth of their last one empty
        (190, 774, 3),
        (128, 25, 2),
        (1024, 2, 2),  # so few items that longer ones take longer
    ):
        assert sizes_for(plain, tokens, batch).consumers == consumers, tokens
    for other in ({"dropout_p": 0.1}, {"alibi_slopes": torch.ones(4)}, {"headdim": 128}):
        assert sizes_for(call_of(device=CPU, **other), 8192, 8).consumers == 2


def test_sizes_do_not_depend_on_multiprocessors_left_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ring_flash_attn.kernels.scheduler.processors", lambda device: 132)
    found = []
    for free in (132, 66):
        monkeypatch.setattr(host, "free_processors", lambda device, free=free: free)
        monkeypatch.setattr(
            "ring_flash_attn.kernels.scheduler.free_processors", lambda device, free=free: free
        )
        found.append([sizes_for(call_of(device=CPU), n, 4) for n in range(256, 4096, 64)])
    assert found[0] == found[1]


# Launches.


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """[kernels that were compiled, launches of all of them]; in the place of CuTe DSL's."""
    compiled: list[Any] = []
    launches: list[tuple[Any, ...]] = []

    def forward_kernel(traits: Any) -> Any:
        compiled.append(traits)
        return lambda *arguments: launches.append(arguments)

    module = ModuleType(f"{cute.__name__}.compiled")
    module.forward_kernel = forward_kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(host, "traits_of", lambda *arguments: arguments)
    monkeypatch.setattr(host, "_launches", Cache(512))
    return [compiled, launches]


def state_for(q: Tensor, carried: bool) -> State:
    batch, rows, heads, _ = q.shape
    lse = torch.empty(batch, heads, rows)
    out = torch.empty(q.shape, dtype=torch.float32 if carried else q.dtype)
    return State(out, lse, torch.empty_like(q) if carried else None)


def tiles_for(rows: int) -> list[Tile]:
    span = Span(0, rows, 0, 1, 0, 0)
    tile = make_tile(span, span, Mask(right=0))
    assert tile is not None
    return [tile]


@pytest.mark.parametrize("carried", [False, True])
def test_a_launch_is_prepared_once(compiler: list[Any], carried: bool) -> None:
    compiled, launches = compiler
    call, tiles = call_of(device=CPU), tiles_for(40)
    tensors = []
    for _ in range(3):
        q, k, v = (torch.randn(2, 40, heads, 64).bfloat16() for heads in (4, 2, 2))
        state = state_for(q, carried)
        host.forward(q, k, v, tiles, state, call)
        out = state.out if carried else state.lse
        tensors.append((q, k, v, out, state.lse, state.result if carried else state.out))
    assert len(compiled) == 1
    assert len(launches) == 3
    for given, arguments in zip(tensors, launches, strict=True):
        assert arguments[:6] == tuple(x.data_ptr() for x in given)
        assert arguments[9:] == launches[0][9:]
    work = compiled[0][0]
    tables = work.blocks.data_ptr(), work.tiles.data_ptr()
    batch, rows, rows_k, heads, heads_k, d, dv, count = launches[0][11:19]
    assert launches[0][9:11] == tables
    assert (batch, rows, rows_k, heads, heads_k, d, dv, count) == (2, 40, 40, 4, 2, 64, 64, 1)
    host.forward(*inputs_of(80), tiles_for(80), state_for(inputs_of(80)[0], carried), call)
    assert len(compiled) == 2, "another length is another launch, if of the same kernel"


def inputs_of(rows: int) -> list[Tensor]:
    return [torch.zeros(1, rows, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]


def test_arguments_are_as_many_as_the_kernel_takes(compiler: list[Any]) -> None:
    """Read from the source, which cannot be imported without CuTe DSL."""
    q, k, v = inputs_of(16)
    host.forward(q, k, v, tiles_for(16), state_for(q, False), call_of(device=CPU))
    names = cute_device.names_of("forward.py")
    ((arguments,),) = [compiler[1]]
    assert len(arguments) == len(names)
    given = dict(zip(names, arguments, strict=True))
    assert given["softcap"] == 1.0
    assert given["scale"] == pytest.approx(0.1)
    assert given["q_row"] == 4 * 64
    assert given["l_row"] == 1
    assert given["stream"] == 0


def test_slices_that_tma_cannot_read_are_copied(compiler: list[Any]) -> None:
    q, k, v = inputs_of(16)
    wide = torch.randn(1, 16, 4, 68).bfloat16()
    host.forward(wide[..., :64], k, v, tiles_for(16), state_for(q, False), call_of(device=CPU))
    (arguments,) = compiler[1]
    assert arguments[0] != wide.data_ptr()
    assert arguments[1] == k.data_ptr()


# Stored kernels.


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(stored.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert stored.folder() == tmp_path / "ring_flash_attn" / "cute"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert stored.folder() == tmp_path / ".cache" / "ring_flash_attn" / "cute"
    monkeypatch.setenv(stored.VARIABLE, "~/mine")
    assert stored.folder() == tmp_path / "mine"
    monkeypatch.setenv(stored.VARIABLE, "")
    assert stored.folder() is None
    assert stored.path_of("forward", "traits") is None


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is stored, and no folder `~` appears where the process runs."""
    monkeypatch.delenv(stored.VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no HOME, an unknown user
    assert stored.folder() is None
    monkeypatch.setenv(stored.VARIABLE, "~/mine")
    assert stored.folder() is None
    monkeypatch.setenv(stored.VARIABLE, "/mine")
    assert stored.folder() == Path("/mine")


def test_a_file_belongs_to_all_that_made_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(stored.VARIABLE, str(tmp_path))
    monkeypatch.setattr(stored, "version", lambda package: "4.8.1")
    found = []

    def note() -> None:
        stored.fingerprint.cache_clear()
        found.append(stored.path_of("forward", ("bf16", 128)))

    note()
    with monkeypatch.context() as changed:
        changed.setattr(stored, "version", lambda package: "4.8.2")
        note()
    with monkeypatch.context() as changed:
        changed.setattr(stored.platform, "machine", lambda: "riscv64")
        note()
    with monkeypatch.context() as changed:
        changed.setattr(stored, "ARCH", "sm_100a")
        note()
    sources = tmp_path / "kernels" / "cute"
    sources.mkdir(parents=True)
    with monkeypatch.context() as changed:
        changed.setattr(stored, "_SOURCES", sources)
        for text in ("a = 1", "a = 2"):
            (sources.parent / "tables.py").write_text(text)
            note()
        (sources / "forward.py").write_text("")
        note()
    note()
    assert found[0] == found[-1]
    assert len(set(found)) == len(found) - 1
    assert stored.path_of("backward", ("bf16", 128)) != found[0]
    assert stored.path_of("forward", ("bf16", 64)) != found[0]
    assert found[0].parent.name.startswith("4.8.1-sm_90a-")
    stored.fingerprint.cache_clear()


def test_readers_see_whole_files(tmp_path: Path) -> None:
    path, size = tmp_path / "version" / "forward.o", 1 << 18
    stored.store(path, lambda file: file.write_bytes(b"\0" * size))
    done = threading.Event()

    def write(letter: int) -> None:
        for _ in range(20):
            stored.store(path, lambda file: file.write_bytes(bytes([letter]) * size))

    def read() -> int:
        times = 0
        while not done.is_set():
            content = path.read_bytes()
            assert len(content) == size
            assert len(set(content)) == 1
            times += 1
        return times

    with ThreadPoolExecutor(6) as pool:
        reading = pool.submit(read)
        list(pool.map(write, range(4)))
        done.set()
        assert reading.result() > 0
    assert list(path.parent.iterdir()) == [path], "nothing is left behind"


def test_a_disk_that_is_full_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "version" / "forward.o"

    def write(file: Path) -> None:
        file.write_bytes(b"half of")
        raise OSError("no space left on device")

    stored.store(path, write)
    assert list(path.parent.iterdir()) == []
    (tmp_path / "file").write_text("")
    stored.store(tmp_path / "file" / "version" / "forward.o", lambda file: None)


def version_folder(number: int) -> str:
    return f"4.8.{number}-sm_90a-x86_64-{number:016x}"


def test_the_newest_versions_are_kept(tmp_path: Path) -> None:
    for number in range(12):
        path = tmp_path / version_folder(number) / "forward.o"
        stored.store(path, lambda file: file.write_bytes(b"x"))
        os.utime(path.parent, (number, number))
    stored.store(tmp_path / version_folder(12) / "forward.o", lambda file: file.write_bytes(b"x"))
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {version_folder(number) for number in range(5, 13)}


def test_what_is_not_ours_is_never_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user may name any folder, their home or /tmp."""
    monkeypatch.setenv(stored.VARIABLE, str(tmp_path))
    for number in range(12):
        theirs = tmp_path / f"project {number}"
        theirs.mkdir()
        (theirs / "forward.o").write_text("x")
        os.utime(theirs, (number, number))
        other = tmp_path / version_folder(number) / "notes.txt"
        other.parent.mkdir()
        other.write_text("x")
        os.utime(other.parent, (number, number))
    path = stored.path_of("forward", "traits")
    assert path is not None
    before = set(tmp_path.rglob("*"))
    stored.store(path, lambda file: file.write_bytes(b"x"))
    assert set(tmp_path.rglob("*")) == before | {path, path.parent}
    assert stored._VERSION.fullmatch(path.parent.name), "and so ours is found again"


def test_it_is_imported_without_its_dsl() -> None:
    """Whatever `rfa info` or `why_not` ask, nothing imports CuTe DSL."""
    for module in (cute, host, stored):
        assert "import cutlass" not in inspect.getsource(module)
