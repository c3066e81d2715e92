"""A named method: what one file of ``methods/`` says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sgl_kvevict.policies.policy import Policy

WHOLE_PROMPT = "the method decides over all tokens of the prompt"
"""Why a paper keeps no window: for :attr:`PaperSettings.why_tail`."""


@dataclass(frozen=True)
class PaperValue:
    """One value that a paper prints.

    Attributes:
        name: of the option, or of the field of ``KVEvictConfig``.
        value: what it is set to.
        source: section, equation or algorithm.
    """

    name: str
    value: Any
    source: str


@dataclass(frozen=True)
class PaperSettings:
    """A method as its paper prints it: what ``NAME@paper`` sets.

    Attributes:
        paper: which one.
        options: of the policy; an option that is given beside ``@paper`` wins.
        kept_window: option that says how many last tokens the paper keeps uncompressed: the server's tail. None: the
            paper decides over the whole prompt, so the tail is a single token.
        why_tail: where the paper says so.
    """

    paper: str
    options: tuple[PaperValue, ...]
    kept_window: str | None = None
    why_tail: str = WHOLE_PROMPT

    def fields(self, options: Mapping[str, Any]) -> tuple[PaperValue, ...]:
        """Fields of ``KVEvictConfig``, with the options that are in force."""
        tail = 1 if self.kept_window is None else options[self.kept_window]
        return (
            PaperValue("tail_tokens", tail, self.why_tail),
            PaperValue("budget_includes_tail", True, "the budget counts every stored entry, those of the window too"),
            PaperValue("sink_tokens", 0, "no token is kept but by the method itself"),
        )


@dataclass(frozen=True)
class Method:
    """A policy that users select by name.

    Attributes:
        name: as users select it; its file has this name, with "_" for "-".
        summary: the idea in one line.
        source: paper, section, equation; "none" for none.
        use_when: in one line, for the table of docs/policies.md.
        options_type: dataclass of :func:`option` fields.
        build: makes the policy from checked options.
        paper: what ``NAME@paper`` sets; None: no paper prints it.
    """

    name: str
    summary: str
    source: str
    use_when: str
    options_type: type[Any]
    build: Callable[[Any], Policy]
    paper: PaperSettings | None = None
