"""The documents: their code runs, their tables and drawings are true, what they name exists."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from ranks import Ranks
from torch import Tensor
from torch.distributed.run import get_args_parser

import ring_flash_attn
from ring_flash_attn.api.families import PREFIXES
from ring_flash_attn.bench.profile import parts
from ring_flash_attn.bench.profile import run as profiling
from ring_flash_attn.bench.workload import Workload
from ring_flash_attn.cli.app import app
from ring_flash_attn.cli.workloads import make_workloads, without_gradients
from ring_flash_attn.engine import prepare
from ring_flash_attn.kernels import base as kernels
from ring_flash_attn.plan import build as plans
from ring_flash_attn.plan import layout as layouts
from ring_flash_attn.plan.tiles import Mask
from ring_flash_attn.verify.oracle import Rules, oracle

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    "README.md",
    "README.zh-CN.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/design.md",
    "docs/benchmarks.md",
    "docs/troubleshooting.md",
]
GROUP: Any = typer.main.get_command(app)
COMMANDS = GROUP.commands
READMES = ["README.md", "README.zh-CN.md"]


def text(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def block(document: str, mark: str) -> str:
    """The code block (or table) under the comment <!-- mark -->."""
    found = re.search(
        rf"<!-- {mark} -->\n(?:```\w*\n(.*?)```|((?:\|[^\n]*\n)+))", text(document), re.S
    )
    assert found, f"{document} has no block {mark!r}"
    return found[1] or found[2]


def without_code(document: str) -> str:
    return re.sub(r"```.*?```", "", text(document), flags=re.S)


def inline_code(document: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", without_code(document)))


def closeness(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


# CONTRIBUTING: a layout, a route and a kernel.


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Any]]:
    """`example(kind, name)` imports an example as a module; the registries are restored after."""
    for module, registry in ((layouts, "_LAYOUTS"), (plans, "_ROUTES"), (kernels, "_ENTRIES")):
        monkeypatch.setattr(module, registry, dict(getattr(module, registry)))
    monkeypatch.syspath_prepend(tmp_path)
    imported = []

    def load(kind: str, name: str) -> Any:
        code = block("CONTRIBUTING.md", f"example: {kind} {name}")
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
        imported.append(name)
        return importlib.import_module(name)

    yield load
    for name in imported:
        sys.modules.pop(name, None)
    kernels.load_kernel.cache_clear()
    prepare._planned.cache_clear()


RULES = [
    Rules(),
    Rules(causal=True),
    Rules(causal=True, window_size=(20, 0), sink=torch.tensor([0.3, -1.0, 2.0, 0.0]).double()),
]


def check(layout: str, route: str, kernel: str, rules: Rules, nheads_k: int) -> None:
    """4 virtual ranks against the oracle, forward and backward, on uneven documents."""
    torch.manual_seed(0)
    cu_seqlens = [0, 37, 38, 38, 130, 201]
    heads = (4, nheads_k, nheads_k)
    qkv = [torch.randn(201, n, 8, dtype=torch.float64, requires_grad=True) for n in heads]
    out = ring_flash_attn.virtual_ring_attention(
        *qkv,
        world_size=4,
        layout=layout,
        route=route,
        kernel=kernel,
        cu_seqlens=cu_seqlens,
        causal=rules.causal,
        window_size=rules.window_size,
        sink=rules.sink,
    )
    assert isinstance(out, Tensor)
    expected, _ = oracle(*qkv, rules, cu_seqlens, cu_seqlens)
    dout = torch.randn_like(expected)
    pairs = [(out, expected)]
    pairs += zip(*(torch.autograd.grad(x, qkv, dout) for x in (out, expected)), strict=True)
    for ours, theirs in pairs:
        assert closeness(ours, theirs) < 1e-12


@pytest.mark.parametrize("rules", RULES, ids=["full", "causal", "window"])
@pytest.mark.parametrize("route", plans.route_names())
def test_a_new_layout(example: Callable[[str, str], Any], route: str, rules: Rules) -> None:
    example("layout", "block_cyclic")
    for layout in ("block_cyclic", "flat_block_cyclic"):
        check(layout, route, "auto", rules, nheads_k=2)


@pytest.mark.parametrize("rules", RULES, ids=["full", "causal", "window"])
@pytest.mark.parametrize("layout", layouts.layout_names())
def test_a_new_route(example: Callable[[str, str], Any], layout: str, rules: Rules) -> None:
    example("route", "broadcast")
    check(layout, "broadcast", "auto", rules, nheads_k=2)


@pytest.mark.parametrize("rules", RULES, ids=["full", "causal", "window"])
@pytest.mark.parametrize(
    ("layout", "route"), list(product(("zigzag", "flat_stripe"), plans.route_names()))
)
def test_a_new_kernel(
    example: Callable[[str, str], Any], layout: str, route: str, rules: Rules
) -> None:
    example("kernel", "naive")
    check(layout, route, "naive", rules, nheads_k=4)


def test_a_new_kernel_says_what_it_cannot_do(example: Callable[[str, str], Any]) -> None:
    example("kernel", "naive")
    assert kernels.kernel_names()[0] == "naive"
    with pytest.raises(NotImplementedError, match="naive: only MHA"):
        check("zigzag", "ring", "naive", Rules(), nheads_k=2)
    check("zigzag", "ring", "auto", Rules(), nheads_k=2)  # the reference kernel can


def test_the_new_ones_work_together(example: Callable[[str, str], Any]) -> None:
    for kind, name in (("layout", "block_cyclic"), ("route", "broadcast"), ("kernel", "naive")):
        example(kind, name)
    check("block_cyclic", "broadcast", "naive", RULES[-1], nheads_k=4)


# README: what its first screen and its example of packed documents do.


def run_first_screen(rank: int, world_size: int, code: str) -> tuple[Tensor, ...]:
    """The snippet, in a process that has a group already."""
    lines = code.splitlines()
    start = [line for line in lines if line.startswith("dist.init_process_group(")]
    assert len(start) == 1
    names: dict[str, Any] = {}
    exec("\n".join(line for line in lines if line not in start), names)
    tensors = (names["out"], *(names[x].grad for x in "qkv"), names["positions"])
    return tuple(tensor.detach() for tensor in tensors)


def test_the_first_screen_runs(ranks: Callable[[int], Ranks]) -> None:
    results = ranks(2).run(run_first_screen, block("README.md", "first screen"))
    torch.manual_seed(0)
    qkv = torch.randn(3, 1, 1024, 8, 64).requires_grad_()
    out = ring_flash_attn.flash_attn_func(*qkv, causal=True)
    assert isinstance(out, Tensor)
    (grads,) = torch.autograd.grad(out.sum(), qkv)
    positions = torch.arange(1024).view(1, -1)
    for rank, found in enumerate(results):
        for ours, whole in zip(found, (out, *grads, positions), strict=True):
            theirs = ring_flash_attn.shard(whole, "zigzag", rank=rank, world_size=2)
            assert closeness(ours.double(), theirs.detach().double()) < 1e-5


def test_both_first_screens_have_the_same_code() -> None:
    english, chinese = (re.sub(r"#.*", "", block(d, "first screen")) for d in READMES)
    assert english == chinese


def run_sharding(rank: int, world_size: int, code: str, qkv: list[Tensor]) -> Any:
    part = {"rank": rank, "world_size": world_size, "cu_seqlens": [0, 5, 7, 20]}
    names: dict[str, Any] = {"tokens": torch.arange(20)}
    names |= {n: ring_flash_attn.shard(x, "zigzag", **part) for n, x in zip("qkv", qkv)}
    exec(code, names)
    return names["mine"], names["positions"], names["everything"]


def test_the_sharding_example_runs(ranks: Callable[[int], Ranks]) -> None:
    qkv = [torch.randn(20, 4, 8, dtype=torch.float64) for _ in range(3)]
    results = ranks(2).run(run_sharding, block("README.md", "sharding"), qkv)
    cu_seqlens = [0, 5, 7, 20]
    expected, _ = oracle(*qkv, Rules(causal=True), cu_seqlens, cu_seqlens)
    starts = torch.tensor(cu_seqlens)
    for mine, positions, everything in results:
        assert torch.equal(
            positions, mine - starts[torch.searchsorted(starts, mine, right=True) - 1]
        )
        assert closeness(everything, expected) < 1e-12
    assert sorted(token for mine, _, _ in results for token in mine.tolist()) == list(range(20))


def test_the_example_runs_under_torchrun() -> None:
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run(
        [*launch, "examples/ring_attention.py", "--seqlen", "128", "--batch", "1"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    errors = dict(re.findall(r"(\w+): .* = (\S+)", done.stdout))
    assert list(errors) == ["out", "dq", "dk", "dv"]
    assert all(float(error) < 1e-5 for error in errors.values()), done.stdout


# Drawings and tables.


@pytest.mark.parametrize("document", READMES)
def test_the_drawing_of_layouts_is_true(document: str) -> None:
    rows = [line.split() for line in block(document, "layouts").splitlines()[2:]]
    assert [row[0] for row in rows] == [n for n in layouts.layout_names() if "flat" not in n]
    for name, *holders in rows:
        sharding = layouts.Sharding(layouts.get_layout(name), (16,), 4)
        held = {token: rank for rank in range(4) for token in sharding.tokens(rank)}
        assert [int(rank) for rank in holders[:16]] == [held[token] for token in range(16)]


def balance(layout: str, lengths: tuple[int, ...], world_size: int) -> str:
    problem = plans.Problem(
        layouts.get_layout(layout), lengths, lengths, world_size, Mask.of(causal=True)
    )
    found = [plans.make_plan("ring", problem, rank) for rank in range(world_size)]
    mean = sum(plan.pairs for plan in found) / world_size
    busiest = 0
    for steps in zip(*(plan.steps for plan in found), strict=True):
        busiest += max(sum(t.pairs for work in step.work for t in work.tiles) for step in steps)
    return f"{max(plan.pairs for plan in found) / mean:.2f} ({busiest / mean:.2f})"


def test_the_table_of_balance_is_true() -> None:
    header, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in block("docs/design.md", "balance").splitlines()
    )
    world_sizes = [int(cell.removeprefix("W = ")) for cell in header[2:]]
    assert len(rows) >= 6
    for layout, documents, *figures in rows:
        lengths = tuple(int(length) for length in documents.split(","))
        assert figures == [balance(layout, lengths, w) for w in world_sizes]


def test_the_tree_is_complete() -> None:
    folder, named = "", set()
    for line in block("README.md", "tree").splitlines():
        name = line.split()[0]
        folder = folder if line.startswith(" ") else name
        path = folder + name if line.startswith(" ") else name
        assert (ROOT / path).exists(), path
        named.add(path.removesuffix("/"))
    package = (ROOT / "ring_flash_attn").iterdir()
    there = {f"ring_flash_attn/{path.name}" for path in package if path.name != "__pycache__"}
    assert there <= named


# Names and links.


def expanded(name: str) -> list[str]:
    """`a_{b,c}` → `a_b`, `a_c`."""
    found = re.fullmatch(r"(.*)\{(.*)\}(.*)", name)
    return [found[1] + x + found[3] for x in found[2].split(",")] if found else [name]


def public_names(document: str) -> set[str]:
    """Names that speak of attention, in inline code; patterns with * too."""
    names = {n for code in inline_code(document) for n in expanded(re.sub(r"\(.*", "", code))}
    wanted = re.compile(r"[a-z0-9_]*(flash_attn|attention|shard|position_ids)[a-z0-9_]*\*?")
    return {name for name in names if wanted.fullmatch(name)}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_public_name_exists(document: str) -> None:
    there = {*ring_flash_attn.__all__, "ring_flash_attn", "flash_attn"}
    for name in public_names(document):
        assert any(fnmatchcase(each, name) for each in there), name


def test_imports_in_snippets_exist() -> None:
    imports = re.findall(r"from (ring_flash_attn[\w.]*) import (.*)", "".join(map(text, DOCUMENTS)))
    assert imports
    for module, names in imports:
        for name in names.split(","):
            assert hasattr(importlib.import_module(module), name.strip()), f"{module}.{name}"


def test_every_function_is_in_the_readme() -> None:
    patterns = public_names("README.md")
    prefixes = tuple(f"{prefix}_" for prefix in PREFIXES)
    for name in ring_flash_attn.__all__:
        if not name.startswith(prefixes):
            listed = any(fnmatchcase(name, pattern) for pattern in patterns)
            assert listed or re.search(rf"\b{name}\b", text("README.md")), name
    assert {f"{prefix}_" for prefix in PREFIXES} <= inline_code("README.md")


def test_every_choice_is_in_the_readme() -> None:
    choices = {*layouts.layout_names(), *plans.route_names(), *kernels.kernel_names()}
    assert choices <= inline_code("README.md")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(document)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        there = (ROOT / document).parent / path if path else ROOT / document
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there.read_text(encoding="utf-8")), target


def anchors(markdown: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", markdown, flags=re.S), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document: str) -> None:
    """Those of the original documents aside, which stand in the left column of a table."""
    theirs = set(re.findall(r"`([^`\n]+)`", text("docs/benchmarks.md").split("## How we")[0]))
    for name in inline_code(document) - (theirs if "benchmarks" in document else set()):
        if re.fullmatch(r"\.?[\w./-]+(\.(py|pyi|md|toml|txt|svg)|/)", name):
            places = [ROOT / name, ROOT / "ring_flash_attn" / name]
            assert any(place.exists() for place in places), name


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^(\w+):", text("Makefile"), re.M))
    for document in DOCUMENTS:
        assert set(re.findall(r"(?:^|`)make (\w+)", text(document), re.M)) <= targets, document


def test_commands_and_their_options_exist() -> None:
    lines = re.findall(r"^rfa (.*?)(?:\s+#.*)?$", text("README.md"), re.M)
    assert {line.split()[0] for line in lines} == set(COMMANDS)
    for line in lines:
        command, *arguments = line.split()
        COMMANDS[command].make_context(command, arguments)  # raises where it does not parse


# Commands of the original documents, and ours.

THEIRS = (
    "minimal_benchmark.py",
    "compare_implementations.py",
    "auto_profile.sh",
    "nsys profile",
    "ncu --set full",
    "benchmarking_attention.py",
    "basic/test_flash_attn_func.py",
    "basic/test_flash_attn_qkvpacked_func.py",
    "basic/test_flash_attn_varlen_qkvpacked_func.py",
    "basic/test_flash_attn_qkvpacked_func_dist.py",
    "test/quick_test_triton.py",
    "test/test_ring_flash_attn_comparison.py",
    "test/test_qkvpacked_func.py",
    "test/test_varlen_qkvpacked_func.py",
    "test/test_zigzag_qkvpacked_func.py",
    "test/test_stripe_qkvpacked_func.py",
    "benchmark/benchmark_comparison.py",
    "benchmark/benchmark_qkvpacked_func.py",
    "benchmark/benchmark_varlen_qkvpacked_func.py",
)


def command_rows() -> list[tuple[str, list[str]]]:
    """Cells of theirs, with our commands."""
    _, _, *lines = block("docs/benchmarks.md", "commands").splitlines()
    cells = [line.strip("|").split(" | ") for line in lines]
    rows = [(theirs, re.findall(r"`([^`]+)`", ours)) for theirs, ours in cells]
    return [(theirs, [c for c in ours if re.search(r"\b(rfa|cli) \w", c)]) for theirs, ours in rows]


@dataclass(frozen=True)
class Typed:
    """One of our commands as a user types it."""

    line: str
    command: str
    arguments: list[str]
    launched: bool = False  # by torchrun
    interpreted: bool = False

    @classmethod
    def of(cls, line: str) -> Typed:
        words = shlex.split(line)
        interpreted = words[0] == "TRITON_INTERPRET=1"
        if words[0] == "torchrun":
            launched = get_args_parser().parse_args(words[1:])
            assert launched.module
            assert launched.training_script == "ring_flash_attn.cli"
            command, *arguments = launched.training_script_args
            return cls(line, command, arguments, launched=True)
        command, *arguments = words[words.index("rfa") + 1 :]
        return cls(line, command, arguments, interpreted=interpreted)

    def parsed(self) -> Any:
        """Raises where it does not parse."""
        return COMMANDS[self.command].make_context(self.command, [*self.arguments])

    @property
    def needs_gpu(self) -> bool:
        """Nothing of it runs on a CPU."""
        return "cuda" in self.arguments or "triton" in self.arguments


def small(typed: Typed, given: dict[str, Any]) -> dict[str, Any]:
    """The same command with sizes that take no time; lists keep two of theirs."""
    texts = typed.command in ("bench", "compare", "profile")
    sizes: dict[str, Any] = {"batch": 1, "seqlen": 8, "nheads": 2, "headdim": 8}
    if texts:
        sizes = {n: "8,9" if "," in (given[n] or "") else str(x) for n, x in sizes.items()}
        return {**given, **sizes, "repeats": 1, "device": "cpu"}
    if typed.command == "diff":
        return given
    if typed.command == "ring":
        return {**given, **sizes, "nheads_k": 2, "device": "cpu", "repeats": 1}
    virtual = {"virtual": not typed.launched, "feature": ["full"]}
    return {**given, **sizes, "nheads_k": 2, "device": "cpu", **virtual}


def one_rank() -> dict[str, str]:
    """What torchrun tells the only rank that it starts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def exit_code(context: Any) -> int:
    try:
        with context:
            context.command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    return 0


def test_every_command_of_the_original_documents_is_in_the_table() -> None:
    rows = command_rows()
    for name in THEIRS:
        assert any(name in theirs for theirs, _ in rows), name
    assert all(ours for _, ours in rows)


def test_presets_are_the_sizes_of_the_original_documents() -> None:
    """What stands beside one of theirs is the same workload."""

    def workload(typed: Typed) -> tuple[list[Workload], bool]:
        given = typed.parsed().params
        numbers = {n: given[n] for n in ("batch", "seqlen", "nheads", "nheads_k", "headdim")}
        preset, same = given["preset"], (given["causal"], given["window"], given["dtype"])
        grad = not without_gradients(preset, given["no_grad"])
        return make_workloads(preset, numbers, *same), grad

    compared = 0
    for theirs, ours in command_rows():
        found = re.match(
            r"`python minimal_benchmark.py((?: --[\w-]+(?: \w+)?)*)`", theirs.strip(" |")
        )
        if found and len(ours) == 1:
            compared += 1
            assert workload(Typed.of(f"rfa bench{found[1]}")) == workload(Typed.of(ours[0])), theirs
    assert compared >= 11


def test_our_command_for_each_of_theirs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profiling, "implementation_names", lambda: ("reference", "SDPA math"))
    done: set[str] = set()
    for _, ours in command_rows():
        for typed in map(Typed.of, ours):
            context = typed.parsed()
            context.params = small(typed, context.params)
            what = f"{typed.command} {context.params}"
            if typed.needs_gpu or typed.interpreted or what in done:
                continue
            done.add(what)
            shutil.rmtree("profile_results", ignore_errors=True)
            with monkeypatch.context() as patched:
                for name, value in (one_rank() if typed.launched else {}).items():
                    patched.setenv(name, value)
                code = exit_code(context)
            output = capsys.readouterr().out
            assert code == 0, f"{typed.line}: {output}"
            assert output.strip(), typed.line
    assert len(done) > 20


def test_the_quick_check_of_triton_runs_without_a_gpu() -> None:
    (typed,) = {
        typed.line: typed
        for _, ours in command_rows()
        for typed in map(Typed.of, ours)
        if typed.interpreted
    }.values()
    size = "--feature causal --batch 1 --seqlen 4 --nheads 2 --nheads-k 1 --headdim 8"
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "ring_flash_attn.cli",
            typed.command,
            *typed.arguments,
            *size.split(),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"\b1 pass\b", ran.stdout), ran.stdout


def test_the_files_of_a_profile_are_listed() -> None:
    listed = {
        name
        for line in block("docs/benchmarks.md", "files").splitlines()
        for first, *others in [re.split(r",? +", line.split("  ")[0])]
        for name in (first, *(first.rsplit(".", 1)[0] + o if o[0] == "." else o for o in others))
    }
    assert listed == {parts.SUMMARY, *parts.PARTS}
