from __future__ import annotations

from pathlib import Path

import pytest

from sgl_kvevict.cli.learn import LENGTHS, SPARE_TEXTS, _passages
from sgl_kvevict.distill.texts import KINDS, texts_of_folder, training_texts
from sgl_kvevict.errors import ConfigError


def test_every_python_has_texts_of_all_kinds_and_lengths() -> None:
    lengths = [4000, 2000, 3000] * 4
    texts = training_texts(lengths)
    assert list(map(len, texts)) == lengths and texts == training_texts(lengths)
    assert len(set(texts)) == len(texts)
    assert "def " in texts[4] and "|" in texts[5]
    assert training_texts([500], ["code"])[0] == texts[KINDS.index("code")][:500]


def test_passages_of_a_folder_come_from_all_files_in_turn(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name, letter in (("a.txt", "a"), ("deep/b.txt", "b")):
        (tmp_path / name).write_text(letter * 25)
    assert texts_of_folder(tmp_path, [10, 5, 10]) == ["a" * 10, "b" * 5, "a" * 10]
    assert texts_of_folder(tmp_path, [10] * 9)[-1] == "b" * 5


def test_a_folder_with_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 20_000)
    assert len(_passages(tmp_path, 1)) >= 2
    with pytest.raises(ConfigError, match=r"--texts: got 3 passages of 2,000 characters or more .* allowed: 9 or more"):
        _passages(tmp_path, 8)
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        _passages(tmp_path, 1)
    assert len(_passages(None, 8)) == 9 + SPARE_TEXTS and LENGTHS
