"""The lab's benchmarks: the model's parts by their formulas, what is measured, printed, refused."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from rich.console import Console
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner, Result

from ring_flash_attn.bench.measure import reason
from ring_flash_attn.bench.results import Results, Row, load
from ring_flash_attn.bench.timing import Timing
from ring_flash_attn.bench.workload import Workload
from ring_flash_attn.cli import lab_bench
from ring_flash_attn.cli.app import app
from ring_flash_attn.lab.bench import attention, model
from ring_flash_attn.lab.bench.config import (
    IMPLEMENTATIONS,
    SIZES,
    AttentionConfig,
    ModelCase,
    ModelConfig,
    ModelSize,
    make_config,
)
from ring_flash_attn.lab.bench.transformer import (
    AdamW,
    RMSNorm,
    RoPE,
    SwiGLU,
    Transformer,
    forward_flops,
)
from ring_flash_attn.lab.definition import attention as definition
from ring_flash_attn.lab.steps.s03_standard_attention import predicted_bytes

CPU = torch.device("cpu")
TINY = ModelSize(16, 24, 2, 2)
CASE = ModelCase("tiny", TINY, 8, 2, 11, "fp32", "standard", False, ("forward", "both", "step"))
needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["lab", "bench", *arguments], env={"COLUMNS": "150"})


def exhausted(*_: Any) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")


# The model.


def test_norm_and_feed_forward_are_their_formulas() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8)
    norm, ff = RMSNorm(8, eps=1e-3), SwiGLU(8, 12)
    torch.nn.init.normal_(norm.weight)
    by_hand = x / (x.pow(2).sum(-1, keepdim=True) / 8 + 1e-3) ** 0.5 * norm.weight
    torch.testing.assert_close(norm(x), by_hand)
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    gate, up = x @ ff.gate.weight.T, x @ ff.up.weight.T
    by_hand = (gate / (1 + (-gate).exp()) * up) @ ff.down.weight.T
    torch.testing.assert_close(ff(x), by_hand)


def test_rope_turns_pairs_and_knows_distances_alone() -> None:
    torch.manual_seed(0)
    d, rows = 8, 12
    rope = RoPE(d, rows)
    x = torch.randn(2, rows, 3, d)
    pairs = torch.view_as_complex(x.double().reshape(2, rows, 3, d // 2, 2))
    angles = torch.tensor(
        [[p * 10_000 ** (-2 * i / d) for i in range(d // 2)] for p in range(rows)]
    ).double()
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    by_hand = torch.view_as_real(turned).reshape(x.shape)
    torch.testing.assert_close(rope(x).double(), by_hand, rtol=1e-5, atol=1e-5)
    q, k = (rope(torch.randn(1, 1, 1, d).expand(1, rows, 1, d))[0, :, 0] for _ in range(2))
    scores = q @ k.T
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], rtol=1e-4, atol=1e-4)


def test_our_attention_and_the_standard_one_make_the_same_model() -> None:
    found = []
    tokens = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(1))
    for kind in ("standard", "ours"):
        torch.manual_seed(0)
        made = Transformer(TINY, 11, 16, kind)
        logits = made(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        found.append((logits.detach(), {name: x.grad for name, x in made.named_parameters()}))
    (logits, gradients), (ours, our_gradients) = found
    torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)
    assert len(gradients) == 2 + 1 + 2 * (2 + 2 + 3)  # nothing is tied
    for name, each in gradients.items():
        assert each is not None
        assert each.abs().max() > 0, name
        torch.testing.assert_close(our_gradients[name], each, rtol=1e-4, atol=1e-6, msg=name)


def test_no_token_sees_a_later_one() -> None:
    torch.manual_seed(0)
    for kind in ("standard", "ours"):
        made = Transformer(TINY, 11, 8, kind)
        tokens = torch.randint(11, (1, 8))
        before = made(tokens)
        tokens[0, 5] = (tokens[0, 5] + 1) % 11
        changed = (made(tokens) - before).abs().amax(-1)[0] > 0
        assert not changed[:5].any()
        assert changed[5:].all()


def test_adamw_is_torchs() -> None:
    torch.manual_seed(0)
    start = [torch.randn(5, 3), torch.randn(7), torch.randn(2)]
    options: Any = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}
    ends = []
    for kind in (AdamW, torch.optim.AdamW):
        parameters = [torch.nn.Parameter(x.clone()) for x in start]
        optimizer = kind(parameters, **options)
        for number in range(6):
            optimizer.zero_grad()
            loss = sum((x * (number + i)).sin().sum() for i, x in enumerate(parameters[:2]))
            loss.backward()  # the third has no gradient
            optimizer.step()
        ends.append(parameters)
    for ours, theirs in zip(*ends):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(ends[0][2], start[2])


def test_flops_are_those_that_torch_counts() -> None:
    """But for the pairs that standard attention computes, and masks."""
    batch, context, vocab = 2, 8, 11
    made = Transformer(TINY, vocab, context)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        made(torch.zeros(batch, context, dtype=torch.long))
    masked = context**2 - context * (context + 1) / 2
    expected = forward_flops(TINY, vocab, batch, context)
    assert counter.get_total_flops() == expected + 4 * batch * TINY.layers * masked * TINY.d_model


# Configuration.


def test_the_defaults_are_those_of_the_document() -> None:
    config = AttentionConfig()
    assert config.d_model == (16, 32, 64, 128)
    assert config.seqlen == (256, 1024, 4096, 8192, 16384)
    assert (config.batch, config.passes, config.implementation) == (8, 100, IMPLEMENTATIONS)
    cells = config.workloads()
    assert len(cells) == 20
    assert {(each.nheads, each.batch) for each in cells} == {(1, 8)}
    numbers = {
        name: (size.d_model, size.d_ff, size.layers, size.heads) for name, size in SIZES.items()
    }
    assert numbers == {
        "small": (768, 3072, 12, 12),
        "medium": (1024, 4096, 24, 16),
        "large": (1280, 5120, 36, 20),
        "xl": (1600, 6400, 48, 25),
        "2.7B": (2560, 10240, 32, 32),
    }
    cases = list(ModelConfig().cases())
    assert len(cases) == 5 * 4 * 3 * 2
    assert {case.passes for case in cases} == {("forward", "both", "step")}
    assert all(ModelCase.from_dict(json.loads(json.dumps(c.to_dict()))) == c for c in cases)
    assert len({case.file_name for case in cases}) == len(cases)


@needs_toml
def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(
        '[attention]\nd-model = 8\nseqlen = [16, 32]\ndtype = "bf16"\n'
        '[model]\nsize = ["tiny"]\ncontext = "8,16"\nprecision = "bf16"\ncompile = true\n'
        "[sizes.tiny]\nd_model = 16\nd_ff = 24\nlayers = 2\nheads = 2\n"
    )
    found = make_config(AttentionConfig, path, {"seqlen": "64", "batch": None})
    assert (found.d_model, found.seqlen, found.dtype) == ((8,), (64,), ("bfloat16",))
    assert found.batch == AttentionConfig().batch
    one = make_config(ModelConfig, path, {"precision": "fp32", "compile": False, "layers": 3})
    assert (one.context, one.precision, one.compile) == ((8, 16), ("fp32",), False)
    assert one.chosen_sizes() == {"tiny layers 3": ModelSize(16, 24, 3, 2)}
    own = {"d_model": 32, "d_ff": 64, "layers": 1, "heads": 4}
    assert make_config(ModelConfig, None, own).chosen_sizes() == {"own": ModelSize(32, 64, 1, 4)}


@needs_toml
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[attention]\nlength = 3", "unknown key 'length' in [attention]; there are d_model, seq"),
        ("[other]", "unknown table 'other'; there are attention, model, sizes"),
        ("attention = 3", "attention must be a table"),
        ("[attention]\nseqlen = [16, -1]", "seqlen must be a positive whole number, not -1"),
        ("[attention]\ncausal = 1", "causal must be true or false, not 1"),
        ("[attention]\ndtype = 'int8'", "unknown dtype 'int8'"),
        ("[model]\nprecision = 'fp8'", "unknown precision 'fp8'; choose one of fp32, tf32, bf16"),
        ("[model]\nsize = 'huge'", "unknown size 'huge'; choose one of small"),
        ("[sizes.a]\nd_model = 3", "[sizes]: missing 3 required"),
        ("[sizes.a]\nd_model = 6\nd_ff = 6\nlayers = 1\nheads = 2", "an even number"),
        ("[model", "is not TOML"),
        (None, "cannot read"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(
    tmp_path: Path, text: str | None, words: str
) -> None:
    path = tmp_path / "lab.toml"
    if text is not None:
        path.write_text(text)
    for command in ("attention", "model") if "huge" not in (text or "") else ("model",):
        result = run(command, "--config", str(path), "--device", "cpu")
        assert result.exit_code == 2
        shown = " ".join(result.output.replace("│", " ").split())
        assert words in shown


def test_old_pythons_say_that_they_read_no_toml(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tomllib", None)
    with pytest.raises(ValueError, match=r"needs Python 3\.11"):
        make_config(ModelConfig, tmp_path / "lab.toml", {})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("attention --seqlen 1,a", "seqlen must be a positive whole number, not 'a'"),
        ("attention --implementation magic", "unknown implementation 'magic'"),
        ("attention --device abacus", "'abacus' does not exist"),
        ("attention --json FOLDER", "cannot write"),
        ("model --size gigantic", "unknown size 'gigantic'"),
        ("model --heads 5", "an even number of dimensions"),
        ("model --passes backward", "unknown passes 'backward'"),
        ("model --memory-snapshot a.pickle", "of one case, not 120"),
        (
            "model --size small --context 8 --precision fp32 --attention ours "
            "--memory-snapshot a.pickle --device cpu",
            "torch records the memory of GPUs",
        ),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(
    tmp_path: Path, arguments: str, words: str
) -> None:
    result = run(*arguments.replace("FOLDER", str(tmp_path)).split())
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())


def test_help_imports_no_torch() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\n"
        "from ring_flash_attn.cli.app import app\n"
        "for command in ([], ['attention'], ['model']):\n"
        "    assert CliRunner().invoke(app, ['lab', 'bench', *command, '--help']).exit_code == 0\n"
        "print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


# Attention alone.


@pytest.mark.parametrize("causal", [False, True])
def test_memory_before_the_backward_is_what_step_3_predicts(causal: bool) -> None:
    batch, rows, d = 2, 24, 8
    standard = attention.make_attention("standard", causal, CPU)
    q, k, v, dout = (torch.randn(batch, rows, d) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = attention.memory_in_use(lambda: standard(q, k, v), (*leaves, dout), CPU)
    results = 2 * dout.nbytes  # out, and its gradient
    assert found == predicted_bytes(batch, rows, rows, d, causal) + results
    ours = attention.make_attention("ours", causal, CPU)
    less = attention.memory_in_use(lambda: ours(q, k, v), (*leaves, dout), CPU)
    assert less < found
    torch.testing.assert_close(ours(q, k, v), standard(q, k, v), rtol=1e-5, atol=1e-5)


class Workspaces(TorchDispatchMode):
    """As cuBLAS does: the first product of a thread takes memory, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[str, bool, torch.dtype]] = []  # kind, in the backward pass

    @property
    def held(self) -> int:
        return (32 << 20) * len({backward for _, backward, _ in self.products})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm"):
            backward = torch._C._current_graph_task_id() >= 0  # autograd's thread, on a GPU
            self.products.append((name, backward, args[0].dtype))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspaces]:
    monkeypatch.setattr(attention, "synchronize", lambda device: None)
    with Workspaces() as found:
        monkeypatch.setattr(attention, "allocated", lambda device: found.held)
        yield found


def test_workspaces_of_cublas_are_not_counted(workspaces: Workspaces) -> None:
    """Neither before the backward nor in it."""
    q = torch.ones(1, 8, 4, requires_grad=True)
    held = attention.held_before(CPU, torch.bfloat16)
    assert held == 64 << 20
    kinds = {(kind, backward) for kind in ("mm", "bmm") for backward in (False, True)}
    assert set(workspaces.products) == {(*each, torch.bfloat16) for each in kinds}
    cuda = torch.device("cuda")
    assert attention.memory_in_use(lambda: q @ q.mT, (), cuda, held) == 0
    torch.autograd.grad((q @ q.mT).sum(), q)
    assert workspaces.held == held


@pytest.mark.parametrize("what", ["attention", "model"])
def test_products_come_before_what_is_measured(
    what: str, workspaces: Workspaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def making(*_: Any) -> Any:
        begun.append({backward for _, backward, _ in workspaces.products})
        return exhausted()

    monkeypatch.setattr(Workload, "tensors", making)
    monkeypatch.setattr(model, "make_works", making)
    if what == "attention":
        attention.measure_attention(["standard"], Workload(1, 8, 1, 1, 4), CPU, 1)
    else:
        model.measure_model(CASE, CPU, 1)
    assert begun == [{False, True}]


def test_attention_is_measured_and_written(tmp_path: Path) -> None:
    path = tmp_path / "attention.json"
    sizes = ("--seqlen", "16,24", "--d-model", "8", "--batch", "2", "--passes", "3")
    names = ("--implementation", "standard,ours", "--dtype", "fp32,bf16", "--device", "cpu")
    result = run("attention", *sizes, *names, "--causal", "--json", str(path))
    assert result.exit_code == 0, result.output
    for words in ("forward, ms of 3 passes", "backward, ms of 3", "before the backward, MiB"):
        assert words in result.output
    found = load(path)
    assert len(found.rows) == 2 * 2 * 2 * 2
    assert found.settings["seqlen"] == [16, 24]
    for row in found.rows:
        assert row.failed is None
        assert row.kind == "lab attention"
        assert len(row.samples_ms) == 3
        assert row.values["total_ms"] == pytest.approx(3 * (row.ms or 0))
        assert row.workload["causal"]
        assert row.tflops
        assert (row.passes == "backward") == ("before_backward_bytes" in row.values)


def test_what_is_slow_is_timed_fewer_times(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(1, 8, 1, 1, 4)
    runs = {
        seconds: [len(row.samples_ms) for row in rows]
        for seconds in (1e-9, 100.0)
        if (rows := attention.measure_attention(["standard"], workload, CPU, 12, seconds))
    }
    assert runs == {1e-9: [1, 1], 100.0: [12, 12]}
    monkeypatch.setattr(Workload, "tensors", exhausted)
    rows = attention.measure_attention(["standard", "ours"], workload, CPU, 12)
    assert [(row.failed or "")[:13] for row in rows] == ["out of memory"] * 4


def test_out_of_memory_is_shown_in_its_cell_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make = attention.make_attention

    class Forgets(torch.autograd.Function):
        """Backward fails."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *_: Tensor) -> Tensor:
            return exhausted()

    def small_memory(name: str, causal: bool, device: torch.device) -> attention.Attention:
        real = make(name, causal, device)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if name == "standard" and q.shape[1] > 20:
                return exhausted()
            out = real(q, k, v)
            return Forgets.apply(out) if name == "standard" and q.shape[1] > 18 else out

        return call

    monkeypatch.setattr(attention, "make_attention", small_memory)
    path = tmp_path / "attention.json"
    sizes = ("--seqlen", "16,19,24", "--d-model", "8", "--batch", "2", "--passes", "2")
    names = ("--implementation", "standard,ours", "--device", "cpu", "--json", str(path))
    result = run("attention", *sizes, *names)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if line.split()[:2] == ["fp32", "8"]]
    shown = [(line.split()[2], "out of memory" in line) for line in lines]
    forward = [("16", False), ("19", False), ("24", True)]
    backward = [("16", False), ("19", True), ("24", True)]
    assert shown == [*forward, *backward, *forward]  # the third: memory
    assert all(not line.rstrip().endswith("memory") for line in lines)  # ours ran everywhere
    rows = load(path).rows
    failed = {
        (row.workload["seqlen"], row.passes)
        for row in rows
        if (row.failed or "").startswith("out of memory")
    }
    assert failed == {(24, "forward"), (19, "backward"), (24, "backward")}
    everything = run("attention", "--seqlen", "24", *sizes[2:], "--implementation", "standard")
    assert everything.exit_code == 1


def test_a_compiler_that_runs_out_of_memory_is_out_of_memory() -> None:
    assert reason(RuntimeError("InductorError: CUDA out of memory. Tried")).startswith("out of mem")
    assert reason(RuntimeError("out of resource: shared memory")).startswith("RuntimeError")


def test_what_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.where, "device", lambda: CPU)
    monkeypatch.setattr(attention.where, "interpreted", lambda: True)
    monkeypatch.setitem(sys.modules, "ring_flash_attn.lab.steps.s08_triton_backward", None)
    sizes = ("--seqlen", "16", "--d-model", "8", "--batch", "2", "--passes", "2")
    result = run(
        "attention", *sizes, "--implementation", "standard,tiled,triton", "--device", "cpu"
    )
    assert result.exit_code == 0, result.output
    assert "triton cannot: import of ring_flash_attn.lab.steps.s08" in result.output
    monkeypatch.setattr(attention.where, "interpreted", lambda: False)
    with pytest.raises(NotImplementedError, match="TRITON_INTERPRET=1"):
        attention.make_attention("triton", False, CPU)


def _all_implementations(rank: int, world_size: int) -> list[tuple[str, str | None]]:
    workload = Workload(1, 24, 1, 1, 8, True, dtype="float32")
    names = [name for name in IMPLEMENTATIONS if name != "compiled"]
    rows = attention.measure_attention(names, workload, CPU, 1)
    return [(row.implementation, row.failed) for row in rows]


def test_every_implementation_that_is_there_runs(pool: Ranks) -> None:
    (found,) = pool.run(_all_implementations)
    names = [name for name in IMPLEMENTATIONS if name != "compiled"]
    assert found == [(name, None) for name in names for _ in range(2)]


@pytest.mark.parametrize("name", ["standard", "tiled", "ours"])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_timed_is_attention(name: str, causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 70, 8, requires_grad=True) for _ in range(3))
    out, dout = attention.make_attention(name, causal, CPU)(q, k, v), torch.randn(2, 70, 8)
    expected = definition(q, k, v, causal=causal)[0]
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    found = torch.autograd.grad(out, (q, k, v), dout)
    for a, b in zip(found, torch.autograd.grad(expected, (q, k, v), dout.double())):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_compiled_attention_is_compiled_anew_for_each_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_(function: Any, **options: Any) -> Any:
        compiled.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    for rows in (8, 16):
        found = attention.measure_attention(["compiled"], Workload(1, rows, 1, 1, 4), CPU, 1)
        assert [row.failed for row in found] == [None, None]
    model.make_works(ModelCase(**{**vars(CASE), "compile": True}), CPU)["step"]()
    assert compiled == [{"dynamic": False}] * (2 + TINY.layers)


@pytest.mark.slow
def test_torch_compiles_both() -> None:
    rows = attention.measure_attention(["compiled"], Workload(1, 16, 1, 1, 8, True), CPU, 1)
    for kind in ("standard", "ours"):
        case = ModelCase(**{**vars(CASE), "compile": True, "attention": kind})
        rows += model.measure_model(case, CPU, 1)
    assert [row.failed for row in rows] == [None] * 8


# The whole model.

SMALL = ("--d-model", "16", "--d-ff", "24", "--layers", "2", "--heads", "2", "--vocab", "11")
QUICK = (*SMALL, "--batch", "2", "--repeats", "2", "--device", "cpu")


def test_the_model_is_measured_and_written(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    result = run("model", *QUICK, "--context", "8,12", "--json", str(path))
    assert result.exit_code == 0, result.output
    for words in ("forward ms", "forward + backward ms", "whole step ms", "TF32 is a format"):
        assert words in result.output
    found = load(path)
    assert len(found.rows) == 2 * 3 * 2 * 3
    assert found.settings["precision"] == ["fp32", "tf32", "bf16"]
    for row in found.rows:
        assert row.kind == "lab model"
        if row.workload["precision"] == "tf32":
            assert (row.failed or "").startswith("cannot: ")
        else:
            assert row.failed is None, row.failed
            assert len(row.samples_ms) == 2
            assert row.tflops


@pytest.mark.parametrize("has_peak", [True, False])
def test_the_first_run_of_a_pass_is_not_timed(
    has_peak: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles; the next one finds the peak, too."""
    begun = []

    def peak(work: Any, *_: Any) -> int:
        assert len(begun) == 1
        work()
        return 7

    monkeypatch.setattr(model, "make_works", lambda *_: {"both": lambda: begun.append(1)})
    if has_peak:
        monkeypatch.setattr(model, "peak_in_use", peak)
    case = ModelCase(**{**vars(CASE), "passes": ("both",)})
    (row,) = model.measure_model(case, CPU, 3)
    assert len(begun) == 4
    assert len(row.samples_ms) == 3
    assert row.peak_bytes == (7 if has_peak else None)


def test_a_pass_lasts_until_the_gpu_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host's part ends when all is queued; what was queued before is not part of it."""
    now = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    waits = iter((100.0, 3.0))
    monkeypatch.setattr(model.time, "perf_counter", lambda: now)
    monkeypatch.setattr(model, "synchronize", lambda device: pass_time(next(waits)))
    assert model._time(lambda: pass_time(2.0), CPU) == Timing(5000.0, 2000.0)


def test_a_model_that_does_not_fit_says_so_and_the_next_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AdamW, "step", exhausted)
    rows = model.measure_model(CASE, CPU, 1)
    assert [row.failed is None for row in rows] == [True, True, False]
    result = run("model", *QUICK, "--context", "8", "--precision", "fp32")
    assert result.exit_code == 0
    assert result.output.count("out of memory") == 2
    monkeypatch.setattr(model, "Transformer", exhausted)
    rows = model.measure_model(CASE, CPU, 1)
    assert all((row.failed or "").startswith("out of memory") for row in rows)
    assert run("model", *QUICK, "--context", "8", "--precision", "fp32").exit_code == 1


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_passes_that_wait_for_the_host_are_marked(kind: str) -> None:
    sizes = {"model": "own", "seqlen": 8, "precision": "fp32", "batch": 2, "vocab": 11}
    rows = tuple(
        Row(
            "lab model",
            "ours",
            way,
            {**sizes, "compile": False},
            samples_ms=(2.0, 3.0, 4.0),
            tflops=1.5,
            peak_bytes=3 << 20,
            values={"host_ms": host},
        )
        for way, host in (("forward", 2.9), ("both", 3.0), ("step", 2.8))
    )
    machine = {"kind": kind, "device": "a GPU"}
    results = Results("rfa", machine, {}, None, {"repeats": 3}, rows)
    console = Console(width=200, record=True, file=io.StringIO())
    lab_bench._show_model(console, results)
    shown = console.export_text()
    (line,) = (line for line in shown.splitlines() if line.split()[:1] == ["own"])
    mark = "*" if kind == "cuda" else ""  # on a CPU there is no other that could wait
    times = [f"3.000{mark}", "3.0", f"3.000{mark}", "3.0", "3.000", "3.0"]
    assert line.split()[4:] == [*times, "1.5"]
    assert ("the GPU waits for the host" in shown) == (kind == "cuda")


def test_precisions_are_what_their_names_say() -> None:
    before = torch.get_float32_matmul_precision()
    for precision, name in (("fp32", "highest"), ("tf32", "high"), ("bf16", "highest")):
        with model.products_in(precision):
            assert torch.get_float32_matmul_precision() == name
    assert torch.get_float32_matmul_precision() == before
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        case = ModelCase(**{**vars(CASE), "precision": precision})
        logits: Any = model.make_works(case, CPU)["forward"]()
        assert logits.dtype == dtype
        assert math.isfinite(logits.sum())


def test_a_step_lowers_the_loss() -> None:
    """The same few tokens, again and again."""
    step = model.make_works(ModelCase(**{**vars(CASE), "attention": "ours"}), CPU)["step"]
    losses = []
    real = torch.nn.functional.cross_entropy

    def noted(*arguments: Any) -> Tensor:
        found = real(*arguments)
        losses.append(found.item())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "cross_entropy", noted)
        for _ in range(20):
            step()
    assert losses[-1] < losses[0]


def test_a_profile_has_ranges_around_the_parts_of_attention(tmp_path: Path) -> None:
    options = ("--context", "8", "--precision", "fp32", "--attention", "standard")
    result = run("model", *QUICK, *options, "--profile", str(tmp_path / "traces"))
    assert result.exit_code == 0, result.output
    (file,) = (tmp_path / "traces").iterdir()
    assert file.name == "own-8-fp32-standard-step.json"
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    parts = {"scores", "softmax", "value product"}
    assert {*parts, "forward", "backward", "optimizer", "attention"} <= names
    assert all(part in result.output for part in parts)


def test_nsight_systems_is_asked_where_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(model.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(model, "clear", lambda device: None)
    monkeypatch.setattr(model, "run_tool", lambda command, report: asked.append(command))
    (line,) = model.profile(CASE, torch.device("cuda"), tmp_path)
    assert line.startswith(f"wrote {tmp_path / 'tiny-8-fp32-standard-step.nsys-rep'}")
    (command,) = asked
    assert command[:2] == ["nsys", "profile"]
    assert "--trace=cuda,nvtx,osrt" in command
    values, device, runs = command[command.index("ring_flash_attn.lab.bench.model") + 1 :]
    assert (ModelCase.from_dict(json.loads(values)), device) == (CASE, "cuda")
    model.main([values, "cpu", runs])
    assert capsys.readouterr().out == f"3 runs of {CASE}\n"
