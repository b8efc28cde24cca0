"""`make soak`: for some minutes random calls, lost ranks and ever new packs, all from one seed."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from calls import FUNCTIONS
from rich.console import Console
from rich.table import Table

from ring_flash_attn.api.families import PREFIXES

from . import faults, packs
from .cases import VIRTUAL, Case
from .doors import Doors
from .hunt import hunt

MOST_FAILURES = 5
BETWEEN_FAULTS = 60.0  # seconds
# Kinds of packs: how many of all, and how much of the time at most.
PACKS = {"one device": (1.0, 0.25), "virtual ranks": (0.1, 0.05)}
PACKS |= {"a group of 2": (0.05, 0.05), "8 threads": (0.1, 0.05)}
# Cases of each function in a round; the interpreter is slow, and refusals are quick.
CASES = {"reference": 10, "auto": 10, "triton": 1, "native": 1, "cute": 1}
VIRTUAL_BATCHES = 12

HEAD = """# PYTHONPATH=tests:tests/helpers .venv/bin/python reproduce.py
from soak import faults, packs
from soak.cases import Case
from soak.doors import Doors

if __name__ == "__main__":
    """


class Soak:
    """One run: what it has done so far, and what failed."""

    def __init__(self, seed: int, minutes: float, count: int, device: str) -> None:
        self.seed, self.packs, self.device = seed, count, device
        self.started = time.monotonic()
        self.until = self.started + 60 * minutes
        self.console = Console(highlight=False, soft_wrap=True)
        self.doors = Doors(device=device)
        self.failures = 0
        self.counts: dict[str, Counter[str]] = {
            name: Counter() for name in ("door", "dtype", "route", "kernel", "function")
        }
        self.done: Counter[str] = Counter()  # faults and packs
        self._spoken = self.started

    def run(self) -> bool:
        """Everything until time is up; whether nothing failed."""
        self.console.print(f"seed {self.seed}")
        try:
            for kind, (share, part) in PACKS.items():
                seconds = part * (self.until - self.started)
                self._take_packs(kind, int(self.packs * share), seconds)
            self._take_cases()
        finally:
            self.doors.stop()
        self._report()
        return not self.failures

    def _more(self) -> bool:
        return time.monotonic() < self.until and self.failures < MOST_FAILURES

    def _take_packs(self, kind: str, count: int, seconds: float) -> None:
        processes = min(2, os.cpu_count() or 1)
        function, kwargs = {
            "one device": (packs.apart, {"door": "single", "processes": processes}),
            "virtual ranks": (packs.apart, {"door": "virtual", "processes": processes}),
            "a group of 2": (packs.together, {}),
            "8 threads": (packs.in_threads, {}),
        }[kind]
        least = 4 * packs.WARM_UP if self.packs else 0  # too few tell nothing of memory
        kwargs |= {"count": max(count, least), "seconds": round(seconds, 1)}
        self._try(f"packs on {kind}", "packs", function, kwargs)

    def _take_cases(self) -> None:
        random = Random(f"{self.seed} faults")
        last, kinds = time.monotonic(), list[str]()
        for number, (function, kernel, count) in enumerate(self._batches()):
            if not self._more():
                break
            key = Random(f"{self.seed} {number}").getrandbits(64)
            failure = hunt(self._check, function, kernel, self.device, key, count, self.until)
            if failure is not None:
                what = "a call that fails now and then" if failure.flaky else "a call"
                doors = "Doors()" if self.device == "cpu" else f"Doors(device={self.device!r})"
                self._fail(what, f"{doors}.check({failure.case})", failure.error)
            if time.monotonic() - last > BETWEEN_FAULTS:
                kinds = kinds or random.sample(faults.KINDS, len(faults.KINDS))
                kind = kinds.pop()
                self._try(f"ranks {kind}", "faults", *faults.draw(kind, random))
                last = time.monotonic()

    def _batches(self) -> Iterator[tuple[str, str, int]]:
        """(function, kernel, how many cases); every public function once in a round."""
        random = Random(f"{self.seed} batches")
        plain = ("reference", "auto") if self.device == "cpu" else ("reference", "triton", "auto")
        while True:
            found = [(VIRTUAL, kernel) for kernel in plain for _ in range(VIRTUAL_BATCHES)]
            found += [(VIRTUAL, "triton"), ("ring_attention", "triton")]
            found += [(name, "reference") for name in FUNCTIONS]
            found += [(name, "auto") for name in FUNCTIONS if name.startswith("flash_attn")]
            found += [(f"{kernel}_{name}", kernel) for kernel in PREFIXES for name in FUNCTIONS]
            for function, kernel in random.sample(found, len(found)):
                yield function, kernel, CASES[kernel] if self.device == "cpu" else CASES["auto"]

    def _check(self, case: Case) -> None:
        computed = self.doors.check(case)
        values = {
            "door": case.door,
            "dtype": case.dtype,
            "route": case.point[1] or "one device",
            "kernel": case.kernel if computed else f"{case.kernel}, refused",
            "function": case.function,
        }
        for name, value in values.items():
            self.counts[name][value] += 1
        self._speak()

    def _try(
        self, what: str, module: str, function: Callable[..., Any], kwargs: dict[str, Any]
    ) -> None:
        """Something that is not a case: it returns how many, or raises."""
        if not self._more() or kwargs.get("count") == 0:
            return
        try:
            count = function(**kwargs)
        except Exception as error:
            arguments = ", ".join(f"{name}={value!r}" for name, value in kwargs.items())
            snippet = f"{module}.{function.__name__}({arguments})"
            self._fail(what, snippet, f"{type(error).__name__}: {error}")
        else:
            self.done[what] += 1 if count is None else count
        self._speak()

    def _fail(self, what: str, snippet: str, error: str) -> None:
        self.failures += 1
        self.console.print(f"\nFAILED, seed {self.seed}: {what}\n{error}\n", markup=False)
        self.console.print(f"{HEAD}{snippet}\n", markup=False)

    def _speak(self) -> None:
        """A line every now and then."""
        now = time.monotonic()
        if now - self._spoken < (1 if self.console.is_terminal else 60):
            return
        self._spoken = now
        counts = {"calls": self.counts["door"].total(), **self.done}
        said = ", ".join(f"{what}: {count}" for what, count in counts.items())
        line = f"{now - self.started:5.0f} s  {said}"
        if self.console.is_terminal:
            line = f"{line[: self.console.width - 1]}\r"
        self.console.print(line, markup=False, end="" if self.console.is_terminal else "\n")

    def _report(self) -> None:
        table = Table("what", "how many", box=None, pad_edge=False)
        for name, counts in self.counts.items():
            if name != "function":
                for value, count in counts.most_common():
                    table.add_row(f"calls, {name} {value}", str(count))
        for what, count in self.done.items():
            table.add_row(what, str(count))
        self.console.print(table)
        names = {*FUNCTIONS, *(f"{p}_{name}" for p in PREFIXES for name in FUNCTIONS), VIRTUAL}
        missing = sorted(names - set(self.counts["function"]))
        self.console.print(f"public functions: {len(names) - len(missing)} of {len(names)}")
        if missing:
            self.console.print(
                f"  without a call: {', '.join(missing[:9])}{', …' * (len(missing) > 9)}"
            )
        seconds = time.monotonic() - self.started
        calls = self.counts["door"].total()
        self.console.print(
            f"{calls} calls in {seconds:.0f} s, seed {self.seed}: {self.failures} failures"
        )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--packs", type=int, default=100_000, help="on one device")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    soak = Soak(args.seed, args.minutes, args.packs, args.device)
    sys.exit(0 if soak.run() else 1)


if __name__ == "__main__":
    main()
