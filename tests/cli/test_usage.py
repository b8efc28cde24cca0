"""Usage errors: before torch is imported, and by the name of the option that has to be set."""

from __future__ import annotations

import platform
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from ring_flash_attn.bench.workload import (
    DTYPES,
    FORWARD_ONLY,
    PRESETS,
    dtype_name,
    find_dtype,
)
from ring_flash_attn.cli import info as versions
from ring_flash_attn.cli.app import app, as_options

# What is wrong, and words of the answer; all of it on the CPU, and before anything is computed.
WRONG = {
    "nonsense": "No such command 'nonsense'",
    "--nonsense": "No such option: --nonsense",
    "verify --nonsense": "No such option: --nonsense",
    "verify --kernel nonsense": "'--kernel': unknown kernel 'nonsense'; choose one of auto, ",
    "verify --layout zigzag --layout spiral": "'--layout': unknown layout 'spiral'",
    "verify --route teleport": "'--route': unknown route 'teleport'",
    "verify --dtype fp32 --dtype int8": "'--dtype': unknown dtype 'int8'",
    "verify --feature magic": "'--feature': unknown feature 'magic'",
    "verify --device abacus": "--device",
    "verify --backend pigeon": "'--backend': unknown backend 'pigeon'",
    "verify --world-size 0": "'--world-size'",
    "verify --world-size four": "'--world-size'",
    "verify --seqlen 0": "'--seqlen'",
    "verify --nheads 3 --nheads-k 2": "--nheads (query heads) must be a multiple of --nheads-k",
    "verify --timeout nan": "--timeout must be positive",
    "verify no_such_function": "no function 'no_such_function'",
    "verify zigzag_ring_flash_attn_func --layout stripe": "--layout, --route and --feature",
    "verify --json FOLDER": "--json: cannot write",
    "verify --markdown FOLDER": "--markdown: cannot write",
    "plan --nonsense": "No such option: --nonsense",
    "plan --link none": "--link none: a plan needs to know",
    "plan --link carrier": "'--link': unknown link 'carrier'; choose one of none, nvlink4",
    "plan --gpu P100": "unknown GPU 'P100'; choose one of H200",
    "plan --kernel nonsense": "'--kernel': unknown kernel 'nonsense'",
    "plan --kernel reference": "no rate of kernel 'reference' forward",
    "plan --route teleport": "'--route': unknown route 'teleport'",
    "plan --nheads 3 --nheads-k 2": "--nheads (query heads) must be a multiple of --nheads-k",
    "plan --cu-seqlens 0,a": "--cu-seqlens must be whole numbers",
    "plan --seed 3": "--seed 3: only for documents",
    "plan --json FOLDER": "--json: cannot write",
    "ring --nonsense": "No such option: --nonsense",
    "ring --kernel nonsense": "'--kernel': unknown kernel",
    "ring --link carrier": "'--link': unknown link 'carrier'; choose one of none, nvlink4",
    "ring --device abacus": "--device 'abacus' does not exist",
    "ring --device tpu:x": "--device 'tpu:x'",
    "ring --cu-seqlens 0,a": "--cu-seqlens must be whole numbers",
    "ring --cu-seqlens 0,5,3": "--cu-seqlens 0,5,3 must start at 0 and go up",
    "ring --nheads 3 --nheads-k 2": "--nheads (query heads) must be a multiple of --nheads-k",
    "ring --heads-k-stride 3 --route all_gather": "--heads-k-stride = 3 must divide",
    "ring zigzag_ring_flash_attn_func --heads-k-stride 2": "--heads-k-stride 2",
    "ring --link nvlink4 --backend gloo": "--backend gloo",
    "ring --kernel fa2 --device cpu": "--kernel",
    "ring flash_attn_func": "flash_attn_func: on one device",
    "replay --rank 9 --device cpu": "--rank 9 is not one of 0 … 7",
    "replay --kernel nonsense": "'--kernel': unknown kernel",
    "replay --kernel fa2 --device cpu": "--kernel 'fa2' cannot do this call",
    "replay --cu-seqlens 3,5": "--cu-seqlens 3,5 must start at 0 and go up",
    "replay --cu-seqlens 0,5 --batch 2": "--batch 2",
    "replay --nheads 3 --nheads-k 2": "--nheads (query heads) must be a multiple of --nheads-k",
    "replay --heads-k-stride 2": "--heads-k-stride",
    "replay --sources-per-launch 2 --route all_gather": "--sources-per-launch = 2: only route",
    "replay --link-gbps 0": "--link-gbps must be positive, not 0",
    "replay --link-gbps 5 --link nvlink4": "--link 'nvlink4' and --link-gbps 5: give one",
    "replay --latency-us 3": "--latency-us 3 needs a link",
    "replay --link none --network-gbps 3": "--network-gbps 3 needs a link",
    "replay --link pcie5 --gpus-per-node 8": "--gpus-per-node 8: link 'pcie5' has no network",
    "replay --link h100-ib400 --link-gbps 5": "--link 'h100-ib400' and --link-gbps 5: give one",
    "replay --link h100-ib400 --gpus-per-node 0": "'--gpus-per-node'",
    "replay --link missing.json": "cannot read missing.json",
    "replay --link FILE.json": "FILE.json is not JSON",
    "ring --network-latency-us 3 --device cpu": "--network-latency-us 3 needs a link",
    "ring --link-gbps 5 --network-gbps 3 --device cpu": "--network-gbps 3 needs --gpus-per-node",
    "ring --gpus-per-node 8 --backend gloo": "--backend gloo",
    "profile --link-gbps 5": "--link-gbps 5.0 needs a --world-size of 2 or more",
    "profile --link pcie5 --network-gbps 5 --gpus-per-node 8": "needs a --world-size of 2",
    "profile --world-size 2 --gpus-per-node 8 --device cpu": "--gpus-per-node 8 needs a link",
    "replay --link-gbps 5 --latency-us -3": "--latency-us must not be negative",
    "replay --existing --device cpu": "--baseline: fa2: it needs an NVIDIA GPU",
    "replay --existing-kernel nonsense": "'--existing-kernel': unknown library 'nonsense'",
    "replay --svg FOLDER": "--svg: cannot write",
    "link --world-size 1 --device cpu": "a link needs two ranks or more, and there is one",
    "link --sizes 4096 --device cpu": "--sizes must be two numbers of bytes or more",
    "link --sizes 0,8 --device cpu": "--sizes must be two numbers of bytes or more",
    "link --world-size 4 --gpus-per-node 3 --device cpu": "--gpus-per-node 3 does not divide 4",
    "link --device cpu --json topology.txt": "--json: topology.txt must end with .json",
    "link --backend pigeon": "'--backend': unknown backend 'pigeon'",
    "bench --seqlen abc": "--seqlen must be a number",
    "bench --nheads 3 --nheads-k 2": "--nheads (query heads) must be a multiple of --nheads-k",
    "bench --window 3": "--window must be two numbers",
    "bench --window=-5,0": "--window -5,0",
    "bench --preset nonsense": "'--preset': unknown preset 'nonsense'",
    "bench --kernel nonsense": "'--kernel': unknown implementation 'nonsense'",
    "bench --kernel fa2 --device cpu": "--kernel fa2 cannot do batch 2, seqlen 1024",
    "bench --batch 1,2,3,4,5,6,7,8,9,10,11 --seqlen 1,2,3,4,5,6,7,8,9,10 "
    "--headdim 1,2,3,4,5,6,7,8,9,10": "--batch, --seqlen, --headdim: 1100 combinations",
    "bench --repeats 0": "'--repeats'",
    "bench extra": "extra",
    "compare nonsense": "unknown implementation 'nonsense'",
    "compare --versus nonsense": "'--versus': unknown implementation 'nonsense'",
    "compare --graphs --device cpu": "--graphs: CUDA graphs need a GPU",
    "compare --seqlen -4": "--seqlen must be positive",
    "profile --rank 1": "--rank 1 needs a --world-size of 2 or more",
    "profile --layout zigzag": "--layout 'zigzag' needs a --world-size of 2 or more",
    "profile --link nvlink4": "--link 'nvlink4' needs a --world-size of 2 or more",
    "profile --world-size 2 --rank 5 --device cpu": "--rank 5 is not one of 0 … 1",
    "profile --world-size 2 --window 3,0 --device cpu": "--window (3, 0)",
    "profile --seqlen 1,2": "--seqlen",
    "profile --kernel fa2 --device cpu": "--kernel 'fa2' cannot do this call",
    "profile --device cpu --seqlen 16 -o FILE": "--output: FILE is not a folder",
    "draw": "Missing argument 'LAYOUT",
    "draw spiral": "unknown layout 'spiral'",
    "draw zigzag --route teleport": "'--route': unknown route 'teleport'",
    "draw zigzag --cu-seqlens 0,5,3": "--cu-seqlens 0,5,3 must start at 0 and go up",
    "draw zigzag --window 3": "--window must be two numbers",
    "draw zigzag --window=-3,0": "--window -3,0",
    "draw zigzag --nheads-k 2 --heads-k-stride 3 --route all_gather": "--heads-k-stride 3 must",
    "info --device abacus": "--device 'abacus' does not exist",
    "info --device xpu": "--device 'xpu'",
    "info --headdim 0": "'--headdim'",
    "diff": "Missing argument 'A.json'",
    "diff missing.json missing.json": "cannot read missing.json",
    "diff FILE FILE": "FILE is not JSON",
    "diff FILE FILE --fail-above much": "--fail-above must be a percentage",
    "report missing.json": "cannot read missing.json",
    "report FILE -o FILE": "--output: FILE is also an input",
    "report FILE -o FOLDER": "--output: cannot write",
    "tune --dtype int8": "'--dtype': unknown dtype 'int8'",
    "tune --headdim 0": "'--headdim'",
    "lab nonsense": "No such command 'nonsense'",
    "lab check": "Missing argument 'N'",
    "lab check 99": "step 99: there are steps 1 to 16",
    "lab check 16": "step 16 (What Hopper adds) has no exercise",
    "lab check 4 --timeout 0": "--timeout must be positive",
    "lab run 0": "step 0: there are steps 1 to 16",
    "lab start FILE": "FILE is not a folder",
}
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def rfa(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "1000"})


@pytest.mark.parametrize("line", WRONG)
def test_an_error_names_what_to_set(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("{")
    Path("FILE.json").write_text("{")
    Path("FOLDER").mkdir()
    result = rfa(*shlex.split(line))
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert WRONG[line] in result.output


@needs_no_gpu
@pytest.mark.parametrize(
    "command", ["info", "verify", "ring", "replay", "bench", "compare", "profile"]
)
def test_a_gpu_that_is_not_there(command: str) -> None:
    result = rfa(command, "--device", "cuda")
    assert result.exit_code == 2, result.output
    assert re.search("--device '?cuda'?: there is no GPU that torch can use", result.output)


@needs_no_gpu
def test_tune_alone_needs_a_gpu() -> None:
    """The documents say so."""
    assert "rfa tune times kernels on a GPU" in rfa("tune").output


def test_words_that_are_no_arguments_stay() -> None:
    options = {"rank": "--rank", "nheads_k": "--nheads-k", "json_file": "--json"}

    def said(message: str) -> str:
        return as_options(message, options, {"a.json": "--json"})

    assert said("a rank of 3 has nheads_k = 2") == "a rank of 3 has --nheads-k = 2"
    assert said("rank 5: of two") == "--rank 5: of two"
    assert said("--nheads-k 3, my_nheads_k") == "--nheads-k 3, my_nheads_k"
    assert said("a.json is a folder") == "--json: a.json is a folder"


# Before torch.

QUICK = [
    "nonsense",
    "--help",
    "--version",
    "ring --nonsense",
    "ring --help",
    "verify --kernel nonsense",
    "verify --world-size four",
    "bench --preset nonsense",
    "compare --versus nonsense",
    "profile --link nonsense",
    "replay --layout nonsense",
    "draw",
    "draw zigzag",
    "info --dtype nonsense",
    "tune --nonsense",
    "report",
    "lab",
    "lab --help",
    "lab check 99",
    "lab check --help",
    "diff missing.json missing.json",
]


def test_torch_is_not_imported_to_say_so() -> None:
    code = f"""
import contextlib, io, sys
from ring_flash_attn.cli import main
for line in {QUICK!r}:
    sys.argv = ["rfa", *line.split()]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main()
        except SystemExit:
            pass
    if "torch" in sys.modules:
        raise SystemExit(f"rfa {{line}} imports torch")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version() -> None:
    lines = rfa("--version").output.splitlines()
    assert lines[1] == f"torch {version('torch')}"
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CUDA: none"
    assert lines[4].startswith("ROCm" if torch.version.hip else built)
    assert lines[5] == f"Python {platform.python_version()}"


def test_version_of_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise versions.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    monkeypatch.setattr(versions, "distribution", missing)
    lines = versions.version_lines()
    assert lines[:5] == [
        "ring-flash-attn: not installed",
        "torch: not installed",
        "triton: not installed",
        "nvidia-cutlass-dsl: not installed",
        "CUDA: unknown",
    ]


# Names that are known without torch are those that there are.


def test_names_are_those_of_what_they_name() -> None:
    assert set(PRESETS) >= FORWARD_ONLY
    for name, long in DTYPES.items():
        assert dtype_name(find_dtype(name)) == long


def test_short_names_of_dtypes_are_for_every_command() -> None:
    group: Any = typer.main.get_command(app)
    for command in ("info", "replay", "ring", "bench", "compare", "profile", "tune"):
        asked = group.commands[command].make_context(command, ["--dtype", "bf16"])
        assert asked.params["dtype"] == "bfloat16"
    asked = group.commands["verify"].make_context("verify", ["--dtype", "bf16", "--dtype", "fp32"])
    assert asked.params["dtype"] == ["bfloat16", "float32"]
