"""Read the machine code of a compiled kernel: the loop with the products, and how long a warp takes for one pass.

The loop's common path is its shortest one: blocks that are branched over (masks, say) are not in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PRODUCTS = re.compile(r"\b(HGMMA|HMMA|UTCHMMA|UTCQMMA|QGMMA)")
LATENCY = {"MUFU": 20, "SHFL": 24, "LDS": 30, "LDSM": 33, "LDG": 500, "LD": 500, "S2R": 20, "S2UR": 20, "R2UR": 12}
"""Cycles until a result of variable latency is there, by published measurements of Volta to Hopper; others: 12."""
SHARED_PIPE = {"MUFU": 8, "SHFL": 2, "F2F": 8}
"""Cycles between two instructions of a unit with fewer lanes than a warp has threads."""


@dataclass(frozen=True)
class Instruction:
    """One instruction and its control bits."""

    address: int
    text: str
    control: int

    @property
    def opcode(self) -> str:
        """Name without suffixes and predicate."""
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0].partition(".")[0]

    @property
    def is_conditional(self) -> bool:
        """Whether the instruction may be skipped."""
        return self.text.startswith("@")

    @property
    def target(self) -> int | None:
        """Where a branch leads."""
        found = re.search(r"\bBRA(?:\.\w+)*\s+(?:!?U?P\w+,\s*)?`?\(?0x([0-9a-f]+)", self.text)
        return int(found[1], 16) if found else None

    @property
    def stall(self) -> int:
        """Cycles before the next instruction of the warp."""
        return max(1, self.control & 15)

    @property
    def sets(self) -> int:
        """Barrier that is released when the result is there; 7: none."""
        return self.control >> 5 & 7

    @property
    def waits(self) -> list[int]:
        """Barriers that must be released before the instruction starts."""
        return [i for i in range(6) if self.control >> 11 & 1 << i]


def parse(sass: str) -> list[Instruction]:
    """Instructions of ``cuobjdump --dump-sass``, whose second line of each holds the upper half of its encoding."""
    pattern = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/\s*\n\s*/\* 0x([0-9a-f]{16}) \*/")
    return [Instruction(int(m[1], 16), m[2], int(m[3], 16) >> 41) for m in pattern.finditer(sass)]


def common_path(code: list[Instruction]) -> list[Instruction]:
    """Instructions of one pass through the innermost loop with products, on its shortest path; [] without a loop."""
    place = {one.address: i for i, one in enumerate(code)}
    loops = [
        (place[one.target], i) for i, one in enumerate(code) if one.target is not None and one.target < one.address
    ]
    products = [i for i, one in enumerate(code) if PRODUCTS.search(one.text)]
    hot = [(first, last) for first, last in loops if any(first <= i <= last for i in products)]
    if not hot:
        return []
    first, last = min(hot, key=lambda loop: loop[1] - loop[0])
    # Blocks that were moved behind the loop come back to it, so every address may be on the path.
    distance, previous, queue = {first: 0}, {first: -1}, [first]
    for i in queue:  # every step costs 1: breadth first
        if i == last:
            break
        one, following = code[i], []
        if one.target is None or one.is_conditional:
            following.append(i + 1)
        if one.target is not None and one.target in place:
            following.append(place[one.target])
        for j in following:
            if j < len(code) and j not in distance:
                distance[j], previous[j] = distance[i] + 1, i
                queue.append(j)
    path, i = [], last
    while i >= 0:
        path.append(code[i])
        i = previous[i]
    return path[::-1]


def cycles(path: list[Instruction]) -> int:
    """Cycles of one warp alone for a path: stalls, results of variable latency, narrow units; products take none."""
    now, ready, free = 0, [0] * 8, dict.fromkeys(SHARED_PIPE, 0)
    for one in path:
        now = max([now, *(ready[i] for i in one.waits)])
        if one.opcode in free:
            now = max(now, free[one.opcode])
            free[one.opcode] = now + SHARED_PIPE[one.opcode]
        if one.sets < 6 and not PRODUCTS.search(one.text):
            ready[one.sets] = max(ready[one.sets], now + LATENCY.get(one.opcode, 12))
        now += one.stall
    return now
