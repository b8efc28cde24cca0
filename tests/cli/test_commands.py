"""What all commands have in common: `--json`, `--help`, and that no option is ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ring_flash_attn.cli.app import app
from ring_flash_attn.kernels.base import kernel_names

COMMANDS = [command.callback.__name__ for command in app.registered_commands if command.callback]


def rfa(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})


def written(path: Path, *arguments: str) -> Any:
    result = rfa(*arguments, "--json", str(path))
    assert result.exit_code == 0, result.output
    assert f"wrote {path}" in result.output
    return json.loads(path.read_text())


def test_info(tmp_path: Path) -> None:
    found = written(tmp_path / "new" / "info.json", "info", "--device", "cpu")
    assert set(found["why_not"]) == set(kernel_names())
    assert found["why_not"]["reference"] == []
    assert "NVIDIA GPU" in found["why_not"]["fa2"][0]
    assert found["picks"] == {"auto": "reference", "native": None}
    assert found["versions"]["torch"]


def test_draw(tmp_path: Path) -> None:
    """Two ranks with two tokens each: 3 pairs of their own each; then rank 1 gets K0."""
    options = ("contiguous", "--world-size", "2", "--seqlen", "4")
    (found,) = written(tmp_path / "draw.json", "draw", *options)
    assert (found["layout"], found["route"], found["world_size"]) == ("contiguous", "ring", 2)
    assert (found["lengths"], found["backward"]) == ([4], False)
    pairs = [[turn["pairs"] for turn in step] for step in found["steps"]]
    assert pairs == [[3, 3], [0, 4]]
    assert found["steps"][0][0]["sends"] == ["K0 → 1"]


def test_a_layout_that_knows_nodes(tmp_path: Path) -> None:
    """By the name it has; each pair of ranks shares a document here, and hears of no other."""
    name = "Balanced(ranks_per_node=2)"
    options = ("--world-size", "4", "--cu-seqlens", "0,32,64", "--sources-per-launch", "3")
    (found,) = written(tmp_path / "draw.json", "draw", name, *options)
    assert found["layout"] == name
    sends = {send for step in found["steps"] for turn in step for send in turn["sends"]}
    assert sends == {"K0 → 1", "K1 → 0", "K2 → 3", "K3 → 2"}
    result = rfa("draw", "Balanced(ranks_per_node=0)", *options)
    assert result.exit_code == 2
    assert "unknown layout 'Balanced(ranks_per_node=0)'" in " ".join(result.output.split())


def test_every_command_has_examples_and_json() -> None:
    assert {"bench", "compare", "diff", "info", "replay", "verify"} <= set(COMMANDS)
    for name in COMMANDS:
        text = rfa(name, "--help").output
        assert f"rfa {name} " in text.split("Options")[0].replace("Usage: rfa", ""), name
        assert "--json" in text, name


@pytest.mark.parametrize("command", ["info", "draw"])
def test_files_that_cannot_be_written_are_refused(command: str, tmp_path: Path) -> None:
    arguments = ("zigzag",) if command == "draw" else ()
    result = rfa(command, *arguments, "--json", str(tmp_path))
    assert result.exit_code == 2
    assert "cannot write" in result.output


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("verify --virtual --backend gloo", "--backend gloo"),
        ("verify --virtual --timeout 5", "--timeout 5"),
        ("verify --backend pigeon", "pigeon"),
        ("verify --backend nccl", "nccl needs a GPU"),
        ("verify --timeout 0", "--timeout must be positive"),
        ("draw zigzag --heads-k-stride 1", "--heads-k-stride 1"),
        ("draw zigzag --seqlen 4 --cu-seqlens 0,4", "--seqlen 4 and --cu-seqlens 0,4"),
        ("replay --seqlen 4 --cu-seqlens 0,4", "--seqlen 4 and --cu-seqlens 0,4"),
        ("ring ring_flash_attn_varlen_func --batch 3 --cu-seqlens 0,8", "--batch 3"),
        ("ring ring_flash_attn_varlen_func --seqlen 3 --cu-seqlens 0,8", "--seqlen 3"),
    ],
)
def test_what_would_mean_nothing_is_refused(command: str, words: str) -> None:
    result = rfa(*command.split())
    assert result.exit_code == 2, result.output
    assert words in result.output


def test_the_number_of_ranks_is_that_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    for command in ("verify", "ring"):
        result = rfa(command, "--world-size", "2")
        assert result.exit_code == 2, result.output
        assert "--world-size 2: torchrun has started 3 ranks" in result.output
        result = rfa(command, "--world-size", "3", "--timeout", "9", "--device", "cpu")
        assert result.exit_code == 2, result.output
        assert "torchrun itself watches" in result.output
