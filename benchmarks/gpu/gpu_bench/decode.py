"""Decode over spans: bandwidth, sharers, error, planning, and a captured graph."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpu_bench.batches import Requests
from gpu_bench.clock import copy_bandwidth, device_seconds, host_seconds, synchronize, wall_seconds
from gpu_bench.setting import Setting, syncs_raise
from sgl_kvevict.attention.batch import AttentionBatch

PLACES = ((False, 16), (True, 16), (True, 4))
"""Whether token slots are scattered, and bits of a row; with 4 as many bytes hold up to four times the entries."""
CAPTURED_REQUESTS = 256
SHARERS_SUFFIX = 16
"""Own tokens of each request on a shared prefix."""


def bandwidth(setting: Setting) -> list[dict[str, Any]]:
    """Unshared prefixes: time per layer beside the time of a copy of as many bytes."""
    copied = copy_bandwidth(setting)
    rows = []
    for count in setting.batches:
        for is_scattered, bits in PLACES:
            own = setting.suffix_tokens
            requests = Requests(
                setting, count, is_shared=False, is_scattered=is_scattered, suffix_tokens=own, bits=bits
            )
            requests.attention.plan(requests.batch())
            seconds = device_seconds(setting, requests.run)
            read = requests.bytes_per_layer()
            rows.append(
                {
                    "requests": count,
                    "bits": bits,
                    "token slots": "scattered" if is_scattered else "consecutive",
                    "MB per layer": read / 1e6,
                    "us per layer": seconds * 1e6,
                    "GB/s": read / seconds / 1e9,
                    "share of copy": read / seconds / copied,
                }
            )
            del requests
    return rows


def sharers(setting: Setting) -> list[dict[str, Any]]:
    """One prefix, more and more requests on it."""
    rows: list[dict[str, Any]] = []
    for count in setting.sharers:
        requests = Requests(setting, count, is_shared=True, is_scattered=False, suffix_tokens=SHARERS_SUFFIX)
        requests.attention.plan(requests.batch())
        seconds = device_seconds(setting, requests.run)
        first = rows[0]["us per layer"] if rows else seconds * 1e6
        rows.append({"sharers": count, "us per layer": seconds * 1e6, "times one": seconds * 1e6 / first})
    return rows


def error(setting: Setting) -> list[dict[str, Any]]:
    """Error against float32, beside torch's own attention in bfloat16 over the same entries."""
    requests = Requests(setting, 2, is_shared=True, is_scattered=True, suffix_tokens=setting.suffix_tokens)
    requests.attention.plan(requests.batch())
    worst = {"ours": 0.0, "torch": 0.0, "lse": 0.0}
    head_dim = setting.head_dim
    k_rows, v_rows = requests.k.view(-1, head_dim), requests.v.view(-1, head_dim)
    for layer in range(min(2, setting.decode_layers)):
        out, lse = requests.run(layer)
        for request in range(2):
            for q_head in range(requests.geometry.num_qo_heads):
                entries = requests.seen(request, layer, q_head // setting.group_size)
                k, v, q = k_rows[entries], v_rows[entries], requests.q[request, q_head]
                scores = k.float() @ q.float() * setting.sm_scale
                want = scores.softmax(0) @ v.float()
                plain = scaled_dot_product_attention(q[None, None, None], k[None, None], v[None, None])[0, 0, 0]
                worst["ours"] = max(worst["ours"], float((out[request, q_head].float() - want).abs().max()))
                worst["torch"] = max(worst["torch"], float((plain.float() - want).abs().max()))
                worst["lse"] = max(worst["lse"], abs(float(lse[request, q_head] - scores.logsumexp(0))))
    row = {"ours": worst["ours"], "torch bf16": worst["torch"], "ratio": worst["ours"] / worst["torch"]}
    return [row | {"log-sum-exp": worst["lse"]}]


def planning(setting: Setting) -> list[dict[str, Any]]:
    """Host time of a step's plan, and proof that neither it nor a layer waits for the device."""
    rows = []
    for count in setting.batches:
        requests = Requests(setting, count, is_shared=False, is_scattered=False, suffix_tokens=setting.suffix_tokens)
        requests.attention.plan(requests.batch())
        requests.run(0)
        synchronize(setting)
        with syncs_raise(setting):
            requests.attention.plan(requests.batch())
            requests.run(0)
            _plan_anew(requests)
        same = host_seconds(setting, lambda these=requests: these.attention.plan(these.batch()))
        new = host_seconds(setting, lambda these=requests: _plan_anew(these))
        launch = host_seconds(setting, lambda these=requests: these.run(0))
        layer = device_seconds(setting, requests.run)
        step = max(layer, launch) * setting.model_layers
        rows.append(
            {
                "requests": count,
                "us, same batch": same * 1e6,
                "us, new batch": new * 1e6,
                "host us per layer": launch * 1e6,
                "device us per layer": layer * 1e6,
                "plan / step": same / step,
            }
        )
    return rows


def graph(setting: Setting) -> list[dict[str, Any]]:
    """A captured step that follows requests to other spans and grows in place, beside the same step launched."""
    if setting.device != "cuda":
        return []
    rows = []
    for count, prefix_tokens in graph_sizes(setting):
        setting = dataclasses.replace(setting, prefix_tokens=prefix_tokens)
        requests = Requests(setting, count, is_shared=False, is_scattered=False, suffix_tokens=setting.suffix_tokens)
        attention, batch = requests.attention, requests.batch()
        attention.start_capture(count)
        lengths = requests.device_seq_lens.clone()
        requests.device_seq_lens.fill_(1)  # as SGLang captures: a step that is laid out for requests of one token
        _captured_step(requests, batch)
        synchronize(setting)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            results = _captured_step(requests, batch)
        requests.device_seq_lens.copy_(lengths)
        is_equal = True
        for turn in range(3):
            requests.device_seq_lens += 1
            # Every turn other requests read other spans.
            paths = batch.paths[turn:] + batch.paths[:turn]
            turned = dataclasses.replace(batch, paths=paths)
            attention.follow(turned, count)
            captured.replay()
            replayed = [tuple(x.clone() for x in result) for result in results]
            for (out, lse), (want_out, want_lse) in zip(replayed, _eager_step(requests, turned), strict=True):
                is_equal &= torch.equal(out, want_out) and torch.equal(lse, want_lse)
        eager = wall_seconds(setting, lambda i, these=requests, same=batch: _eager_step(these, same))
        replay = device_seconds(setting, lambda i, run=captured: run.replay())
        follow = host_seconds(setting, functools.partial(attention.follow, batch, count))
        rows.append(
            {
                "requests": count,
                "prefix tokens": setting.prefix_tokens,
                "layers": setting.decode_layers,
                "eager us": eager * 1e6,
                "graph us": replay * 1e6,
                "host us before a replay": follow * 1e6,
                "same bits on other spans": is_equal,
            }
        )
        del captured, results
    return rows


def graph_sizes(setting: Setting) -> list[tuple[int, int]]:
    """Requests and tokens of each prefix of each line of :func:`graph`; the last ones are to fit into the memory."""
    sizes = [(count, setting.prefix_tokens) for count in setting.batches]
    return [*sizes, (CAPTURED_REQUESTS, setting.prefix_tokens // 4)]


def _eager_step(requests: Requests, batch: AttentionBatch) -> list[tuple[Tensor, Tensor]]:
    requests.attention.plan(batch)
    return [requests.run(layer) for layer in range(requests.geometry.num_layers)]


def _captured_step(requests: Requests, batch: AttentionBatch) -> list[tuple[Tensor, Tensor]]:
    requests.attention.start_step(requests.device_seq_lens, batch.req_pool_indices, batch.req_to_token)
    return [requests.run(layer) for layer in range(requests.geometry.num_layers)]


def _plan_anew(requests: Requests) -> None:
    """Plan for spans that no batch had before, so that nothing is kept."""
    fresh = {span: copy.copy(span) for span in requests.spans}
    batch = requests.batch()
    paths = tuple(tuple(fresh[span] for span in path) for path in batch.paths)
    requests.attention.plan(dataclasses.replace(batch, paths=paths))
