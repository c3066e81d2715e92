"""``sgl-kvevict inspect``: text, JSON, and the page in a real browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import msgspec
import numpy as np
import pytest

from helpers.event_sockets import description_of, ipc_config
from helpers.watched import DOCUMENT, WatchedHarness
from kvevict_tools.models import model_path
from sgl_kvevict.cli import inspect as inspection
from sgl_kvevict.cli import main
from sgl_kvevict.cli.output import print_shaped
from sgl_kvevict.config import EventsConfig
from sgl_kvevict.events.questions import KeptReport, StatusReport, TreeNode, TreeReport
from sgl_kvevict.events.totals import Gauges, Pool, Totals

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian package chromium)")

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


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["inspect", *arguments])
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


def test_text(capsys, served):
    code, out, _ = run(capsys, served)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("tiny, policy pseudo-random: ")
    assert re.search(
        r"0-20  20 tokens -> [\d.]+ slots \(\d+% of the bytes, \d+% of the entries, 16\.0 bits\)  1 reading  node \d+$",
        lines[1],
    )
    assert re.search(r"    .*56-60  4 tokens -> 4\.0 slots  1 reading", out)


def test_what_the_heads_of_one_node_keep(capsys, served):
    node = next(node for node in json.loads(run(capsys, served, "--json")[1])["nodes"] if node["compressed"])
    code, out, _ = run(capsys, served, "--node", str(node["id"]))
    columns, *lines = out.splitlines()
    assert code == 0 and columns.split("  ")[0] == "layer" and len(lines) == 4
    cells = [line.split() for line in lines]
    assert [row[:2] for row in cells] == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]]
    assert all(row[2] == row[4] and row[5:] == ["0", "0"] for row in cells)
    assert sum(int(row[2]) for row in cells) == node["entries"]["16"]
    found = json.loads(run(capsys, served, "--node", str(node["id"]), "--json")[1])
    assert [head["entries"] for head in found["heads"]] == [{"16": int(row[2])} for row in cells]
    code, _, error = run(capsys, served, "--node", "987654")
    assert code == 2 and "--node: got 987654; allowed: the number of a compressed node" in error


def test_json(capsys, served):
    tree = json.loads(run(capsys, served, "--json")[1])
    assert tree["about"]["policy"] == "pseudo-random" and tree["omitted"] == 0
    by_id = {node["id"]: node for node in tree["nodes"]}
    leaf = next(node for node in tree["nodes"] if node["start"] + node["tokens"] == 63)
    tokens: list[int] = []
    while leaf is not None:
        tokens = tree["tokens"][str(leaf["id"])] + tokens
        leaf = by_id.get(leaf["parent"])
    assert tokens == [*DOCUMENT, 1, 2, 3]


def test_limit_and_bad_options(capsys, served, tmp_path):
    out = run(capsys, served, "--limit", "2")[1]
    assert re.search(r"\.\.\. and \d+ deeper nodes", out)
    code, _, error = run(capsys, served, "--json", "--html", str(tmp_path / "x.html"))
    assert code == 2 and "give one of them" in error
    code, _, error = run(capsys, f"ipc://{tmp_path}/nobody", "--timeout", "0.2")
    assert code == 1 and "no answer from" in error


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


def test_html_without_a_tokenizer_shows_ids(capsys, served, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    page = tmp_path / "cache.html"
    code, out, error = run(capsys, served, "--html", str(page), "--tokenizer", str(tmp_path))
    assert code == 0 and "nodes, 3 pictures" in out and "no tokenizer found" in error
    assert "[10]" in page.read_text()
    page = tmp_path / "missing" / "cache.html"
    code, _, error = run(capsys, served, "--html", str(page), "--tokenizer", str(tmp_path))
    assert code == 1 and error.endswith(f"sgl-kvevict: error: {page}: No such file or directory\n")


def test_the_template_needs_nothing_from_elsewhere():
    template = files("sgl_kvevict.cli").joinpath("inspect_page.html").read_text()
    assert not re.search(r"https?://|//cdn|<link|@import|src=|XMLHttpRequest|innerHTML", template)
    assert template.count("@DATA@") == 1
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
    """Two branches below a compressed root; head 1 of layer 0 keeps the root's tokens 10 to 19 and nothing else."""
    kept = np.zeros((4, 50), np.uint8)
    kept[1, 10:20] = 255
    kept[2, 40:] = 128
    nodes = [
        TreeNode(5, 0, 0, 50, 10.0, 5120.0, 0.2, {16: 10, 4: 30}, True, 2, 8, 3.0),
        TreeNode(6, 5, 50, 30, 30.0, 15360.0, 1.0, {16: 120}, False, 1, 5, 3.0, EVIL),
        TreeNode(7, 5, 50, 20, 4.0, 2048.0, 0.2, {16: 16}, True, 0, 3, 99.0),
    ]
    return inspection.Snapshot(
        endpoint="tcp://127.0.0.1:1",
        about=msgspec.structs.replace(description_of(EventsConfig()), model=EVIL),
        tree=TreeReport(1.8e9, Pool(100, 50, 14, 30, 6), nodes, 3),
        status=StatusReport(1.8e9, 1.0, 0, SIZES, TOTALS, []),
        maps={5: KeptReport(5, 0, 50, 50, 4, kept.tobytes(), {16: [0, 10, 0, 0], 4: [0, 0, 30, 0]})},
        tokens={5: list(range(50)), 6: list(range(30))},
    )


PROBE = """
<script>
const result = {}, at = (element, x, y) => element.dispatchEvent(new MouseEvent("mousemove", {bubbles: true,
  clientX: element.getBoundingClientRect().left + x, clientY: element.getBoundingClientRect().top + y}));
const buttons = [...document.querySelectorAll("#icicle button")];
result.title = document.title;
result.sizes = [$("dial").textContent, $("host-text").textContent, $("long").textContent];
result.model = $("model").textContent;
result.nodes = buttons.map((b) => [+b.dataset.node, b.offsetLeft, b.offsetTop, b.offsetWidth, b.offsetHeight]);
result.fills = Object.fromEntries(buttons.map((b) => [b.dataset.node, b.style.background]));
result.found = [$("found-text").textContent, $("found").hidden, $("store").textContent];
result.width = $("icicle").clientWidth;
result.selected = $("title").textContent;
at($("map"), map.left + 12.5 * map.cellWidth, map.y(1) + 1);
result.hover = $("tip").textContent;
at($("map"), map.left + 12.5 * map.cellWidth, 20);
result.column = $("tip").textContent;
at($("map"), map.left + 45 * map.cellWidth, map.y(2) + 1);
result.half = $("tip").textContent;
const pixel = (row, bin) => [...$("map").getContext("2d").getImageData(
  map.left + bin * map.cellWidth, map.y(row), 1, 1).data].slice(0, 3);
result.pixels = [pixel(1, 12), pixel(0, 12), pixel(1, 20), pixel(2, 45)];
result.gone = [...$("text").children].filter((s) => s.className === "gone").map((s) => s.textContent);
buttons.find((b) => b.dataset.node === "6").click();
result.clicked = [$("title").textContent, $("facts").textContent, $("text").textContent, $("heat-note").textContent];
buttons.find((b) => b.dataset.node === "7").click();
result.unmapped = $("heat-note").textContent;
$("zoom").click();
const zoomed = [...document.querySelectorAll("#icicle button")];
result.zoomed = zoomed.map((b) => [+b.dataset.node, b.offsetWidth, b.offsetHeight]);
$("all").click();
result.all = document.querySelectorAll("#icicle button").length;
const out = document.createElement("pre");
out.id = "result";
out.textContent = JSON.stringify(result);
document.body.append(out);
</script>
"""


def browse(page: Path, profile: Path) -> str:
    """The document after its scripts ran."""
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    flags += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}"]
    command = [CHROMIUM, *flags, "--window-size=1200,900", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.slow
@needs_chromium
def test_the_page_in_a_browser(tmp_path):
    page = tmp_path / "cache.html"
    text = inspection.as_page(snapshot(), lambda ids: [EVIL if token == 12 else f"w{token} " for token in ids])
    page.write_text(text.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    dom = browse(page, tmp_path / "profile")
    found = re.search(r'<pre id="result">(.*?)</pre>', dom, re.DOTALL)
    assert found, dom[-2000:]
    result = json.loads(html.unescape(found[1]))
    assert result["title"] == "sgl-kvevict: the cache" and result["model"] == EVIL

    dial, host, long = result["sizes"]
    assert "20 % of their bytes and 20 % of their entries: 26 entries of 16 bits, 30 of 4." in dial
    assert host.startswith(
        "Host memory: 4 segments, 4.2 MB of 9 MB; 7 moved out, 3 found and moved back (1,200 tokens), "
    )
    assert "A prompt of 3,648 tokens" in long and ": 1,311 are computed" in long
    boxes = {node: tuple(box) for node, *box in result["nodes"]}
    wide, high = result["width"] / 80, 400 / (5120 + 15360 + 2048)  # the longest path has 80 tokens
    assert boxes[5] == pytest.approx((0, 0, 50 * wide, 400), abs=1)
    assert boxes[6] == pytest.approx((50 * wide, 0, 30 * wide, 15360 * high), abs=1)  # the larger branch first
    assert boxes[7] == pytest.approx((50 * wide, 15360 * high, 20 * wide, 2048 * high), abs=1)
    fills = result["fills"]
    assert fills["6"].startswith("linear-gradient(rgb(33, 113, 181) 100%")  # 16 bits, everything
    own = 100 * 5120 / (5120 + 15360 + 2048)
    colour, _, filled = fills["5"].removeprefix("linear-gradient(").split("%")[0].rpartition(" ")
    assert float(filled) == pytest.approx(own, abs=0.1)  # of its height: its own bytes
    assert colour not in fills["6"] and colour not in fills["7"]  # 7 bits on average; 16 bits, a fifth
    found, is_hidden, store = result["found"]
    assert found == "Since the start 75 % of 4,000 tokens of 3 prompts were found; the others were computed."
    assert is_hidden and store == "Store: 2 segments written (1.5 MB), 1 read (64 tokens)."
    assert "".join(result["gone"]).startswith("w0 w1 ") and EVIL not in "".join(result["gone"])

    assert result["selected"] == "Node 5"
    assert result["hover"] == f"layer 0, head 1: 100 % kept here; in all 10 entries of 16 bits\ntoken 12\n{EVIL}"
    assert result["column"] == f"all heads: 25 % kept\ntoken 12\n{EVIL}"
    assert result["half"].startswith("layer 1, head 0: 50.2 % kept here; in all 30 entries of 4 bits\ntoken 45\nw45")
    dark, white, after, half = result["pixels"]
    assert (dark, white, after) == ([8, 48, 107], [255, 255, 255], [255, 255, 255]) and half not in (dark, white)

    title, facts, tokens, note = result["clicked"]
    assert (
        title == "Node 6"
        and "everything (uncompressed)" in facts
        and "rows: 120 entries of 16 bits" in facts
        and EVIL in facts
    )
    assert tokens.startswith("w0 w1 ") and EVIL in tokens and "keeps everything" in note
    assert "No map was taken" in result["unmapped"]
    assert result["zoomed"] == [[7, result["width"], 400]] and result["all"] == 3
    assert (
        "taken over" not in re.sub(r"<pre.*?</pre>", "", dom, flags=re.DOTALL).split("<title>")[1].split("</title>")[0]
    )


def test_the_text_tree_of_a_snapshot(capsys):
    looked = snapshot()
    looked = replace(looked, about=msgspec.structs.replace(looked.about, model="/folder/" + "m" * 90))
    print_shaped(inspection.as_text(looked))
    text = capsys.readouterr().out
    assert "50-80  30 tokens -> 30.0 slots  1 reading  namespace </script><s…  node 6\n" in text
    assert "... and 3 deeper nodes" in text and len(text.splitlines()) == 5
    assert text.startswith(f"{'m' * 39}…, policy ")
    print_shaped(inspection.as_text(looked, is_long=True))
    text = capsys.readouterr().out
    assert text.startswith(f"{looked.about.model}, policy ") and f"namespace {EVIL[:20]}" in text


def test_the_text_tree_counts_nodes_that_it_leaves_out(capsys):
    looked = snapshot()
    print_shaped(inspection.as_text(looked))
    gauges = looked.status.gauges
    assert f": {gauges.logical_tokens:,} tokens in {gauges.held_slots:,} of " in capsys.readouterr().out


def test_a_namespace_cannot_steer_the_terminal(capsys):
    looked = snapshot()
    looked = replace(looked, about=msgspec.structs.replace(looked.about, model="\x1b[2J", policy="\x1b[2J\n"))
    for node in looked.tree.nodes:
        node.namespace = "\x1b]0;title\x07\x1b[2J\nfaké"
    print_shaped(inspection.as_text(looked, is_long=True))
    text = capsys.readouterr().out
    assert "\x1b" not in text and len(text.splitlines()) == 5 and text.startswith("\\x1b[2J, policy \\x1b[2J\\n: ")
    assert "namespace \\x1b]0;title\\x07\\x1b[2J\\nfaké  node" in text
