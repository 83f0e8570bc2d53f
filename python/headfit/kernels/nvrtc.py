"""CUDA C++ kernels without nvcc: NVRTC compiles at run time, the driver launches, cubins are kept on disk.

Both are reached through `cuda.bindings`, imported only when a kernel is wanted: the wheels `cuda-bindings` and
`nvidia-cuda-nvrtc` (for CUDA 12 `nvidia-cuda-nvrtc-cu12`), which come with torch's CUDA 13 builds.

Cubins are kept in `$HEADFIT_CACHE_DIR`, else in `headfit` under `$XDG_CACHE_HOME` or `~/.cache`, a file for each
source, options and NVRTC version: the SHA-256 of the cubin (32 bytes), then the cubin. Whoever can write there chooses
what runs on the GPU. Where the directory cannot be used, every process compiles for itself, and says so once.
"""

import ctypes
import hashlib
import importlib
import logging
import math
import os
import re
import threading
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

logger = logging.getLogger(__name__)

Dim3 = tuple[int, int, int]

NEEDED = (
    "headfit's CUDA kernels need the wheels cuda-bindings and nvidia-cuda-nvrtc (for CUDA 12 nvidia-cuda-nvrtc-cu12), "
    "of the major CUDA version of torch"
)
DIGEST_BYTES = 32
MAX_CLUSTER_SIZE = 16  # Hopper's, once a kernel allows more than the portable 8
MAX_BLOCK_THREADS = 1024
MAX_KEPT_LAUNCHES = 1024  # launch configurations a kernel remembers: some hundred bytes each

_warned: set[str] = set()  # cache directories that cannot be used, once said


def compile_cubin(
    source: str,
    *,
    name: str,
    arch: str,
    defines: dict[str, int | str],
    entry: str,
    compiler: "Nvrtc | None" = None,
) -> bytes:
    """The cubin of `source`, from the cache where it was compiled before. Safe in several processes at once.

    Args:
        source: CUDA C++17 without `#include`: what is not in it is not in the cache's key. Kernels are
            `extern "C" __global__`.
        name: the source's name in the compiler's messages.
        arch: a real architecture, "sm_90a".
        defines: macros by name; a bool counts as 0 or 1.
        entry: a kernel that the cubin must hold.
        compiler: an `Nvrtc`, or a stand-in with its `version` and `compile`.

    Raises:
        ImportError: a wheel is missing.
        ValueError, TypeError: naming the argument, what it is and what is allowed.
        RuntimeError: `source` does not compile; the message holds the compiler's.
    """
    options = _options(arch, defines)
    compiler = Nvrtc() if compiler is None else compiler
    path = _cache_path(source, options, compiler.version)
    cubin = _read(path)
    if cubin is None:
        logger.info("compiling %s: %s", name, " ".join(options))
        cubin = compiler.compile(source, name=name, options=options)
        _write(path, cubin)
    # A kernel's code stands in a section of its own, `.text.<kernel>`.
    entries = sorted({match.decode() for match in re.findall(rb"\0\.text\.(\w+)(?=\0)", cubin)})
    if entry not in entries:
        raise ValueError(f'entry: {entry!r}, allowed: the extern "C" kernels of {name}: {", ".join(entries) or "none"}')
    return cubin


def _options(arch: str, defines: dict[str, int | str]) -> tuple[str, ...]:
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise ValueError(f"arch: {arch!r}, allowed: a real architecture such as 'sm_90a'")
    macros = []
    for macro, value in sorted(defines.items()):
        if not re.fullmatch(r"[A-Za-z_]\w*", macro, re.ASCII):
            raise ValueError(f"defines: {macro!r}, allowed: names of macros")
        if not isinstance(value, (int, str)):
            raise TypeError(f"defines[{macro!r}]: {value!r}, allowed: int or str")
        macros.append(f"-D{macro}={value if isinstance(value, str) else int(value)}")
    # The directory of the source would be searched for headers otherwise.
    return (f"-arch={arch}", "-std=c++17", "-no-source-include", *macros)


class Nvrtc:
    """NVRTC through `cuda.bindings`."""

    def __init__(self) -> None:
        self._nvrtc = _bindings("nvrtc")
        try:
            major, minor = self._checked(self._nvrtc.nvrtcVersion())
        except RuntimeError as error:  # the bindings look for libnvrtc in their first call
            raise ImportError(f"{NEEDED}; libnvrtc does not load: {error}") from error
        self.version = f"{major}.{minor}"

    def compile(self, source: str, *, name: str, options: tuple[str, ...]) -> bytes:
        """See `compile_cubin`."""
        nvrtc = self._nvrtc
        (program,) = self._checked(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
        try:
            (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
            if error:
                (size,) = self._checked(nvrtc.nvrtcGetProgramLogSize(program))
                log = bytearray(size)
                self._checked(nvrtc.nvrtcGetProgramLog(program, log))
                text = log.rstrip(b"\0").decode(errors="replace").strip()
                raise RuntimeError(f"{name} does not compile with {' '.join(options)}: {error.name}\n{text}")
            (size,) = self._checked(nvrtc.nvrtcGetCUBINSize(program))
            cubin = bytearray(size)
            self._checked(nvrtc.nvrtcGetCUBIN(program, cubin))
            return bytes(cubin)
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    def _checked(self, result: tuple) -> tuple:
        error, *values = result
        if error:
            raise RuntimeError(f"NVRTC: {error.name}")
        return tuple(values)


def _cache_path(source: str, options: tuple[str, ...], version: str) -> Path | None:
    key = hashlib.sha256(repr((source, options, version)).encode()).hexdigest()
    if chosen := os.environ.get("HEADFIT_CACHE_DIR"):
        return Path(chosen, f"{key}.cubin")
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The XDG specification has relative paths ignored.
        directory = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError as error:
        _warn_once("~/.cache", error)
        return None
    return directory / "headfit" / f"{key}.cubin"


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        kept = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_once(str(path.parent), error)
        return None
    if hashlib.sha256(kept[DIGEST_BYTES:]).digest() == kept[:DIGEST_BYTES]:
        return kept[DIGEST_BYTES:]
    logger.warning("%s is damaged and is compiled again", path)
    return None


def _write(path: Path | None, cubin: bytes) -> None:
    if path is None:
        return
    # Under a name of its own first: neither a reader nor another writer of this cubin meets half a file.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(hashlib.sha256(cubin).digest() + cubin)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        _warn_once(str(path.parent), error)


def _warn_once(directory: str, reason: Exception) -> None:
    if directory not in _warned:
        _warned.add(directory)
        logger.warning("no kernel cache in %s, every process compiles for itself: %s", directory, reason)


def _bindings(module: str) -> ModuleType:
    try:
        return importlib.import_module(f"cuda.bindings.{module}")
    except ImportError as error:
        raise ImportError(f"{NEEDED}; cuda.bindings.{module} does not import: {error}") from error


class CudaKernel:
    """A kernel whose only parameter is a struct by value: `extern "C" __global__ void f(const __grid_constant__ P p)`.

    It is loaded into a device's primary context, torch's own, on first use there, which must not fall into a graph
    capture. Safe in several threads.

    Args:
        cubin: from `compile_cubin`.
        entry: the kernel's name.
        max_smem: most bytes of dynamic shared memory of a launch.
    """

    def __init__(self, cubin: bytes, *, entry: str, max_smem: int) -> None:
        self.entry = entry
        self.max_smem = max_smem
        self._cubin = cubin
        self._driver = _bindings("driver")
        self._lock = threading.Lock()
        self._loaded: dict[int, tuple[Any, int]] = {}  # by device: function, bytes of its parameter
        # Configurations are never changed once made (the driver reads them without the GIL), so the stream is in the
        # key. Making one takes several times as long as the launch.
        self._launches: dict[tuple, tuple[Any, Any, int]] = {}
        self._clusters: dict[tuple, int] = {}

    def prepare(self) -> None:
        """Load the kernel for torch's current device, before a graph is captured.

        Raises:
            RuntimeError: the driver refuses it (the wrong architecture, too much shared memory), or a capture runs.
            TypeError: it does not take exactly one parameter.
        """
        self._function(torch.cuda.current_device())

    def launch(
        self,
        *,
        grid: Dim3,
        block: Dim3,
        smem: int,
        stream: int,
        params: ctypes.Structure,
        cluster_size: int = 1,
        programmatic: bool = False,
    ) -> None:
        """Launch on torch's current device; `params` is copied before this returns.

        Args:
            grid, block: (x, y, z), in blocks and in threads.
            smem: bytes of dynamic shared memory a block.
            stream: a stream's handle, as in `torch.cuda.current_stream().cuda_stream`, also one under capture.
            params: the kernel's parameter, laid out as the kernel's own struct.
            cluster_size: blocks a cluster, along x.
            programmatic: may start before the work ahead of it in the stream ends (programmatic dependent launch). The
                kernel must execute `griddepcontrol.wait` before it touches memory that earlier work uses, and before
                it ends: what follows it in the stream waits for this kernel alone.

        Raises:
            ValueError: naming the argument, what it is and what is allowed.
            RuntimeError: the driver's error, with the kernel and the launch; and see `prepare`.
        """
        device = torch.cuda.current_device()
        key = (device, grid, block, smem, stream, cluster_size, programmatic)
        function, config, num_bytes = self._launches.get(key) or self._plan(key)
        if ctypes.sizeof(params) != num_bytes:
            raise ValueError(f"params: {ctypes.sizeof(params)} bytes, allowed: {num_bytes}, {self.entry}'s own struct")
        # A ctypes.Structure whose type is given as None is passed by its address, and the driver copies from there.
        arguments = config, function, ((params,), (None,)), 0
        result = self._driver.cuLaunchKernelEx(*arguments)
        if result[0]:
            # A thread that has used no CUDA before has no context yet.
            if result[0] == self._driver.CUresult.CUDA_ERROR_INVALID_CONTEXT and self._bind(device):
                result = self._driver.cuLaunchKernelEx(*arguments)
            self._checked(result, _describe(key))

    def max_active_clusters(self, *, cluster_size: int, block: Dim3, smem: int) -> int:
        """How many clusters of `cluster_size` blocks torch's current device holds at once; 0 where none fits.

        Raises:
            ValueError, RuntimeError: as `launch`.
        """
        key = (torch.cuda.current_device(), cluster_size, block, smem)
        if key not in self._clusters:
            grid = (cluster_size, 1, 1)
            self._check_shape(grid, block, smem, cluster_size)
            function, _ = self._function(key[0])
            config = self._config(grid, block, smem, 0, [self._cluster_attribute(cluster_size)])
            result = self._driver.cuOccupancyMaxActiveClusters(function, config)
            (self._clusters[key],) = self._checked(result, f"clusters of {cluster_size} x {block} with {smem} bytes")
        return self._clusters[key]

    def _plan(self, key: tuple) -> tuple[Any, Any, int]:
        """Function, CUlaunchConfig and parameter bytes of a launch, checked and kept."""
        device, grid, block, smem, stream, cluster_size, programmatic = key
        self._check_shape(grid, block, smem, cluster_size)
        function, num_bytes = self._function(device)
        attributes = [self._cluster_attribute(cluster_size)] if cluster_size > 1 else []
        if programmatic:
            attributes.append(self._attribute("PROGRAMMATIC_STREAM_SERIALIZATION"))
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
        if len(self._launches) >= MAX_KEPT_LAUNCHES:
            self._launches.clear()
        plan = self._launches[key] = function, self._config(grid, block, smem, stream, attributes), num_bytes
        return plan

    def _config(self, grid: Dim3, block: Dim3, smem: int, stream: int, attributes: list) -> Any:
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = smem
        config.hStream = stream
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config

    def _attribute(self, name: str) -> Any:
        attribute = self._driver.CUlaunchAttribute()
        attribute.id = getattr(self._driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
        return attribute

    def _cluster_attribute(self, cluster_size: int) -> Any:
        attribute = self._attribute("CLUSTER_DIMENSION")
        cluster = attribute.value.clusterDim
        cluster.x, cluster.y, cluster.z = cluster_size, 1, 1
        return attribute

    def _check_shape(self, grid: Dim3, block: Dim3, smem: int, cluster_size: int) -> None:
        if not 1 <= cluster_size <= MAX_CLUSTER_SIZE:
            raise ValueError(f"cluster_size: {cluster_size}, allowed: 1 to {MAX_CLUSTER_SIZE}")
        if len(grid) != 3 or min(grid) < 1 or grid[0] % cluster_size:
            raise ValueError(f"grid: {grid}, allowed: (x, y, z) from 1, x a multiple of cluster_size {cluster_size}")
        if len(block) != 3 or min(block) < 1 or math.prod(block) > MAX_BLOCK_THREADS:
            raise ValueError(f"block: {block}, allowed: (x, y, z) from 1, their product to {MAX_BLOCK_THREADS}")
        if not 0 <= smem <= self.max_smem:
            raise ValueError(f"smem: {smem} bytes, allowed: 0 to {self.max_smem}, max_smem")

    def _function(self, device: int) -> tuple[Any, int]:
        with self._lock:
            if device not in self._loaded:
                self._loaded[device] = self._load(device)
            return self._loaded[device]

    def _load(self, device: int) -> tuple[Any, int]:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"kernel {self.entry}: not on device {device} yet, call prepare() before graph capture")
        driver = self._driver
        self._bind(device)
        (module,) = self._checked(driver.cuModuleLoadData(self._cubin), f"load for device {device}")
        (function,) = self._checked(driver.cuModuleGetFunction(module, self.entry.encode()), "find in its cubin")
        values = {"MAX_DYNAMIC_SHARED_SIZE_BYTES": self.max_smem, "NON_PORTABLE_CLUSTER_SIZE_ALLOWED": 1}
        for name, value in values.items():
            attribute = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
            self._checked(driver.cuFuncSetAttribute(function, attribute, value), f"set {name} to {value}")
        first, second = (driver.cuFuncGetParamInfo(function, index) for index in (0, 1))
        if first[0] or not second[0]:
            raise TypeError(f"kernel {self.entry}: {'no' if first[0] else 'several'} parameters, allowed: one struct")
        return function, first[2]

    def _bind(self, device: int) -> bool:
        """Give this thread torch's context of `device` where it has none; whether it had none."""
        driver = self._driver
        (context,) = self._checked(driver.cuCtxGetCurrent(), "ask for the context")
        if int(context):
            return False
        (handle,) = self._checked(driver.cuDeviceGet(device), f"find device {device}")
        (context,) = self._checked(driver.cuDevicePrimaryCtxRetain(handle), f"retain the context of device {device}")
        self._checked(driver.cuCtxSetCurrent(context), "set the context")
        return True

    def _checked(self, result: tuple, action: str) -> tuple:
        error, *values = result
        if error:
            name, text = self._driver.cuGetErrorName(error)[1], self._driver.cuGetErrorString(error)[1]
            raise RuntimeError(f"kernel {self.entry}, {action}: {(name or b'?').decode()} ({(text or b'?').decode()})")
        return tuple(values)


def _describe(key: tuple) -> str:
    device, grid, block, smem, _, cluster_size, programmatic = key
    shape = f"grid={grid} block={block} smem={smem} cluster_size={cluster_size} programmatic={programmatic}"
    return f"launch on device {device}: {shape}"
