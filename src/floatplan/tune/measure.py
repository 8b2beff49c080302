"""What this machine has, asked of torch and the system, and what it reaches, by the clock."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch.nn import functional as F

from floatplan._version import __version__
from floatplan.formats import format_of
from floatplan.tune.machine import Device, FormatFacts, Machine, Units

SECONDS_PER_RATE = 0.6
FIRST_MATRIX, LARGEST_MATRIX = 128, {"cpu": 2048, "cuda": 8192}
CHANNELS, LARGEST_BATCH = {"cpu": 64, "cuda": 256}, {"cpu": 64, "cuda": 256}
IMAGE_SIDE = 16
COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}


# --- What it has ----------------------------------------------------------------------------------------


def describe_machine() -> Machine:
    """This machine, with nothing measured."""
    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        versions=describe_versions(),
        threads=torch.get_num_threads(),
        compiler=find_compiler(),
        devices=tuple(describe_device(torch.device(name)) for name in names),
        load=os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else None,
    )


def describe_versions() -> dict[str, str]:
    """floatplan's, torch's, Python's and, where there is one, CUDA's."""
    versions = {"floatplan": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {**versions, "cuda": torch.version.cuda} if torch.version.cuda else versions


def describe_device(device: torch.device) -> Device:
    """One device, with nothing measured."""
    names = (
        ("fp32", "tf32", "bf16", "fp16", "fp8_e4m3") if device.type == "cuda" else ("fp32", "bf16", "fp16")
    )
    formats = tuple(FormatFacts(name, units_for(device, name)) for name in names)
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        capability = f"compute capability {facts.major}.{facts.minor}"
        return Device(str(device), facts.name, (capability,), facts.total_memory, formats=formats)
    kept = (
        "avx2",
        "avx512_f",
        "avx512_bf16",
        "avx512_fp16",
        "amx_bf16",
        "amx_fp16",
        "neon",
        "bf16",
        "sve_bf16",
    )
    features = tuple(name for name in kept if name in cpu_features())
    return Device("cpu", _cpu_model(), features, _system_memory(), formats=formats)


def units_for(device: torch.device, format_name: str) -> Units:
    """What computes products of a format on ``device``."""
    if device.type == "cuda":
        first_with_matrix_units = {"fp16": (7, 0), "tf32": (8, 0), "bf16": (8, 0), "fp8_e4m3": (8, 9)}
        if format_name not in first_with_matrix_units:
            return "vector"
        has = torch.cuda.get_device_capability(device) >= first_with_matrix_units[format_name]
        return "matrix" if has else "none"
    features = cpu_features()
    if format_name == "fp32":
        return "vector"
    if not features:
        return "unknown"
    # Arm's bf16 feature is BFMMLA, which multiplies small matrices; AVX-512's is a dot product of vectors.
    if features & {"bf16": {"amx_bf16", "bf16", "sve_bf16"}, "fp16": {"amx_fp16"}}.get(format_name, set()):
        return "matrix"
    if features & {"bf16": {"avx512_bf16"}, "fp16": {"avx512_fp16", "fp16_arith"}}.get(format_name, set()):
        return "vector"
    return "none"


def hardware_notes(device: torch.device, format_name: str) -> tuple[str, ...]:
    """What about the device's units explains the speed of training in a format, in sentences."""
    if format_name in ("bf16", "fp16") and units_for(device, format_name) == "none":
        kind = "CPU" if device.type == "cpu" else "GPU"
        return (f"this {kind} has no instructions for {format_name} products: they cost more than float32's",)
    if format_name == "fp32" and device.type == "cuda" and torch.backends.cudnn.allow_tf32:
        return (
            "float32 convolutions may run in TF32 inside, which is how torch is set unless told otherwise",
        )
    return ()


def cpu_features() -> frozenset[str]:
    """Names of the instruction sets that torch or Linux reports; empty if neither does."""
    report = getattr(torch.cpu, "get_capabilities", None)  # public from torch 2.12 on
    if report is not None:
        return frozenset(name for name, value in report().items() if value is True)
    for line in _lines("/proc/cpuinfo"):
        if line.startswith(("flags", "Features")):
            linux_names = {"avx512f": "avx512_f", "asimd": "neon", "svebf16": "sve_bf16"}
            return frozenset(linux_names.get(name, name) for name in line.partition(":")[2].split())
    return frozenset()


def find_compiler() -> str | None:
    """Path of the C++ compiler that ``torch.compile`` would call on a CPU: ``CXX``, or the usual names."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    return None


# --- What it reaches ------------------------------------------------------------------------------------


def measure(device: Device) -> Iterator[Device]:
    """``device`` with one more rate measured each time: first the copy, then each format."""
    where = torch.device(device.name)
    device = replace(device, copy_rate=copy_rate(where))
    yield device
    for place, facts in enumerate(device.formats):
        if facts.name.startswith("fp8"):
            continue  # torch multiplies fp8 only through functions of its own, with scales
        with _float32_inside(tf32=facts.name == "tf32") if where.type == "cuda" else nullcontext():
            dtype = getattr(torch, format_of(facts.name).torch_name or "float32")
            measured = replace(
                facts,
                matmul_rate=matmul_rate(where, dtype),
                convolution_rate=convolution_rate(where, dtype),
            )
        device = replace(device, formats=(*device.formats[:place], measured, *device.formats[place + 1 :]))
        yield device


def matmul_rate(device: torch.device, dtype: torch.dtype, seconds: float = SECONDS_PER_RATE) -> float:
    """FLOP/s of a square matrix product, at the largest size that fits the time a few times."""

    def product(size: int) -> Callable[[], object]:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        return lambda: left @ right

    size, taken = _largest(product, FIRST_MATRIX, LARGEST_MATRIX[device.type], 8, device, seconds)
    return 2 * size**3 / taken


def convolution_rate(device: torch.device, dtype: torch.dtype, seconds: float = SECONDS_PER_RATE) -> float:
    """FLOP/s of a 3x3 convolution of 16x16 images, forward and backward, at the largest batch that fits."""
    channels = CHANNELS[device.type]

    def training(batch: int) -> Callable[[], object]:
        weight = torch.randn(channels, channels, 3, 3, device=device).to(dtype).requires_grad_()
        images = (
            torch.randn(batch, channels, IMAGE_SIDE, IMAGE_SIDE, device=device).to(dtype).requires_grad_()
        )
        arriving = torch.randn(batch, channels, IMAGE_SIDE, IMAGE_SIDE, device=device).to(dtype)
        return lambda: torch.autograd.grad(F.conv2d(images, weight, padding=1), (images, weight), arriving)

    batch, taken = _largest(training, 1, LARGEST_BATCH[device.type], 2, device, seconds)
    forward_and_two_gradients = 3
    return forward_and_two_gradients * 2 * batch * (channels * 3 * IMAGE_SIDE) ** 2 / taken


def copy_rate(device: torch.device, seconds: float = SECONDS_PER_RATE) -> float:
    """Bytes/s read plus written when a block much larger than the caches is copied."""
    size = COPY_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _typical(lambda: target.copy_(source), device, seconds)


def _largest(
    make: Callable[[int], Callable[[], object]],
    size: int,
    largest: int,
    work_of_doubling: int,
    device: torch.device,
    seconds: float,
) -> tuple[int, float]:
    """(size, seconds per call) of the largest size that can run some five times within ``seconds``."""
    while True:
        call = make(size)
        call()  # first calls choose and compile kernels
        if size >= largest or _once(call, device) * work_of_doubling * 5 > seconds:
            return size, _typical(call, device, seconds)
        size *= 2


def _typical(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median seconds of ``call`` over as many repeats as fit, at least one and at most 50."""
    times = [_once(call, device)]
    while sum(times) < seconds and len(times) < 50:
        times.append(_once(call, device))
    return median(times)


def _once(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


@contextmanager
def _float32_inside(*, tf32: bool) -> Iterator[None]:
    """CUDA's float32 products run as float32, or as TF32, in this context; other formats don't ask."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _cpu_model() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _system_memory() -> int | None:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
