"""Learned scores of the served model: loaded at start, or learned and saved to a file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvevict_kernels.rotary import Rotary
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.distill import (
    LessonResult,
    ModelIdentity,
    ScoreLearner,
    ScoreWeights,
    find_weights,
    load_weights,
    save_weights,
    weights_folders,
)
from sgl_kvevict.distill.files import fingerprint_of
from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.sglang_adapter.kv_pools import full_layers_of
from sgl_kvevict.sglang_adapter.model_parts import find_rotary
from sgl_kvevict.sglang_adapter.ranks import TensorRanks
from sgl_kvevict.sglang_adapter.settings import ServerSettings, has_weights

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

AUTO = "auto"


class Distilling:
    """The learner of one scheduler, and the identity of the model that its weights belong to.

    Raises:
        ConfigError: the configured file belongs to another model, or ``save_score_weights`` cannot be written.
        UnsupportedSetupError: a file is configured, but the model cannot be identified, or with ``save_score_weights``
            there are several ranks.
    """

    def __init__(
        self, config: KVEvictConfig, ctx: TreeCacheBuildContext, geometry: KVGeometry, device: torch.device
    ) -> None:
        model_config = ctx.model_config
        self._ranks = ranks = TensorRanks(ctx.params.attn_tp_cache_group)
        self._save_to = config.save_score_weights
        runner = ctx.tp_worker.model_runner
        rotary = rotary_of(runner)
        has_files = has_weights(runner, ServerSettings.read())
        fingerprint = model_fingerprint(model_config.model_path, model_config.revision) if has_files else None
        self._identity = None
        if fingerprint is not None:
            num_heads = 1 if geometry.is_latent else model_config.get_total_num_kv_heads()
            sizes = (geometry.num_layers, num_heads, geometry.head_dim)
            name = Path(model_config.model_path).name
            self._identity = ModelIdentity(name, fingerprint, *sizes, rotary, geometry.is_latent)
        self._refuse(config)
        weights = self._agreed(self._load(config.score_weights))
        if weights is not None:
            weights = weights.of_rank(ranks.rank, ranks.size, geometry.num_kv_heads).to(device)
        share = config.budget if isinstance(config.budget, float) else 0.2
        self.learner = ScoreLearner(geometry, rotary, share, config.distill_prefixes, weights, self._least)

    def learned(self, result: LessonResult) -> None:
        """Log the result of a lesson, and save the weights once they are in use."""
        if not self._ranks.is_first:
            return
        recall = "" if result.recall is None else f", finds {result.recall:.0%} of what passes keep"
        verdict = "learned scores are in use" if result.is_accepted else "still learning"
        logger.info("kvevict: learned from %d prefixes%s: %s", result.num_prefixes, recall, verdict)
        if self._save_to is not None and self.learner.weights is not None and self._identity is not None:
            try:
                save_weights(Path(self._save_to), self.learner.weights, self._identity)
                logger.info("kvevict: learned scores are in %s", self._save_to)
            except OSError:
                logger.exception("kvevict: learned scores cannot be written; they stay in use")

    def _least(self, value: int) -> int:
        return -self._ranks.largest(-value)

    def _refuse(self, config: KVEvictConfig) -> None:
        reasons = []
        unknown = "the model has no safetensors files to know it by"
        if self._identity is None and config.score_weights not in (None, AUTO):
            reasons.append(f"score_weights: {unknown}")
        if self._identity is None and config.save_score_weights is not None:
            reasons.append(f"save_score_weights: {unknown}")
        if self._ranks.size > 1 and config.save_score_weights is not None:
            reasons.append("save_score_weights: with tensor parallelism no rank has all heads; learn on one rank")
        if reasons:
            raise UnsupportedSetupError(reasons)

    def _load(self, source: str | None) -> ScoreWeights | None:
        if source is None or self._identity is None:
            return None
        path = find_weights(self._identity, weights_folders()) if source == AUTO else Path(source)
        if path is None:
            return None
        weights = load_weights(path, self._identity)
        if self._ranks.is_first:
            logger.info("kvevict: learned scores of %d prefixes from %s", weights.num_prefixes, path)
        return weights

    def _agreed(self, weights: ScoreWeights | None) -> ScoreWeights | None:
        """The weights if all ranks found the same ones; ranks on other hosts search other folders."""
        digest = 0 if weights is None else weights.digest()
        if self._ranks.largest(digest) == self._least(digest):
            return weights
        logger.warning("kvevict: tensor-parallel ranks found different score weights: all learn anew")
        return None


def rotary_of(runner: ModelRunner) -> Rotary:
    """Rotary embedding of the layers without a window; one that rotates nothing if there are none or several."""
    try:
        return find_rotary(runner.model, full_layers_of(runner.token_to_kv_pool))
    except UnsupportedSetupError:
        logger.warning("kvevict: no single rotary embedding was found; scores are learned from keys as they are cached")
        no_pairs = torch.empty(0, dtype=torch.int64, device=runner.device)
        return Rotary(torch.empty(runner.model_config.context_len, 0, device=runner.device), True, no_pairs)


def model_fingerprint(model_path: str, revision: str | None) -> str | None:
    """Fingerprint of a model's files, wherever SGLang loads them from; None if they cannot be identified."""
    folder = Path(model_path)
    if folder.is_dir():
        return fingerprint_of(folder)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return fingerprint_of(Path(snapshot_download(model_path, revision=revision, local_files_only=True)))
    except (LocalEntryNotFoundError, ValueError, OSError):
        return None
