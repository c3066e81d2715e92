"""The reader of machine code, on a few instructions as cuobjdump prints them."""

from __future__ import annotations

from helpers.sass import common_path, cycles, loads_before, loads_behind, parse


def line(address: int, text: str, *, stall: int = 1, sets: int = 7, waits: int = 0) -> str:
    upper = (stall | sets << 5 | waits << 11) << 41
    return f"        /*{address:04x}*/  {text} ;   /* 0x{0:016x} */\n     /* 0x{upper:016x} */\n"


LOOP = "".join(
    [
        line(0x00, "MOV R1, R2", stall=9),
        line(0x10, "LDS R4, [R3]", sets=0, stall=2),
        line(0x20, "@P0 BRA 0x80", stall=5),  # masks, behind the loop
        line(0x30, "FADD R5, R4, R4", waits=1, stall=4),
        line(0x40, "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24", sets=1, stall=3),
        line(0x50, "MUFU.EX2 R6, R5", sets=2, stall=1),
        line(0x60, "MUFU.EX2 R7, R5", sets=2, stall=1),
        line(0x70, "@P1 BRA 0x10", waits=0b110, stall=6),
        line(0x80, "FSEL R4, R4, R8, P2", stall=4),
        line(0x90, "BRA 0x30", stall=5),
        line(0xA0, "EXIT", stall=5),
    ]
)


def test_the_shortest_pass_leaves_out_what_is_branched_over() -> None:
    path = common_path(parse(LOOP))
    assert [one.address for one in path] == [0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70]
    assert [one.opcode for one in path[:2]] == ["LDS", "BRA"]


def test_cycles_of_a_warp_alone() -> None:
    """Load 2, branch 5, wait until 30, sum 4, product 3 (its result is not waited for), MUFU 1, the next 8 later,
    and its result 20 later, branch 6."""
    assert cycles(common_path(parse(LOOP))) == 30 + 4 + 3 + 8 + 20 + 6


def test_what_only_diverged_warps_reach_is_no_loop() -> None:
    diverged = LOOP + line(0xB0, "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24") + line(0xC0, "BRA 0x70")
    assert common_path(parse(diverged)) == common_path(parse(LOOP))


def test_code_without_products_has_no_loop() -> None:
    assert common_path(parse(LOOP.replace("HGMMA", "FFMA"))) == []


CHAIN = [
    "LDG.E.64 R2, desc[UR4][R8.64]",  # 1
    "LDG.E R9, desc[UR4][R8.64+0x8]",  # 1
    "IMAD.WIDE R4, R9, 0x4, R2",
    "LDG.E R6, desc[UR4][R4.64]",  # 2
    "LDGSTS.E [R30], desc[UR4][R10.64]",  # 1, to shared memory
    "LDS R7, [R30]",
    "IADD3 R12, P0, R6, R7, RZ",
    "LDGSTS.E.BYPASS.128 [R31], desc[UR4][R12.64]",
    "EXIT",
]


def code_of(texts: list[str]) -> str:
    return "".join(line(16 * i, text) for i, text in enumerate(texts))


def test_loads_that_wait_for_one_another_are_counted() -> None:
    """Two in the longest chain of registers; one through shared memory; those beside each other count once."""
    assert loads_before(parse(code_of(CHAIN))) == 2
    shared = [text.replace("R10.64", "R4.64") for text in CHAIN]
    assert loads_before(parse(code_of([text.replace("P0, R6, R7", "P0, R7, R7") for text in shared]))) == 2
    assert loads_before(parse(code_of([text.replace("P0, R6, R7", "P0, R7, R7") for text in CHAIN]))) == 1
    assert loads_before(parse(code_of(CHAIN[:-2]))) is None


def test_a_branch_waits_for_what_it_depends_on() -> None:
    """A load behind a branch whose predicate was loaded comes after that load; one before it does not."""
    behind = [
        "LDG.E R2, desc[UR4][R8.64]",
        "ISETP.GE.AND P0, PT, R2, RZ, PT",
        "@P0 EXIT",
        "LDG.E R12, desc[UR4][R10.64]",
        "LDGSTS.E.128 [R31], desc[UR4][R12.64]",
    ]
    assert loads_before(parse(code_of(behind))) == 2
    assert loads_before(parse(code_of([behind[3], *behind[:3], behind[4]]))) == 1


def test_loads_behind_a_wait_depend_on_nothing_before_it() -> None:
    """What was loaded before the wait is there; where warps may diverge, they go on with the next instruction."""
    code = ["LDG.E R2, desc[UR4][R8.64]", "ACQBULK", "BRA.DIV UR4, 0x0", "LDG.E R6, desc[UR4][R2.64]"]
    assert loads_behind(parse(code_of([*code, "EXIT"]))) == 1
    assert loads_behind(parse(code_of([*code, "LDG.E R7, desc[UR4][R6.64]", "EXIT"]))) == 2
    assert loads_behind(parse(code_of([code[0], code[3], "EXIT"]))) == 2, "without a wait all count"
