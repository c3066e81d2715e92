"""The worked example of docs/design.md runs, and every number of its text is what came out.

The example runs through SGLang's real tree and pools (`helpers/harness.py`), without a model: what is kept of a head is
the choice of made-up scores, but how much is kept of all heads together, and where it lies, is what a server would do.
"""

from __future__ import annotations

import ast
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.harness import NO_ROTARY, Harness, publish_server_args
from helpers.harness_store import Server
from helpers.learned import random_scores
from helpers.stored import identity
from sgl_kvevict.cache.host import MIN_TOKENS
from sgl_kvevict.cache.nodes import length_of, path_to
from sgl_kvevict.cache.pressure import ROUND_SHARE, WITH_FEW_BITS
from sgl_kvevict.cache.recency import LOSS_OF_LOADING
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.policies import build_policy
from sgl_kvevict.segments import Segment
from sgl_kvevict.sglang_adapter.host_memory import BLOCK_SLOTS
from sgl_kvevict.sglang_adapter.scheduler_store import after_queueing
from sgl_kvevict.widths import WIDE_SHARE

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
SECTION = PAGE.split("\n## A worked example\n")[1].split("\n## ")[0]
"""The example."""
IN_SHORT = PAGE.split("\n## A prefix of 3,000 tokens, in short\n")[1].split("\n## ")[0]
"""The same for a longer prompt."""

POOL = 1400
"""Token slots."""
A = [number * 7 % 50 for number in range(1000)]
B = A[:600] + [number * 11 % 47 + 50 for number in range(300)]
C = A[:600] + list(range(100, 140))
D = A[:300] + list(range(140, 170))
NAMES = {
    (0, 600): "beginning",
    (600, 968): "end of A",
    (968, 1000): "tail of A",
    (600, 868): "end of B",
    (868, 900): "tail of B",
    (600, 640): "end of C",
}
"""Of tokens of the tree, by where they begin and end."""

STEP, SEGMENT, REQUEST, COPY = "step", "segment, share", "request", "copy"
"""First columns of the tables."""

Row = list[int]
Table = dict[str, Row]
"""Rows by their first cell."""


class Story:
    """Runs the example once, and notes what its tables and sentences say.

    Attributes:
        tables: by the title of their first column.
        sentences: parts of the text that have numbers.
        in_short: the same of the text on a longer prompt.
    """

    def __init__(self, folder: Path) -> None:
        self.config = KVEvictConfig(score_after_matches=1)
        self.tables: dict[str, Table] = {title: {} for title in (STEP, SEGMENT, REQUEST, COPY)}
        self.sentences: list[str] = []
        self.in_short: list[str] = []
        self.server = self._start(folder)
        self.harness: Harness = self.server.harness
        self._describe_pool()
        b, c = self._compute()
        self._shrink(b, c)
        self._read_exactly()
        self._leave([b, c])
        self._return()
        self._branch_off()
        self._grow()
        assert self.server.writer.drain(300)
        self._restart(folder)
        self._longer_prompt()

    @property
    def numbers(self) -> set[str]:
        """Every number of the tables and sentences."""
        rows = (row for table in self.tables.values() for row in table.values())
        return {f"{number:,}" for row in rows for number in row} | set(numbers_in(" ".join(self.sentences)))

    def _say(self, sentence: str) -> None:
        self.sentences.append(sentence)

    # ---- what happens -----------------------------------------------------------------------------------------

    def _start(self, folder: Path) -> Server:
        shape = make_harness().geometry
        ours = identity(
            dtype="torch.bfloat16",
            head_dim=shape.head_dim,
            own_value_dim=shape.own_value_dim,
            min_prefix_tokens=self.config.min_prefix_tokens,
        )
        make: Any = partial(make_harness, host_blocks=POOL)  # twice the pool: a block has the entries of two slots
        return Server(folder, ours, make=make)

    def _describe_pool(self) -> None:
        shape, config = self.harness.geometry, self.config
        self._say(f"{shape.num_layers} layers, {shape.num_kv_heads} KV heads and a head dim of {shape.head_dim}")
        runs = f"{shape.num_runs} rows of the pool ({shape.num_layers} layers * {shape.num_kv_heads} KV heads)"
        number = f"K and V of {shape.head_dim} numbers of {self.harness.k.element_size()} bytes"
        self._say(f"a token slot is {runs}, and a row has {self._row_bytes} bytes ({number})")
        self._say(f"{self._pool_bytes(1)} bytes of K and V. The pool has {POOL:,} token slots")
        least = int(shape.num_token_slots * ROUND_SHARE)
        self._say(
            f"one round of shrinking releases at least {least} of them (1 / {round(1 / ROUND_SHARE)} of the pool)"
        )
        self._say(f"at least {least} slots are released")
        shares = ", ".join(map(str, config.shares))
        self._say(f"the shares are {shares}; the tail has {config.tail_tokens} tokens")
        self._say(f"{config.sink_tokens} sinks, and a range of {config.min_prefix_tokens} tokens is long enough")

    @property
    def _row_bytes(self) -> int:
        return 2 * self.harness.geometry.head_dim * int(self.harness.k.element_size())

    def _pool_bytes(self, num_slots: int) -> int:
        return num_slots * self.harness.geometry.num_runs * self._row_bytes

    def _compute(self) -> tuple[Any, Any]:
        a = self._run(A)
        self._note("1 A was computed")
        self._say(f"tokens 0 to {self._segments()[0].end}")
        least = self.config.num_slots(self._segments()[0].num_tokens, share=self.config.shares[-1])
        self._say(f"all but {least} of its {self._segments()[0].num_slots} slots")
        self.harness.finish(a)
        self._note("2 A was released")
        b = self._run(B)
        self._note("3 B branches off")
        self._say(f"B, a prompt of {len(B)} tokens, begins with the first 600 of A: SGLang finds {b.prefix_len_found}")
        c = self._run(C)
        self._note("4 C branches off")
        self._say(f"C, a prompt of {len(C)} tokens, begins with the same 600: SGLang finds {c.prefix_len_found}")
        for name, req in (("B", b), ("C", c)):
            self._read(f"{name}, after step 4", req)
        return b, c

    def _shrink(self, b: Any, c: Any) -> None:
        step = 5
        while any(each.packed is None or each.num_slots > self._slots_at_budget(each) for each in self._segments()):
            before = {name: segment.num_slots for name, segment in self._named()}
            assert self.harness.evict(1)
            ((name, segment),) = [each for each in self._named() if each[1].num_slots < before[each[0]]]
            self._note(f"{step} {name} to {self._share_of(segment)}")
            step += 1
        last = step - 1
        self._read(f"B, after step {last}", b)
        self._read(f"C, after step {last}", c)
        segment = dict(self._named())["beginning"]
        runs = self.harness.geometry.num_runs
        per_head = segment.num_entries // runs
        self._say(f"{per_head} of {segment.num_tokens} entries of each (layer, KV head) on average")
        self._say(f"entries of all {runs} (layer, KV head) pairs")

    def _read_exactly(self) -> None:
        tree, exact = self.harness.tree, self.harness.request(A)
        tree.prefixes.readers[exact].is_exact = True  # sgl_kvevict/sglang_adapter/request_check.py: refusal
        free, held = self.harness.allocator.available_size(), tree.held_slots()
        assert self.harness.admit(exact)
        found = exact.prefix_len
        assert self.harness.prefill(exact)
        taken = free - self.harness.allocator.available_size()
        self._say(f"finds {found} tokens, computes {len(A) - found:,} in slots of its own, and releases all {taken:,}")
        self._say(f"{free:,} slots are free")
        self._read("A with `exact`", exact)
        self.harness.finish(exact)
        assert (tree.held_slots(), self.harness.allocator.available_size()) == (held, free)
        self._read_exactly_before()

    def _read_exactly_before(self) -> None:
        """The same while nothing is compressed, in a cache of its own."""
        harness = make_harness()
        a = harness.run(A)
        assert a is not None
        harness.finish(a)
        exact = harness.request(A)
        harness.tree.prefixes.readers[exact].is_exact = True
        assert harness.admit(exact)
        self._say(f"it would have found {exact.prefix_len} tokens of A")
        assert harness.tree.prefixes.pressure.reclaim(None) == 0

    def _leave(self, readers: list[Any]) -> None:
        for req in readers:
            self.harness.finish(req)
        self._note("14 B and C were released")
        tree, host = self.harness.tree, self.harness.host
        before = dict(self._named())["end of A"]
        saved = WITH_FEW_BITS.between * before.tokens_per_slot
        product = f"{WITH_FEW_BITS.between} * {before.num_tokens} / {before.num_slots} = {saved:.3f}"
        self._say(f"{WITH_FEW_BITS.between} of what dropping it would lose without a host: {product} tokens per slot")
        self._say(f"counts as {LOSS_OF_LOADING} of its tokens per slot")
        self._say(f"they are fewer than {MIN_TOKENS} tokens")
        step = 15
        while list(tree.nodes()):
            sizes, there = {name: segment.num_slots for name, segment in self._named()}, self._nodes()
            assert self.harness.evict(1)
            shrunk = [name for name, segment in self._named() if segment.num_slots < sizes[name]]
            gone = there - self._nodes()
            what = [f"{name} to {self._share_of(dict(self._named())[name])}" for name in shrunk]
            what += [f"{NAMES[each]} is dropped" for each in sorted(gone)]
            self._note(f"{step} {', '.join(what)}")
            step += 1
        for each in host._segments.values():
            record = each.record
            in_pool = self._pool_bytes(record.end - record.start)
            evicted = sum(len(piece.copy.blocks) for piece in each.pieces)
            row = [record.end - record.start, in_pool, len(each.copy.blocks) * host.block_bytes]
            self.tables[COPY][NAMES[record.start, record.end]] = [*row, evicted * host.block_bytes]
        self._say(f"{host.used_bytes:,} bytes of host memory")
        num_rows, beside = 2 * self.harness.geometry.num_runs, 6
        assert host.block_bytes == num_rows * (self._row_bytes + beside)
        self._say(
            f"blocks of {host.block_bytes:,} bytes here: {num_rows} rows of {self._row_bytes} bytes, "
            f"each with {beside} bytes for position and order, {num_rows} * ({self._row_bytes} + {beside})"
        )
        self._say(f"the entries of 2 token slots; a server's has those of {BLOCK_SLOTS}")

    def _return(self) -> None:
        a = self._run(A)
        self._note("21 A is asked again")
        self._say(f"SGLang finds {a.prefix_len_found} tokens, and computes the last {len(A) - a.prefix_len_found}")
        self._read("A, after step 21", a)
        self.harness.finish(a)

    def _branch_off(self) -> None:
        tree = self.harness.tree
        d = self._run(D)
        upper, lower = [tree.node_slots(node) for node in tree.nodes() if (s := tree.spans.get(node)) and s.end <= 600]
        self._say(f"The upper span is charged with all {upper} slots, the lower one with {lower}")
        self._say(f"D, a prompt of {len(D)} tokens, finds {d.prefix_len_found}")
        self._say(f"computes its other {len(D) - d.prefix_len_found} tokens")
        self._note("22 D branches off")
        self.harness.finish(d)

    def _grow(self) -> None:
        prefixes = self.harness.tree.prefixes
        before = {name: segment for name, segment in self._named() if segment.packed is not None}
        sizes = {name: (segment.num_slots, segment.num_entries) for name, segment in before.items()}
        req = self.harness.request(A)
        prefixes.readers[req].least_share = 1.0  # as for `exact`
        assert self.harness.admit(req)
        found = req.prefix_len
        assert self.harness.prefill(req)
        self._note("23 A is asked with `complete`")
        self._read("A with `complete`", req)
        for name, segment in before.items():
            (slots, entries), runs = sizes[name], segment.geometry.num_runs
            assert segment.num_entries == segment.num_tokens * runs
            self._say(
                f"the {name} takes {segment.num_slots - slots} slots for {segment.num_entries - entries:,} entries"
            )
        self._say(f"SGLang finds {found} tokens, and computes {len(A) - found} token")
        self.harness.finish(req)

    def _restart(self, folder: Path) -> None:
        server = self._start(folder)
        req, tree = server.harness.request(A), server.harness.tree
        after_queueing(None, SimpleNamespace(tree_cache=tree), req)
        assert server.settle(req) == set()
        assert server.harness.admit(req)
        found = req.prefix_len
        assert server.harness.prefill(req)
        self._say(f"finds {found} tokens, holds {tree.held_slots()} slots, and computes {len(A) - found} token")
        packed = sorted(tree.prefixes.table.packed, key=lambda segment: segment.start)
        begin, end = (segment.num_slots for segment in packed)
        self._say(f"at steps 12 and 13 ({begin} and {end} slots) and, unlike the host's memory, the tail (32)")
        server.harness.finish(req)
        alone = make_harness()
        req = alone.run(A)
        assert req is not None
        self._say(f"Without a store A holds {alone.tree.held_slots():,} slots again")

    def _longer_prompt(self) -> None:
        """The same for 3,000 tokens, by the arithmetic alone."""
        config, num_tokens, tail = self.config, 3000, self.config.tail_tokens
        covered, losses = num_tokens - tail, WITH_FEW_BITS
        light, whole, budget, between, least = (config.num_slots(covered, share=share) for share in config.shares)
        shares = config.shares
        per_row = round(float(1 / (WIDE_SHARE / 2 + (1 - WIDE_SHARE) / 3)), 2)
        saved = round(covered / budget)
        self.in_short += [
            f"A prompt of {num_tokens:,} tokens was prefilled",
            f"Its last {tail} tokens, the *tail*",
            f"The other {covered:,} tokens are one *segment*",
            f"to ceil(share * {covered:,}) slots",
            f"It takes {light:,} slots (share {shares[0]}: no token is lost, nearly all numbers have 8 bits",
            "8 bits instead of 16",
            f"{whole:,} ({shares[1]}: no token is lost, most numbers have 4 bits)",
            f"{budget} ({shares[2]}, the `budget`",
            f"{per_row} * {config.budget} = {per_row * shares[2]:.0%}".replace("%", " %"),
            f"{between} ({shares[3]}) and {least} ({shares[4]}, the `min_budget`)",
            f"loses {losses.between} * {covered:,} / {budget} = {losses.between * covered / budget:.3f} tokens of",
            f"an uncompressed leaf loses {1}; dropping a compressed one loses {LOSS_OF_LOADING * saved}",
            f"and {saved} otherwise",
            f"{losses.least} * {covered:,} / {between} = {losses.least * covered / between:.3f}",
            f"the first 2,000 of the {num_tokens:,} tokens",
            f"at least {config.min_prefix_tokens} (`min_prefix_tokens`)",
            f"at least {config.min_prefix_tokens - tail} tokens before its own tail "
            f"({tail} + {config.min_prefix_tokens - tail} = {config.min_prefix_tokens})",
            f"finds {0} tokens, computes all {num_tokens:,} in slots of its own",
            f"the request finds {num_tokens - 1:,} tokens",
            f"it has fewer than {MIN_TOKENS} tokens",
            f"SGLang finds {covered:,} tokens and computes {tail}",
            f"comes back with {budget} slots",
            f"finds {num_tokens - 1:,} tokens, holds {budget + tail} slots and computes {1} token",
        ]

    def _run(self, prompt: list[int]) -> Any:
        req: Any = self.harness.request(prompt)
        assert self.harness.admit(req)
        req.prefix_len_found = req.prefix_len
        assert self.harness.prefill(req)
        return req

    # ---- what is noted ----------------------------------------------------------------------------------------

    def _segments(self) -> list[Segment]:
        spans = self.harness.tree.prefixes.table.spans
        found = (spans.of(node) for node in self.harness.tree.nodes())
        return list(dict.fromkeys(span.segment for span in found if span is not None))

    def _nodes(self) -> set[tuple[int, int]]:
        nodes = self.harness.tree.nodes()
        return {(length_of(path_to(node)) - len(node.key), length_of(path_to(node))) for node in nodes}

    def _named(self) -> list[tuple[str, Segment]]:
        return [(NAMES[segment.start, segment.end], segment) for segment in self._segments()]

    def _slots_at_budget(self, segment: Segment) -> int:
        return self.config.num_slots(segment.num_tokens, segment.start)

    def _share_of(self, segment: Segment) -> float | str:
        def slots(share: float) -> int:
            return self.config.num_slots(segment.num_tokens, segment.start, share)

        shares = [share for share in self.config.shares if slots(share) == segment.num_slots]
        return shares[0] if shares else "complete"

    def _note(self, step: str) -> None:
        tree = self.harness.tree
        sizes = tree.evictable_size(), tree.protected_size(), tree.prefixes.pressure.reclaimable()
        self.tables[STEP][step] = [tree.held_slots(), self.harness.allocator.available_size(), *sizes]
        self._note_segments()

    def _note_segments(self) -> None:
        for segment in self._segments():
            name = NAMES.get((segment.start, segment.end))
            if segment.packed is not None and name is not None:
                row = [segment.num_slots, *by_bits(segment.packed.parts)]
                self.tables[SEGMENT][f"{name}, {self._share_of(segment)}"] = row

    def _read(self, name: str, req: Any) -> None:
        (runs,) = self.harness.tree.read_paths([req])
        counts = {bits: sum(int(each.lens.sum()) for each in runs if each.bits == bits) for bits in (16, 8, 4)}
        in_spans = sum(each.num_tokens for each in runs if each.is_counted)
        self.tables[REQUEST][name] = [*counts.values(), req.kv.kv_allocated_len - in_spans]


def by_bits(parts: Any) -> list[int]:
    """Entries of 16, 8 and 4 bits."""
    return [sum(part.rows.numel() for part in parts if part.bits == bits) for bits in (16, 8, 4)]


def make_harness(**options: Any) -> Harness:
    """The example's pool, with its configuration and scores that are known."""
    policy = build_policy("distilled", {})
    config = KVEvictConfig(score_after_matches=1)
    harness = Harness(POOL, max_tokens=POOL, config=config, policy=policy, bits="auto", **options)
    compressor: Any = harness.tree.compressor
    compressor.learned = random_scores(harness.geometry, NO_ROTARY)
    return harness


def tables_of(text: str) -> dict[str, Table]:
    """Tables of a page, whose cells but the first of each row are numbers, by the title of their first column."""
    tables: dict[str, Table] = {}
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        (title, *_), _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines())
        tables[title] = {name: [int(cell.replace(",", "")) for cell in cells] for name, *cells in rows}
    return tables


def numbers_in(text: str) -> list[str]:
    """Numbers of a text that are not part of a word."""
    return re.findall(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)", text)


def prose_of(text: str) -> str:
    """A text without its tables, code and line breaks."""
    return " ".join(re.sub(r"^\|.*\n|`[^`]*`", "", text, flags=re.MULTILINE).split())


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    publish_server_args(tmp_path_factory.mktemp("tiny-llama"))
    return Story(tmp_path_factory.mktemp("store"))


def test_tables_are_what_happens(story: Story) -> None:
    assert tables_of(SECTION) == story.tables


def test_sentences_are_what_happens(story: Story) -> None:
    assert [sentence for sentence in story.sentences if sentence not in " ".join(SECTION.split())] == []


def test_every_number_of_the_text_comes_from_what_happens(story: Story) -> None:
    steps = {step.split()[0] for step in story.tables[STEP]}
    assert set(numbers_in(prose_of(SECTION))) - story.numbers - steps == set()


def test_the_longer_prompt_is_that_of_the_arithmetic(story: Story) -> None:
    text = " ".join(IN_SHORT.split())
    assert [sentence for sentence in story.in_short if sentence not in text] == []
    assert set(numbers_in(prose_of(IN_SHORT))) - set(numbers_in(" ".join(story.in_short))) == set()


def test_functions_that_the_text_names_exist() -> None:
    names = re.findall(r"`([\w/]+\.py): ([\w.]+)`", SECTION)
    assert names
    missing = []
    for file, name in names:
        scope: Any = ast.parse((ROOT / "sgl_kvevict" / file).read_text(encoding="utf-8"))
        for part in name.split("."):
            scope = next((node for node in getattr(scope, "body", ()) if getattr(node, "name", None) == part), None)
        if scope is None:
            missing.append(f"{file}: {name}")
    assert missing == []
