from __future__ import annotations

import struct
from pathlib import Path

from kvevict_demo.picture import draw_comparison


def test_picture_is_written_as_png(tmp_path: Path) -> None:
    requests_per_s = {"stock": [0.5, 0.6, 0.4], "nothing compressed": [0.6, 0.7], "sgl-kvevict": [2.0, 2.5, 1.5]}
    fitting = {"stock": 5, "nothing compressed": 5, "sgl-kvevict": 25}
    path = draw_comparison(fitting, requests_per_s, "a title", tmp_path / "new" / "demo.png")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 800
    assert height > 400
