"""What a request may ask of the compressed cache, in ``sampling_params.custom_params["kvevict"]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sgl_kvevict.errors import ConfigError

REQUEST_KEY = "kvevict"


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


def parse_request_options(custom_params: Mapping[str, Any] | None) -> RequestOptions | None:
    """Check what a request asks for.

    Args:
        custom_params: of the request's sampling parameters.

    Returns:
        None if the request asks for nothing.

    Raises:
        ConfigError: names the bad field, its value and what is allowed.
    """
    values = (custom_params or {}).get(REQUEST_KEY)
    if values is None:
        return None
    allowed = "an object with 'warm' (true or false) and 'questions' (a list of strings, only with warm)"
    try:
        options = RequestOptions.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join([REQUEST_KEY, *map(str, problem["loc"])])
        raise ConfigError(f"custom_params.{where}: got {problem['input']!r}; allowed: {allowed}") from error
    if options.questions and not options.warm:
        raise ConfigError(f"custom_params.{REQUEST_KEY}.questions: got {options.questions!r}; allowed: {allowed}")
    return options
