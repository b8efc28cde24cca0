"""Step 16: what Hopper adds: a guided reading of our fast kernels.

The kernel of step 7 is correct on every GPU, and leaves much of an H100 idle. The algorithm is not
to blame: it is the same online softmax. What is missing is overlap. One program loads, multiplies
and exponentiates in turn, and each unit of the chip waits for the others. Hopper has hardware to
let them run at once, and `ring_flash_attn/kernels/triton/hopper/` uses it, in Gluon, Triton's lower
level. Open its files beside this page. Each section says what to read.

How much is there to overlap? A pair of query and key costs 4 d FLOPs in tensor cores and one power
of two in the special function units. An SM does some 4,096 dense FLOPs in bf16 a clock, and 16
powers. With d = 128 a pair takes 512 / 4096 = 1/8 of a clock for products and 1/16 for its power.
In turn they take 3/16; at once, 1/8. That third is what most of this machinery is for.

1. TMA: copies that nobody waits for

    read    host.py: descriptor
    read    ../../tma.py: fit, tma_strides
    read    forward.py: produce, load_tile, inside

A tensor descriptor tells the Tensor Memory Accelerator a tensor's shape, strides, and the box to
copy. One thread says "box at (batch, head, row)", and the hardware computes addresses, moves the
bytes to shared memory and lays them out as the tensor cores want them. No registers, no address
arithmetic, no masks: rows beyond the tensor's end arrive as zeros. It has rules: addresses and
strides are multiples of 16 bytes (`fit` copies what is not). And a document's last block would run
into the next document: `inside` moves it back so that it ends where the keys do, and a mask hides
what was loaded twice.

2. mbarriers: who waits for whom

    read    primitives.py: barriers
    read    forward.py: k_full, k_empty, release, await_release

An mbarrier is a word in shared memory that counts arrivals and flips a phase bit when all are
there. For a copy it counts bytes: TMA itself arrives. Every buffer has two, "full" and "empty". The
producer waits for empty and fills; a consumer waits for full and, when it has read, arrives at
empty. With STAGES buffers in a circle, block i lives in stage i % STAGES and waits for phase (i //
STAGES) & 1. The docstring of forward.py has the table of all of them: read it with the code beside
it.

3. WGMMA: products that run while you do something else

    read    forward.py: run, warpgroup_mma, warpgroup_mma_wait
    read    backward.py: run, half_dq

Four warps, a warpgroup, issue one product of 64 rows. Operands come from shared memory (the left
one from registers, if you like) and the result goes to registers, all of it asynchronously. In
`run` the product q · kᵀ of this block and p · v of the block before are both issued before anybody
waits; `warpgroup_mma_wait(1)` means "until at most one is still running", which is how softmax
starts on s while p · v goes on. Registers of a pending product must not be touched: that is what
deps=… says.

4. Warp specialisation: one program, three jobs

    read    forward.py: forward_kernel, produce, consume, attend
    read    host.py: launch, _REGISTERS

`warp_specialize` gives groups of warps different functions. One warp is the producer: it waits,
issues copies, and needs 24 registers a thread. Two warpgroups are consumers and need 240: 64 for
the output, 64 for scores, 32 for probabilities, and the rest. All begin with 168; then the producer
gives up what it does not need. In the backward pass two more warps do nothing but add dQ to memory.

5. Ping-pong: softmax of one, products of the other

    read    forward.py: await_turn, pass_turn, skip_item

The two consumers have 64 queries each and share keys and values. If both multiplied at once and
then both took powers, each unit would idle half of the time. Named barriers make them take turns:
while one has the tensor cores, the other computes softmax. A consumer passes the turn as soon as
its products are issued; with narrow heads, whose products are short, when they are complete.

6. Conditional rescaling: a maximum that need not be the maximum

    read    forward.py: softmax, vote_above, LIMIT, eight_sums

Step 4 subtracts the running maximum so that powers do not overflow. Any number near it does as
well: lse = m + log Σ exp(s − m) holds for every m. So `run` takes powers above the old m at once,
without looking for a new maximum, and only if a sum exceeds LIMIT does it go back, find the maximum
and rescale the output. Most blocks never do. (A block with a mask, and the first, always look.)

7. Masks at the edge alone

    read    primitives.py: in_band
    read    forward.py: attend, masked, MASKED
    read    backward.py: span_of, edge, whole

Step 9 again. `attend` calls `run` three times: with a mask at the left edge of a window, without
one in the middle, with one at the diagonal. MASKED is a constant for the compiler, so the middle
part has no trace of a mask. The mask is a band, low ≤ key − query ≤ high: causal, windows, packed
documents, zigzag and stripe all come down to these two numbers.

8. Persistent kernels and the tile scheduler

    read    primitives.py: TileScheduler, Item, place, first_item, next_item, write_item, read_item
    read    ../../scheduler.py: counter, free_processors

There are as many programs as SMs, and each does one work item after the other. The producer takes
the next number from a counter in memory by an atomic add, looks up block, batch and head, and
leaves them in shared memory for the consumers. So the next item's queries arrive while the last
one's output is still being written, a late SM gets fewer items, and the longest come first so that
the end is even. `place` keeps heads that share keys close in time, for the L2 cache.

9. What the ring asks of it

    read    forward.py: CARRY, FIRST, LAST, SINGLE_LAUNCH, prefetch_state
    read    primitives.py: barrier_of_copy, clear_short

Step 13 merges the results of W launches. Here a launch begins with the state (out, lse) of the one
before as the start of its online softmax: m from lse, the sum from CARRY. The merge costs no pass
over memory. A sink (step 10) is the same thing: a state that has an lse and no output yet. FIRST
and LAST say whether there is a state to begin with, and whether the output is final.

10. Backward: five products and one sum that is nobody's

    read    backward.py: produce, consume, gradients, half_dq, put_dq, add, wait_for_block
    read    host.py: ordered_backward
    read    ../../row_stats.py: row_stats
    read    ../../scheduler.py: split

A work item is 128 keys, so dK and dV stay in registers, over all query heads of the group (step
10). Scores are computed transposed, (keys, queries): p and ds are then left operands in registers,
and only ds goes through shared memory, for dQ. dQ belongs to queries that other programs work on,
too: each block's part is added to fp32 in memory by TMA reductions, in whatever order they come.
That is the one with atomics of step 8; `ordered_backward` is the one with two kernels, where sums
need a fixed order. dQ of a block is computed one block later, so that neither consumer waits for
the other one's ds.

Questions. The answers are in the files.

    Why does consumer 1 pass the turn before it has done anything?
    Why is lse stored four times for the backward pass?
    What would go wrong if the producer did not wait for item_empty?
    Why is a row's sum kept as eight sums?
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "kernels" / "triton" / "hopper"
FLOPS, POWERS = 4096, 16  # of an SM in a clock: dense products in bf16, powers of two
_SECTION = re.compile(r"^(\d+\. .+)$|^    read +([\w./]+\.py): (.+)$", re.MULTILINE)


def clocks(d: int, queries: int = 64, keys: int = 128) -> tuple[float, float]:
    """Of a block's two products in an SM's tensor cores, and of its powers of two."""
    return 4 * d * queries * keys / FLOPS, queries * keys / POWERS


def reading() -> list[tuple[str, str, list[str]]]:
    """(section, file, names) of each line above that says what to read."""
    found, section = [], ""
    for title, file, names in _SECTION.findall(__doc__ or ""):
        if title:
            section = title
        else:
            found.append((section, file, names.split(", ")))
    return found


@cache
def places(file: str) -> dict[str, int]:
    """Each name that a file defines or uses, and the line where it does so first.

    Definitions before uses; read from the source, which imports neither Triton nor a GPU.
    """
    defined: dict[str, int] = {}
    used: dict[str, int] = {}
    for node in ast.walk(ast.parse((FOLDER / file).read_text(encoding="utf-8"))):
        names, name = used, ""
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names, name = defined, node.name
        elif isinstance(node, ast.Name):
            names, name = (used if isinstance(node.ctx, ast.Load) else defined), node.id
        elif isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        if name:
            line: int = node.lineno  # type: ignore[attr-defined]
            names[name] = min(line, names.get(name, line))
    return used | defined


def check() -> None:
    """Every name that the reading speaks of is where it says."""
    listed = reading()
    assert len(listed) > 10, f"{len(listed)} lines say what to read"
    for section, file, names in listed:
        missing = sorted(set(names) - set(places(file)))
        assert not missing, f"section {section!r}: {file} has no {', '.join(missing)}"
    known = {name for _, file, _ in listed for name in places(file)}
    spoken_of = set(re.findall(r"`(\w+)(?:\(\w+\))?`", __doc__ or ""))
    assert spoken_of <= known, f"no file has {', '.join(sorted(spoken_of - known))}"


def show() -> None:
    """What there is to overlap; then what to read, by section, with line numbers."""
    print("clocks of an SM for a block of 64 queries × 128 keys")
    print("head dimension   products   powers   in turn   at once")
    for d in (64, 128, 256):
        products, powers = clocks(d)
        both = f"{products + powers:9.0f} {max(products, powers):9.0f}"
        print(f"{d:14} {products:10.0f} {powers:8.0f} {both}")
    print()
    print(FOLDER.relative_to(FOLDER.parents[3]).as_posix())
    last = ""
    for section, file, names in reading():
        if section != last:
            print(f"\n{section}")
            last = section
        lines = places(file)
        for name in names:
            print(f"  {file + ':' + str(lines[name]):20} {name}")


def main() -> None:
    check()
    show()


if __name__ == "__main__":
    main()
