"""The configuration: one frozen model, read once from one environment variable.

SGLang has no field for a plugin's settings, so they travel in ``KVEVICT_CONFIG``, which every process of
a server inherits. Policy names and options are checked where policies are known (``policies.by_name``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from sgl_kvevict.config_file import CONFIG_SUFFIXES, decode_config, read_config_file, shown_suffixes
from sgl_kvevict.errors import ConfigError, shown

ENV_VAR = "KVEVICT_CONFIG"
_as_written = cache(lambda share: Fraction(repr(share)))  # of the decimal that a share was written as

_PORT = r"0*(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_ENDPOINT = rf"^(tcp://(\*|[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\]):{_PORT}|ipc://.+)$"
_ENDPOINT_ALLOWED = "null (off), or an address to bind: tcp://HOST:PORT (a port from 1 to 65535) or ipc://PATH"
_MAX_QUEUE = 100_000_000
"""Of sizes that are handed to ZMQ, which counts in 32 bits."""


class EventsConfig(BaseModel):
    """Where the scheduler process publishes what happens to its cache, and answers questions about it.

    Every address is bound, on loopback unless another host is named. With several data-parallel schedulers each
    adds its rank to the ports.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    endpoint: str | None = Field(
        default="tcp://127.0.0.1:5657",
        pattern=_ENDPOINT,
        description="PUB socket of the event stream",
        json_schema_extra={"allowed": _ENDPOINT_ALLOWED},
    )
    replay_endpoint: str | None = Field(
        default="tcp://127.0.0.1:5658",
        pattern=_ENDPOINT,
        description="ROUTER socket that sends past event batches again",
        json_schema_extra={"allowed": _ENDPOINT_ALLOWED},
    )
    inspect_endpoint: str | None = Field(
        default="tcp://127.0.0.1:5659",
        pattern=_ENDPOINT,
        description="ROUTER socket that answers 'sgl-kvevict top' and 'sgl-kvevict inspect'",
        json_schema_extra={"allowed": _ENDPOINT_ALLOWED},
    )
    topic: str = Field(
        default="kvevict", description="first frame of every event message", json_schema_extra={"allowed": "a string"}
    )
    buffer_steps: int = Field(
        default=10_000,
        ge=1,
        le=_MAX_QUEUE,
        description="event batches kept for replay",
        json_schema_extra={"allowed": f"an integer from 1 to {_MAX_QUEUE}"},
    )
    hwm: int = Field(
        default=100_000,
        ge=1,
        le=_MAX_QUEUE,
        description="messages that wait for one slow subscriber before it loses some",
        json_schema_extra={"allowed": f"an integer from 1 to {_MAX_QUEUE}"},
    )
    max_queue_size: int = Field(
        default=100_000,
        ge=1,
        le=_MAX_QUEUE,
        description="events that wait for the publishing thread before some are dropped (and counted)",
        json_schema_extra={"allowed": f"an integer from 1 to {_MAX_QUEUE}"},
    )
    expose_tokens: bool = Field(
        default=False,
        description="let token ids and namespaces leave the process through these sockets",
        json_schema_extra={"allowed": "true or false"},
    )


class KVEvictConfig(BaseModel):
    """What to keep of a prefix, and where compression applies.

    Raises:
        pydantic.ValidationError: a field is unknown or out of range; :func:`parse_config` turns it into a
            :class:`ConfigError` that names field, value and what is allowed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    policy: str = Field(
        default="distilled",
        min_length=1,
        description="which entries to keep; 'none' compresses nothing",
        json_schema_extra={"allowed": "the name of a policy ('sgl-kvevict policies' lists them)"},
    )
    budget: float | int = Field(
        default=0.2,
        description="how many entries to keep of a compressed range",
        json_schema_extra={
            "allowed": "a float in (0, 1] (share of the entries; 1.0 keeps everything) "
            "or an integer >= 1 (entries per KV head)"
        },
    )
    light_budget: float | None = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="share to which uncompressed prefixes shrink first when token slots are short, before they shrink "
        "to the budget; null, an integer budget, or one of 1.0 or not below it: they shrink to the budget at once",
        json_schema_extra={"allowed": "a float in (0, 1), or null"},
    )
    min_budget: float | None = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="share to which compressed prefixes are squeezed when token slots are short, before any of them is "
        "dropped; null, an integer budget, or one of 1.0 or not above it: they are not squeezed below the budget",
        json_schema_extra={"allowed": "a float in (0, 1), or null"},
    )
    wait_for_passes: bool = Field(
        default=True,
        description="policy distilled: once scores are learned, a prefix still stays uncompressed until passes have "
        "scored it or token slots are short; false: it is compressed with learned scores when its prompt is complete",
        json_schema_extra={"allowed": "true or false"},
    )
    fit: bool = Field(
        default=False,
        description="policies that passes read: kept entries get values and biases that answer for evicted ones too",
        json_schema_extra={"allowed": "true or false"},
    )
    fit_scope: Literal["causal", "range"] = Field(
        default="causal",
        description="a fitted value holds something of its own block of 64 tokens, or of all compressed with it",
        json_schema_extra={"allowed": "'causal' or 'range'"},
    )
    budget_includes_tail: bool = Field(
        default=False,
        description="count the uncompressed tail as part of the budget, as papers count their observation window",
        json_schema_extra={"allowed": "true or false"},
    )
    tail_tokens: int = Field(
        default=32,
        ge=1,
        description="last tokens of a prompt that stay uncompressed",
        json_schema_extra={"allowed": "an integer >= 1"},
    )
    sink_tokens: int = Field(
        default=4,
        ge=0,
        description="first tokens of a prompt that every KV head keeps",
        json_schema_extra={"allowed": "an integer >= 0"},
    )
    min_prefix_tokens: int = Field(
        default=256,
        ge=1,
        description="a range shorter than this stays uncompressed until it has grown",
        json_schema_extra={"allowed": "an integer >= 1"},
    )
    decode_block: int | None = Field(
        default=None,
        ge=1,
        description="tokens a request generates before they are compressed, with what it generated before",
        json_schema_extra={"allowed": "null (off), or an integer >= 1"},
    )
    score_after_matches: int | None = Field(
        default=1,
        ge=1,
        description="policies that learn from readers: requests that must have found a prefix in the cache before "
        "it is scored (questions: that must have extended it); null: only when asked to (warm)",
        json_schema_extra={"allowed": "an integer >= 1, or null"},
    )
    scoring_pass_tokens: int = Field(
        default=512,
        ge=16,
        description="tokens of the prefix that one extra pass repeats at most, while nobody else is there",
        json_schema_extra={"allowed": "an integer >= 16"},
    )
    pass_share: float = Field(
        default=0.005,
        gt=0,
        le=1,
        description="share of the decode steps that may have a scoring pass before them while users' requests wait or "
        "run; passes are short then",
        json_schema_extra={"allowed": "a float in (0, 1]"},
    )
    score_weights: str | None = Field(
        default="auto",
        min_length=1,
        description="policy distilled: learned scores of this model; auto: those in the user's cache folder or in this "
        "package, if there are any; null: learn anew",
        json_schema_extra={"allowed": "'auto', the path of a file made by 'sgl-kvevict learn', or null"},
    )
    save_score_weights: str | None = Field(
        default=None,
        min_length=1,
        description="policy distilled: file that is written when scores have been learned",
        json_schema_extra={"allowed": "null, or the path of a file"},
    )
    distill_prefixes: int = Field(
        default=8,
        ge=1,
        description="policy distilled: prefixes scored by passes that are learned from before learned scores are tried",
        json_schema_extra={"allowed": "an integer >= 1"},
    )
    observation_bytes: int = Field(
        default=256 * 1024 * 1024,
        ge=0,
        description="memory, outside the KV pool, for what readers attended to until a prefix is compressed; beyond "
        "it the oldest is thrown away",
        json_schema_extra={"allowed": "an integer >= 0"},
    )
    max_questions: int = Field(
        default=32,
        ge=0,
        description="questions that one warm request may give",
        json_schema_extra={"allowed": "an integer >= 0"},
    )
    max_question_chars: int = Field(
        default=1000, ge=1, description="characters of one question", json_schema_extra={"allowed": "an integer >= 1"}
    )
    max_question_tokens: int = Field(
        default=4096,
        ge=1,
        description="tokens of all questions of one request together: each is read by one pass",
        json_schema_extra={"allowed": "an integer >= 1"},
    )
    policy_options: dict[str, Any] = Field(
        default_factory=dict,
        description="options of the policy by name",
        json_schema_extra={"allowed": "an object of options that the policy knows"},
    )
    attention: Literal["auto", "flashinfer", "numba", "triton", "torch"] = Field(
        default="auto",
        description="what computes attention; auto: numba on a CPU (torch where it cannot run), triton on a GPU",
        json_schema_extra={"allowed": "'auto', 'numba' or 'torch' (CPU), 'triton' or 'flashinfer' (GPU)"},
    )
    expose_kept: bool = Field(
        default=False,
        description="GET /server_info also shows which tokens of the largest span each head kept (reads the device)",
        json_schema_extra={"allowed": "true or false"},
    )
    store: str | None = Field(
        default=None,
        min_length=1,
        description="where compressed prefixes are kept beyond the server's life and shared by servers",
        json_schema_extra={
            "allowed": "null (off), the path of a folder, a URL that fsspec knows (s3://BUCKET/NAME), or "
            "mooncake://HOST:PORT/NAME"
        },
    )
    store_bytes: int = Field(
        default=64 * 1024**3,
        ge=1,
        description="size of a store that is a folder; beyond it what was used longest ago is removed",
        json_schema_extra={"allowed": "an integer >= 1"},
    )
    store_wait_ms: int = Field(
        default=500,
        ge=0,
        description="milliseconds that a queued request waits at most for what the store has of its prompt",
        json_schema_extra={"allowed": "an integer >= 0 (0: nothing is read)"},
    )
    events: EventsConfig | None = Field(
        default=None,
        description="event stream and inspection sockets; {} switches them on, on loopback",
        json_schema_extra={"allowed": f"null (off), or an object with any of: {', '.join(EventsConfig.model_fields)}"},
    )

    @field_validator("budget", mode="plain")
    @classmethod
    def _check_budget(cls, value: object) -> float | int:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError("budget is not a number")
        in_range = value >= 1 if isinstance(value, int) else 0 < value <= 1
        if not in_range:
            raise ValueError("budget is out of range")
        return value

    def num_slots(self, num_tokens: int, start: int = 0) -> int:
        """Token slots that a compressed range takes.

        Args:
            num_tokens: length of the range (tokens), >= 0.
            start: logical position of the range's first token; matters only where the budget includes the tail.

        Returns:
            For a share, ``ceil(budget * num_tokens)``, computed exactly from the decimal that was written (so 0.07 of
            100 tokens is 7 slots, not 8). For entries per head, ``min(budget, num_tokens)``.
            Where the budget includes the tail, a share is that of the whole prompt: range, tail and what was compressed
            before together hold ``ceil(budget * prompt)``; of entries per head the tail's are taken off. A range with
            tokens keeps at least one slot.

        Raises:
            ValueError: a number is negative.
        """
        for name, value in (("num_tokens", num_tokens), ("start", start)):
            if value < 0:
                raise ValueError(f"{name} must be >= 0, got {value}")
        if isinstance(self.budget, int):
            slots = self.budget - (self.tail_tokens if self.budget_includes_tail else 0)
        elif self.budget_includes_tail:
            slots = self._slots_up_to(start + num_tokens) - self._slots_up_to(start)
        else:
            slots = self._share_of(num_tokens)
        return min(max(slots, 1), num_tokens)

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """Shares to which prefixes shrink one after the other when token slots are short; () where they do not."""
        budget = self.budget
        if not isinstance(budget, float) or budget == 1 or self.budget_includes_tail:
            return ()
        light = () if self.light_budget is None or self.light_budget <= budget else (self.light_budget,)
        least = () if self.min_budget is None or self.min_budget >= budget else (self.min_budget,)
        return (*light, budget, *least)

    def slots_at(self, share: float, num_tokens: int) -> int:
        """Token slots that a compressed range of ``num_tokens`` tokens takes at a share, at least 1."""
        return max(self._share_of(num_tokens, share), 1)

    def _share_of(self, num_tokens: int, share: float | None = None) -> int:
        exact = _as_written(self.budget if share is None else share)
        return -(-exact.numerator * num_tokens // exact.denominator)

    def _slots_up_to(self, end: int) -> int:
        """Slots of all compressed tokens before ``end``, when a tail that the budget includes follows there."""
        return max(self._share_of(end + self.tail_tokens) - self.tail_tokens, 0) if end else 0


def parse_config(values: Mapping[str, Any], source: str) -> KVEvictConfig:
    """Check configuration values.

    Args:
        values: fields of :class:`KVEvictConfig`; missing ones take their defaults.
        source: where the values come from, named in the error.

    Raises:
        ConfigError: one line for every bad field: its name, its value and what is allowed.
    """
    try:
        return KVEvictConfig.model_validate(dict(values))
    except ValidationError as error:
        problems = [_describe(problem["loc"], values) for problem in error.errors()]
        lines = "\n".join(f"  - {problem}" for problem in dict.fromkeys(problems))
        raise ConfigError(f"invalid configuration in {source}:\n{lines}") from error


def load_config(environ: Mapping[str, str] | None = None) -> KVEvictConfig:
    """Read the configuration from ``KVEVICT_CONFIG``.

    The variable holds a JSON object, or the path of a ``.json``, ``.yaml`` or ``.yml`` file. Unset or empty
    means the defaults.

    Args:
        environ: environment to read; default: this process's.

    Raises:
        ConfigError: not a JSON object and not such a path, an unreadable file, or a bad field.
    """
    text = (os.environ if environ is None else environ).get(ENV_VAR, "").strip()
    if not text:
        return KVEvictConfig()
    if text.startswith("{"):
        return parse_config(decode_config(text, ".json", ENV_VAR), ENV_VAR)
    if Path(text).suffix not in CONFIG_SUFFIXES:
        raise ConfigError(
            f"{ENV_VAR}: got {shown(text)}; allowed: a JSON object or the path of a {shown_suffixes()} file with one"
        )
    return parse_config(read_config_file(Path(text)), text)


def _describe(location: tuple[str | int, ...], values: Mapping[str, Any]) -> str:
    model: type[BaseModel] = KVEvictConfig
    if location[0] == "events" and len(location) > 1:
        model, values, location = EventsConfig, values["events"], location[1:]
        prefix = "events."
    else:
        prefix = ""
    name = str(location[0])
    field = model.model_fields.get(name)
    if field is None:
        return f"{prefix}{name}: unknown field (value {shown(values[name])}); allowed: {', '.join(model.model_fields)}"
    extra = field.json_schema_extra
    allowed = extra["allowed"] if isinstance(extra, dict) else ""
    return f"{prefix}{name}: got {shown(values[name])}; allowed: {allowed}"
