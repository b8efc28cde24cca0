"""`rfa --version`: read from the metadata of what is installed, without importing torch."""

from __future__ import annotations

import platform
import runpy
from importlib.metadata import PackageNotFoundError, distribution, version


def version_lines() -> list[str]:
    """This library, and what it runs on."""
    lines = []
    for package in ("ring-flash-attn", "torch", "triton"):
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"{package}: not installed")
    return [*lines, _cuda(), f"Python {platform.python_version()}"]


def _cuda() -> str:
    """The CUDA (or ROCm) that torch was built for."""
    try:
        built = runpy.run_path(str(distribution("torch").locate_file("torch/version.py")))
    except (PackageNotFoundError, OSError):
        return "CUDA: unknown"
    if built.get("hip"):
        return f"ROCm {built['hip']}"
    return f"CUDA {built['cuda']}" if built.get("cuda") else "CUDA: none, this torch is for the CPU"
