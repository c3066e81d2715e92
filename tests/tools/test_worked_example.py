"""The table of the worked example is what SGLang's tree and pools do."""

from __future__ import annotations

from worked_example import PAGE, table

from helpers.harness import publish_server_args


def test_the_table_of_the_page_is_what_happens(tmp_path):
    publish_server_args(tmp_path)
    assert table() in PAGE.read_text(encoding="utf-8")
