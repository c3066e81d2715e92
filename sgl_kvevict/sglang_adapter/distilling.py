"""Learned scores of the served model: found in a file, or learned before the server is ready and kept in one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvevict_kernels.rotary import Rotary
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.distill import (
    LearnedScores,
    ModelIdentity,
    ScoredText,
    ScoreLearner,
    ScoreWeights,
    cached_file,
    find_weights,
    load_weights,
    save_weights,
    weights_folders,
)
from sgl_kvevict.distill.files import fingerprint_of
from sgl_kvevict.distill.learner import MIN_RECALL
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
    """Has the scores of one scheduler's model: those of a file, or what was learned (``learning.py``).

    Every rank holds the weights of its own heads; files hold those of all heads.

    Raises:
        ConfigError: the configured file belongs to another model.
        UnsupportedSetupError: a file is configured, but the model cannot be identified.
    """

    def __init__(
        self, config: KVEvictConfig, ctx: TreeCacheBuildContext, geometry: KVGeometry, device: torch.device
    ) -> None:
        model_config = ctx.model_config
        self._config = config
        self._geometry = geometry
        self._device = device
        self._ranks = TensorRanks(ctx.params.attn_tp_cache_group)
        self._num_heads = 1 if geometry.is_latent else model_config.get_total_num_kv_heads()
        runner = ctx.tp_worker.model_runner
        self._has_weights = has_weights(runner, ServerSettings.read())
        rotary = rotary_of(runner)
        fingerprint = model_fingerprint(model_config.model_path, model_config.revision)
        self._identity = None
        if fingerprint is not None:
            sizes = (geometry.num_layers, self._num_heads, geometry.head_dim)
            name = Path(model_config.model_path).name
            self._identity = ModelIdentity(name, fingerprint, *sizes, rotary, geometry.is_latent)
        if self._identity is None and config.score_weights not in (None, AUTO):
            raise UnsupportedSetupError(["score_weights: the model has no safetensors files to know it by"])
        self.learned = LearnedScores(rotary)
        weights = self._agreed(self._load(config.score_weights))
        if weights is not None:
            self._use(weights)

    @property
    def path(self) -> Path | None:
        """Where learned scores are kept; None: nowhere (``score_weights: null``, or no safetensors files)."""
        source = self._config.score_weights
        if source is None or self._identity is None:
            return None
        return cached_file(self._identity) if source == AUTO else Path(source).expanduser()

    @property
    def share(self) -> float:
        """Share of the entries at which recall is measured."""
        return self._config.budget if isinstance(self._config.budget, float) else 0.2

    def use_none(self) -> bool:
        """Score all tokens alike if there is nothing to learn from: dummy weights, or windows in all layers."""
        if self._has_weights and self._geometry.full_layers:
            return False
        why = "all layers have sliding windows" if self._has_weights else "the weights are random (--load-format dummy)"
        self.log(logging.WARNING, "%s, so scores are not learned: values alone choose", why)
        self.learned.weights = ScoreWeights.zeros(self._geometry, self._device)
        return True

    def new_learner(self) -> ScoreLearner:
        """A learner of this rank's heads."""
        return ScoreLearner(self._geometry, self.learned.rotary, self._device)

    def finish(self, learner: ScoreLearner, trial: Callable[[], ScoredText]) -> None:
        """Use what was learned, and keep it; all ranks call it together. ``trial`` is a text not learned from."""
        weights = self._whole(learner.solve())
        recall = learner.recall(self._of_rank(weights), trial(), self.share)
        weights = replace(weights, recall=-self._ranks.largest(-int(1000 * recall)) / 1000)
        self._use(weights)
        if (path := self.path) is not None:
            self._save(path, weights)

    def _whole(self, mine: ScoreWeights) -> ScoreWeights:
        """Weights of all heads, from those of every rank."""
        caches = self._ranks.gather_tensors(mine.cache)
        windows = self._ranks.gather_tensors(mine.window)
        parts = [ScoreWeights(*both, mine.num_prefixes) for both in zip(caches, windows, strict=True)]
        return ScoreWeights.of_ranks(parts, self._num_heads)

    def _use(self, weights: ScoreWeights) -> None:
        self.learned.weights = self._of_rank(weights)
        if weights.recall is not None and weights.recall < MIN_RECALL:
            self.log(
                logging.WARNING,
                "learned scores find %.0f %% of what passes keep, less than %.0f %%: prefixes that shrink before "
                "passes have read them lose more than docs/quality.md says; other texts (score_texts) or another "
                "policy may help",
                100 * weights.recall,
                100 * MIN_RECALL,
            )

    def _of_rank(self, weights: ScoreWeights) -> ScoreWeights:
        return weights.of_rank(self._ranks.rank, self._ranks.size, self._geometry.num_kv_heads).to(self._device)

    def _save(self, path: Path, weights: ScoreWeights) -> None:
        """Write the file, on every rank: ranks on other hosts have folders of their own."""
        assert self._identity is not None
        try:
            save_weights(path, weights, self._identity)
        except OSError as error:
            logger.warning("kvevict: %s cannot be written (%s): the next start learns anew", path, error.strerror)

    def _load(self, source: str | None) -> ScoreWeights | None:
        if source is None or self._identity is None:
            return None
        path = find_weights(self._identity, weights_folders()) if source == AUTO else Path(source).expanduser()
        if path is None or not path.exists():
            return None
        weights = load_weights(path, self._identity)
        self.log(logging.INFO, "learned scores of %d texts from %s", weights.num_prefixes, path)
        return weights

    def _agreed(self, weights: ScoreWeights | None) -> ScoreWeights | None:
        """The weights if all ranks found the same ones; ranks on other hosts search other folders."""
        digest = 0 if weights is None else weights.digest()
        if self._ranks.largest(digest) == -self._ranks.largest(-digest):
            return weights
        logger.warning("kvevict: tensor-parallel ranks found different score weights: all learn anew")
        return None

    def log(self, level: int, message: str, *values: object) -> None:
        """Log a line, on the first rank only."""
        if self._ranks.is_first:
            logger.log(level, f"kvevict: {message}", *values)


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
