"""Write the generated parts of docs/policies.md: from what methods say of themselves, and measured costs.

Run: python benchmarks/policies/write_tables.py [--check]
"""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path
from typing import Any

from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies import Policy, PolicyInfo, build_policy, list_policies
from sgl_kvevict.policies.budget_options import RULES, BudgetOptions
from sgl_kvevict.policies.by_name import papers
from sgl_kvevict.policies.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "policies.md"
COSTS = ROOT / "docs" / "results" / "policies-cost.csv"
COST_TOKENS = 4096


def policies_table() -> str:
    """One row per policy."""
    costs = read_costs()
    methods = {method.name: method for method in METHODS}
    lines = ["| policy | keeps | parts | signals | from | use it when | cost |", "|---|---|---|---|---|---|---|"]
    for info, policy in built_policies():
        source, use = methods[info.name].source, methods[info.name].use_when
        signals = ", ".join(sorted(f"`{signal.value}`" for signal in policy.needs)) or "none"
        cost = costs.get(info.name, "see below")
        lines.append(f"| `{info.name}` | {info.summary} | {parts(policy)} | {signals} | {source} | {use} | {cost} |")
    return "\n".join(lines)


def options_table() -> str:
    """The options of every policy beyond the budget options, then those."""
    lines = ["| policy | option | default | allowed | meaning |", "|---|---|---|---|---|"]
    common = {option.name for option in budget_options()}
    for info, _ in built_policies():
        shown = [option for option in info.options if option.name not in common or option.name == "budget_rule"]
        lines += [option_row(info.name, option) for option in shown if option.name != "budget_rule"]
        lines += [
            f"| `{info.name}` | `budget_rule` | `{option.default}` | see below | |"
            for option in shown
            if option.name == "budget_rule"
        ]
    lines += [option_row("all", option) for option in budget_options()]
    return "\n".join(lines)


def refusals_table() -> str:
    """Budget rules that each policy refuses, with the reason it gives."""
    lines = ["| policy | refused | reason |", "|---|---|---|"]
    for info, _ in built_policies():
        refused: dict[str, list[str]] = {}
        for rule in RULES:
            try:
                build_policy(info.name, {"budget_rule": rule})
            except ConfigError as error:
                reason = re.sub(r"^.* needs scores that are ", "needs scores that are ", str(error))
                refused.setdefault(reason, []).append(f"`{rule}`")
        lines += [f"| `{info.name}` | {', '.join(rules)} | {reason} |" for reason, rules in refused.items()]
    unequal = [f"`{rule}`" for rule in RULES if not reusable(rule)]
    reason = "layers that share positions need the same budget in every layer"
    lines.append(f"| `chunkkv` with `reuse_layers` > 1 | {', '.join(unequal)} | {reason} |")
    return "\n".join(lines)


def paper_table() -> str:
    """What ``NAME@paper`` sets, and where the paper says so."""
    lines = ["| policy | field | value | where it is printed |", "|---|---|---|---|"]
    for info, _ in built_policies():
        settings = papers().get(info.name)
        if settings is None:
            continue
        defaults = {option.name: option.default for option in info.options}
        options = {**defaults, **{value.name: value.value for value in settings.options}}
        lines.append(f"| `{info.name}@paper` | | | {settings.paper} |")
        for value in (*settings.options, *settings.fields(options)):
            note = "" if changes(value.name, value.value, defaults) else " (default)"
            lines.append(f"| | `{value.name}` | `{value.value}`{note} | {value.source} |")
    return "\n".join(lines)


def changes(name: str, value: Any, defaults: dict[str, Any]) -> bool:
    """Whether a value differs from that of the policy, or of the server, without ``@paper``."""
    return bool(value != (defaults[name] if name in defaults else getattr(KVEvictConfig(), name)))


def reusable(rule: str) -> bool:
    """Whether layers may share positions under a budget rule."""
    try:
        build_policy("chunkkv", {"reuse_layers": 2, "budget_rule": rule})
    except ConfigError as error:
        return "reuse_layers" not in str(error)
    return True


def built_policies() -> list[tuple[PolicyInfo, Policy]]:
    """All policies but ``none``, with their defaults."""
    pairs = [(info, build_policy(info.name, {})) for info in list_policies()]
    return [(info, policy) for info, policy in pairs if policy is not None]


def budget_options() -> tuple[Any, ...]:
    """Options that every policy has."""
    from sgl_kvevict.policies.options import describe_options

    return describe_options(BudgetOptions)


def option_row(policy: str, option: Any) -> str:
    """One option."""
    return f"| `{policy}` | `{option.name}` | `{option.default}` | {option.allowed} | {option.meaning} |"


def parts(policy: Policy) -> str:
    """Scorer, budget rule, selector, merger."""
    allocator = policy.allocator
    budget = [type(allocator)] if not hasattr(allocator, "layers") else [type(allocator.layers), type(allocator.heads)]
    found = [type(policy.scorer), *budget, type(policy.selector)]
    found += [] if policy.merger is None else [type(policy.merger)]
    return ", ".join(f"`{part.__name__}`" for part in found)


def read_costs() -> dict[str, str]:
    """Time and memory of each policy at :data:`COST_TOKENS`, as measured."""
    costs = {}
    with COSTS.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if int(row["tokens"]) != COST_TOKENS:
                continue
            seconds = sum(float(row[name]) for name in ("signals_s", "decide_s", "compact_s"))
            time = 100 * seconds / float(row["prefill_s"])
            memory = 100 * int(row["peak_bytes"]) / int(row["kv_bytes"])
            costs[row["policy"]] = f"{time:.1f} % time, {memory:.0f} % memory"
    return costs


def with_tables(text: str) -> str:
    """The document with its generated parts replaced."""
    tables = {"policies": policies_table, "options": options_table, "refusals": refusals_table, "papers": paper_table}
    for name, make in tables.items():
        pattern = rf"(<!-- {name}: [^>]*-->\n).*?(<!-- end of {name} -->)"
        found = re.search(pattern, text, re.DOTALL)
        if found is None:
            raise ValueError(f"{DOCUMENT.name} lacks the marks of {name!r}")
        text = text[: found.end(1)] + make() + "\n" + text[found.start(2) :]
    return text


def main() -> None:
    """Rewrite the document, or check that it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail when the document is not up to date")
    args = parser.parse_args()
    text = DOCUMENT.read_text(encoding="utf-8")
    new = with_tables(text)
    if args.check and new != text:
        raise SystemExit(f"{DOCUMENT.name} is out of date: run python benchmarks/policies/write_tables.py")
    DOCUMENT.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
