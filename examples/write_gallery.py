"""Run every example on real servers and write docs/gallery.md: `make gallery`.

The page is made of the examples' own docstrings and of what they print, and of nothing else but the words here.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kvevict_tools.launcher import System, kvevict_system, launch
from kvevict_tools.models import ensure_model

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "gallery.md"
MAX_LINES = 3
"""Lines of each example's output on the page."""
FLAGS = ("--max-total-tokens", "6000", "--enable-cache-report", "--sleep-on-idle")
DEFAULT = kvevict_system("default", {}, FLAGS)
OWN_POLICY = kvevict_system(
    "own-policy",
    {"policy": "value_aware:value_aware"},
    FLAGS,
    {"PYTHONPATH": os.pathsep.join((str(ROOT / "examples" / "policies"), os.environ.get("PYTHONPATH", "")))},
)


@dataclass(frozen=True)
class Example:
    """One section of the page.

    Attributes:
        source: the file that the section is about, below examples/.
        program: the file that is run, below examples/.
        system: the server that it asks; None if it needs none.
        note: what else a reader has to know; may be empty.
    """

    source: str
    program: str
    system: System | None
    note: str = ""


EXAMPLES = (
    Example("fork.py", "fork.py", DEFAULT),
    Example("judge.py", "judge.py", DEFAULT, "The document was in the cache, because `fork.py` had been run before."),
    Example("chat.py", "chat.py", DEFAULT, "The system message was in the cache too, already compressed."),
    Example("rag.py", "rag.py", DEFAULT),
    Example("agents.py", "agents.py", DEFAULT),
    Example("langchain_chain.py", "langchain_chain.py", DEFAULT),
    Example("engine.py", "engine.py", None),
    Example(
        *("policies/value_aware.py", "fork.py", OWN_POLICY),
        "The server ran with `--policy value_aware:value_aware` "
        "([how](policies.md#write-your-own-policy-in-30-lines)); the program is `fork.py`.\n"
        "The policy looks at a prompt's last tokens only, so it does not know what will be asked.",
    ),
)

HEAD = """# Examples and what they print

Written by `make gallery`: SmolLM2-135M-Instruct on a CPU, a pool of 6,000 token slots, the default configuration. All
ask about [one document](../examples/data/station_handbook.txt) of 2,800 tokens. Seconds are of a machine that was not
idle. The small model's mistakes are shown as they came. Output of `make compare`: [results/demo.txt](results/demo.txt).
"""


def render(outputs: dict[str, str]) -> str:
    """The page, given what each program printed, by the section's source."""
    return "\n".join([HEAD, *(section(example, outputs[example.source]) for example in EXAMPLES)])


def section(example: Example, output: str) -> str:
    """One section: the docstring of the source, and the output."""
    docstring = ast.get_docstring(ast.parse((ROOT / "examples" / example.source).read_text(encoding="utf-8"))) or ""
    text = re.sub(r"\n\n((?:    .+\n?)+)", lambda m: f"\n\n```bash\n{dedented(m[1])}\n```\n", docstring).strip()
    note = f"\n{example.note}\n" if example.note else ""
    link = f"[{example.source}](../examples/{example.source})"
    lines = output.strip().splitlines()
    shown = lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES - 1], "..."]
    return f"## {link}\n\n{text}\n{note}\n```text\n" + "\n".join(shown) + "\n```\n"


def dedented(block: str) -> str:
    """Lines of an indented block, without the indentation."""
    return "\n".join(line[4:] for line in block.splitlines())


def read_outputs(page: str) -> dict[str, str]:
    """What a written page shows as output, by the section's source."""
    found = re.findall(r"^## \[(\S+?)\].*?^```text\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)
    return dict(found)


def run(program: str, *arguments: str) -> str:
    """Run an example; return what it printed.

    Raises:
        subprocess.CalledProcessError: it failed; its stderr went to ours.
    """
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / program), *arguments]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, env=os.environ).stdout


def main() -> None:
    """Run all examples, one server at a time, and write the page."""
    model = ensure_model()
    outputs = {example.source: run(example.program) for example in EXAMPLES if example.system is None}
    for system in (DEFAULT, OWN_POLICY):
        log = ROOT / "out" / "gallery" / f"{system.name}.log"
        with launch(model, flags=system.flags, env=system.env, log_path=log) as server:
            for example in EXAMPLES:
                if example.system is system:
                    outputs[example.source] = run(example.program, server.url)
    PAGE.write_text(render(outputs), encoding="utf-8")


if __name__ == "__main__":
    main()
