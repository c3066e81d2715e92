"""Seconds of prefills, decode steps and loads from the host, by roofline, of a stated machine and model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """An H100 SXM and Llama 3.1 8B in bfloat16, from their data sheets.

    Attributes:
        flops: dense bfloat16 operations per second, and the share of them that a prefill reaches.
        bandwidth: bytes per second of its memory, and the share of them that a decode step reaches.
        link: bytes per second from the host (PCIe 5.0 x16, one direction, as measured by others).
        parameters: of the model.
        kv_bytes: of one token.
    """

    name: str = "H100 SXM (989 TFLOPS, 3.35 TB/s, PCIe 5.0), Llama 3.1 8B, bfloat16"
    flops: float = 989e12
    flops_share: float = 0.5
    bandwidth: float = 3.35e12
    bandwidth_share: float = 0.7
    link: float = 50e9
    parameters: float = 8.03e9
    num_layers: int = 32
    num_heads: int = 32
    head_dim: int = 128
    kv_bytes: int = 131_072

    @property
    def weight_s(self) -> float:
        """Seconds in which the weights are read once."""
        return 2 * self.parameters / (self.bandwidth * self.bandwidth_share)

    def prefill_s(self, found: int, computed: int) -> float:
        """Seconds to compute so many tokens after those found: matrix products, and attention to all before each."""
        pairs = computed * (found + computed / 2)
        operations = 2 * self.parameters * computed + 4 * self.num_layers * self.num_heads * self.head_dim * pairs
        return max(operations / (self.flops * self.flops_share), self.weight_s if computed else 0.0)

    def step_s(self, read_tokens: float) -> float:
        """Seconds of one decode step of a batch that reads KV of so many uncompressed tokens."""
        return self.weight_s + read_tokens * self.kv_bytes / (self.bandwidth * self.bandwidth_share)

    def load_s(self, num_bytes: float) -> float:
        """Seconds to copy KV from the host."""
        return num_bytes / self.link
