"""Read the machine code of a compiled kernel: the loop with the products, and what loads wait for.

The loop's common path is its shortest one: blocks that are branched over (masks, say) are not in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

PRODUCTS = re.compile(r"\b(HGMMA|HMMA|UTCHMMA|UTCQMMA|QGMMA)")


@dataclass(frozen=True)
class Instruction:
    """One instruction."""

    address: int
    text: str

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


def parse(sass: str) -> list[Instruction]:
    """Instructions of ``cuobjdump --dump-sass``."""
    pattern = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/")
    return [Instruction(int(m[1], 16), m[2]) for m in pattern.finditer(sass)]


def common_path(code: list[Instruction]) -> list[Instruction]:
    """Instructions of one pass through the innermost loop with products, on its shortest path; [] without a loop."""
    return next(iter(_innermost(code)), [])


def copies_in_flight(code: list[Instruction]) -> int | None:
    """Groups of asynchronous copies that no innermost loop with products waits for; None without such a wait."""
    waits = (re.search(r"^DEPBAR\.LE SB0, 0x(\w+)", one.text) for path in _innermost(code) for one in path)
    return min((int(found[1], 16) for found in waits if found), default=None)


def _innermost(code: list[Instruction]) -> list[list[Instruction]]:
    """Shortest paths through the loops with products that have no other such loop inside, the shortest loop first.

    Code for warps that diverged (``BRA.DIV``) comes back into a loop, but no warp gets there: that is no loop.
    """
    place = {one.address: i for i, one in enumerate(code)}
    products = [i for i, one in enumerate(code) if PRODUCTS.search(one.text)]
    loops = [(place[one.target], i) for i, one in enumerate(code) if one.target in place and place[one.target] < i]
    found: dict[tuple[int, int], list[Instruction]] = {}
    for first, last in sorted(loops, key=lambda loop: loop[1] - loop[0]):
        is_outer = any(first <= inner[0] and inner[1] <= last for inner in found)
        is_hot = any(first <= i <= last for i in products)
        if is_hot and not is_outer and (path := _shortest(code, place, first, last)):
            found[first, last] = path
    return [*found.values()]


def _shortest(code: list[Instruction], place: dict[int, int], first: int, last: int) -> list[Instruction]:
    """The fewest instructions from ``first`` to ``last``; blocks behind the loop may be among them. [] if none lead."""
    previous, queue = {first: -1}, [first]
    for i in queue:  # every step costs 1: breadth first
        one = code[i]
        following = [place[one.target]] if one.target in place else []
        if one.is_conditional or (one.target is None and one.opcode != "EXIT"):
            following.append(i + 1)
        for j in following:
            if j < len(code) and j not in previous:
                previous[j] = i
                queue.append(j)
    path, i = [], last
    while i in previous:
        path.append(code[i])
        i = previous[i]
    return path[::-1]


FIRST_KEY = re.compile(r"\bLDGSTS\S*\.128\b")
"""Asynchronous copies of 16 bytes: rows of K and V; indices are copied 4 bytes at a time."""
WAIT = re.compile(r"\bACQBULK\b")
"""The instruction with which a kernel waits for the one before it (``griddepcontrol.wait``)."""
LOADS = ("LDG", "LD", "LDGSTS")
_REGISTER = re.compile(r"\bU?[RP]\d+\b")


def loads_before(code: list[Instruction], pattern: re.Pattern[str] = FIRST_KEY) -> int | None:
    """Loads from global memory that the first match waits for, one after the other; None without a match.

    Along all paths that only go forward, the longest one counts. An address depends on what its registers depend on,
    and on the branches before it; what is copied to shared memory is known to whoever reads there.
    """
    return next((depth for one, depth in _depths(code) if pattern.search(one.text)), None)


def loads_behind(code: list[Instruction], pattern: re.Pattern[str] = WAIT) -> int:
    """Loads from global memory, one after the other, from the first match on, or of all without one.

    A pass of each loop counts; paths are those of :func:`loads_before`.
    """
    first = next((i for i, one in enumerate(code) if pattern.search(one.text)), 0)
    return max((depth + 1 for one, depth in _depths(code[first:]) if one.opcode in LOADS), default=0)


def _depths(code: list[Instruction]) -> Iterator[tuple[Instruction, int]]:
    """Every instruction that is reached, in order, and how many loads it waits for, one after the other."""
    place = {one.address: i for i, one in enumerate(code)}
    states: dict[int, dict[str, int]] = {0: {}}
    for i, one in enumerate(code):
        if i not in states:
            continue
        state = states.pop(i)
        names, sources = _operands(one)
        depth = max([state.get("branches", 0), *(state.get(name, 0) for name in sources)])
        yield one, depth
        if one.opcode in LOADS:
            depth += 1
        if one.opcode == "LDGSTS":
            state["shared"] = max(state.get("shared", 0), depth)
        if one.opcode in ("LDS", "LDSM"):
            depth = max(depth, state.get("shared", 0))
        state |= {name: max(depth, state.get(name, 0)) if one.is_conditional else depth for name in names}
        if one.opcode in ("BRA", "EXIT") and one.is_conditional:
            state["branches"] = max(state.get("branches", 0), depth)
        following = [place[one.target]] if one.target in place else []
        if one.is_conditional or (one.target is None and one.opcode != "EXIT"):
            following.append(i + 1)
        for j in following:
            if j > i:
                known = states.setdefault(j, {})
                known |= {name: max(value, known.get(name, 0)) for name, value in state.items()}


def _operands(one: Instruction) -> tuple[list[str], list[str]]:
    """Registers and predicates that an instruction writes, and those that it reads."""
    guard = re.match(r"@!?(U?P\d+)\s+", one.text)
    text = one.text[guard.end() :] if guard else one.text
    operands = text.partition(" ")[2].split(", ")
    sources = [guard[1]] if guard else []
    if one.opcode in ("LDGSTS", "STG", "STS", "BRA", "EXIT", "ST"):
        return [], sources + _REGISTER.findall(text)
    num_written = 1
    while num_written < len(operands) and re.fullmatch(r"U?P(\d+|T)", operands[num_written]):
        num_written += 1
    written = [name for part in operands[:num_written] for name in _REGISTER.findall(part)]
    if written and re.search(r"\.(64|128|WIDE)\b", text.partition(" ")[0]):
        kind, number = re.sub(r"\d", "", written[0]), int(re.sub(r"\D", "", written[0]))
        written += [f"{kind}{number + k}" for k in range(1, 4 if ".128" in text.partition(" ")[0] else 2)]
    return written, sources + [name for part in operands[num_written:] for name in _REGISTER.findall(part)]
