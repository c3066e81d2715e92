"""``torch.cuda`` of an H100, with tensors on the CPU."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

BYTES = 80 * 2**30
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=BYTES,
    multi_processor_count=132,
    L2_cache_size=50 * 2**20,
    regs_per_multiprocessor=65536,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    is_integrated=0,
    is_multi_gpu_board=0,
    uuid="GPU-0",
    gcnArchName="",
    pci_bus_id=0,
)


class Stream:
    """Work is done when it is launched: streams only have names."""

    count = 0
    device = torch.device("cpu")
    stream_id = device_index = priority = 0
    device_type = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        Stream.count += 1
        self.cuda_stream = Stream.count

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True


class Event:
    """Has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Nothing(contextlib.nullcontext[None]):
    """A context that takes a device or a stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


class CpuGenerator(torch.Generator):
    """A generator on whatever device is asked for: the CPU."""

    def __new__(cls, device: Any = "cpu") -> CpuGenerator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


def on_cpu(value: Any) -> Any:
    """A device without its "cuda"."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")) else value


class Redirect(TorchFunctionMode):
    """Puts on the CPU what is meant for the device."""

    cuda = torch.Tensor.cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Redirect.cuda:
            return args[0]
        if func is torch.device:  # remains what is asked for, until something is put there
            return func(*args, **(kwargs or {}))
        kwargs = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*map(on_cpu, args), **kwargs)


def install(torch: Any) -> None:
    """Replace what asks for a device, in this process and those that it forks."""
    one = Stream()
    constants = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": PROPERTIES.name,
        "get_device_properties": PROPERTIES,
        "mem_get_info": (BYTES - 2**30, BYTES),
        "is_bf16_supported": True,
        "is_initialized": True,
        "is_current_stream_capturing": False,
        "current_stream": one,
        "default_stream": one,
        "memory_stats": {},
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
        **dict.fromkeys(("set_device", "empty_cache", "synchronize", "reset_peak_memory_stats", "init", "_lazy_init")),
        **dict.fromkeys(("manual_seed", "manual_seed_all", "set_stream", "ipc_collect")),
        **dict.fromkeys(("set_per_process_memory_fraction", "_sleep")),
    }
    for name, value in constants.items():
        setattr(torch.cuda, name, lambda *args, value=value, **kwargs: value)
    types = {"Stream": Stream, "ExternalStream": Stream, "Event": Event}
    types |= dict.fromkeys(("stream", "StreamContext", "device", "device_of"), Nothing)
    for name, value in types.items():
        setattr(torch.cuda, name, value)
    for name in (
        *("Stream", "Event", "stream", "StreamContext", "current_stream", "synchronize"),
        "is_current_stream_capturing",
    ):
        setattr(torch.cpu, name, getattr(torch.cuda, name))  # tensors' own device is asked for its module
    torch.Stream, torch.Event, torch.Generator = Stream, Event, CpuGenerator
    torch.version.cuda = "13.0"
    torch.Tensor.record_stream = lambda self, stream: None
    torch.Tensor.pin_memory = lambda self, *args: self
    torch.Tensor.is_pinned = lambda self, *args: False
    register = torch.library.Library.impl

    def register_on_cpu(self: Any, name: Any, function: Any, key: str = "", **options: Any) -> None:
        # torch 2.11 refuses a second one for the CPU, which an operator may have already.
        with contextlib.suppress(RuntimeError) if key == "CUDA" else contextlib.nullcontext():
            register(self, name, function, "CPU" if key == "CUDA" else key, **options)

    torch.library.Library.impl = register_on_cpu
    Redirect().__enter__()  # modes belong to threads
    run = threading.Thread.run

    def run_redirected(self: threading.Thread) -> None:
        with Redirect():
            run(self)

    threading.Thread.run = run_redirected  # type: ignore[method-assign]
