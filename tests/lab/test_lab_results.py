"""docs/lab/results.md: its tables are those of the files, and its formulas give their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any

import pytest
import torch
from documents import ROOT, table
from torch.utils._python_dispatch import TorchDispatchMode

from ring_flash_attn.bench.results import MISSING, Results, Row, load
from ring_flash_attn.bench.workload import BOTH, FORWARD
from ring_flash_attn.cli.lab_bench import _host_mark
from ring_flash_attn.lab.bench.attention import BEFORE_BACKWARD
from ring_flash_attn.lab.bench.config import (
    BF16,
    FP32,
    IMPLEMENTATIONS,
    OURS,
    SIZES,
    STANDARD,
    STEP,
    AttentionConfig,
    ModelConfig,
    ModelSize,
)
from ring_flash_attn.lab.bench.transformer import Transformer

DOCUMENT = "docs/lab/results.md"
NO_MEMORY = "out of memory"
ATTENTION, ATTENTION_BF16 = "lab_attention_h200", "lab_attention_bf16_h200"
MODEL, COMPILED_MODEL = "lab_model_h200", "lab_model_compiled_h200"
GIB = 2**30
Cells = dict[tuple[object, ...], Row]


def stored(name: str) -> Results:
    return load(ROOT / "results" / f"{name}.json")


def number(x: float) -> str:
    """Three digits."""
    return f"{x:.0f}" if x >= 100 else f"{x:#.3g}"


def attention_cells(name: str) -> Cells:
    return {
        (row.workload["headdim"], row.workload["seqlen"], row.implementation, row.passes): row
        for row in stored(name).rows
    }


def times(found: Cells, *place: object) -> str:
    """Forward / backward, ms."""
    both = [pass_time(found.get((*place, way))) for way in ("forward", "backward")]
    return " / ".join(dict.fromkeys(both) if both[0] == NO_MEMORY else both)


def pass_time(row: Row | None) -> str:
    if row is None:
        return MISSING
    if row.failed is not None:
        assert row.failed.startswith(NO_MEMORY), row.failed
        return NO_MEMORY
    return number(median(row.samples_ms))


def memory(found: Cells, *place: object) -> str:
    """MiB before the backward pass, or why it did not come to it."""
    row = found[(*place, "backward")]
    if BEFORE_BACKWARD not in row.values:
        assert (row.failed or "").startswith(NO_MEMORY), row.failed
        return NO_MEMORY
    return number(row.values[BEFORE_BACKWARD] / 2**20)


def attention_table(name: str, cell: Callable[..., str], heads: Iterable[int]) -> list[list[str]]:
    """A row for each size, a column for each implementation of the file."""
    found, settings = attention_cells(name), stored(name).settings
    return [
        [str(d), f"{n:,}", *(cell(found, d, n, each) for each in settings["implementation"])]
        for d in heads
        for n in settings["seqlen"]
    ]


# A whole Transformer.


def model_cells(name: str) -> Cells:
    """By size, context, precision, attention and pass."""
    return {
        (*(row.workload[each] for each in ("model", "seqlen", "precision")), *_kind(row)): row
        for row in stored(name).rows
    }


def _kind(row: Row) -> tuple[str, str]:
    return row.implementation, row.passes


def took(row: Row) -> float:
    return median(row.samples_ms)


def marked(row: Row) -> str:
    """ms, with the command's own mark for what the host delays."""
    return number(took(row)) + _host_mark(row)


def gib(row: Row) -> str:
    assert row.peak_bytes is not None
    return number(row.peak_bytes / GIB)


def parameters(name: str) -> int:
    """A layer has q, k and v in one matrix, out, gate, up, down and two norms: 7 tensors."""
    size, vocab = SIZES[name], ModelConfig().vocab
    d = size.d_model
    return size.layers * (d * (4 * d + 3 * size.d_ff) + 2 * d) + 2 * d * vocab + d


def saved_by_ours(name: str, context: int, precision: str) -> float:
    """Bytes: P, in fp32 for softmax, and under autocast in bf16 for the product as well.

    Ours keeps v as a part of q, k and v together: two tensors of rows × d_model more.
    """
    size, batch = SIZES[name], ModelConfig().batch
    score, entry = {FP32: (4, 4), BF16: (4 + 2, 2)}[precision]
    layer = size.heads * context * score - 2 * size.d_model * entry
    return size.layers * batch * context * layer


def model_table() -> Iterator[list[str]]:
    found = model_cells(MODEL)
    for name in SIZES:
        for context in ModelConfig().context:
            cells = [
                [found[name, context, BF16, kind, way] for kind in (STANDARD, OURS)]
                for way in (FORWARD, STEP)
            ]
            times = [marked(row) for both in cells for row in both]
            yield [name, f"{context:,}", *times, *map(gib, cells[-1])]


def precision_table() -> Iterator[list[str]]:
    found = model_cells(MODEL)
    for name in ("xl", "2.7B"):
        d = SIZES[name].d_model // SIZES[name].heads
        for precision in ModelConfig().precision:
            cells = {
                way: [found[name, 1024, precision, kind, way] for kind in (STANDARD, OURS)]
                for way in (FORWARD, BOTH)
            }
            times = [marked(row) for both in cells.values() for row in both]
            rates = [f"{row.tflops:.0f}" for row in cells[FORWARD]]
            yield [name, str(d), precision, *times, *rates]


def model_memory_table() -> Iterator[list[str]]:
    found = model_cells(MODEL)
    for name in SIZES:
        for precision in (FP32, BF16):
            rows = [found[name, 1024, precision, kind, BOTH] for kind in (STANDARD, OURS)]
            standard, ours = (row.peak_bytes or 0 for row in rows)
            values = standard, ours, standard - ours, saved_by_ours(name, 1024, precision)
            yield [name, precision, *(number(each / GIB) for each in values)]


def optimizer_table() -> Iterator[list[str]]:
    found = model_cells(MODEL)
    for name in ("large", "xl", "2.7B"):
        both, step = (took(found[name, 1024, FP32, STANDARD, way]) for way in (BOTH, STEP))
        moved = 20 * 4 * parameters(name)
        yield [
            name,
            f"{parameters(name) / 1e9:.2f}",
            *map(number, (both, step, step - both)),
            f"{moved / 1e9:.0f}",
            f"{moved / (step - both) / 1e9:.1f}",
        ]


def compiled_table() -> Iterator[list[str]]:
    """Eager / compiled."""
    eager, compiled = map(model_cells, (MODEL, COMPILED_MODEL))
    for name in SIZES:
        places = [
            (name, 512, BF16, kind, way) for way in (FORWARD, STEP) for kind in (STANDARD, OURS)
        ]
        memory = [(name, 512, BF16, kind, FORWARD) for kind in (STANDARD, OURS)]
        times = [f"{marked(eager[each])} / {marked(compiled[each])}" for each in places]
        held = [f"{gib(eager[each])} / {gib(compiled[each])}" for each in memory]
        yield [name, *times, *held]


def tables() -> Iterator[tuple[str, list[list[str]]]]:
    """Every table of the document, as the files have it."""
    yield "attention", attention_table(ATTENTION, times, AttentionConfig().d_model)
    yield "memory", attention_table(ATTENTION, memory, (64,))
    yield "bf16", attention_table(ATTENTION_BF16, times, (64,))
    yield "bf16 memory", attention_table(ATTENTION_BF16, memory, (64,))
    yield "model", list(model_table())
    yield "model precision", list(precision_table())
    yield "model memory", list(model_memory_table())
    yield "optimizer", list(optimizer_table())
    yield "compiled", list(compiled_table())


def test_the_files_have_every_cell() -> None:
    sizes = AttentionConfig()
    assert set(attention_cells(ATTENTION)) == {
        (each.headdim, each.seqlen, name, way)
        for each in sizes.workloads()
        for name in IMPLEMENTATIONS
        for way in ("forward", "backward")
    }
    cells = [
        (case.name, case.context, case.precision, case.attention, way)
        for case in ModelConfig().cases()
        for way in case.passes
    ]
    assert list(model_cells(MODEL)) == cells  # in this order
    assert list(model_cells(COMPILED_MODEL)) == [each for each in cells if each[1:3] == (512, BF16)]
    assert not any(row.failed for name in (MODEL, COMPILED_MODEL) for row in stored(name).rows)


@pytest.mark.parametrize(
    ("mark", "expected"), [pytest.param(*each, id=each[0]) for each in tables()]
)
def test_tables_are_those_of_the_files(mark: str, expected: list[list[str]]) -> None:
    assert table(DOCUMENT, mark) == expected


@pytest.mark.parametrize(("d", "n"), [(16, 256), (64, 4096), (64, 16384), (128, 16384)])
def test_memory_is_as_predicted(d: int, n: int) -> None:
    """Five tensors of b · n · d; the matrix of P; or one number for each row."""
    found = attention_cells(ATTENTION)
    b = AttentionConfig().batch
    held = {name: found[d, n, name, "backward"].values[BEFORE_BACKWARD] for name in IMPLEMENTATIONS}
    assert held["standard"] == held["compiled"] == 4 * b * (5 * n * d + n * n)
    for name in ("tiled", "triton"):
        assert held[name] == 4 * b * (5 * n * d + n)
    assert held["ours"] == pytest.approx(held["triton"], rel=2e-3)


@pytest.mark.parametrize("name", SIZES)
def test_scores_are_what_standard_attention_keeps(name: str) -> None:
    """Predicted from the sizes alone, for two precisions."""
    found = model_cells(MODEL)
    for precision in (FP32, BF16):
        rows = [found[name, 1024, precision, kind, BOTH] for kind in (STANDARD, OURS)]
        standard, ours = (row.peak_bytes or 0 for row in rows)
        assert standard - ours == pytest.approx(saved_by_ours(name, 1024, precision), rel=0.05)


@pytest.mark.parametrize("name", SIZES)
def test_sixteen_bytes_for_each_parameter(name: str) -> None:
    """Parameters, gradients and AdamW's two moments are all that a short step holds at its peak."""
    for kind in (STANDARD, OURS):
        row = model_cells(MODEL)[name, 128, FP32, kind, STEP]
        assert row.peak_bytes == pytest.approx(16 * parameters(name), rel=0.07)


def test_the_queue_is_full_before_the_end() -> None:
    """The host returns 1,024 launches before the end of a step; AdamW makes 8 for a tensor."""
    found = model_cells(MODEL)
    for name in ("xl", "2.7B"):
        for context in (256, 512, 1024):
            both, step = (found[name, context, FP32, STANDARD, way] for way in (BOTH, STEP))
            share = 1024 / (8 * (7 * SIZES[name].layers + 3))
            last = took(step) - step.values["host_ms"]
            assert last == pytest.approx(share * (took(step) - took(both)), rel=0.05)


def test_a_layer_takes_the_host_one_to_two_milliseconds() -> None:
    """Whatever its width, context and attention: forward passes in bf16 that wait for the host."""
    waiting = {
        place: took(row) / SIZES[str(place[0])].layers
        for place, row in model_cells(MODEL).items()
        if place[2] == BF16 and place[-1] == FORWARD and _host_mark(row)
    }
    assert {place[0] for place in waiting} == set(SIZES)
    assert 1.0 <= min(waiting.values()) <= max(waiting.values()) <= 2.0


class _Launches(TorchDispatchMode):
    """Counts operators that compute or copy: on a GPU, each is a kernel."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += not (func.is_view or func._schema.name == "aten::_unsafe_view")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("autocast", "least", "most"), [(False, 46, 46), (True, 56, 60)])
def test_operators_of_a_layer(autocast: bool, least: int, most: int) -> None:
    layer = Transformer(ModelSize(32, 64, 1, 2), 10, 16).layers[0]
    x = torch.randn(2, 16, 32)  # one sequence needs no copies of heads
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        _Launches() as launches,
    ):
        layer(x)
    assert least <= launches.count <= most
