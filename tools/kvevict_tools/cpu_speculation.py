"""Speculative decoding on a CPU: torch in place of the kernels that SGLang compiles for GPUs only.

Sized for tests and the demo: loops over requests and draft tokens on the host. Names of arguments are SGLang's where it
calls by keyword (``retrive_``).
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Launched:
    """A function that is called as a Triton kernel is: ``kernel[grid](arguments)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return self._function


def copy_from_rows(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, out: Tensor, *_: int
) -> None:
    """Write the slots ``[start, end)`` of each request's row to ``out``, one request after the other."""
    bounds = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    slots = torch.cat([req_to_token[row, start:end] for row, start, end in bounds])
    out[: slots.numel()] = slots


def copy_to_rows(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    slots: Tensor,
    *_: int,
) -> None:
    """Write ``slots``, one request after the other, to ``[start, end)`` of each request's row."""
    first = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = slots[first : first + end - start].to(req_to_token.dtype)
        first += end - start


def cache_locs(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> Tensor:
    """Return the slots of the draft tokens, [batch_size * draft_token_num], int64."""
    out = torch.empty(batch_size * draft_token_num, dtype=torch.int64, device=device)
    copy_from_rows(req_pool_indices, req_to_token, start_offset, end_offset, out)
    return out


def pack_accepted(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor, *_: int) -> None:
    """Write the slots of the accepted tokens (those with an index >= 0) to the front of ``accept_out_cache_loc``."""
    accepted = accept_index.reshape(-1)
    accepted = accepted[accepted >= 0].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def draft_locs(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    topk: int,
    num_cols: int,
    positions: None = None,
    mrope: None = None,
) -> None:
    """Write the first ``topk * num_cols`` slots behind each request's tokens to ``out_cache_loc``; no positions."""
    copy_from_rows(req_pool_indices, req_to_token, seq_lens, seq_lens + topk * num_cols, out_cache_loc)


def front_locs(num_front: Tensor, out_cache_loc: Tensor, front_out_cache_loc: Tensor) -> None:
    """Write the first ``num_front[i]`` slots of request i's part of ``out_cache_loc`` to ``front_out_cache_loc``."""
    requests = torch.arange(len(num_front))
    parts = out_cache_loc.view(len(num_front), -1)
    copy_from_rows(requests, parts, torch.zeros_like(num_front), num_front, front_out_cache_loc)


def last_accepted(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int, batch_size: int
) -> None:
    """Write each request's last accepted token to ``bonus_tokens``; ``accept_tokens`` have ``accept_stride`` each."""
    lasts = accept_tokens.view(batch_size, accept_stride).gather(1, accept_lens.long()[:, None] - 1)
    bonus_tokens[:] = lasts.view(-1)


def build_tree(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Masks, positions and links of trees from the drafts that were selected.

    A draft may be as likely as the one that it follows, and be selected without it. It is then reached by no link.

    ``parent_list``, [batch_size, 1 + topk * (depth - 1)], has for each group of ``topk`` drafts the index of the draft
    that they follow; of the first group, whose drafts follow the root, nothing is read. ``selected_index``,
    [batch_size, n - 1], ascending, are the selected drafts: group * ``topk`` + place; n is ``draft_token_num``. The
    other tensors are as in :func:`reconstruct_tree`; ``tree_mask`` is written, with the new tokens only, as our
    attention asks for (``TreeMaskMode.QLEN_ONLY``).

    Source: SGLang's ``build_tree_efficient`` (``sgl-kernel/csrc/speculative/eagle_utils.cu``).
    """
    batch_size, n = len(seq_lens), draft_token_num
    masks = torch.eye(n, dtype=torch.bool).repeat(batch_size, 1, 1)
    for mask, parents, selected in zip(masks, parent_list.tolist(), selected_index.tolist(), strict=True):
        for node, draft in enumerate(selected, start=1):
            group = draft // topk
            if group == 0:
                mask[node] |= mask[0]
            elif parents[group] in selected:
                mask[node] |= mask[selected.index(parents[group]) + 1]
    tree_mask[:] = masks.view(-1)
    links = retrieve_index, retrieve_next_token, retrieve_next_sibling
    reconstruct_tree(masks, seq_lens, positions, *links, batch_size, n)


def reconstruct_tree(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Positions and links of trees from their masks.

    ``tree_mask``, [batch_size * n * n], bool, says whether node j is i or an ancestor of i; n is ``draft_token_num``,
    the root comes first. ``verified_seq_len``, [batch_size], are the tokens before each tree. Written are:

    * ``positions``, [batch_size * n]: ``verified_seq_len`` and the node's depth;
    * ``retrieve_index``, [batch_size, n]: the node's place in the batch;
    * ``retrieve_next_token``, [batch_size, n]: the first child, or -1;
    * ``retrieve_next_sibling``, [batch_size, n]: the next child of the same parent, or -1.

    Source: SGLang's ``kernels/ops/speculative/reconstruct_tree.py``.
    """
    n, node = draft_token_num, torch.arange(draft_token_num)
    ancestors = tree_mask.view(batch_size, n, n) & (node < node[:, None])
    positions[:] = (ancestors.sum(-1) + verified_seq_len[:, None]).view(-1)
    retrieve_index[:] = torch.arange(batch_size * n).view(batch_size, n)
    parent = torch.where(ancestors, node, -1).amax(-1)
    is_child = (parent[:, None, :] == node[:, None]) & (node > node[:, None])  # [batch_size, parent, child]
    is_later = (parent[:, None, :] == parent[:, :, None]) & (node > node[:, None]) & (parent >= 0)[:, :, None]
    for links, linked in ((retrieve_next_token, is_child), (retrieve_next_sibling, is_later)):
        links[:] = torch.where(linked.any(-1), linked.int().argmax(-1), -1)


def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept from the root on the child that is the token that the target predicts after its parent.

    ``candidates`` and ``target_predict``, [batch_size, n], are the token of every node, and the target's token after
    it; trees are as :func:`reconstruct_tree` writes them. Written and returned are:

    * ``predicts``, [batch_size * n]: the target's token behind every accepted node;
    * ``accept_index``, [batch_size, max_depth]: places of the accepted nodes, root first; the rest stays;
    * ``accept_token_num``, [batch_size]: accepted draft tokens, without the root.

    Source: SGLang's ``verify_tree_greedy`` (``sgl-kernel/csrc/speculative/eagle_utils.cu``).
    """
    after = target_predict.reshape(-1)
    for b, tokens in enumerate(candidates.tolist()):
        places, children = retrieve_index[b].tolist(), retrieve_next_token[b].tolist()
        siblings, node, depth = retrieve_next_sibling[b].tolist(), 0, 0
        accept_index[b, 0] = places[0]
        while True:
            wanted = predicts[places[node]] = after[places[node]]
            child = children[node] if depth + 1 < accept_index.shape[1] else -1
            while child >= 0 and tokens[child] != wanted:
                child = siblings[child]
            if child < 0:
                break
            node, depth = child, depth + 1
            accept_index[b, depth] = places[node]
        accept_token_num[b] = depth
    return predicts, accept_index, accept_token_num


def sample_tree(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accept children with the target's probability of their tokens; sample the last token from what is left.

    One draw per accepted node is held against the sum of its children's probabilities so far. So the tokens have the
    target's distribution, whatever the draft was (with both thresholds at 1).

    Arguments up to ``retrive_next_sibling`` are as in :func:`verify_tree_greedy`. ``uniform_samples``, [batch_size, n],
    and ``uniform_samples_for_final_sampling``, [batch_size], are in [0, 1); ``target_probs``, [batch_size, n,
    vocab_size], is the distribution of the token after every node. A child of at least ``threshold_single`` is
    accepted; ``threshold_acc`` divides the sum that a draw is held against. ``draft_probs`` are unused: a refused
    child's probability is taken off here.

    Source: SGLang's ``tree_speculative_sampling_target_only`` (``sgl-kernel/csrc/speculative``).
    """
    for b, tokens in enumerate(candidates.tolist()):
        places, children = retrive_index[b].tolist(), retrive_next_token[b].tolist()
        siblings, node, depth = retrive_next_sibling[b].tolist(), 0, 0
        accept_index[b, 0] = places[0]
        while True:
            left, total = target_probs[b, node].clone(), 0.0
            child = children[node] if depth + 1 < accept_index.shape[1] else -1
            while child >= 0:
                single = float(target_probs[b, node, tokens[child]])
                total += single
                if float(uniform_samples[b, node]) <= total / threshold_acc or single >= threshold_single:
                    break
                left[tokens[child]] = 0.0
                child = siblings[child]
            if child < 0:
                break
            predicts[places[node]] = tokens[child]
            node, depth = child, depth + 1
            accept_index[b, depth] = places[node]
        accept_token_num[b] = depth
        sums = left.cumsum(0)
        drawn = uniform_samples_for_final_sampling[b] * sums[-1]
        predicts[places[node]] = int(torch.searchsorted(sums, drawn, right=True).clamp(max=len(sums) - 1))


def keep_top_k(probs: Tensor, top_k: Tensor) -> Tensor:
    """Keep each row's ``top_k`` [num_rows] largest probabilities, and equal ones, scaled to a sum of 1; others are 0.

    ``top_k`` may exceed the vocabulary. Source: FlashInfer's ``top_k_renorm_probs``.
    """
    sizes = top_k.long().clamp(1, probs.shape[-1])
    least = probs.sort(-1, descending=True).values.gather(-1, sizes[:, None] - 1)
    return _scaled(probs, least)


def keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """Keep each row's fewest largest probabilities that sum to ``top_p`` [num_rows], and equal ones, scaled likewise.

    Source: FlashInfer's ``top_p_renorm_probs``.
    """
    ranked = probs.sort(-1, descending=True).values
    before = ranked.cumsum(-1) - ranked
    num_kept = (before < top_p[:, None]).sum(-1, keepdim=True).clamp(min=1)
    return _scaled(probs, ranked.gather(-1, num_kept - 1))


def _scaled(probs: Tensor, least: Tensor) -> Tensor:
    """Probabilities of at least ``least`` [num_rows, 1], scaled to a sum of 1."""
    kept = probs.masked_fill(probs < least, 0.0)
    return kept / kept.sum(-1, keepdim=True)


SUBSTITUTES: dict[tuple[str, str], Any] = {
    ("sglang.kernels.ops.speculative.cache_locs", "assign_extend_cache_locs"): Launched(copy_from_rows),
    ("sglang.kernels.ops.speculative.eagle", "fill_accept_out_cache_loc"): Launched(pack_accepted),
    ("sglang.srt.speculative.spec_utils", "fill_front_out_cache_loc_func"): front_locs,
    ("sglang.srt.speculative.eagle_worker_common", "assign_draft_cache_locs_contiguous_func"): draft_locs,
    ("sglang.srt.speculative.eagle_worker_common", "fill_bonus_tokens_func"): last_accepted,
    ("sglang.srt.speculative.eagle_utils", "build_tree_kernel_efficient_func"): build_tree,
    ("sglang.srt.mem_cache.allocation", "assign_req_to_token_pool"): Launched(copy_to_rows),
    ("sglang.srt.speculative.eagle_utils", "verify_tree_greedy_func"): verify_tree_greedy,
    ("sglang.srt.speculative.eagle_utils", "tree_speculative_sampling_target_only"): sample_tree,
    ("sglang.srt.speculative.eagle_utils", "top_k_renorm_prob"): keep_top_k,
    ("sglang.srt.speculative.eagle_utils", "top_p_renorm_prob"): keep_top_p,
}
"""(module, name) of what SGLang launches or calls, and what stands for it."""
TREE_MODULE = "sglang.kernels.ops.speculative.reconstruct_tree"
"""A module that cannot be imported without compiled kernels; ``ngram_worker`` needs one function of it."""


def install() -> None:
    """Put the substitutes in place, before SGLang imports a speculative worker. May be called repeatedly.

    Not by SGLang's hooks: replacing a name whose value is None would replace every module's attribute that is None.
    """
    module = types.ModuleType(TREE_MODULE)
    module.__dict__["reconstruct_indices_from_tree_mask_func"] = reconstruct_tree
    sys.modules.setdefault(TREE_MODULE, module)
    torch.compiler.set_stance("force_eager")  # else g++ compiles the choice of drafts for minutes
    for (owner, name), substitute in SUBSTITUTES.items():
        setattr(importlib.import_module(owner), name, substitute)
