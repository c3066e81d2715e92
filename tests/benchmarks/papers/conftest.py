from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The benchmarks are scripts with packages beside them, not installed packages.
BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
for folder in ("quality", "policies", "papers"):
    sys.path.insert(0, str(BENCHMARKS / folder))


@pytest.fixture(scope="session")
def tiny_demo(tmp_path_factory):
    """A random llama of 3 layers in the place of the demo model; it has no tokenizer."""
    import torch
    from policy_bench import prompt

    from helpers.tiny_model import save_tiny_llama

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors: threads only wait for each other
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt.AutoTokenizer, "from_pretrained", lambda folder: None)
        model = prompt.DemoModel(save_tiny_llama(tmp_path_factory.mktemp("tiny")))
    yield model
    torch.set_num_threads(before)


@pytest.fixture
def tokens():
    import torch

    return torch.randint(3, 512, (200,), generator=torch.Generator().manual_seed(1))
