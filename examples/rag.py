"""Retrieved documents that are ready before anybody asks: warm each of them once, then answer from compressed copies.

`sgl_kvevict.client.warm` has a document prefilled and compressed, and returns when that is done. A question then
pays for its own few tokens only. Retrieval itself is a count of shared words here.

    make serve                        # in another terminal
    .venv/bin/python examples/rag.py [URL]
"""

from __future__ import annotations

import re
import time

from openai import OpenAI
from station import API_KEY, HANDBOOK, TASK, cache_line, cache_of, server_url

from sgl_kvevict.client import warm

CHAPTERS = re.split(r"\n(?=\d+\. )", HANDBOOK)[1:]
DOCUMENTS = ["\n".join(CHAPTERS[begin:end]) for begin, end in ((0, 4), (4, 7), (7, 13))]
QUESTIONS = (
    "Where does the drinking water come from?",
    "Who is the captain of the Grey Heron?",
    "Where is the meeting point in case of fire?",
    "In what are the journals of former years kept?",
)


def retrieve(question: str) -> int:
    """The document that shares most words with the question; a word that several documents have counts less."""
    texts = [set(re.findall(r"[a-z]{4,}", document.lower())) for document in DOCUMENTS]
    asked = set(re.findall(r"[a-z]{4,}", question.lower()))
    return max(range(len(texts)), key=lambda n: sum(1 / sum(w in text for text in texts) for w in asked & texts[n]))


def prefix(document: str) -> list[dict[str, str]]:
    """The beginning of every chat about a document; it has to be the same text each time."""
    return [{"role": "system", "content": TASK + document}]


def main(url: str) -> None:
    """Warm all documents, then ask about them."""
    for number, document in enumerate(DOCUMENTS):
        begin = time.monotonic()
        warm(url, messages=prefix(document))
        print(f"document {number}: compressed after {time.monotonic() - begin:.1f} s")
    client = OpenAI(base_url=f"{url}/v1", api_key=API_KEY)
    for question in QUESTIONS:
        number = retrieve(question)
        messages = [*prefix(DOCUMENTS[number]), {"role": "user", "content": question}]
        begin = time.monotonic()
        reply = client.chat.completions.create(model="default", messages=messages, max_tokens=24, temperature=0)
        print(f"{question} {reply.choices[0].message.content}  [document {number}, {time.monotonic() - begin:.2f} s]")
    print(cache_line(cache_of(url)))


if __name__ == "__main__":
    main(server_url())
