"""ragged attention over spans and suffixes, token by token and head by head, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from kvevict_kernels.head_slots import head_slot_of
from kvevict_kernels.ragged_decode.tables import LayerInputs, Step, Tables


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
                runs = [
                    span.head_slots[int(span.starts[layer, head]) :][: int(span.lens[layer, head])].long()
                    for span in path
                ]
                rows = torch.cat([*runs, head_slot_of(layer, own, head, num_token_slots, num_kv_heads)])
                if rows.numel():
                    scores = k_rows[rows] @ q[row, q_head].float() * inputs.sm_scale
                    if inputs.biases is not None:
                        num_entries = rows.numel() - own.numel()
                        scores[:num_entries] += inputs.biases.view(-1)[rows[:num_entries]]
                    out[row, q_head] = scores.softmax(0) @ v_rows[rows] * inputs.v_scale
                    lse[row, q_head] = scores.logsumexp(0)
            row += 1
    return out.to(q.dtype), lse
