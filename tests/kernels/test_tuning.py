"""Tuned block sizes: where the file is looked for, what is refused, what is chosen and kept."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from typer.testing import CliRunner, Result

import ring_flash_attn as rfa
from ring_flash_attn.cli.app import app
from ring_flash_attn.kernels.base import Call
from ring_flash_attn.plan.tiles import Mask

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from ring_flash_attn.kernels.triton import config, tuning
from ring_flash_attn.kernels.triton.config import Blocks, blocks_for
from ring_flash_attn.kernels.triton.tuning import Choice, Trial, candidates, choose, save

GPU = "NVIDIA Abacus, triton 9.9"
CUDA = torch.device("cuda", 0)
NAME = "forward, 64, bfloat16"
DEFAULT, OTHER = Blocks(64, 64, 3, 4, 168), Blocks(128, 32, 2, 8)


def call(dtype: torch.dtype = torch.bfloat16, headdim: int = 64, device: Any = CUDA) -> Call:
    return Call(device, dtype, 4, 2, headdim, headdim, 0.125, Mask())


@pytest.fixture(autouse=True)
def fake_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A large GPU by name, and no file but those of the test."""
    monkeypatch.delenv(config.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(config, "gpu_name", lambda device: GPU)
    monkeypatch.setattr(config, "_is_large", lambda limit, dtype, device: True)
    config.forget_tuned()
    yield
    config.forget_tuned()


def write(path: Path, blocks: Any = OTHER, name: str = NAME, gpu: str = GPU) -> Path:
    entry = asdict(blocks) if isinstance(blocks, Blocks) else blocks
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": config.FORMAT, "gpus": {gpu: {name: entry}}}))
    return path


# The file


def test_without_a_file_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocks_for("forward", call()) == DEFAULT
    config.forget_tuned()
    monkeypatch.setattr(config, "_is_large", lambda limit, dtype, device: False)
    assert blocks_for("forward", call()) == config._SMALL["forward", 64]


def test_the_file_in_the_cache_is_used_for_its_entry_alone(tmp_path: Path) -> None:
    write(tmp_path / "cache" / "ring_flash_attn" / "triton.json")
    assert blocks_for("forward", call()) == OTHER
    assert blocks_for("forward", call(headdim=40)) == OTHER  # up to 64
    assert blocks_for("forward", call(headdim=65)) == config._HOPPER["forward", 128]
    assert blocks_for("forward", call(torch.float16)) == DEFAULT
    assert blocks_for("queries", call()) == config._HOPPER["queries", 64]


def test_the_cache_is_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / ".cache" / "ring_flash_attn" / "triton.json")
    assert blocks_for("forward", call()) == OTHER


def test_the_variable_goes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path / "cache" / "ring_flash_attn" / "triton.json")
    named = write(tmp_path / "mine.json", Blocks(32, 32, 1, 4))
    monkeypatch.setenv(config.VARIABLE, str(named))
    assert blocks_for("forward", call()) == Blocks(32, 32, 1, 4)
    config.forget_tuned()
    monkeypatch.setenv(config.VARIABLE, "")
    assert blocks_for("forward", call()) == DEFAULT


def test_a_named_file_has_to_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(config.VARIABLE, str(tmp_path / "nothing.json"))
    with pytest.raises(ValueError, match=r"nothing\.json: it cannot be read: No such file"):
        blocks_for("forward", call())


def test_another_gpu_has_other_entries(tmp_path: Path) -> None:
    write(tmp_path / "cache" / "ring_flash_attn" / "triton.json", gpu="NVIDIA Abacus, triton 9.8")
    assert blocks_for("forward", call()) == DEFAULT


def test_the_file_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path / "cache" / "ring_flash_attn" / "triton.json")
    assert blocks_for("forward", call()) == OTHER
    path.write_text("nonsense")
    assert blocks_for("forward", call()) == OTHER
    assert blocks_for("keys", call()) == config._HOPPER["keys", 64]


def test_on_the_cpu_no_file_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(config.VARIABLE, str(tmp_path / "nothing.json"))
    cpu = call(device=torch.device("cpu"))
    assert {blocks_for(kernel, cpu) for kernel in config.KERNELS} == {config._INTERPRETED}


GOOD = asdict(OTHER)
BAD_ENTRIES = {
    "three": (NAME, {**GOOD, "rows": 96}, '"rows" is 96, not a power of two from 16 to 256'),
    "small": (NAME, {**GOOD, "columns": 8}, '"columns" is 8'),
    "text": (NAME, {**GOOD, "warps": "4"}, "\"warps\" is '4'"),
    "truth": (NAME, {**GOOD, "stages": True}, '"stages" is True'),
    "registers": (NAME, {**GOOD, "registers": 256}, '"registers" is 256'),
    "missing": (NAME, {"rows": 64, "columns": 64, "stages": 1}, '"warps" is 0'),
    "list": (NAME, [64, 64, 1, 4, 0], "it is not an object"),
    "kernel": ("sideways, 64, float16", GOOD, "no kernel, limit and dtype have this name"),
    "limit": ("forward, 96, float16", GOOD, "no kernel, limit and dtype have this name"),
}


@pytest.mark.parametrize("case", BAD_ENTRIES)
def test_entries_that_make_no_sense_are_refused(case: str, tmp_path: Path) -> None:
    name, entry, why = BAD_ENTRIES[case]
    path = write(tmp_path / "cache" / "ring_flash_attn" / "triton.json", entry, name)
    with pytest.raises(ValueError) as refused:
        blocks_for("forward", call())
    said = str(refused.value)
    assert str(path) in said
    assert f'entry "{name}" of "{GPU}": ' in said
    assert why in said
    assert "Delete this file, run `rfa tune` again" in said


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "Expecting property name"),
        (b"\xff", "decode"),
        (b"[]", '"format" is not 1'),
        (b'{"format": 2, "gpus": {}}', '"format" is not 1'),
        (b'{"format": 1, "gpus": {"a": 1}}', '"gpus" is not'),
    ],
)
def test_other_files_are_refused(content: bytes, why: str, tmp_path: Path) -> None:
    path = write(tmp_path / "cache" / "ring_flash_attn" / "triton.json")
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"triton\.json: .*Delete this file") as refused:
        blocks_for("forward", call())
    assert why in str(refused.value)


def test_using_ends() -> None:
    with config.using("forward", call(), OTHER):
        assert blocks_for("forward", call()) == OTHER
    assert blocks_for("forward", call()) == DEFAULT
    with pytest.raises(KeyError), config.using("forward", call(), OTHER):
        raise KeyError
    assert blocks_for("forward", call()) == DEFAULT


# What is tried and chosen


@pytest.mark.parametrize("limit", config.LIMITS)
@pytest.mark.parametrize("kernel", config.KERNELS)
def test_candidates_make_sense(kernel: str, limit: int) -> None:
    default = config.default_blocks(kernel, limit, torch.bfloat16, CUDA)
    found = candidates(kernel, limit, default)
    assert found[0] == default
    assert len(set(found)) == len(found) >= 12
    for blocks in found:
        name = config.entry_name(kernel, limit, torch.bfloat16)
        assert not config._fault(name, asdict(blocks)), blocks


SIZES = [DEFAULT, *(Blocks(rows, 32, 1, 4) for rows in (32, 64, 128))]


def trial(wrong: Sequence[Blocks] = (), broken: Sequence[Blocks] = ()) -> Trial:
    """Writes 3 rows; a single wrong one with some block sizes, and an error with others."""
    into = torch.empty(3, 8)

    def launch(blocks: Blocks) -> None:
        if blocks in broken:
            raise RuntimeError("somewhere\nout of shared memory")
        into.copy_(torch.tensor([[100.0], [1.0], [1.0]]).expand(3, 8))
        into[2] += blocks in wrong

    return Trial(launch, (into,), float("nan"))


def measured(*times: float) -> Callable[[Sequence[Callable[[], object]]], list[float]]:
    def measure(works: Sequence[Callable[[], object]]) -> list[float]:
        assert len(works) == len(times)
        for work in works:
            work()
        return list(times)

    return measure


def test_the_fastest_is_chosen() -> None:
    lines: list[str] = []
    choice = choose(SIZES, trial(), [trial()], 1e-2, lines.append, measured(2, 1.5, 1.0, 1.2))
    assert choice == Choice(DEFAULT, SIZES[2], 2, 1.0)
    assert not lines


def test_the_default_stays_below_three_percent() -> None:
    choice = choose(SIZES, trial(), [trial()], 1e-2, print, measured(1, 0.98, 0.971, 1.2))
    assert choice == Choice(DEFAULT, DEFAULT, 1, 1)
    choice = choose(SIZES, trial(), [trial()], 1e-2, print, measured(1, 0.98, 0.97, 1.2))
    assert choice.chosen == SIZES[2]


def test_a_wrong_result_is_never_chosen() -> None:
    lines: list[str] = []
    choice = choose(SIZES, trial(wrong=SIZES[1:3]), [trial()], 1e-2, lines.append, measured(2, 1.5))
    assert choice.chosen == SIZES[3]
    assert lines == [f"{x}: left out, its results are not those of the default" for x in SIZES[1:3]]


def test_what_is_wrong_with_other_features_is_never_chosen() -> None:
    lines: list[str] = []
    hard = [trial(), trial(wrong=[SIZES[1]], broken=[SIZES[2]])]
    choice = choose(SIZES, trial(), hard, 1e-2, lines.append, measured(2, 1.0, 1.1, 1.2))
    assert choice.chosen == SIZES[3]
    assert len(lines) == 2
    choice = choose(SIZES, trial(), hard, 1e-2, lines.append, measured(2, 1.0, 1.1, 1.99))
    assert choice.chosen == DEFAULT


def test_what_fails_is_reported_and_left_out() -> None:
    lines: list[str] = []
    choice = choose(
        SIZES, trial(broken=[SIZES[1]]), [trial()], 1e-2, lines.append, measured(2, 1.0, 1.5)
    )
    assert choice.chosen == SIZES[2]
    assert lines == ["32 × 32, stages 1, warps 4: left out, out of shared memory"]


def test_what_writes_nothing_is_wrong() -> None:
    into = torch.empty(3, 8)

    def launch(blocks: Blocks) -> None:
        if blocks == DEFAULT:
            into.fill_(1.0)

    idle = Trial(launch, (into,), float("nan"))
    assert choose(SIZES, idle, [], 1e-2, print, measured(2)).chosen == DEFAULT


def _tune_interpreted(rank: int, world_size: int, dtype: torch.dtype) -> Any:
    """All three kernels through the interpreter, with times that make small blocks the best."""
    tuning._HEADS = (2, 1)
    tuning._HARD_SEQLEN = 75
    tuning.candidates = lambda kernel, limit, default: [
        default,
        Blocks(16, 32, 1, 4) if kernel == "keys" else Blocks(32, 16, 1, 4),
        Blocks(16, 16, 1, 4),
    ]
    lines: list[str] = []
    choices = tuning.tune(
        16, dtype, torch.device("cpu"), 70, True, lines.append, lambda works: [3.0, 2.0, 1.0]
    )
    return choices, lines


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Ranks]:
    pool = Ranks(1, environment={"TRITON_INTERPRET": "1"})
    yield pool
    pool.stop()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_agree_with_themselves(interpreter: Ranks, dtype: torch.dtype) -> None:
    ((choices, lines),) = interpreter.run(_tune_interpreted, dtype)
    assert not lines
    best = Choice(config._INTERPRETED, Blocks(16, 16, 1, 4), 3.0, 1.0)
    assert choices == {config.entry_name(k, 64, dtype): best for k in config.KERNELS}


# What is kept


def test_saving_merges(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tuned.json"
    save(path, GPU, {NAME: Choice(DEFAULT, OTHER, 2.0, 1.0)})
    save(path, "another", {NAME: Choice(DEFAULT, OTHER, 2.0, 1.0)})
    keys = Choice(Blocks(64, 64, 1, 4), Blocks(32, 64, 1, 4), 2.0, 1.23456)
    save(path, GPU, {"keys, 64, bfloat16": keys})
    content = json.loads(path.read_text())
    assert content["format"] == 1
    assert set(content["gpus"]) == {GPU, "another"}
    assert content["gpus"][GPU] == {
        NAME: {**asdict(OTHER), "ms": 1.0, "ms of the default": 2.0},
        "keys, 64, bfloat16": {**asdict(keys.chosen), "ms": 1.2346, "ms of the default": 2.0},
    }
    save(path, GPU, {NAME: Choice(DEFAULT, DEFAULT, 1.0, 1.0)})  # nothing is better any more
    assert list(config.read_tuned(path)[GPU]) == ["keys, 64, bfloat16"]
    assert [file.name for file in path.parent.iterdir()] == ["tuned.json"]


def test_what_is_saved_is_used_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(config.VARIABLE, str(tmp_path / "tuned.json"))
    save(tmp_path / "tuned.json", GPU, {})
    assert blocks_for("forward", call()) == DEFAULT
    save(tmp_path / "tuned.json", GPU, {NAME: Choice(DEFAULT, OTHER, 2.0, 1.0)})
    assert blocks_for("forward", call()) == OTHER


def test_saving_over_nonsense_keeps_it_beside(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text("nonsense")
    save(path, GPU, {NAME: Choice(DEFAULT, OTHER, 2.0, 1.0)})
    assert list(config.read_tuned(path)) == [GPU]
    assert (tmp_path / "tuned.json.old").read_text() == "nonsense"


# The command


def rfa_tune(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", *arguments], env={"COLUMNS": "160"})


@pytest.fixture
def fake_tune(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A GPU on which the forward kernel can be improved; the calls that were made."""
    calls: list[tuple[Any, ...]] = []

    def tune(headdim: int, dtype: torch.dtype, *others: Any, report: Any) -> dict[str, Choice]:
        calls.append((headdim, dtype, *others))
        report("keys, 9 × 9: left out, too odd")
        choice = Choice(DEFAULT, OTHER, 2.0, 1.5)
        keys = Choice(DEFAULT, DEFAULT, 3.0, 3.0)
        limit = config.limit_of(headdim)
        return {
            config.entry_name("forward", limit, dtype): choice,
            config.entry_name("keys", limit, dtype): keys,
        }

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tuning, "tune", tune)
    return calls


def test_without_a_gpu_nothing_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = rfa_tune("--output", str(tmp_path / "new" / "tuned.json"))
    assert result.exit_code == 2
    assert "on a GPU, and there is none that torch can use" in result.output
    assert not (tmp_path / "new").exists()


def test_the_command_writes_what_the_library_reads(
    fake_tune: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    result = rfa_tune()
    assert result.exit_code == 0, result.output
    assert fake_tune == [(d, torch.bfloat16, CUDA, 8192, True) for d in (64, 128)]
    path = tmp_path / "cache" / "ring_flash_attn" / "triton.json"
    assert f"wrote {path}: from now on it is used" in result.output
    assert "too odd" in result.output
    (row,) = (line.split("  ") for line in result.output.splitlines() if NAME in line)
    words = [word.strip() for word in row if word.strip()]
    assert words == [NAME, str(DEFAULT), str(OTHER), "2.0000", "1.5000"]
    assert blocks_for("forward", call()) == OTHER
    assert blocks_for("keys", call()) == config._HOPPER["keys", 64]


def test_the_command_writes_elsewhere(fake_tune: list[tuple[Any, ...]], tmp_path: Path) -> None:
    path = tmp_path / "a" / "mine.json"
    arguments = ("--headdim", "256", "--dtype", "float16", "--seqlen", "512", "--full")
    result = rfa_tune(*arguments, "--output", str(path))
    assert result.exit_code == 0, result.output
    assert fake_tune == [(256, torch.float16, CUDA, 512, False)]
    assert f"to use it, set {config.VARIABLE}={path}" in result.output
    assert list(config.read_tuned(path)[GPU]) == ["forward, 256, float16"]


def test_the_command_writes_what_it_found(
    fake_tune: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ring_flash_attn.bench.machine.versions", lambda: {"triton": "9.9"})
    path = tmp_path / "found.json"
    result = rfa_tune("--headdim", "64", "--json", str(path))
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert (found["gpu"], found["seqlen"], found["causal"]) == (GPU, 8192, True)
    assert found["choices"][NAME] == {
        "default": str(DEFAULT),
        "chosen": str(OTHER),
        "ms_before": 2.0,
        "ms_after": 1.5,
    }


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--dtype", "int8"), "int8"),
        (("--dtype", "float64"), "float64 is not fp16, bf16 or fp32"),
        (("--headdim", "257"), "257 is over 256"),
        (("--headdim", "96", "--headdim", "128"), "--headdim 96 and 128 share one entry"),
        (("--output", "/dev/null/tuned.json"), "cannot write"),
        (("--output", "/"), "cannot write"),
    ],
)
def test_wrong_arguments_are_refused(
    fake_tune: list[tuple[Any, ...]], arguments: tuple[str, ...], why: str
) -> None:
    result = rfa_tune(*arguments)
    assert result.exit_code == 2
    assert why in result.output
    assert not fake_tune


def test_a_file_that_is_not_read_is_not_written(
    fake_tune: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(config.VARIABLE, "")
    result = rfa_tune()
    assert result.exit_code == 2
    assert f"{config.VARIABLE} is empty" in result.output


def test_info_names_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def info() -> str:
        return CliRunner().invoke(app, ["info"], env={"COLUMNS": "300"}).output

    assert "the defaults" in info()
    path = write(tmp_path / "mine.json")
    monkeypatch.setenv(config.VARIABLE, str(path))
    output = info()
    assert f"{config.VARIABLE} {path}" in output
    assert f"for {GPU}: {NAME}" in output
    path.write_text("nonsense")
    assert "Delete this file" in info()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.timeout(600)
def test_tuning_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()  # the GPU has its own name
    path = tmp_path / "tuned.json"
    monkeypatch.setenv(config.VARIABLE, str(path))
    device = torch.device("cuda", torch.cuda.current_device())
    leaves = [torch.randn(1, 512, 4, 64, device=device).bfloat16() for _ in range(3)]
    leaves = [x.requires_grad_() for x in leaves]

    def run() -> list[torch.Tensor]:
        out = rfa.triton_flash_attn_func(*leaves, causal=True)
        return [out.detach(), *torch.autograd.grad(out.float().sum(), leaves)]

    save(path, config.gpu_name(device), {})
    before = run()
    choices = tuning.tune(64, torch.bfloat16, device, 512, True, print)
    assert list(choices) == [config.entry_name(k, 64, torch.bfloat16) for k in config.KERNELS]
    for choice in choices.values():
        assert 0 < choice.after <= choice.before
    # Whatever was faster here, run with something other than the default.
    other = {"forward": Blocks(64, 32, 2, 4), "keys": Blocks(32, 64, 2, 4)}
    for kernel, blocks in other.items():
        name = config.entry_name(kernel, 64, torch.bfloat16)
        choices[name] = Choice(choices[name].default, blocks, 1.0, 1.0)
    save(path, config.gpu_name(device), choices)
    for kernel, blocks in other.items():
        assert blocks_for(kernel, call(device=device)) == blocks
    for a, b in zip(run(), before, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
