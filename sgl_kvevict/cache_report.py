"""What the client of a request is told about the cache: ``cached_tokens_details`` in the answer's ``meta_info``.

SGLang passes this object of whole numbers from the scheduler to the client with every part of an answer. It has tokens
by place (``device``, ``host``, ``storage``) there; the keys of this module are added to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from kvevict_kernels.row_sizes import WIDTHS
from sgl_kvevict.errors import ConfigError, shown

DETAILS = "cached_tokens_details"
"""Key of ``meta_info``."""
COMPRESSED = "kvevict_compressed"
PERCENT = {bits: f"kvevict_percent_{bits}_bits" for bits in WIDTHS}
COMPUTED_AGAIN = "kvevict_computed_again"
PREFILLED_COMPRESSED = "kvevict_prefilled_compressed"


@dataclass(frozen=True)
class CompressedRead:
    """What was read of those tokens of a prompt that were compressed.

    Attributes:
        num_tokens: compressed tokens.
        shares: part of their entries that was read with rows of 16 and of 4 bits (:data:`WIDTHS`); the others had been
            evicted.
    """

    num_tokens: int = 0
    shares: tuple[float, ...] = (0.0, 0.0)

    @property
    def share(self) -> float:
        """Part of the entries of the compressed tokens that was read, 0 to 1; 1 if no token was compressed."""
        return sum(self.shares) if self.num_tokens else 1.0

    @property
    def bits(self) -> float:
        """Mean bits per number of the entries that were read; 16 if no token was compressed."""
        return self._bits_of_all / self.share if self.num_tokens and self.share else float(WIDTHS[0])

    @property
    def lost_bits(self) -> float:
        """How much less was read than of an uncompressed prompt, in bits of each number of a token, summed."""
        return self.num_tokens * (WIDTHS[0] - self._bits_of_all)

    @property
    def _bits_of_all(self) -> float:
        """Bits that were read per number of the compressed tokens, evicted ones included."""
        return WIDTHS[0] * self.shares[0] + WIDTHS[1] * self.shares[1]


@dataclass(frozen=True)
class CacheReport:
    """What an answer was read from, and what of its prompt did not have to be computed.

    Attributes:
        device: prompt tokens that were found in the KV pool.
        host: prompt tokens that came from the host's memory.
        storage: prompt tokens that came from the store.
        compressed: what was read of the prompt's compressed tokens. They are the found ones, and those which the
            request has computed itself and which were compressed before its answer was complete.
        computed_again: of a request with ``exact``: prompt tokens that it has computed although the pool had them.
        prefilled_compressed: prompt tokens that the request has computed, and that were compressed before its prefill
            was complete (prompts longer than the pool).
    """

    device: int = 0
    host: int = 0
    storage: int = 0
    compressed: CompressedRead = CompressedRead()
    computed_again: int = 0
    prefilled_compressed: int = 0

    @staticmethod
    def of(meta_info: Mapping[str, object]) -> CacheReport:
        """Read the report of an answer.

        Args:
            meta_info: of the answer of ``/generate``, of ``sgl.Engine.generate``, of SGLang's frontend language
                (``state.get_meta_info(name)``), or ``choices[0].meta_info`` of ``/v1/chat/completions`` with
                ``"return_meta_info": true``.

        Returns:
            The report; of a server without this plugin only tokens by place, and zeros if nothing was found.

        Raises:
            ConfigError: ``meta_info`` is none of SGLang's, or one of the report's fields is no whole number.
        """
        if "prompt_tokens" not in meta_info:
            raise ConfigError(f"meta_info: got {shown(dict(meta_info))}; allowed: an object with 'prompt_tokens'")
        # SGLang sends null for a request that found nothing.
        details = meta_info.get(DETAILS) or {}
        if not isinstance(details, Mapping):
            raise ConfigError(f"meta_info.{DETAILS}: got {shown(details)}; allowed: an object, or null")

        def number(key: str) -> int:
            value = details.get(key, 0)
            if not isinstance(value, int):
                raise ConfigError(f"meta_info.{DETAILS}.{key}: got {shown(value)}; allowed: a whole number")
            return value

        compressed = CompressedRead(
            number(COMPRESSED),
            tuple(number(PERCENT[bits]) / 100 for bits in WIDTHS),
        )
        places = number("device"), number("host"), number("storage")
        costs = number(COMPUTED_AGAIN), number(PREFILLED_COMPRESSED)
        return CacheReport(*places, compressed, *costs)

    @cached_property
    def details(self) -> dict[str, int]:
        """What is added to SGLang's ``cached_tokens_details``; only the first key is always there."""
        read = self.compressed
        details = {COMPRESSED: read.num_tokens}
        if read.num_tokens:
            details |= {PERCENT[bits]: round(100 * share) for bits, share in zip(WIDTHS, read.shares, strict=True)}
        costs = {COMPUTED_AGAIN: self.computed_again, PREFILLED_COMPRESSED: self.prefilled_compressed}
        return details | {key: num_tokens for key, num_tokens in costs.items() if num_tokens}
