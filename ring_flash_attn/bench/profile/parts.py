"""The files of a profile: what each holds, and how to open it."""

from __future__ import annotations

from pathlib import Path

SUMMARY = "SUMMARY.md"
TRACE = "trace.json"
MEMORY = "memory_snapshot.pickle"
MACHINE, MACHINE_TEXT = "gpu_info.json", "gpu_info.txt"
BASELINE, BASELINE_TEXT = "baseline_benchmark.json", "baseline_benchmark.txt"
COMPARISON, COMPARISON_TEXT = "comparison_results.json", "comparison_results.txt"
NSYS, NSYS_STATS = "flash_attn_nsys.nsys-rep", "nsys_stats.txt"
NCU = "flash_attn_ncu_full.ncu-rep"
NCU_MEMORY, NCU_COMPUTE = "ncu_memory_metrics.txt", "ncu_compute_metrics.txt"


_TEXT = "any editor"
_RESULTS = "any editor; the format of `rfa bench --json`"
PARTS = {  # by name: what is in it, and how to open it
    TRACE: (
        "when each kernel, step and transfer began and ended (torch.profiler)",
        "https://ui.perfetto.dev, Open trace file",
    ),
    MEMORY: (
        "which memory was taken and given back, with stacks (torch.cuda.memory)",
        "https://docs.pytorch.org/memory_viz, drop the file there",
    ),
    MACHINE: ("device, clocks, versions and measured peaks", _TEXT),
    MACHINE_TEXT: ("the same in words, and `nvidia-smi -q`", _TEXT),
    BASELINE_TEXT: ("times, rates and memory of this kernel alone", _TEXT),
    BASELINE: ("the same as a file of results", _RESULTS),
    COMPARISON_TEXT: ("times, memory and speed-up of all implementations", _TEXT),
    COMPARISON: ("the same as a file of results", _RESULTS),
    NSYS: ("the timeline of the whole system (Nsight Systems)", f"nsys-ui {NSYS}"),
    NSYS_STATS: ("its sums by kernel, call and range", _TEXT),
    NCU: ("all hardware counters of each kernel (Nsight Compute)", f"ncu-ui {NCU}"),
    NCU_MEMORY: ("its sections about memory", _TEXT),
    NCU_COMPUTE: ("its sections about arithmetic, stalls and occupancy", _TEXT),
}


def prepare_folder(folder: Path, force: bool) -> None:
    """Make it; ValueError if it holds anything and no `force` replaces an earlier profile."""
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
