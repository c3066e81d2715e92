from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from kvevict_demo.picture import draw_kept


def kept(rows: int, bins: int = 20) -> dict[str, Any]:
    share = [[(row + column) % 5 / 4 for column in range(bins)] for row in range(rows)]
    return {"start": 0, "end": 1000, "num_bins": bins, "share": share}


def test_picture_is_written_as_png(tmp_path: Path) -> None:
    path = draw_kept(kept(rows=12), num_layers=4, title="a title", path=tmp_path / "new" / "kept.png")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 800
    assert height > 500


@pytest.mark.parametrize("rows", [0, 10])
def test_rows_must_be_a_multiple_of_the_layers(tmp_path: Path, rows: int) -> None:
    with pytest.raises(ValueError, match=f"{rows} rows.*4 layers"):
        draw_kept(kept(rows), num_layers=4, title="", path=tmp_path / "kept.png")


def test_every_row_must_have_all_bins(tmp_path: Path) -> None:
    broken = kept(rows=4)
    broken["share"][2].pop()
    with pytest.raises(ValueError, match=r"\[19, 20\] bins, expected 20"):
        draw_kept(broken, num_layers=4, title="", path=tmp_path / "kept.png")
