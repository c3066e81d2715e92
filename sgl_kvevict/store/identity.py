"""Names in a store: hashes of the identity (model, policy), namespace and tokens, so nothing else is ever found."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, Any

import msgspec

from kvevict_kernels.row_sizes import row_bytes

FORMAT_VERSION = 7
"""Version of everything in a store. Segments of another version are never found."""
BLOCK_TOKENS = 64
"""Tokens of a block: prefixes of whole blocks have names, by which segments are found."""
# Nine digits: a position of a forged name stays small enough to compute a limit of bytes with. ``\Z``: with ``$`` a
# name could end in a newline.
_KEY = r"^[0-9a-f]{64}-[0-9]{1,9}-[0-9]{1,9}\Z"
is_key = re.compile(_KEY).fullmatch
KEY = Annotated[str, msgspec.Meta(pattern=_KEY)]
"""A segment's name: a hash, and the logical positions of its first token and after its last one."""


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
        statistics: hash of the model's statistics with which rows of 4 bits are written and read; empty: all rows
            have 16 bits.
        min_prefix_tokens: number of tokens by which a prefix is looked up.
        sink_tokens: first tokens of a path that have rows of 16 bits beside others of 4.
    """

    min_prefix_tokens: int
    model: str = ""
    architecture: str = ""
    dtype: str = ""
    scales: tuple[float, ...] = ()
    num_layers: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    own_value_dim: int = 0
    rotary: str = ""
    rank: int = 0
    num_ranks: int = 1
    policy: str = ""
    sink_tokens: int = 0
    statistics: str = ""

    def describe(self) -> dict[str, Any]:
        """Plain values, as ``sgl-kvevict store show`` prints them."""
        return {"format": FORMAT_VERSION, **asdict(self), "scales": list(self.scales)}

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits."""
        # Two servers have to write the same text, whatever order their fields have.
        text = json.dumps(self.describe(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def block_tokens(self) -> int:
        """Tokens of a block: no more than the shortest prefix that is looked up has."""
        # A prompt of ``min_prefix_tokens`` would otherwise have no whole block, and no name to be found by.
        return min(BLOCK_TOKENS, self.min_prefix_tokens)

    def num_sinks(self, start: int, end: int) -> int:
        """First tokens of the segment ``[start, end)`` of a path that have rows of 16 bits beside others of 4."""
        return max(min(self.sink_tokens, end) - start, 0) if self.statistics else 0

    def widths(self, bits: int = 16) -> tuple[tuple[str, int], tuple[str, int]]:
        """Numbers of a key's and of a value's row, by name; of fewer than 16 bits bytes."""
        return ("k", row_bytes(bits, self.head_dim, 1)), ("v", row_bytes(bits, self.own_value_dim, 1))

    def namespace(self, extra_key: str | None, cache_salt: str | None) -> Namespace:
        """Return the names of one tenant."""
        digest = hashlib.sha256(b"sgl-kvevict namespace\n" + bytes.fromhex(self.digest))
        for part in (extra_key, cache_salt):
            if part is None:
                # The byte in front and the length keep ``None`` and "" apart, and ("ab", "c") and ("a", "bc"): two
                # tenants never have one namespace.
                digest.update(b"\x00")
            else:
                # A client's JSON may hold half of a surrogate pair, which plain UTF-8 refuses.
                encoded = part.encode("utf-8", "surrogatepass")
                digest.update(b"\x01" + len(encoded).to_bytes(8, "little") + encoded)
        return Namespace(digest.digest())


@dataclass(frozen=True)
class Namespace:
    """Names of one tenant's segments and prefixes, all hashed with the 32 bytes of ``seed``.

    They cannot be computed without the tenant's ``cache_salt``.
    """

    seed: bytes

    def chain(self, tokens: Sequence[int], block_tokens: int) -> list[str]:
        """Names of the prefixes of 1, 2, 3, ... whole blocks of ``block_tokens`` tokens, 64 hexadecimal digits each."""
        encoded, step = array("q", tokens).tobytes(), block_tokens * 8
        digest = hashlib.sha256(self.seed)
        names = []
        # One hash goes on over all blocks: names of all prefixes of a long prompt cost one pass over its tokens.
        for begin in range(0, len(encoded) - step + 1, step):
            digest.update(encoded[begin : begin + step])
            names.append(digest.hexdigest())
        return names

    def segment(self, tokens: Sequence[int], start: int) -> str:
        """Name of the segment that begins at logical position ``start`` of a path and ends with its last token."""
        # The word keeps names of segments and of prefixes apart: both hash the same seed and tokens.
        digest = hashlib.sha256(self.seed + b"segment" + start.to_bytes(8, "little"))
        digest.update(array("q", tokens).tobytes())
        return f"{digest.hexdigest()}-{start}-{len(tokens)}"


def key_bounds(key: str) -> tuple[int, int]:
    """Logical positions of the first token of a segment and after its last one, from its name."""
    _, start, end = key.split("-")
    return int(start), int(end)
