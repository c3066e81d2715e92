"""Names in a store: hashes of the identity (model, policy), namespace and tokens, so nothing else is ever found."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

FORMAT_VERSION = 2
"""Version of everything in a store. Segments of another version are never found."""
CHAIN_TOKENS = 64
"""Tokens of a block: resolution at which a manifest tells how far a prompt agrees with a segment."""
CHAIN_DIGITS = 16
"""Hexadecimal digits of a block's hash in a manifest. They only rank candidates; tokens are compared afterwards."""


@dataclass(frozen=True)
class StoreIdentity:
    """Everything that must be equal for one server to use another's segments.

    Attributes:
        model: fingerprint of the weights, 64 hexadecimal digits.
        dtype: of the cached keys and values.
        scales: FP8 scales of the keys and values of each layer; empty for other dtypes.
        num_layers: attention layers.
        num_kv_heads: of one rank.
        head_dim: width of keys.
        own_value_dim: width of values; 0 if they are a part of the keys' rows (latent attention).
        rotary: hash of the rotary embedding.
        policy: its name and options, and the settings that decide how much of a range is kept.
        min_prefix_tokens: number of tokens by which a prefix is looked up.
    """

    model: str
    architecture: str
    dtype: str
    scales: tuple[float, ...]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    own_value_dim: int
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
        """Return the names of one tenant."""
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
    """Names of one tenant's segments and manifests, all hashed with the 32 bytes of ``seed``.

    They cannot be computed without the tenant's ``cache_salt``.
    """

    seed: bytes

    def first_tokens(self, tokens: Sequence[int], num_tokens: int) -> str:
        """Name of the manifest of segments whose paths begin with the first ``num_tokens`` tokens."""
        return self._name(b"first", num_tokens, tokens[:num_tokens])

    def segment(self, tokens: Sequence[int], start: int) -> str:
        """Name of the segment that begins at logical position ``start`` of a path and ends with its last token."""
        return self._name(b"segment", start, tokens)

    def chain(self, tokens: Sequence[int]) -> str:
        """Hashes of a sequence's whole blocks, ``CHAIN_DIGITS`` each; each covers all tokens up to the block's end."""
        return "".join(self.blocks(tokens, CHAIN_TOKENS))

    def blocks(self, tokens: Sequence[int], num_tokens: int) -> list[str]:
        """As :meth:`chain`, one by one, for blocks of ``num_tokens`` tokens."""
        encoded = array("q", tokens).tobytes()
        step = num_tokens * 8
        digest = hashlib.sha256(self.seed)
        chain = []
        for begin in range(0, len(encoded) - step + 1, step):
            digest.update(encoded[begin : begin + step])
            chain.append(digest.hexdigest()[:CHAIN_DIGITS])
        return chain

    def _name(self, kind: bytes, number: int, tokens: Sequence[int]) -> str:
        digest = hashlib.sha256(self.seed + kind + number.to_bytes(8, "little"))
        digest.update(array("q", tokens).tobytes())
        return digest.hexdigest()
