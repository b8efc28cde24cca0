"""`rfa plan`: the table, the notes, the file and the picture."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from typer.testing import CliRunner

from ring_flash_attn.cli.app import app

SMALL = "plan --world-size 4 --seqlen 512 --nheads 4 --nheads-k 2 --kernel triton --layout zigzag"


def test_a_plan_is_printed_drawn_and_written(tmp_path: Path) -> None:
    files = tmp_path / "best.svg", tmp_path / "plan.json"
    arguments = f"{SMALL} --route ring --route all_gather --svg {files[0]} --json {files[1]}"
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 0, result.output
    written = json.loads(files[1].read_text())
    best = written["ranked"][0]
    assert f"{best['forward_ms']:.2f}" in result.output
    assert "Priced: all ranks of 4" in result.output
    assert "Estimate, not measured: bandwidth and latency of nvlink4" in result.output
    assert written["python"] in result.output.replace("\n", "")
    picture = ElementTree.parse(files[0]).getroot()
    bars = [each for each in picture.iter() if each.tag.endswith("rect")]
    assert len(bars) >= len(best["ranks_priced"])


def test_a_memory_limit_refuses_and_says_why() -> None:
    result = CliRunner().invoke(app, f"{SMALL} --route ring --memory-gib 0.0001".split())
    assert result.exit_code == 2
    assert "no placement is possible" in result.output


def test_packs_and_networks_in_numbers() -> None:
    arguments = f"{SMALL} --route mesh --documents magi --link-gbps 100 --network-gbps 10"
    result = CliRunner().invoke(app, [*arguments.split(), "--gpus-per-node", "2"])
    assert result.exit_code == 0, result.output
    assert "ranks_per_node 2" in result.output
    assert "cu_seqlens=cu_seqlens" in result.output.replace("\n", "")
