"""What requests may ask for, and what they send instead: bad options are refused by name, nothing else is touched."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import MAX_SHOWN_CHARS, ConfigError, shown
from sgl_kvevict.request import RequestOptions, parse_request_options, ticket_digest

CONFIG = KVEvictConfig(max_questions=3, max_question_chars=50)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner, max_size=5),
    max_leaves=12,
)
almost_options = st.fixed_dictionaries(
    {},
    optional={
        "warm": st.booleans() | json_values,
        "questions": st.lists(st.text(max_size=60), max_size=5) | json_values,
        "ticket": st.text(min_size=10, max_size=140) | json_values,
        "retain": json_values,
        "x\n": json_values,
    },
)


def refusal(values: object, config: KVEvictConfig = CONFIG) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_request_options({"kvevict": values}, config)
    return str(caught.value)


@pytest.mark.parametrize("theirs", [None, "text", b"bytes", 5, 1.5, True, [], ["kvevict"], {}, {"other": {"warm": 1}}])
def test_what_is_not_ours_passes(theirs: object) -> None:
    assert parse_request_options(theirs, CONFIG) is None


def test_a_wish_with_everything() -> None:
    ticket = "0123456789abcdef"
    values = {"warm": True, "questions": ["who?"] * 3, "ticket": ticket}
    options = parse_request_options({"kvevict": values}, CONFIG)
    assert options == RequestOptions(warm=True, questions=["who?"] * 3, ticket=ticket)
    assert ticket not in ticket_digest(ticket)


@pytest.mark.parametrize(
    ("values", "share"),
    [({}, 0.0), ({"exact": True}, 0.0), ({"share": 0.5}, 0.5), ({"share": 1}, 1.0), ({"complete": True}, 1.0)],
)
def test_how_much_a_request_wants_to_read(values: dict[str, object], share: float) -> None:
    options = parse_request_options({"kvevict": values}, CONFIG)
    assert options is not None and options.least_share == share


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("warm", 'custom_params.kvevict: got "warm"; allowed: an object with any of: warm, questions'),
        ([1], "custom_params.kvevict: got [1]; allowed"),
        ({"warm": 1}, "custom_params.kvevict.warm: got 1; allowed: true or false"),
        ({"worm": True}, "custom_params.kvevict.worm: got true; allowed: warm, questions, ticket, exact, retain"),
        (
            {"warm": True, "questions": "who?"},
            'custom_params.kvevict.questions: got "who?"; allowed: a list of strings',
        ),
        ({"warm": True, "questions": ["a", 2]}, "custom_params.kvevict.questions.1: got 2; allowed: a string"),
        ({"questions": ["a"]}, 'custom_params.kvevict.questions: got ["a"] without warm; allowed: only together'),
        ({"share": 0}, "custom_params.kvevict.share: got 0; allowed: a number above 0, at most 1, or null"),
        ({"share": 1.01}, "custom_params.kvevict.share: got 1.01; allowed"),
        ({"share": float("nan")}, "custom_params.kvevict.share: got NaN; allowed"),
        ({"warm": None}, "custom_params.kvevict.warm: got null; allowed: true or false"),
        (
            {"warm": {"it's": [None, "\x7f\n"]}},
            'custom_params.kvevict.warm: got {"it\'s": [null, "\\u007f\\n"]}; allowed',
        ),
        ({"share": True}, "custom_params.kvevict.share: got true; allowed"),
        ({"complete": 1}, "custom_params.kvevict.complete: got 1; allowed"),
        (
            {"exact": True, "complete": True},
            "custom_params.kvevict.complete: got true together with exact; allowed: one of them",
        ),
        ({"complete": True, "share": 0.5}, "custom_params.kvevict.share: got 0.5 together with complete; allowed"),
        ({"share": 0.5, "warm": True}, "custom_params.kvevict.share: got 0.5 together with warm; allowed"),
        ({"exact": True, "warm": True}, "custom_params.kvevict.exact: got true together with warm; allowed"),
        (
            {"warm": True, "ticket": "short"},
            'custom_params.kvevict.ticket: got "short"; allowed: a string of 16 to 128',
        ),
        ({"ticket": "x" * 20}, f'custom_params.kvevict.ticket: got "{"x" * 20}" without warm; allowed'),
        ({"warm": True, "questions": ["a"] * 4}, "kvevict.questions: got 4 questions; allowed: at most 3"),
        ({"warm": True, "questions": ["a", "b" * 51]}, 'kvevict.questions.1: got 51 characters ("bbb'),
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
    options = parse_request_options({"kvevict": {"retain": retain, "warm": True}}, CONFIG)
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
        {"warm": "x" * 900},
        {"warm": True, "ticket": "x" * 5_000_000},
        {"warm": True, "questions": [["x"] * 1_000_000]},
        {str(i): i for i in range(100_000)},
        nested(100_000),
        {"warm": nested(800)},
        {"warm": 10**9000},
        {"retain": {str(i): i for i in range(100_000)}},
        {"retain": 10**9000},
        {"retain": nested(800)},
    ],
    ids=range(12),
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
        options = parse_request_options({"kvevict": values}, CONFIG)
    except ConfigError as error:
        assert str(error).startswith("custom_params.kvevict") and len(str(error)) < 4 * MAX_SHOWN_CHARS
        assert "\n" not in str(error)
    else:
        assert options is None or len(options.questions) <= CONFIG.max_questions


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
