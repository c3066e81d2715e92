"""Options of one request, in ``sampling_params.custom_params["kvevict"]``."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sgl_kvevict.errors import ConfigError, shown
from sgl_kvevict.fields import allowed

REQUEST_KEY = "kvevict"
_FIELD = f"custom_params.{REQUEST_KEY}"
_EXCLUSIVE = (("complete", "exact"), ("share", "exact"), ("share", "complete"), ("retain", "exact"))
"""Options of which a request has the first or the second."""
MAX_RETAIN_S = 86_400
_NUMBER = "a number above 0, at most {}"


class RequestOptions(BaseModel):
    """Options of one request; :func:`parse_request_options` turns a ``ValidationError`` into a :class:`ConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    exact: bool = Field(
        default=False,
        description="read nothing compressed: match what is uncompressed, compute the rest again",
    )
    retain: float | None = Field(
        default=None,
        gt=0,
        le=MAX_RETAIN_S,
        description="seconds from the end of the answer for which the prompt counts as used",
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


def parse_request_options(custom_params: object) -> RequestOptions | None:
    """Read and check the options of a request; None if it has none of ours. Other custom parameters are ignored.

    ConfigError: names the bad field, the beginning of its value and what is allowed.
    """
    values = custom_params.get(REQUEST_KEY) if isinstance(custom_params, Mapping) else None
    if values is None:
        return None
    # Before each of them is validated.
    if isinstance(values, Mapping) and len(values) > len(RequestOptions.model_fields):
        names = ", ".join(RequestOptions.model_fields)
        raise ConfigError(f"{_FIELD}: got {len(values)} options ({shown(values)}); allowed: any of {names}")
    try:
        options = RequestOptions.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        where = shown(".".join([_FIELD, *map(str, problem["loc"])]))[1:-1]  # without quotes: it is a name
        raise ConfigError(f"{where}: got {shown(problem['input'])}; allowed: {_allowed(problem['loc'])}") from error
    for name, other in _EXCLUSIVE:
        if getattr(options, name) and getattr(options, other):
            raise ConfigError(f"{_FIELD}.{name}: got {shown(values[name])} together with {other}; allowed: one of them")
    return options


def _allowed(location: tuple[int | str, ...]) -> str:
    """What is allowed where a value is wrong: ``location`` as in pydantic's errors, () for the whole object."""
    field = RequestOptions.model_fields.get(str(location[0])) if location else None
    if field is not None:
        return allowed(field)
    names = ", ".join(RequestOptions.model_fields)
    return names if location else f"an object with any of: {names}"
