"""Options of one request, in ``sampling_params.custom_params["kvevict"]``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import ConfigError, shown
from sgl_kvevict.fields import allowed

REQUEST_KEY = "kvevict"
MIN_TICKET_CHARS = 16
MAX_TICKET_CHARS = 128
_FIELD = f"custom_params.{REQUEST_KEY}"
_EXCLUSIVE = (
    *(("exact", "warm"), ("complete", "warm"), ("complete", "exact")),
    *(("share", "warm"), ("share", "exact"), ("share", "complete")),
    ("retain", "exact"),
)
"""Options of which a request has the first or the second."""
MAX_RETAIN_S = 86_400
_NUMBER = "a number above 0, at most {}"


class RequestOptions(BaseModel):
    """Options of one request; :func:`parse_request_options` turns a ``ValidationError`` into a :class:`ConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    warm: bool = Field(default=False, description="the prompt is a prefix that will be shared: score it now")
    questions: list[str] = Field(
        default=[],
        description="texts that will follow the prefix: entries that they attend to are kept",
        json_schema_extra={"allowed": "a list of strings"},
    )
    ticket: str | None = Field(
        default=None,
        min_length=MIN_TICKET_CHARS,
        max_length=MAX_TICKET_CHARS,
        description="a random text that only the sender knows: the outcome is published under its hash",
        json_schema_extra={"allowed": f"a string of {MIN_TICKET_CHARS} to {MAX_TICKET_CHARS} characters, or null"},
    )
    exact: bool = Field(
        default=False,
        description="read nothing compressed: match what is uncompressed, compute the rest again",
    )
    retain: float | None = Field(
        default=None,
        gt=0,
        le=MAX_RETAIN_S,
        description="seconds from the end of the prefill for which the prompt counts as used",
        json_schema_extra={"allowed": _NUMBER.format(MAX_RETAIN_S) + ", or null"},
    )
    complete: bool = Field(
        default=False,
        description="read all entries of compressed prefixes that pool and host have, with 4 bits at least",
    )
    share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="read at least this share of their entries, if they have it",
        json_schema_extra={"allowed": _NUMBER.format(1) + ", or null"},
    )

    @property
    def least_share(self) -> float:
        """Share of the entries of compressed prefixes that the request wants to read; 0: it does not say."""
        return 1.0 if self.complete else self.share or 0.0


def parse_request_options(custom_params: object, config: KVEvictConfig) -> RequestOptions | None:
    """Read and check the options of a request; None if it has none of ours. Other custom parameters are ignored.

    Raises:
        ConfigError: names the bad field, the beginning of its value and what is allowed.
    """
    values = custom_params.get(REQUEST_KEY) if isinstance(custom_params, Mapping) else None
    if values is None:
        return None
    if isinstance(values, Mapping):
        _check_size(values)
        _check_questions(values.get("questions"), config)
    try:
        options = RequestOptions.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        where = shown(".".join([_FIELD, *map(str, problem["loc"])]))[1:-1]  # without quotes: it is a name
        raise ConfigError(f"{where}: got {shown(problem['input'])}; allowed: {_allowed(problem['loc'])}") from error
    for name in ("questions", "ticket"):
        if getattr(options, name) and not options.warm:
            value = shown(getattr(options, name))
            raise ConfigError(f"{_FIELD}.{name}: got {value} without warm; allowed: only together with 'warm': true")
    for name, other in _EXCLUSIVE:
        if getattr(options, name) and getattr(options, other):
            raise ConfigError(f"{_FIELD}.{name}: got {shown(values[name])} together with {other}; allowed: one of them")
    return options


def ticket_digest(ticket: str) -> str:
    """Return the hash under which a ticket's outcome is published: only the sender can relate it to a request."""
    return hashlib.sha256(ticket.encode()).hexdigest()


def _allowed(location: tuple[int | str, ...]) -> str:
    """What is allowed where a value is wrong: ``location`` as in pydantic's errors, () for the whole object."""
    field = RequestOptions.model_fields.get(str(location[0])) if location else None
    if field is not None:
        return "a string" if len(location) > 1 else allowed(field)
    names = ", ".join(RequestOptions.model_fields)
    return names if location else f"an object with any of: {names}"


def _check_size(values: Mapping[str, object]) -> None:
    """Refuse an object with more options than there are before each of them is validated."""
    if len(values) > len(RequestOptions.model_fields):
        names = ", ".join(RequestOptions.model_fields)
        raise ConfigError(f"{_FIELD}: got {len(values)} options ({shown(values)}); allowed: any of {names}")


def _check_questions(questions: object, config: KVEvictConfig) -> None:
    """Refuse too many or too long questions before each of them is validated."""
    if not isinstance(questions, list):
        return
    if len(questions) > config.max_questions:
        raise ConfigError(
            f"{_FIELD}.questions: got {len(questions)} questions; allowed: at most {config.max_questions} (the "
            "server's max_questions)"
        )
    for i, question in enumerate(questions):
        if isinstance(question, str) and len(question) > config.max_question_chars:
            raise ConfigError(
                f"{_FIELD}.questions.{i}: got {len(question)} characters ({shown(question)}); allowed: at most "
                f"{config.max_question_chars} (the server's max_question_chars)"
            )
