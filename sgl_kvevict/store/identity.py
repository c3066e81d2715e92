"""Whose segments those in a store are: made by one model, one policy, for one namespace, of one sequence of tokens."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

FORMAT_VERSION = 1
"""Of everything in a store. Segments of another version are never found."""
CHAIN_TOKENS = 64
"""Tokens of a block: how finely a manifest tells how far a prompt agrees with a segment."""
CHAIN_BYTES = 8
"""Bytes of a block's hash that a manifest keeps: it only helps to find; what is found is compared token by token."""


@dataclass(frozen=True)
class StoreIdentity:
    """Everything that must be the same for one server to use what another has stored.

    Attributes:
        model: fingerprint of the weights, 64 hexadecimal digits.
        architecture: of the model, as its configuration names it.
        dtype: of the cached keys and values.
        scales: what a stored 1 is worth, keys and values of each layer; empty: 1.
        num_layers: attention layers.
        num_kv_heads: of one rank.
        head_dim: of keys and values.
        rotary: hash of the rotary embedding.
        rank: tensor-parallel rank.
        num_ranks: how many there are.
        policy: its name and options, and all that says how much a range keeps.
        min_prefix_tokens: tokens by which a prefix is looked up.
    """

    model: str
    architecture: str
    dtype: str
    scales: tuple[float, ...]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    rotary: str
    rank: int
    num_ranks: int
    policy: str
    min_prefix_tokens: int

    def describe(self) -> dict[str, Any]:
        """Plain values, as ``sgl-kvevict store show`` prints them."""
        return {"format": FORMAT_VERSION, **asdict(self), "scales": list(self.scales)}

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits."""
        text = json.dumps(self.describe(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def namespace(self, extra_key: str | None, cache_salt: str | None) -> Namespace:
        """Names of what one tenant may find."""
        digest = hashlib.sha256(b"sgl-kvevict namespace\n" + bytes.fromhex(self.digest))
        for part in (extra_key, cache_salt):
            if part is None:
                digest.update(b"\x00")
            else:
                encoded = part.encode("utf-8", "surrogatepass")
                digest.update(b"\x01" + len(encoded).to_bytes(8, "little") + encoded)
        return Namespace(digest.digest())


@dataclass(frozen=True)
class Namespace:
    """Names of the segments and manifests of one tenant. Without its salt nobody can compute them.

    Attributes:
        seed: 32 bytes that every name begins from.
    """

    seed: bytes

    def first_tokens(self, tokens: Sequence[int], num_tokens: int) -> str:
        """Name of the manifest of segments whose paths begin with the first ``num_tokens`` tokens."""
        return self._name(b"first", num_tokens, tokens[:num_tokens])

    def segment(self, tokens: Sequence[int], start: int) -> str:
        """Name of the segment of the tokens from a logical position on.

        Args:
            tokens: all tokens of the path, up to the segment's end.
            start: logical position of the segment's first token.
        """
        return self._name(b"segment", start, tokens)

    def chain(self, tokens: Sequence[int]) -> list[bytes]:
        """Hashes of the whole blocks of a sequence, each of all tokens up to its end."""
        encoded = array("q", tokens).tobytes()
        step = CHAIN_TOKENS * 8
        digest = hashlib.sha256(self.seed)
        chain = []
        for begin in range(0, len(encoded) - step + 1, step):
            digest.update(encoded[begin : begin + step])
            chain.append(digest.copy().digest()[:CHAIN_BYTES])
        return chain

    def _name(self, kind: bytes, number: int, tokens: Sequence[int]) -> str:
        digest = hashlib.sha256(self.seed + kind + number.to_bytes(8, "little"))
        digest.update(array("q", tokens).tobytes())
        return digest.hexdigest()
