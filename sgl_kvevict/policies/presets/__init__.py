"""Named methods as compositions of parts, each with its options."""

from sgl_kvevict.policies.presets.accumulated import D2O, H2O
from sgl_kvevict.policies.presets.agnostic import EXPECTED_ATTENTION, KEYDIFF, KNORM, RANDOM
from sgl_kvevict.policies.presets.chunk import CHUNKKV
from sgl_kvevict.policies.presets.coverage import K_VEC
from sgl_kvevict.policies.presets.entry import PolicyEntry
from sgl_kvevict.policies.presets.positional import STREAMING_LLM
from sgl_kvevict.policies.presets.readers import DISTILLED, QUESTIONS, RECONSTRUCTION
from sgl_kvevict.policies.presets.single_pass import DEFENSIVE, ECHO
from sgl_kvevict.policies.presets.window import ADA_PYRAMIDKV, ADA_SNAPKV, PYRAMIDKV, SNAPKV

ENTRIES: tuple[PolicyEntry, ...] = (
    DISTILLED,
    RECONSTRUCTION,
    QUESTIONS,
    ECHO,
    DEFENSIVE,
    STREAMING_LLM,
    SNAPKV,
    PYRAMIDKV,
    H2O,
    ADA_SNAPKV,
    ADA_PYRAMIDKV,
    CHUNKKV,
    D2O,
    K_VEC,
    KNORM,
    KEYDIFF,
    EXPECTED_ATTENTION,
    RANDOM,
)

__all__ = ["ENTRIES", "PolicyEntry"]
