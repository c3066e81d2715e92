"""The numbers of the worked example are what SGLang's tree and pools do."""

from __future__ import annotations

from worked_example import PAGE, example

from helpers.harness import publish_server_args


def test_the_numbers_of_the_page_are_what_happens(tmp_path):
    publish_server_args(tmp_path)
    assert example() in PAGE.read_text(encoding="utf-8")
