"""The configuration: one frozen model, read once from the environment variable ``KVEVICT_CONFIG``.

SGLang has no field for a plugin's settings; every process of a server inherits the variable. Policy names and options
are checked by ``policies.by_name``. ``tools/write_tables.py`` writes the README's table from the descriptions below.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from kvevict_kernels.row_sizes import ROWS_IN_PLACE
from sgl_kvevict.errors import ConfigError, shown
from sgl_kvevict.fields import allowed
from sgl_kvevict.paths import expanded

ENV_VAR = "KVEVICT_CONFIG"
HOST_PER_POOL = 2
"""Bytes of ``host_bytes`` per byte of the pool by default: the default of SGLang's ``--hicache-ratio``."""
LEAST_SHARE_OF_16_BITS = 0.1
"""Default of ``min_budget`` where rows have 16 bits."""
Bits = Literal["auto", 16]
"""Of a number in a row: 16 as the pool stores it; auto: 4, but for the first tokens of a path."""
_as_written = lru_cache(256)(lambda share: Fraction(repr(share)).as_integer_ratio())
"""Numerator and denominator of a share's decimal notation; clients choose shares, too."""

_PORT = r"0*(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_Endpoint = Annotated[
    str,
    Field(
        pattern=rf"^(tcp://(\*|[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\]):{_PORT}|ipc://[^\x00]+)$",
        json_schema_extra={"allowed": "an address to bind: tcp://HOST:PORT (a port from 1 to 65535) or ipc://PATH"},
    ),
]


def _expand(path: str, info: ValidationInfo) -> str:
    return path if "://" in path else str(expanded(path, str(info.field_name)))


_Path = Annotated[str, Field(pattern=r"^[^\x00]+$"), AfterValidator(_expand)]
"""A path with ``~`` replaced, or a URL."""


class EventsConfig(BaseModel):
    """The socket on which each scheduler answers questions about its cache.

    The address is bound; each data-parallel scheduler adds its rank to the port.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    endpoint: _Endpoint = Field(
        default="tcp://127.0.0.1:5659", description="ROUTER: answers `sgl-kvevict top` and `inspect`"
    )
    expose_tokens: bool = Field(
        default=False, description="token ids and namespaces may leave the process through this socket"
    )


class KVEvictConfig(BaseModel):
    """Which entries of a prefix are kept, and where compression applies; made and checked by :func:`parse_config`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    policy: str = Field(
        default="distilled",
        min_length=1,
        description="a policy of docs/policies.md, or `package.module:factory` for your own",
        json_schema_extra={"allowed": "the name of a policy (`sgl-kvevict policies` lists them)"},
    )
    budget: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="part of its uncompressed bytes that a compressed prefix keeps "
        "(docs/configuration.md#how-much-of-a-prefix-is-kept). 1.0 keeps all",
    )
    compress: Literal["at once", "when short"] = Field(
        default="at once",
        description="when a complete prompt shrinks to `budget`. when short: once token slots are short; until then "
        "answers are those of the uncompressed cache (docs/configuration.md#exact-while-there-is-room)",
    )
    bits: Bits = Field(
        default="auto",
        description="bits of a number in compressed prefixes. auto: 4, but the first tokens (`sink_tokens`) 16; where "
        "4 cannot be read all have 16 (the log at start says why; docs/design/prefix.md#packing)",
        json_schema_extra={"allowed": "'auto' or 16"},
    )
    min_budget: float | None = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="part of its uncompressed bytes below which no prefix shrinks. From `budget` down to it a prefix "
        "shrinks only when slots are short and that loses less than dropping a leaf; null: not below `budget`. Default "
        "with `bits: 16`: 0.1. No effect with a `budget` of 1.0",
    )
    tail_tokens: int = Field(
        default=32,
        ge=1,
        description="last tokens of a prompt that every KV head keeps; at most half of what is kept at `min_budget`",
    )
    sink_tokens: int = Field(default=4, ge=0, description="first tokens of a prompt that every KV head keeps")
    min_prefix_tokens: int = Field(
        default=256, ge=1, description="shorter ranges stay uncompressed until they have grown"
    )
    answer_block: int | None = Field(
        default=512,
        ge=1,
        description="an answer in progress is compressed, too, whenever it has grown by so many tokens, but at least "
        "`min_prefix_tokens`, and again at its end. null: with the prompt of the next turn "
        "(docs/design/prefix.md#answers)",
    )
    score_weights: _Path | None = Field(
        default="auto",
        description="file of what was learned of this model (scores, statistics of rows); what it lacks is learned "
        "before the port opens, and written. auto: by the model's fingerprint in this package or in "
        "`~/.cache/sgl-kvevict/score-weights`; null: learned at each start, kept nowhere",
        json_schema_extra={"allowed": "'auto', the path of a file, which may not exist yet, or null"},
    )
    score_texts: _Path | None = Field(
        default=None,
        description="folder of UTF-8 files to learn scores and statistics from; null: texts of the Python installation "
        "(English manual, code, tables)",
        json_schema_extra={"allowed": "the path of a folder, or null"},
    )
    policy_options: dict[str, Any] = Field(
        default_factory=dict,
        description="options of the policy (docs/policies.md)",
        json_schema_extra={"allowed": "an object of options that the policy knows"},
    )
    attention: Literal["auto", "flashinfer", "numba", "triton", "torch"] = Field(
        default="auto",
        description="implementation of attention; auto: numba on a CPU (torch where it cannot run), triton on a GPU "
        "(docs/gpu.md)",
        json_schema_extra={"allowed": "'auto', 'numba' or 'torch' (CPU), 'triton' or 'flashinfer' (GPU)"},
    )
    host_bytes: ByteSize | None = Field(
        default=None,
        ge=0,
        description="host memory of each rank, allocated at start, for what the pool drops or evicts: it comes back by "
        "a copy. null: at most a quarter of the free memory for all ranks together (docs/design/prefix.md#host-memory)",
        json_schema_extra={
            "allowed": "null (twice the pool), 0 (off), or an amount like 64MiB, 40GB or a number of bytes"
        },
    )
    store: _Path | None = Field(
        default=None,
        description="where prefixes are written when they reach `budget`, so that they outlive the server, and other "
        "servers find them; null: a restart loses all (docs/store.md)",
        json_schema_extra={
            "allowed": "null (off), the path of a folder, a URL that fsspec knows (s3://BUCKET/NAME), or "
            "mooncake://HOST:PORT/NAME"
        },
    )
    store_bytes: ByteSize = Field(
        default=ByteSize(64 * 1024**3),
        ge=1,
        description="size of a store that is a folder (64 GiB); beyond it the least recently used segment is removed",
    )
    store_complete: bool = Field(
        default=False,
        description="whether files also hold what was evicted from a prefix, so that a request with `complete` or "
        "`share` gets it after a restart; they are then a quarter larger (docs/store.md#complete-prefixes)",
    )
    store_wait_ms: int = Field(
        default=500,
        ge=0,
        description="milliseconds that a queued request waits at most for the store; 0: nothing is read",
    )
    events: EventsConfig | None = Field(
        default=None,
        description="socket for inspection; `{}` opens it on loopback (docs/serve.md#the-socket)",
        json_schema_extra={"allowed": f"null (off), or an object with any of: {', '.join(EventsConfig.model_fields)}"},
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Refuse fields that contradict each other, each in a line; a default that does not fit has no effect.

        ``store_complete`` needs a store, and host memory that keeps what is evicted until it is stored.
        """
        problems = []
        # A budget below the default of ``min_budget`` is allowed: the default then has no effect.
        least = self.min_budget if "min_budget" in self.model_fields_set else None
        if least is not None and least > self.budget:
            problems.append(
                f"min_budget: got {least}, budget is {self.budget}; allowed: a float in (0, budget], or null"
            )
        if self.store_complete and (self.store is None or self.host_bytes == 0 or self.budget == 1):
            problems.append(
                f"store_complete: got true, store is {self.store!r}, host_bytes is {self.host_bytes}, "
                f"budget is {self.budget}; allowed: false, or true with a store, host memory and a budget below 1"
            )
        if problems:
            raise ConfigError("\n".join(problems))
        return self

    def num_slots(self, num_tokens: int, start: int = 0, share: float | None = None) -> int:
        """Token slots that the tokens ``[start, start + num_tokens)`` of a path take at a share (None: ``budget``).

        ``ceil(share * num_tokens)``, computed from the decimal as written (0.07 of 100 tokens is 7 slots, not 8), or
        the sinks if they are more. A range with tokens has at least one slot.
        """
        numerator, denominator = _as_written(self.budget if share is None else share)
        slots = -(-numerator * num_tokens // denominator)
        return min(max(slots, self.sink_tokens - start, 1), num_tokens)

    def num_sinks(self, num_tokens: int, start: int = 0) -> int:
        """First tokens of the range ``[start, start + num_tokens)`` of a path that keep rows of 16 bits beside others.

        They stay in their own slots. 0: all rows have 16 bits.
        """
        return 0 if self.bits == 16 else min(max(self.sink_tokens - start, 0), num_tokens)

    def tokens_kept(self, num_slots: int, num_tokens: int, start: int = 0) -> dict[int, int]:
        """Entries that a head keeps of a range in so many token slots, on average, by the bits of their rows.

        Rows have 16 bits if all fit; else, with ``auto``, 4, but for those of sinks.
        """
        if self.bits == 16 or num_slots >= num_tokens:
            return {16: min(num_slots, num_tokens)}
        num_sinks = self.num_sinks(num_tokens, start)
        return {16: num_sinks, 4: min(num_tokens - num_sinks, (num_slots - num_sinks) * ROWS_IN_PLACE)}

    @property
    def fresh_share(self) -> float:
        """Share of their bytes that blocks of an answer have at most until several go to the budget together.

        What is worth keeping may all lie in one block, as a table does. Twice the budget keeps every entry by default.
        """
        return round(min(2 * self.budget, (1 + self.budget) / 2), 6)

    @property
    def shares(self) -> tuple[float, ...]:
        """Descending shares of their bytes that compressed prefixes have in turn, the budget first.

        With rows of fewer bits than 16 there is a step between ``budget`` and a much smaller ``min_budget``.
        """
        budget, least = self.budget, self.min_budget
        if budget == 1:
            return (1.0,)
        if self.bits == 16 and "min_budget" not in self.model_fields_set:
            least = LEAST_SHARE_OF_16_BITS
        if least is None or least >= budget:
            return (budget,)
        is_far = self.bits != 16 and budget > 2 * least
        # Without it a prefix under pressure would go from the budget to a quarter of it at once, and lose more than it
        # has to.
        between = (round((budget + least) / 2, 6),) if is_far else ()
        return (budget, *between, least)


def parse_config(values: Mapping[str, Any], source: str) -> KVEvictConfig:
    """Check configuration values; ``source`` says in errors where they come from.

    ConfigError: one line for every bad field: its name, its value and what is allowed.
    """
    try:
        return KVEvictConfig.model_validate(dict(values))
    except ValidationError as error:
        problems = [
            line
            for problem in error.errors()
            for line in _describe(problem["loc"], problem.get("ctx", {}).get("error"), values).splitlines()
        ]
        # Each once: a value that fits none of several types is reported for each of them.
        lines = "\n".join(f"  - {problem}" for problem in dict.fromkeys(problems))
        raise ConfigError(f"invalid configuration in {source}:\n{lines}") from error


def load_config(environ: Mapping[str, str] | None = None) -> KVEvictConfig:
    """Read ``KVEVICT_CONFIG``, a JSON object or a ``.json`` file's path (unset: defaults); ConfigError if wrong."""
    text = (os.environ if environ is None else environ).get(ENV_VAR, "").strip()
    if not text:
        return KVEvictConfig()
    if text.startswith("{"):
        return parse_config(decode_config(text, ENV_VAR), ENV_VAR)
    if Path(text).suffix != ".json":
        raise ConfigError(f"{ENV_VAR}: got {shown(text)}; allowed: a JSON object or the path of a .json file with one")
    return parse_config(read_config_file(Path(text)), text)


def read_config_file(path: Path) -> dict[str, Any]:
    """Read the values of a JSON file, unchecked; ConfigError: not a ``.json`` file, unreadable, or not one object."""
    if path.suffix != ".json":
        raise ConfigError(f"configuration file: got {str(path)!r}; allowed: a .json file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {str(path)!r} cannot be read: {error}") from error
    return decode_config(text, str(path))


def decode_config(text: str, source: str) -> dict[str, Any]:
    """Decode the values of a configuration, unchecked; ``source`` is for error messages.

    ConfigError: the text is not JSON, names a field twice, or is not one object.
    """
    try:
        # By default the second of two equal names wins, and half of a merged file is lost unseen.
        values = json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ConfigError(f"{source} is nested too deeply") from error
    except ValueError as error:  # also an integer with thousands of digits
        raise ConfigError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: got {shown(values)}; allowed: an object of configuration fields")
    return values


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"{', '.join(map(shown, twice))} is there twice; allowed: once")
    return dict(pairs)


def _describe(location: tuple[str | int, ...], error: object, values: Mapping[str, Any]) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    model: type[BaseModel] = KVEvictConfig
    prefix = ""
    if location[0] == "events" and len(location) > 1:
        model, values, location, prefix = EventsConfig, values["events"], location[1:], "events."
    name = str(location[0])
    field = model.model_fields.get(name)
    if field is None:
        return f"{prefix}{name}: unknown field (value {shown(values[name])}); allowed: {', '.join(model.model_fields)}"
    return f"{prefix}{name}: got {shown(values[name])}; allowed: {allowed(field)}"
