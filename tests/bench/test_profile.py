"""`rfa profile`: what its numbers mean, what tools are asked for, and what lands in the folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from nsight import RAW
from typer.testing import CliRunner, Result

from ring_flash_attn.bench.links import LINKS
from ring_flash_attn.bench.measure import measure
from ring_flash_attn.bench.profile import parts, run
from ring_flash_attn.bench.profile.findings import (
    BANDWIDTH,
    COMPUTE,
    NEITHER,
    Facts,
    TimedPass,
    find,
    short,
    verdicts,
)
from ring_flash_attn.bench.profile.nsight import read_counters
from ring_flash_attn.bench.profile.parts import PARTS, prepare_folder
from ring_flash_attn.bench.profile.subject import Subject, make_subject
from ring_flash_attn.bench.profile.summary import baseline_lines, comparison_lines, summary
from ring_flash_attn.bench.profile.trace import (
    covered,
    overlap,
    read_trace,
)
from ring_flash_attn.bench.replays import run as replays_run
from ring_flash_attn.bench.replays.rank import PersistentPool
from ring_flash_attn.bench.replays.results import COMPUTE as COMPUTE_LANE
from ring_flash_attn.bench.replays.results import TRANSFERS, Bar
from ring_flash_attn.bench.results import BENCH, REPLAY, Peak, Results, Row, load
from ring_flash_attn.bench.workload import BOTH, FORWARD, Placement, Workload
from ring_flash_attn.cli.profile import profile

CPU = torch.device("cpu")
SMALL = Workload(1, 12, 4, 2, 8, True, (-1, -1), torch.float32)
TWO_RANKS = Placement(2, kernel="reference", link=LINKS["pcie5"])
ON_A_RANK = Subject(replace(SMALL, seqlen=24), TWO_RANKS, CPU, rank=1)
ON_GPU = Subject(SMALL, Placement(1, kernel="triton"), torch.device("cuda", 0))
WRITTEN = ("gpu_info", "baseline_benchmark", "comparison_results")
DOCUMENTED = {  # by auto_profile.sh of the original documents
    "SUMMARY.md",
    "baseline_benchmark.txt",
    "comparison_results.txt",
    "gpu_info.txt",
    "flash_attn_nsys.nsys-rep",
    "flash_attn_ncu_full.ncu-rep",
    "nsys_stats.txt",
    "ncu_memory_metrics.txt",
    "ncu_compute_metrics.txt",
}
app = typer.Typer()
app.command()(profile)


def ranks(**changes: Any) -> Subject:
    return make_subject(
        SMALL, CPU, "reference", **{"world_size": 3, "layout": "contiguous"} | changes
    )


def quiet(line: str) -> None:
    """Says nothing."""


def passes_of(subject: Subject) -> dict[str, TimedPass]:
    """By pass, timed once."""
    names = [subject.placement.kernel]
    rows = measure(names, subject.share, CPU, kind=BENCH, repeats=1, grad=subject.grad)
    return {each.passes: each for each in run._time(subject, rows, None, 1, quiet)[0]}


# Subjects.


def test_what_a_call_comes_to() -> None:
    subject = make_subject(SMALL, CPU, "auto")
    assert subject.placement.kernel == "reference"
    flops = 4 * 4 * (12 * 13 // 2) * 8
    found = passes_of(subject)
    assert (found[FORWARD].flops, found[BOTH].flops) == (flops, 3.5 * flops)
    q, k, lse = 12 * 4 * 8 * 4, 12 * 2 * 8 * 4, 12 * 4 * 4
    assert found[FORWARD].bytes == 2 * q + 2 * k + lse
    assert found[BOTH].bytes == 2 * q + 2 * k + lse + 4 * q + 4 * k + lse


def test_what_a_rank_comes_to() -> None:
    """The last rank of a causal sequence sees everything, and gets all keys and values."""
    subject = ranks()
    assert subject.rank == 2
    pairs = 12 * 13 // 2 + 2 * 12 * 12
    found, alone = (
        passes_of(each)[FORWARD] for each in (subject, make_subject(SMALL, CPU, "auto"))
    )
    assert found.flops == 4 * 4 * pairs * 8
    received = 2 * (2 * 12 * 2 * 8 * 4)  # k and v of two ranks
    assert found.bytes - alone.bytes == received
    assert passes_of(ranks(rank=0))[FORWARD].flops == alone.flops


def test_one_that_fails_says_why() -> None:
    row = Row(BENCH, "triton", BOTH, {}, failed="out of memory: 3 GiB")
    with pytest.raises(RuntimeError, match="triton, both: out of memory: 3 GiB"):
        TimedPass(row, 1.0, None)


@pytest.mark.parametrize(
    "subject",
    [
        make_subject(SMALL, CPU, "auto", grad=False),
        ranks(),
        ranks(link="a100-ib200", gpus_per_node=2, network_latency_us=9),
    ],
)
def test_another_process_gets_the_same_subject(subject: Subject) -> None:
    assert Subject.from_dict(json.loads(json.dumps(subject.to_dict()))) == subject


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kernel": "magic"}, "magic"),
        ({"layout": "zigzag"}, "layout 'zigzag' needs a world_size"),
        ({"rank": 0}, "rank 0 needs a world_size"),
        ({"link": "nvlink4"}, "link 'nvlink4' needs a world_size"),
        ({"world_size": 2, "layout": "spiral"}, "spiral"),
        ({"world_size": 2, "route": "teleport"}, "teleport"),
        ({"world_size": 2, "link": "string"}, "string"),
        ({"world_size": 2, "rank": 2}, "rank 2 is not one of"),
        ({"world_size": 0}, "world_size must be positive"),
        ({"world_size": 2, "workload": replace(SMALL, window=(3, 0))}, "no windows"),
    ],
)
def test_wrong_subjects_are_refused(changes: dict[str, Any], words: str) -> None:
    given = {"workload": SMALL, "device": CPU, "kernel": "reference"} | changes
    with pytest.raises(ValueError, match=words):
        make_subject(**given)


# Numbers.


@pytest.mark.parametrize(
    ("ms", "flops", "size", "bound", "least"),
    [
        (1.0, 8e9, 1e6, COMPUTE, 0.8),
        (1.0, 1e9, 9e7, BANDWIDTH, 0.9),
        (1.0, 1e9, 1e7, NEITHER, 0.1),
    ],
)
def test_the_roofline(ms: float, flops: float, size: float, bound: str, least: float) -> None:
    """Against 10 TFLOP/s and 100 GB/s: the limits meet at 100 FLOP for a byte."""
    roof = timed_pass(BOTH, ms, 0.0, flops, size, Peak(10.0, 100.0))
    assert roof.ridge == 100
    assert roof.tflops == pytest.approx(flops / 1e9)
    assert roof.gbps == pytest.approx(size / 1e6)
    assert roof.least_ms == pytest.approx(least)
    assert roof.bound == bound


OVERLAP = {"compute": 7.0, "transfers": 4.0, "both": 3.0, "span": 8.0, "hidden_share": 0.75}


def used(name: str, calls: int, ms: float) -> dict[str, Any]:
    return {"name": name, "calls": calls, "ms": ms}


def event(category: str, name: str, start: float, duration: float, **more: Any) -> dict[str, Any]:
    times = {"ph": "X", "ts": start, "dur": duration}
    return {"cat": category, "name": name, **times, **more}


def write_trace(path: Path, *events: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}))
    return path


def test_a_trace_of_a_gpu(tmp_path: Path) -> None:
    trace = write_trace(
        tmp_path / "trace.json",
        event("kernel", "attend", 1000, 400, args={"stream": 7}),
        event("kernel", "attend", 1600, 400, args={"stream": 7}),
        event("gpu_memcpy", "Memcpy DtoD", 1300, 200, args={"stream": 9}),
        event("cpu_op", "aten::mul", 0, 5000, tid=1),
        event("user_annotation", "step 0", 0, 700),
        event("gpu_user_annotation", "step 0", 1000, 900),
    )
    found = read_trace(trace, 2)
    assert found["on_device"]
    assert [(used["name"], used["calls"]) for used in found["kernels"]] == [
        ("attend", 2),
        ("Memcpy DtoD", 1),
    ]
    assert [used["ms"] for used in found["kernels"]] == pytest.approx([0.8, 0.2])
    assert found["ranges"] == [used("step 0", 1, 0.7)]
    assert found["busy_ms"] == pytest.approx(0.9)
    assert found["span_ms"] == pytest.approx(1.0)
    assert found["streams"] == {"7": pytest.approx(0.8), "9": pytest.approx(0.2)}


def test_a_trace_of_a_host_counts_what_operators_call_once(tmp_path: Path) -> None:
    trace = write_trace(
        tmp_path / "trace.json",
        event("cpu_op", "outer", 0, 1000, tid=1),
        event("cpu_op", "inner", 100, 300, tid=1),
        event("cpu_op", "leaf", 150, 100, tid=1),
        event("cpu_op", "inner", 500, 100, tid=1),
        event("cpu_op", "inner", 900, 400, tid=2),
    )
    found = read_trace(trace, 1)
    assert not found["on_device"]
    times = {used["name"]: (used["calls"], pytest.approx(used["ms"])) for used in found["kernels"]}
    assert times == {"outer": (1, 0.6), "inner": (3, 0.7), "leaf": (1, 0.1)}
    assert found["busy_ms"] == pytest.approx(1.3)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no kernel"):
        read_trace(write_trace(tmp_path / "trace.json"), 1)


def test_intervals() -> None:
    times = [(4, 5), (0, 2), (1, 3), (3, 3.5), (0.5, 1)]
    assert covered(Bar(COMPUTE_LANE, "forward", "0", *each) for each in times) == 4.5
    assert covered([]) == 0


def test_overlap_of_a_timeline() -> None:
    bars = (
        Bar(COMPUTE_LANE, "forward", "0", 0.0, 4.0),
        Bar(TRANSFERS, "forward", "0", 1.0, 5.0),
        Bar(COMPUTE_LANE, "backward", "1", 5.0, 8.0),
    )
    found = overlap(bars)
    assert found == OVERLAP


# Findings.


def timed_pass(
    passes: str,
    ms: float,
    host: float,
    flops: float,
    size: float,
    peak: Peak | None,
    memory: int | None = None,
    exposed: float | None = None,
) -> TimedPass:
    values = {"host_ms": host} | ({} if exposed is None else {"exposed_ms": exposed})
    row = Row(BENCH, "triton", passes, {}, {}, (ms,), flops / ms / 1e9, memory, values)
    return TimedPass(row, size, peak)


def timed(ms: float, host: float, **more: Any) -> TimedPass:
    rest = (more.pop("memory", 1 << 20), more.pop("exposed", None))
    return timed_pass(BOTH, ms, host, 6e9 * ms, 1e6, Peak(10.0, 100.0, SMALL.dtype), *rest)


def facts(**changes: Any) -> Facts:
    """Of a GPU that was never there."""
    kernels = [used("attend", 6, 6.0), used("Memcpy DtoD", 3, 2.0)]
    given: dict[str, Any] = {
        "subject": ON_GPU,
        "machine": {"device": "a GPU"},
        "repeats": 5,
        "timed": (timed(1.0, 0.5),),
        "activity": {
            "on_device": True,
            "runs": 3,
            "kernels": kernels,
            "ranges": [],
            "busy_ms": 8.0,
            "span_ms": 16.0,
            "streams": {"7": 8.0},
        },
        "overlap": None,
        "rows": (),
        "counters": (),
        "missing": {parts.NSYS: "nsys is not installed"},
    }
    return Facts(**given | changes)


def said(of: Facts) -> str:
    return "\n".join(find(of))


def test_findings_have_their_numbers() -> None:
    text = said(facts())
    assert "take 1.000 ms: 6 TFLOP/s, 60.0 % of the 10 " in text
    assert "It is compute-bound." in text
    assert "queues in 0.500 ms what the device does in 1.000 ms: the host is not" in text
    assert "ran nothing for 50 % of the time (8.000 of 16.000 ms busy" in text
    assert "`attend`: 75 % of the time of all kernels, in 2 calls a run." in text
    assert "Copies, fills and conversions take 25 %" in text
    assert "holds 1.0 MiB beyond" in text
    assert "host-bound (2.5 times as long)" in said(facts(timed=(timed(1.0, 2.5),)))


def test_findings_about_the_link() -> None:
    rank = replace(ON_GPU, placement=Placement(2, kernel="triton"))
    assert "Communication was removed" in said(facts(subject=rank))
    linked = replace(rank, placement=replace(rank.placement, link=LINKS["ib400"]))
    changes = {"subject": linked, "overlap": OVERLAP}
    text = said(facts(**changes, timed=(timed(1.0, 0.5, exposed=0.25, memory=None),)))
    assert "Of 4.000 ms of transfers over ib400, 75 % ran beside" in text
    assert "adds 0.250 ms to the time without communication, 25.0 % of all" in text
    none = said(facts(**changes, timed=(timed(1.0, 0.5, exposed=-0.1, memory=None),)))
    assert "adds nothing that can be measured" in none


def test_findings_about_counters_and_others() -> None:
    rows = [
        Row("compare", name, BOTH, {}, {}, (ms,), 1.0)
        for name, ms in (("triton", 1.0), ("SDPA cuDNN", 0.5), ("fa4", 0.8))
    ]
    failed = Row("compare", "xFormers", BOTH, {}, failed="it is not there")
    of = facts(counters=read_counters(RAW), rows=(*rows, failed))
    text = said(of)
    assert "tensor cores 68 % busy, and the SMs 70 %" in text
    assert "uses 35 % of the bandwidth of DRAM" in text
    assert "wait most for: long scoreboard (2.00 warps" in text
    assert "SDPA cuDNN: 0.500 ms; triton takes 1.000 ms, 2.00 times as long" in text
    assert "rfa compare" in text
    assert "--kernel fa4" in said(replace(of, rows=(rows[0], rows[2])))
    whole = summary(of)
    assert "- xFormers: it is not there" in whole
    assert "| SDPA cuDNN | 0.500 | 1 |" in whole
    assert "| `attend` | 2 | 0.400 | 70 | 67.5 |" in whole
    assert "`flash_attn_nsys.nsys-rep` (the timeline" in whole
    assert "nsys is not installed." in whole


def verdict_of(facts: Facts) -> dict[str, str]:
    return {each.what: f"{each.value} {each.word}" for each in verdicts(facts)}


def test_verdicts_have_the_limits_of_the_documents() -> None:
    a100 = {"device": "NVIDIA A100-SXM4-80GB", "sm_clock_mhz": 1410.0, "sm_clock_max_mhz": 1410.0}
    half = replace(ON_GPU, workload=replace(SMALL, dtype=torch.float16))
    what = "forward and backward"
    for tflops, word in ((151.0, "good"), (149.0, "fair"), (99.0, "needs work")):
        roof = timed_pass(BOTH, 1.0, 0.5, tflops * 1e9, 1e6, Peak(250.0, 100.0), 0)
        found = verdict_of(facts(subject=half, machine=a100, timed=(roof,)))
        assert found[what] == f"{tflops:.4g} TFLOP/s {word}"
        assert found["GPU clock just after the last run"] == "1410 MHz good"
    # Elsewhere, and in fp32, the same shares of the measured peak: 48 % and 32 % of 10 TFLOP/s.
    for machine in (a100, {"device": "another GPU"}):
        found = verdict_of(facts(machine=machine))
        assert found[what] == "6 TFLOP/s good"
    assert find(facts()), "the findings stay"
    assert verdict_of(facts(subject=make_subject(SMALL, CPU, "auto"))) == {}


def test_verdicts_on_the_gpu_and_who_else_uses_it() -> None:
    rows = tuple(
        Row("compare", name, BOTH, {}, {}, (ms,), 1.0)
        for name, ms in (("triton", 1.0), ("torch standard", 1.9))
    )
    busy = {"sm_clock_mhz": 1200.0, "sm_clock_max_mhz": 1980.0, "other_processes": 2}
    of = facts(
        timed=(timed(1.0, 1.6),),
        machine={"device": "a GPU", **busy},
        rows=rows,
        counters=read_counters(RAW),
    )
    assert verdict_of(of) == {
        "forward and backward": "6 TFLOP/s good",
        "GPU busy, in calls one after the other": "62.5 % needs work",
        "SMs of `attend`": "70 % fair",
        "speed-up over torch standard": "1.9x needs work",
        "GPU clock just after the last run": "1200 MHz needs work",
        "other processes on the GPU": "2 needs work",
    }
    whole = summary(of)
    assert "last run | 1200 MHz | good: 90 % of 1980 MHz or more | needs work |" in whole
    assert "- other processes on the GPU: try end them" in whole


def test_texts_of_the_measurements() -> None:
    rows = (
        Row("compare", "triton", BOTH, {}, {}, (2.0, 1.0, 6.0), 30.0, 3 << 20),
        Row("compare", "SDPA math", BOTH, {}, {}, (4.0,), 15.0, 1 << 20),
        Row("compare", "xFormers", BOTH, {}, failed="it is not there"),
    )
    results = Results("rfa profile", {"device": "a GPU"}, {}, None, {}, rows)
    lines = {" ".join(line.split()) for line in comparison_lines(results, "triton")}
    assert {
        "triton 2.000 3.0 1.00x",
        "SDPA math 4.000 1.0 0.50x",
        "Fastest: triton",
        "Lowest memory: SDPA math",
        "xFormers: it is not there",
    } < lines
    alone = "\n".join(baseline_lines(replace(results, rows=rows[:1])))
    assert [line.split(":")[1].strip() for line in alone.splitlines() if "(" in line] == [
        *("1.000 ms", "3.000 ms", "2.000 ms", "6.000 ms"),
        *("60 TFLOP/s", "20 TFLOP/s", "3.0"),
    ]


def test_long_names_are_cut() -> None:
    assert short("k" * 60) == "k" * 60
    assert short("k" * 61) == "k" * 59 + "…"


# The command.


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few implementations."""
    names = ("reference", "fa2", "SDPA math")
    monkeypatch.setattr(run, "implementation_names", lambda: names)


def rfa(folder: Path, *arguments: str) -> Result:
    size = ("--seqlen", "24", "--nheads", "2", "--headdim", "8", "--batch", "1", "--dtype", "fp32")
    given = ("--output", str(folder), *size, "--repeats", "1", "--device", "cpu", *arguments)
    return CliRunner().invoke(app, given)


@pytest.mark.usefixtures("quick")
def test_one_device_on_the_cpu(tmp_path: Path) -> None:
    folder, file = tmp_path / "profile", tmp_path / "all.json"
    result = rfa(folder, "--causal", "--json", str(file))
    assert result.exit_code == 0, result.output
    there = {part.name for part in folder.iterdir()}
    assert there == {
        "SUMMARY.md",
        "trace.json",
        *(f"{name}.{end}" for name in WRITTEN for end in ("txt", "json")),
    }
    text = (folder / "SUMMARY.md").read_text()
    assert "Profile of one device × reference" in text
    assert "say little about GPUs" in text
    assert "memory_snapshot.pickle` (which" in text
    for name in set(PARTS) - there:
        assert f"no {name}: " in result.output
    assert "backward: one device x reference" in (folder / "trace.json").read_text()
    assert set(PARTS) | {"SUMMARY.md"} >= DOCUMENTED
    baseline, comparison = (load(folder / f"{name}.json") for name in WRITTEN[1:])
    assert {row.implementation for row in baseline.rows} == {"reference"}
    assert {row.implementation for row in comparison.rows} == {"reference", "fa2", "SDPA math"}
    text = (folder / "baseline_benchmark.txt").read_text()
    assert f"{min(baseline.rows[0].samples_ms):.3f} ms" in text
    assert text.count("TFLOP/s (avg):") == 3
    assert "| – |" in (folder / "SUMMARY.md").read_text(), "no share of a peak"
    details = load(file).details["profile"]
    flops = 4 * 2 * (24 * 25 // 2) * 8
    assert details["passes"][BOTH]["flops"] == 3.5 * flops
    ms = details["passes"][BOTH]["ms"]
    assert details["passes"][BOTH]["tflops"] == pytest.approx(3.5 * flops / ms / 1e9)
    assert details["passes"][BOTH]["compute_share"] is None, "a CPU has no peak"
    assert "matmul reaches" not in result.output
    assert details["files"]["trace.json"] == "written"


@pytest.mark.usefixtures("quick")
def test_a_rank_on_the_cpu(tmp_path: Path) -> None:
    folder, file = tmp_path / "profile", tmp_path / "all.json"
    place = ("--world-size", "3", "--layout", "stripe", "--route", "query_ring", "--link", "ib400")
    result = rfa(folder, *place, "--rank", "1", "--json", str(file))
    assert result.exit_code == 0, result.output
    text = (folder / "SUMMARY.md").read_text()
    assert "rank 1 of 3, stripe × query_ring × reference" in text
    assert "## Communication and compute" in text
    trace = (folder / "trace.json").read_text()
    assert "step 1: queries of rank 2" in trace
    assert "rank 1 waits for the transfers of step 1" in trace
    saved = load(file)
    own = [row for row in saved.rows if row.kind == REPLAY]
    assert {row.passes for row in own} == {FORWARD, BOTH}
    assert own[0].placement["rank"] == 1
    assert saved.details["profile"]["overlap"]["transfers"] > 0


@pytest.mark.usefixtures("quick")
def test_only_forward(tmp_path: Path) -> None:
    result = rfa(tmp_path, "--no-grad", "--kernel", "reference")
    assert result.exit_code == 0, result.output
    assert "Forward takes " in result.output
    assert {row.passes for row in load(tmp_path / "baseline_benchmark.json").rows} == {FORWARD}
    assert "backward:" not in (tmp_path / "trace.json").read_text()


def test_a_folder_with_anything_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "flash_attn_ncu_full.ncu-rep").write_text("of an earlier profile")
    result = rfa(tmp_path)
    assert result.exit_code == 2
    assert "--force" in result.output
    assert (tmp_path / "flash_attn_ncu_full.ncu-rep").exists()
    prepare_folder(tmp_path, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(ValueError, match="not a folder"):
        prepare_folder(tmp_path / "mine.txt", force=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--seqlen", "8,16"),
        ("--kernel", "magic"),
        ("--kernel", "fa2"),
        ("--layout", "zigzag"),
        ("--world-size", "2", "--link", "string"),
        ("--world-size", "2", "--window", "4,0"),
        ("--preset", "gpt9"),
        ("--device", "abacus"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = rfa(tmp_path / "profile", *arguments)
    assert result.exit_code == 2
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("grad", [True, False])
def test_a_rank_is_recorded_in_the_passes_that_are_profiled(grad: bool, tmp_path: Path) -> None:
    timed, bars = run._time(replace(ON_A_RANK, grad=grad), (), None, 1, quiet)
    assert {each.passes for each in timed} == ({FORWARD, BOTH} if grad else {FORWARD})
    assert {bar.direction for bar in bars} == ({"forward", "backward"} if grad else {"forward"})


def test_memory_is_that_of_a_rank_that_keeps_no_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that stay from run to run would not be counted."""
    pools: list[object] = []

    def size(work: Any, device: torch.device) -> int:
        pools.append(work.__self__.prepared.ranks[0].pool)
        return 7

    monkeypatch.setattr(replays_run, "peak_bytes", size)
    subject = replace(ON_A_RANK, placement=replace(TWO_RANKS, link=None))
    timed, bars = run._time(subject, (), Peak(1.0, 1.0), 1, quiet)
    assert not bars, "nothing was sent"
    assert [each.peak_bytes for each in timed] == [7, 7]
    assert not any(isinstance(pool, PersistentPool) for pool in pools)
    work: Any = subject.work()
    assert isinstance(work.__self__.prepared.ranks[0].pool, PersistentPool)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("place", [(), ("--world-size", "4", "--link", "nvlink4")])
def test_on_a_gpu(tmp_path: Path, place: tuple[str, ...]) -> None:
    size = ("--batch", "1", "--seqlen", "1024", "--nheads", "4", "--headdim", "64", "--causal")
    given = ("-o", str(tmp_path), *size, "--repeats", "2", "--device", "cuda", *place)
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "memory_snapshot.pickle").stat().st_size > 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(each.get("cat") == "kernel" for each in events)
    assert "## Kernels" in (tmp_path / "SUMMARY.md").read_text()
