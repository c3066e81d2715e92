"""What is learned of the served model: found in a file, or learned before the server is ready and kept in one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvevict_kernels.rotary import Rotary
from kvevict_kernels.row_codec import RowStatistics
from sgl_kvevict.config import KVEvictConfig
from sgl_kvevict.distill.files import Learned, ModelIdentity, files_of, load_learned, save_learned
from sgl_kvevict.distill.fingerprint import fingerprint_of
from sgl_kvevict.distill.learner import MIN_RECALL, ScoredText, ScoreLearner
from sgl_kvevict.distill.row_sums import STATISTICS, RowSums
from sgl_kvevict.distill.weights import LearnedScores, ScoreWeights, heads_of_rank, of_all_heads
from sgl_kvevict.errors import UnsupportedSetupError
from sgl_kvevict.geometry import KVGeometry
from sgl_kvevict.sglang_adapter.kv_pools import full_layers_of
from sgl_kvevict.sglang_adapter.model_parts import find_rotary
from sgl_kvevict.sglang_adapter.ranks import TensorRanks
from sgl_kvevict.sglang_adapter.settings import has_weights

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

AUTO = "auto"


class Distilling:
    """Has what is learned of one scheduler's model: found in a file, or learned before it is ready (``learning.py``).

    These are scores, for a policy that reads them, and statistics of keys and values, for any policy whose entries may
    have rows of 4 bits. Every rank holds those of its own heads; files hold those of all heads.

    Both stay as they are for a server's life, even if its weights change. Rows can be read only with the statistics
    that they were written with, and to learn scores anew would take minutes without service.

    Args:
        needs_scores: whether the policy looks at learned scores.
        statistics: tensors of this rank's heads that attention and packer read; they are written here, once. None: all
            rows have 16 bits.

    Raises:
        ConfigError: the configured file belongs to another model.
        UnsupportedSetupError: a file is configured, but the model cannot be identified.
    """

    def __init__(
        self,
        config: KVEvictConfig,
        ctx: TreeCacheBuildContext,
        geometry: KVGeometry,
        device: torch.device,
        *,
        needs_scores: bool,
        statistics: RowStatistics | None,
    ) -> None:
        model_config = ctx.model_config
        self._config = config
        self._geometry = geometry
        self._device = device
        self._ranks = TensorRanks(ctx.params.attn_tp_cache_group)
        # A latent is one row for all heads, and every rank has it whole.
        self._num_heads = 1 if geometry.is_latent else model_config.get_total_num_kv_heads()
        runner = ctx.tp_worker.model_runner
        self._has_weights = has_weights(runner)
        rotary = rotary_of(runner)
        fingerprint = model_fingerprint(model_config.model_path, model_config.revision)
        self._identity = None
        if fingerprint is not None:
            sizes = (geometry.num_layers, self._num_heads, geometry.head_dim)
            name = Path(model_config.model_path).name
            self._identity = ModelIdentity(name, fingerprint, *sizes, rotary, geometry.is_latent)
        if self._identity is None and config.score_weights not in (None, AUTO):
            raise UnsupportedSetupError(["score_weights: the model has no safetensors files to know it by"])
        # The compressor gets this object now and its weights later: they may have to be learned first.
        self.learned = LearnedScores(rotary)
        self._needs_scores = needs_scores
        self._statistics = statistics
        self._known = Learned()
        self._use(self._agreed(self._load(config.score_weights)))

    @property
    def lacks_scores(self) -> bool:
        """Whether scores are still to be learned."""
        return self._needs_scores and self.learned.weights is None

    @property
    def lacks_statistics(self) -> bool:
        """Whether statistics are still to be learned."""
        return self._statistics is not None and self._known.statistics is None

    @property
    def digest(self) -> str:
        """Of the statistics of all heads, with which rows of 4 bits are written; empty: none are."""
        if self._statistics is None or self._known.statistics is None:
            return ""
        return Learned(None, self._known.statistics).digest()

    def use_none(self) -> None:
        """Do without scores that cannot be learned: those of dummy weights, and where all layers have windows."""
        if self._has_weights and self._geometry.full_layers:
            return
        why = "all layers have sliding windows" if self._has_weights else "the weights are random (--load-format dummy)"
        if self.lacks_scores:
            self.log(logging.WARNING, "%s, so scores are not learned: values alone choose", why)
            self.learned.weights = ScoreWeights.zeros(self._geometry, self._device)

    def finish(self, learner: ScoreLearner | None, sums: RowSums | None, trial: Callable[[], ScoredText]) -> None:
        """Use what was learned, and keep it with what was known; all ranks call it together.

        ``trial`` is a text not learned from, for the recall of scores.
        """
        scores = None if learner is None else self._scores(learner, trial)
        statistics = None if sums is None else RowStatistics(*map(self._of_all, _parts(sums.solve())))
        self._use(Learned(scores, statistics).completed_by(self._known))
        source = self._config.score_weights
        if source is None or self._identity is None:
            return
        path = files_of(self._identity)[0] if source == AUTO else Path(source)
        try:
            # On every rank: ranks on other hosts have folders of their own.
            save_learned(path, self._known, self._identity)
        except OSError as error:
            logger.warning("kvevict: %s cannot be written (%s): the next start learns anew", path, error.strerror)

    def _scores(self, learner: ScoreLearner, trial: Callable[[], ScoredText]) -> ScoreWeights:
        """Learned scores of all heads, and their recall: that of the rank with the least."""
        mine = learner.solve()
        weights = replace(mine, cache=self._of_all(mine.cache), window=self._of_all(mine.window))
        recall = learner.recall(self._of_rank(weights), trial(), self._config.budget)
        # The smallest, because the warning is about the worst rank; in thousandths, because ranks exchange integers.
        return replace(weights, recall=-self._ranks.largest(-int(1000 * recall)) / 1000)

    def _of_all(self, mine: Tensor) -> Tensor:
        """[num_layers, num_heads, columns] of all heads, from what each rank has of its own."""
        return of_all_heads(self._ranks.gather_tensors(mine), self._num_heads)

    def _own(self, whole: Tensor) -> Tensor:
        """[num_layers, num_kv_heads, columns] of this rank's heads, on its device."""
        return heads_of_rank(whole, self._ranks.rank, self._ranks.size, self._geometry.num_kv_heads).to(self._device)

    def _use(self, known: Learned) -> None:
        """Read this rank's part of what is known of all heads."""
        self._known = known
        if known.statistics is not None and self._statistics is not None:
            self._statistics.assign(RowStatistics(*map(self._own, _parts(known.statistics))))
        if known.scores is None or not self._needs_scores or self.learned.weights is not None:
            return
        self.learned.weights = self._of_rank(known.scores)
        if known.scores.recall is not None and known.scores.recall < MIN_RECALL:
            self.log(
                logging.WARNING,
                "learned scores find %.0f %% of what repetitions of a text attend to, less than %.0f %%: compressed "
                "prefixes lose more than docs/quality.md says; other texts (score_texts) or another policy may help",
                100 * known.scores.recall,
                100 * MIN_RECALL,
            )

    def _of_rank(self, weights: ScoreWeights) -> ScoreWeights:
        return replace(weights, cache=self._own(weights.cache), window=self._own(weights.window))

    def _load(self, source: str | None) -> Learned:
        """What files have of the model; of two, the first one that has a part of it."""
        if source is None or self._identity is None:
            return Learned()
        paths = files_of(self._identity) if source == AUTO else [Path(source)]
        known = Learned()
        for path in paths:
            if not path.exists():
                continue
            # One file may have scores and the other statistics.
            known = known.completed_by(found := load_learned(path, self._identity))
            if self._needs_scores and found.scores is not None and known.scores is found.scores:
                self.log(logging.INFO, "learned scores of %d texts from %s", found.scores.num_prefixes, path)
            if self._statistics is not None and found.statistics is not None and known.statistics is found.statistics:
                self.log(logging.INFO, "statistics of keys and values from %s", path)
        return known

    def _agreed(self, known: Learned) -> Learned:
        """What is known if all ranks found the same; ranks on other hosts search other folders."""
        digest = int(known.digest()[:15], 16)  # fits int64
        if self._ranks.largest(digest) == -self._ranks.largest(-digest):
            return known
        logger.warning("kvevict: tensor-parallel ranks found different score weights: all learn anew")
        return Learned()

    def log(self, level: int, message: str, *values: object) -> None:
        """Log a line, on the first rank only."""
        if self._ranks.is_first:
            logger.log(level, f"kvevict: {message}", *values)


def _parts(statistics: RowStatistics) -> list[Tensor]:
    return [getattr(statistics, name) for name in STATISTICS]


def rotary_of(runner: ModelRunner) -> Rotary:
    """Rotary embedding of the layers without a window; one that rotates nothing if there are none or several."""
    found = find_rotary(runner.model, full_layers_of(runner.token_to_kv_pool))
    if found is not None:
        return found
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
        # Local files only: SGLang has downloaded the model by now, and a start must not wait for a network.
        return fingerprint_of(Path(snapshot_download(model_path, revision=revision, local_files_only=True)))
    except (LocalEntryNotFoundError, ValueError, OSError):
        return None
