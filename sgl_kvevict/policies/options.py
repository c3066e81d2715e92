"""Options of a named policy: frozen dataclasses whose fields say what they mean and what they allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

from sgl_kvevict.errors import ConfigError

OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True)
class OptionInfo:
    """What users see of one option.

    Attributes:
        name: key in ``policy_options``.
        default: value when not given.
        meaning: one line.
        allowed: what may be given.
    """

    name: str
    default: Any
    meaning: str
    allowed: str


def option(
    default: Any,
    meaning: str,
    *,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    odd: bool = False,
    only_with: tuple[str, tuple[Any, ...]] | None = None,
) -> Any:
    """Declare one option.

    Args:
        default: also fixes the type: bool, int, float or str.
        meaning: one line for ``sgl-kvevict policies``.
        choices: allowed strings.
        minimum: smallest allowed number.
        maximum: largest allowed number.
        odd: only odd numbers.
        only_with: (other option, its values) without which giving this option is an error.
    """
    metadata = {
        "meaning": meaning,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "odd": odd,
        "only_with": only_with,
    }
    return field(default=default, metadata=metadata)


def parse_options(policy: str, options_type: type[OptionsT], given: Mapping[str, Any]) -> OptionsT:
    """Check a mapping and make the options of it.

    Raises:
        ConfigError: unknown option, or a value of the wrong type or out of range; names both and what is
            allowed.
    """
    known = {spec.name: spec for spec in fields(options_type)}  # type: ignore[arg-type]
    for name, value in given.items():
        if name not in known:
            raise ConfigError(
                f"policy_options.{name}: unknown option (value {value!r}) of policy {policy!r}; allowed: "
                f"{', '.join(known) or 'none'}"
            )
    options = options_type(**{name: _checked(policy, known[name], value) for name, value in given.items()})
    for name in given:
        _check_applies(policy, known[name], options)
    return options


def without_idle(options_type: type[Any], implied: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the implied options that have an effect beside the given ones."""
    specs = {spec.name: spec for spec in fields(options_type)}
    merged = {**{name: spec.default for name, spec in specs.items()}, **implied, **given}

    def applies(name: str) -> bool:
        needed = specs[name].metadata["only_with"]
        return needed is None or merged[needed[0]] in needed[1]

    return {name: value for name, value in implied.items() if applies(name)}


def describe_options(options_type: type[Any]) -> tuple[OptionInfo, ...]:
    """All options of a policy, in order."""
    return tuple(
        OptionInfo(spec.name, spec.default, spec.metadata["meaning"], _allowed(spec)) for spec in fields(options_type)
    )


def _checked(policy: str, spec: Field[Any], value: Any) -> Any:
    kind = _kind(spec)
    if kind is float and type(value) is int:
        value = float(value)
    limits = spec.metadata
    good = type(value) is kind
    if good and limits["choices"] is not None:
        good = value in limits["choices"]
    if good and kind in (int, float):
        good = (limits["minimum"] is None or value >= limits["minimum"]) and (
            limits["maximum"] is None or value <= limits["maximum"]
        )
        good = good and not (limits["odd"] and value % 2 == 0)
    if not good:
        raise ConfigError(f"policy_options.{spec.name}: got {value!r} for policy {policy!r}; allowed: {_allowed(spec)}")
    return value


def _check_applies(policy: str, spec: Field[Any], options: Any) -> None:
    if spec.metadata["only_with"] is None:
        return
    other, values = spec.metadata["only_with"]
    current = getattr(options, other)
    if current not in values:
        allowed = " or ".join(repr(value) for value in values)
        raise ConfigError(
            f"policy_options.{spec.name}: has no effect in policy {policy!r} with {other}={current!r}; "
            f"it needs {other} {allowed}"
        )


def _kind(spec: Field[Any]) -> type:
    if spec.default is MISSING:
        raise TypeError(f"option {spec.name} has no default")
    return type(spec.default)


def _allowed(spec: Field[Any]) -> str:
    limits = spec.metadata
    kind = _kind(spec)
    if limits["choices"] is not None:
        return " or ".join(repr(choice) for choice in limits["choices"])
    if kind is bool:
        return "true or false"
    name = ("an odd integer" if limits["odd"] else "an integer") if kind is int else "a number"
    low, high = limits["minimum"], limits["maximum"]
    if low is not None and high is not None:
        return f"{name} from {low} to {high}"
    return name if low is None else f"{name} >= {low}"
