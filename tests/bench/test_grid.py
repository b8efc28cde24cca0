"""Random calls; what kernels take for them, and how `auto` chooses by it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import ring_flash_attn as rfa
from ring_flash_attn.bench import grid
from ring_flash_attn.bench.grid import measure_costs, random_workloads
from ring_flash_attn.bench.implementations import find_implementation
from ring_flash_attn.bench.results import load
from ring_flash_attn.bench.workload import Placement, Workload, call_of, resolve, size_of_workload
from ring_flash_attn.cli.app import app
from ring_flash_attn.engine import prepare as preparing
from ring_flash_attn.kernels import base, costs
from ring_flash_attn.kernels.base import choose_kernels
from ring_flash_attn.kernels.costs import Cost, Shape, add_costs, from_rows, read_costs, shape_of
from ring_flash_attn.kernels.reference import ReferenceKernel

CPU = torch.device("cpu")
SHAPE = Shape(128, 128, 4, 32, 8192, 8192, "causal", False, False)
GPU = "cpu"


class Other(ReferenceKernel):
    """Another kernel, as far as `auto` knows."""

    name = "other"


class Packs(ReferenceKernel):
    """One that cannot do packed documents."""

    name = "no packs"

    def why_not(self, call: base.Call) -> list[str]:
        return ["packed documents"] if call.packed else []


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Two kernels more, known before "reference" but not registered by a user; the file."""
    entries = {name: base.Entry(__name__, "") for name in ("other", "no packs")}
    monkeypatch.setattr(base, "_ENTRIES", {**entries, **base._ENTRIES})
    monkeypatch.setattr(base, "_order", lambda call: ("reference", "other", "no packs"))
    known = {"other": Other(), "no packs": Packs(), "reference": ReferenceKernel()}
    monkeypatch.setattr(base, "load_kernel", known.__getitem__)
    path = tmp_path / "costs.csv"
    monkeypatch.setenv(costs.VARIABLE, str(path))
    costs.forget_costs()
    yield path
    costs.forget_costs()


def write(path: Path, shape: Shape = SHAPE, **times: tuple[float, float]) -> None:
    add_costs(path, [Cost(GPU, shape, name.replace("_", " "), *t) for name, t in times.items()])
    costs.forget_costs()


def chosen(workload: Workload, grad: bool = True, name: str = "auto") -> tuple[str, str]:
    call = call_of(workload, CPU, grad=grad)
    found = choose_kernels(name, call, size_of_workload(workload))
    return found.forward.name, found.backward.name


WORKLOAD = Workload(1, 8192, 32, 8, 128, causal=True)


def test_each_pass_takes_the_fastest(kernels: Path) -> None:
    write(kernels, reference=(2.0, 5.0), other=(1.0, 9.0), no_packs=(3.0, 4.0))
    assert chosen(WORKLOAD) == ("other", "no packs")
    assert chosen(WORKLOAD, grad=False) == ("other", "other")
    pack = Workload(1, 8192, 32, 8, 128, causal=True, cu_seqlens=(0, 4096, 8192))
    assert chosen(pack) == ("other", "reference")
    assert chosen(WORKLOAD, name="reference") == ("reference", "reference")
    for unlike in (
        Workload(1, 8192, 32, 8, 128, causal=True, dtype="float32"),
        Workload(1, 8192, 32, 8, 32, causal=True),
        Workload(1, 8192, 32, 8, 128, causal=True, dropout_p=0.5),
    ):
        assert chosen(unlike) == ("reference", "reference")


def test_the_nearest_calls_decide() -> None:
    """Nearer ones more; a kernel that could not do one of them is judged by the others."""
    near = SHAPE._replace(tokens=4096, length=4096)
    far = SHAPE._replace(tokens=2048, length=2048, group=2)
    rows = [
        Cost(GPU, near, "a", 1.0, 2.0),
        Cost(GPU, near, "b", 2.0, 1.0),
        Cost(GPU, far, "a", 8.0, 1.0),
        Cost(GPU, far, "b", 1.0, 8.0),
        Cost(GPU, far, "c", inf, 4.0),
    ]
    found = from_rows(rows, SHAPE)
    assert found is not None
    forward, backward = found
    assert 1 <= forward["a"] < forward["b"] <= 2
    assert 1 <= backward["b"] < backward["a"] <= 2
    assert "c" not in forward
    assert backward["c"] == pytest.approx(4)
    turned = from_rows(rows, far)
    assert turned is not None
    assert turned[0]["b"] < turned[0]["a"]
    assert from_rows(rows, SHAPE._replace(headdim=64, headdim_v=64)) is None
    assert from_rows([], SHAPE) is None


def test_users_own_kernels_come_first(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(kernels, reference=(1.0, 1.0), other=(2.0, 2.0))
    assert chosen(WORKLOAD) == ("reference", "reference")
    monkeypatch.setattr(base, "_registered", ["other"])
    assert chosen(WORKLOAD) == ("other", "other")


def test_gradients_of_two_kernels_are_those_of_one(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one device and on virtual ranks; each kernel runs its pass alone."""
    write(
        kernels,
        Shape(16, 16, 2, 4, 30, 30, "causal", False, False),
        other=(1.0, 9.0),
        no_packs=(9.0, 1.0),
    )
    monkeypatch.setattr(Packs, "forward", None)
    monkeypatch.setattr(Other, "backward", None)
    q, k, v = (torch.randn(1, 30, n, 16).bfloat16().requires_grad_() for n in (4, 2, 2))
    dout = torch.randn(1, 30, 4, 16).bfloat16()

    names: list[str] = []
    make = preparing.PreparedCall

    def noted(*args: Any) -> Any:
        names.append(args[1].name)
        return make(*args)

    monkeypatch.setattr(preparing, "PreparedCall", noted)

    def run(kernel: str, world_size: int) -> tuple[torch.Tensor, ...]:
        ranks: dict[str, Any] = {"world_size": world_size, "layout": "stripe", "route": "ring"}
        function = rfa.flash_attn_func if world_size == 1 else rfa.virtual_ring_attention
        options = ranks if world_size > 1 else {}
        out = function(q, k, v, causal=True, kernel=kernel, **options)
        return (out, *torch.autograd.grad(out, (q, k, v), dout))

    for world_size in (1, 2):
        for one, two in zip(run("auto", world_size), run("reference", world_size), strict=True):
            assert torch.equal(one, two)
    assert names == ["other + no packs", "reference"] * 2


def test_commands_say_what_auto_takes(kernels: Path) -> None:
    write(kernels, reference=(2.0, 5.0), other=(1.0, 9.0))
    assert find_implementation("auto", WORKLOAD, CPU).name == "auto (other + reference)"
    assert find_implementation("auto", WORKLOAD, CPU, grad=False).name == "other"
    whole = Workload(1, 8 * 8192, 32, 8, 128, causal=True)
    placed = Placement(8, kernel="auto")
    assert resolve(whole, placed, CPU).kernel == "auto"
    assert resolve(whole, placed, CPU, grad=False).kernel == "other"


def test_random_calls() -> None:
    """As the page says; the first of more are the same."""
    found = random_workloads(400, 3)
    assert found[:7] == random_workloads(7, 3)
    assert found[:7] != random_workloads(7, 4)
    assert {each.headdim for each in found} == {32, 48, 64, 80, 96, 112, 128, 160, 192, 256}
    assert {each.nheads // each.nheads_k for each in found} == {1, 2, 4, 5, 7, 8, 16}
    assert all(1 <= each.nheads <= 128 for each in found)
    assert all(each.batch * each.seqlen <= 131_072 for each in found)
    for kind in ("packed", "causal", "softcap"):
        assert 0 < sum(bool(getattr(each, kind)) for each in found) < 400
    assert any(each.window != (-1, -1) for each in found)
    assert any(each.headdim_v for each in found)
    assert max(each.flops() for each in found) <= grid._MOST_FLOPS


def small(count: int) -> list[Workload]:
    return [Workload(1, 16 * (n + 1), 2, 1, 8, causal=True) for n in range(count)]


def test_measuring_goes_on_where_it_stopped(kernels: Path) -> None:
    names, said = ("reference", "other"), list[str]()
    (first,) = measure_costs(names, small(1), CPU, kernels, said.append, repeats=1)
    assert [row.kernel for row in first] == ["reference", "other"]
    assert all(0 < row.forward < inf for row in first)
    assert all(0 < row.backward < inf for row in first)
    assert list(measure_costs(names, small(1), CPU, kernels, said.append, repeats=1)) == []
    more = list(measure_costs(names, small(3), CPU, kernels, said.append, repeats=1))
    assert [rows[0].shape.tokens for rows in more] == [32, 48]
    rows = read_costs(kernels)
    assert len(rows) == 6
    call = call_of(small(1)[0], CPU)
    assert rows[0].shape == shape_of(call, size_of_workload(small(1)[0]))
    assert rows[0].shape == first[0].shape


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "its columns are not gpu, headdim"),
        ("{names}\ncpu,64,64,1,1,1,1,full,False,False,triton,fast,1\n", "could not convert"),
        ("{names}\ncpu,64,64,1,1,1,1,full,False,False,triton,-1,1\n", "must be positive"),
        ("{names}\ncpu,64\n", "NoneType"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(kernels: Path, text: str, words: str) -> None:
    kernels.write_text(text.format(names=",".join(costs._NAMES)))
    with pytest.raises(ValueError, match=words) as error:
        chosen(WORKLOAD)
    assert "run `rfa tune --kernels` again" in str(error.value)
    x = torch.zeros(1, 4, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="times of kernels in"):
        rfa.flash_attn_func(x, x, x)


def test_no_file_is_read_where_the_user_wants_none(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(costs.VARIABLE, "")
    costs.forget_costs()
    assert costs.costs_file() is costs.costs_path() is None
    monkeypatch.delenv(costs.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    costs.forget_costs()
    assert costs.costs_file() is None
    path = costs.costs_path()
    assert path == tmp_path / "ring_flash_attn" / "costs.csv"
    write(path, reference=(2.0, 2.0), other=(1.0, 1.0))
    assert chosen(WORKLOAD) == ("other", "other")


def run_rfa(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_a_comparison_of_random_calls(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It goes on where it stopped, and says how near each came to the fastest."""
    write(kernels, Shape(8, 8, 2, 2, 32, 32, "causal", False, False), other=(1.0, 2.0))
    write(kernels, Shape(8, 8, 2, 2, 32, 32, "causal", False, False), reference=(2.0, 1.0))
    monkeypatch.setattr(grid, "random_workloads", lambda count, seed, dtype: small(count))
    path = tmp_path / "grid.json"
    asked = ("compare", "auto", "reference", "other", "--repeats", "1", "--no-errors", "--resume")
    for count in (1, 3):
        result = run_rfa(*asked, "--device", "cpu", "--random", str(count), "--json", str(path))
        assert result.exit_code == 0, result.output
    rows = load(path).rows
    assert [row.workload["seqlen"] for row in rows] == [n for n in (16, 32, 48) for _ in range(9)]
    assert {row.implementation for row in rows} == {
        "auto (other + reference)",
        "reference",
        "other",
    }
    assert "Speed, of the fastest that ran:" in result.output
    table = result.output.partition("Speed, of the fastest that ran:")[2].splitlines()
    (line,) = (x for x in table if "auto" in x and "backward" in x)
    assert line.split()[:3] == ["auto", "backward", "3"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compare", "--random", "2", "--seqlen", "8"), "--seqlen 8: --random draws it"),
        (("compare", "--random", "2", "--documents", "magi"), "--random draws it"),
        (("compare", "--resume"), "--resume: say which file with --json"),
        (("tune", "--kernels"), "there is none that torch can use"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], words: str) -> None:
    result = run_rfa(*arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", "").split())


def test_the_command_times_kernels(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; here on the CPU, which says that it is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "device", lambda *_: CPU)
    monkeypatch.setattr(grid, "random_workloads", lambda count, seed: small(count))
    monkeypatch.setattr("ring_flash_attn.cli.tune.kernel_names", lambda: ("other", "reference"))
    result = run_rfa("tune", "--kernels", "--calls", "2")
    assert result.exit_code == 0, result.output
    assert "2 calls more in" in result.output
    assert {row.kernel for row in read_costs(kernels)} == {"other"}


def test_the_choice_is_explained(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(costs.VARIABLE, "")
    costs.forget_costs()
    asked = ("info", "--explain", "--device", "cpu", "--json", str(tmp_path / "explained.json"))
    result = run_rfa(*asked, "--headdim", "64")
    assert "nothing like it was measured here" in result.output
    monkeypatch.setenv(costs.VARIABLE, str(kernels))
    write(kernels, reference=(2.0, 5.0), other=(1.0, 9.0))
    result = run_rfa(*asked)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "explained.json").read_text())
    assert found["takes"] == {"forward": "other", "backward": "reference"}
    assert found["kernels"]["reference"] == {"forward": 2.0, "backward": 1.0, "why not": []}
    assert found["kernels"]["no packs"]["forward"] is None
    words = " ".join(result.output.split())
    assert "auto takes forward other, backward reference, by the calls in" in words
    assert "2.00 ×" in words
    assert "not measured" in words
