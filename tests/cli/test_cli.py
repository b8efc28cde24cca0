"""The command line: what it prints can be checked by hand, and verify notices what is wrong."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from ranks import one_rank
from typer.testing import CliRunner, Result

from ring_flash_attn.api.families import FUNCTIONS
from ring_flash_attn.bench.functions import function_names
from ring_flash_attn.bench.results import load
from ring_flash_attn.bench.workload import Workload
from ring_flash_attn.cli.app import app
from ring_flash_attn.cli.options import check_group
from ring_flash_attn.cli.verify import precision
from ring_flash_attn.comm import launch
from ring_flash_attn.kernels import base, reference
from ring_flash_attn.kernels.base import kernel_names
from ring_flash_attn.plan.build import route_names
from ring_flash_attn.plan.layout import layout_names
from ring_flash_attn.verify import check
from ring_flash_attn.verify.catalogue import PASS, Case, VerifyOptions, make_cases
from ring_flash_attn.verify.check import Expected, dropout_seed, expected
from ring_flash_attn.verify.oracle import cut, cut_names


def rfa(*arguments: str) -> Result:
    """Run `rfa`; the output has no colours and is wide enough not to be wrapped."""
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


# info


def test_info_has_every_kernel_and_why_not() -> None:
    result = rfa("info", "--device", "cpu")
    assert result.exit_code == 0
    for name in kernel_names():
        assert name in result.output
    assert f"torch {torch.__version__}" in result.output
    assert "auto picks: reference" in result.output


def test_info_shows_our_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFA_CHECK", "values")
    assert "RFA_CHECK values" in rfa("info").output


@pytest.mark.parametrize(
    ("value", "why"), [("1", "it needs a Hopper GPU, not cpu"), ("0", "RFA_HOPPER=0 is set")]
)
def test_info_says_which_kernels_triton_has(
    value: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from ring_flash_attn.kernels.triton.hopper import host

    monkeypatch.setenv("RFA_HOPPER", value)
    host._unavailable.cache_clear()
    (line,) = (x for x in rfa("info").output.splitlines() if x.startswith("triton has:"))
    host._unavailable.cache_clear()
    assert "portable kernels, not those for Hopper" in line
    assert why in line


@pytest.mark.parametrize(("headdim", "portable"), [("64", False), ("36", True)])
def test_info_says_which_kernels_a_head_dimension_gets(
    headdim: str, portable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from ring_flash_attn.kernels.triton.hopper import host

    monkeypatch.setattr(host, "_unavailable", lambda device: ())
    (line,) = (
        x for x in rfa("info", "--headdim", headdim).output.splitlines() if "triton has:" in x
    )
    assert "for Hopper" in line
    assert ("portable" in line) == portable


# draw


def test_draw_of_four_tokens_on_two_ranks() -> None:
    result = rfa("draw", "contiguous", "--world-size", "2", "--seqlen", "4")
    lines = [line.split() for line in result.output.splitlines()]
    assert result.exit_code == 0
    assert ["0011"] in lines
    assert ["rank", "1", "2", "tokens:", "2–3"] in lines
    assert ["0", "│", "0", "·", "·", "·"] in lines
    assert ["0", "│", "0", "0", "·", "·"] in lines
    assert ["1", "│", "1", "1", "0", "·"] in lines
    assert ["1", "│", "1", "1", "0", "0"] in lines
    assert "Pairs of each rank: 3, 7; together 10." in result.output
    assert "all steps 7 pairs" in result.output  # 3 in step 0, 4 in step 1
    assert "10 / (2 × 7) = 71.4 %" in result.output
    # 256 tokens: 256 · 257 / 2 pairs, in steps of 128 · 129 / 2 and of 128² pairs
    assert "with 256 tokens 66.8 %" in result.output
    assert next(line for line in lines if "Q0·K0" in line)[-3:] == ["K0", "→", "1"]
    assert next(line for line in lines if "Q1·K0" in line)[2] == "4"


def test_draw_of_documents_a_window_and_the_way_back() -> None:
    result = rfa("draw", "stripe", "--world-size", "2", "--cu-seqlens", "0,3,5", "--window", "0,0")
    assert "5 tokens in 2 documents" in result.output
    assert "01001" in result.output  # every document starts with rank 0
    assert "Pairs of each rank: 3, 2; together 5." in result.output  # every query sees itself
    backward = rfa("draw", "contiguous", "--world-size", "2", "--seqlen", "4", "--backward")
    assert "dK0 → 0" in backward.output


def test_draw_with_queries_that_travel() -> None:
    output = rfa("draw", "zigzag", "--route", "query_ring").output
    assert "the rank that holds the key computes" in output
    assert "out1 → 1" in output


def test_draw_of_several_sources_in_one_launch(tmp_path: Path) -> None:
    grouped = ("draw", "zigzag", "--sources-per-launch", "3", "--backward")
    output = rfa(*grouped).output
    lines = [line.split() for line in output.splitlines()]
    assert next(line for line in lines if "Q1·K0," in line)[:2] == ["1", "Q1·K0,"]
    assert "K1 → 2, K1 → 3" in output  # straight to those who need it
    assert "dK1 → 1, dK2 → 2" in output
    picture = tmp_path / "picture.svg"
    assert rfa(*grouped, "--svg", str(picture)).exit_code == 0
    ElementTree.parse(picture)


@pytest.mark.parametrize("route", route_names())
@pytest.mark.parametrize("layout", layout_names())
def test_svg_is_well_formed_and_has_every_pair(layout: str, route: str, tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    result = rfa(
        "draw", layout, "--route", route, "--cu-seqlens", "0,7,7,16", "--svg", str(picture)
    )
    assert result.exit_code == 0
    root = ElementTree.parse(picture).getroot()
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert f"{layout} × {route}" in texts
    assert any(text.startswith(f"{7 * 8 // 2 + 9 * 10 // 2} pairs in 4 × ") for text in texts)


def test_svg_has_a_frame_for_each_document(tmp_path: Path) -> None:
    def frames(offsets: str) -> list[tuple[float, ...]]:
        rfa("draw", "zigzag", "--cu-seqlens", offsets, "--svg", str(tmp_path / "picture.svg"))
        boxes = ElementTree.parse(tmp_path / "picture.svg").iter("{http://www.w3.org/2000/svg}rect")
        found = [box for box in boxes if box.get("fill") == "none"]
        return [tuple(float(box.get(n) or 0) for n in ("x", "width", "height")) for box in found]

    one, two = frames("0,4,4,16")  # 256 pixels for 16 tokens
    assert one[1:] == (64, 64)
    assert two == (one[0] + 64, 192, 192)
    assert frames("0,16") == []


def test_draw_of_documents_from_a_histogram(tmp_path: Path) -> None:
    histogram = tmp_path / "short.csv"
    histogram.write_text("low,high,weight\n3,3,1\n")
    pack = ("--documents", str(histogram), "--seqlen", "8", "--seed", "1")
    assert "8 tokens in 4 documents" in rfa("draw", "stripe", *pack).output  # of 2: a quarter
    whole = rfa("draw", "stripe", *pack, "--document-cap", "1", "--world-size", "3")
    assert "8 tokens in 3 documents" in whole.output
    assert "01201201" in whole.output
    wrong = rfa("draw", "zigzag", "--documents", "magi", "--cu-seqlens", "0,16")
    assert wrong.exit_code == 2
    assert "--documents 'magi' and --cu-seqlens 0,16: give one of them" in wrong.output


@pytest.mark.parametrize(
    ("document", "mark"), [("usage", "draw schedules"), ("usage", "draw packs")]
)
def test_pictures_are_what_the_commands_beside_them_draw(
    document: str, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = Path(__file__).parents[2] / "docs"
    text = (docs / f"{document}.md").read_text(encoding="utf-8")
    (command,) = re.findall(rf"<!-- {mark} -->\n```bash\nrfa (.*)\n```", text)
    monkeypatch.chdir(tmp_path)
    assert rfa(*shlex.split(command)).exit_code == 0
    (picture,) = tmp_path.rglob("*.svg")
    assert f"]({picture.relative_to(tmp_path / 'docs').as_posix()})" in text
    assert picture.read_text() == (docs / "img" / picture.name).read_text()


# verify


def test_every_public_function_is_verified() -> None:
    cases = make_cases(VerifyOptions())
    assert {case.function.name for case in cases} == set(function_names())
    assert set(function_names(prefixes=True)) == set(FUNCTIONS)
    anywhere = {
        (case.placement.layout, case.placement.route)
        for case in cases
        if case.function.name == "ring_attention"
    }
    assert anywhere == {(layout, route) for layout in layout_names() for route in route_names()}
    assert {*cut_names(), "balanced"} >= set(layout_names())


@pytest.mark.parametrize("layout", cut_names())
def test_a_cut_gives_every_token_to_one_rank(layout: str) -> None:
    shards = [cut(layout, (7, 0, 3, 12), rank, 3) for rank in range(3)]
    assert sorted(token for shard in shards for token in shard) == list(range(22))


def right(dtype: torch.dtype, plain: float, largest: float, scale: float) -> Expected:
    return Expected(torch.empty(0), dtype, plain, largest, scale)


def test_tolerance_is_twice_plain_torch_and_at_most_what_is_accepted() -> None:
    assert right(torch.float64, plain=0.0, largest=3.0, scale=3.0).limit("out") == 3e-12
    eps = torch.finfo(torch.float32).eps
    limit = right(torch.float32, plain=1e-6, largest=2.0, scale=2.0).limit("dq")
    assert limit == 2e-6 + (2 + 8) * eps * 2
    wide = right(torch.bfloat16, plain=1.0, largest=2.0, scale=2.0)
    assert wide.limit("out") == 2e-2
    assert wide.limit("dq") == 1e-1
    assert replace(wide, scale=6.0).limit("dq") == 1e-1, "of the values, not the terms"
    band = 2 * torch.finfo(torch.bfloat16).eps + 8 * eps
    cancelled = replace(wide, largest=0.1).limit("dq")
    assert cancelled == pytest.approx(band * 2.0), "what rounding of the terms leaves"


def test_a_wrong_gradient_of_a_few_tokens_fails() -> None:
    """What is accepted is a share of the values, however large the terms are that cancel."""
    base = Workload(batch=1, seqlen=8, nheads=2, nheads_k=1, headdim=8, causal=True)
    names, dtype = ("flash_attn_func",), torch.bfloat16
    (case,) = make_cases(
        VerifyOptions(names, features=("causal",), dtypes=("bfloat16",), seed=4, workload=base)
    )
    tensors = expected(case.workload, case.seed, torch.device("cpu"))
    for name in ("dq", "dk", "dv"):
        want = tensors[name]
        assert not want.compare(name, 0, 1.06 * want.tensor).passed, name
        assert want.compare(name, 0, want.tensor.to(dtype)).passed, name


def test_a_right_gradient_passes_where_its_terms_cancel() -> None:
    """The products of dout and out almost cancel; out has been rounded before."""
    options = VerifyOptions(
        names=("ring_flash_attn_func",),
        features=("sink", "together"),
        dtypes=("float16", "bfloat16"),
        world_size=2,
        virtual=True,
        seed=59,
        workload=Workload(batch=1, seqlen=1, nheads=2, nheads_k=1, headdim=8, causal=True),
    )
    for case in check.check_all(make_cases(options), options, "", 60.0):
        assert case.status == PASS, case
        ((_, rows),) = precision([case], by_rank=True)
        assert {row[-1] for row in rows} == {"within"}, "the report agrees"


def test_infinities_have_to_agree_and_nan_never_passes() -> None:
    want = Expected(torch.tensor([1.0, -torch.inf]), torch.float32, 1e-6, 1.0, 1.0)

    def passed(*got: float) -> bool:
        return want.compare("lse", 0, torch.tensor(got)).passed

    assert passed(1.0, -torch.inf)
    assert not passed(1.0, 0.0)
    assert not passed(1.0, torch.inf)
    assert not passed(torch.nan, -torch.inf)


def test_a_rank_answers_for_its_own_part_of_the_sink_gradient() -> None:
    (case, *_) = make_cases(VerifyOptions(names=("ring_flash_attn_func",), features=("sink",)))
    case = replace(case, workload=replace(case.workload, lse_grad=True))
    cpu = torch.device("cpu")
    parts = [check.expected_on_rank(case, rank, cpu, own_sink=True) for rank in range(4)]
    whole = expected(case.workload, case.seed, cpu)["dsink"].tensor  # by autograd
    torch.testing.assert_close(sum(part["dsink"].tensor for part in parts), whole)
    assert not torch.allclose(parts[0]["dsink"].tensor, whole)


def test_the_expected_seed_is_the_one_that_the_library_draws() -> None:
    torch.manual_seed(5)
    assert dropout_seed(5) == int(torch.randint(1 << 62, (), dtype=torch.int64))


def test_virtual_ranks_pass() -> None:
    names = ("zigzag_ring_flash_attn_func", "flash_attn_varlen_func")
    result = rfa("verify", *names, "--virtual", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "zigzag × ring × reference" in result.output
    assert "fail" not in result.output
    for dtype in ("fp64", "fp32", "bf16"):
        assert dtype in result.output


class _Broken:
    """The reference kernel with an error in dv."""

    name = "broken"

    def why_not(self, call: base.Call) -> list[str]:
        return ["no sinks here"] if call.sink else []

    def forward(self, *args: Any) -> None:
        reference.KERNEL.forward(*args)

    def backward(self, *args: Any) -> None:
        reference.KERNEL.backward(*args)
        args[6].dv.mul_(1 + 1e-6)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    module = types.ModuleType("broken_kernel")
    module.KERNEL = _Broken()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "broken_kernel", module)
    monkeypatch.setattr(base, "_ENTRIES", dict(base._ENTRIES))
    base.register_kernel("broken", "broken_kernel")
    yield "broken"
    base.load_kernel.cache_clear()


def test_a_wrong_kernel_is_found_and_its_tensor_named(broken: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ("ring_attention", "--virtual", "--kernel", broken, "--layout", "zigzag")
    options = ("--route", "ring", "--feature", "causal", "--dtype", "float64", "--device", "cpu")
    result = rfa("verify", *arguments, *options, "--json", str(report))
    assert result.exit_code == 1
    assert "dv on rank 0: largest error" in result.output
    assert "dk on rank" not in result.output
    found = load(report)
    assert all(case["status"] == "fail" for case in found.details["verify"]["cases"])
    for row in found.rows:
        assert {tensor for tensor, error in row.errors.items() if not error["passed"]} == {"dv"}


def test_kernels_and_ranks_are_compared(broken: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    names = ("zigzag_ring_flash_attn_func", "flash_attn_func", "--kernel", broken)
    where = ("--virtual", "--world-size", "2", "--device", "cpu", "--dtype", "float32")
    options = ("--feature", "causal", "--feature", "sink", "--report", "--json", str(path))
    result = rfa("verify", *names, "--versus", "reference", *where, *options)
    assert result.exit_code == 0, result.output
    for title in ("one device on 2 ranks", "reference on one device", "reference on 2 ranks"):
        assert f"Difference from {title}" in result.output
    for case in load(path).details["verify"]["cases"]:
        if case["status"] == "cannot":
            continue
        spread, wrong = bool(case["layout"]), case["kernel"] == broken
        expected = ({"one device"} if spread else set()) | ({"reference"} if wrong else set())
        assert set(case["differences"]) == expected
        for versus, errors in case["differences"].items():
            assert {each["tensor"] for each in errors} == {"out", "lse", "dq", "dk", "dv"}
            worst = max(errors, key=lambda each: each["relative"])
            assert worst["relative"] < 2e-6
            if versus == "reference":
                assert worst["tensor"] == "dv"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--versus", "reference"), "only --report and --markdown"),
        (("--versus", "reference", "--kernel", "reference", "--report"), "no other --kernel"),
        (("--versus", "abacus", "--report"), "abacus"),
    ],
)
def test_a_comparison_with_nothing_is_refused(options: tuple[str, ...], words: str) -> None:
    result = rfa("verify", "ring_flash_attn_func", "--device", "cpu", *options)
    assert result.exit_code == 2
    assert words in result.output


def test_what_a_kernel_cannot_do_is_neither_right_nor_wrong(broken: str) -> None:
    features = ("--feature", "sink", "--feature", "full")
    arguments = ("ring_flash_attn_func", "--virtual", "--device", "cpu", "--kernel", "reference")
    result = rfa("verify", *arguments, "--kernel", broken, *features, "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert "no sinks here" in result.output
    assert "4 cases: 3 pass, 1 cannot" in result.output


def test_a_kernel_that_can_do_nothing_is_refused_before_the_start(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ring_flash_attn.verify.check.check_all", pytest.fail)
    arguments = ("verify", "ring_flash_attn_func", "--device", "cpu", "--kernel", "reference")
    for wrong, words in (
        (("--kernel", broken, "--feature", "sink"), ("--kernel broken can", "no sinks here")),
        (("--kernel", "triton", "--kernel", "native"), ("--kernel triton can", "TRITON_INTERPRET")),
        (("--kernel", "triton", "--kernel", "native"), ("--kernel native can", "fa2: it needs an")),
        (("native_ring_flash_attn_func",), ("native_ring_flash_attn_func can do none",)),
    ):
        result = rfa(*arguments, *wrong)
        assert result.exit_code == 2, result.output
        for each in words:
            assert each in result.output
        assert "--kernel reference can" not in result.output, "it can"


def test_verify_takes_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    found = "ring_flash_attn.bench.machine.find_device"
    monkeypatch.setattr(found, lambda device, what: torch.device("cuda", 0))
    monkeypatch.setattr(check, "check_kernels", lambda calls, options: asked.append(options))
    monkeypatch.setattr(check, "check_all", lambda calls, options, *_: iter(()))
    assert rfa("verify", "ring_flash_attn_func", "--virtual").exit_code == 1, "nothing was checked"
    assert asked[0].device == "cuda"
    result = rfa("verify", "--device", "cuda:1")
    assert result.exit_code == 2
    assert "ranks take GPUs in turn" in result.output


def test_two_processes_report_everything_as_json(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    names = ("stripe_flash_attn_varlen_kvpacked_func", "ring_flash_attn_func")
    features = ("--feature", "causal", "--feature", "sink", "--feature", "dropout")
    size = ("--world-size", "2", "--seqlen", "21", "--seed", "7", "--dtype", "float64")
    result = rfa("verify", *names, *features, *size, "--device", "cpu", "--json", str(report))
    assert result.exit_code == 0, result.output
    written = load(report)
    assert (written.machine["kind"], written.versions["torch"]) == ("cpu", torch.__version__)
    assert len(written.rows) == 6 * 2  # cases, ranks
    assert {row.placement["function"] for row in written.rows} == set(names)
    found = written.details["verify"]
    assert found["summary"] == {"pass": 6}
    assert found["configuration"]["world_size"] == 2
    assert found["versions"]["torch"] == torch.__version__
    for case in found["cases"]:
        assert case["function"] in names
        assert case["workload"]["seqlen"] in (21, 22)
        assert case["seed"] == 7
        tensors = ["out", "lse", "dq", "dk", "dv"] + ["dsink"] * (case["feature"] == "sink")
        pairs = [(error["tensor"], error["rank"]) for error in case["tensors"]]
        assert pairs == [(tensor, rank) for rank in range(2) for tensor in tensors]
        for error in case["tensors"]:
            assert error["mean"] <= error["rmse"] <= error["max"] <= error["limit"]
        assert Workload.from_dict(case["workload"]).torch_dtype is torch.float64


# ranks that fail


def fails_on_rank_1(rank: int, world_size: int) -> Iterator[int]:
    yield rank
    if rank == 1:
        raise KeyError("a mistake on rank 1")
    torch.distributed.recv(torch.zeros(1), src=1)
    yield rank


def sleeps_on_rank_1(rank: int, world_size: int) -> Iterator[int]:
    time.sleep(60 * rank)
    yield rank


def test_a_rank_that_raises_ends_the_run_with_its_traceback() -> None:
    run = launch.run_spawned(fails_on_rank_1, (), 2, "cpu", "gloo")
    assert next(run) == [0, 1]
    with pytest.raises(launch.RanksFailed, match=r"(?s)rank 1: Traceback.*a mistake on rank 1"):
        next(run)


def test_a_rank_that_hangs_is_named() -> None:
    run = launch.run_spawned(sleeps_on_rank_1, (), 2, "cpu", "gloo", timeout=8)
    with pytest.raises(launch.RanksFailed, match=r"no answer 1 from rank 1 within 8 s$"):
        next(run)


def crashes_in_full(
    rank: int, world_size: int, cases: list[Case], options: VerifyOptions
) -> Iterator[Case]:
    for case in cases:
        if rank == 1 and case.feature == "full":
            raise KeyError("a mistake on rank 1")
        yield replace(case, status=PASS, used_kernel="reference")


def test_after_a_crash_the_rest_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "check_on_rank", crashes_in_full)
    features = ("--feature", "causal", "--feature", "full", "--feature", "softcap")
    where = ("--world-size", "2", "--device", "cpu")
    result = rfa("verify", "ring_flash_attn_func", *where, *features)
    assert result.exit_code == 1
    assert "a mistake on rank 1" in result.output
    assert "5 cases: 1 error, 4 pass" in result.output  # causal in three dtypes


def test_ranks_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in one_rank().items():
        monkeypatch.setenv(name, value)
    options = ("--feature", "causal", "--device", "cpu", "--report")
    result = rfa("verify", "zigzag_ring_flash_attn_func", *options)
    assert result.exit_code == 0, result.output
    assert "3 pass" in result.output
    assert "Difference from one device on 1 rank" in result.output


def test_without_typer_rfa_says_how_to_get_it() -> None:
    code = "import sys; sys.modules['typer'] = None; from ring_flash_attn.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip() == 'rfa needs typer: pip install "ring-flash-attn[cli]"'


def test_nccl_needs_a_gpu_for_each_rank_unless_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert check_group(None, "cuda", 1, "nccl", None)[0] == "nccl"
    with pytest.raises(ValueError, match="a GPU for each of 4 ranks"):
        check_group(None, "cuda", 4, "nccl", None)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert check_group(None, "cuda", 4, "nccl", None)[0] == "nccl"
    with pytest.raises(ValueError, match="a GPU for each of 4 ranks"):
        check_group(None, "cpu", 4, "nccl", None)
