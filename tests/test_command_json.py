"""`--json` of the commands that measure nothing, and `--help` of all."""

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
