"""A record of the table goes as a whole."""

from __future__ import annotations

from helpers.fake_tree import FakePasses, FakeTree
from helpers.pseudo_random_policy import PseudoRandomPolicy


def test_a_record_goes_as_a_whole():
    """Split, drop, new weights and a flush leave no part of a record behind."""
    tree = FakeTree(PseudoRandomPolicy(needs_passes=True), scores_any_range=True)
    table = tree.prefixes.table
    node = tree.add(24)
    tree.release(tree.prompt(node, warm=True))
    tree.release(tree.prompt(tree.add(4, node), found=node))
    FakePasses(tree).run()
    end = node.parent
    assert node in table.jobs and end in table.shrinking and len(table.begun_jobs) == 1
    upper = tree.cut([end], 10)
    assert upper in table.shrinking and end in table.shrinking and upper not in table.jobs
    (child,) = node.children.values()
    for below in (*child.children.values(), child, node):
        tree.drop(below)
    assert not len(table.jobs) and node not in table._records
    tree.drop(end)
    tree.drop(upper)
    assert not table._records and not table.shrinking
    tree.release(tree.prompt(tree.add(24), warm=True))
    tree.prefixes.keep_only_spans()
    assert not len(table.jobs) and not table.shrinking and table.prompts.num_bytes == 0
    tree.prefixes.cleared()
    assert not table._records
