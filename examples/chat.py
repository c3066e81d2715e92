"""A chat of many turns over the OpenAI API, streamed as it is written.

Every turn sends the whole conversation. The server finds all of it but the newest message in its cache: the system
message as compressed prefix, later turns behind it. The client is the plain `openai` package.

    make serve ARGS="-- --enable-cache-report"      # in another terminal
    .venv/bin/python examples/chat.py [URL]
"""

from __future__ import annotations

import time
from typing import Any

from openai import OpenAI
from station import API_KEY, HANDBOOK, TASK, cache_line, cache_of, server_url

TURNS = (
    "What is the name of the supply boat?",
    "What is the call sign of the station?",
    "Where is the spare key of the pantry?",
    "Where are the journals of former years kept?",
    "What is the name of the nearest town?",
)


def stream_turn(client: OpenAI, messages: list[Any]) -> str:
    """Print one answer while it comes, and what its prompt cost; return the answer."""
    begin = time.monotonic()
    first_s, text, usage = 0.0, "", None
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "stream_options": {"include_usage": True}}
    for chunk in client.chat.completions.create(model="default", messages=messages, stream=True, **options):
        piece = (chunk.choices[0].delta.content if chunk.choices else None) or ""
        first_s = first_s or (time.monotonic() - begin if piece else 0.0)
        print(piece, end="", flush=True)
        text, usage = text + piece, chunk.usage or usage
    details = usage.prompt_tokens_details  # None without the server's flag --enable-cache-report
    found = f"{details.cached_tokens:,}" if details else "unknown"
    print(f"  [first word after {first_s:.2f} s; {found} of {usage.prompt_tokens:,} tokens from the cache]")
    return text


def main(url: str) -> None:
    """Hold one conversation."""
    client = OpenAI(base_url=f"{url}/v1", api_key=API_KEY)
    messages: list[Any] = [{"role": "system", "content": TASK + HANDBOOK}]
    for question in TURNS:
        print(f"> {question}")
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": stream_turn(client, messages)})
    print(cache_line(cache_of(url)))


if __name__ == "__main__":
    main(server_url())
