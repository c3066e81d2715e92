"""What ``docs/models.md`` says of families, as far as configurations show it; ``check_served.py`` has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from models.families import FAMILIES, PAGE, Family, config_of, page
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.kv_cache_builder import uses_ssm_state

from sgl_kvevict.sglang_adapter.model_facts import model_traits
from sgl_kvevict.sglang_adapter.start_facts import file_traits
from sgl_kvevict.support import MODEL, WHAT_WORKS, HasTraits
from sgl_kvevict.support import reasons as reasons_of


def reasons(family: Family, folder: Path) -> list[str]:
    config_of(family).save_pretrained(folder)
    one_pool = "--disable-hybrid-swa-memory" in family.flags
    config = ModelConfig(model_path=str(folder), disable_hybrid_swa_memory=one_pool)
    assert uses_ssm_state(config) == family.recurrent
    return reasons_of(MODEL, HasTraits(traits=model_traits(config)))


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.reason], ids=lambda f: f.name)
def test_refused_families_are_refused_with_their_reason(family, tmp_path):
    found = reasons(family, tmp_path)
    assert family.reason in found and found[-1] == WHAT_WORKS
    assert family.reason in reasons_of(MODEL, HasTraits(traits=file_traits(tmp_path)))  # before anything is loaded, too


@pytest.mark.parametrize("family", [f for f in FAMILIES if not f.reason], ids=lambda f: f.name)
def test_configurations_of_others_are_fine(family, tmp_path):
    assert reasons(family, tmp_path) == []
    assert file_traits(tmp_path) == frozenset()
