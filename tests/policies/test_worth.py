"""What a squeeze gives up first."""

from __future__ import annotations

import torch

from sgl_kvevict.policies.parts import RangeScores
from sgl_kvevict.policies.worth import scores_of, worth_of


def worth(values, kept, *, comparable=True, num_first=0, num_last=0):
    scores = RangeScores(torch.tensor(values), None, None, num_first, num_last)
    mask = torch.tensor(kept)
    return worth_of(scores, mask, mask.flatten().nonzero()[:, 0], comparable=comparable).tolist()


ALL = [[[True] * 4], [[True] * 4]]
VALUES = [[[-3.0, 0.5, 0.0, 7.0]], [[-0.25, 100.0, -80.0, 1e9]]]


def test_comparable_scores_keep_their_order_over_layers_and_heads():
    flat = [value for layer in VALUES for value in layer[0]]
    found = worth(VALUES, ALL)
    assert sorted(range(8), key=found.__getitem__) == sorted(range(8), key=flat.__getitem__)
    assert all(-(2**15) <= each < 2**15 for each in found)


def test_other_scores_are_ranked_within_their_head():
    first, second = [[v[0] for v in VALUES][i] for i in (0, 1)]
    found = worth(VALUES, ALL, comparable=False)
    for values, part in ((first, found[:4]), (second, found[4:])):
        assert sorted(range(4), key=part.__getitem__) == sorted(range(4), key=values.__getitem__)
    assert sorted(found[:4]) == sorted(found[4:])


def test_what_is_not_kept_has_no_worth_and_no_rank():
    kept = [[[True, False, True, False]], [[False, True, False, False]]]
    found = worth(VALUES, kept, comparable=False)
    assert len(found) == 3 and found[1] == found[2] > found[0]


def test_what_is_kept_without_competing_is_worth_most():
    found = worth(VALUES, ALL, num_first=1, num_last=1)
    assert found[0] == found[4] == found[3] == found[7] == max(found) > max(*found[1:3], *found[5:7])


def test_layers_that_share_a_choice_share_its_worth():
    found = worth(VALUES[:1], ALL)
    assert found[:4] == found[4:]


def test_scores_come_back_from_worth():
    scores = [[[-9.0, -0.25, 0.0, 0.5]], [[65504.0, 1.0, -65504.0, 2.0]]]
    found = torch.tensor(worth(scores, [[[True] * 4]] * 2), dtype=torch.int16)
    assert scores_of(found).tolist() == [score for (head,) in scores for score in head]
