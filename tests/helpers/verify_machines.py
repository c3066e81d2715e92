"""The machines where requests generate in verification steps of speculative decoding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import hypothesis.strategies as st
import torch
from hypothesis.stateful import precondition, rule
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.common import release_kv_cache

from helpers.harness import Harness
from helpers.harness_store import DRAFT, adoption, exported, found_again, identity_for
from helpers.machines import AGAIN, CacheMachine, ExactMachine, HostMachine, PressureMachine, varied
from sgl_kvevict.cache.adoption import Prompt
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.segments.shadow import DraftRows

SPECULATIVE = mock.patch("sglang.srt.mem_cache.common.get_spec", lambda: SimpleNamespace(speculative_algorithm="NGRAM"))
"""SGLang allows a request to hold more slots than tokens only then."""


class VerifyingHarness(Harness):
    """Reserves slots ahead of what is accepted, and gives the rest back when a request ends, as SGLang does.

    A draft model of one layer and three heads has rows behind the same slots, which name the token and the head.
    """

    num_draft_rows_read = 0

    def _make_drafts(self) -> DraftRows:
        geometry = KVGeometry(1, 3, 3, 2, self.num_slots + 1)
        self.draft_k, self.draft_v = (torch.full(geometry.arena_shape, torch.nan) for _ in range(2))
        self.draft_rows = DraftRows(geometry, self.draft_k, self.draft_v)
        return self.draft_rows

    def _alloc(self, count: int) -> torch.Tensor | None:
        slots = super()._alloc(count)
        if slots is not None:
            self.draft_k[:, slots.long()] = self.draft_v[:, slots.long()] = torch.nan
        return slots

    def _write_tokens(self, req: Req, start: int, end: int, slots: torch.Tensor) -> None:
        super()._write_tokens(req, start, end, slots)
        codes = torch.tensor(self._codes(req, end)[start:end])[:, None].expand(-1, 3)
        rows = torch.stack((codes, torch.arange(3.0).expand_as(codes)), -1)
        self.draft_k[0, slots.long()], self.draft_v[0, slots.long()] = rows, -rows
        self.draft_rows.paid[0, slots.long()] = codes % torch.tensor([7.0, 5.0, 3.0])

    def _forward(self, req: Req, seq_len: int) -> None:
        """Also what the draft reads: tokens of each span, in every head others."""
        super()._forward(req, seq_len)
        codes, compressed_len = self._codes(req, seq_len), 0
        (path,) = self.tree.draft_paths([req])
        for runs in path:
            expected = {code: i for i, code in enumerate(codes[compressed_len : compressed_len + runs.num_tokens])}
            for head, (begin, length) in enumerate(zip(runs.starts[0].tolist(), runs.lens[0].tolist(), strict=True)):
                slots = runs.rows[begin : begin + length].long()
                for rows in (self.draft_k, -self.draft_v):
                    self._check_run(head, rows.view(-1, 2)[slots], expected)
                self.num_draft_rows_read += length
            compressed_len += runs.num_tokens
        suffix = self.rows.req_to_token[req.kv.req_pool_idx, compressed_len:seq_len].long()
        assert self.draft_k[0, suffix, 0, 0].tolist() == codes[compressed_len:]

    def _check_run(self, run: int, rows: torch.Tensor, expected: dict[float, int]) -> None:
        """Check the keys, or negated values, that the draft reads of a span in one head: of tokens that it may hold."""
        assert rows[:, 1].tolist() == [run] * len(rows)
        positions = [expected[code] for code in rows[:, 0].tolist()]
        assert positions == sorted(set(positions))

    def finish(self, req: Req, num_beyond_stop: int = 0) -> None:
        """Finish a request; its last ``num_beyond_stop`` tokens were accepted with the one that ended it."""
        req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        req.finished_len = len(req.output_ids) - num_beyond_stop
        with SPECULATIVE:
            release_kv_cache(req, self.tree, checkpoint=True)
        self.live.remove(req)
        self.check()

    def retract(self, req: Req) -> None:
        with SPECULATIVE:
            super().retract(req)

    def decode(self, req: Req) -> bool:
        return self.verify(req, [0], 1)

    def verify(self, req: Req, accepted: list[int], num_drafts: int) -> bool:
        """Run one verification step; False (and the request retracted) if slots are short.

        ``accepted``: the nodes of the tree that are accepted, ascending from the root, 0. The others hold what no
        forward may read. As in SGLang, what is accepted moves to the front of the step's slots.
        """
        start, row = req.kv.kv_committed_len, self.rows.req_to_token[req.kv.req_pool_idx]
        if not self._reserve(req, start + 2 * num_drafts):
            return False
        window = row[start : start + num_drafts].long()
        self.k[:, window] = self.v[:, window] = torch.nan
        self.draft_k[:, window] = self.draft_v[:, window] = torch.nan
        for _ in accepted[1:]:
            req.output_ids.append(self._next_token(req))
        end = start + len(accepted)
        self._write_tokens(req, start, end, window[accepted])
        for arena in (self.k, self.v, self.draft_k, self.draft_v):
            arena[:, window[: len(accepted)]] = arena[:, window[accepted]]
        req.kv.kv_committed_len = end
        req.spec_verify_ct += 1
        req.spec_num_correct_drafts += len(accepted) - 1
        self._forward(req, end)
        req.output_ids.append(self._next_token(req))
        self.check()
        return True

    def _reserve(self, req: Req, end: int) -> bool:
        """Have slots for a request's positions up to ``end``; False (and the request retracted) if slots are short."""
        held = req.kv.kv_allocated_len
        if end <= held:
            return True
        slots = self._alloc(end - held)
        if slots is None:
            self.retract(req)
            return False
        self.rows.write((req.kv.req_pool_idx, slice(held, end)), slots.to(torch.int32))
        req.kv.kv_allocated_len = end
        return True


class VerifyMachine(CacheMachine):
    """Every operation, and steps that accept none, some or all drafts."""

    make_harness: ClassVar[type[Harness]] = VerifyingHarness
    harness: VerifyingHarness

    @precondition(lambda self: self.decoding)
    @rule(
        data=st.data(),
        num_drafts=st.integers(1, 6),
        steps=st.integers(1, 4),
        num_beyond_stop=st.sampled_from([None, None, None, 0, 1, 3]),
    )
    def verify(self, data, num_drafts, steps, num_beyond_stop):
        """A few steps; the last one may have accepted tokens behind the one that ends the answer."""
        req, nodes = data.draw(st.sampled_from(self.decoding)), set()
        for _ in range(steps):
            nodes = data.draw(st.sets(st.integers(1, num_drafts - 1)) if num_drafts > 1 else st.just(set()))
            if req in self.harness.live:
                self.harness.verify(req, [0, *sorted(nodes)], num_drafts)
        if num_beyond_stop is not None and req in self.harness.live:
            self.harness.finish(req, min(num_beyond_stop, len(nodes)))
        self._settle()


class VerifyPressureMachine(VerifyMachine, PressureMachine):
    """Prefixes shrink to make room for drafts."""


class PairsMachine(VerifyMachine):
    """Keys are pairs of tokens: the last token of a text is in none, and of two texts their last common one neither."""

    options: ClassVar[dict[str, Any]] = {"keys_are_pairs": True}


class PairsPressureMachine(PairsMachine, VerifyPressureMachine):
    """Passes read texts, and prefixes shrink."""

    options: ClassVar[dict[str, Any]] = VerifyPressureMachine.options | PairsMachine.options


class PairsStoreMachine(PairsPressureMachine):
    """Prefixes are written to files and come back, with the rows of the draft model or, to another one, without."""

    def change_weights(self):
        """Never: it would switch the store off."""

    @rule(**AGAIN, draft=st.sampled_from([DRAFT, DRAFT, None]))
    def comes_back(self, base, known, shared, suffix, count, draft):
        """Somebody asks about a text again after the pool has dropped some, or all that it can."""
        req = self.harness.run(base[:known] + suffix[:1])
        if req in self.harness.live:
            self.harness.finish(req)
        records, into = exported(self.harness), adoption(self.harness)
        self.harness.evict(count)
        prompt = Prompt([*base, 9], len(base), (None, None))
        for record in found_again(records, prompt, into, draft, identity_for(self.harness)):
            into.adopt(record, prompt.namespace, prompt.tokens[record.end :])
            self.harness.check()
        self._admit(self.harness.request(base[:shared] + suffix), 200)
        self._settle()


VerifyHostMachine = varied("VerifyHostMachine", VerifyMachine, HostMachine)
PairsHostMachine = varied("PairsHostMachine", PairsMachine, VerifyHostMachine)
"""Prefixes move to the host's memory and back, under keys of one token less than their texts."""
VERIFY_MACHINES = (
    VerifyMachine,
    VerifyPressureMachine,
    varied("VerifyExactMachine", VerifyMachine, ExactMachine),
    VerifyHostMachine,
    PairsMachine,
    varied("PairsWindowsMachine", PairsMachine, windows=(5, 0)),
    PairsPressureMachine,
    PairsHostMachine,
    PairsStoreMachine,
    varied("PairsWindowsHostMachine", PairsHostMachine, windows=(5, 0)),
)
