"""ragged attention over spans and suffixes, token by token and head by head, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.head_slots import head_slot_of
from kvevict_kernels.ragged_decode.tables import LayerInputs, Step, Tables
from kvevict_kernels.span_runs import SpanRuns


def ragged_attention_over_paths_reference(tables: Tables, step: Step, inputs: LayerInputs) -> tuple[Tensor, Tensor]:
    """Attend with every new token: its path's runs, then its request's own tokens up to itself.

    Arguments and result as in :func:`kvevict_kernels.ragged_decode.run_ragged_decode`, for all requests.
    """
    q, layer = inputs.q, inputs.layer
    num_token_slots, num_kv_heads, head_dim = inputs.k_arena.shape[1:]
    k_rows, v_rows = (arena.reshape(-1, head_dim).float() for arena in (inputs.k_arena, inputs.v_arena))
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), device=q.device)
    row = 0
    for i, (path, new) in enumerate(zip(tables.paths, tables.new_lens, strict=True)):
        waterline, seq_len = int(tables.waterlines[i]), int(step.seq_lens[i])
        slots = step.req_to_token[int(step.pool_rows[i]), waterline:seq_len].long()
        for token in range(new):
            own = slots[: len(slots) - (new - 1 - token)]
            for q_head in range(q.shape[1]):
                head = q_head // tables.sizes.group_size
                places = [_run(span, layer, head) for span in path]
                runs = [span.head_slots[place].long() for span, place in zip(path, places, strict=True)]
                rows = torch.cat([*runs, head_slot_of(layer, own, head, num_token_slots, num_kv_heads)])
                if rows.numel():
                    scores = k_rows[rows] @ q[row, q_head].float() * inputs.sm_scale
                    if inputs.biases is not None:
                        num_entries = rows.numel() - own.numel()
                        scores[:num_entries] += inputs.biases.view(-1)[rows[:num_entries]]
                    if inputs.window:
                        end = waterline + own.numel()
                        positions = [_positions(span, place) for span, place in zip(path, places, strict=True)]
                        seen = torch.cat([*positions, torch.arange(waterline, end, device=rows.device)])
                        scores = scores.masked_fill(seen < end - inputs.window, float("-inf"))
                    lse[row, q_head] = scores.logsumexp(0)
                    if inputs.sink_logits is not None:
                        lse[row, q_head] = torch.logaddexp(lse[row, q_head], inputs.sink_logits[q_head].float())
                    out[row, q_head] = torch.exp(scores - lse[row, q_head]) @ v_rows[rows] * inputs.v_scale
            row += 1
    return out.to(q.dtype), lse


def _run(span: SpanRuns, layer: int, head: int) -> slice:
    start = int(span.starts[layer, head])
    return slice(start, start + int(span.lens[layer, head]))


def _positions(span: SpanRuns, place: slice) -> Tensor:
    assert span.positions is not None
    return span.positions[place]
