"""Refuses requests that the server cannot serve with status 400, before SGLang queues them."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING

import numpy as np
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_kvevict.errors import ConfigError, shown
from sgl_kvevict.guard import Place
from sgl_kvevict.request import parse_request_options
from sgl_kvevict.sglang_adapter.long_prompts import admission_of, length_error
from sgl_kvevict.sglang_adapter.tree import KVEvictTree, namespace_of_request

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

INT32_MAX = 2**31 - 1
BEAMS = "--radix-cache-backend kvevict refuses beam search: beams have no request whose prefix could be compressed."


def check(scheduler: Scheduler, req: Req) -> None:
    """Answer a request that is about to be queued, and is not supported, with status 400 and the reason."""
    tree = scheduler.tree_cache
    if not isinstance(tree, KVEvictTree):
        return
    # An error in our check is this request's failure, not the scheduler's.
    with tree.guard.at(Place.OPTIONS) as attempt:
        reason = refusal(scheduler, tree, req)
        if reason is not None:
            _refuse(req, reason, HTTPStatus.BAD_REQUEST)
    if attempt.failed:
        _refuse(req, "internal error; the server's log has it", HTTPStatus.INTERNAL_SERVER_ERROR)


def refusal(scheduler: Scheduler, tree: KVEvictTree, req: Req) -> str | None:
    """Return why a request cannot be served; None if it can."""
    if req.beam_group is not None:  # beams' rows have no Req, so they cannot be rewritten
        # SGLang counts live groups of beams: this one would count for ever.
        scheduler.beam_coordinator.retire_group(req)
        req.beam_group = None
        return BEAMS
    try:
        # Hashes of images lie outside the vocabulary on purpose.
        words = req.origin_input_ids if req.multimodal_inputs is None else req.origin_input_ids_unpadded
        check_tokens(words, scheduler.model_config.vocab_size)
        check_sampling(req, scheduler.model_config.vocab_size)
        _check_namespace(req, tree)
        options = parse_request_options(req.sampling_params.custom_params)
        if options is not None:
            if options.exact:
                tree.prefixes.readers[req].is_exact = True
            if options.least_share:
                tree.prefixes.readers[req].least_share = options.least_share
    except ConfigError as error:
        return str(error)
    # Last, because it reads whether the request is exact.
    return length_error(admission_of(tree.token_to_kv_pool_allocator), tree, req)


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """Check a prompt's token ids (int64); one outside ``[0, vocab_size)`` raises in the forward and ends the server.

    Raises :class:`ConfigError` with the first such id, or if there are no tokens. An ``array`` is not copied.
    """
    # In numpy, because a prompt may be long, and this is the scheduler's thread.
    ids = np.asarray(tokens, dtype=np.int64)
    if not len(ids):
        raise ConfigError("input_ids: got no tokens; allowed: at least one")
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        at = int(outside.argmax())
        raise ConfigError(f"input_ids: got {ids[at]} at position {at}; allowed: 0 to {vocab_size - 1}")


def _check_namespace(req: Req, tree: KVEvictTree) -> None:
    """Raise :class:`ConfigError` if a request without an adapter names a namespace of requests with one."""
    if req.lora_id is None and tree.port.adapter_of(namespace_of_request(req)) is not None:
        raise ConfigError(
            f"extra_key: got {shown(req.extra_key)}, which ends with a LoRA adapter's id; allowed: any other"
        )


def check_sampling(req: Req, vocab_size: int) -> None:
    """Raise :class:`ConfigError` for fields that SGLang 0.5.23 accepts, but that end the server in the batch."""
    sampling = req.sampling_params
    # SGLang puts the values of a batch into an int32 tensor, which raises in the scheduler.
    if sampling.top_k > INT32_MAX:
        raise ConfigError(f"top_k: got {shown(sampling.top_k)}; allowed: -1, or 1 to {INT32_MAX}")
    outside = [token for token in sampling.stop_token_ids or () if not 0 <= token < vocab_size]
    if sampling.min_new_tokens and outside:
        raise ConfigError(
            f"stop_token_ids: got {shown(outside[0])} with min_new_tokens; allowed: 0 to {vocab_size - 1}"
        )
    if req.return_logprob and req.logprob.top_logprobs_num > vocab_size:
        raise ConfigError(f"top_logprobs_num: got {shown(req.logprob.top_logprobs_num)}; allowed: at most {vocab_size}")
    if req.return_logprob and req.logprob_start_len < -1:
        raise ConfigError(
            f"logprob_start_len: got {shown(req.logprob_start_len)}; allowed: -1, or the index of a token"
        )


def _refuse(req: Req, reason: str, status: HTTPStatus) -> None:
    """Abort a request; SGLang still runs one token of it, in a batch with others.

    That stays out of the cache: its namespace may be one that it must not name.
    """
    req.skip_radix_cache_insert = True
    # The refused values must not reach the batch: one that ends the server would do so with the single token, too.
    req.sampling_params = SamplingParams(max_new_tokens=1)
    req.sampling_params.normalize(None)
    req.logprob.top_logprobs_num = 0
    req.set_finish_with_abort(reason, status)
