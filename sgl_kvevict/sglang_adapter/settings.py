"""SGLang's settings, read here and nowhere else, because most of them are decided after they were given.

A ``ServerArgs`` record keeps what the user typed. SGLang resolves it in steps (``None`` becomes a default,
``--lora-paths`` switches ``enable_lora`` on, ``--enable-dp-attention --dp-size 2`` becomes ``--attn-dp-size 2``),
publishes the result once in every process, and may override a published value later. So there are three times, and one
way to read at each:

=================================  ===============================  ==================================================
when                               read with                        what is known
=================================  ===============================  ==================================================
a step of the resolution           :func:`resolving`                what earlier steps decided; ``None`` for what a
(the process that starts servers)                                   later one decides (``chunked_prefill_size``,
                                                                    ``speculative_num_draft_tokens``, ``enable_lora``)
after publication (schedulers)     :class:`ServerSettings`,         everything; what depends on the model, pool or
                                   :func:`published`                device (``page_size``, graphs) once they are built
between two steps                  :func:`published`                the value in effect now
=================================  ===============================  ==================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.runtime_context import get_context

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

ValueOf = Callable[[str], Any]
"""The value of a field of ``ServerArgs``, by its name."""

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken*")
"""One of these is in every folder from which a tokenizer can be loaded."""
DUMMY = "dummy"
"""``--load-format``: random weights, so the model's files do not identify it."""


def resolving(server_args: ServerArgs) -> ValueOf:
    """Read a record while it is resolved: each read sees what has been decided by then."""
    return partial(getattr, resolving_view(server_args))


def decide(server_args: ServerArgs, source: str, **values: Any) -> None:
    """Decide fields of a record while it is resolved; ``source``: our function, for SGLang's log of decisions."""
    declare_resolution(server_args, source, **values)


def architecture(server_args: ServerArgs) -> str:
    """Name of the model's class, while a record is resolved; reads the model's ``config.json``."""
    return str(model_config_of(server_args).hf_config.architectures[0])


def is_graph_chosen(server_args: ServerArgs, phase: Any) -> bool:
    """Whether the user chose the CUDA graphs of a phase, while a record is resolved."""
    return (phase, "backend") in server_args._cuda_graph_config_locked


def published(name: str) -> Any:
    """The value of a field in effect now, in a process of a running server.

    Raises:
        ValueError: nothing has been published yet, or SGLang has no such field.
    """
    return get_context().config_leaf(name)


@dataclass(frozen=True)
class ServerSettings:
    """What SGLang decided, as one scheduler reads it while it builds its cache.

    Attributes:
        ranks_per_host: schedulers that share one host's memory, of all replicas.
        attn_dp_size: groups of data-parallel attention; 1: it is off.
        chunked_prefill_size: tokens of a chunk; None: a prompt is prefilled in one piece.
        speculative_algorithm: None: no drafts.
        speculative_num_draft_tokens: of one verification step; None without drafts.
        state_strategy: ``--mamba-radix-cache-strategy``, of models with recurrent layers.
        strips_thinking: ``--strip-thinking-cache``.
        load_format: of the target model; a draft model may have its own, see :func:`has_weights`.
        model_path: as given, or the folder that SGLang downloaded it to.
    """

    ranks_per_host: int
    attn_dp_size: int
    chunked_prefill_size: int | None
    speculative_algorithm: str | None
    speculative_num_draft_tokens: int | None
    state_strategy: str
    strips_thinking: bool
    load_format: str
    model_path: str
    tokenizer_path: str

    @property
    def has_tokenizer_files(self) -> bool:
        """Whether the tokenizer's folder has its files; True if it is no folder of this machine."""
        folder = Path(self.tokenizer_path)
        return not folder.is_dir() or any(path for kind in TOKENIZER_FILES for path in folder.glob(kind))

    @classmethod
    def read(cls) -> Self:
        """Read them in a process that has published its configuration.

        Raises:
            ValueError: it has not.
        """
        chunk = published("chunked_prefill_size")
        model_path = str(published("model_path"))
        ranks = published("tp_size") * published("pp_size") * published("dp_size")  # attention DP is inside of TP
        return cls(
            ranks_per_host=max(ranks // published("nnodes"), 1),
            attn_dp_size=published("attn_dp_size"),
            # -1 switches chunks off.
            chunked_prefill_size=chunk if chunk is not None and chunk > 0 else None,
            speculative_algorithm=published("speculative_algorithm"),
            speculative_num_draft_tokens=published("speculative_num_draft_tokens"),
            state_strategy=str(published("mamba_radix_cache_strategy")),
            strips_thinking=bool(published("strip_thinking_cache")),
            load_format=str(published("load_format")),
            model_path=model_path,
            tokenizer_path=published("tokenizer_path") or model_path,
        )


def has_weights(runner: ModelRunner, settings: ServerSettings) -> bool:
    """Whether the weights of a model, or a draft model, were read from its files."""
    return (runner.draft_load_format or settings.load_format) != DUMMY
