"""Object files of compiled kernels on disk, for other processes. Nothing here needs CuTe DSL.

They lie in `RFA_CUTE_CACHE` (default: ~/.cache/ring_flash_attn/cute; set to nothing: nowhere), in a
folder for each version of the sources and of what compiled them. Processes may write and remove
files at the same time: a file appears whole or not at all, and one that is gone is compiled again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ...cache import user_path

VARIABLE = "RFA_CUTE_CACHE"
ARCH = "sm_90a"
_KEPT = 8  # versions: the newest; a version has some megabytes
_DSL = "nvidia-cutlass-dsl"
_PACKAGES = (
    _DSL,
    *(f"{_DSL}-libs-{part}" for part in ("base", "core", "cu12", "cu13")),
    "apache-tvm-ffi",
)
_SOURCES = Path(__file__).parent
_VERSION = re.compile(r".+-sm_\w+-\w+-[0-9a-f]{16}")  # what `fingerprint` returns


def folder() -> Path | None:
    """Where all versions are; None if the user wants none, or has no home."""
    return user_path(VARIABLE, "cute")


def path_of(name: str, traits: object) -> Path | None:
    """Where the kernel `name` for these traits belongs; None if nothing is stored."""
    root = folder()
    if root is None:
        return None
    made_for = hashlib.sha256(repr(traits).encode()).hexdigest()[:24]
    return root / fingerprint() / f"{name}-{made_for}.o"


@cache
def fingerprint() -> str:
    """Of the sources, of what compiles them, and of the machine that they are compiled for."""
    versions = {name: _version(name) for name in _PACKAGES}
    machine = platform.machine()
    found = hashlib.sha256(repr((versions, sys.version_info[:2], ARCH, machine)).encode())
    for source in (_SOURCES.parent / "tables.py", *sorted(_SOURCES.glob("*.py"))):
        found.update(source.name.encode() + source.read_bytes())
    return f"{versions[_DSL]}-{ARCH}-{machine}-{found.hexdigest()[:16]}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def store(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make a file, and put it in its place.

    A disk that is full or read-only is no reason to fail.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            written = Path(scratch, path.name)
            write(written)
            os.replace(written, path)
        os.utime(path.parent)
        _remove_old(path.parent)
    except OSError:
        return


def _remove_old(newest: Path) -> None:
    """All versions but the last ones that were written to, and nothing else that lies there."""
    others = [each for each in newest.parent.iterdir() if _VERSION.fullmatch(each.name)]
    others = [each for each in others if each != newest and each.is_dir()]
    others.sort(key=lambda each: each.stat().st_mtime, reverse=True)
    for each in others[_KEPT - 1 :]:
        for file in each.glob("*.o"):
            file.unlink(missing_ok=True)
        with suppress(OSError):  # there is more in it: another process is writing
            each.rmdir()
