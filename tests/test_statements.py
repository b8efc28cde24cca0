"""What the documents state: figures, the order of `auto`, messages and commands; all of it true."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer

from ring_flash_attn import cli, comm
from ring_flash_attn.bench.profile import nsight
from ring_flash_attn.bench.results import ON_CPU, load
from ring_flash_attn.cli.app import app
from ring_flash_attn.comm import agreement
from ring_flash_attn.kernels import base as kernels
from ring_flash_attn.plan.tiles import Mask
from ring_flash_attn.report import page

ROOT = Path(__file__).parent.parent
READMES = ["README.md", "README.zh-CN.md"]


def text(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


# Troubleshooting.


def typed(document: str) -> list[list[str]]:
    """What a user would type after `rfa`, in blocks of shell commands; under torchrun as well."""
    shell = "".join(re.findall(r"```bash\n(.*?)```", text(document), re.S))
    lines = re.findall(
        r"^(?:\w+=\w* )*(?:rfa|torchrun .* -m ring_flash_attn\.cli) (.*)$", shell, re.M
    )
    return [shlex.split(line, comments=True) for line in lines]


def test_commands_for_troubleshooting_exist() -> None:
    group: Any = typer.main.get_command(app)
    lines = typed("docs/troubleshooting.md")
    assert len(lines) >= 12
    for command, *arguments in lines:
        group.commands[command].make_context(command, arguments)


def plain_call(dtype: torch.dtype = torch.float32, headdim: int = 64) -> kernels.Call:
    heads = (1, 1, headdim, headdim)
    return kernels.Call(torch.device("cpu"), dtype, *heads, headdim**-0.5, Mask())


def raised(function: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises((ValueError, NotImplementedError)) as error:
        function(*arguments)
    return str(error.value)


def test_messages_for_troubleshooting_are_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    monkeypatch.delitem(sys.modules, "ring_flash_attn.cli.app", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit):
        cli.main()
    monkeypatch.setattr(nsight.shutil, "which", lambda tool: None)
    subject: Any = SimpleNamespace(device=torch.device("cuda"))
    reasons = [
        reason.split(";")[0]
        for call in (plain_call(), plain_call(torch.float64), plain_call(headdim=512))
        for reason in kernels.why_not("triton", call)
    ]
    messages = [
        capsys.readouterr().err.strip(),
        page._MISSING,
        ON_CPU,
        nsight.use_nsys(subject, ROOT, print)["nsys_stats.txt"],
        raised(kernels.choose_kernel, "triton", plain_call(torch.float64)).splitlines()[0],
        raised(comm.resolve_group, None),
        agreement._NEW_GROUP,
        *reasons,
    ]
    for message in messages:
        assert message in text("docs/troubleshooting.md"), message
    for words, module in (
        ("the ranks of the group do not make the same call:", agreement),
        (" of the group did not come to this call within ", agreement),
        ("it is installed but cannot be imported", kernels),
    ):
        assert words in text("docs/troubleshooting.md")
        assert words in inspect.getsource(module)


# Figures, and what `auto` takes.


def test_the_ratio_to_cudnn_is_that_of_the_files() -> None:
    ratios = []
    for path in sorted((ROOT / "results").glob("compare_*_h200.json")):
        rates = {(row.implementation, row.passes): row.tflops for row in load(path).rows}
        for passes in ("forward", "backward"):
            ratios.append(rates["triton", passes] / rates["cudnn", passes])
    assert len(ratios) >= 14
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.1f}"
    assert f"{low} to {high} of cuDNN's" in " ".join(text("README.md").split())
    assert f"{low} 到 {high} 倍" in text("README.zh-CN.md")


@pytest.mark.parametrize(
    ("generation", "headdim", "start"),
    [
        (9, 32, "| up to 32, and 97 to 128 | "),
        (9, 128, "| up to 32, and 97 to 128 | "),
        (9, 64, "| 33 to 64 | "),
        (9, 96, "| others: `triton` would pad them | "),
        (9, 256, "| others: `triton` would pad them | "),
        (8, 256, "on other NVIDIA GPUs "),
    ],
)
def test_auto_tries_kernels_in_the_order_of_the_documents(
    generation: int, headdim: int, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from ring_flash_attn.kernels.triton.hopper import host

    monkeypatch.setattr(host, "_unavailable", lambda device: ())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (generation, 0))
    monkeypatch.setattr(kernels, "_registered", [])
    cuda = torch.device("cuda")
    call = kernels.Call(cuda, torch.bfloat16, 1, 1, headdim, headdim, 1.0, Mask())
    words = text("docs/kernels.md").split("`auto` tries, in this order")[1].split(start)[1]
    named = re.findall(r"`(\w+)`", re.match(r"(?:`\w+`(?:, )?)+", words)[0])  # type: ignore[index]
    order = kernels.candidates("auto", call)
    assert list(order[: len(named)]) == named
    assert order[-1] == "reference"
    assert len(named) >= 4


def test_what_triton_cannot_do_is_in_the_readme() -> None:
    """Every kind of reason that it has, beside the device's."""
    pytest.importorskip("triton")
    for readme in READMES:
        words = re.search(r"\*\*(?:What is there today|现状).*?\n\n", text(readme), re.S)
        assert words is not None
        for need in ("fp16", "bf16", "fp32", "256", "softmax_scale", "GPU"):
            assert need in words[0]
    negative = dataclasses.replace(plain_call(), softmax_scale=0.0)
    for call in (negative, plain_call(torch.float64), plain_call(headdim=257)):
        assert set(kernels.why_not("triton", call)) > set(kernels.why_not("triton", plain_call()))
