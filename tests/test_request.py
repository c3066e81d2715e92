"""What requests may ask for, and what they send instead: bad options are refused by name, nothing else is touched."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kvevict.errors import MAX_SHOWN_CHARS, ConfigError, shown
from sgl_kvevict.request import RequestOptions, parse_request_options

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner, max_size=5),
    max_leaves=12,
)
almost_options = st.fixed_dictionaries(
    {}, optional={"exact": st.booleans() | json_values, "retain": json_values, "x\n": json_values}
)


def refusal(values: object) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_request_options({"kvevict": values})
    return str(caught.value)


@pytest.mark.parametrize("theirs", [None, "text", b"bytes", 5, 1.5, True, [], ["kvevict"], {}, {"other": {"exact": 1}}])
def test_what_is_not_ours_passes(theirs: object) -> None:
    assert parse_request_options(theirs) is None


def test_a_wish_with_everything() -> None:
    options = parse_request_options({"kvevict": {"complete": True, "retain": 5}})
    assert options == RequestOptions(complete=True, retain=5.0)


@pytest.mark.parametrize(
    ("values", "share"),
    [({}, 0.0), ({"exact": True}, 0.0), ({"share": 0.5}, 0.5), ({"share": 1}, 1.0), ({"complete": True}, 1.0)],
)
def test_how_much_a_request_wants_to_read(values: dict[str, object], share: float) -> None:
    options = parse_request_options({"kvevict": values})
    assert options is not None and options.least_share == share


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("exact", 'custom_params.kvevict: got "exact"; allowed: an object with any of: exact, retain'),
        ([1], "custom_params.kvevict: got [1]; allowed"),
        ({"exact": 1}, "custom_params.kvevict.exact: got 1; allowed: true or false"),
        ({"warm": True}, "custom_params.kvevict.warm: got true; allowed: exact, retain"),
        ({"share": 0}, "custom_params.kvevict.share: got 0; allowed: a number above 0, at most 1, or null"),
        ({"share": 1.01}, "custom_params.kvevict.share: got 1.01; allowed"),
        ({"share": float("nan")}, "custom_params.kvevict.share: got NaN; allowed"),
        ({"exact": None}, "custom_params.kvevict.exact: got null; allowed: true or false"),
        (
            {"exact": {"it's": [None, "\x7f\n"]}},
            'custom_params.kvevict.exact: got {"it\'s": [null, "\\u007f\\n"]}; allowed',
        ),
        ({"share": True}, "custom_params.kvevict.share: got true; allowed"),
        ({"complete": 1}, "custom_params.kvevict.complete: got 1; allowed"),
        (
            {"exact": True, "complete": True},
            "custom_params.kvevict.complete: got true together with exact; allowed: one of them",
        ),
        ({"complete": True, "share": 0.5}, "custom_params.kvevict.share: got 0.5 together with complete; allowed"),
        ({"x\ny": 1}, "custom_params.kvevict.x\\ny: got 1"),
        *(
            ({"retain": seconds}, "custom_params.kvevict.retain: got")
            for seconds in (0, -1, True, "600", [600], {"seconds": 600}, 86_401, float("nan"), float("inf"), 10**400)
        ),
        ({"retain": 0}, "retain: got 0; allowed: a number above 0, at most 86400, or null"),
        ({"retain": 1, "exact": True}, "kvevict.retain: got 1 together with exact; allowed"),
    ],
)
def test_a_refusal_names_field_value_and_what_is_allowed(values: object, message: str) -> None:
    assert message in refusal(values)


@pytest.mark.parametrize(("retain", "expected"), [(600, 600.0), (0.5, 0.5), (86_400, 86_400.0), (None, None)])
def test_a_time_to_stay(retain: object, expected: float | None) -> None:
    options = parse_request_options({"kvevict": {"retain": retain}})
    assert options is not None and options.retain == expected


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "values",
    [
        "x" * 5_000_000,
        {"x" * 5_000_000: 1},
        {"exact": "x" * 900},
        {"share": [["x"] * 1_000_000]},
        {str(i): i for i in range(100_000)},
        nested(100_000),
        {"exact": nested(800)},
        {"exact": 10**9000},
        {"retain": {str(i): i for i in range(100_000)}},
        {"retain": 10**9000},
        {"retain": nested(800)},
    ],
    ids=range(11),
)
def test_what_is_huge_is_refused_in_a_few_words(values: object) -> None:
    assert len(refusal(values)) < 4 * MAX_SHOWN_CHARS


def test_of_a_huge_object_a_few_fields_are_looked_at() -> None:
    class Field(str):
        num_compared = 0
        __slots__ = ()

        def __lt__(self, other: str) -> bool:
            Field.num_compared += 1
            return super().__lt__(other)

    assert shown({Field(i): i for i in range(1000, 0, -1)}).endswith(", ...}") and Field.num_compared < 30


@given(almost_options)
@settings(max_examples=300, deadline=None)
def test_any_options_are_understood_or_refused(values: object) -> None:
    try:
        options = parse_request_options({"kvevict": values})
    except ConfigError as error:
        assert str(error).startswith("custom_params.kvevict") and len(str(error)) < 4 * MAX_SHOWN_CHARS
        assert "\n" not in str(error)
    else:
        assert options is None or 0 <= options.least_share <= 1


@given(json_values | st.integers(0, 20_000).map(lambda bits: 1 << bits))
@settings(max_examples=200, deadline=None)
def test_values_are_shown_in_a_few_characters(value: object) -> None:
    assert 0 < len(shown(value)) <= MAX_SHOWN_CHARS
    assert shown(value).isprintable()


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists))
@settings(max_examples=200, deadline=None)
def test_values_are_shown_as_json(value: object) -> None:
    text = shown(value)
    assert "..." in text or json.loads(text) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (None, "null"),
        ('it\'s "x"', '"it\'s \\"x\\""'),
        ({"a": [1, None]}, '{"a": [1, null]}'),
        ((1, False), "[1, false]"),
        ("é\n\x7f\u2028\ud800\U000e0001", '"é\\n\\u007f\\u2028\\ud800\\udb40\\udc01"'),
        ("\x7f" * 300, '"' + "\\u007f" * 32 + '\\u0..."'),
        (b"x\n", "b'x\\n'"),
    ],
)
def test_values_are_shown_as_their_client_wrote_them(value: object, text: str) -> None:
    assert shown(value) == text
