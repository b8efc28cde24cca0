"""Measuring on one device: what is compared computes the same, and failures stay with one row."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from typer.testing import CliRunner

from ring_flash_attn.bench import implementations
from ring_flash_attn.bench.implementations import Implementation, find_implementation
from ring_flash_attn.bench.machine import _from_nvidia_smi, commit, find_device, machine
from ring_flash_attn.bench.measure import _capture, errors_of, exact, measure
from ring_flash_attn.bench.timing import measure_peak
from ring_flash_attn.bench.workload import PRESETS, Workload, call_of
from ring_flash_attn.cli.app import app
from ring_flash_attn.kernels.base import kernel_names
from ring_flash_attn.verify.oracle import Rules, oracle

CPU = torch.device("cpu")
SMALL = Workload(2, 37, 4, 2, 8, True, (-1, -1), torch.float32)
WINDOWS = ((-1, -1), (5, -1), (5, 3), (0, 0))
OTHERS: dict[str, Any] = {"headdim_v": 6, "softcap": 2.0}
HERE = ("reference", "torch standard", "SDPA flash", "SDPA math")


def workload(causal: bool = True, window: tuple[int, int] = (-1, -1)) -> Workload:
    return Workload(2, 37, 4, 2, 8, causal, window, torch.float64)


def right(of: Workload) -> tuple[dict[str, Tensor], tuple[Tensor, ...], Tensor]:
    """Of the oracle that `rfa verify` uses: results, and what they are results of."""
    (q, k, v), dout = of.tensors(CPU)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = oracle(q, k, v, Rules(causal=of.causal, window_size=of.window, softcap=of.softcap))
    grads = torch.autograd.grad(out, leaves, dout)
    found = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))
    return found, tuple(leaves), dout


# Workloads.


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", WINDOWS)
def test_pairs_and_flops(causal: bool, window: tuple[int, int]) -> None:
    of = workload(causal, window)
    seen = sum(of.mask.allows(j - i) for i in range(37) for j in range(37))
    assert of.pairs == seen
    assert of.flops() == 4 * 2 * 4 * 8 * seen


def test_presets_are_those_of_the_documents() -> None:
    batches = {name: (w.batch, w.seqlen, w.nheads, w.headdim) for name, w in PRESETS.items()}
    assert batches["gpt2-small"] == (8, 1024, 12, 64)
    assert batches["gpt3"] == (2, 2048, 96, 128)
    assert batches["bert-base"] == (16, 512, 12, 64)
    assert batches["bert-large"] == (8, 512, 16, 64)
    assert batches["8k"] == (1, 8192, 8, 64)
    assert batches["16k"] == (1, 16384, 8, 64)
    assert batches["batch-inference"] == (32, 512, 8, 64)
    assert PRESETS["llama3-8b"].nheads_k == 8
    assert {name for name, w in PRESETS.items() if w.causal} == {"gpt2-small", "gpt3", "llama3-8b"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 0}, "batch.*positive.*0"),
        ({"nheads": 3}, "query heads.*3"),
        ({"window": (-2, 0)}, "window"),
        ({"dtype": torch.int32}, "int32"),
        ({"batch": 2, "cu_seqlens": (0, 5)}, "batch 2"),
        ({"batch": 1, "cu_seqlens": (1, 5)}, "cu_seqlens 1,5"),
        ({"batch": 1, "cu_seqlens": (0, 5), "cu_seqlens_k": (0, 2, 5)}, "as many documents"),
    ],
)
def test_wrong_workloads_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Workload(**{"nheads_k": 2, **changes})


PACKED = Workload(1, 0, 4, 2, 8, True, dtype="fp32", cu_seqlens=(0, 7, 7, 31))
FEATURES = replace(PACKED, cu_seqlens_k=(0, 9, 12, 31), headdim_v=6, softmax_scale=0.0, sink=True)


@pytest.mark.parametrize("of", [SMALL, PACKED, FEATURES], ids=str)
def test_a_workload_survives_a_file(of: Workload) -> None:
    assert Workload.from_dict(json.loads(json.dumps(of.to_dict()))) == of


def test_documents_are_counted_one_by_one() -> None:
    assert (PACKED.seqlen, PACKED.lengths) == (31, (7, 0, 24))
    assert PACKED.pairs == 7 * 8 // 2 + 24 * 25 // 2
    again = replace(PACKED, cu_seqlens=(0, 7, 12, 19, 26, 31))
    assert again.pairs == 3 * (7 * 8 // 2) + 2 * (5 * 6 // 2)
    keys = ((7, 9), (0, 3), (24, 19))  # the last query sees the last key
    pairs = sum(max(0, i + 1 + k - q) for q, k in keys for i in range(q))
    assert FEATURES.pairs == pairs
    assert FEATURES.flops() == 2 * 4 * pairs * (8 + 6)
    assert FEATURES.bytes() == 31 * (4 + 2) * (8 + 6) * 4 + 31 * 4 * 4
    assert FEATURES.bytes("both") == 3 * 31 * (4 + 2) * (8 + 6) * 4 + 2 * 31 * 4 * 4


def test_a_rank_has_its_share_of_every_document() -> None:
    assert replace(PACKED, cu_seqlens=(0, 8, 8, 32)).share(4).lengths == (2, 0, 6)
    uneven = PACKED.share(4)
    assert uneven.seqlen == 31 // 4
    assert all(abs(own - whole / 4) < 1 for own, whole in zip(uneven.lengths, PACKED.lengths))
    assert SMALL.share(4) == replace(SMALL, seqlen=37 // 4)


def test_the_call_has_the_workloads_own_scale() -> None:
    assert call_of(FEATURES, CPU).softmax_scale == 0.0
    assert call_of(PACKED, CPU).softmax_scale == 8**-0.5


@pytest.mark.parametrize("of", [FEATURES, replace(SMALL, sink=True)], ids=["keys", "sink"])
def test_what_would_be_left_out_is_refused(of: Workload) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens_k|sink"):
        measure(["reference"], of, CPU, kind="bench", repeats=1)


# What is right.


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("features", [{}, OTHERS], ids=["plain", "features"])
def test_fp64_by_rows_is_the_oracle(
    causal: bool,
    window: tuple[int, int],
    features: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a few rows at a time; the first KV head of the first sequence, and its query heads."""
    monkeypatch.setattr("ring_flash_attn.bench.measure._SCORES", 10 * 37)
    of = replace(workload(causal, window), **features)
    want, leaves, dout = right(of)
    found = exact(of, *(x.detach() for x in leaves), dout)
    for name, value in found.items():
        heads = 2 if name in ("out", "dq") else 1
        assert torch.allclose(value, want[name][0, :, :heads], rtol=0, atol=1e-12), name
    errors = errors_of({"dv": want["dv"] + 0.5}, found)["dv"]
    for name in ("max", "mean", "rmse"):
        assert errors[name] == pytest.approx(0.5)
    largest = want["dv"][0, :, 0].abs().max().item()
    assert errors["relative"] == pytest.approx(0.5 / largest)


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("features", [{}, {"headdim_v": 6}, OTHERS], ids=["plain", "dv", "both"])
def test_implementations_compute_the_same(
    name: str, causal: bool, window: tuple[int, int], features: dict[str, Any]
) -> None:
    """All batches and heads, out and gradients."""
    of = replace(workload(causal, window), **features)
    found = find_implementation(name, of, CPU)
    reasons = found.why_not(of, CPU, True)
    if name.startswith("SDPA") and of.softcap:
        assert "it is compared without softcap only" in reasons
        return
    if reasons:
        more = window != (-1, -1) or of.headdim_v is not None
        assert (name, more) == ("SDPA flash", True), reasons
        return
    want, leaves, dout = right(of)
    out = found.make(of, CPU)(*leaves)  # type: ignore[arg-type]
    grads = torch.autograd.grad(out, leaves, dout)
    for (tensor, value), got in zip(want.items(), (out, *grads), strict=True):
        assert torch.allclose(got, value, rtol=0, atol=1e-12), tensor


@pytest.mark.parametrize("features", [{}, {"causal": False, "window": (5, 3)}, OTHERS])
def test_packed_documents(features: dict[str, Any]) -> None:
    """Ours against fp64, one document after the other; others say that they have none."""
    of = replace(PACKED, dtype="fp64", **features)
    qkv, dout = of.tensors(CPU)
    found = find_implementation("reference", of, CPU)
    leaves = [x.requires_grad_() for x in qkv]
    out = found.make(of, CPU)(*leaves)
    grads = torch.autograd.grad(out, leaves, dout)
    want = exact(of, *(x.detach() for x in leaves), dout)
    mine = dict(zip(want, (out.detach(), *grads), strict=True))
    for name, errors in errors_of(mine, want).items():
        assert errors["max"] < 1e-12, name
    for a, b in pairwise(PACKED.cu_seqlens or ()):
        if a < b:
            alone = replace(of, cu_seqlens=None, seqlen=b - a)
            part = exact(alone, *(x.detach()[:, a:b] for x in leaves), dout[:, a:b])
            for name, value in part.items():
                assert torch.allclose(value, want[name][a:b], rtol=0, atol=1e-14), name
    for name in set(HERE) - set(kernel_names()):
        reasons = find_implementation(name, PACKED, CPU).why_not(PACKED, CPU, True)
        assert "it is compared without packed documents only" in reasons, name


def test_packed_documents_are_measured() -> None:
    names = ("reference", "torch standard")
    rows = measure(names, PACKED, CPU, kind="compare", repeats=1, errors=True)
    ours, theirs = rows[:3], rows[3:]
    assert all(row.failed is None for row in ours)
    assert ours[-1].errors["dq"]["relative"] < 1e-5
    assert all(row.failed and "without packed documents" in row.failed for row in theirs)
    assert ours[0].workload["lengths"] == [7, 0, 24]


def test_auto_is_the_kernel_that_it_picks() -> None:
    assert find_implementation("auto", SMALL, CPU).name == "reference"
    with pytest.raises(ValueError, match=r"'nobody'.*auto.*triton.*SDPA flash"):
        find_implementation("nobody", SMALL, CPU)


def test_libraries_get_the_arguments_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn's functions: how a window without a limit is written, and what they return."""
    seen: list[dict[str, Any]] = []

    class Library:
        @staticmethod
        def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
            seen.append(options)
            return (q, None) if len(seen) > 1 else q

        @staticmethod
        def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
            offsets = [options.pop(f"cu_seqlens_{side}") for side in "qk"]
            assert offsets[0].dtype == torch.int32
            assert [each.tolist() for each in offsets] == [[0, 7, 7, 31]] * 2
            seen.append(options)
            return q, None

    monkeypatch.setattr(implementations, "import_module", lambda name: Library)
    q = torch.ones(1)
    for name in ("flash-attn 2", "flash-attn 4"):
        run = implementations._LIBRARIES[name].make(workload(True, (5, -1)), CPU)
        assert run(q, q, q) is q
    run = implementations._LIBRARIES["flash-attn 4"].make(PACKED, CPU)
    packed = torch.ones(1, 31, 4, 8)
    assert run(packed, packed, packed).shape == packed.shape
    assert seen == [
        {"causal": True, "window_size": (5, -1)},
        {"causal": True, "window_size": (5, None)},
        {"causal": True, "window_size": (None, None), "max_seqlen_q": 24, "max_seqlen_k": 24},
    ]


# Measuring.


def impostor(run: Callable[..., Tensor], reasons: tuple[str, ...] = ()) -> Implementation:
    return Implementation("impostor", lambda *_: list(reasons), lambda *_: run)


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Callable[[Implementation], None]:
    """Puts an implementation among the peers."""

    def put(implementation: Implementation) -> None:
        monkeypatch.setattr(
            implementations,
            "_LIBRARIES",
            {**implementations._LIBRARIES, implementation.name: implementation},
        )

    return put


def standard() -> Callable[..., Tensor]:
    return find_implementation("torch standard", SMALL, CPU).make(SMALL, CPU)


def test_rows_of_a_measurement() -> None:
    names = ("torch standard", "reference", "torch standard")
    rows = measure(names, SMALL, CPU, kind="compare", repeats=3, errors=True)
    assert [(row.implementation, row.passes) for row in rows] == [
        (name, way) for name in names[:2] for way in ("forward", "backward", "both")
    ]
    for row in rows:
        assert row.kind == "compare"
        assert row.workload == SMALL.to_dict()
        assert len(row.samples_ms) >= 3
        assert row.peak_bytes is None
        factor = {"forward": 1.0, "backward": 2.5, "both": 3.5}[row.passes]
        assert row.tflops == pytest.approx(factor * SMALL.flops() / (row.ms or 0) / 1e9)
        assert set(row.errors) == ({"out", "dq", "dk", "dv"} if row.passes == "both" else set())
        assert all(0 < each["relative"] < 1e-5 for each in row.errors.values())


def test_without_gradients_there_is_one_pass() -> None:
    (row,) = measure(["reference"], SMALL, CPU, kind="bench", repeats=1, grad=False, errors=True)
    assert row.passes == "forward"
    assert set(row.errors) == {"out"}


class Odd(Exception):
    """Of a compiler, say."""


@pytest.mark.parametrize("after", [0, 1, 5, 20])
@pytest.mark.parametrize(
    "error", [RuntimeError("some\n words"), Odd("some words"), torch.OutOfMemoryError("9 GiB")]
)
def test_one_that_fails_does_not_stop_the_rest(
    enter: Callable[[Implementation], None], after: int, error: Exception
) -> None:
    """Whether at once, or later."""
    good, runs = standard(), []

    def run(*qkv: Tensor) -> Tensor:
        runs.append(1)
        if len(runs) > after:
            raise error
        return good(*qkv)

    enter(impostor(run))
    names = ["impostor", "torch standard"]
    rows = measure(names, SMALL, CPU, kind="compare", repeats=4, errors=True)
    assert [row.implementation for row in rows] == ["impostor"] * 3 + ["torch standard"] * 3
    assert len(runs) == after + 1, "it is not tried again"
    memory = isinstance(error, torch.OutOfMemoryError)
    why = "out of memory: 9 GiB" if memory else f"{type(error).__name__}: some words"
    for row in rows[:3]:
        assert (row.failed, row.samples_ms) == (why, ())
    assert all(row.ms and row.failed is None for row in rows[3:])


def test_one_that_cannot_is_not_tried(enter: Callable[[Implementation], None]) -> None:
    enter(impostor(lambda *_: pytest.fail("tried"), ("one reason", "another")))
    rows = measure(["impostor"], SMALL, CPU, kind="compare", repeats=1)
    assert [(row.passes, row.failed) for row in rows] == [
        (each, "cannot: one reason; another") for each in ("forward", "backward", "both")
    ]


def test_a_workload_that_does_not_fit_fails_and_no_more() -> None:
    huge = Workload(1, 10**12, 8, 8, 64)
    rows = measure(["reference"], huge, CPU, kind="bench", repeats=1)
    assert all(row.failed for row in rows)


def test_times_stay_where_errors_cannot_be_found(
    enter: Callable[[Implementation], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("9 GiB")

    monkeypatch.setattr("ring_flash_attn.bench.measure.exact", full)
    *_, row = measure(["reference"], SMALL, CPU, kind="compare", repeats=1, errors=True)
    assert row.ms
    assert (row.errors, row.note) == ({}, "no errors: out of memory: 9 GiB")


def test_nothing_is_kept_of_a_workload(enter: Callable[[Implementation], None]) -> None:
    """Not even until the garbage collector comes: it would be the next one's memory."""
    good, seen = standard(), []

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(weakref.ref(q))
        return good(q, k, v)

    enter(impostor(run))
    gc.disable()
    try:
        measure(["impostor"], SMALL, CPU, kind="compare", repeats=1, errors=True)
        assert not any(each() for each in seen)
    finally:
        gc.enable()


def test_one_name_is_measured_once() -> None:
    rows = measure(["auto", "reference"], SMALL, CPU, kind="compare", repeats=1, grad=False)
    assert [row.implementation for row in rows] == ["reference"]


def test_a_wrong_result_has_a_large_error(enter: Callable[[Implementation], None]) -> None:
    good = standard()
    enter(impostor(lambda *qkv: good(*qkv) * 1.5))
    *_, row = measure(["impostor"], SMALL, CPU, kind="compare", repeats=1, errors=True)
    assert all(each["relative"] == pytest.approx(0.5, abs=1e-4) for each in row.errors.values())


def test_the_backward_pass_alone_is_timed(
    enter: Callable[[Implementation], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the forward pass before it takes does not count."""
    clock = [0.0]
    monkeypatch.setattr("ring_flash_attn.bench.timing.time.perf_counter", lambda: clock[0])
    good = standard()

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, out: Tensor) -> Tensor:
            clock[0] += 3.0
            return out.clone()

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> Tensor:
            clock[0] += 4.0
            return dout

    enter(impostor(lambda *qkv: Slow.apply(good(*qkv))))
    rows = measure(["impostor"], SMALL, CPU, kind="bench", repeats=2)
    assert [row.ms for row in rows] == [3000.0, 4000.0, 7000.0]


def test_a_graph_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else does: the output that gradients are of, say, and what autograd saved for them."""
    graph, stream = Mock(), Mock()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: nullcontext())
    read = torch.zeros(1)
    watched = weakref.ref(read)
    replay = _capture(lambda x=read: x + 1, stream)
    del read
    gc.collect()
    assert watched() is not None
    replay()
    graph.replay.assert_called_once()


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(ValueError, match="CUDA graphs need a GPU, not cpu"):
        measure(["reference"], SMALL, CPU, kind="compare", graphs=True)
    shown = CliRunner().invoke(app, ["compare", "reference", "--graphs", "--device", "cpu"])
    assert shown.exit_code == 2
    assert "CUDA graphs need a GPU" in shown.output


def test_no_repeats_are_refused() -> None:
    with pytest.raises(ValueError, match="repeats must be positive, not 0"):
        measure(["reference"], SMALL, CPU, kind="bench", repeats=0)


def test_the_machine() -> None:
    found = machine(CPU)
    assert found["kind"] == "cpu"
    assert str(found["device"]).startswith("cpu (")
    assert measure_peak(CPU, torch.float16) is None
    for wrong in ("tpu", "meta", "cuda:99"):
        with pytest.raises(ValueError, match=wrong):
            find_device(wrong)


@pytest.mark.parametrize(
    ("script", "want"),
    [
        (
            """case "$2" in
*compute-apps*) printf '12\\n34\\n56\\n';;
*) echo "$@" > seen; echo "580.1, 1980, [N/A], 2619, 700.00, 34";;
esac""",
            {
                "other_processes": 2,
                "driver": "580.1",
                "sm_clock_mhz": 1980.0,
                "memory_clock_mhz": 2619.0,
                "power_limit_w": 700.0,
                "temperature_c": 34.0,
            },
        ),
        ("exit 6", {}),
        (None, {}),
    ],
)
def test_what_the_driver_tells(
    script: str | None, want: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does not know is left out; so is everything where it is not installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert _from_nvidia_smi("12-ab") == want
    if want:
        assert "--id=GPU-12-ab --query-gpu=driver_version," in (tmp_path / "seen").read_text()


def test_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFA_COMMIT", "abc")
    assert commit() == "abc"


@pytest.mark.parametrize("seqlen", [100, 512, 700])
@pytest.mark.parametrize("window", [(-1, -1), (0, -1), (127, 0), (128, 129), (300, -1), (-1, 255)])
def test_flex_attention_gets_the_mask_that_torch_would_make(
    seqlen: int, window: tuple[int, int]
) -> None:
    causal = window == (-1, -1)
    mask = implementations._flex_mask(Workload(seqlen=seqlen, causal=causal, window=window), CPU)
    lengths = (seqlen, seqlen)
    want = create_block_mask(mask.mask_mod, None, None, *lengths, "cpu")
    for name in ("kv", "full_kv", "q", "full_q"):
        got, right = (_blocks(each, name) for each in (mask, want))
        assert got == right, name


def _blocks(mask: BlockMask, name: str) -> list[set[int]]:
    """Of each row, the blocks that it lists."""
    counts, lists = (getattr(mask, f"{name}_{part}")[0, 0] for part in ("num_blocks", "indices"))
    return [set(row[:count].tolist()) for count, row in zip(counts.tolist(), lists, strict=True)]
