"""Base classes of named policies: each is one pydantic model with a name, a source, options and ``build``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from sgl_kvevict.errors import ConfigError, shown
from sgl_kvevict.fields import allowed, extra_of
from sgl_kvevict.policies.budgets import (
    AdaptiveHeads,
    AllLayersBudget,
    DensityLayers,
    HeadRule,
    LayeredBudget,
    LayerRule,
    PyramidLayers,
    Safeguard,
    UniformHeads,
    UniformLayers,
    VarianceNorm,
)
from sgl_kvevict.policies.parts import BudgetAllocator, Merger, Scorer, Selector
from sgl_kvevict.policies.policy import Policy
from sgl_kvevict.policies.selectors import TopKSelector


def _is_odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError("even")
    return value


OddInt = Annotated[int, AfterValidator(_is_odd), Field(json_schema_extra={"odd": True})]


def only_with(*rules: str) -> dict[str, Any]:
    """``json_schema_extra`` of an option that has an effect only with one of these budget rules."""
    return {"rules": list(rules)}


@dataclass(frozen=True)
class Option:
    """Description of an option for users: key in ``policy_options``, default, meaning and allowed values."""

    name: str
    default: Any
    meaning: str
    allowed: str


class NamedPolicy(BaseModel):
    """A policy that users select by name. Fields of a subclass are its options.

    Attributes:
        name: in ``policy``.
        use_when: one line for the table of docs/policies.md.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    use_when: ClassVar[str]

    @abstractmethod
    def build(self) -> Policy | None:
        """Make the policy; None compresses nothing."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Self:
        """Check a mapping of options.

        ConfigError, with option, value and allowed values, if one is unknown, invalid or without effect.
        """
        try:
            return cls.model_validate(dict(given))
        except ValidationError as error:
            raise ConfigError("\n".join(cls._problem(one) for one in error.errors())) from error

    @classmethod
    def describe(cls) -> tuple[Option, ...]:
        """All options, in order."""
        return tuple(
            Option(name, field.default, field.description or "", allowed(field))
            for name, field in cls.model_fields.items()
        )

    @classmethod
    def _problem(cls, error: Any) -> str:
        if not error["loc"]:  # from a validator of several options
            return str(error["ctx"]["error"])
        name, value, fields = error["loc"][0], error["input"], cls.model_fields
        if not fields:
            return f"policy_options: policy {cls.name!r} has no options, got {name}"
        if name not in fields:
            return (
                f"policy_options.{name}: unknown option (value {shown(value)}) of policy {cls.name!r}; allowed: "
                f"{', '.join(fields)}"
            )
        return f"policy_options.{name}: got {shown(value)} for policy {cls.name!r}; allowed: {allowed(fields[name])}"


BudgetRule = Annotated[
    Literal[
        "uniform", "pyramid", "density", "adaptive", "adaptive-pyramid", "adaptive-density", "all-heads", "all-layers"
    ],
    Field(
        description="how the budget is split. Layers: the same for all (uniform, adaptive, all-heads), falling with "
        "depth (pyramid), by attention density (density). Heads of a layer: the same, or by their scores with "
        "a safeguard (adaptive) or without (all-heads). all-layers: one competition over all layers and heads"
    ),
]
RULES: tuple[str, ...] = get_args(get_args(BudgetRule)[0])
_ADAPTIVE = ("adaptive", "adaptive-pyramid", "adaptive-density")
_PYRAMID = ("pyramid", "adaptive-pyramid")
_DENSITY = ("density", "adaptive-density")


class BudgetOptions(NamedPolicy):
    """Options common to all policies: how the budget is split over layers and heads."""

    budget_rule: BudgetRule = "uniform"
    safeguard: Safeguard = Field(
        "authors_code",
        description="adaptive heads: the uniform share weighs alpha (authors_code) or 1 - alpha (paper), or each "
        "head's best alpha share is kept first (kvpress)",
        json_schema_extra=only_with(*_ADAPTIVE),
    )
    alpha: float = Field(
        0.2,
        ge=0,
        le=1,
        description="adaptive heads: strength of the safeguard",
        json_schema_extra=only_with(*_ADAPTIVE),
    )
    pyramid_beta: int = Field(
        20,
        ge=1,
        description="pyramid: steepness; 1 is uniform",
        json_schema_extra=only_with(*_PYRAMID),
    )
    variance_norm: VarianceNorm = Field(
        "minmax",
        description="density: scale the variances over the layers (minmax), or not at all (the printed formula)",
        json_schema_extra=only_with(*_DENSITY),
    )
    floor_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="all-layers: share of its uniform budget that every head keeps of its own best tokens",
        json_schema_extra=only_with("all-layers"),
    )

    @model_validator(mode="after")
    def _check_effects(self) -> Self:
        for name, field in type(self).model_fields.items():
            # Refused, because a user who sets an option that does nothing measures something else than intended.
            rules = extra_of(field).get("rules", [self.budget_rule])
            if name in self.model_fields_set and self.budget_rule not in rules:
                raise ConfigError(
                    f"policy_options.{name}: has no effect in policy {self.name!r} with "
                    f"budget_rule={self.budget_rule!r}; it needs budget_rule {' or '.join(map(repr, rules))}"
                )
        return self

    def policy(
        self, scorer: Scorer, selector: Selector | None = None, merger: Merger | None = None, **more: Any
    ) -> Policy:
        """Combine parts; ``selector`` None: :class:`TopKSelector`, ``more``: further fields of :class:`Policy`."""
        return Policy(self.name, scorer, self.allocator(), selector or TopKSelector(), merger, **more)

    def allocator(self) -> BudgetAllocator:
        """Make the allocator of ``budget_rule``."""
        if self.budget_rule == "all-layers":
            return AllLayersBudget(self.floor_share)
        layers: LayerRule = UniformLayers()
        if self.budget_rule in _PYRAMID:
            layers = PyramidLayers(self.pyramid_beta)
        elif self.budget_rule in _DENSITY:
            layers = DensityLayers(self.variance_norm)
        heads: HeadRule = UniformHeads()
        if self.budget_rule in _ADAPTIVE:
            heads = AdaptiveHeads(self.safeguard, self.alpha)
        elif self.budget_rule == "all-heads":
            heads = AdaptiveHeads("none")
        return LayeredBudget(layers, heads)
