"""`rfa ring`: what it times, what it says, and what it does when ranks fail."""

from __future__ import annotations

import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from ranks import Ranks, one_rank
from typer.testing import CliRunner, Result

from ring_flash_attn.api.families import FAMILIES
from ring_flash_attn.bench import machine
from ring_flash_attn.bench.documents import find_histogram
from ring_flash_attn.bench.ranks import Settings, Target, choose_targets, measure
from ring_flash_attn.bench.replays import emulated
from ring_flash_attn.bench.replays.results import Replay
from ring_flash_attn.bench.results import Limits, Row, beside, load, misses
from ring_flash_attn.bench.timing import Timing
from ring_flash_attn.bench.workload import BOTH, FORWARD, Placement, Workload, problem_of
from ring_flash_attn.cli.ring import find_settings, ring
from ring_flash_attn.kernels import base, reference
from ring_flash_attn.plan.build import make_plan
from ring_flash_attn.plan.layout import layout_names

app = typer.Typer()
app.command()(ring)

SHAPE = ("--seqlen", "12", "--nheads", "4", "--nheads-k", "2", "--headdim", "8")
HERE = (*SHAPE, "--repeats", "2", "--device", "cpu", "--world-size", "2")
BATCH = Workload(2, 24, 4, 2, 8, causal=True, dtype="float64")
DOCUMENTS = replace(BATCH, batch=1, cu_seqlens=(0, 10, 24))
CPU = torch.device("cpu")


def rfa(*arguments: str) -> Result:
    """Run `rfa ring`; the output is wide enough not to be wrapped."""
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "180"})


def target(name: str, workload: Workload = BATCH) -> Target:
    """A function of this library on two ranks of the CPU."""
    documents = workload.cu_seqlens
    (found,) = choose_targets(
        (name,), replace(workload, cu_seqlens=None), Placement(2), CPU, cu_seqlens=documents
    )
    return found


def chosen(*names: str, **options: Any) -> list[Target]:
    return choose_targets(names, Workload(1, 512, 4, 2, 32, True), Placement(2), CPU, **options)


# What is timed.


def test_by_default_there_is_one_function_for_each_layout_and_route() -> None:
    found = chosen()
    families = [family for family in FAMILIES if family.layout]
    assert len({each.function.name for each in found}) == len(found) == len(families)
    assert {(t.placement.layout, t.placement.route, t.workload.packed) for t in found} == {
        (family.layout, family.route, family.packed) for family in families
    }


def test_names_patterns_and_points() -> None:
    forms = ("func", "kvpacked_func", "qkvpacked_func")
    stripes = [f"stripe_flash_attn_{pack}{form}" for pack in ("", "varlen_") for form in forms]
    assert [each.function.name for each in chosen("stripe_*")] == stripes
    anywhere = chosen("ring_attention", routes=("all_gather",))
    assert len({each.name for each in anywhere}) == len(layout_names())
    assert [each.workload.packed for each in anywhere] == [
        each.placement.layout.startswith("flat_") for each in anywhere
    ]


def test_packed_tensors_have_as_many_kv_heads_and_documents_are_sequences() -> None:
    assert target("stripe_flash_attn_qkvpacked_func").workload.nheads_k == 4
    varlen = target("stripe_flash_attn_varlen_func")
    assert (varlen.workload.lengths, varlen.workload.batch) == ((24, 24), 1)
    assert varlen.share.lengths == (12, 12)
    documents = target("llama3_flash_attn_varlen_func", DOCUMENTS)
    assert (documents.workload.lengths, documents.placement.heads_k_stride) == ((10, 14), 2)
    assert documents.share.lengths == (5, 7)
    assert documents.single == "flash_attn_varlen_func"
    assert target("ring_flash_attn_qkvpacked_func_v2").single == "flash_attn_qkvpacked_func"


@pytest.mark.parametrize("causal", [True, False])
def test_flops_are_those_of_all_ranks_divided(causal: bool) -> None:
    found = target("zigzag_ring_flash_attn_varlen_func", replace(DOCUMENTS, causal=causal))
    problem = problem_of(found.workload, found.placement)
    pairs = sum(make_plan("ring", problem, rank).pairs for rank in range(2))  # of 2 KV heads
    assert found.flops(FORWARD) == 4 * 8 * 2 * pairs / 2
    assert found.flops(BOTH) == 3.5 * found.flops(FORWARD)


def outputs(rank: int, world_size: int, names: tuple[str, ...], workload: Workload) -> list[Any]:
    """Outputs and gradients of each function, and of its base."""
    found = []
    for name in names:
        made = target(name, workload)
        own = measure.call_on_rank(made, rank, CPU)
        for call in (own, measure.call_on_one_device(made, CPU)):
            out, *grads = call[BOTH]()
            torch.testing.assert_close(call[FORWARD](), out)
            assert not call[FORWARD]().requires_grad
            found.append((out.detach(), grads))
    return found


def test_calls_compute_attention_of_the_shards(ranks: Callable[[int], Ranks]) -> None:
    """With the same data on every rank, full attention is that of one device."""
    batches = ("ring_flash_attn_kvpacked_func", "ring_flash_attn_qkvpacked_func_v2")
    packed = (
        "zigzag_ring_flash_attn_varlen_func",
        "stripe_flash_attn_varlen_qkvpacked_func",
        "zigzag_llama3_flash_attn_varlen_func",
    )
    for names, workload in ((batches, BATCH), (packed, DOCUMENTS)):
        for found in ranks(2).run(outputs, names, replace(workload, causal=False)):
            for (spread, grads), (single, single_grads) in zip(
                found[::2], found[1::2], strict=True
            ):
                torch.testing.assert_close(spread, single)
                for ours, theirs in zip(grads, single_grads, strict=True):
                    torch.testing.assert_close(ours, theirs)


def test_theoretic_is_one_device_times_ranks_and_the_slowest_rank_counts() -> None:
    made = target("ring_flash_attn_func")
    settings = Settings(2, CPU, "gloo", repeats=2, grad=False)
    trials: list[measure.Trial] = [{FORWARD: size} for size in (5, 7)]
    own, base = (made.name, FORWARD), (made.base, FORWARD)
    times = [
        [{own: (10.0, 4.0), base: (1.0, 0.5)}, {own: (12.0, 3.0), base: (2.0, 0.5)}],
        [{own: (15.0, 2.0), base: (3.0, 0.5)}, {own: (11.0, 8.0), base: (9.0, 0.5)}],
    ]
    rounds = [
        [{key: Timing(*each) for key, each in rank.items()} for rank in ranks] for ranks in times
    ]
    timed = measure.slowest_rank(made, settings, FORWARD, trials, rounds)
    assert timed.samples_ms == (12.0, 15.0)
    assert timed.values["theoretic_ms"] == 2 * statistics.median((1.0, 2.0, 3.0, 9.0))
    assert timed.values["host_ms"] == statistics.median((4.0, 8.0))
    assert timed.peak_bytes == 7


# The command.


def check_row(row: Row, world_size: int) -> None:
    assert row.kind == "ring"
    assert row.ms is not None
    assert row.values["efficiency_percent"] == 100 * row.values["theoretic_ms"] / row.ms
    assert row.values["iterations_per_second"] == 1e3 / row.ms
    assert row.placement["world_size"] == world_size
    assert row.tflops is not None
    assert row.tflops > 0


def test_two_new_ranks(tmp_path: Path) -> None:
    file = tmp_path / "new" / "ring.json"
    names = ("zigzag_ring_flash_attn_func", "llama3_flash_attn_varlen_func")
    result = rfa(*names, *HERE, "--cu-seqlens", "0,10,24", "--json", str(file))
    assert result.exit_code == 0, result.output
    for words in (
        "2 ranks in new processes over gloo, cpu",
        "zigzag × ring × reference",
        "flat_contiguous × all_gather × reference",
        "12 tokens of 2 documents (24 tokens)",
        "forward and backward",
        "say little about GPUs",
    ):
        assert words in result.output
    written = load(file)
    assert [(row.placement["function"], row.passes) for row in written.rows] == [
        (name, passes) for name in names for passes in (FORWARD, BOTH)
    ]
    for row in written.rows:
        check_row(row, 2)
        assert len(row.samples_ms) == 2
        assert row.placement["backend"] == "gloo"
        assert row.workload["seqlen"] == 12
        assert f"{row.ms:.3f}" in result.output
    assert "sources_per_launch" not in written.rows[0].placement, "by size"
    assert written.rows[2].placement["heads_k_stride"] == 2
    assert written.rows[2].workload["lengths"] == [10, 14]


def test_a_replay_says_so(tmp_path: Path) -> None:
    file = tmp_path / "ring.json"
    names = ("stripe_flash_attn_func", "stripe_flash_attn_kvpacked_func")
    result = rfa(*names, *HERE, "--replay", "--link", "pcie5", "--no-grad", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "Replays of 2 ranks (the first, the last and the one" in result.output
    assert "Communication is emulated, pcie5: 64 GB/s" in result.output
    assert "backward" not in result.output.split("GB: most memory")[0]
    written = load(file)
    (found,) = (Replay.from_dict(each) for each in written.details["replays"].values())
    assert len(written.rows) == 2
    for row in written.rows:
        check_row(row, 2)
        assert row.ms == found.ours.slowest(FORWARD).measured.times[FORWARD]
        assert row.values["theoretic_ms"] == found.ours.theoretic(FORWARD)
        assert (row.values["slowest"], row.placement["link"]) == (1.0, "pcie5")


def test_a_replay_is_of_the_ranks_that_matter(tmp_path: Path) -> None:
    """Documents of 36 and 12 tokens, laid out in one piece: the third of 4 ranks has most pairs."""
    file = tmp_path / "ring.json"
    sizes = ("--world-size", "4", "--cu-seqlens", "0,36,48", "--nheads", "2", "--nheads-k", "1")
    options = ("--headdim", "8", "--repeats", "1", "--replay", "--no-grad", "--json", str(file))
    result = rfa("llama3_flash_attn_varlen_func", *sizes, *options)
    assert result.exit_code == 0, result.output
    (found,) = (Replay.from_dict(each) for each in load(file).details["replays"].values())
    assert [each.rank for each in found.ours.ranks] == [0, 2, 3]


def test_documents_that_a_function_cannot_take() -> None:
    """Those of 10 and 15 tokens on 2 ranks: some functions need even ones, or an even stream."""
    found = chosen(cu_seqlens=(0, 10, 25))
    reasons = {each.function.name: each.refused for each in found if each.refused}
    uneven = "every document of cu_seqlens must divide by 2 ranks; 1 of 2 do not: 15 tokens"
    assert reasons == {
        "ring_flash_attn_varlen_func": uneven,
        "zigzag_ring_flash_attn_varlen_func": uneven,
        "llama3_flash_attn_varlen_func": "cu_seqlens ends at 25, which must be a positive multiple "
        "of 2 ranks",
    }
    able = found[: -len(reasons)]
    assert {(each.workload.lengths, each.refused) for each in able} == {
        ((512,), ""),
        ((10, 15), ""),
    }
    with pytest.raises(ValueError, match=r"zigzag_ring_flash_attn_varlen_func .*: every document"):
        chosen("zigzag_ring_flash_attn_varlen_func", cu_seqlens=(0, 10, 25))


def test_documents_of_any_length_are_timed(tmp_path: Path) -> None:
    file = tmp_path / "ring.json"
    names = ("zigzag_ring_flash_attn_varlen_func", "stripe_flash_attn_varlen_func")
    sizes = ("--cu-seqlens", "0,9,25", "--nheads", "4", "--nheads-k", "2", "--headdim", "8")
    options = ("--repeats", "1", "--device", "cpu", "--world-size", "2", "--json", str(file))
    result = rfa(*names, *sizes, *options)
    assert result.exit_code == 0, result.output
    assert (
        "every document of cu_seqlens must divide by 2 ranks; 1 of 2 do not: 9 tokens"
        in result.output
    )
    stripe, failed = load(file).rows[::2]
    check_row(stripe, 2)
    assert stripe.workload["lengths"] == [9, 16]
    assert failed.placement["function"] == names[0]
    assert failed.failed


def test_documents_from_a_histogram_are_timed(tmp_path: Path) -> None:
    file = tmp_path / "ring.json"
    pack = ("--documents", "magi", "--seed", "3", "--document-cap", "0.5", "--no-grad")
    result = rfa("stripe_flash_attn_varlen_func", *HERE, "--replay", *pack, "--json", str(file))
    assert result.exit_code == 0, result.output
    (row,) = load(file).rows
    check_row(row, 2)
    lengths = find_histogram("magi").draw(24, 3, 0.5)
    assert len(lengths) > 1
    assert row.workload["lengths"] == list(lengths)
    drawn = [row.workload[name] for name in ("documents", "seed", "document_cap")]
    assert drawn == ["magi", 3, 0.5]


def test_a_layout_and_route_that_no_function_is_named_after() -> None:
    (found,) = chosen(layouts=("stripe",), routes=("all_gather",))
    assert found.function.name == "ring_attention"
    assert (found.placement.layout, found.placement.route) == ("stripe", "all_gather")


def test_a_link_means_a_replay() -> None:
    found = find_settings(2, "cpu", link="pcie5")
    assert found.is_replay
    assert found.link is not None
    assert found.link.name == "pcie5"


def test_the_backend_that_is_used() -> None:
    both = Settings(2, torch.device("cuda", 0), "cpu:gloo,cuda:nccl")
    assert both.used_backend == "nccl"
    assert replace(both, backend="nccl").used_backend == "nccl"
    assert replace(both, backend=None).used_backend is None


def start_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is its only rank."""
    for name, value in one_rank().items():
        monkeypatch.setenv(name, value)


def test_ranks_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    start_torchrun(monkeypatch)
    common = ("zigzag_ring_flash_attn_func", *SHAPE, "--device", "cpu", "--repeats", "1")
    result = rfa(*common)
    assert result.exit_code == 0, result.output
    assert "1 rank of torchrun over gloo" in result.output
    for wrong in (("--world-size", "9"), ("--timeout", "9"), ("--replay",)):
        refused = rfa(*common, *wrong)
        assert refused.exit_code == 2
        assert "torchrun" in refused.output


def test_fewer_gpus_than_ranks_are_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_device", lambda device, what: torch.device("cuda", 0))
    monkeypatch.setattr(emulated, "check_link", lambda link, device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert find_settings(link="nvlink4").world_size == 8
    one = find_settings(1)
    assert (one.is_replay, one.backend) == (False, "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    four = find_settings()
    assert (four.world_size, four.is_replay) == (4, False)
    assert find_settings(5).is_replay
    with pytest.raises(ValueError, match=r"--backend nccl: this is a replay"):
        find_settings(5, backend="nccl", replay=True)


def test_a_backend_makes_a_group_of_ranks_that_share_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_device", lambda device, what: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    gloo = find_settings(5, backend="gloo")
    assert (gloo.is_replay, gloo.backend) == (False, "gloo")
    with pytest.raises(ValueError, match="--backend nccl needs a GPU for each of 5 ranks"):
        find_settings(5, backend="nccl")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    nccl = find_settings(5, backend="nccl")
    assert (nccl.is_replay, nccl.backend) == (False, "nccl")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no_such_function",), "no_such_function"),
        (("flash_attn_func",), "on one device"),
        (("--layout", "spiral"), "spiral"),
        (("--route", "teleport"), "teleport"),
        (("stripe_*", "--route", "all_gather"), "no function has layout any and route all_gather"),
        (("--kernel", "abacus"), "abacus"),
        (("--kernel", "triton"), "needs a GPU"),
        (("--kernel", "reference", "--kernel", "native"), "--kernel native can do none of this"),
        (("--versus", "abacus"), "abacus"),
        (("--gate",), "--gate: say against what with --versus"),
        (("--min-speed", "0.5"), "--min-speed 0.5: say against what"),
        (("--versus", "reference", "--max-memory", "2"), "memory is not measured on the CPU"),
        (("--versus", "reference", "--gate"), "every --kernel is the same one"),
        (("triton_ring_flash_attn_func", "--kernel", "reference"), "always uses triton"),
        (("--dtype", "int8"), "int8"),
        (("--cu-seqlens", "0,x"), "0,x"),
        (("--cu-seqlens", "3,4"), "3,4"),
        (("ring_flash_attn_func", "--cu-seqlens", "0,48"), "0,48: none of the functions is for"),
        (
            ("--cu-seqlens", "0,5,12"),
            "seqlen 12 and cu_seqlens 0,5,12: offsets are those of the whole stream",
        ),
        (("--cu-seqlens", "0,5,47"), "must end at 4 × 12 = 48"),
        (("llama3_*", "--cu-seqlens", "0,5,48", "--batch", "2"), "--batch 2: --cu-seqlens says"),
        (("ring_flash_attn_func", "--documents", "magi"), "--documents magi: none of the"),
        (("llama3_*", "--documents", "magi", "--batch", "2"), "--batch 2: --documents says"),
        (("--documents", "magi", "--cu-seqlens", "0,48"), "documents 'magi' and cu_seqlens 0,48"),
        (("--documents", "magi", "--seed", "1,2"), "Invalid value for '--seed'"),
        (("--seed", "1"), "seed 1: only for documents from a histogram"),
        (("--heads-k-stride", "3"), "heads_k_stride"),
        (("ring_flash_attn_func", "--heads-k-stride", "1"), "no function goes by head groups"),
        (("--nheads", "3"), "multiple"),
        (("--backend", "pigeon"), "pigeon"),
        (("--backend", "nccl"), "nccl needs a GPU"),
        (("--link", "nvlink4", "--backend", "gloo"), "without a group"),
        (("--replay", "--link", "string"), "string"),
        (("--replay", "--backend", "gloo"), "without a group"),
        (("--replay", "--timeout", "5"), "without a group"),
        (("--timeout", "-1"), "--timeout must be positive"),
        (("--device", "abacus"), "abacus"),
        (("--world-size", "0"), "world-size"),
        (("--json", "/dev/null/ring.json"), "cannot write"),
    ],
)
def test_wrong_options_are_refused(arguments: tuple[str, ...], words: str) -> None:
    result = rfa(*SHAPE, "--device", "cpu", *arguments)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.output.replace("│", " ").split())


def test_fewer_tokens_than_ranks_are_refused() -> None:
    result = rfa("--device", "cpu", "--cu-seqlens", "0,3")
    assert result.exit_code == 2, result.output
    assert "cu_seqlens ends at 3: fewer tokens than 4 ranks" in result.output


def test_help_has_examples() -> None:
    output = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    assert "rfa ring zigzag_ring_flash_attn_func 'stripe_*'" in output


# Several kernels.


class _Slow:
    """The reference kernel, and 20 ms."""

    name = "slow"

    def why_not(self, call: base.Call) -> list[str]:
        return []

    def forward(self, *args: Any) -> None:
        time.sleep(0.05)
        reference.KERNEL.forward(*args)

    def backward(self, *args: Any) -> None:
        reference.KERNEL.backward(*args)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    module = types.ModuleType("slow_kernel")
    module.KERNEL = _Slow()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slow_kernel", module)
    monkeypatch.setattr(base, "_ENTRIES", dict(base._ENTRIES))
    monkeypatch.setattr(base, "_registered", [])
    base.register_kernel("slow", "slow_kernel")
    yield "slow"
    base.load_kernel.cache_clear()


def check_kernels(rows: Sequence[Row], output: str) -> None:
    """`slow` beside `reference`: what is written follows from the times, and is printed."""
    (fast,), (late,) = ([r for r in rows if r.implementation == k] for k in ("reference", "slow"))
    assert fast.ms is not None
    assert late.ms is not None
    theory = fast.values["theoretic_ms"]
    assert fast.values["versus_percent"] == 100
    assert late.values["versus_percent"] == 100 * fast.ms / late.ms < 60
    assert late.values["versus_theory_percent"] == 100 * theory / late.ms
    assert late.values["efficiency_percent"] != late.values["versus_theory_percent"]
    lines = [line.split() for line in output.split("versus reference")[1].splitlines()]
    cells = {
        tuple(line[1:-6]): line for line in lines if line[:1] == ["zigzag_ring_flash_attn_func"]
    }
    assert any(line[-2:] == ["forward", f"{1e3 / theory:.2f}"] for line in lines)
    shown = cells["zigzag", "×", "ring", "×", "slow", "forward"]
    seconds = f"{100 * late.ms / 1e3:.4f}"
    shares = [f"{late.values[f'versus{name}_percent']:.1f}" for name in ("_theory", "")]
    assert shown[-6:] == [f"{1e3 / late.ms:.2f}", seconds, "n/a", *shares, "n/a"]


KERNELS = ("zigzag_ring_flash_attn_func", "--kernel", "reference", "--kernel", "slow", "--no-grad")


def test_kernels_beside_each_other_by_replay(slow: str, tmp_path: Path) -> None:
    file = tmp_path / "ring.json"
    result = rfa(*KERNELS, *HERE, "--replay", "--json", str(file))
    assert result.exit_code == 0, result.output
    check_kernels(load(file).rows, result.output)
    assert load(file).settings == {"repeats": 2, "versus": "reference"}
    assert "one after the other" in result.output


def test_kernels_beside_each_other_on_ranks(
    slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_torchrun(monkeypatch)
    file = tmp_path / "ring.json"
    options = (*SHAPE, "--repeats", "2", "--device", "cpu", "--json", str(file))
    result = rfa(*KERNELS, *options, "--gate")
    assert result.exit_code == 1, result.output
    rows = load(file).rows
    assert "1 of 1 rows miss it" in result.output
    assert (
        f"slow, forward: speed {rows[1].values['versus_percent']:.1f} %, not > 60 %"
        in result.output
    )
    assert load(file).settings["min_speed"] == 0.6
    result = rfa(*KERNELS, *options, "--min-speed", "0")
    assert result.exit_code == 0, result.output
    assert "memory is not measured on the CPU: all 1 rows pass" in result.output
    check_kernels(load(file).rows, result.output.replace(" pass ", ""))


def test_a_function_whose_kernel_cannot_run_is_refused() -> None:
    names = ("triton_ring_flash_attn_func", "ring_flash_attn_func")
    with pytest.raises(NotImplementedError, match="triton_ring_flash_attn_func can do none"):
        chosen(*names, versus="reference")


def test_a_function_that_fixes_its_kernel_is_compared_with_its_twin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base, "why_not", lambda name, call: [])
    found = chosen("triton_ring_flash_attn_func", versus="reference")
    twin, own = (each.name for each in found)
    assert twin == "ring_flash_attn_func (reference)"
    assert own == "triton_ring_flash_attn_func (triton)"
    assert [each.baseline for each in found] == [twin, twin]


def test_the_same_kernel_by_two_names_is_timed_once() -> None:
    (found,) = chosen("ring_flash_attn_func", kernels=("auto", "reference"), versus="auto")
    assert found.placement.kernel == "reference"


def row(kernel: str, ms: float, peak: int | None, **values: float) -> Row:
    return Row("ring", kernel, BOTH, {}, {}, (ms,), 1.0, peak, values)


def test_gates_are_of_speed_and_memory() -> None:
    native, limits = row("fa2", 6.0, 100, theoretic_ms=3.0), Limits()
    for ms, peak, expected in (
        (9.9, 119, []),
        (10.0, 119, ["speed 60.0 %, not > 60 %"]),
        (2.0, 120, ["memory 120.0 %, not < 120 %"]),
        (12.0, 300, ["speed 50.0 %, not > 60 %", "memory 300.0 %, not < 120 %"]),
        (2.0, None, ["memory was not measured"]),
    ):
        found = beside(row("triton", ms, peak), native)
        assert found.values["versus_theory_percent"] == 300 / ms
        assert list(misses(found, limits)) == expected
    failed = Row("ring", "fa2", BOTH, {}, failed="out of memory")
    assert list(misses(beside(failed, native), limits)) == ["out of memory"]
    assert list(misses(beside(native, failed), limits)) == ["the baseline failed"]
    nothing = row("fa2", 6.0, 0)
    assert beside(nothing, nothing).values["versus_memory_percent"] == 100
    assert beside(native, nothing).values["versus_memory_percent"] == float("inf")


# Ranks that fail.

Body = Iterator[Any]
NAMES = ("ring_flash_attn_func", "stripe_flash_attn_func", "zigzag_ring_flash_attn_func")


def too_large(rank: int, world_size: int, *args: Any) -> Body:
    """On every rank there is no memory for stripes."""
    inner = measure.call_on_rank

    def make(made: Target, rank: int, device: torch.device) -> Any:
        if "stripe" in made.name:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB.")
        return inner(made, rank, device)

    measure.call_on_rank = make
    yield from measure.measure_on_rank(rank, world_size, *args)


def test_a_function_without_memory_gets_a_row_that_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(measure, "measure_on_rank", too_large)
    result = rfa(*NAMES, *HERE, "--no-grad", "--json", str(tmp_path / "ring.json"))
    assert result.exit_code == 0, result.output
    assert "failed stripe_flash_attn_func (reference)\n  out of memory" in result.output
    failed = [row.failed for row in load(tmp_path / "ring.json").rows]
    assert failed == [None, None, "out of memory"]  # in the order of the API


def dies_in_trial(rank: int, world_size: int, targets: Any, *args: Any) -> Body:
    """Rank 1 is killed when it is to try stripes."""
    for number, item in enumerate(measure.measure_on_rank(rank, world_size, targets, *args)):
        if number < len(targets) and "stripe" in targets[number].name and rank == 1:
            os._exit(9)
        yield item


def test_after_a_rank_has_died_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure_on_rank", dies_in_trial)
    monkeypatch.setattr(measure.launch, "GRACE", 0.5)
    result = rfa(*NAMES, *HERE, "--no-grad")
    assert result.exit_code == 0, result.output
    assert "rank 1: the process died without a word" in result.output
    lines = result.output.splitlines()
    assert sum("× reference" in line and "failed" in line for line in lines) == 1


def dies_in_a_round(rank: int, world_size: int, targets: Any, *args: Any) -> Body:
    for number, item in enumerate(measure.measure_on_rank(rank, world_size, targets, *args)):
        if number > len(targets) and rank == 1:
            raise KeyError("a mistake on rank 1")
        yield item


def test_a_rank_that_dies_while_timing_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure_on_rank", dies_in_a_round)
    monkeypatch.setattr(measure.launch, "GRACE", 0.5)
    result = rfa(NAMES[0], *HERE, "--no-grad")
    assert result.exit_code == 1
    assert "while timing, rank 1: Traceback" in result.output
    assert "a mistake on rank 1" in result.output


def meets(rank: int, world_size: int) -> list[str]:
    """What comes of trials: all done, all failed, and one failed."""
    group, found, done = measure.Group(CPU), [], measure.DONE
    for outcome in (done, "OutOfMemoryError", done if rank else "OutOfMemoryError"):
        try:
            group.agree_on("a function", outcome)
            found.append("agreed")
        except ValueError as error:
            found.append(str(error))
    return found


def test_ranks_agree_on_what_failed(ranks: Callable[[int], Ranks]) -> None:
    for first, second, third in ranks(2).run(meets):
        assert (first, second) == ("agreed", "agreed")
        assert 'outcome = "OutOfMemoryError" on rank 0' in third
        assert f'outcome = "{measure.DONE}" on rank 1' in third


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("world_size", [1, torch.cuda.device_count() + 1])
def test_on_a_gpu_ranks_and_replays_are_timed(world_size: int, tmp_path: Path) -> None:
    file = tmp_path / "ring.json"
    sizes = ("--seqlen", "512", "--repeats", "2", "--world-size", str(world_size))
    result = rfa("zigzag_ring_flash_attn_func", *sizes, "--json", str(file))
    assert result.exit_code == 0, result.output
    rows = load(file).rows
    assert [row.passes for row in rows] == [FORWARD, BOTH]
    for row in rows:
        check_row(row, world_size)
        assert row.peak_bytes is not None
        assert ("link" in row.placement) == (world_size > 1)
        assert row.placement.get("backend") == (None if world_size > 1 else "nccl")
