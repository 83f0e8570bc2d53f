"""Run-time compilation: the cubin cache and launches on stand-ins, and NVRTC itself where it is installed."""

import ctypes
import hashlib
import logging
import multiprocessing
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headfit.kernels import nvrtc
from headfit.kernels.nvrtc import MAX_KEPT_LAUNCHES, CudaKernel, Nvrtc, compile_cubin

SOURCE = 'extern "C" __global__ void k(int* p) { *p = N; }'


class StandInCompiler:
    """A "cubin" that depends on all that a compilation depends on, and holds the kernels k and k2."""

    def __init__(self, version="13.0"):
        self.version = version
        self.calls = 0

    def compile(self, source, *, name, options):
        self.calls += 1
        content = hashlib.sha256(repr((source, options, self.version)).encode()).digest()
        return b"\x7fELF\0.text.k\0.text.k2\0" + content * 30_000


def compiled(compiler, *, source=SOURCE, arch="sm_90a", defines=None, entry="k"):
    return compile_cubin(source, name="k.cu", arch=arch, defines=defines or {"N": 1}, entry=entry, compiler=compiler)


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    """An empty cache that no other test or process sees; nothing warned about yet."""
    monkeypatch.setenv("HEADFIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "_warned", set())
    return tmp_path / "cache"


@pytest.fixture
def installed():
    """NVRTC through cuda.bindings, or a skip."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    try:
        return Nvrtc()
    except ImportError:
        pytest.skip("nvidia-cuda-nvrtc is not installed")


def test_the_second_call_reads_the_cache(cache_dir):
    compiler = StandInCompiler()
    first = compiled(compiler)
    assert compiled(compiler) == first and compiled(compiler, entry="k2") == first
    assert compiler.calls == 1 and len(list(cache_dir.iterdir())) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"source": SOURCE + " "},
        {"defines": {"N": 2}},
        {"defines": {"N": 1, "M": 1}},
        {"arch": "sm_100a"},
        {"compiler": StandInCompiler("13.1")},
    ],
    ids=["source", "value", "name", "arch", "version"],
)
def test_another_compilation_is_another_file(change, cache_dir):
    compiler = change.setdefault("compiler", StandInCompiler())
    before = compiled(StandInCompiler())
    assert compiled(**change) != before and compiler.calls == 1
    assert compiled(StandInCompiler()) == before and len(list(cache_dir.iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [lambda kept: kept[:-1], lambda kept: kept[:32], lambda kept: b"", lambda kept: kept[:99] + b"?" + kept[100:]],
    ids=["truncated", "header only", "empty", "one byte"],
)
def test_a_damaged_file_is_compiled_again(damage, cache_dir, caplog):
    compiler = StandInCompiler()
    expected = compiled(compiler)
    (path,) = cache_dir.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert compiled(compiler) == expected and compiler.calls == 2
    assert "is damaged" in caplog.text
    assert compiled(compiler) == expected and compiler.calls == 2


def test_unusable_directory_is_said_once(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADFIT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    compiler = StandInCompiler()
    assert compiled(compiler) == compiled(compiler) and compiler.calls == 2
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and str(tmp_path / "file" / "cache") in record.getMessage()


def test_nothing_is_left_of_a_write_that_fails(cache_dir, monkeypatch, caplog):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    compiler = StandInCompiler()
    assert compiled(compiler) == compiled(compiler) and compiler.calls == 2
    assert not list(cache_dir.iterdir()) and caplog.text.count("No space left on device") == 1


def test_without_a_home(monkeypatch, caplog):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    for variable in ("HEADFIT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    compiler = StandInCompiler()
    assert compiled(compiler) == compiled(compiler) and compiler.calls == 2
    assert caplog.text.count("Could not determine home directory") == 1


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HEADFIT_CACHE_DIR": "{tmp}/own", "XDG_CACHE_HOME": "{tmp}/xdg"}, "own"),
        ({"HEADFIT_CACHE_DIR": "", "XDG_CACHE_HOME": "{tmp}/xdg"}, "xdg/headfit"),
        ({"XDG_CACHE_HOME": "relative"}, "home/.cache/headfit"),
        ({}, "home/.cache/headfit"),
    ],
)
def test_where_the_cache_is(environment, expected, tmp_path, monkeypatch):
    for variable in ("HEADFIT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value.format(tmp=tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    compiled(StandInCompiler())
    assert [path.parent for path in tmp_path.rglob("*.cubin")] == [tmp_path / expected]


def compile_many_times(barrier, results):
    """One of several processes that compile the same source and throw the cached file away, over and over."""
    damaged = logging.Handler(logging.WARNING)
    warnings = []
    damaged.emit = lambda record: warnings.append(record.getMessage())
    nvrtc.logger.addHandler(damaged)
    expected = StandInCompiler().compile(SOURCE, name="k.cu", options=nvrtc._options("sm_90a", {"N": 1}))
    barrier.wait()
    right = 0
    for i in range(200):
        right += compiled(StandInCompiler()) == expected
        if i % 5 == 0:
            for path in Path(os.environ["HEADFIT_CACHE_DIR"]).glob("*.cubin"):
                path.unlink(missing_ok=True)
    results.put((right, warnings))


def test_processes_at_once(cache_dir):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    processes = [context.Process(target=compile_many_times, args=(barrier, results), daemon=True) for _ in range(3)]
    for process in processes:
        process.start()
    assert [results.get(timeout=120) for _ in processes] == [(200, [])] * 3
    for process in processes:
        process.join()
    assert [path.suffix for path in cache_dir.iterdir()] in ([], [".cubin"])


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"arch": "compute_90"}, ValueError, "arch: 'compute_90', allowed"),
        ({"arch": "sm_90a -G"}, ValueError, "arch: 'sm_90a -G', allowed"),
        ({"defines": {"N M": 1}}, ValueError, "defines: 'N M', allowed"),
        ({"defines": {"N": 1.5}}, TypeError, r"defines\['N'\]: 1.5, allowed: int or str"),
    ],
)
def test_wrong_arguments_are_not_compiled(wrong, error, message):
    compiler = StandInCompiler()
    with pytest.raises(error, match=message):
        compiled(compiler, **wrong)
    assert compiler.calls == 0


def test_an_entry_that_is_not_there():
    with pytest.raises(ValueError, match=r"entry: 'missing', allowed: .* of k.cu: k, k2"):
        compiled(StandInCompiler(), entry="missing")


def test_a_bool_is_a_number():
    assert nvrtc._options("sm_90a", {"B": True, "A": "int"})[-2:] == ("-DA=int", "-DB=1")


def test_missing_wheels_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(ImportError, match="wheels cuda-bindings and nvidia-cuda-nvrtc"):
        compiled(None)
    with pytest.raises(ImportError, match="wheels cuda-bindings and nvidia-cuda-nvrtc"):
        CudaKernel(b"", entry="k", max_smem=0)


def test_missing_libnvrtc_is_named(monkeypatch):
    def not_found():
        raise RuntimeError("no libnvrtc.so.13")

    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", SimpleNamespace(nvrtcVersion=not_found))
    with pytest.raises(ImportError, match=r"wheels cuda-bindings and nvidia-cuda-nvrtc .*no libnvrtc.so.13"):
        compiled(None)


def test_nvrtc_compiles(installed, cache_dir):
    source = 'extern "C" __global__ void NAME(int* p) { *p = N; }\nstatic_assert(N == 7 && FLAG);'
    arguments = {"name": "n.cu", "arch": "sm_90a", "defines": {"N": 7, "FLAG": True, "NAME": "kernel_7"}}
    cubin = compile_cubin(source, **arguments, entry="kernel_7")
    assert cubin[:4] == b"\x7fELF" and b"kernel_7" in cubin
    with pytest.raises(ValueError, match=r"allowed: .*: kernel_7$"):
        compile_cubin(source, **arguments, entry="kernel_8")
    (path,) = cache_dir.iterdir()
    assert path.read_bytes() == hashlib.sha256(cubin).digest() + cubin


def test_nvrtc_says_what_is_wrong(installed, cache_dir):
    with pytest.raises(
        RuntimeError, match=r'(?s)^wrong.cu does not compile .*wrong.cu\(1\): error: .*"missing" is unde'
    ):
        compile_cubin("int f() { return missing; }", name="wrong.cu", arch="sm_90a", defines={}, entry="f")
    assert not cache_dir.exists()


def test_headers_are_not_found(installed, tmp_path, monkeypatch):
    """A header is not in the cache's key, so none is read, not even beside the source."""
    (tmp_path / "beside.h").write_text("#define N 1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="could not open source file"):
        compile_cubin('#include "beside.h"\n' + SOURCE, name="k.cu", arch="sm_90a", defines={"N": 1}, entry="k")


class Params(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_void_p), ("number", ctypes.c_int), ("other", ctypes.c_int))


class StandInDriver:
    """The driver's calls, recorded; `launch_errors` are what the next launches return."""

    CUresult = SimpleNamespace(CUDA_ERROR_INVALID_CONTEXT=201)
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED=14
    )
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6
    )
    CUlaunchConfig = SimpleNamespace

    def __init__(self):
        self.launches, self.loads, self.attributes, self.launch_errors = [], [], {}, []
        self.context, self.num_params, self.occupancy_calls = 1, 1, 0

    def CUlaunchAttribute(self):
        return SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))

    def cuLaunchKernelEx(self, config, function, params, extra):
        error = self.launch_errors.pop(0) if self.launch_errors else 0
        if not error:
            self.launches.append((config, function, params))
        return (error,)

    def cuOccupancyMaxActiveClusters(self, function, config):
        self.occupancy_calls += 1
        return 0, 8

    def cuModuleLoadData(self, cubin):
        self.loads.append(cubin)
        return 0, len(self.loads)

    def cuModuleGetFunction(self, module, name):
        return 0, f"{name.decode()} of module {module}"

    def cuFuncSetAttribute(self, function, attribute, value):
        self.attributes[function, attribute] = value
        return (0,)

    def cuFuncGetParamInfo(self, function, index):
        return (0, 0, 16) if index < self.num_params else (1, None, None)

    def cuCtxGetCurrent(self):
        return 0, self.context

    def cuDeviceGet(self, index):
        return 0, index

    def cuDevicePrimaryCtxRetain(self, device):
        return 0, 70 + device

    def cuCtxSetCurrent(self, context):
        self.context = context
        return (0,)

    def cuGetErrorName(self, error):
        return 0, b"CUDA_ERROR_%d" % error

    def cuGetErrorString(self, error):
        return 0, b"what %d means" % error


@pytest.fixture
def driver(monkeypatch):
    driver = StandInDriver()
    monkeypatch.setattr(nvrtc, "_bindings", lambda module: driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return driver


LAUNCH = {"grid": (32, 2, 1), "block": (128, 1, 1), "smem": 200_000, "stream": 5, "params": Params(1, 2, 3)}


@pytest.fixture
def kernel(driver):
    return CudaKernel(b"cubin", entry="k", max_smem=200_000)


@pytest.mark.parametrize("structs", ["stand-in", "cuda.bindings"])
def test_launch_configuration(structs, kernel, driver):
    if structs == "cuda.bindings":
        real = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
        for name in ("CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID", "CUfunction_attribute"):
            setattr(driver, name, getattr(real, name))
    kernel.launch(**LAUNCH, cluster_size=16, programmatic=True)
    ((config, function, params),) = driver.launches
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (32, 2, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (128, 1, 1)
    assert config.sharedMemBytes == 200_000 and int(config.hStream) == 5 and config.numAttrs == 2
    cluster, programmatic = config.attrs
    assert (int(cluster.id), int(programmatic.id)) == (4, 6)
    dimension = cluster.value.clusterDim
    assert (dimension.x, dimension.y, dimension.z) == (16, 1, 1)
    assert programmatic.value.programmaticStreamSerializationAllowed == 1
    assert function == "k of module 1" and params == ((LAUNCH["params"],), (None,))
    assert [(attribute, value) for (_, attribute), value in driver.attributes.items()] == [(8, 200_000), (14, 1)]


def test_a_plain_launch_has_no_attributes(kernel, driver):
    kernel.launch(**LAUNCH)
    assert driver.launches[0][0].numAttrs == 0


def test_a_configuration_is_made_once(kernel, driver):
    for stream in (5, 5, 6, 5):
        kernel.launch(**{**LAUNCH, "stream": stream})
    first, second, third, fourth = (config for config, _, _ in driver.launches)
    assert first is second is fourth and third is not first
    assert [int(config.hStream) for config in (first, third)] == [5, 6]
    assert driver.loads == [b"cubin"]


def test_configurations_are_bounded(kernel, driver):
    for i in range(MAX_KEPT_LAUNCHES + 10):
        kernel.launch(**{**LAUNCH, "grid": (i + 1, 1, 1)})
    assert len(kernel._launches) <= MAX_KEPT_LAUNCHES
    assert [config.gridDimX for config, _, _ in driver.launches] == list(range(1, MAX_KEPT_LAUNCHES + 11))


def test_each_device_has_its_own_function(kernel, driver, monkeypatch):
    kernel.launch(**LAUNCH)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    kernel.launch(**LAUNCH)
    kernel.launch(**LAUNCH)
    assert [function for _, function, _ in driver.launches] == ["k of module 1", "k of module 2", "k of module 2"]
    assert len(driver.loads) == 2 and len(driver.attributes) == 4


def test_clusters_are_counted_once(kernel, driver):
    shape = {"cluster_size": 16, "block": (128, 1, 1), "smem": 200_000}
    assert kernel.max_active_clusters(**shape) == kernel.max_active_clusters(**shape) == 8
    assert driver.occupancy_calls == 1
    kernel.max_active_clusters(**{**shape, "cluster_size": 8})
    assert driver.occupancy_calls == 2 and not driver.launches


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"grid": (0, 1, 1)}, r"grid: \(0, 1, 1\), allowed"),
        ({"grid": (32, 1)}, r"grid: \(32, 1\), allowed"),
        ({"cluster_size": 12}, r"grid: \(32, 2, 1\), allowed: .*cluster_size 12"),
        ({"cluster_size": 32}, "cluster_size: 32, allowed: 1 to 16"),
        ({"cluster_size": 0}, "cluster_size: 0, allowed: 1 to 16"),
        ({"block": (1024, 2, 1)}, r"block: \(1024, 2, 1\), allowed"),
        ({"smem": 200_001}, "smem: 200001 bytes, allowed: 0 to 200000"),
        ({"smem": -1}, "smem: -1 bytes, allowed: 0 to 200000"),
    ],
)
def test_wrong_shapes_reach_no_driver(wrong, message, kernel, driver):
    with pytest.raises(ValueError, match=message):
        kernel.launch(**{**LAUNCH, **wrong})
    assert not driver.loads and not driver.launches


def test_params_of_another_size_are_not_launched(kernel, driver):
    with pytest.raises(ValueError, match="params: 8 bytes, allowed: 16, k's own struct"):
        kernel.launch(**{**LAUNCH, "params": type("Short", (ctypes.Structure,), {"_fields_": Params._fields_[:1]})()})
    assert not driver.launches


@pytest.mark.parametrize("num_params", [0, 2])
def test_a_kernel_takes_one_struct(num_params, kernel, driver):
    driver.num_params = num_params
    with pytest.raises(TypeError, match=r"kernel k: .* parameters, allowed: one struct"):
        kernel.prepare()


def test_the_error_names_kernel_and_launch(kernel, driver):
    driver.launch_errors = [701]
    message = r"kernel k, launch on device 0: grid=\(32, 2, 1\) .*cluster_size=16 .*: CUDA_ERROR_701 \(what 701 means\)"
    with pytest.raises(RuntimeError, match=message):
        kernel.launch(**LAUNCH, cluster_size=16)
    assert not driver.launches
    kernel.launch(**LAUNCH, cluster_size=16)
    assert len(driver.launches) == 1


def test_a_thread_without_a_context_gets_torchs(kernel, driver):
    kernel.launch(**LAUNCH)
    driver.context, driver.launch_errors = 0, [201]
    kernel.launch(**LAUNCH)
    assert driver.context == 70 and len(driver.launches) == 2


def test_a_wrong_context_is_an_error(kernel, driver):
    driver.launch_errors = [201]
    with pytest.raises(RuntimeError, match="CUDA_ERROR_201"):
        kernel.launch(**LAUNCH)
    assert not driver.launches and driver.context == 1


def test_loading_does_not_fall_into_a_capture(kernel, driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"kernel k: not on device 0 yet, call prepare\(\) before graph capture"):
        kernel.launch(**LAUNCH)
    assert not driver.loads
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernel.prepare()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kernel.launch(**LAUNCH)
    assert len(driver.loads) == len(driver.launches) == 1
