"""A LangChain chain: one long system message, several questions at once, one copy of it for all of them.

LangChain needs nothing of ours: `ChatOpenAI` points at the server, and `usage_metadata` tells what was found in the
cache. (`pip install langchain-openai`, where `make setup` was not used.)

    make serve ARGS="-- --enable-cache-report"      # in another terminal
    .venv/bin/python examples/langchain_chain.py [URL]
"""

from __future__ import annotations

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from station import API_KEY, HANDBOOK, TASK, cache_line, cache_of, server_url

PROMPT = ChatPromptTemplate.from_messages([("system", "{task}{handbook}"), ("user", "{question}")])
QUESTIONS = (
    "What is the name of the supply boat?",
    "What is the call sign of the station?",
    "Where is the spare key of the pantry?",
    "Where are the journals of former years kept?",
)


def main(url: str) -> None:
    """Ask one question, which caches the handbook, then all of them at once."""
    model = ChatOpenAI(base_url=f"{url}/v1", api_key=API_KEY, model="default", max_tokens=24, temperature=0)
    chain = PROMPT.partial(task=TASK, handbook=HANDBOOK) | model
    chain.invoke({"question": QUESTIONS[0]})
    for question, reply in zip(QUESTIONS, chain.batch([{"question": q} for q in QUESTIONS]), strict=True):
        usage = reply.usage_metadata
        found, tokens = usage["input_token_details"]["cache_read"], usage["input_tokens"]
        print(f"{question} {reply.content}  [{found:,} of {tokens:,} tokens from the cache]")
    print(cache_line(cache_of(url)))


if __name__ == "__main__":
    main(server_url())
