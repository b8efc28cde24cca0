"""Step 6 goes on where torch.compile does not work, and says why."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from ring_flash_attn.lab.steps import s06_backward


def test_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    s06_backward.show()
    assert "needs a C++ compiler, and there is none here" in capsys.readouterr().out


def test_with_one_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(shutil, "which", lambda name: "/bin/true")
    monkeypatch.setattr(torch, "compile", lambda function: fails)
    s06_backward.show()
    assert "does not work here: RuntimeError" in capsys.readouterr().out
