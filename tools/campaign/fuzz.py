"""Random input at everything that reads any: options of requests, the configuration, messages, stored files."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Mapping

import msgspec
from campaign import files
from campaign.parts import Counts
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from sgl_kvevict.config import ENV_VAR, EventsConfig, KVEvictConfig, load_config
from sgl_kvevict.errors import MAX_SHOWN_CHARS, ConfigError
from sgl_kvevict.events.questions import AnyRequest
from sgl_kvevict.policies.by_name import build_policy, list_policies
from sgl_kvevict.request import parse_request_options

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=60),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner, max_size=5),
    max_leaves=15,
)
options = json_values | st.fixed_dictionaries(
    {}, optional={"exact": st.booleans() | json_values, "share": json_values, "retain": json_values, "x": json_values}
)
policies = st.sampled_from([info.name for info in list_policies()])


def fields(model: type[KVEvictConfig] | type[EventsConfig]) -> st.SearchStrategy[Mapping[str, object]]:
    """An object with any of a model's fields, and others."""
    values = {name: json_values | st.integers(-1, 10**10) for name in [*model.model_fields, "unknown"]}
    return st.fixed_dictionaries({}, optional=values)


configurations = fields(KVEvictConfig) | st.fixed_dictionaries(
    {}, optional={"events": fields(EventsConfig), "policy": policies, "policy_options": json_values}
)
MAX_ERROR_CHARS = 60 * MAX_SHOWN_CHARS
"""One line for each field at most."""


def _options(custom_params: object) -> None:
    try:
        parse_request_options({"kvevict": custom_params})
    except ConfigError as error:
        assert len(str(error)) < 4 * MAX_SHOWN_CHARS and "\n" not in str(error)


def _configuration(values: object) -> None:
    try:
        config = load_config({ENV_VAR: json.dumps(values)})
        if ":" not in config.policy:
            build_policy(config.policy, config.policy_options)
    except ConfigError as error:
        assert len(str(error)) < MAX_ERROR_CHARS


def _text(text: str) -> None:
    try:
        load_config({ENV_VAR: text})
    except ConfigError as error:
        assert len(str(error)) < MAX_ERROR_CHARS


def _message(payload: bytes) -> None:
    with contextlib.suppress(msgspec.MsgspecError, RecursionError):
        msgspec.msgpack.decode(payload, type=AnyRequest)


CASES = (
    (_options, options),
    (_configuration, configurations),
    (_text, st.text(max_size=200) | st.text(max_size=200).map(lambda text: "{" + text)),
    (_message, st.binary(max_size=300) | json_values.map(lambda value: json.dumps(value).encode())),
    (files.segment, files.changes),
    (files.score_weights, files.changes),
)


def unit(seed: int, share: float) -> Counts:
    """One strategy."""
    check, strategy = CASES[seed % len(CASES)]
    examples = int(1000 * share)
    ran = 0

    @seeded(random.Random(seed).getrandbits(32))
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(value: object) -> None:
        nonlocal ran
        ran += 1
        check(value)  # type: ignore[operator]

    run()
    return {"done": ran, f"cases of {check.__name__.lstrip('_')}": ran}
