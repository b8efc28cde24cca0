"""Which bytes of shared memory WGMMAs read, from PTX: nothing runs on a GPU.

Descriptors are computed from a thread's number, from the address of shared memory, which is 0 here,
and from counters that loops advance. A register that is written more than once is such a counter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_WORD = (1 << 32) - 1


@dataclass(frozen=True)
class Product:
    """A WGMMA: columns of its result, registers of its descriptors."""

    columns: int
    descriptors: tuple[str, ...]


class Ptx:
    """PTX, and its values for a thread."""

    def __init__(self, text: str) -> None:
        self._definitions: dict[str, list[tuple[str, str]]] = {}
        self.products: list[Product] = []
        for line in map(str.strip, text.splitlines()):
            if line.startswith("wgmma.mma_async"):
                columns = re.search(r"n(\d+)k16", line)
                assert columns is not None
                self.products.append(Product(int(columns[1]), tuple(re.findall(r"%rd\d+", line))))
                continue
            halves = re.match(r"mov\.b64\s+\{(%\w+), (%\w+)\}, (.*);", line)
            if halves:
                self._define(halves[1], "low", halves[3])
                self._define(halves[2], "high", halves[3])
                continue
            found = re.match(r"([\w.:]+)\s+(%\w+)(?:\|%\w+)?, (.*);", line)
            if found and not found[1].startswith(("st.", "cp.", "mbarrier", "red.", "bar")):
                self._define(found[2], found[1], found[3])

    def _define(self, register: str, name: str, operands: str) -> None:
        self._definitions.setdefault(register, []).append((name, operands))

    def counters(self, register: str) -> set[str]:
        """What a value depends on, and is not known."""
        if not register.startswith("%") or register == "%tid.x":
            return set()
        definitions = self._definitions[register]
        if len(definitions) > 1:
            return {register}
        name, operands = definitions[0]
        assert not name.startswith("ld."), f"{register} is loaded"
        words = re.findall(r"%[\w.]+", operands)
        if _arity(name) == 1:
            words = words[:1]
        return set().union(*(self.counters(each) for each in words))

    def value(self, operand: str, thread: int, known: Mapping[str, int]) -> int:
        """Of a register or number; `known` says what counters are."""
        operand = operand.strip()
        if operand == "%tid.x":
            return thread
        if not operand.startswith("%"):
            return 0 if operand.startswith("__dynamic") else int(operand, 0)
        if operand in known:
            return known[operand]
        ((name, operands),) = self._definitions[operand]
        of = [self.value(x, thread, known) for x in operands.strip("{}").split(",")[: _arity(name)]]
        return _compute(name, operands, of)


def _arity(name: str) -> int:
    return 1 if name.startswith(("shfl", "redux")) else 3  # of numbers that a warp has in common


def _compute(name: str, operands: str, of: list[int]) -> int:
    mask = (1 << 64) - 1 if "64" in name or ".wide" in name else _WORD
    kind = name.split(".")[0]
    if operands.startswith("{"):
        return (of[0] & _WORD) | (of[1] & _WORD) << 32
    if kind in ("mov", "shfl", "redux", "cvt", "low", "high"):
        return of[0] >> 32 & _WORD if kind == "high" else of[0] & (_WORD if kind == "low" else mask)
    results = {
        "add": lambda: of[0] + of[1],
        "sub": lambda: of[0] - of[1],
        "mul": lambda: (of[0] & mask) * (of[1] & mask) >> (32 if ".hi" in name else 0),
        "mad": lambda: of[0] * of[1] + of[2],
        "shl": lambda: of[0] << of[1],
        "shr": lambda: (of[0] & mask) >> of[1],
        "and": lambda: of[0] & of[1],
        "or": lambda: of[0] | of[1],
        "xor": lambda: of[0] ^ of[1],
        "not": lambda: ~of[0],
    }
    return results[kind]() & mask


def swizzled(address: int, line: int) -> int:
    """Chunks of 16 bytes are exchanged in lines of 128, 64 or 32 bytes, by the number of the line.

    A pattern has 8 of 128 bytes, and as many bytes of shorter ones are one line of it.
    """
    return address ^ ((address >> 7 & (line // 16 - 1)) << 4)


def line_of(columns: int) -> int:
    """Bytes of a line where so many 16-bit columns are swizzled as widely as they allow."""
    return next(line for line in (128, 64, 32) if columns * 2 % line == 0)


def element(descriptor: int, row: int, inner: int, transposed: bool) -> int:
    """The address of a 16-bit number of an operand, (row, inner) of 16 inner columns.

    See "Matrix-descriptor" and "canonical layouts" in the PTX documentation.
    """
    line = {1: 128, 2: 64, 3: 32}[descriptor >> 62]
    start, leading, stride = ((descriptor >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    if transposed:
        at = start + row * 2 // line * leading + row * 2 % line
        at += inner // 8 * stride + inner % 8 * line
    else:
        at = start + row // 8 * stride + row % 8 * line + inner * 2
    return swizzled(at, line)
