"""Nsight's tools under `rfa profile`: their commands, what they leave, and what if they fail."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from nsight import DETAILS, RAW

from ring_flash_attn.bench.profile import nsight
from ring_flash_attn.bench.profile.nsight import child_command, read_counters, sections_text
from ring_flash_attn.bench.profile.subject import Subject, make_subject
from ring_flash_attn.bench.timing import WARM_UP
from ring_flash_attn.bench.workload import Placement, Workload

CPU = torch.device("cpu")
SMALL = Workload(1, 12, 4, 2, 8, True, (-1, -1), torch.float32)
ON_GPU = Subject(SMALL, Placement(1, kernel="triton"), torch.device("cuda", 0))


def ranks(**changes: Any) -> Subject:
    return make_subject(
        SMALL, CPU, "reference", **{"world_size": 3, "layout": "contiguous"} | changes
    )


def test_counters_of_each_kernel() -> None:
    attend, delta = read_counters(RAW)
    assert (attend["name"], attend["launches"], attend["ms"]) == ("attend", 2, 0.4)
    assert attend["sm_percent"] == pytest.approx(70)  # weighted by time
    assert attend["dram_gbps"] == pytest.approx(1750)
    assert attend["tensor_percent"] == pytest.approx((70 * 3 + 60) / 4)
    assert attend["registers"] == 168
    assert attend["stalls"] == (
        ("long scoreboard", pytest.approx(2.0)),
        ("barrier", pytest.approx(1.5)),
    )
    assert delta["tensor_percent"] is None
    assert delta["occupancy_percent"] is None


@pytest.mark.parametrize(
    "text", ["", "==WARNING== No kernels were profiled.", RAW.split('"0",')[0]]
)
def test_a_table_without_kernels_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no kernel"):
        read_counters(text)


def test_sections_as_plain_lines() -> None:
    memory = sections_text(DETAILS, ("Memory Workload",)).split()
    assert " ".join(memory) == (
        "== launch 0: attend Memory Workload Analysis L2 Hit Rate 88.10 % "
        "== launch 1: delta Memory Workload Analysis L2 Hit Rate 12.00 %"
    )
    assert "OPT: Warps wait for a barrier." in sections_text(DETAILS, ("Compute", "Warp"))
    assert sections_text(DETAILS, ("Roofline",)) == ""


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(nsight.shutil, "which", lambda tool: tool)

    def run_tool(command: list[str], report: Path | None = None) -> str:
        ran.append(command)
        return RAW if "raw" in command else DETAILS

    monkeypatch.setattr(nsight, "run_tool", run_tool)
    assert nsight.use_nsys(ON_GPU, tmp_path, lambda line: None) == {}
    assert nsight.use_ncu(ON_GPU, tmp_path, lambda line: None)[0] == {}
    nsys, stats, ncu, raw, details = ran
    for command, runs in ((nsys, "3"), (ncu, "1")):
        ours = command[-5:]
        assert ours == child_command(ON_GPU, int(runs))
        assert ours[1:3] == ["-m", "ring_flash_attn.bench.profile.nsight"]
        assert Subject.from_dict(json.loads(ours[3])) == ON_GPU
        assert ours[4] == runs
    assert nsys[:2] == ["nsys", "profile"]
    assert {"--capture-range=cudaProfilerApi", f"--output={tmp_path}/flash_attn_nsys"} <= set(nsys)
    assert stats[-1] == f"{tmp_path}/flash_attn_nsys.nsys-rep"
    assert ncu[ncu.index("--profile-from-start") + 1] == "off"
    assert ncu[ncu.index("--export") + 1] == f"{tmp_path}/flash_attn_ncu_full"
    assert ncu[ncu.index("--set") + 1] == "full"
    assert "--section" not in ncu
    for table, page in ((raw, "raw"), (details, "details")):
        assert table[table.index("--import") + 1] == f"{tmp_path}/flash_attn_ncu_full.ncu-rep"
        assert table[table.index("--page") + 1] == page
    assert raw[-2:] == ["--print-units", "base"]


def fake(folder: Path, name: str, script: str) -> None:
    """An executable of this name."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first where programs are looked for, and is the only one for Nsight's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return folder


def use(tool: str, folder: Path) -> dict[str, str]:
    """Run a tool; the files that are missing, and why."""
    if tool == "nsys":
        return nsight.use_nsys(ON_GPU, folder, lambda line: None)
    missing, counters = nsight.use_ncu(ON_GPU, folder, lambda line: None)
    assert not (missing and counters)
    return missing


def test_nsys_leaves_a_report_and_its_tables(path: Path, tmp_path: Path) -> None:
    script = """case "$1" in
profile) for word in "$@"; do case "$word" in --output=*) out="${word#--output=}";; esac; done
  echo report > "$out.nsys-rep";;
stats) echo "Time (%)  Name"; touch "${3%.nsys-rep}.sqlite";;
esac"""
    fake(path, "nsys", script)
    assert use("nsys", tmp_path) == {}
    assert (tmp_path / "flash_attn_nsys.nsys-rep").exists()
    assert (tmp_path / "nsys_stats.txt").read_text() == "Time (%)  Name\n"
    assert not (tmp_path / "flash_attn_nsys.sqlite").exists()


NCU = """page=""
while [ $# -gt 0 ]; do
  case "$1" in --export) echo report > "$2.ncu-rep"; exit 0;; --page) page="$2";; esac
  shift
done
cat "$(dirname "$0")/$page.csv"
"""


def test_ncu_leaves_a_report_tables_and_counters(path: Path, tmp_path: Path) -> None:
    fake(path, "ncu", NCU)
    (path / "raw.csv").write_text(RAW)
    (path / "details.csv").write_text(DETAILS)
    missing, counters = nsight.use_ncu(ON_GPU, tmp_path, lambda line: None)
    assert missing == {}
    assert [each["name"] for each in counters] == ["attend", "delta"]
    assert "L2 Hit Rate" in (tmp_path / "ncu_memory_metrics.txt").read_text()
    compute = (tmp_path / "ncu_compute_metrics.txt").read_text()
    assert "SM Busy" in compute
    assert "L2 Hit Rate" not in compute


@pytest.mark.parametrize(
    ("tool", "script", "words"),
    [
        ("nsys", "echo 'the daemon is not running'; exit 3", "failed \\(3\\): the daemon is not"),
        ("nsys", "exit 0", "left no report: it said nothing"),
        ("ncu", "echo '==ERROR== LibraryNotLoaded'; exit 1", "LibraryNotLoaded"),
        (
            "ncu",
            "echo '==ERROR== ERR_NVGPUCTRPERM - no permission'; exit 0",
            "ERR_NVGPUCTRPERM.*RestrictProfilingToAdminUsers=0",
        ),
    ],
)
def test_a_tool_that_fails_is_quoted(
    path: Path, tmp_path: Path, tool: str, script: str, words: str
) -> None:
    fake(path, tool, script)
    first, *others = use(tool, tmp_path).values()
    with pytest.raises(ValueError, match=words):
        raise ValueError(first)
    assert set(others) == {"there is no report"}


def test_a_tool_that_hangs_is_ended_with_what_it_started(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nsight, "_SECONDS", 0.3)
    fake(path, "ncu", "sleep 100 & sleep 100")
    assert use("ncu", tmp_path)["flash_attn_ncu_full.ncu-rep"] == "ncu took more than 0.3 s"


def test_a_report_that_cannot_be_read_is_kept(path: Path, tmp_path: Path) -> None:
    fake(path, "ncu", NCU)
    (path / "raw.csv").write_text("nothing")
    found = use("ncu", tmp_path)
    assert "flash_attn_ncu_full.ncu-rep" not in found
    assert found["ncu_memory_metrics.txt"] == "the report cannot be read: its table holds no kernel"


@pytest.mark.parametrize("tool", ["nsys", "ncu"])
def test_a_tool_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    reasons = set(use(tool, tmp_path).values())
    assert len(reasons) == 1
    assert reasons.pop().startswith(f"{tool} (Nsight")


def test_the_process_that_tools_look_at() -> None:
    command = child_command(ranks(grad=False), 2)
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2 runs of rank 2 of 3, contiguous × ring × reference\n"


def test_it_runs_as_often_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(Subject, "work", lambda self: lambda: calls.append(1))
    nsight.main([json.dumps(make_subject(SMALL, CPU, "auto").to_dict()), "4"])
    assert len(calls) == WARM_UP + 4
