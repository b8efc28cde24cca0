"""The examples and docs/training.md: they run, and no result depends on the number of ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from documents import ROOT, block, example
from ranks import Ranks
from tiny_model import (
    TinyModel,
    expected,
    gradients,
    plain_attention,
    random_documents,
    stacked,
    without_weights,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from ring_flash_attn import ContextParallel, shard
from ring_flash_attn.plan.build import route_names
from ring_flash_attn.plan.layout import layout_names

# examples/train.py

SMALL = ["--steps", "10", "--width", "32", "--tokens", "120", "--packs", "2"]
FP32: dict[str, Any] = {"rtol": 1e-6, "atol": 0}  # measured: 1.2e-7, one unit in the last place


def losses(rank: int, world_size: int, *arguments: str) -> torch.Tensor:
    train = example("train")
    options = train.parse_options([*SMALL, *arguments])
    return torch.tensor(train.train(options, torch.device("cpu")))


@pytest.fixture(scope="module")
def one_rank(ranks: Callable[[int], Ranks]) -> torch.Tensor:
    (found,) = ranks(1).run(losses, "--layout", "contiguous")
    assert found[-1] < found[0] - 0.5  # it learns
    return found


@pytest.mark.parametrize(
    ("world_size", "arguments"),
    [
        (2, ""),
        (4, ""),
        (4, "--data-parallel 2 --fsdp"),
        pytest.param(2, "--fsdp --divisor 8", marks=pytest.mark.slow),
        pytest.param(4, "--data-parallel 2", marks=pytest.mark.slow),
    ],
)
def test_losses_of_any_ranks_coincide(
    world_size: int, arguments: str, one_rank: torch.Tensor, ranks: Callable[[int], Ranks]
) -> None:
    for found in ranks(world_size).run(losses, *arguments.split()):
        torch.testing.assert_close(found, one_rank, **FP32)


@pytest.mark.slow
@pytest.mark.parametrize("route", route_names())
@pytest.mark.parametrize("layout", layout_names())
def test_losses_of_any_layout_and_route_coincide(
    layout: str, route: str, one_rank: torch.Tensor, ranks: Callable[[int], Ranks]
) -> None:
    arguments = "--layout", layout, "--route", route, "--kernel", "reference", "--steps", "3"
    for found in ranks(2).run(losses, *arguments):
        torch.testing.assert_close(found, one_rank[:3], **FP32)


def impossible(rank: int, world_size: int) -> None:
    for arguments, words in (
        (("--data-parallel", "3"), "data_parallel = 3 must divide the 2 ranks and the 2 packs"),
        (("--packs", "3", "--data-parallel", "2"), "and the 3 packs"),
        (("--layout", "spiral"), "layout 'spiral'"),
    ):
        with pytest.raises(ValueError, match=words):
            losses(rank, world_size, *arguments)


def test_impossible_options_of_training_are_refused(
    ranks: Callable[[int], Ranks], capsys: pytest.CaptureFixture[str]
) -> None:
    ranks(2).run(impossible)
    for arguments in ("--plot page.html", "run.json"):
        with pytest.raises(SystemExit):
            example("train").parse_options(arguments.split())
        assert "--plot takes one RUN or more" in capsys.readouterr().err


def run_script(*arguments: str, torchrun: int = 0) -> str:
    launch = [sys.executable]
    if torchrun:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"]
    done = subprocess.run(
        [*launch, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_training_from_the_command_line(tmp_path: Path, one_rank: torch.Tensor) -> None:
    """In processes of its own, and under torchrun; then the curves of both."""
    spawned, launched, page = (tmp_path / n for n in ("two.json", "fsdp.json", "page.html"))
    script = ["examples/train.py", *SMALL, "--steps", "2"]
    printed = run_script(*script, "--world-size", "2", "--json", str(spawned))
    run_script(*script, "--fsdp", "--json", str(launched), torchrun=2)
    for path in (spawned, launched):
        run = json.loads(path.read_text())
        assert run["world_size"] == 2
        torch.testing.assert_close(torch.tensor(run["losses"]), one_rank[:2], **FP32)
    shown = torch.tensor([float(line.split()[-1]) for line in printed.splitlines()])
    torch.testing.assert_close(shown, one_rank[:2], rtol=0, atol=2e-6)
    run_script("examples/train.py", "--plot", str(page), str(spawned), str(launched))
    drawn = page.read_text(encoding="utf-8")
    assert "two, 2 ranks" in drawn
    assert "fsdp, 2 ranks" in drawn


def test_runs_on_the_page_parse() -> None:
    """Each writes the file that the last one draws."""
    lines = [shlex.split(line) for line in block("docs/training.md", "runs").splitlines()]
    assert all("examples/train.py" in words for words in lines)
    after = [words[words.index("examples/train.py") + 1 :] for words in lines]
    *runs, last = map(example("train").parse_options, after)
    assert len(runs) == 3
    assert last.runs == [run.json for run in runs]
    printed = re.findall(r"(?:python|torchrun) .*examples/train.py .*", example("train").__doc__)
    assert len(printed) == 3


# examples/hybrid.py


def hybrid_step(
    rank: int, world_size: int, lengths: tuple[int, ...], layout: str | None, rows: bool
) -> None:
    """Logits, loss and gradients of all parameters; equal sequences as rows or as a pack."""
    hybrid = example("hybrid")
    torch.manual_seed(0)
    model = hybrid.HybridModel().double()
    documents = [torch.randint(hybrid.VOCABULARY, (length,)) for length in lengths]
    ids = torch.stack(documents) if rows else torch.cat(documents)[None]
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if not rows:
        batch["cu_seqlens"] = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    found = hybrid.on_ranks(model, batch, ContextParallel(layout=layout))
    right = hybrid.on_one_device(model, documents)
    assert len(found) == len(right) > 10
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours, theirs.view_as(ours), rtol=0, atol=1e-12)
    assert all(grad.abs().max() > 1e-6 for grad in right[2:])


FORMS = {"packed": (9, 1, 14, 3), "rows": (7, 7), "more ranks than tokens": (2, 1)}


@pytest.mark.product(4)
@pytest.mark.parametrize(
    ("form", "layout"),
    [(form, layout) for layout in (None, "stripe") for form in FORMS]
    + [("packed", layout) for layout in layout_names() if layout != "stripe"],
)
def test_a_hybrid_model_is_that_of_one_device(
    form: str, layout: str | None, ranks: Callable[[int], Ranks]
) -> None:
    for world_size in (2, 4):
        ranks(world_size).run(hybrid_step, FORMS[form], layout, form == "rows")


@pytest.mark.slow
def test_the_hybrid_model_from_the_command_line() -> None:
    printed = run_script("examples/hybrid.py", "--lengths", "20", "5", "9", torchrun=2)
    errors = dict(re.findall(r"(.*): .* = (\S+)", printed))
    assert {"logits", "loss", "gradient of state_space.inputs.weight"} <= set(errors)
    assert all(float(error) < 1e-5 for error in errors.values()), printed


# docs/training.md

PAGE = "docs/training.md"


def run_torch_context(rank: int, world_size: int, code: str, ids: torch.Tensor) -> dict[str, Any]:
    model, attention = TinyModel(), plain_attention()
    names: dict[str, Any] = {
        "torch": torch,
        "F": F,
        "ids": ids,
        "mesh": init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "cp")),
        "model": lambda ids, positions: model(ids, positions, attention),
    }
    exec(code, names)
    grads = gradients(model)
    for grad in grads.values():
        dist.all_reduce(grad)
    return {"grads": grads, "logits": names["whole"]}


def test_the_example_of_torchs_context_parallel_runs(ranks: Callable[[int], Ranks]) -> None:
    documents = [(ids, ids, w) for ids, _, w in without_weights(random_documents((12, 12)))]
    right, ids = expected(documents), stacked(documents)["input_ids"]
    for found in ranks(2).run(run_torch_context, block(PAGE, "torch"), ids):
        torch.testing.assert_close(found["logits"], torch.stack(right["logits"]))
        for name, grad in right["grads"].items():
            torch.testing.assert_close(found["grads"][name], grad, rtol=0, atol=1e-10)


def run_hybrid(rank: int, world_size: int, code: str) -> None:
    cp = ContextParallel()
    ids = torch.arange(20)[None]
    part = cp.shard({"input_ids": ids, "cu_seqlens": [0, 4, 15, 20]})
    seen = []
    names: dict[str, Any] = {
        "cp": cp,
        "part": part,
        "x": part["input_ids"],
        "attention_layer": lambda x: seen.append(x) or x,
        "state_space_layer": lambda x: seen.append(x) or x + 100,
    }
    exec(code, names)
    balanced = shard(ids[0], "balanced", cu_seqlens=[0, 4, 15, 20])[None]
    assert torch.equal(seen[0], balanced)
    assert torch.equal(seen[1], ids[:, 10 * rank : 10 * rank + 10])
    assert torch.equal(names["x"], balanced + 100)


def test_the_example_of_a_hybrid_runs(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run(run_hybrid, block(PAGE, "hybrid"))
