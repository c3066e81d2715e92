"""``sgl-kvevict inspect``: text, JSON, and the page in a real browser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.resources import files

import msgspec
import pytest

from helpers.command_line import run
from helpers.event_sockets import description_of, ipc_config
from helpers.harness import DOCUMENT
from helpers.watched import WatchedHarness
from kvevict_tools.models import model_path
from sgl_kvevict.cli import inspect as inspection
from sgl_kvevict.cli.output import print_shaped
from sgl_kvevict.config import EventsConfig
from sgl_kvevict.events.questions import StatusReport, TreeNode, TreeReport
from sgl_kvevict.events.totals import Gauges, Pool, Totals

EVIL = "</script><script>document.title='taken over'</script><b>&amp;\u2028"


pytestmark = pytest.mark.usefixtures("server_args")


@pytest.fixture
def served(tmp_path):
    """The address of a watched tree: one compressed document with two branches, one of them being read."""
    with WatchedHarness(ipc_config(tmp_path, expose_tokens=True)) as watched:
        harness = watched.harness
        harness.finish(harness.run(DOCUMENT))
        harness.finish(harness.run(DOCUMENT[:20] + [9] * 30))
        harness.run([*DOCUMENT, 1, 2, 3])
        watched.keep_turning()
        yield watched.service.config.endpoint


def test_text(capsys, served):
    code, out, _ = run(capsys, "inspect", served)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("tiny, policy pseudo-random: ")
    assert re.search(
        r"0-20  20 tokens -> [\d.]+ slots \(\d+% of the bytes, \d+% of the entries, 16\.0 bits\)  1 reading  node \d+$",
        lines[1],
    )
    assert re.search(r"    .*60-63  3 tokens -> 3\.0 slots  1 reading", out)


def test_what_the_heads_of_one_node_keep(capsys, served):
    node = next(node for node in json.loads(run(capsys, "inspect", served, "--json")[1])["nodes"] if node["compressed"])
    code, out, _ = run(capsys, "inspect", served, "--node", str(node["id"]))
    columns, *lines = out.splitlines()
    assert code == 0 and columns.split("  ")[0] == "layer" and len(lines) == 4
    cells = [line.split() for line in lines]
    assert [row[:2] for row in cells] == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]]
    assert all(row[2] == row[4] and row[5:] == ["0"] for row in cells)
    assert sum(int(row[2]) for row in cells) == node["entries"]["16"]
    found = json.loads(run(capsys, "inspect", served, "--node", str(node["id"]), "--json")[1])
    assert [head["entries"] for head in found["heads"]] == [{"16": int(row[2])} for row in cells]
    code, _, error = run(capsys, "inspect", served, "--node", "987654")
    assert code == 2 and "--node: got 987654; allowed: the number of a compressed node" in error


def test_json(capsys, served):
    tree = json.loads(run(capsys, "inspect", served, "--json")[1])
    assert tree["about"]["policy"] == "pseudo-random" and tree["omitted"] == 0
    by_id = {node["id"]: node for node in tree["nodes"]}
    leaf = next(node for node in tree["nodes"] if node["start"] + node["tokens"] == 63)
    tokens: list[int] = []
    while leaf is not None:
        tokens = tree["tokens"][str(leaf["id"])] + tokens
        leaf = by_id.get(leaf["parent"])
    assert tokens == [*DOCUMENT, 1, 2, 3]


def test_limit(capsys, served):
    out = run(capsys, "inspect", served, "--limit", "2")[1]
    assert re.search(r"\.\.\. and \d+ deeper nodes", out)


def test_code_that_comes_with_a_tokenizer_is_not_run(tmp_path, monkeypatch):
    """The other end names the tokenizer: transformers would ask the operator whether to run its code."""
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    names = {"auto_map": {"AutoTokenizer": ["theirs.Theirs", None]}, "tokenizer_class": "Theirs"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "none"}))
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: questions.append(question) or "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert inspection.load_decoder(str(tmp_path)) is None
    assert questions == [] and not (tmp_path / "ran").exists()


def test_the_template_needs_nothing_from_elsewhere():
    template = files("sgl_kvevict.cli").joinpath("inspect_page.html").read_text()
    assert not re.search(r"https?://|//cdn|<link|@import|src=|XMLHttpRequest|innerHTML", template)
    assert template.count("@INTERVAL@") == 1
    assert template.count("fetch(") == 1  # with --web, of its own server: "tree" and "node/ID"
    assert "default-src 'none'" in template and "connect-src 'self'" in template


def test_token_texts_are_those_of_the_tokenizer():
    path = model_path()
    if path is None:
        pytest.skip("needs the demo model (make model)")
    decode = inspection.load_decoder(str(path))
    assert decode is not None
    assert decode([1, 1, 504]) == ["<|im_start|>", "<|im_start|>", "The"]
    assert decode([504, 1]) == ["The", "<|im_start|>"] and decode([]) == []  # no new token
    assert inspection.load_decoder("/nowhere/at/all") is None


SIZES = msgspec.convert(
    dict.fromkeys(Gauges.__struct_fields__, 0)
    | {"pool": {"total": 100, "free": 50, "compressed": 14, "full": 30, "private": 6}}
    | {"host_bytes": 9_000_000, "host_used_bytes": 4_200_000, "host_segments": 4}
    | {"span_tokens": 70, "span_bytes": 7168, "share_of_bytes": 0.2, "share_of_entries": 0.2}
    | {"entries_16": 26, "entries_4": 30}
    | {"long_prompt_tokens": 3648, "long_prompt_computed": 1311},
    Gauges,
)


TOTALS = Totals(
    prompts=3,
    prompt_tokens=4000,
    found_tokens=3000,
    moved_out_segments=7,
    moved_in_segments=3,
    moved_in_tokens=1200,
    stored_segments=2,
    stored_bytes=1_500_000,
    loaded_segments=1,
    loaded_tokens=64,
)


def snapshot() -> inspection.Snapshot:
    """Two branches below a compressed root."""
    nodes = [
        TreeNode(5, 0, 0, 50, 10.0, 5120.0, 0.2, {16: 10, 4: 30}, True, 2, 8),
        TreeNode(6, 5, 50, 30, 30.0, 15360.0, 1.0, {16: 120}, False, 1, 5, EVIL),
        TreeNode(7, 5, 50, 20, 4.0, 2048.0, 0.2, {16: 16}, True, 0, 3),
    ]
    return inspection.Snapshot(
        endpoint="tcp://127.0.0.1:1",
        about=msgspec.structs.replace(description_of(EventsConfig()), model=EVIL),
        tree=TreeReport(1.8e9, Pool(100, 50, 14, 30, 6), nodes, 3),
        status=StatusReport(1.8e9, 1.0, SIZES, TOTALS, []),
        tokens={5: list(range(50)), 6: list(range(30))},
    )


def test_the_text_tree_of_a_snapshot(capsys):
    looked = snapshot()
    looked = replace(looked, about=msgspec.structs.replace(looked.about, model="/folder/" + "m" * 90))
    print_shaped(inspection.as_text(looked))
    text = capsys.readouterr().out
    assert "50-80  30 tokens -> 30.0 slots  1 reading  namespace </script><s…  node 6\n" in text
    assert "... and 3 deeper nodes" in text and len(text.splitlines()) == 5
    counted = f": {looked.status.gauges.logical_tokens:,} tokens in {looked.status.gauges.held_slots:,} of "
    assert text.startswith(f"{'m' * 39}…, policy ") and counted in text  # also of nodes that are left out
    print_shaped(inspection.as_text(looked, is_long=True))
    text = capsys.readouterr().out
    assert text.startswith(f"{looked.about.model}, policy ") and f"namespace {EVIL[:20]}" in text


def test_a_namespace_cannot_steer_the_terminal(capsys):
    looked = snapshot()
    looked = replace(looked, about=msgspec.structs.replace(looked.about, model="\x1b[2J", policy="\x1b[2J\n"))
    for node in looked.tree.nodes:
        node.namespace = "\x1b]0;title\x07\x1b[2J\nfaké"
    print_shaped(inspection.as_text(looked, is_long=True))
    text = capsys.readouterr().out
    assert "\x1b" not in text and len(text.splitlines()) == 5 and text.startswith("\\x1b[2J, policy \\x1b[2J\\n: ")
    assert "namespace \\x1b]0;title\\x07\\x1b[2J\\nfaké  node" in text
