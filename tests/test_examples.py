"""The examples and docs/training.md: all of it runs, and no result depends on the ranks."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from documents import ROOT, block, example, text
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
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from ring_flash_attn import ContextParallel, context_parallel, shard
from ring_flash_attn.plan.build import route_names
from ring_flash_attn.plan.layout import layout_names

# examples/train.py

SMALL = ["--steps", "10", "--width", "32", "--tokens", "120", "--packs", "2"]
FP32: dict[str, Any] = {"rtol": 1e-6, "atol": 0}  # measured: 1.2e-7, one unit in the last place


Curves = dict[str, list[float]]


def curves(rank: int, world_size: int, *arguments: str) -> Curves:
    train = example("train")
    options = train.parse_options([*SMALL, *arguments])
    found: Curves = train.train(options, torch.device("cpu"))
    return found


def compare(found: Curves, right: Curves) -> None:
    """Of the norms of gradients as well: AdamW hides a wrong scale of them from the losses."""
    steps = len(found["losses"])
    for name in ("losses", "grad_norms"):
        pair = torch.tensor(found[name]), torch.tensor(right[name][:steps])
        torch.testing.assert_close(*pair, **FP32)


@pytest.fixture(scope="module")
def one_rank(ranks: Callable[[int], Ranks]) -> Curves:
    (found,) = ranks(1).run(curves, "--layout", "contiguous")
    assert found["losses"][-1] < found["losses"][0] - 0.5  # it learns
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
    world_size: int, arguments: str, one_rank: Curves, ranks: Callable[[int], Ranks]
) -> None:
    for found in ranks(world_size).run(curves, *arguments.split()):
        compare(found, one_rank)


@pytest.mark.slow
@pytest.mark.parametrize("route", route_names())
@pytest.mark.parametrize("layout", layout_names())
def test_losses_of_any_layout_and_route_coincide(
    layout: str, route: str, one_rank: Curves, ranks: Callable[[int], Ranks]
) -> None:
    arguments = "--layout", layout, "--route", route, "--kernel", "reference", "--steps", "3"
    for found in ranks(2).run(curves, *arguments):
        compare(found, one_rank)


@pytest.mark.slow
def test_losses_of_another_kernel_coincide(pool: Ranks) -> None:
    """Triton's, interpreted."""
    arguments = "--width", "64", "--tokens", "24", "--packs", "1", "--steps", "2"
    found, right = (
        pool.run(curves, *arguments, "--kernel", kernel)[0] for kernel in ("triton", "reference")
    )
    compare(found, right)


def impossible(rank: int, world_size: int) -> None:
    for arguments, words in (
        (("--data-parallel", "3"), "data_parallel = 3 must divide the 2 ranks and the 2 packs"),
        (("--packs", "3", "--data-parallel", "2"), "and the 3 packs"),
        (("--layout", "spiral"), "layout 'spiral'"),
    ):
        with pytest.raises(ValueError, match=words):
            curves(rank, world_size, *arguments)


def test_impossible_options_of_training_are_refused(
    ranks: Callable[[int], Ranks], capsys: pytest.CaptureFixture[str]
) -> None:
    ranks(2).run(impossible)
    plotted = "--plot takes one RUN or more"
    wrong = [("--plot page.html", plotted), ("run.json", plotted), ("--tokens 0", "less than 1")]
    for arguments, words in wrong:
        with pytest.raises(SystemExit):
            example("train").parse_options(arguments.split())
        assert words in capsys.readouterr().err


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
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_training_from_the_command_line(tmp_path: Path, one_rank: Curves) -> None:
    """In processes of its own, and under torchrun; then the curves of both."""
    spawned, launched, page = (tmp_path / n for n in ("two.json", "fsdp.json", "page.html"))
    script = ["examples/train.py", *SMALL, "--steps", "2"]
    printed = run_script(*script, "--world-size", "2", "--json", str(spawned))
    run_script(*script, "--fsdp", "--json", str(launched), torchrun=2)
    for path in (spawned, launched):
        run = json.loads(path.read_text())
        assert run["world_size"] == 2
        compare(run, one_rank)
    shown = torch.tensor([float(line.split()[-1]) for line in printed.splitlines()])
    torch.testing.assert_close(shown, torch.tensor(one_rank["losses"][:2]), rtol=0, atol=2e-6)
    options = example("train").parse_options(["--plot", str(page), str(spawned), str(launched)])
    example("train").plot(options.runs, options.plot)
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
    rank: int, world_size: int, lengths: tuple[int, ...], layout: str, rows: bool
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
    [(form, layout) for layout in ("auto", "stripe") for form in FORMS]
    + [("packed", layout) for layout in layout_names() if layout != "stripe"],
)
def test_a_hybrid_model_is_that_of_one_device(
    form: str, layout: str, ranks: Callable[[int], Ranks]
) -> None:
    for world_size in (2, 4):
        ranks(world_size).run(hybrid_step, FORMS[form], layout, form == "rows")


@pytest.mark.slow
def test_the_hybrid_model_from_the_command_line() -> None:
    printed = run_script("examples/hybrid.py", "--lengths", "20", "5", "9", torchrun=2)
    errors = dict(re.findall(r"(.*): .* = (\S+)", printed))
    assert {"logits", "loss", "gradient of state_space.inputs.weight"} <= set(errors)
    assert all(float(error) < 1e-5 for error in errors.values()), printed


# examples/hf_sft.py

TINY = ["--width", "16", "--layers", "1", "--max-length", "48", "--steps", "5"]


class Plain:
    """In the place of the example's mixin: the trainer as it is."""

    def __init__(self, *args: Any, cp_size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


def fine_tuned(rank: int, world_size: int, folder: str, plain: bool, *arguments: str) -> Curves:
    """In a worker, with what torchrun would have told it; accelerate forgets it afterwards."""
    from accelerate.state import AcceleratorState

    here = {"RANK": rank, "LOCAL_RANK": rank}
    here |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), world_size)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in here.items():
            patch.setenv(name, str(value))
        patch.setenv("MASTER_PORT", "0")  # not used: there is a group
        sft = example("hf_sft")
        if plain:
            patch.setattr(sft, "ContextParallelMixin", Plain)
            patch.setattr(sft, "prepare_hf_model", lambda model: model)
        try:
            found: Curves = sft.train(sft.parse_options([*TINY, *arguments]), folder)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
    assert len(found["losses"]) == len(found["grad_norms"]) > 2
    return found


@pytest.mark.parametrize(
    ("world_size", "ours", "plainly"),
    [
        (2, "", ""),
        pytest.param(1, "", "", marks=pytest.mark.slow),
        # the same documents in each step: two groups with half as many packs
        pytest.param(4, "--cp-size 2 --accumulation 2", "--accumulation 4", marks=pytest.mark.slow),
        pytest.param(2, "--trl", "--trl", marks=pytest.mark.slow),
    ],
)
def test_fine_tuning_with_a_trainer_is_that_of_one_device(
    world_size: int, ours: str, plainly: str, tmp_path: Path, ranks: Callable[[int], Ranks]
) -> None:
    """Whose trainer knows nothing of ring attention."""
    for module in ("transformers", "accelerate", *(["trl"] if ours == "--trl" else [])):
        pytest.importorskip(module)
    more = ["--batch-size", "1", "--steps", "3"] if world_size == 4 else []
    (right,) = ranks(1).run(fine_tuned, str(tmp_path), True, *more, *plainly.split())
    assert right["losses"][-1] < right["losses"][0] - 0.05  # it learns
    for found in ranks(world_size).run(fine_tuned, str(tmp_path), False, *more, *ours.split()):
        compare(found, right)


def refuses(rank: int, world_size: int, folder: str) -> None:
    sft = example("hf_sft")
    smooth = functools.partial(sft.TrainingArguments, label_smoothing_factor=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft, "TrainingArguments", smooth)
        with pytest.raises(NotImplementedError, match="plain cross-entropy"):
            fine_tuned(rank, world_size, folder, False)
    with pytest.raises(ValueError, match="cp_size = 2 must divide the 1 ranks"):
        fine_tuned(rank, world_size, folder, False, "--cp-size", "2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft.ContextParallelMixin, "train", evaluate, raising=False)
        with pytest.raises(ValueError, match="not told which documents"):
            fine_tuned(rank, world_size, folder, False)


def evaluate(trainer: Any) -> None:
    trainer.evaluate(trainer.train_dataset)


@pytest.mark.slow
def test_what_a_trainer_cannot_do_is_refused(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    for module in ("transformers", "accelerate"):
        pytest.importorskip(module)
    ranks(1).run(refuses, str(tmp_path))


def test_the_mixin_on_the_page_is_that_of_the_example() -> None:
    assert block("docs/huggingface.md", "trainer") in text("examples/hf_sft.py")


@pytest.mark.slow
def test_fine_tuning_from_the_command_line(tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    for module in ("transformers", "accelerate"):
        pytest.importorskip(module)
    (right,) = ranks(1).run(fine_tuned, str(tmp_path), True)
    run_script("examples/hf_sft.py", *TINY, "--json", str(tmp_path / "two.json"), torchrun=2)
    run = json.loads((tmp_path / "two.json").read_text())
    assert run["world_size"] == 2
    compare(run, right)


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


# examples/torchtitan.md

TORCHTITAN = "examples/torchtitan.md"


def hunks(mark: str) -> dict[str, str]:
    """What a diff leaves of the lines that it shows, by the words that say where."""
    parts = re.split(r"^(?:---.*\n)?@@ (.*)\n", block(TORCHTITAN, mark), flags=re.M)
    found = {}
    for where, lines in zip(parts[1::2], parts[2::2], strict=True):
        kept = [line for line in lines.splitlines() if not line.startswith("-")]
        found[where.split(",")[0]] = textwrap.dedent("\n".join(line[1:] for line in kept))
    return found


def stand_ins() -> dict[str, Any]:
    """torchtitan's functions, with their parameters, as far as the diff needs them."""
    found, indent = hunks("diff"), functools.partial(textwrap.indent, prefix="    ")
    names: dict[str, Any] = {"NamedTuple": NamedTuple, "Any": Any, "varlen_attn": varlen_attn}
    exec(block(TORCHTITAN, "ring.py"), names)
    source = f"""
class VarlenMetadata(NamedTuple):
    cu_seq_q: Any
    cu_seq_k: Any
    max_q: int
    max_k: int
    cu_seq_q_host: Any = None
{indent(found["VarlenMetadata"])}

def prepare_context_parallel_input(
    inputs, labels, extra_kwargs, cp_mesh, device, load_balancer_type="headtail", ptrr_mask_key=None
):
{indent(found["prepare_context_parallel_input"])}
    raise AssertionError("not for FlexAttention")

def forward(
    self, q_TNH, k_TNH, v_TNH, *, attention_masks, scale=None, out_transform=None, **kwargs
):
    varlen_kwargs = {{"num_splits": 1}}
    if kwargs.get("enable_gqa", False):
        varlen_kwargs["enable_gqa"] = True
    if out_transform is not None:
        varlen_kwargs["return_aux"] = AuxRequest(lse=True)
{indent(found["VarlenAttention.forward"])}
        q_TNH, k_TNH, v_TNH, attention_masks.cu_seq_q, attention_masks.cu_seq_k,
        attention_masks.max_q, attention_masks.max_k,
        scale=scale, window_size=self.window_size, **varlen_kwargs,
    )
    if out_transform is None:
        return result
    out_TNH, lse_NT = result
    return out_transform(out_TNH, lse_NT.transpose(0, 1))

def kv_placements(inner_attention_cfg):
    kv_src_placements, kv_dst_placements, kv_grad_placements = "sharded", "whole", "partial"
{indent(found["set_gqa_inner_attention_local_map"])}
    return kv_dst_placements, kv_grad_placements

def refused(self):
{indent(found["Decoder.Config.update_from_config"])}
        return True
    return False
"""
    names["AuxRequest"] = AuxRequest
    exec(source, names)
    return names


def titan_step(rank: int, world_size: int, documents: Any, num_items: float) -> dict[str, Any]:
    names = stand_ins()
    ids, targets, _ = (torch.cat(part) for part in zip(*documents, strict=True))
    lengths = torch.tensor([0, *(len(each[0]) for each in documents)])
    cu_seqlens = lengths.cumsum(0).int()
    targets = targets.roll(-1)
    targets[cu_seqlens[1:] - 1] = -100
    positions = torch.arange(len(ids)) - cu_seqlens[:-1].repeat_interleave(lengths[1:])
    masks = names["VarlenMetadata"](cu_seqlens, cu_seqlens, 9, 9)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    ids, targets, extra_kwargs = names["prepare_context_parallel_input"](
        ids, targets, {"positions": positions, "attention_masks": masks}, mesh, torch.device("cpu")
    )
    assert ids.shape == targets.shape == (lengths.sum() // world_size,)
    module = SimpleNamespace(window_size=(-1, 0))
    masks = extra_kwargs["attention_masks"]

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        options |= {"attention_masks": masks, "enable_gqa": True}
        return names["forward"](module, q, k, v, **options)

    def with_sinks(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        return out * lse.sigmoid()[..., None]

    model = TinyModel()
    logits = model(ids, extra_kwargs["positions"], attention)
    loss = F.cross_entropy(logits, targets, reduction="sum") / num_items
    loss.backward()
    grads = gradients(model)
    loss = loss.detach()
    for x in (*grads.values(), loss):
        dist.all_reduce(x)
    torch.manual_seed(0)
    whole = torch.randn(3, int(lengths.sum()), 4, 8, dtype=torch.float64)
    layout = masks.ring.documents.layout
    assert layout.name == "balanced"
    own = [shard(x, layout, cu_seqlens=cu_seqlens) for x in whole]
    sunk = attention(*own, out_transform=with_sinks)
    with pytest.raises(NotImplementedError, match="KV cache"):
        masks.ring.varlen_attn(*own, None, None, 9, 9, seqused_k=cu_seqlens)
    right = shard(sinks_on_one_device(whole, cu_seqlens), layout, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(sunk, right, rtol=0, atol=1e-10)
    return {"loss": loss, "grads": grads}


def sinks_on_one_device(qkv: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Sinks of 0, document by document."""
    found = []
    for document in qkv.tensor_split(cu_seqlens[1:-1].tolist(), dim=1):
        q, k, v = (x.transpose(0, 1) for x in document)
        scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[1:]).triu(1).bool()
        scores = scores.masked_fill(hidden, -torch.inf)
        scores = torch.cat([scores, torch.zeros_like(scores[..., :1])], dim=-1)
        found.append((scores.softmax(-1)[..., :-1] @ v).transpose(0, 1))
    return torch.cat(found)


def test_the_diff_of_torchtitan_runs(ranks: Callable[[int], Ranks]) -> None:
    documents = without_weights(random_documents((5, 1, 9, 7, 2)))
    right = expected(documents)
    num_items = sum(int((labels[1:] != -100).sum()) for _, labels, _ in documents)
    for found in ranks(2).run(titan_step, documents, num_items):
        torch.testing.assert_close(found["loss"], right["loss"], rtol=0, atol=1e-10)
        for name, grad in right["grads"].items():
            torch.testing.assert_close(found["grads"][name], grad, rtol=0, atol=1e-10)


def test_the_other_changes_of_torchtitan() -> None:
    names = stand_ins()
    ours = inspect.signature(names["RingDocuments"].varlen_attn).parameters
    theirs = inspect.signature(varlen_attn).parameters
    assert list(ours)[1:] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)
    kinds = [SimpleNamespace(Config=type(name, (), {})) for name in ("varlen", "flex", "sdpa")]
    varlen, flex, sdpa = kinds
    names |= {"VarlenAttention": varlen, "ScaledDotProductAttention": sdpa}
    assert names["kv_placements"](varlen.Config()) == ("sharded", "sharded")
    assert names["kv_placements"](flex.Config()) == ("whole", "partial")
    for kind in kinds:
        config = SimpleNamespace(traverse=lambda wanted, kind=kind: [wanted is kind.Config] * 2)
        assert names["refused"](config) == (kind is sdpa)
    (imports,) = hunks("v0.2.1").values()
    exec(imports, names)
    assert names["context_parallel"] is context_parallel
