from __future__ import annotations

import pytest
from kvevict_quality.sample import Prompts


class WordTokenizer:
    """One id per distinct word or separator; a chat template of its own. Round trips are exact."""

    chat_template = "of apply_chat_template"

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        pieces = text.replace("\n", " \n ").replace("<", " <").replace(">", "> ").split(" ")
        return [self._id(piece) for piece in pieces if piece]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(self.words[i] for i in ids)

    def apply_chat_template(self, chat: list[dict[str, str]], **_: object) -> str:
        turns = "".join(f"<{message['role']}> {message['content']} <end>" for message in chat)
        return f"<system> Be brief. <end>{turns}<assistant>"

    def _id(self, piece: str) -> int:
        if piece not in self.words:
            self.words.append(piece)
        return self.words.index(piece)


@pytest.fixture
def prompts():
    return Prompts(WordTokenizer())
