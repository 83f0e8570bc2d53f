"""The one timer of benchmarks: CUDA-graph replays over inputs that are not in the L2 cache; and what a graph holds."""

import ctypes
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Launch = Callable[[], object]

# Read before every replay. Many times the L2 cache of any GPU, and long enough (a quarter of a millisecond at 4 TB/s)
# that the host has queued the replay before the GPU is done with it: no idle gap is timed.
FLUSH_BYTES = 2**30
COPY_BYTES = 4 * 2**30
REPLAYS = 30
MIN_REPLAYS = 5
_LAUNCH_NODES = (0, 1, 2)  # CU_GRAPH_NODE_TYPE_KERNEL, _MEMCPY and _MEMSET


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one launch, over the replays."""

    us_median: float
    us_min: float
    us_max: float

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> "Timing":
        """Median, smallest and largest of `samples_us`, at least one."""
        if not samples_us:
            raise ValueError("samples_us: 0 samples, allowed: at least 1")
        return cls(statistics.median(samples_us), min(samples_us), max(samples_us))


class ColdTimer:
    """Times launches as a captured decode step runs them: back to back in one CUDA graph, L2 cold before each replay.

    Launches that are to find nothing in L2 read different inputs. The time of a replay is divided by their number.
    """

    def __init__(self, *, replays: int = REPLAYS, warm_up: int = 3, most_ms: float = math.inf) -> None:
        """The first two count replays.

        Args:
            most_ms: of a call's timed replays together: there are fewer where `replays` would take longer, at least
                `MIN_REPLAYS`.

        Raises:
            ValueError: fewer than one replay, or a negative warm-up.
            RuntimeError: there is no CUDA device.
        """
        if replays < 1 or warm_up < 0:
            raise ValueError(f"replays, warm_up: {replays}, {warm_up}, allowed: at least 1 and at least 0")
        check_cuda()
        self.replays, self.warm_up, self.most_ms = replays, warm_up, most_ms
        self._buffer = torch.zeros(FLUSH_BYTES // 4, device="cuda")
        self._sum = torch.zeros((), device="cuda")

    def __call__(self, launches: Sequence[Launch]) -> Timing:
        """Microseconds a launch. All run once uncaptured first: what a first call compiles or plans is not timed.

        Raises:
            ValueError: no launches.
        """
        if not launches:
            raise ValueError("launches: 0, allowed: at least 1")
        for launch in launches:
            launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in launches:
                launch()
        replays = self.replays
        for _ in range(self.warm_up):
            start, end = self._replay(graph)
            if self.most_ms < math.inf:
                end.synchronize()
                replays = min(self.replays, max(MIN_REPLAYS, int(self.most_ms / start.elapsed_time(end))))
        pairs = [self._replay(graph) for _ in range(replays)]
        torch.cuda.synchronize()
        return Timing.of([1e3 * start.elapsed_time(end) / len(launches) for start, end in pairs])

    def _replay(self, graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Read, not written: dirty lines would be written back while the replay is timed.
        torch.sum(self._buffer, dim=0, out=self._sum)
        start.record()
        graph.replay()
        end.record()
        return start, end


def capture(run: Launch) -> torch.cuda.CUDAGraph:
    """`run` as a CUDA graph whose nodes can be counted. What its first call compiles or plans must be done."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        run()
    graph.instantiate()
    return graph


def count_launches(graph: torch.cuda.CUDAGraph) -> int:
    """Kernels, copies and fills of a graph that was captured with `keep_graph`.

    Raises:
        RuntimeError: the driver refuses.
    """
    driver, handle, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    _check(driver.cuGraphGetNodes(handle, None, ctypes.byref(count)))
    if count.value == 0:  # which the next call would refuse
        return 0
    nodes = (ctypes.c_void_p * count.value)()
    _check(driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)))
    kinds = []
    for node in nodes:
        kind = ctypes.c_int()
        _check(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        kinds.append(kind.value)
    return sum(kind in _LAUNCH_NODES for kind in kinds)


def _check(error: int) -> None:
    if error:
        raise RuntimeError(f"the CUDA driver refuses to describe a graph: error {error}")


def copy_bandwidth(*, num_bytes: int = COPY_BYTES, copies: int = 10) -> float:
    """GB/s (1e9 bytes, read and written) of device-to-device copies of `num_bytes`, the median copy.

    Raises:
        ValueError: less than one byte or copy.
        RuntimeError: there is no CUDA device.
    """
    if num_bytes < 1 or copies < 1:
        raise ValueError(f"num_bytes, copies: {num_bytes}, {copies}, allowed: at least 1")
    check_cuda()
    source = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(copies + 1)]
    events[0].record()
    for event in events[1:]:
        target.copy_(source)
        event.record()
    torch.cuda.synchronize()
    milliseconds = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return 2 * num_bytes / milliseconds / 1e6


def null_launch() -> Launch:
    """A launch that does nothing, one block of 256 threads for each SM: what any launch in a graph costs.

    Raises:
        RuntimeError: there is no CUDA device.
        ImportError: there is no Triton.
    """
    check_cuda()
    import triton

    num_sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    kernel = triton.jit(_nothing)
    return lambda: kernel[(num_sms,)](num_warps=8)


def _nothing():
    pass


def check_cuda() -> None:
    """Raise RuntimeError where torch finds no CUDA device."""
    if not torch.cuda.is_available():
        raise RuntimeError("timing needs a CUDA device; torch finds none")
