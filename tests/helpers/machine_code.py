"""Machine code for GPUs that need not be there: registers, spills, memory, loops.

It is disassembled, and its loops are searched for registers that went to the stack. The compiler
works in processes of its own, two at a time, which no test has set to Triton's interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Code:
    """What came out.

    Attributes:
        shared: bytes of shared memory.
        tensor: columns of tensor memory; on sm_100 alone.
        registers: of a thread.
        stack: bytes of a thread.
        spills: vector registers that are spilled anywhere; on AMD alone.
        counts: instructions.
        loops: instructions of each innermost loop with matrix products, in the order in which they
            lie; on NVIDIA alone.
        overwritten: instructions that write a register which a product may still be reading; on
            sm_90 alone.
    """

    shared: int
    tensor: int
    registers: int
    stack: int
    spills: int
    counts: Counter[str]
    loops: list[list[str]]
    overwritten: list[str]

    @property
    def stores(self) -> int:
        """To the stack, in the innermost loops."""
        return sum(loop.count("STL") for loop in self.loops)


def read_nvidia(compiled: Any) -> Code:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    code = [
        (int(address, 16), instruction)
        for address, instruction in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", text)
    ]
    loops = [_names([code[i][1] for i in sorted(loop)]) for loop in _innermost(code)]
    counts = Counter(_names([instruction for _, instruction in code]))
    shared, tensor = compiled.metadata.shared, compiled.metadata.tmem_size
    return Code(shared, tensor, int(registers), int(stack), 0, counts, loops, overwritten(code))


def _names(code: list[str]) -> list[str]:
    """Without modifiers, but for two."""
    names = [re.sub(r"^@!?\w+\s+", "", instruction).split()[0] for instruction in code]
    return [x if x in ("WARPGROUP.ARRIVE", "MUFU.EX2") else x.split(".")[0] for x in names]


def _innermost(code: list[tuple[int, str]]) -> list[set[int]]:
    """The loops that multiply matrices and hold no other such loop, as numbers of instructions.

    A branch back closes a loop if every way to it leads through its target; the loop is what
    reaches the branch without passing the target. Where the code lies says less: waits for a
    barrier stand behind the kernel's end and jump back into the middle of a loop.
    """
    numbers = {address: i for i, (address, _) in enumerate(code)}
    before: list[list[int]] = [[] for _ in code]
    backward = []
    for i, (_, instruction) in enumerate(code):
        if not re.fullmatch(r"(BRA(\.U)? 0x\w+|EXIT|RET.*)", instruction) and i + 1 < len(code):
            before[i + 1].append(i)
        branch = re.search(r"\b(?:BRA|CALL)\b.*\b(0x[0-9a-f]+)$", instruction)
        if branch:
            target = numbers[int(branch[1], 16)]
            before[target].append(i)
            if target <= i:
                backward.append((i, target))
    loops = []
    for branch_at, target in backward:
        loop, waiting = {target}, [branch_at]
        while waiting:
            i = waiting.pop()
            if i not in loop:
                loop.add(i)
                waiting += before[i]
        multiplies = any(re.search(r"\b(HMMA|HGMMA|UTCHMMA)\b", code[i][1]) for i in loop)
        if multiplies and (0 not in loop or target == 0):
            loops.append(loop)
    return [loop for loop in loops if not any(other < loop for other in loops)]


def overwritten(code: list[tuple[int, str]]) -> list[str]:
    """What writes the first operand of an HGMMA, where that is in registers, before it is awaited.

    Triton leaves products under way while it goes on. That nothing touches their registers in the
    meantime is up to the order in which the kernel is written.
    """
    numbers = {address: i for i, (address, _) in enumerate(code)}
    found = []
    for i, (_, product) in enumerate(code):
        operand = re.search(r"HGMMA\S* R\d+, R(\d+), gdesc", product)
        if not operand:
            continue
        held = range(int(operand[1]), int(operand[1]) + 4)
        seen, waiting = set(), [i + 1]
        while waiting:
            j = waiting.pop()
            if j in seen or re.search(r"WARPGROUP\.DEPBAR|\bEXIT\b", code[j][1]):
                continue
            seen.add(j)
            written = re.match(r"(?:@!?\w+ )?(?!ST|HGMMA)\S+ R(\d+)\b", code[j][1])
            if written and int(written[1]) in held:
                found.append(code[j][1])
                continue
            branch = re.search(r"\bBRA\b.*\b(0x[0-9a-f]+)$", code[j][1])
            if branch:
                waiting.append(numbers[int(branch[1], 16)])
            if not branch or code[j][1].startswith("@"):
                waiting.append(j + 1)
    return found


def _no_interpreter() -> None:
    os.environ["TRITON_INTERPRET"] = "0"


@contextmanager
def compilers() -> Iterator[ProcessPoolExecutor]:
    """Processes that compile."""
    context = multiprocessing.get_context("spawn")  # where triton is not imported yet
    pool = ProcessPoolExecutor(2, mp_context=context, initializer=_no_interpreter)
    yield pool
    pool.shutdown(cancel_futures=True)
