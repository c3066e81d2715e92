"""What a request may ask of the compressed cache, in ``sampling_params.custom_params["kvevict"]``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import ConfigError, cut, shown

REQUEST_KEY = "kvevict"
MIN_TICKET_CHARS = 16
MAX_TICKET_CHARS = 128
_ROOM = 1024
"""Characters that options take beside their questions: names, a ticket."""
_ALLOWED = (
    "an object with 'warm' (true or false), 'questions' (a list of strings, only with warm), 'ticket' (a string of "
    f"{MIN_TICKET_CHARS} to {MAX_TICKET_CHARS} characters, only with warm) and 'exact' (true or false, not with warm)"
)


class RequestOptions(BaseModel):
    """Options of one request.

    Raises:
        pydantic.ValidationError: a field is unknown or of the wrong type; :func:`parse_request_options` turns it
            into a :class:`ConfigError`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    warm: bool = Field(default=False, description="the prompt is a prefix that will be shared: score it now")
    questions: list[str] = Field(
        default=[], description="texts that will follow the prefix; what they attend to is kept"
    )
    ticket: str | None = Field(
        default=None,
        min_length=MIN_TICKET_CHARS,
        max_length=MAX_TICKET_CHARS,
        description="a random text that only the sender knows: what became of the wish is told under its hash",
    )
    exact: bool = Field(
        default=False,
        description="read nothing compressed: match what is uncompressed, compute the rest again",
    )


def parse_request_options(custom_params: object, config: KVEvictConfig) -> RequestOptions | None:
    """Check what a request asks for. What is not ours passes, whatever it is.

    Args:
        custom_params: of the request's sampling parameters; SGLang accepts any JSON value.
        config: limits on questions.

    Returns:
        None if the request asks for nothing.

    Raises:
        ConfigError: names the bad field, its value (the beginning of it) and what is allowed.
    """
    values = custom_params.get(REQUEST_KEY) if isinstance(custom_params, Mapping) else None
    if values is None:
        return None
    _check_size(values, config)
    try:
        options = RequestOptions.model_validate(values)
    except (ValidationError, RecursionError) as error:
        path: tuple[int | str, ...] = ()
        value = values
        if isinstance(error, ValidationError):
            problem = error.errors()[0]
            path, value = problem["loc"], problem["input"]
        where = cut(repr(".".join([REQUEST_KEY, *map(str, path)]))[1:-1])
        raise ConfigError(f"custom_params.{where}: got {shown(value)}; allowed: {_ALLOWED}") from error
    for name in ("questions", "ticket"):
        if getattr(options, name) and not options.warm:
            got = shown(getattr(options, name))
            raise ConfigError(f"custom_params.{REQUEST_KEY}.{name}: got {got}; allowed: {_ALLOWED}")
    if options.exact and options.warm:
        raise ConfigError(f"custom_params.{REQUEST_KEY}.exact: got True together with warm; allowed: {_ALLOWED}")
    return options


def ticket_digest(ticket: str) -> str:
    """Return the name under which everybody may see what became of a wish: it tells only who knows the ticket."""
    return hashlib.sha256(ticket.encode()).hexdigest()


def _check_size(values: object, config: KVEvictConfig) -> None:
    """Refuse what is too large before anything walks through all of it."""
    field = f"custom_params.{REQUEST_KEY}"
    questions = values.get("questions") if isinstance(values, Mapping) else None
    if isinstance(questions, list):
        if len(questions) > config.max_questions:
            raise ConfigError(
                f"{field}.questions: got {len(questions)} questions; allowed: at most {config.max_questions} "
                "(the server's max_questions)"
            )
        for i, question in enumerate(questions):
            if isinstance(question, str) and len(question) > config.max_question_chars:
                raise ConfigError(
                    f"{field}.questions.{i}: got {len(question)} characters ({shown(question)}); allowed: at most "
                    f"{config.max_question_chars} (the server's max_question_chars)"
                )
    limit = _ROOM + config.max_questions * (config.max_question_chars + 1)
    if _is_larger(values, limit):
        raise ConfigError(f"{field}: got more than {limit} characters ({shown(values)}); allowed: {_ALLOWED}")


def _is_larger(values: object, limit: int) -> bool:
    """Whether a value has more than ``limit`` characters and items; looks at no more than that."""
    size, rest = 0, [values]
    while rest and size <= limit:
        value = rest.pop()
        size += 1
        if isinstance(value, str | bytes):
            size += len(value)
        elif isinstance(value, Mapping | list | tuple):
            size += len(value)
            if size <= limit:
                rest.extend((*value.keys(), *value.values()) if isinstance(value, Mapping) else value)
    return size > limit
