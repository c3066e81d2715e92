"""The reader of machine code, on a few instructions as cuobjdump prints them."""

from __future__ import annotations

from helpers.sass import common_path, cycles, parse


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


def test_code_without_products_has_no_loop() -> None:
    assert common_path(parse(LOOP.replace("HGMMA", "FFMA"))) == []
