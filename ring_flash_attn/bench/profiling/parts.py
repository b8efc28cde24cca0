"""The files of a profile: what each holds, how to open it, or why it is missing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

SUMMARY = "SUMMARY.md"
TRACE = "trace.json"
MEMORY = "memory_snapshot.pickle"
MACHINE, MACHINE_TEXT = "machine.json", "machine.txt"
BASELINE, COMPARISON = "baseline.json", "comparison.json"
NSYS, NSYS_STATS = "nsys.nsys-rep", "nsys_stats.txt"
NCU, NCU_MEMORY, NCU_COMPUTE = "ncu.ncu-rep", "ncu_memory.txt", "ncu_compute.txt"


@dataclass(frozen=True, slots=True)
class Part:
    """A file.

    Attributes:
        name: in the folder.
        holds: what is in it.
        opened: how to open it.
        missing: why it is not there, or None.
    """

    name: str
    holds: str
    opened: str
    missing: str | None = None

    def without(self, reason: str) -> Part:
        """The same, but it is not there."""
        return replace(self, missing=reason)


_TEXT = "any editor"
_RESULTS = "any editor; the format of `rfa bench --json`"
PARTS = {
    part.name: part
    for part in (
        Part(
            TRACE,
            "when each kernel, step and transfer began and ended (torch.profiler)",
            "https://ui.perfetto.dev, Open trace file",
        ),
        Part(
            MEMORY,
            "which memory was taken and given back, with stacks (torch.cuda.memory)",
            "https://docs.pytorch.org/memory_viz, drop the file there",
        ),
        Part(MACHINE, "device, clocks, versions and measured peaks", _TEXT),
        Part(MACHINE_TEXT, "the same in words, and `nvidia-smi -q`", _TEXT),
        Part(BASELINE, "times of this kernel alone", _RESULTS),
        Part(COMPARISON, "times of all implementations", _RESULTS),
        Part(NSYS, "the timeline of the whole system (Nsight Systems)", "nsys-ui nsys.nsys-rep"),
        Part(NSYS_STATS, "its sums by kernel, call and range", _TEXT),
        Part(NCU, "hardware counters of each kernel (Nsight Compute)", "ncu-ui ncu.ncu-rep"),
        Part(NCU_MEMORY, "its sections about memory", _TEXT),
        Part(NCU_COMPUTE, "its sections about arithmetic, stalls and occupancy", _TEXT),
    )
}


def prepare_folder(folder: Path, force: bool) -> None:
    """Make it, without files of an earlier profile; ValueError if it holds anything.

    Args:
        folder: where the files go.
        force: files of an earlier profile may be replaced; others stay.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    if folder.exists() and any(folder.iterdir()) and not force:
        raise ValueError(f"folder {folder} is not empty; --force replaces a profile in it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (SUMMARY, *PARTS):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}") from None
