"""Measuring on a GPU: every implementation that is here agrees with fp64, and has a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ring_flash_attn.bench.implementations import implementation_names
from ring_flash_attn.bench.machine import machine
from ring_flash_attn.bench.measure import measure
from ring_flash_attn.bench.results import load
from ring_flash_attn.bench.timing import measure_peak
from ring_flash_attn.bench.workload import Workload
from ring_flash_attn.cli.app import app

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CUDA = torch.device("cuda", 0)
TORCH = {"torch standard", "SDPA efficient", "SDPA math", "FlexAttention"}
NO_WINDOWS = {"SDPA flash", "SDPA cuDNN"}


@pytest.mark.parametrize("window", [(-1, -1), (100, 20)])
@pytest.mark.parametrize("causal", [True, False])
def test_all_that_are_here_agree(causal: bool, window: tuple[int, int]) -> None:
    workload = Workload(2, 1024, 4, 2, 64, causal, window, torch.bfloat16)
    rows = measure(implementation_names(), workload, CUDA, kind="compare", repeats=2, errors=True)
    ran = {row.implementation for row in rows if row.failed is None}
    wanted = TORCH | {"triton", "fa2", "reference"}
    if window == (-1, -1):
        wanted |= NO_WINDOWS | {"cudnn"}
    assert wanted <= ran, {row.implementation: row.failed for row in rows if row.failed}
    for row in rows:
        if row.failed is not None:
            continue
        assert row.ms
        assert row.peak_bytes is not None
        for tensor, each in row.errors.items():
            limit = 1e-2 if tensor == "out" else 5e-2
            assert each["relative"] < limit, (row.implementation, tensor, each)


def test_graphs_are_as_fast_as_calls_that_are_queued() -> None:
    workload = Workload(4, 4096, 16, 16, 128, True, (-1, -1), torch.bfloat16)
    names = ["triton", "cudnn"]
    times = []
    for graphs in (False, True):
        rows = measure(names, workload, CUDA, kind="compare", repeats=5, graphs=graphs, errors=True)
        assert [row.failed for row in rows] == [None] * 6
        times.append([row.ms for row in rows])
        assert all(each["relative"] < 5e-2 for row in rows for each in row.errors.values())
    for queued, replayed in zip(*times, strict=True):
        assert queued
        assert replayed
        assert 0.7 < replayed / queued < 1.2


def test_one_that_needs_too_much_memory_says_so() -> None:
    """Scores of 64 × 2 × 65,536² in bf16 are 1 TiB."""
    workload = Workload(2, 65536, 64, 64, 64, False, (-1, -1), torch.bfloat16)
    names = ["torch standard", "fa2"]
    *_, failed, ran = measure(names, workload, CUDA, kind="compare", repeats=1, grad=False)
    assert failed.failed is not None
    assert failed.failed.startswith("out of memory")
    assert ran.ms


def test_the_machine_tells_its_clocks_and_peaks() -> None:
    found = machine(CUDA)
    assert found["kind"] == "cuda"
    assert found["memory_bytes"]
    assert "sm_clock_mhz" in found, "nvidia-smi answers"
    peak = measure_peak(CUDA, torch.bfloat16)
    assert peak is not None
    assert 20 < peak.tflops < 5000
    assert 200 < peak.gbps < 20000


def test_commands(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    options = ("--seqlen", "512,1024", "--repeats", "3", "--json", str(path))
    result = CliRunner().invoke(app, ["bench", *options])
    assert result.exit_code == 0, result.output
    assert "say little" not in result.output
    assert len(load(path).rows) == 6
