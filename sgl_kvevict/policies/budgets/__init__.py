"""Budget allocators: how many entries each (layer, head) keeps."""

from sgl_kvevict.policies.budgets.all_layers import AllLayersBudget
from sgl_kvevict.policies.budgets.heads import AdaptiveHeads, UniformHeads
from sgl_kvevict.policies.budgets.layered import LayeredBudget
from sgl_kvevict.policies.budgets.layers import UniformLayers

__all__ = ["AdaptiveHeads", "AllLayersBudget", "LayeredBudget", "UniformHeads", "UniformLayers"]
