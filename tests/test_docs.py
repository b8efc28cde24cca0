"""The documents: their code runs, their tables and drawings are true, what they name exists."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiny_model
import torch
import torch.distributed as dist
import typer
from documents import ROOT, block, table, text
from ranks import Ranks, one_rank
from torch import Tensor
from torch.distributed.run import get_args_parser

import ring_flash_attn
from ring_flash_attn.api.batch_parts import CONSUMED
from ring_flash_attn.api.families import PREFIXES
from ring_flash_attn.bench.results import Row, load
from ring_flash_attn.bench.workload import Workload
from ring_flash_attn.cli.app import app
from ring_flash_attn.engine import prepare
from ring_flash_attn.kernels import base as kernels
from ring_flash_attn.lab.registry import STEPS
from ring_flash_attn.plan import build as plans
from ring_flash_attn.plan import layout as layouts
from ring_flash_attn.plan.tiles import Mask
from ring_flash_attn.verify.oracle import Rules, oracle

DOCUMENTS = [
    "README.md",
    "README.zh-CN.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/usage.md",
    "docs/context_parallel.md",
    "docs/swap_in.md",
    "docs/training.md",
    "docs/huggingface.md",
    "docs/kernels.md",
    "docs/planner.md",
    "docs/benchmarks.md",
    "docs/predictions.md",
    "docs/scaling.md",
    "docs/design.md",
    "docs/kernel-log.md",
    "docs/lab/README.md",
    "docs/lab/assistants.md",
    "docs/lab/results.md",
    "docs/troubleshooting.md",
    "examples/torchtitan.md",
    "results/README.md",
]
GROUP: Any = typer.main.get_command(app)
COMMANDS = GROUP.commands
READMES = ["README.md", "README.zh-CN.md"]


def without_code(document: str) -> str:
    return re.sub(r"```.*?```", "", text(document), flags=re.S)


def inline_code(document: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", without_code(document)))


def of_today(document: str) -> set[str]:
    """Inline code, without what the changelog says of released versions, which had other files."""
    released = "".join(re.findall(r"\n## \[\d.*", text("CHANGELOG.md"), re.S))
    history = set(re.findall(r"`([^`\n]+)`", released)) if document == "CHANGELOG.md" else set()
    return inline_code(document) - history


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
    prepare._plans.clear()


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


# The first screen of the READMEs, and the example of packed documents.


def test_every_page_is_tested() -> None:
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= set(DOCUMENTS)


@pytest.mark.parametrize("document", READMES)
def test_a_readme_is_short(document: str) -> None:
    assert len(text(document).splitlines()) <= 150
    first = re.sub(r"^(#.*|\[.*)$", "", text(document), flags=re.M).split()
    assert "context parallelism" in " ".join(first)[:200]
    assert {"img/lengths_h200.svg", "img/kernels_h200.svg"} <= set(
        re.findall(r"\]\(docs/(img/\w+\.svg)\)", text(document))
    )


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


@pytest.mark.parametrize("mark", ["first screen", "hugging face"])
def test_both_first_screens_have_the_same_code(mark: str) -> None:
    english, chinese = (re.sub(r"#.*", "", block(d, mark)) for d in READMES)
    assert english == chinese


def run_hugging_face(rank: int, world_size: int, code: str, name: str, batch: Any) -> Any:
    """A page's fine-tuning, in a process that has a group already: gradients, and parameters."""
    lines = [line for line in code.splitlines() if not line.startswith("dist.init_process_group(")]
    names: dict[str, Any] = {"name": name, "batch": batch, "loader": [batch]}
    exec("\n".join(lines), names)
    parameters = dict(names["model"].named_parameters())
    grads = {key: p.grad for key, p in parameters.items() if p.grad is not None}
    return grads, {key: p.detach() for key, p in parameters.items()}


@pytest.mark.parametrize(
    ("document", "mark"), [("README.md", "hugging face"), ("docs/huggingface.md", "step")]
)
def test_fine_tuning_of_a_hugging_face_model(
    ranks: Callable[[int], Ranks], tmp_path: Path, document: str, mark: str
) -> None:
    """A step on 2 ranks has the gradients of one device; that of SGD leaves its parameters."""
    pytest.importorskip("transformers")
    import tiny_hf

    code = block(document, mark)
    assert document != "README.md" or len(code.splitlines()) <= 15
    model = tiny_hf.build("llama")
    model.save_pretrained(tmp_path)
    batch = tiny_hf.batch_of((5, 1, 13, 4, 9))
    right = tiny_hf.on_one_rank(model, [batch])["grads"]
    before = {key: p.detach() for key, p in model.named_parameters()}
    for grads, parameters in ranks(2).run(run_hugging_face, code, str(tmp_path), batch):
        if mark == "step":  # which has zeroed them
            grads = {key: (before[key] - p) / 0.1 for key, p in parameters.items()}
        assert grads.keys() == right.keys()
        for key, grad in grads.items():
            assert closeness(grad, right[key]) < (1e-3 if mark == "step" else 3e-5), key


def run_hugging_face_fsdp(rank: int, world_size: int, code: str) -> None:
    import tiny_hf

    batch = tiny_hf.batch_of((5, 1, 13, 4, 9))
    model = tiny_hf.build("llama")
    right = tiny_hf.on_one_rank(model, [batch])
    model.zero_grad()
    names: dict[str, Any] = {
        "ContextParallel": ring_flash_attn.ContextParallel,
        "batch": batch,  # of both data-parallel groups: the mean of the same
        "dist": dist,
        "model": ring_flash_attn.prepare_hf_model(model),
    }
    exec(code, names)
    for key, parameter in model.named_parameters():
        tiny_hf.assert_near(parameter.grad.full_tensor(), right["grads"][key], key)


def test_the_example_of_fsdp_runs(ranks: Callable[[int], Ranks]) -> None:
    pytest.importorskip("transformers")
    ranks(4).run(run_hugging_face_fsdp, block("docs/huggingface.md", "fsdp"))


def run_sharding(rank: int, world_size: int, code: str, qkv: list[Tensor]) -> Any:
    part = {"rank": rank, "world_size": world_size, "cu_seqlens": [0, 5, 7, 20]}
    names: dict[str, Any] = {"tokens": torch.arange(20)}
    names |= {n: ring_flash_attn.shard(x, "zigzag", **part) for n, x in zip("qkv", qkv)}
    exec(code, names)
    return names["mine"], names["positions"], names["everything"]


def test_the_sharding_example_runs(ranks: Callable[[int], Ranks]) -> None:
    qkv = [torch.randn(20, 4, 8, dtype=torch.float64) for _ in range(3)]
    code = "\n".join(block("docs/usage.md", name) for name in ("sharding", "prepare"))
    results = ranks(2).run(run_sharding, code, qkv)
    cu_seqlens = [0, 5, 7, 20]
    expected, _ = oracle(*qkv, Rules(causal=True), cu_seqlens, cu_seqlens)
    starts = torch.tensor(cu_seqlens)
    for mine, positions, everything in results:
        assert torch.equal(
            positions, mine - starts[torch.searchsorted(starts, mine, right=True) - 1]
        )
        assert closeness(everything, expected) < 1e-12
    assert sorted(token for mine, _, _ in results for token in mine.tolist()) == list(range(20))


def test_the_example_of_padded_batches_runs() -> None:
    torch.manual_seed(0)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    names: dict[str, Any] = {"qkv": torch.randn(2, 4, 3, 2, 8), "attention_mask": mask}
    exec(block("docs/usage.md", "unpad"), names)
    for row, tokens in zip(range(2), mask.bool()):
        alone = ring_flash_attn.flash_attn_qkvpacked_func(
            names["qkv"][row, tokens][None], causal=True
        )
        assert closeness(names["out"][row, tokens], alone[0]) < 1e-6
        assert names["out"][row, ~tokens].eq(0).all()


def run_relayout(rank: int, world_size: int, code: str, hidden: Tensor, w: Tensor) -> Tensor:
    def project(x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        assert positions.shape == x.shape[:1]
        return (x @ w).view(-1, 3, 4, 8).unbind(1)

    names: dict[str, Any] = {"project": project}
    exec(code, names)
    part = {"rank": rank, "world_size": world_size, "cu_seqlens": [0, 5, 7, 20]}
    out: Tensor = names["attention_layer"](ring_flash_attn.shard(hidden, "flat_contiguous", **part))
    return out


def test_the_relayout_example_runs(ranks: Callable[[int], Ranks]) -> None:
    hidden = torch.randn(20, 32, dtype=torch.float64)
    w = torch.randn(32, 96, dtype=torch.float64)
    results = ranks(3).run(run_relayout, block("docs/usage.md", "relayout"), hidden, w)
    cu_seqlens = [0, 5, 7, 20]
    qkv = (hidden @ w).view(20, 3, 4, 8).unbind(1)
    expected, _ = oracle(*qkv, Rules(causal=True), cu_seqlens, cu_seqlens)
    assert closeness(torch.cat(results), expected.flatten(1)) < 1e-12


def run_training(rank: int, world_size: int, code: str, batches: list[Any]) -> dict[str, Tensor]:
    """The page's step over the micro-batches of this rank's data-parallel index."""
    model = tiny_model.TinyModel()
    names: dict[str, Any] = {"model": model, "loader": batches[rank // 2]}
    exec(code, names)
    return {n: p.full_tensor().detach() for n, p in model.named_parameters()}  # type: ignore[operator]


def test_the_training_step_runs(ranks: Callable[[int], Ranks]) -> None:
    """Two optimiser steps on dp 2 × cp 2 leave the parameters of one device."""
    code = block("docs/context_parallel.md", "step")
    packs = [
        tiny_model.without_weights(tiny_model.random_documents((5, 1, 7), seed))
        for seed in range(6)
    ]
    pack = [
        {name: x for name, x in tiny_model.flattened(each).items() if name != "loss_weights"}
        for each in packs
    ]
    of_ranks = [[[pack[0], pack[1]], [pack[2]]], [[pack[3], pack[4]], [pack[5]]]]
    model = tiny_model.TinyModel()
    for steps in ((0, 1, 3, 4), (2, 5)):
        documents = [document for n in steps for document in packs[n]]
        tiny_model.expected(documents, model=model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]
                parameter.grad = None
    for found in ranks(4).run(run_training, code, of_ranks):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=0, atol=1e-10)


def run_sdpa(rank: int, world_size: int, code: str, batch: Any) -> dict[str, Tensor]:
    model = tiny_model.TinyModel()
    attention = tiny_model.plain_attention()
    names: dict[str, Any] = {
        "cp": ring_flash_attn.ContextParallel(),
        "batch": batch,
        "model": lambda ids, positions: model(ids, positions, attention),
    }
    exec(code, names)
    grads = tiny_model.gradients(model)
    for grad in grads.values():
        dist.all_reduce(grad)
    return grads


def test_the_example_of_torchs_attention_runs(ranks: Callable[[int], Ranks]) -> None:
    documents = tiny_model.without_weights(tiny_model.random_documents((5, 1, 7)))
    batch = {n: x for n, x in tiny_model.flattened(documents).items() if n != "loss_weights"}
    right = tiny_model.expected(documents)["grads"]
    for found in ranks(2).run(run_sdpa, block("docs/context_parallel.md", "sdpa"), batch):
        for name, grad in found.items():
            torch.testing.assert_close(grad, right[name], rtol=0, atol=1e-10)


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
        timeout=600,
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
        layout = layouts.get_layout(name)
        shards = [layouts.spans(layout, (16,), rank, 4) for rank in range(4)]
        held = {t: rank for rank, shard in enumerate(shards) for span in shard for t in span.tokens}
        assert [int(rank) for rank in holders[:16]] == [held[token] for token in range(16)]


def test_the_picture_of_a_pack_is_true() -> None:
    """Who holds which tokens, how many pairs each rank computes, how many keys travel."""
    head, _, *rows = block("docs/usage.md", "pack").splitlines()
    names = head.split()[:-2]
    lengths = tuple(names.count(name) for name in dict.fromkeys(names))
    assert sorted(row.split()[0] for row in rows) == sorted(layouts.layout_names())
    for row in rows:
        name, *numbers = row.split()
        problem = plans.Problem(layouts.get_layout(name), lengths, lengths, 4, Mask.of(causal=True))
        held = {}
        pairs, keys = [], 0
        for rank in range(4):
            shard = problem.spans(plans.Side.KEY, rank)
            held |= {token: rank for span in shard for token in span.tokens}
            pairs.append(sum(position + 1 for span in shard for position in span.positions))
            seen = {span.document: span.positions[-1] + 1 for span in shard}  # ascending
            keys += sum(seen.values()) - sum(span.length for span in shard)
        expected = [*(held[token] for token in range(sum(lengths))), *pairs, keys]
        assert [int(number) for number in numbers] == expected, name


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
    """All of the package is named, and all of a folder of which something is."""
    path: list[str] = []
    named: dict[str, set[str]] = {}
    for line in block("docs/design.md", "tree").splitlines():
        name, depth = line.split()[0], (len(line) - len(line.lstrip())) // 2
        path[depth:] = [name]
        assert (ROOT / "".join(path)).exists(), line
        named.setdefault("".join(path[:-1]), set()).add(name.removesuffix("/"))
    assert {"ring_flash_attn/", "ring_flash_attn/plan/", "ring_flash_attn/engine/"} <= set(named)
    for folder in filter(None, named):
        there = {each.name for each in (ROOT / folder).iterdir()} - {"__pycache__"}
        if folder != "ring_flash_attn/":
            there.discard("__init__.py")
        assert there <= named[folder], folder


def test_every_variable_is_listed() -> None:
    listed = set(re.findall(r"`(RFA_\w+)`", block("docs/usage.md", "variables")))
    source = "".join(f.read_text() for f in (ROOT / "ring_flash_attn").rglob("*.py"))
    assert listed == set(re.findall(r"\bRFA_[A-Z_]*[A-Z]\b", source))


# Figures: those of the files, and the same in both READMEs.

PASSES = ("forward", "both")
SHAPES = ("causal_d128", "full_d128", "causal_d64")  # of all implementations


def stored(name: str) -> list[Row]:
    return load(ROOT / "results" / f"{name}_h200.json").rows


def rates(rows: list[Row], name: str) -> str:
    """TFLOP/s forward / backward; an en dash if it was not measured."""
    found = {row.passes: row.tflops for row in rows if row.implementation == name}
    if not found:
        return "–"
    return f"{found['forward']:.0f} / {found['backward']:.0f}"


def test_figures_by_shape_are_those_of_the_files() -> None:
    rows = table("results/README.md", "shapes")
    assert {row[-1] for row in rows} == {
        f"`{path.name}`" for path in (ROOT / "results").glob("compare_*.json")
    }
    for _, *shown, forward, backward, file in rows:
        found = load(ROOT / "results" / file.strip("`")).rows
        assert shown == [rates(found, name) for name in ("triton", "fa4", "cudnn")]
        speed = {(row.implementation, row.passes): row.tflops or 0.0 for row in found}
        for ratio, passes in ((forward, "forward"), (backward, "backward")):
            best = max(speed["fa4", passes], speed["cudnn", passes])
            assert ratio == f"{speed['triton', passes] / best:.2f}", file


def test_figures_of_three_implementations_are_those_of_the_file() -> None:
    names = ("triton", "cute", "flash-attn 4", "SDPA cuDNN")
    shapes: dict[str, list[Row]] = {}
    for row in stored("kernels"):
        if row.failed is None:
            shapes.setdefault(str(Workload.from_dict(row.workload)), []).append(row)
    lines, compared = table("results/README.md", "three"), []
    assert len(lines) == len(shapes) == 15
    for (shape, *shown, of_triton, of_cute), rows in zip(lines, shapes.values(), strict=True):
        assert shape.startswith(f"{rows[0].workload['batch']}, {rows[0].workload['nheads']}/")
        assert shown == [rates(rows, name) for name in names], shape
        speed = {(row.implementation, row.passes): row.tflops or 0.0 for row in rows}
        for name, ratios in (("triton", of_triton), ("cute", of_cute)):
            best = [
                max(speed.get((each, passes), 0.0) for each in names[2:])
                for passes in ("forward", "backward")
            ]
            forward, backward = speed[name, "forward"] / best[0], speed[name, "backward"] / best[1]
            assert ratios == f"{forward:.2f} / {backward:.2f}", shape
        errors = {row.implementation: row.errors for row in rows if row.errors}
        compared += [rows[0].workload["headdim"]] if errors else []
        for tensor, error in errors.get("cute", {}).items():
            best = min(errors[name][tensor]["rmse"] for name in names[2:] if name in errors)
            assert error["rmse"] <= 1.1 * best, (shape, tensor)
    assert compared == [80], "as the text says"


def test_figures_of_ranks_with_both_kernels_are_those_of_the_file() -> None:
    found = stored("replay_kernels")
    shown = []
    for kernel in ("cute", "triton"):
        forward, both = (
            r.ms or 0 for r in slowest([r for r in found if r.implementation == kernel])
        )
        shown += [f"{forward:.2f}", f"{both:.1f}"]
    words = "{} ms forward and {} ms forward and backward with `cute`, {} and {} with `triton`"
    assert words.format(*shown) in " ".join(text("results/README.md").split())


def test_figures_by_length_are_those_of_the_file() -> None:
    lengths = [1024, 2048, 4096, 8192, 16384, 32768]
    found = [*stored("lengths"), *stored("compare_causal_d128")]
    for name, *shown in table("results/README.md", "lengths"):
        by_length = [[r for r in found if r.workload["seqlen"] == n] for n in lengths]
        assert shown == [rates(rows, name.strip("`")) for rows in by_length]


def test_figures_of_implementations_are_those_of_the_files() -> None:
    files = [stored(f"compare_{shape}") for shape in SHAPES]
    for name, *shown, memory in table("results/README.md", "implementations"):
        key = name.strip("`")
        rates_of_files = [rates(rows, key) for rows in files]
        held = [
            next((r.peak_bytes for r in rows if (r.implementation, r.passes) == (key, "both")), 0)
            for rows in files
        ]
        sizes = [f"{size / 2**20:.0f}" if size else "–" for size in held]
        assert (shown, memory) == (rates_of_files, ", ".join(sizes)), name


def slowest(rows: list[Row]) -> list[Row]:
    """The rows of the slowest rank, forward and both."""
    return [next(r for r in rows if r.passes == p and r.values["slowest"]) for p in PASSES]


def times(rows: list[Row]) -> list[float]:
    """Milliseconds of each, from the theoretic time and the efficiency."""
    return [100 * r.values["theoretic_ms"] / r.values["efficiency_percent"] for r in rows]


def percents(rows: list[Row], digits: int, kind: str = "efficiency") -> list[str]:
    return [f"{row.values[f'{kind}_percent']:.{digits}f} %" for row in rows]


def test_figures_of_distributed_functions_are_those_of_the_file() -> None:
    lines = table("results/README.md", "functions")
    assert len(lines) == len({row.placement["function"] for row in stored("ring")})
    for name, *shown in lines:
        rows = slowest([r for r in stored("ring") if f"`{r.placement['function']}`" == name])
        (forward, both), (of_forward, of_both) = times(rows), percents(rows, 0)
        assert shown == [f"{forward:.2f}", of_forward, f"{both:.1f}", of_both]


def replayed(packed: bool) -> dict[tuple[str, str, str], list[Row]]:
    """Rows of replays by layout × route, kernel and sources a launch."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in stored("replays"):
        if ("lengths" in row.workload) == packed:
            place = row.placement
            baseline, _, kernel = row.implementation.rpartition(" on ")
            name = f"baseline on `{kernel}`" if baseline else f"`{kernel}`"
            sources = str(place.get("sources_per_launch", "–"))
            key = f"{place['layout']} × {place['route']}", name, sources
            found.setdefault(key, []).append(row)
    return found


def replay_cells(rows: list[Row], full_rate: bool) -> list[str]:
    worst = slowest(rows)
    forward, both = times(worst)
    cells = [f"{forward:.2f}", f"{both:.1f}", *percents(worst, 1)]
    cells += percents(worst, 1, "full_rate_efficiency") if full_rate else []
    held = max(row.peak_bytes or 0 for row in rows) / 2**20
    return [*cells, f"{max(0.0, worst[1].values['exposed_ms']):.1f}", f"{held:.0f}"]


def test_figures_of_replays_in_the_results_are_those_of_the_file() -> None:
    whole = replayed(packed=False)
    lines = table("results/README.md", "replays")
    assert len(lines) == len(whole)
    for kernel, sources, *shown in lines:
        assert shown == replay_cells(whole["zigzag × ring", kernel, sources], full_rate=True)
    packs = replayed(packed=True)
    lines = table("results/README.md", "packs")
    assert len(lines) == len(packs)
    for point, kernel, sources, *shown in lines:
        assert shown == replay_cells(packs[point, kernel, sources], full_rate=False)


def test_figures_of_packs_in_the_results_are_those_of_the_file() -> None:
    packs = load(ROOT / "results" / "packs_h200.json").details["packs"]
    lines = table("results/README.md", "drawn")
    assert [line[:3] for line in lines] == [["8", "ring", "`triton`"], ["64", "ring", "`triton`"]]
    for ranks, route, kernel, *shown, total in lines:
        found = [
            packs[f"{ranks} ranks, balanced × {route} × {kernel.strip('`')}, magi, seed {seed}"]
            for seed in range(42, 47)
        ]
        rates = [[each[passes]["tflops"] for passes in ("forward", "backward")] for each in found]
        assert shown == [" / ".join(f"{rate:.0f}" for rate in each) for each in rates]
        sums = [
            sum(each[passes]["tflops"] * each[passes]["ms"] for each in found)
            / sum(each[passes]["ms"] for each in found)
            for passes in ("forward", "backward")
        ]
        assert total == " / ".join(f"{rate:.0f}" for rate in sums)


def test_figures_of_new_packs_are_those_of_the_file() -> None:
    file = json.loads((ROOT / "results" / "host" / "plan_time_h200.json").read_text())
    found = {
        (f"{row['layout']} × {row['route']}", str(row["documents"]), str(row["ranks"])): [
            f"{row[name]:.1f}" for name in ("plans_ms", "forward_tables_ms", "backward_tables_ms")
        ]
        for row in file["rows"]
    }
    lines = table("results/README.md", "new pack")
    assert lines
    for *case, both_plans, forward, backward in lines:
        assert [both_plans, forward, backward] == found[tuple(case)]


def readme_replays() -> list[tuple[list[str], list[str]]]:
    """Times and efficiencies, as both READMEs list them."""
    found = replayed(packed=False)
    keys = [("baseline on `fa2`", "–"), ("baseline on `fa4`", "–")]
    keys += [(f"`{name}`", "4") for name in ("fa2", "cudnn", "fa4", "triton")]
    rows = [slowest(found["zigzag × ring", name, sources]) for name, sources in keys]
    return [([f"{time:.1f}" for time in times(each)], percents(each, 0)) for each in rows]


def test_figures_of_replays_are_those_of_the_file_in_both_readmes() -> None:
    in_english = r"^\| .*: (\S+) and (\S+) ms \| (.*) \| (.*) \|$"
    in_chinese = r"^\| .*? (\d+ %) / (\d+ %) \| (\S+) / (\S+) ms \|$"
    english, chinese = (
        re.findall(pattern, text(readme), re.M)
        for pattern, readme in zip((in_english, in_chinese), READMES, strict=True)
    )
    expected = readme_replays()
    assert english == [(*times, *percents) for times, percents in expected]
    assert chinese == [(*percents, *times) for times, percents in expected]


def test_figures_of_memory_are_those_of_the_file_everywhere() -> None:
    held = {
        row.implementation: f"{(row.peak_bytes or 0) / 2**20:.0f}"
        for row in stored("compare_causal_d128")
        if row.passes == "both" and row.implementation in ("triton", "fa4", "cudnn", "fa2")
    }
    for readme in READMES:
        for name, size in held.items():
            assert re.search(rf"`{name}` {size}\b", text(readme)), (readme, name)
    head, _, cells = block("docs/kernels.md", "memory").splitlines()
    names = [name.strip(" `") for name in head.strip("|").split("|")]
    sizes = [cell.split()[0] for cell in cells.strip("|").split("|")]
    assert {n: s for n, s in zip(names, sizes, strict=True) if n in held} == held


def numbers(document: str) -> Counter[str]:
    """All numbers of its prose and tables; what stands in links is not prose."""
    prose = re.sub(r"\]\([^)]*\)", "]", without_code(document))
    return Counter(re.findall(r"\d+(?:\.\d+)*", prose))


def test_both_readmes_state_the_same_numbers() -> None:
    english, chinese = map(numbers, READMES)
    assert english == chinese
    assert sum(english.values()) > 60


def test_both_readmes_have_the_same_links() -> None:
    english, chinese = (
        [t for t in re.findall(r"\]\(([^)\s]+)\)", text(d)) if not t.startswith("README")]
        for d in READMES
    )
    assert sorted(english) == sorted(chinese)


def test_the_steps_of_the_lab_are_listed() -> None:
    rows = [(str(s.number), s.title, f"s{s.number:02}_{s.slug}.py", s.teaches) for s in STEPS]
    found = []
    for number, title, teaches in table("docs/lab/README.md", "steps"):
        name, path = re.findall(r"\[(.*)\]\((.*)\)", title)[0]
        found.append((number, name, Path(path).name, teaches))
    assert found == rows


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
    there = {*ring_flash_attn.__all__, "ring_flash_attn", "flash_attn", *CONSUMED}
    for name in public_names(document):
        assert any(fnmatchcase(each, name) for each in there), name


def test_imports_in_snippets_exist() -> None:
    imports = re.findall(r"from (ring_flash_attn[\w.]*) import (.*)", "".join(map(text, DOCUMENTS)))
    assert imports
    for module, names in imports:
        for name in names.split(","):
            assert hasattr(importlib.import_module(module), name.strip()), f"{module}.{name}"


def test_every_function_is_listed() -> None:
    patterns = public_names("docs/usage.md")
    prefixes = tuple(f"{prefix}_" for prefix in PREFIXES)
    for name in ring_flash_attn.__all__:
        if not name.startswith(prefixes):
            listed = any(fnmatchcase(name, pattern) for pattern in patterns)
            assert listed or re.search(rf"\b{name}\b", text("docs/usage.md")), name
    assert {f"{prefix}_" for prefix in PREFIXES} <= inline_code("docs/usage.md")


def test_every_choice_is_listed() -> None:
    points = {*layouts.layout_names(), *plans.route_names()}
    assert points <= inline_code("docs/usage.md")
    for readme in READMES:
        assert {*kernels.kernel_names(), *plans.route_names()} <= inline_code(readme)


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
    for name in of_today(document) - (theirs if "benchmarks" in document else set()):
        if re.fullmatch(r"\.?[\w./-]+(\.(py|pyi|md|toml|txt|svg)|/)", name):
            places = [ROOT / name, ROOT / "ring_flash_attn" / name]
            assert any(place.exists() for place in places), name


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", text("Makefile"), re.M))
    for document in DOCUMENTS:
        assert set(re.findall(r"(?:^|`)make ([\w-]+)", text(document), re.M)) <= targets, document


def test_commands_and_their_options_exist() -> None:
    lines = re.findall(r"^rfa (.*)$", block("docs/benchmarks.md", "rfa"), re.M)
    assert {line.split()[0] for line in lines} == set(COMMANDS)
    shell = re.findall(r"```bash\n(.*?)```", "".join(map(text, DOCUMENTS)), re.S)
    lines = re.findall(r"^(?:RFA_\w+=\w* )?rfa (.*)$", "".join(shell), re.M)
    assert len(lines) >= 30
    for line in lines:
        command, *arguments = shlex.split(line, comments=True)
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
    from ring_flash_attn.cli.options import make_workloads, without_gradients

    def workload(typed: Typed) -> tuple[list[Workload], bool]:
        given = typed.parsed().params
        numbers = {n: given[n] for n in ("batch", "seqlen", "nheads", "nheads_k", "headdim")}
        preset, same = given["preset"], (given["causal"], given["window"], given["dtype"])
        grad = not without_gradients(preset, given["no_grad"])
        return make_workloads(preset, *same, **numbers), grad

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
    from ring_flash_attn.bench.profile import run as profiling

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
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"\b1 pass\b", ran.stdout), ran.stdout


def test_the_files_of_a_profile_are_listed() -> None:
    from ring_flash_attn.bench.profile import parts

    listed = {
        name
        for line in block("docs/benchmarks.md", "files").splitlines()
        for first, *others in [re.split(r",? +", line.split("  ")[0])]
        for name in (first, *(first.rsplit(".", 1)[0] + o if o[0] == "." else o for o in others))
    }
    assert listed == {parts.SUMMARY, *parts.PARTS}
