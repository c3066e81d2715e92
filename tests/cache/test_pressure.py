"""What shrinks when token slots are short, in which order, and what of it admission may count on."""

from __future__ import annotations

from helpers.fake_tree import CONFIG, FakeNode, FakeTree
from helpers.pseudo_random_policy import PseudoRandomPolicy
from sgl_kvevict.cache.pressure import WITH_16_BITS, WITH_FEW_BITS

SHRINKING = CONFIG.model_copy(update={"budget": 0.5, "min_budget": 0.25})


def cache(num_slots: int = 320, *, has_few_bits: bool = False, **fields) -> FakeTree:
    """A tree whose prefixes wait for passes, and can be scored without them; 5 slots are won at once."""
    policy, config = PseudoRandomPolicy(needs_passes=True), SHRINKING.model_copy(update=fields)
    return FakeTree(policy, config, num_slots, scores_any_range=True, has_few_bits=has_few_bits)


def cached(tree: FakeTree, num_tokens: int, parent: FakeNode | None = None, *, at: float = 0.0) -> FakeNode:
    """The node of a prompt without readers, last used at a time; without its tail."""
    node = tree.add(num_tokens, parent)
    tree.release(tree.prompt(node))
    for each in (node, node.parent):
        each.last_access_time = at
    return node.parent


def reclaim(tree: FakeTree, leaf=None) -> int:
    before = len(tree.free_slots)
    won = tree.prefixes.pressure.reclaim(leaf)
    assert won == len(tree.free_slots) - before
    return won


def spans(tree: FakeTree) -> dict[FakeNode, int]:
    return {node: span.segment.num_slots for node, span in tree.prefixes.spans.items()}


def test_nothing_is_compressed_while_there_is_room():
    tree = cache()
    cached(tree, 22)
    assert spans(tree) == {} and len(tree.prefixes.table.shrinking) == 1


def test_it_shrinks_in_steps_before_it_would_be_dropped():
    tree = cache()
    node = cached(tree, 22)
    assert reclaim(tree) == 10 and spans(tree) == {node: 10} and node.charged == 10
    assert reclaim(tree) == 5 and spans(tree) == {node: 5} and node.charged == 5
    assert reclaim(tree) == 0


def test_the_first_step_is_a_light_one():
    tree = cache(num_slots=64, budget=0.25, min_budget=0.1)
    node = cached(tree, 22)
    reader = tree.reader(node)
    assert tree.prefixes.pressure.reclaimable() == 18
    assert [reclaim(tree) for _ in range(4)] == [10, 5, 3, 0] and spans(tree) == {node: 2}
    tree.release(reader)


def rows_of(tree: FakeTree, node: FakeNode) -> dict[int, int]:
    """Entries of a node's segment per run, on average, by the bits of their rows."""
    parts = tree.prefixes.spans[node].segment.storage.parts
    return {part.bits: part.num_entries // tree.geometry.num_runs for part in parts}


def test_entries_lose_bits_before_any_is_evicted():
    """Of 20 tokens: 0.5, 0.375, 0.25, 0.175 and 0.1 of their slots."""
    tree = cache(num_slots=64, has_few_bits=True, budget=0.25, min_budget=0.1)
    node = cached(tree, 22)
    reader = tree.reader(node)
    assert tree.prefixes.pressure.reclaimable() == 18
    rows = []
    for won in (10, 2, 3, 1, 2):
        assert reclaim(tree) == won
        rows.append(rows_of(tree, node))
    assert rows == [{8: 20}, {8: 8, 4: 12}, {8: 4, 4: 9}, {8: 4, 4: 6}, {8: 2, 4: 3}]
    assert reclaim(tree) == 0 and tree.prefixes.pressure.reclaimable() == 0
    tree.release(reader)


def test_sinks_keep_all_their_bits():
    tree = cache(num_slots=64, has_few_bits=True, budget=0.25, min_budget=0.1, sink_tokens=2)
    node = cached(tree, 22)
    rows = []
    while reclaim(tree):
        rows.append(rows_of(tree, node))
    assert rows == [{16: 2, 8: 12, 4: 6}, {16: 2, 8: 4, 4: 12}, {16: 2, 8: 2, 4: 6}, {16: 2, 8: 2, 4: 3}, {16: 2}]


def test_answers_are_dearest_last():
    """Each step of a prefix costs more per slot than the one before, with 8 and 4 bits as with 16."""
    for losses, saved in ((WITH_FEW_BITS, (2, 2.5, 5, 8)), (WITH_16_BITS, (2, 2, 5, 5))):
        absolute = [losses.packing, *(loss * at for loss, at in zip(losses[1:], saved, strict=True))]
        assert absolute == sorted(absolute)


def test_a_light_prefix_is_compressed_before_one_is_squeezed_below_the_budget():
    tree = cache(num_slots=64, budget=0.25, min_budget=0.1)
    first, second = cached(tree, 22, at=1.0), cached(tree, 22, at=2.0)
    slots = []
    for _ in range(6):
        reclaim(tree)
        slots.append((spans(tree)[first], spans(tree).get(second)))
    assert slots == [(10, None), (10, 10), (5, 10), (5, 5), (2, 5), (2, 2)]


def test_an_old_span_gives_up_nothing_more_while_a_new_prefix_is_uncompressed():
    tree = cache(num_slots=64, budget=0.25, min_budget=0.1)
    old = cached(tree, 22, at=1.0)
    assert [reclaim(tree) for _ in range(2)] == [10, 5]
    tree.now = 3.0
    new = cached(tree, 22, at=2.0)
    tree.prefixes.recency.raise_level((20.0, 0.0))  # the level of what is used from now on
    new.last_access_time = tree.now
    assert [reclaim(tree, ((0.0, 0.0), old)) for _ in range(3)] == [10, 5, 0]
    assert spans(tree) == {old: 5, new: 5}


def test_a_squeeze_keeps_the_first_in_order():
    tree = cache()
    node = cached(tree, 22)
    reclaim(tree)
    segment = tree.prefixes.spans[node].segment
    (before,), kept = (
        segment.storage.parts,
        segment.order.keys.sort(descending=True).values[: 5 * tree.geometry.num_runs],
    )
    reclaim(tree)
    assert segment is tree.prefixes.spans[node].segment
    (after,) = segment.storage.parts
    assert segment.order.keys.sort(descending=True).values.equal(kept)
    assert after.indptr[-1] == after.num_entries == 5 * tree.geometry.num_runs
    for run in range(tree.geometry.num_runs):
        old = before.positions[before.indptr[run] : before.indptr[run + 1]].tolist()
        new = after.positions[after.indptr[run] : after.indptr[run + 1]].tolist()
        assert new == sorted(new) and set(new) <= set(old)


def test_views_of_a_segment_are_squeezed_together():
    tree = cache()
    node = cached(tree, 22)
    reclaim(tree)
    upper = tree.cut([node], 8)
    assert reclaim(tree) == 5
    assert tree.prefixes.spans[upper].segment is tree.prefixes.spans[node].segment
    assert (upper.charged, node.charged) == (5, 0)


def test_what_was_used_last_shrinks_last():
    tree = cache()
    old, new = cached(tree, 22, at=1.0), cached(tree, 22, at=2.0)
    reclaim(tree)
    assert spans(tree) == {old: 10}
    reclaim(tree)
    assert spans(tree) == {old: 10, new: 10}
    reclaim(tree)
    assert spans(tree) == {old: 5, new: 10}


def test_a_leaf_that_costs_less_is_dropped_instead():
    tree = cache()
    cached(tree, 22)
    leaf = tree.add(3)
    compressing = WITH_16_BITS.packing
    assert reclaim(tree, ((compressing / 2, 0.0), leaf)) == 0
    assert reclaim(tree, ((compressing, 1.0), leaf)) == 10
    squeezing = 2 * WITH_16_BITS.least  # two tokens a slot
    assert reclaim(tree, ((squeezing, -1.0), leaf)) == 0 and reclaim(tree, ((squeezing + 1, -1.0), leaf)) == 5


def test_no_span_is_dropped_while_something_may_shrink_to_the_budget():
    tree = cache(num_slots=64, budget=0.25, min_budget=0.1)
    old, new = cached(tree, 22, at=1.0), cached(tree, 22, at=2.0)
    assert [reclaim(tree) for _ in range(2)] == [10, 10]
    cheap = ((-1.0, 0.0), old)
    assert reclaim(tree, ((-1.0, 0.0), tree.add(3))) == 0
    assert [reclaim(tree, cheap) for _ in range(3)] == [5, 5, 0] and spans(tree) == {old: 5, new: 5}


def test_nothing_shrinks_below_the_budget_just_before_it_would_be_dropped_to_the_host():
    """Its tail goes first, and then it: what comes back by a copy loses no answers."""
    tree = cache(num_slots=64, has_few_bits=True, budget=0.25, min_budget=0.1)
    node = cached(tree, 22)
    while spans(tree).get(node) != 5:
        assert reclaim(tree)
    (tail,) = node.children.values()
    recency = tree.prefixes.recency
    leaf = recency.get_priority(tail), tail
    recency.has_host_room = lambda segment: True
    assert reclaim(tree, leaf) == 0 and recency.get_priority(node) < leaf[0]
    recency.has_host_room = lambda segment: False
    assert reclaim(tree, leaf) == 1 and spans(tree) == {node: 4}


def test_readers_move_along_when_their_prefix_shrinks():
    tree = cache()
    node = tree.add(22)
    tree.release(tree.prompt(node))
    reader = tree.reader(node)
    assert tree.prefixes.pressure.reclaimable() == 15
    assert reclaim(tree) == 10 and reader.row[:20].eq(0).all() and reader.row[20:22].ne(0).all()
    assert tree.prefixes.pressure.reclaimable() == 5
    assert reclaim(tree) == 5 and tree.prefixes.pressure.reclaimable() == 0


def test_what_somebody_reads_exactly_does_not_shrink_nor_count():
    tree = cache()
    node = tree.add(22)
    tree.release(tree.prompt(node))
    exact = tree.reader(node)
    tree.prefixes.readers[exact].is_exact = True
    other = tree.reader(node)
    assert tree.prefixes.pressure.reclaimable() == 0 and reclaim(tree) == 0
    tree.release(exact)
    assert tree.prefixes.pressure.reclaimable() == 15 and reclaim(tree) == 10 and other.row[:20].eq(0).all()


def test_below_what_does_not_shrink_nothing_does():
    tree = cache()
    upper = tree.add(22)
    tree.release(tree.prompt(upper))
    exact = tree.reader(upper)
    tree.prefixes.readers[exact].is_exact = True
    lower = tree.add(22, upper)
    tree.release(tree.prompt(lower, upper))
    tree.reader(lower)
    assert tree.prefixes.pressure.reclaimable() == 0 and reclaim(tree) == 0


def test_ends_do_not_overlap():
    """Each end stands for what is uncompressed above it; the one nearest the root goes first, whatever their ages."""
    tree = cache()
    upper = tree.add(12)
    lower = tree.add(12, upper)
    tree.release(tree.prompt(lower))
    lower.parent.last_access_time, upper.last_access_time = 1.0, 2.0
    assert len(tree.prefixes.table.shrinking) == 2
    assert reclaim(tree) == 6 and set(spans(tree)) == {upper}
    assert reclaim(tree) == 5 and len(spans(tree)) == 2


def test_an_end_that_is_cut_stays_two_ends():
    tree = cache()
    node = cached(tree, 22)
    upper = tree.cut([node], 10)
    assert reclaim(tree) == 5 and spans(tree) == {upper: 5}
    assert reclaim(tree) == 5 and set(spans(tree)) == {upper, node}


def test_short_parts_are_compressed_with_what_follows():
    tree = cache(min_prefix_tokens=6)
    header = tree.add(3)
    node = tree.add(20, header)
    tree.release(tree.prompt(node))
    assert reclaim(tree) == 10 and set(spans(tree)) == {header, node.parent}
    assert header.charged == 11


def test_a_round_wins_slots_for_several_requests():
    tree = cache(num_slots=1280)  # 20 at once
    for _ in range(3):
        cached(tree, 22)
    assert reclaim(tree) == 20


def test_nothing_is_squeezed_without_a_lower_budget():
    for fields in ({"min_budget": None}, {"min_budget": 0.5}, {"min_budget": 0.9}):
        tree = cache(**fields)
        cached(tree, 22)
        assert reclaim(tree) == 10 and reclaim(tree) == 0


def test_what_is_dropped_or_flushed_does_not_shrink():
    tree = cache()
    node = tree.add(22)
    tree.release(tree.prompt(node))
    end = node.parent
    tree.drop(node)
    tree.drop(end)
    assert reclaim(tree) == 0
    cached(tree, 22)
    tree.prefixes.cleared()
    assert reclaim(tree) == 0


def test_a_failing_policy_shrinks_nothing(monkeypatch):
    tree = cache()
    cached(tree, 22)
    monkeypatch.setattr(PseudoRandomPolicy, "order", lambda *args, **kwargs: 1 / 0)
    reader = tree.reader(cached(tree, 22))
    assert tree.prefixes.pressure.reclaimable() > 0
    assert reclaim(tree) == 0 and spans(tree) == {}
    assert sum(tree.guard.errors.values()) == 2
    assert tree.prefixes.pressure.reclaimable() == 0  # admission counts on neither any more
    tree.release(reader)


def test_what_is_too_short_by_itself_does_not_keep_what_is_below_it_from_shrinking():
    """A prompt branches off after the first token: that node is no end any more."""
    tree = cache()
    node = tree.add(22)
    reader = tree.prompt(node)
    tree.cut([node.parent], 1).last_access_time = 1.0
    assert tree.prefixes.pressure.reclaimable() == 14
    assert reclaim(tree) == 10
    tree.release(reader)


def test_the_rest_of_an_unsplittable_segment_is_not_squeezed():
    """It would become a segment of the tokens that are left, and requests would find it."""
    policy = PseudoRandomPolicy(splittable=False, needs_passes=True)
    tree = FakeTree(policy, SHRINKING, scores_any_range=True)
    upper = tree.add(3)  # too short for a segment of its own
    node = tree.add(22, upper)
    tree.release(tree.prompt(node))
    assert reclaim(tree) > 0
    lower = node.parent
    assert set(spans(tree)) == {upper, lower} and tree.prefixes.spans.blocks(upper)
    tree.drop(node)
    tree.drop(lower)
    assert reclaim(tree) == 0 and tree.prefixes.spans.blocks(upper)


def test_segments_that_cannot_be_split_are_promised_one_by_one():
    """A range becomes two where a request's path ends, and each is rounded up to whole slots."""
    policy = PseudoRandomPolicy(splittable=False, needs_passes=True)
    tree = FakeTree(policy, SHRINKING, scores_any_range=True)
    upper = tree.add(3)  # too short for a segment of its own
    node = tree.add(23, upper)
    readers = [tree.prompt(node), tree.reader(upper)]
    promised = tree.prefixes.pressure.reclaimable()
    assert promised == 24 - 6 - 1
    assert sum(iter(lambda: reclaim(tree), 0)) == promised
    assert set(spans(tree).values()) == {6, 1} and len(readers) == 2
