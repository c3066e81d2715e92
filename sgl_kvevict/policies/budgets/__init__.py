"""Budget allocators: how many entries each (layer, head) keeps."""

from sgl_kvevict.policies.budgets.all_layers import AllLayersBudget
from sgl_kvevict.policies.budgets.density import DensityLayers
from sgl_kvevict.policies.budgets.heads import AdaptiveHeads, UniformHeads
from sgl_kvevict.policies.budgets.layered import LayeredBudget
from sgl_kvevict.policies.budgets.layers import UniformLayers
from sgl_kvevict.policies.budgets.pyramid import PyramidLayers

__all__ = [
    "AdaptiveHeads",
    "AllLayersBudget",
    "DensityLayers",
    "LayeredBudget",
    "PyramidLayers",
    "UniformHeads",
    "UniformLayers",
]
