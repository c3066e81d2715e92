"""``sgl-kvevict inspect``: a snapshot of a server's tree, as text or JSON; and the page of ``top --web``."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TypeVar

import msgspec
import uvloop
from rich.text import Text
from rich.tree import Tree as TextTree

from sgl_kvevict.cli.output import mean_bits, short_model, shorten
from sgl_kvevict.cli.size import show_bytes
from sgl_kvevict.errors import printable
from sgl_kvevict.events import questions
from sgl_kvevict.events.client import InspectClient, check_endpoint
from sgl_kvevict.events.questions import Description, KeptReport, StatusReport, TreeNode, TreeReport

Decode = Callable[[Sequence[int]], list[str]]
HEAD_COLUMNS = ("layer", "head", "entries", "of the tokens", "16 bits", "4 bits")
T = TypeVar("T")


@dataclass(frozen=True)
class Snapshot:
    """A server's tree and sizes at one moment.

    ``tokens``: by node id; empty unless the server exposes them.
    """

    endpoint: str
    about: Description
    tree: TreeReport
    status: StatusReport
    tokens: Mapping[int, Sequence[int]] = field(default_factory=dict)


async def ask_snapshot(client: InspectClient, *, limit: int, with_tokens: bool = False) -> Snapshot:
    """Ask a server about its tree, node by node; it answers between two of its steps.

    There are at most ``limit`` nodes; those that are dropped meanwhile are left out. ``with_tokens``: ask for token ids
    if the server exposes them.
    """
    about = await client.ask(questions.Describe(), Description)
    tree = await client.ask(questions.Tree(limit), TreeReport)
    status = await client.ask(questions.Status(limit=0), StatusReport)
    tokens: dict[int, Sequence[int]] = {}
    if with_tokens and about.expose_tokens:
        texts = await client.ask_each([questions.Tokens(node.id) for node in tree.nodes], questions.TokensReport)
        tokens = {node.id: report.token_ids for node, report in zip(tree.nodes, texts, strict=True) if report}
    return Snapshot(client.endpoint, about, tree, status, tokens)


async def ask_node(
    client: InspectClient, node: int, *, bins: int
) -> tuple[Description, KeptReport | None, Sequence[int] | None]:
    """Ask about one node: what its heads kept (None: it is uncompressed or gone), its tokens (None: not exposed)."""
    about = await client.ask(questions.Describe(), Description)
    (kept,) = await client.ask_each([questions.Kept(node, bins)], KeptReport)
    if not about.expose_tokens:
        return about, kept, None
    (text,) = await client.ask_each([questions.Tokens(node)], questions.TokensReport)
    return about, kept, None if text is None else text.token_ids


def asked(endpoint: str, timeout_s: float, ask: Callable[[InspectClient], Awaitable[T]]) -> T:
    """Return what ``ask`` returns of the server at an event socket; ``timeout_s``: seconds to wait for each answer.

    ConfigError: the endpoint is not an address. ServerSilentError: no answer.
    """

    async def run() -> T:
        async with InspectClient(check_endpoint(endpoint), timeout_s) as client:
            return await ask(client)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def as_text(snapshot: Snapshot, *, is_long: bool = False) -> TextTree:
    """Draw the tree for a terminal; ``is_long``: names of models and namespaces in full."""
    tree, about, gauges = snapshot.tree, snapshot.about, snapshot.status.gauges
    pool, held, tokens = gauges.pool, gauges.held_slots, gauges.logical_tokens
    model = about.model if is_long else short_model(about.model)
    title = f"{model}, policy {about.policy}: {tokens:,} tokens in {held:,} of {pool.total:,} token slots"
    title += f" ({show_bytes(held * about.slot_bytes)} of {show_bytes(pool.total * about.slot_bytes)})"
    top = TextTree(Text(printable(title), style="bold"))
    branches = {0: top}
    for node in tree.nodes:
        branches[node.id] = branches[node.parent].add(_line(node, is_long))
    if tree.omitted:
        top.add(f"... and {tree.omitted:,} deeper nodes (--limit)")
    return top


def _line(node: TreeNode, is_long: bool) -> Text:
    text = Text(f"{node.start:,}-{node.start + node.tokens:,}", style="green" if node.compressed else "blue")
    text.append(f"  {node.tokens:,} tokens -> {node.slots:,.1f} slots", style="default")
    if node.compressed:
        shares = f"{node.slots / node.tokens:.0%} of the bytes, {node.kept:.0%} of the entries"
        text.append(f" ({shares}, {mean_bits(node.entries):.1f} bits)", style="default")
    if node.readers:
        text.append(f"  {node.readers} reading", style="yellow")
    if node.namespace:
        namespace = printable(node.namespace)
        namespace = namespace if is_long else shorten(namespace, 12)
        text.append(f"  namespace {namespace}", style="magenta")
    return text.append(f"  node {node.id}", style="bright_black")


def head_rows(about: Description, kept: KeptReport) -> list[tuple[str, ...]]:
    """Rows of a table of what each layer and head of a node stores: entries, their share, and how many of which bits.

    See :data:`HEAD_COLUMNS`.
    """
    tokens, rows = kept.end - kept.start, []
    for number in range(kept.num_rows):
        layer, head = divmod(number, about.num_kv_heads)
        counts = {bits: kept.entries[bits][number] if bits in kept.entries else 0 for bits in (16, 4)}
        total = sum(counts.values())
        share = f"{total / tokens:.0%}"
        rows.append((str(layer), str(head), f"{total:,}", share, *(f"{count:,}" for count in counts.values())))
    return rows


def heads_as_json(about: Description, kept: KeptReport) -> str:
    """Return the same as one JSON object: bounds of the node's tokens, and one object for each layer and head."""
    heads = [
        {
            "layer": number // about.num_kv_heads,
            "head": number % about.num_kv_heads,
            "entries": {str(bits): counts[number] for bits, counts in kept.entries.items()},
        }
        for number in range(kept.num_rows)
    ]
    return msgspec.json.encode({"node": kept.node, "start": kept.start, "end": kept.end, "heads": heads}).decode()


def as_json(snapshot: Snapshot) -> str:
    """Return the snapshot as one JSON object."""
    tree = msgspec.to_builtins(snapshot.tree)
    content = {"endpoint": snapshot.endpoint, "about": snapshot.about, **tree}
    if snapshot.tokens:
        content["tokens"] = {str(node): list(ids) for node, ids in snapshot.tokens.items()}
    return msgspec.json.encode(content).decode()


def page(interval_s: float) -> str:
    """Return the page, which asks its server for ``tree`` that often, and for ``node/ID``."""
    template = files("sgl_kvevict.cli").joinpath("inspect_page.html").read_text(encoding="utf-8")
    return template.replace("@INTERVAL@", repr(float(interval_s)))


def load_decoder(path: str) -> Decode | None:
    """Return a function from token ids to texts; None without transformers, or without a tokenizer at ``path``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about optional parts of transformers that a tokenizer does not need
        try:
            from transformers import AutoTokenizer
        except ImportError:
            return None
        try:
            # the server names it: by default transformers asks whether to run code that comes with it
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError):  # no such folder or hub name, no tokenizer in it, or one that needs such code
            return None
    # The page asks for the same tokens again and again, and a tokenizer decodes one at a time.
    cache: dict[int, str] = {}

    def decode(ids: Sequence[int]) -> list[str]:
        new = [token for token in set(ids) if token not in cache]
        if new:  # `batch_decode` of nothing is an error
            cache.update(zip(new, tokenizer.batch_decode([[token] for token in new]), strict=True))
        return [cache[token] for token in ids]

    return decode
