"""Write the generated tables of docs/policies.md, from the policies' models and measured costs.

Run: python benchmarks/policies/write_tables.py [--check]
"""

from __future__ import annotations

import argparse
import csv
import re
from pathlib import Path

from sgl_kvevict.errors import ConfigError
from sgl_kvevict.policies import NamedPolicy, Policy, build_policy
from sgl_kvevict.policies.methods import METHODS
from sgl_kvevict.policies.options import RULES, BudgetOptions, Option

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "policies.md"
COSTS = ROOT / "docs" / "results" / "policies-cost.csv"
COST_TOKENS = 4096
COMMON = tuple(BudgetOptions.model_fields)


def policies_table() -> str:
    """One row per policy."""
    costs = read_costs()
    lines = ["|policy|keeps|budget_rule|signals|from|use it when|cost|", "|---|---|---|---|---|---|---|"]
    for info, policy in built_policies():
        signals = ", ".join(sorted(f"`{signal.value}`" for signal in policy.needs)) or "none"
        rule = f"`{info.model_fields['budget_rule'].default}`"
        columns = (f"`{info.name}`", info.summary, rule, signals, info.source, info.use_when)
        lines.append(f"|{'|'.join(columns)}|{costs.get(info.name, 'see below')}|")
    return "\n".join(lines)


def options_table() -> str:
    """Every option with the policies that have it, then those of all policies."""
    owners: dict[Option, list[str]] = {}
    for info in METHODS:
        for option in info.describe():
            if option.name not in COMMON:
                owners.setdefault(option, []).append(f"`{info.name}`")
    rows = [*((", ".join(names), option) for option, names in owners.items())]
    rows += [("all", option) for option in BudgetOptions.describe()]
    return "\n".join(
        ["|policy|option|default|allowed|meaning|", "|---|---|---|---|---|"]
        + [f"|{who}|`{one.name}`|`{one.default}`|{allowed(one)}|{one.meaning}|" for who, one in rows]
    )


def allowed(option: Option) -> str:
    """What may be given, choices without spaces."""
    return option.allowed.replace(" or ", "\\|").replace("'", "")


def refusals_table() -> str:
    """Budget rules that are refused, with the reason."""
    refused: dict[tuple[str, str], list[str]] = {}
    for info in METHODS:
        reasons: dict[str, list[str]] = {}
        for rule in RULES:
            try:
                build_policy(info.name, {"budget_rule": rule})
            except ConfigError as error:
                reason = re.sub(r"^.* needs scores that are (.*); those of .*$", r"scores must be \1", str(error))
                reasons.setdefault(reason, []).append(f"`{rule}`")
        for reason, rules in reasons.items():
            refused.setdefault((", ".join(rules), reason), []).append(f"`{info.name}`")
    rows = [(names, rules, reason) for (rules, reason), names in refused.items()]
    unequal = ", ".join(f"`{rule}`" for rule in RULES if not reusable(rule))
    rows.append((["`chunkkv` with `reuse_layers` > 1"], unequal, "shared positions need equal layers"))
    return "\n".join(
        ["|policies|refused|reason|", "|---|---|---|"]
        + [f"|{', '.join(names)}|{rules}|{reason}|" for names, rules, reason in rows]
    )


def reusable(rule: str) -> bool:
    """Whether layers may share positions under a budget rule."""
    try:
        build_policy("chunkkv", {"reuse_layers": 2, "budget_rule": rule})
    except ConfigError as error:
        return "reuse_layers" not in str(error)
    return True


def built_policies() -> list[tuple[type[NamedPolicy], Policy]]:
    """All policies but ``none``, with their defaults."""
    pairs = [(info, info().build()) for info in METHODS]
    return [(info, policy) for info, policy in pairs if policy is not None]


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
    tables = {"policies": policies_table, "options": options_table, "refusals": refusals_table}
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
