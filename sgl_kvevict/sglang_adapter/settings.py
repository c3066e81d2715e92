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
after publication (schedulers)     :func:`published`                everything; what depends on the model, pool or
                                                                    device (``page_size``, graphs) once they are built
between two steps                  :func:`published`                the value in effect now
=================================  ===============================  ==================================================
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.runtime_context import get_context

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken*")
"""One of these is in every folder from which a tokenizer can be loaded."""
DUMMY = "dummy"
"""``--load-format``: random weights, so the model's files do not identify it."""


def resolving(server_args: ServerArgs) -> Callable[[str], Any]:
    """Read fields of a record by name while it is resolved: each read sees what has been decided by then."""
    return partial(getattr, resolving_view(server_args))


def architecture(server_args: ServerArgs) -> str:
    """Name of the model's class, while a record is resolved; reads the model's ``config.json``."""
    return str(model_config_of(server_args).hf_config.architectures[0])


def is_graph_chosen(server_args: ServerArgs, phase: Any) -> bool:
    """Whether the user chose the CUDA graphs of a phase, while a record is resolved."""
    return (phase, "backend") in server_args._cuda_graph_config_locked


def published(name: str) -> Any:
    """The value of a field in effect now, in a process of a running server.

    ValueError: nothing has been published yet, or SGLang has no such field.
    """
    return get_context().config_leaf(name)


def tokenizer_path() -> str:
    """Of the model's tokenizer: as given, or the folder that SGLang downloaded the model to."""
    return str(published("tokenizer_path") or published("model_path"))


def has_tokenizer_files() -> bool:
    """Whether the tokenizer's folder has its files; True if it is no folder of this machine."""
    folder = Path(tokenizer_path())
    return not folder.is_dir() or any(path for kind in TOKENIZER_FILES for path in folder.glob(kind))


def ranks_per_host() -> int:
    """Schedulers that share one host's memory, of all replicas."""
    ranks = published("tp_size") * published("pp_size") * published("dp_size")  # attention DP is inside of TP
    return int(max(ranks // published("nnodes"), 1))


def has_weights(runner: ModelRunner) -> bool:
    """Whether the weights of a model, or a draft model, were read from its files."""
    return bool((runner.draft_load_format or published("load_format")) != DUMMY)
