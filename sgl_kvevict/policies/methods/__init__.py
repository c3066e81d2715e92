"""Every policy that has a name: one file for each, with its options, its composition, its source and its own parts."""

from sgl_kvevict.policies.method import Method
from sgl_kvevict.policies.methods import (
    ada_pyramidkv,
    ada_snapkv,
    chunkkv,
    d2o,
    defensive,
    distilled,
    echo,
    expected_attention,
    h2o,
    k_vec,
    keydiff,
    knorm,
    pyramidkv,
    questions,
    random,
    reconstruction,
    snapkv,
    streaming_llm,
)

METHODS: tuple[Method, ...] = (
    distilled.METHOD,
    reconstruction.METHOD,
    questions.METHOD,
    echo.METHOD,
    defensive.METHOD,
    streaming_llm.METHOD,
    snapkv.METHOD,
    pyramidkv.METHOD,
    h2o.METHOD,
    ada_snapkv.METHOD,
    ada_pyramidkv.METHOD,
    chunkkv.METHOD,
    d2o.METHOD,
    k_vec.METHOD,
    knorm.METHOD,
    keydiff.METHOD,
    expected_attention.METHOD,
    random.METHOD,
)
"""In the order in which they are listed."""

__all__ = ["METHODS"]
