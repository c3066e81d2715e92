"""Agents that share one long system prompt, at once: the prompt is compressed once, each agent's history hangs off it.

Every step of an agent sends the system prompt and its whole history again, as agent frameworks do. The server finds the
shared prompt compressed and the history behind it, so a step pays for its own new message. The client is the plain
`openai` package; an "observation" stands for what a tool returned.

    make serve ARGS="-- --enable-cache-report"      # in another terminal
    .venv/bin/python examples/agents.py [URL]
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import OpenAI
from station import API_KEY, HANDBOOK, TASK, cache_line, cache_of, server_url

from sgl_kvevict.client import warm

SYSTEM = {"role": "system", "content": TASK + HANDBOOK}
AGENTS = {
    "harbour": ("What is the name of the supply boat?", "Observation: the boat is late. Who is its captain?"),
    "radio": ("What is the call sign of the station?", "Observation: three long blasts. What do they mean?"),
    "kitchen": ("Where is the spare key of the pantry?", "Observation: found it. What is the first recipe?"),
}


def run_agent(client: OpenAI, name: str) -> list[str]:
    """Return one line per step of an agent: its answer, and how much of its prompt was in the cache."""
    history: list[Any] = [SYSTEM]
    lines = []
    for number, message in enumerate(AGENTS[name], start=1):
        history.append({"role": "user", "content": message})
        reply = client.chat.completions.create(model="default", messages=history, max_tokens=24, temperature=0)
        answer, usage = reply.choices[0].message.content or "", reply.usage
        history.append({"role": "assistant", "content": answer})
        details = usage.prompt_tokens_details  # None without the server's flag --enable-cache-report
        found = f"{details.cached_tokens:,}" if details else "unknown"
        shown = f"[{found} of {usage.prompt_tokens:,} tokens from the cache]"
        lines.append(f"{name}, step {number}: {' '.join(answer.split())}  {shown}")
    return lines


def main(url: str) -> None:
    """Compress the system prompt, then run all agents side by side."""
    had = warm(url, messages=[SYSTEM])
    print(f"system prompt: compressed; {had.device:,} tokens were in the pool before")
    client = OpenAI(base_url=f"{url}/v1", api_key=API_KEY)
    with ThreadPoolExecutor(len(AGENTS)) as pool:
        for lines in pool.map(lambda name: run_agent(client, name), AGENTS):
            print("\n".join(lines))
    print(cache_line(cache_of(url)))


if __name__ == "__main__":
    main(server_url())
