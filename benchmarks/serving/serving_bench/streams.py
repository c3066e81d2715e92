"""Concurrent streaming requests and when their tokens arrived."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass(frozen=True)
class Stream:
    """One answered request.

    Attributes:
        sent_s: when it was sent, on the clock of ``time.perf_counter``.
        arrivals: (seconds on the same clock, tokens so far) of each message.
        prompt_tokens: as the server counted them.
        cached_tokens: prompt tokens that the server did not have to compute.
        output_ids: the generated tokens.
    """

    sent_s: float
    arrivals: tuple[tuple[float, int], ...]
    prompt_tokens: int
    cached_tokens: int
    output_ids: tuple[int, ...]

    @property
    def ttft_s(self) -> float:
        """Seconds until the first token."""
        return self.arrivals[0][0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between messages that carried one more token each."""
        return [b[0] - a[0] for a, b in zip(self.arrivals, self.arrivals[1:], strict=False) if b[1] == a[1] + 1]


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    input_ids: Sequence[int],
    max_new_tokens: int,
    extra_key: str | None = None,
) -> Stream:
    """Generate greedily, exactly ``max_new_tokens``; requests of different ``extra_key`` share nothing."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    body = {"input_ids": list(input_ids), "stream": True, "sampling_params": sampling}
    if extra_key is not None:
        body["extra_key"] = extra_key
    arrivals = []
    last: dict[str, Any] = {}
    sent = time.perf_counter()
    async with session.post(f"{url}/generate", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                last = json.loads(line[len(b"data: ") :])
                arrivals.append((time.perf_counter(), int(last["meta_info"]["completion_tokens"])))
    meta = last["meta_info"]
    return Stream(
        sent, tuple(arrivals), int(meta["prompt_tokens"]), int(meta["cached_tokens"]), tuple(last["output_ids"])
    )


def stream_all(
    url: str, prompts: Sequence[Sequence[int]], max_new_tokens: int, extra_keys: Sequence[str] | None = None
) -> list[Stream]:
    """Send all prompts at once, each in a namespace of its own if wanted, and wait for all answers."""
    keys: Sequence[str | None] = extra_keys or [None] * len(prompts)

    async def send() -> list[Stream]:
        timeout = aiohttp.ClientTimeout(total=7200)
        async with aiohttp.ClientSession(timeout=timeout, read_bufsize=2**20) as session:
            pairs = zip(prompts, keys, strict=True)
            return await asyncio.gather(*(stream(session, url, p, max_new_tokens, key) for p, key in pairs))

    return asyncio.run(send())


def decode_figures(streams: Sequence[Stream]) -> dict[str, float]:
    """Decode speed while all streams generate: from the last first token to the first last token."""
    begin = max(s.arrivals[0][0] for s in streams)
    end = min(s.arrivals[-1][0] for s in streams)
    tokens = sum(_tokens_at(s, end) - _tokens_at(s, begin) for s in streams)
    return {
        "decode_tokens_per_s": tokens / (end - begin),
        "inter_token_ms": 1e3 * statistics.median(gap for s in streams for gap in s.gaps_s),
        "ttft_s": statistics.median(s.ttft_s for s in streams),
    }


def _tokens_at(one: Stream, moment: float) -> int:
    return max((tokens for arrived, tokens in one.arrivals if arrived <= moment), default=0)
