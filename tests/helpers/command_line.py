"""Command lines, run in this process, and a machine that lacks nothing."""

from __future__ import annotations

import pytest

from sgl_kvevict.cli import main
from sgl_kvevict.machine import Gpu, Machine

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 227, 79.0, 79.6)
COMPLETE = Machine(
    packages={
        "sglang": "0.5.23",
        "torch": "2.14.1",
        "triton": "3.8.0",
        "flashinfer-python": "0.7.2",
        "numba": "0.65.1",
    },
    plugins=frozenset({"kvevict", "kvevict_cpu"}),
    cpu_flags=frozenset({"avx2", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "amx_tile"}),
    host_gib=60.0,
    torch_cuda="13.0",
    gpus=(H100, H100),
    home="/home/somebody",
    cache="/home/somebody/.cache/sglang",
)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command line."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    captured = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, captured.out, captured.err
