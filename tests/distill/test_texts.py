from __future__ import annotations

import pytest

from sgl_kvevict.distill.texts import KINDS, passages_of, texts_of_folder, training_texts
from sgl_kvevict.errors import ConfigError


def test_every_python_has_texts_of_all_kinds_and_lengths():
    lengths = [4000, 2000, 3000] * 4
    texts = training_texts(lengths)
    assert list(map(len, texts)) == lengths and texts == training_texts(lengths)
    assert len(set(texts)) == len(texts)
    assert "def " in texts[4] and "|" in texts[5]
    assert training_texts([500], ["code"])[0] == texts[KINDS.index("code")][:500]


def test_passages_of_a_folder_come_from_all_files_in_turn(tmp_path):
    (tmp_path / "deep").mkdir()
    for name, letter in (("a.txt", "a"), ("deep/b.txt", "b")):
        (tmp_path / name).write_text(letter * 25)
    assert texts_of_folder(tmp_path, [10, 5, 10]) == ["a" * 10, "b" * 5, "a" * 10]
    assert texts_of_folder(tmp_path, [10] * 9)[-1] == "b" * 5


def test_texts_come_from_a_folder_or_from_python(tmp_path):
    texts = passages_of(None)
    assert len(texts) == 17 and {len(text) for text in texts} == {2000, 4000, 8000, 16000}
    (tmp_path / "one.txt").write_text("word " * 3000)
    with pytest.raises(ConfigError, match="score_texts: got 3 passages of 2,000 characters or more"):
        passages_of(str(tmp_path))
    for number in range(17):
        (tmp_path / f"{number:02}.txt").write_text(f"{number:02} " * 6000)
    assert [text[:2] for text in passages_of(str(tmp_path))] == [f"{number:02}" for number in range(17)]
    (tmp_path / "03.txt").write_bytes(bytes([0xFF, 0xFE, 0xFF]))
    with pytest.raises(ConfigError, match=r"score_texts: .* cannot be read"):
        passages_of(str(tmp_path))
