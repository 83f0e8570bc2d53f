"""Kernels that NVRTC compiles, on the GPU: parameters by value, shared memory, clusters, dependent launches, graphs."""

import ctypes
import threading

import pytest
import torch

from headfit.kernels.nvrtc import CudaKernel, compile_cubin

SMEM = 200 * 1024
SOURCE = r"""
struct Params { unsigned* out; unsigned value; unsigned count; };

// out[i] = value + i
extern "C" __global__ void __launch_bounds__(256) fill(const __grid_constant__ Params p) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.count) p.out[i] = p.value + i;
}

// All of the dynamic shared memory is written, then summed: out[block] = sum of value + i over its `count` words
extern "C" __global__ void shared_sum(const __grid_constant__ Params p) {
  extern __shared__ unsigned words[];
  for (unsigned i = threadIdx.x; i < p.count; i += blockDim.x) words[i] = p.value + i;
  __syncthreads();
  unsigned sum = 0;
  for (unsigned i = threadIdx.x; i < p.count; i += blockDim.x) sum += words[p.count - 1 - i];
  atomicAdd(&p.out[blockIdx.x], sum);
}

// out[block] = 100 * blocks of its cluster + rank in it
extern "C" __global__ void cluster_shape(const __grid_constant__ Params p) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  unsigned size, rank;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) p.out[blockIdx.x] = 100 * size + rank;
}

// Lets the next kernel start, then waits up to 200 ms for it to set out[0]: out[1] = 1 where that was seen, else 2
extern "C" __global__ void first(const __grid_constant__ Params p) {
  asm volatile("griddepcontrol.launch_dependents;");
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start) :: "memory");
  unsigned seen;
  do {
    seen = *(volatile unsigned*)p.out;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now) :: "memory");
  } while (!seen && now - start < 200000000ull);
  p.out[1] = seen ? 1 : 2;
}

// out[2] = 10 * what `first` wrote to out[1]
extern "C" __global__ void second(const __grid_constant__ Params p) {
  *(volatile unsigned*)p.out = 1;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  p.out[2] = 10 * *(volatile unsigned*)(p.out + 1);
}
"""


class Params(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p), ("value", ctypes.c_uint), ("count", ctypes.c_uint))


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"needs a GPU of compute capability 9.0, this one has {torch.cuda.get_device_capability()}")


@pytest.fixture(scope="module")
def cubin(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADFIT_CACHE_DIR", str(tmp_path_factory.mktemp("cubins")))
        return compile_cubin(SOURCE, name="test.cu", arch="sm_90a", defines={}, entry="fill")


@pytest.fixture
def load(cubin):
    """entry -> a kernel that is on no device yet."""
    return lambda entry: CudaKernel(cubin, entry=entry, max_smem=SMEM)


def stream():
    return torch.cuda.current_stream().cuda_stream


def zeros(count):
    return torch.zeros(count, dtype=torch.int32, device="cuda")


def fill(kernel, out, value, **changed):
    params = Params(out.data_ptr(), value, out.numel())
    blocks = -(-out.numel() // 128)
    launch = {"grid": (blocks, 1, 1), "block": (128, 1, 1), "smem": 0, "stream": stream(), "params": params}
    kernel.launch(**{**launch, **changed})


def counted(out, value):
    return torch.equal(out.cpu(), torch.arange(value, value + out.numel(), dtype=torch.int32))


def test_struct_by_value(load):
    """Each launch has its own copy of the struct, taken before `launch` returns."""
    kernel = load("fill")
    outs = [zeros(1000) for _ in range(3)]
    params = Params()
    for i, out in enumerate(outs):
        params.out, params.value, params.count = out.data_ptr(), 7 * i, 1000
        fill(kernel, out, 0, params=params)
    params.out, params.value, params.count = 0, 0, 0
    assert all(counted(out, 7 * i) for i, out in enumerate(outs))


def test_struct_of_another_size(load):
    longer = type("Longer", (Params,), {"_fields_": (("more", ctypes.c_uint64),)})
    out = zeros(4)
    with pytest.raises(ValueError, match="params: 24 bytes, allowed: 16, fill's own struct"):
        fill(load("fill"), out, 1, params=longer(out.data_ptr(), 1, 4, 0))
    assert not out.any()


def test_dynamic_shared_memory(load):
    out, count = zeros(3), SMEM // 4
    params = Params(out.data_ptr(), 1, count)
    load("shared_sum").launch(grid=(3, 1, 1), block=(256, 1, 1), smem=SMEM, stream=stream(), params=params)
    assert out.tolist() == [count * (count + 1) // 2] * 3


@pytest.mark.parametrize("cluster_size", [1, 2, 8, 16])
def test_cluster(load, cluster_size):
    out = zeros(32)
    params = Params(out.data_ptr(), 0, 32)
    load("cluster_shape").launch(
        grid=(32, 1, 1), block=(64, 1, 1), smem=1024, stream=stream(), params=params, cluster_size=cluster_size
    )
    assert out.tolist() == [100 * cluster_size + i % cluster_size for i in range(32)]


def test_max_active_clusters(load):
    """At 200 KB of shared memory a multiprocessor holds one block, and a cluster lies within one group of them."""
    kernel = load("cluster_shape")
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    shape = {"block": (128, 1, 1), "smem": SMEM}
    counts = {size: kernel.max_active_clusters(cluster_size=size, **shape) for size in (1, 2, 8, 16)}
    assert counts[1] == multiprocessors
    assert all(0 < size * count <= multiprocessors for size, count in counts.items()), counts
    assert kernel.max_active_clusters(cluster_size=1, block=(128, 1, 1), smem=64 * 1024) > counts[1]


@pytest.mark.parametrize(("programmatic", "expected"), [(True, [1, 1, 10]), (False, [1, 2, 20])])
def test_programmatic_launch_overlaps(load, programmatic, expected):
    kernels = first, second = load("first"), load("second")
    for kernel in kernels:
        kernel.prepare()
    out = zeros(3)
    params = Params(out.data_ptr(), 0, 3)
    launch = {"grid": (1, 1, 1), "block": (1, 1, 1), "smem": 0, "stream": stream(), "params": params}
    first.launch(**launch)
    second.launch(**launch, programmatic=programmatic)
    assert out.tolist() == expected


def test_graph_capture(load):
    kernel, cluster_kernel = load("fill"), load("cluster_shape")
    kernel.prepare()
    cluster_kernel.prepare()
    filled, clusters = zeros(1000), zeros(32)
    params = Params(clusters.data_ptr(), 0, 32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill(kernel, filled, 5)
        launch = {"grid": (32, 1, 1), "block": (64, 1, 1), "smem": 0, "stream": stream(), "params": params}
        cluster_kernel.launch(**launch, cluster_size=16, programmatic=True)
        total = filled.sum()
    assert not filled.any() and not clusters.any(), "the capture itself ran the kernels"
    for _ in range(2):
        filled.zero_()
        clusters.zero_()
        graph.replay()
        assert counted(filled, 5) and total.item() == sum(range(5, 1005))
        assert clusters.tolist() == [1600 + i % 16 for i in range(32)]


def test_first_use_in_a_capture_is_refused(load):
    kernel, out = load("fill"), zeros(100)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.add_(1)
        with pytest.raises(RuntimeError, match=r"kernel fill: not on device \d+ yet, call prepare\(\) before"):
            fill(kernel, out, 5)
    graph.replay()
    assert (out == 1).all()


def test_the_driver_refuses(load):
    """More threads than the kernel's launch bounds: the error names both, and nothing is broken after it."""
    kernel, out = load("fill"), zeros(100)
    message = (
        r"kernel fill, launch on device \d+: grid=\(1, 1, 1\) block=\(512, 1, 1\) smem=0 .*: CUDA_ERROR_\w+ \(.+\)"
    )
    with pytest.raises(RuntimeError, match=message):
        fill(kernel, out, 3, block=(512, 1, 1))
    assert not out.any()
    fill(kernel, out, 3)
    assert counted(out, 3)


def test_more_shared_memory_than_there_is(cubin):
    too_much = CudaKernel(cubin, entry="fill", max_smem=1 << 20)
    with pytest.raises(RuntimeError, match="kernel fill, set MAX_DYNAMIC_SHARED_SIZE_BYTES to 1048576: CUDA_ERROR_"):
        too_much.prepare()


def test_another_architecture(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADFIT_CACHE_DIR", str(tmp_path))
    cubin = compile_cubin(SOURCE, name="test.cu", arch="sm_100a", defines={}, entry="fill")
    with pytest.raises(RuntimeError, match=r"kernel fill, load for device \d+: CUDA_ERROR_NO_BINARY_FOR_GPU"):
        CudaKernel(cubin, entry="fill", max_smem=0).prepare()


def test_threads_and_streams(load):
    """A thread that has used no CUDA before, and a stream of its own in each."""
    kernel = load("fill")
    kernel.prepare()
    outs = [zeros(1000) for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in outs]
    torch.cuda.synchronize()
    errors = []

    def work(i):
        try:
            for _ in range(50):
                fill(kernel, outs[i], 100 * i, stream=streams[i].cuda_stream)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(outs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not errors and all(counted(out, 100 * i) for i, out in enumerate(outs))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices(load):
    kernel = load("fill")
    for device in (0, 1, 0):
        with torch.cuda.device(device):
            out = zeros(100)
            fill(kernel, out, 9)
            assert counted(out, 9)
