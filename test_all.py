"""Tests of everything: `make test`. With a GPU natively, without one in Triton's interpreter and by compiling.

References are float64. Where a test needs what this machine has not, it is skipped with the reason.
"""
import concurrent.futures
import contextlib
import ctypes
import fcntl
import functools
import importlib
import inspect
import io
import json
import math
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import types
from functools import partial
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch

ASKED = os.environ.get("TRITON_INTERPRET")  # what the scripts, run as processes, are to find; common sets it for us
import common  # noqa: E402  before triton: it chooses the interpreter where there is no GPU
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

import compare as comparing  # noqa: E402

ROOT = Path(__file__).resolve().parent
SCRIPTS = [path.stem for path in sorted(ROOT.glob("[0-9][0-9]_*.py"))]
DEVICE = common.device()
GPU = DEVICE == "cuda"
TMA = GPU and torch.cuda.get_device_capability()[0] >= 9
WGMMA = GPU and torch.cuda.get_device_capability()[0] == 9
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
needs_tma = pytest.mark.skipif(not TMA, reason="needs a GPU of compute capability 9.0 or newer")
needs_wgmma = pytest.mark.skipif(not WGMMA, reason="needs a GPU of compute capability 9.0")
without_gpu = pytest.mark.skipif(GPU, reason="what a machine without a GPU answers")
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not GPU, reason="no interpreter runs bf16"))
NAN, INF = float("nan"), float("inf")
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}:triton.runtime.interpreter") for kind in
              ("RuntimeWarning", "DeprecationWarning")]  # numpy's, of what a GPU computes without a word

vector, fused, product, tuning = map(importlib.import_module, ("01_vector_add", "02_fused_softmax", "03_matmul",
                                                               "04_autotune"))
import peers  # noqa: E402


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def poisoned(like):
    return torch.full(like.shape, NAN, dtype=like.dtype, device=like.device)


@pytest.fixture
def much_memory():
    """For tests of many GB of a GPU: one at a time, whatever the number of pytest-xdist's workers, and no worker keeps
    them for itself."""
    with open(Path(tempfile.gettempdir(), f"much-memory-{os.getuid()}"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        if GPU:
            torch.cuda.empty_cache()


def far_apart(rows, cols, stride):
    """A random fp16 matrix whose rows lie `stride` elements apart; the pages between them are never touched."""
    x = torch.empty_strided((rows, cols), (stride, 1), dtype=torch.float16, device=DEVICE)
    return x.copy_(torch.randn(rows, cols))


def check_far_apart(check, stride):
    """check(stride) of this file, in a process of its own: an offset that wraps ends that process, not the tests."""
    nbytes = 2 * (70 * stride if stride < 2**30 else 2 * stride) + 2**30
    try:
        free = torch.cuda.mem_get_info()[0] if GPU else torch.empty(nbytes, dtype=torch.uint8).nbytes
    except RuntimeError:
        free = 0
    if free < nbytes:
        pytest.skip(f"needs {nbytes:,} bytes")
    done = run("-c", f"import test_all; test_all.{check}({stride})")
    assert done.returncode == 0, done.stderr[-1000:]


FAR_APART = pytest.mark.parametrize("stride", [2**30, 2**31 + 8])  # the third row begins at 2^31 and past 2^32


# ---------------------------------------------------------------- 01: one float addition is rounded in one way only

@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, BF16])
@pytest.mark.parametrize("n", [0, 1, 2, 15, 16, 17, 127, 1023, 1024, 1025, 4099])
def test_add(n, dtype):
    x, y = ((100 * randn(n)).to(dtype) for _ in range(2))
    assert torch.equal(vector.add(x, y), x + y)


def test_add_writes_its_elements_and_no_other():
    x, y = randn(1000), randn(1000)
    room = poisoned(randn(3000))
    out = room[1000:2000]
    assert vector.add(x, y, out=out) is out
    assert torch.equal(out, x + y)
    assert room[:1000].isnan().all() and room[2000:].isnan().all()


@pytest.mark.parametrize("view", [
    lambda x: x.t(), lambda x: x[:, ::3], lambda x: x[3:, 5:], lambda x: x[:1], lambda x: x[:, :1],
    lambda x: x.expand(2, 40, 56), lambda x: x[:0], lambda x: x.flatten()[1:]])  # the last: no 16-byte alignment
def test_add_strides(view):
    x, y = view(randn(40, 56)), view(randn(40, 56))
    out = vector.add(x, y)
    assert out.shape == x.shape and torch.equal(out, x + y)


def test_add_of_infinities_and_nan():
    x = torch.tensor([INF, INF, -INF, NAN, 1.0], device=DEVICE)
    y = torch.tensor([1.0, -INF, -INF, 1.0, NAN], device=DEVICE)
    torch.testing.assert_close(vector.add(x, y), x + y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("x, y, error", [
    (torch.zeros(4), torch.zeros(5), ValueError), (torch.zeros(4), torch.zeros(1, 4), ValueError),
    (torch.zeros(4), torch.zeros(4, dtype=torch.float16), TypeError)])
def test_add_refuses(x, y, error):
    with pytest.raises(error, match=r"\bx\b.*\by\b"):
        vector.add(x.to(DEVICE), y.to(DEVICE))


@needs_gpu
def test_add_past_2_31_elements(much_memory):
    n = 2**31 + 17
    if 4 * n > torch.cuda.mem_get_info()[0]:
        pytest.skip(f"needs {4 * n:,} bytes of GPU memory")
    x = torch.arange(n, dtype=torch.int8, device=DEVICE)
    assert torch.equal(vector.add(x, x), x + x)


# ---------------------------------------------------------------- 02

# fp32: x is multiplied by log2(e) and rounded before the exponential, so 40 below the maximum is 58 roundings;
# the others: the rounding of the result, below 2^-14 a subnormal in fp16.
SOFTMAX_TOLERANCE = {torch.float32: {"rtol": 5e-6, "atol": 1e-12}, torch.float16: {"rtol": 1e-3, "atol": 6e-8},
                     torch.bfloat16: {"rtol": 5e-3, "atol": 1e-12}}


def check_softmax(x):
    out = poisoned(x)
    result = fused.softmax(x, out=out)
    assert result is out and result.dtype == x.dtype
    reference = torch.softmax(x.double(), dim=1)
    torch.testing.assert_close(result.double(), reference, equal_nan=True, **SOFTMAX_TOLERANCE[x.dtype])


def with_outliers(rows, cols, dtype=torch.float32):
    x = 3 * torch.randn(rows, cols)
    x[torch.arange(rows), torch.randint(cols, (rows,))] += 12  # so that a row is not all near zero
    return x.to(DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("n_cols", [1, 2, 3, 5, 16, 17, 127, 128, 129, 1000, 4096, 4097])
def test_softmax(n_cols, dtype):
    check_softmax(with_outliers(7, n_cols, dtype))


@pytest.mark.parametrize("n_cols", [16_385, 65_536, 131_072, 151_936, 262_144, 2**20, 2**20 + 1])
def test_softmax_wide(n_cols):
    check_softmax(with_outliers(2, n_cols))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (1, 1), (1, 777), (777, 1), (1000, 3)])
def test_softmax_shapes(shape):
    check_softmax(randn(*shape))


@pytest.mark.parametrize("n_rows", [65_535, 65_536, 65_537])
def test_softmax_many_rows(n_rows):
    check_softmax(randn(n_rows, 3))


@pytest.mark.parametrize("view", [
    lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[:, 3:50], lambda x: x[::2], lambda x: x[1:, 1:],
    lambda x: x[:1].expand(5, -1), lambda x: x[:, :1].expand(-1, 9)])
def test_softmax_strides(view):
    x = view(with_outliers(33, 100))
    check_softmax(x)
    room = poisoned(randn(x.shape[0], x.shape[1] + 9))
    fused.softmax(x, out=room[:, 4:-5])  # an output whose rows are padded
    torch.testing.assert_close(room[:, 4:-5].double(), torch.softmax(x.double(), 1), **SOFTMAX_TOLERANCE[x.dtype])
    assert room[:, :4].isnan().all() and room[:, -5:].isnan().all()


def test_softmax_wide_strides():
    check_softmax(with_outliers(3, 2 * 70_001)[:, ::2])


def softmax_far_apart(stride):
    x = far_apart(3, 64, stride)
    torch.testing.assert_close(fused.softmax(x).double(), torch.softmax(x.double(), 1), **SOFTMAX_TOLERANCE[x.dtype])


@FAR_APART
def test_softmax_offsets_past_2_31(stride, much_memory):
    check_far_apart("softmax_far_apart", stride)


def test_softmax_huge_logits():
    check_softmax(torch.tensor([[1e4, 1e4 - 1, -1e4, 0], [3e38, 3e38, 1, 0], [-3e38, -3e38, -3e38, -3e38]],
                               device=DEVICE))
    check_softmax(torch.tensor([[65504.0, 65504, 0, 1], [-65504, -65504, -65504, -65504]], device=DEVICE).half())
    check_softmax(1e4 + randn(3, 70_001))


def test_softmax_of_infinities_and_nan():
    """As torch: -inf counts nothing, a row of nothing but -inf, of +inf or with a NaN is NaN."""
    row = torch.tensor([0.0, -INF, 1, -INF, 2], device=DEVICE)
    for special in (row, torch.full_like(row, -INF), row.abs(), torch.where(row == 2, NAN, row)):
        check_softmax(special.expand(3, 5).contiguous())
    wide = randn(4, 70_001)
    wide[0, :40_000], wide[1, 40_000:], wide[2], wide[3, 69_999] = -INF, -INF, -INF, NAN
    check_softmax(wide)


def test_softmax_of_five_equal_logits():
    x = torch.full((1, 5), -10.0, device=DEVICE)
    torch.testing.assert_close(fused.softmax(x), torch.full_like(x, 0.2))


@pytest.mark.parametrize("x", [torch.zeros(4), torch.zeros(2, 2, 2)])
def test_softmax_refuses(x):
    with pytest.raises(ValueError):
        fused.softmax(x.to(DEVICE))


# ---------------------------------------------------------------- 03

UNIT_ROUNDOFF = {"tf32": 2**-10, "tf32x3": 2**-20, "ieee": 0, "bf16x3": 2**-14, "bf16x6": 2**-20}


def check_matmul(a, b, precision="tf32", config=product.ANY, launch=None):
    """matmul(a, b), or launch(a, b), against float64: the inputs' rounding, summed over K as a random walk; that of the
    partial sums (03's verify says how much); the output's.

    With one config: a search for each shape would take most of the tests' time."""
    (m, k), n = a.shape, b.shape[1]
    out = torch.full((m, n), NAN, dtype=a.dtype, device=DEVICE)
    launch = launch or partial(product.matmul, precision=precision, config=config)
    assert launch(a, b, out=out) is out
    unit = UNIT_ROUNDOFF[precision] if a.dtype == torch.float32 else 0
    rtol = {torch.float32: 2**-22, torch.float16: 2**-11, torch.bfloat16: 2**-8}[a.dtype]
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=rtol + 2 * unit,
                               atol=16 * unit * k**0.5 + 2**-22 * k**1.5 + 2**-24)


SHAPES = [(1, 1, 1), (1, 1, 64), (1, 128, 16), (128, 1, 16), (1, 300, 70), (300, 1, 70), (16, 16, 16), (33, 65, 17),
          (127, 129, 31), (128, 128, 64), (130, 70, 100), (64, 64, 1), (5, 7, 300), (17, 513, 33), (260, 40, 257)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_matmul(m, n, k, dtype):
    check_matmul(randn(m, k, dtype=dtype), randn(k, n, dtype=dtype))


@pytest.mark.parametrize("m, n, k", [(0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 0), (0, 5, 0)])
def test_matmul_empty(m, n, k):
    check_matmul(randn(m, k), randn(k, n))


@needs_gpu
@pytest.mark.parametrize("shape", [(300, 500, 200), (512, 256, 384)])
def test_matmul_by_search(shape):
    m, n, k = shape
    check_matmul(randn(m, k, dtype=torch.float16), randn(k, n, dtype=torch.float16), config=None)
    assert product.matmul.config in product.CONFIGS[2]


@pytest.mark.parametrize("group_m, tiles", [(1, 90), (3, 54)])
def test_tiles_of_the_article_s_grid(group_m, tiles):
    assert product.tile_loads(9, 9, 9, group_m, 9) == tiles


def test_every_program_owns_a_tile_of_its_own():
    for rows, columns, group_m in ((9, 9, 3), (5, 7, 8), (10, 3, 4)):
        assert product.tile_loads(rows, columns, 1, group_m, rows * columns) == rows + columns


@pytest.mark.parametrize("before", [
    lambda: None, lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    lambda: torch.set_float32_matmul_precision("high")])
def test_the_caller_s_tf32_setting_is_left_as_it_was(before):
    """Whichever of PyTorch's interfaces set it; set back at the end."""
    setting, a = torch.backends.cuda.matmul, randn(64, 64)
    start = setting.fp32_precision, torch.get_float32_matmul_precision()
    try:
        before()
        found = setting.fp32_precision
        legacy = torch.get_float32_matmul_precision() if "matmul_precision" in before.__code__.co_names else None
        for mode in ("tf32", "ieee"):
            result = product.cublas(a, a, torch.empty_like(a), mode)
            if GPU:
                error = (result - a.double() @ a.double()).abs().max().item()
                assert (error > 1e-4) == (mode == "tf32")
        assert setting.fp32_precision == found
        assert legacy is None or torch.get_float32_matmul_precision() == legacy
    finally:
        torch.set_float32_matmul_precision(start[1])
        setting.fp32_precision = start[0]


@pytest.mark.parametrize("view", [
    lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[:, 3:80], lambda x: x[::3], lambda x: x[1:, 1:],
    lambda x: x[:1].expand(40, -1)])
def test_matmul_strides(view):
    a = view(randn(65, 100))
    check_matmul(a, randn(a.shape[1], 50))
    check_matmul(randn(50, a.shape[0]), a)
    check_matmul(a, view(randn(65, 100)).t())


def test_matmul_writes_no_other_element():
    a, b, room = randn(40, 50), randn(50, 30), torch.full((60, 60), NAN, device=DEVICE)
    product.matmul(a, b, out=room[10:50, 20:50], config=product.ANY)
    torch.testing.assert_close(room[10:50, 20:50].double(), a.double() @ b.double(), rtol=1e-2, atol=0.05)
    assert room.isnan().sum() == 60 * 60 - 40 * 30


def matmul_far_apart(stride):
    rows = 3 if stride >= 2**30 else 70          # a slice of 32 rows of B is 2^31 elements further at 2^26
    far = far_apart(rows, 64, stride)
    check_matmul(far, randn(64, 20, dtype=torch.float16))
    check_matmul(randn(20, rows, dtype=torch.float16), far)


@pytest.mark.parametrize("stride", [2**26, 2**30, 2**31 + 8])
def test_matmul_offsets_past_2_31(stride, much_memory):
    check_far_apart("matmul_far_apart", stride)


@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "ieee", *(
    pytest.param(name, marks=pytest.mark.skipif(not GPU, reason="no interpreter runs it")) for name in
    ("bf16x3", "bf16x6"))])
def test_matmul_precision(precision):
    check_matmul(randn(96, 300), randn(300, 80), precision)


@needs_gpu
def test_tf32_is_less_exact_than_ieee():
    a, b = randn(256, 1024), randn(1024, 256)
    errors = {p: (product.matmul(a, b, precision=p, config=product.ANY) - a.double() @ b.double()).abs().max().item()
              for p in ("tf32", "tf32x3", "ieee")}
    assert errors["tf32"] > 20 * errors["ieee"] and errors["tf32"] > 20 * errors["tf32x3"]


@pytest.mark.parametrize("a, b, precision", [
    (torch.zeros(4, 5), torch.zeros(4, 5), "tf32"), (torch.zeros(4), torch.zeros(4, 4), "tf32"),
    (torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.float16), "tf32"),
    (torch.zeros(4, 4), torch.zeros(4, 4), "tf64")])
def test_matmul_refuses(a, b, precision):
    with pytest.raises((TypeError, ValueError)):
        product.matmul(a.to(DEVICE), b.to(DEVICE), precision=precision)


@pytest.mark.parametrize("name, value", [
    *(("precision", value) for value in (None, 3, ["tf32"], torch.ones(2), torch.ones(2).numpy())),
    *(("config", value) for value in ("fast", 0, False, {}, {"BLOCK_M": 64}, [product.ANY], triton.Config({})))])
def test_matmul_refuses_a_precision_and_a_config_of_another_type(name, value):
    with pytest.raises((TypeError, ValueError), match=rf"^matmul: {name} is .*; it must be "):
        product.matmul(randn(4, 4), randn(4, 4), **{name: value})


@needs_gpu
@pytest.mark.parametrize("launch", [lambda x, y: vector.add(x, y), lambda a, b: product.matmul(a, b)])
def test_a_cpu_tensor_is_refused_by_name(launch):
    with pytest.raises(ValueError, match=r"\b[yb] .*cpu"):
        launch(torch.zeros(16, 16, device="cuda"), torch.zeros(16, 16))


@pytest.mark.parametrize("drop", ["a slice of K", "the last tile"])
def test_the_tolerance_rejects_one_dropped_tile(drop, monkeypatch):
    a, b = randn(128, 512, dtype=torch.float16), randn(512, 128, dtype=torch.float16)

    def wrong(a, b, precision="tf32", out=None, config=None):
        right = a.double() @ b.double()
        if drop == "a slice of K":
            right -= a[:, -32:].double() @ b[-32:].double()
        else:
            right[-16:, -16:] = 0
        return out.copy_(right)
    monkeypatch.setattr(product, "matmul", wrong)
    with pytest.raises(AssertionError, match="not close"):
        check_matmul(a, b)


# ---------------------------------------------------------------- 04

def test_a_config_too_large_is_known_by_its_bytes():
    """128 x 256 x 64, 4 stages, in fp16: three slices on cc 8.9, whose programs have 101,376 bytes."""
    large = product.cfg(128, 256, 64, 4, 8)
    assert product.shared_bytes(large, 2, 8) == 147_456 > 101_376
    assert product.shared_bytes(large, 2, 9) == 196_608 < 232_448


@needs_gpu
def test_a_config_that_cannot_run_is_named_with_its_bytes(monkeypatch):
    monkeypatch.setattr(tuning, "CONFIGS", [product.cfg(256, 256, 128, 4, 8), product.cfg(64, 64, 64, 3, 4)])
    a = randn(512, 512, dtype=torch.float16)
    good, bad = tuning.valid(a, a, torch.empty_like(a))
    assert list(good) == ["64x64x64 s3 w4 g8"]
    assert re.fullmatch(r"needs [0-9,]+ of shared memory, [0-9,]+ allowed", bad["256x256x128 s4 w8 g8"])


def test_a_config_with_wrong_results_is_named():
    x = randn(4, 100, dtype=torch.float16)
    assert tuning.wrong_rows(lambda: None, x, torch.empty_like(x)) == "4 of 4 rows wrong"
    small, large = (triton.Config({"BLOCK_SIZE": block}) for block in (64, 128))
    for config, why in ((small, "4 of 4 rows wrong"), (large, None)):
        out = torch.empty_like(x)
        assert tuning.wrong_rows(lambda: tuning.soften(fused.softmax_kernel, x, out, **config.all_kwargs()), x,
                                 out) == why


@without_gpu
def test_s2_s_configs_win_wrongly_and_the_cures_are_right():
    x = randn(4, 300, dtype=torch.float16)
    out = torch.empty_like(x)
    found = {case: tuning.wrong_rows(lambda: tuning.soften(tuning.tuned_softmax(case), x, out), x, out)
             for case in tuning.SOFTMAX}
    assert list(found.values()) == ["4 of 4 rows wrong", None, None]


@pytest.mark.parametrize("scale", [1.0, 0.01])   # ms: the launches of small kernels are timed in a CUDA graph
def test_a_search_abandons_the_slow_and_times_the_near_in_turn(scale, monkeypatch):
    """A clock that drifts makes everything slower from the third config on: the pick must not change for it."""
    now, calls = {"factor": 1.0}, []

    def timed(fn, warmup=0, rep=0, return_mode=None):
        calls.append((round(fn() / scale, 6), rep))
        return fn() * now["factor"]
    monkeypatch.setattr(triton.testing, "do_bench", timed)
    monkeypatch.setattr(triton.testing, "do_bench_cudagraph", lambda fn, rep, return_mode: timed(fn, rep=10 * rep))
    search, results = tuning.Search(None), []
    for index, ms in enumerate((1.0, 3.0, 1.1, 1.03, 0.9)):
        now["factor"] = 1.04 if index >= 2 else 1.0
        calls.clear()
        results.append(search.bench(lambda ms=ms: ms * scale, (0.5, 0.2, 0.8))[0] / scale)
        windows = [rep for one, rep in calls if one == ms]
        assert windows == [[5, 100], [5], [5, 20, 20], [5, 20, 20, 100, 100], [5, 20, 20, 100, 100]][index]
    assert results == pytest.approx([1.0, 3.0, 1.1, 1.03, 0.9])
    assert search.best[1] == pytest.approx(0.9 * scale) and search.timed == 5 and search.small == (scale < 1)


def test_the_processes_of_cost_start_together_and_take_turns(report, tmp_path, capsys):
    """Each says when it is ready, waits to be told, and has the cache folder of its tuner."""
    (tmp_path / "04_autotune.py").write_text("""
import os, pathlib, sys, time
log, cache = pathlib.Path("log"), pathlib.Path(os.environ["TRITON_CACHE_DIR"])
cache.mkdir(exist_ok=True)
def child(device, n, tuner, keep):
    with log.open("a") as file: file.write("ready ")
    print("ready", flush=True)
    sys.stdin.readline()
    assert log.read_text().count("ready") == 5  # nobody is at work before all wait
    assert n == 4096 and (cache / tuner).exists() == bool(list(cache.iterdir()))
    (cache / tuner).touch()
    (cache / str(time.monotonic_ns())).touch()
    print("what TRITON_PRINT_AUTOTUNING=1 prints")
    print(float(len(list(cache.iterdir())) + (tuner == "Search") * 10))
""")
    tuning.cost(report, 4096)
    rows = report.tables[0].rows
    assert [row["seconds"] for row in rows] == [2, 3, 4, 12, 13] and capsys.readouterr().out.count("4,096") >= 5
    (tmp_path / "log").unlink()
    (tmp_path / "04_autotune.py").write_text("def child(*_): raise SystemExit('no GPU left')")
    with pytest.raises(SystemExit) as end:
        tuning.cost(report, 4096)
    assert end.value.code == 2 and "cost: a process of its own failed: no GPU left\n" in capsys.readouterr().err


def test_the_processes_of_first_launch_start_together_and_share_a_cache(report, tmp_path):
    """The second begins once the first has ended, however long that takes."""
    (tmp_path / "01_vector_add.py").write_text("""
import os, pathlib, sys, time
cache = pathlib.Path(os.environ["TRITON_CACHE_DIR"])
def child(device):
    print("ready", flush=True)
    sys.stdin.readline()
    full = (cache / "kernel").exists()
    time.sleep(0.3)
    (cache / "kernel").touch()
    print(1.5 if full else 2.5, 0.5)
""")
    vector.first_launch(report)
    assert [row["seconds"] for row in report.tables[0].rows] == [2.5, 1.5, 0.5]


@needs_gpu
def test_a_search_drops_what_spills_or_does_not_fit_and_is_cached(monkeypatch, tmp_path):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    configs = [product.cfg(256, 256, 128, 4, 8), product.cfg(64, 64, 64, 3, 4), product.cfg(128, 128, 64, 3, 8),
               product.cfg(256, 256, 64, 2, 4)]   # the first does not fit, the last spills
    a = randn(512, 512, dtype=torch.float16)
    out, timed = torch.empty_like(a), []
    for _ in range(2):
        search = tuning.Search(product.matmul_kernel)
        tuned = tuning.tuned_matmul(configs, do_bench=search.bench, cache_results=True,
                                    prune_configs_by={"early_config_prune": search.prune})
        assert not tuning.rejected(lambda: tuning.multiply(tuned, a, a, out), out, a.double() @ a.double(), 2**-9)
        assert set(tuned.configs_timings) and len(tuned.configs_timings) == 2
        timed.append(search.timed)
    assert timed == [2, 0]                        # the second finds the timings on disk


def test_no_script_asks_for_automatic_warp_specialization():
    """Triton 3.6 aborts the process on it for cc 9.0."""
    assert not [path.name for path in ROOT.glob("[0-9][0-9]_*.py") if "warp_specialize=True" in path.read_text()]


# ---------------------------------------------------------------- the page's warnings

@triton.jit
def double_kernel(out_ptr, in_ptr, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n if MASKED else offsets >= 0
    tl.store(out_ptr + offsets, 2 * tl.load(in_ptr + offsets, mask=mask), mask=mask)


@triton.jit
def rows_kernel(out_ptr, in_ptr, n_cols, BLOCK: tl.constexpr, OTHER: tl.constexpr, SHIFT: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(in_ptr + tl.program_id(0) * n_cols + cols, mask=mask, other=OTHER)
    if SHIFT:
        x = x - tl.max(x, axis=0)
    num = tl.exp(x)
    tl.store(out_ptr + tl.program_id(0) * n_cols + cols, num / tl.sum(num, axis=0), mask=mask)


def rows(x, other=-INF, shift=True):
    out = poisoned(x)
    rows_kernel[(len(x),)](out, x, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]), OTHER=other, SHIFT=shift)
    return out


def test_without_a_mask_the_tail_is_overwritten():
    n, x = 100, randn(128)
    for masked in (True, False):
        room = torch.full((128,), NAN, device=DEVICE)  # 28 elements past the end that are somebody else's
        double_kernel[(2,)](room, x, n, BLOCK=64, MASKED=masked)
        assert torch.equal(room[:n], 2 * x[:n])
        assert bool(room[n:].isnan().all()) == masked


def test_a_wrong_other_is_wrong_on_ragged_widths_only():
    aligned, ragged = (torch.full((2, n_cols), -10.0, device=DEVICE) for n_cols in (8, 5))
    assert torch.allclose(rows(aligned, other=0.0), torch.softmax(aligned, 1))
    assert rows(ragged, other=0.0).max() < 2e-5  # where 0.2 is right
    assert torch.allclose(rows(ragged), torch.softmax(ragged, 1))


def test_without_the_shift_large_logits_are_nan():
    small, large = randn(2, 8), 1e4 + randn(2, 8)
    assert torch.allclose(rows(small, shift=False), torch.softmax(small, 1))
    assert rows(large, shift=False).isnan().any()
    assert torch.allclose(rows(large), torch.softmax(large, 1), rtol=1e-5)


@triton.jit
def increment_kernel(x_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) + 1)


@pytest.mark.parametrize("restore", [["x_ptr"], None])
def test_an_update_in_place_needs_restore_value_under_the_autotuner(restore):
    def do_bench(fn, quantiles):
        fn()
        return [1.0, 1.0, 1.0]
    tuned = triton.autotune([triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=[],
                            restore_value=restore, do_bench=do_bench)(increment_kernel)
    x = torch.zeros(128, device=DEVICE)
    tuned[lambda meta: (128 // meta["BLOCK"],)](x)
    assert (x == 1).all() == (restore is not None)


# ---------------------------------------------------------------- roofs and peaks

def test_the_article_s_roof():
    assert common.rated_gbps(8000, 128) == 256


@pytest.mark.parametrize("name, sms, ghz, dtype, tflops", [
    ("NVIDIA A100-SXM4-80GB", 108, 1.41, "bf16", 312), ("NVIDIA A100 80GB PCIe", 108, 1.41, "tf32", 156),
    ("NVIDIA A100-SXM4-40GB", 108, 1.41, "fp32", 19.5), ("NVIDIA A40", 84, 1.74, "fp16", 149.7),
    ("NVIDIA GeForce RTX 3090", 82, 1.695, "bf16", 71), ("NVIDIA L4", 58, 2.04, "bf16", 121),
    ("NVIDIA GeForce RTX 4090", 128, 2.52, "bf16", 165), ("NVIDIA GeForce RTX 4090", 128, 2.52, "tf32", 82.6),
    ("NVIDIA GeForce RTX 4090", 128, 2.52, "fp32", 82.6), ("NVIDIA H100 80GB HBM3", 132, 1.83, "bf16", 989),
    ("NVIDIA B200", 148, 1.86, "bf16", 2250), ("NVIDIA GeForce RTX 5090", 170, 2.407, "fp16", 209.5),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 188, 2.617, "bf16", 503.8)])
def test_peaks_give_the_vendors_rates(name, sms, ghz, dtype, tflops):
    assert common.peak_tflops(name, sms, 1000 * ghz, dtype) == pytest.approx(tflops, rel=0.005)


@pytest.mark.parametrize("names, per_clock", [
    (["A100-PCIE-40GB"], (2048, 1024, 128)),
    (["A10", "RTX A2000 12GB", "RTX A4500", "RTX A5500 Laptop GPU", "RTX A6000"], (1024, 512, 256)),
    (["GeForce RTX 3050 Laptop GPU", "GeForce RTX 3060 Ti", "GeForce RTX 3090 Ti"], (512, 256, 256)),
    (["L4", "L40S", "RTX 4000 SFF Ada Generation", "RTX 5000 Ada Generation Laptop GPU", "RTX 6000 Ada Generation"],
     (1024, 512, 256)),
    (["L40", "GeForce RTX 4060 Laptop GPU", "GeForce RTX 4070 Ti SUPER"], (512, 256, 256)),
    (["H100 PCIe", "H100 NVL", "H200", "H200 NVL", "GH200 480GB"], (4096, 2048, 256)),
    (["B200", "GB200"], (8192, 4096, 256)),
    (["GeForce RTX 5060 Ti", "GeForce RTX 5090 Laptop GPU"], (512, 256, 256)),
    (["RTX PRO 4000 Blackwell", "RTX PRO 6000 Blackwell Workstation Edition"], (1024, 512, 256))])
def test_peaks_by_name(names, per_clock):
    for name in names:
        found = [common.peak_tflops(f"NVIDIA {name}", 1, 1e6, dtype) for dtype in ("bf16", "tf32", "fp32")]
        assert found == list(per_clock), name


def test_every_peak_is_checked_against_its_vendor():
    for _, bf16, tf32, fp32, (name, sms, ghz, rate) in common.PEAKS:
        assert common.peak_tflops(name, sms, 1000 * ghz, "bf16") == pytest.approx(rate, rel=0.01)
        assert bf16 == 2 * tf32 and fp32 in (128, 256)


def test_the_article_s_peak():
    """24 SMs x 512 FLOPs per clock x SM clock, in BF16."""
    assert common.peak_tflops("NVIDIA GeForce RTX 4060 Laptop GPU", 24, 1000, "bf16") == pytest.approx(12.288)


@pytest.mark.parametrize("name", [
    "NVIDIA H20", "NVIDIA A10G", "NVIDIA L20", "NVIDIA A100X", "NVIDIA H800", "NVIDIA A16", "NVIDIA A2", "NVIDIA T4",
    "NVIDIA L2", "Quadro RTX 6000", "NVIDIA GeForce RTX 2080 Ti", "Tesla V100-SXM2-16GB", "NVIDIA GB10",
    "NVIDIA B300", "Graphics Device", ""])
def test_no_peak_is_guessed(name):
    assert common.peak_tflops(name, 100, 1000, "bf16") is None


def test_an_unknown_unit_is_refused():
    with pytest.raises(ValueError):
        common.peak_tflops("NVIDIA H200", 132, 1830, "int8")


# ---------------------------------------------------------------- clock log, timing, tables, results

def test_clock_log_lines():
    parse = common.ClockLog._parse
    first = parse("2026/12/01 05:29:45.100, 1980, 3201, 512.34, 0x0000000000000004\n")
    later = parse("2026/12/01 05:29:45.350, 1755, 3201, 700.00, 0x0000000000000000\n")
    assert first[1:] == (1980, 3201, 512.34, 4) and later[0] - first[0] == pytest.approx(0.25)
    for line in ("2026/12/01 05:29:45.100, 1980, 32", "2026/12/01 05:29:45.100, [N/A], 3201, 512.34, 0x4", ""):
        with pytest.raises(ValueError):
            parse(line)


def test_clock_log_medians():
    log = common.ClockLog.__new__(common.ClockLog)
    log.samples = [(t, 1000 + 10 * t, 3201, 500 + t, 0x4 if t >= 4 else 0) for t in range(10)]
    assert log.medians([(0, 2), (7, 8)]) == {"sm_mhz": 1020, "mem_mhz": 3201, "power_w": 502, "throttle": "none"}
    assert log.medians([(4, 6)]) == {"sm_mhz": 1050, "mem_mhz": 3201, "power_w": 505, "throttle": "power cap"}
    assert set(log.medians([(20, 30)]).values()) == {None}


def test_bench_interleaves_and_takes_medians(monkeypatch):
    calls, times = [], {"a": iter([1.0, 3.0, 2.0]), "b": iter([8.0, 10.0, 9.0])}
    providers = {name: lambda name=name: name for name in times}

    def do_bench(fn, warmup, rep, return_mode):
        assert return_mode == "median" and rep == 30
        calls.append(fn())
        return next(times[fn()])
    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    result = common.bench(providers, warmup=0, rep=90, rounds=3)
    assert calls == ["a", "b"] * 3
    assert (result["a"]["ms"], result["a"]["spread_pct"], result["a"]["graph_ms"]) == (2.0, 100.0, None)
    assert (result["b"]["ms"], result["b"]["spread_pct"]) == (9.0, pytest.approx(200 / 9))
    assert len(result["a"]["windows"]) == 3


def test_bench_of_a_small_kernel(monkeypatch):
    """By a clock that only calls move: a launch in microseconds without what waits for it, a burst without its rest."""
    clock, replays, launches = {"now": 1000.0}, iter([0.003, 0.001, 0.002]), iter([9.0, *[5e-6] * 48, 7.0, 8.0])

    def moves(seconds, result=None):
        clock["now"] += seconds
        return result
    monkeypatch.setattr(common, "time", types.SimpleNamespace(
        **dict.fromkeys(("time", "monotonic", "perf_counter"), lambda: clock["now"]), sleep=moves))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: moves(60))
    monkeypatch.setattr(triton.testing, "do_bench", lambda *_, rep, **__: moves(rep, 0.004 if rep == 50 else 0.008))
    monkeypatch.setattr(triton.testing, "do_bench_cudagraph", lambda *_, **__: next(replays))
    row = common.bench({"a": lambda: moves(next(launches))}, warmup=0, rep=900, rounds=3, burst=True)["a"]
    assert (row["ms"], row["graph_ms"], row["burst_ms"]) == (0.008, 0.002, 0.004)
    assert row["launch_us"] == pytest.approx(5, rel=1e-3)
    assert [end - begin for begin, end in row["windows"]] == [300] * 3
    assert [end - begin for begin, end in row["burst_windows"]] == [50]


def test_loop_ms_is_of_a_call(monkeypatch):
    clock, calls = {"ms": 0.0}, []

    class Event:
        def __init__(self, enable_timing):
            self.synchronize = lambda: None

        def record(self):
            self.ms = clock["ms"]

        def elapsed_time(self, end):
            return end.ms - self.ms

    def call(ms):
        clock["ms"] += ms
        calls.append(ms)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: call(1000.0))
    assert common.loop_ms([partial(call, 1.0), partial(call, 3.0)], rep=300) == pytest.approx(2)
    assert calls == [1000.0, 1.0, 3.0, 1000.0, *[1.0, 3.0] * 75]  # one turn says how many take 300 ms


class FakeLog:
    problem = None

    def __init__(self, uuid):
        pass

    def stop(self):
        pass

    def medians(self, windows):
        return {"sm_mhz": 1000.0, "mem_mhz": 8000.0, "power_w": 40.0, "throttle": "power cap"}


@pytest.fixture
def report(monkeypatch, tmp_path):
    """A run on a GPU that is not there: 24 SMs, 128-bit bus, 8,000 MHz; "triton" takes 1 ms, "torch" 2 ms."""
    monkeypatch.setattr(common, "ClockLog", FakeLog)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(common, "bench", lambda providers, *_, **__: {
        name: {"ms": {"triton": 1.0, "torch": 2.0}[name], "graph_ms": None, "launch_us": None, "spread_pct": 0.5,
               "windows": []}
        for name in providers})
    gpu = {"name": "NVIDIA GeForce RTX 4060 Laptop GPU", "cc": "8.9", "sms": 24, "l2_bytes": 2**25, "bus_bits": 128,
           "memory_bytes": 2**33, "uuid": "GPU-0", "power_limit_w": 40.0, "driver": "0"}
    args = types.SimpleNamespace(warmup=1000, rep=1000, rounds=3, seed=0, save=True, plot=False, device=0)
    return common.Report("01_vector_add", args, gpu)


def test_a_timing_that_is_for_two_rows(report):
    extra = {"triton": {"kernel": "one"}, "triton/twin": {"kernel": "two"}}
    with report.table("widths", "a title", baseline="torch") as table:
        rows = table.time({"n": 5}, {"triton": None, "torch": None}, extra, bytes=192_000_000,
                          same={"triton/twin": "triton"})
    one, twin = rows["triton"], rows["triton/twin"]
    assert twin == one | {"provider": "triton/twin", "kernel": "two"} and twin["ratio"] == 2 and twin["gbps"] == 192
    assert table.rows == list(rows.values())


def test_equal_picks_are_timed_once(monkeypatch):
    seen, kernel = {}, types.SimpleNamespace(n_regs=1, n_spills=0)
    monkeypatch.setattr(fused, "launch", lambda *_: kernel)
    table = types.SimpleNamespace(time=lambda case, providers, own, **options: seen.update(
        options, providers=list(providers), own=own))
    for n_cols, providers, same in ((512, ["triton", "triton/whole-row", "torch"], {}),
                                    (4096, ["triton", "torch"], {"triton/whole-row": "triton"})):
        fused.time_case(table, {}, torch.zeros(2, n_cols), None, fused.ours(n_cols, 4))
        assert seen["providers"] == providers and seen["same"] == same
        assert {"triton", "triton/whole-row"} <= {*seen["own"]}


def test_torch_compile_s_cache_is_filled_where_it_is_empty(monkeypatch, tmp_path):
    """By processes with two shapes or more and 4 GB of the GPU's memory each; a shape is compiled once."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    started, seen, shapes = [], [], [("fp32", (2, n)) for n in range(1, 8)]
    monkeypatch.setattr(peers, "inductor", lambda x: seen.append(x.shape[1]))
    monkeypatch.setattr(torch, "empty", lambda shape, **_: types.SimpleNamespace(shape=shape))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200 (one)")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(peers.subprocess, "Popen", lambda command, **_: started.append(command[-1]) or
                        types.SimpleNamespace(wait=lambda: None, kill=lambda: None))
    report = types.SimpleNamespace(args=types.SimpleNamespace(device=0))
    for cores, free, processes, filled in ((8, 2**40, 4, 2), (4, 2**40, 2, 0), (8, 9 * 2**30, 3, 5), (8, 2**40, 0, 0)):
        monkeypatch.setattr(peers.os, "cpu_count", lambda: cores)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2**40))
        started.clear()
        with peers.compiled_ahead(report, shapes):
            assert len(started) == processes
        left = sorted(set(range(1, 8)) - set(seen))
        assert sorted(int(n) for n in re.findall(r"\(2, (\d)\)", "".join(started))) == left
        for part in [shapes[len(seen):len(seen) + filled]] * 2:
            peers.fill_cache(0, part)
    assert seen == list(range(1, 8))


def test_table_derives_its_rates(report, capsys):
    with report.table("providers", "a title", baseline="torch") as table:
        fast = table.time({"n": 5}, {"triton": None, "torch": None}, bytes=192_000_000, flops=6_144_000_000,
                          unit="bf16")
        table.time({"n": 6}, {"triton": None}, bytes=512_000_000)
    row = fast["triton"]
    assert (row["gbps"], row["pct_rated"], row["ratio"]) == (192, 75, 2) and "mark" not in row
    assert (row["tflops"], row["pct_peak"]) == (pytest.approx(6.144), pytest.approx(50))
    assert (row["sm_mhz"], row["throttle"]) == (1000, "power cap") and fast["torch"]["ratio"] == 1
    assert table.rows[2]["mark"] == "L2-resident" and table.rows[2]["ratio"] is None  # 512 of 256 GB/s
    printed = capsys.readouterr().out
    assert "### providers: a title" in printed and "L2-resident: faster" in printed
    assert re.search(r"\| power cap +\| L2-resident \|$", printed, re.M)


def test_a_burst_has_its_own_clock(report, monkeypatch):
    times = {"ms": 2.0, "graph_ms": None, "launch_us": None, "spread_pct": 0.5, "windows": [(0, 9)],
             "burst_ms": 1.0, "burst_windows": [(10, 19)]}
    monkeypatch.setattr(common, "bench", lambda *_, **__: {"triton": dict(times), "torch": times | {"burst_ms": 1.5}})
    monkeypatch.setattr(FakeLog, "medians", lambda _, windows: {
        "sm_mhz": {0: 1000, 10: 1500}[windows[0][0]], "mem_mhz": 8000, "power_w": 40, "throttle": "none"})
    with report.table("vs_cublas", "a title", baseline="torch") as table:
        table.time({"n": 5}, {"triton": None, "torch": None}, flops=6_144_000_000, unit="bf16", burst=True)
    row = table.rows[0]
    assert (row["sm_mhz"], row["burst_mhz"], row["ratio"], row["burst_ratio"]) == (1000, 1500, 1, 1.5)


def test_an_interrupt_prints_what_was_measured(report, capsys):
    def main():
        with report.table("providers", "a title") as table:
            table.time({"n": 5}, {"triton": None}, bytes=192_000_000)
            raise KeyboardInterrupt
    with pytest.raises(SystemExit) as end:
        common.run(main)
    printed = capsys.readouterr()
    assert end.value.code == 130 and "192.0" in printed.out and printed.err.count("interrupted") == 1
    assert not list(common.ROOT.iterdir())


def test_results_are_written_in_their_form(report):
    with report.table("providers", "a title") as table:
        table.time({"n": 5}, {"triton": None}, bytes=192_000_000)
        table.note("a note")
    report.finish()
    folder = common.ROOT / "results" / "nvidia-geforce-rtx-4060-laptop-gpu"
    assert sorted(path.name for path in folder.iterdir()) == ["01_vector_add.json", "01_vector_add.md"]
    record = json.loads((folder / "01_vector_add.json").read_text())
    assert not problems(record, "01_vector_add")
    assert record["tables"]["providers"]["rows"][0]["gbps"] == 192
    text = (folder / "01_vector_add.md").read_text()
    assert "128-bit bus" in text and re.search(r"\| +192\.0 \|", text) and "\n- a note" in text


@pytest.mark.parametrize("broken", ["replace", "chmod"])
def test_an_existing_result_stays_whole(broken, monkeypatch, tmp_path, capsys):
    path = tmp_path / "x.json"
    common.write(path, "old")
    assert path.read_text() == "old"

    def refuse(*_):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, broken, refuse)
    with pytest.raises(SystemExit) as end:
        common.write(path, "new")
    assert end.value.code == 2 and "No space left" in capsys.readouterr().err
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_written_to_and_a_link_stays(tmp_path):
    """A device is not replaced by a file, as root could."""
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE, text=True)
    common.write(tmp_path / "pipe", "new")
    assert reader.communicate(timeout=20)[0] == "new" and (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    common.write(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"


TABLES = {
    "01_vector_add": {"providers", "block_size", "alignment", "first_launch"},
    "02_fused_softmax": {"widths", "unfused", "cliff"},
    "03_matmul": {"vs_cublas", "grouping", "data", "fp32_precision"},
    "04_autotune": {"configs", "cost", "picks", "softmax"},
    "05_inspect_ir": {"stages", "layouts", "loop", "resources"},
    "06_split_softmax": {"wide"},
    "07_persistent_matmul": {"vs_cublas"},
    "08_fp32_matmul": {"fp32_precision"},
    "counters": {"grouping", "kernels"},
    "card": {"card"},
    "sanitize": {"sanitize"},
}


def problems(record, name):
    """What is wrong with a results file, as a list."""
    wanted = ["commit", "gpu", "script", "seed", "settings", "tables", "time", "versions"]
    found = [f"no {key}" for key in wanted if key not in record]
    if found:
        return found
    found += [f"unknown table {key}" for key in set(record["tables"]) - TABLES.get(name, set(record["tables"]))]
    for key, table in record["tables"].items():
        if set(table) != {"title", "notes", "rows"}:
            found.append(f"{key}: its keys are {sorted(table)}")
            continue
        found += [f"{key}: no rows"] if not table["rows"] else []
        for row in table["rows"]:
            found += [f"{key}: unknown key {k}" for k in set(row) - set(common.COLUMNS)]
            found += [f"{key}: {k} is {v}" for k, v in row.items()
                      if isinstance(v, float) and v - v != 0 or isinstance(v, (dict, list))]
            found += [f"{key}: {k} is {v}" for k, v in row.items()
                      if k.startswith("pct_") and v is not None and not 0 <= v <= 1000]
            if any(v is None for v in row.values()) and not table["notes"]:
                found.append(f"{key}: a null and no note that says why")
    return found


@pytest.mark.parametrize("read, written, spills, why", [
    (100, 100, 0, None), (104, 104, 0, None), (100, 60, 0, "write-back left in L2"),
    (60, 100, 0, "part of the input left in L2"), (150, 100, 0, "re-reads"), (150, 150, 8, "spills"),
    (100, 150, 0, "written twice")])
def test_a_difference_in_bytes_is_named(read, written, spills, why):
    assert importlib.import_module("counters").meaning(read, written, 100, 100, spills) == why


DUMP = "import torch, importlib; x = torch.ones(5, device='cuda'); importlib.import_module('01_vector_add').add(x, x)"


@needs_gpu
def test_dumped_passes_are_hidden_by_the_cache_unless_always_compiled(tmp_path):
    def passes(always):
        env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "MLIR_ENABLE_DUMP": "1", "TRITON_ALWAYS_COMPILE": always}
        done = subprocess.run([sys.executable, "-c", DUMP], cwd=ROOT, env=env, capture_output=True, text=True)
        return done.stderr.count("IR Dump Before")
    first, cached, again = passes("0"), passes("0"), passes("1")
    assert first == again > 10 and cached == 0


def test_the_readme_holds_what_was_measured():
    done = run("report.py", "--check")
    assert done.returncode == 0, done.stderr


RESULTS = sorted((ROOT / "results").glob("*/*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_results(path):
    record = json.loads(path.read_text())
    assert not problems(record, path.stem)
    if path.stem in TABLES:
        missing = TABLES[path.stem] - set(record["tables"])
        assert not missing, "a full run has every table"
    text = path.with_suffix(".md").read_text()
    for key, table in record["tables"].items():
        assert f"### {key}: {table['title']}" in text and common.format_table(table["rows"]) in text


def test_a_bad_result_is_found():
    def record(rows, key="providers", notes=()):
        return {"commit": None, "gpu": {}, "script": "", "seed": 0, "settings": {}, "time": "", "versions": {},
                "tables": {key: {"title": "", "notes": list(notes), "rows": rows}}}
    good = [{"n": 1, "ms": 1.0, "pct_rated": None}]
    assert not problems(record(good, notes=["why"]), "01_vector_add")
    for bad in (record(good), record(good, "widths", ["why"]), record([]), record([{"n": NAN}]),
                record([{"ms": INF}]), record([{"milliseconds": 1}]), record([{"pct_rated": -1.0}]),
                record([{"n": [1]}]), {}):
        assert problems(bad, "01_vector_add")


# ---------------------------------------------------------------- the scripts as processes

def run(*command, cwd=ROOT, timeout=570):
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    if ASKED is not None:
        env["TRITON_INTERPRET"] = ASKED
    return subprocess.run([sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True,
                          timeout=timeout)


@pytest.fixture(scope="session")
def outcome(request):
    """The process that a test's parameter `process` starts, ended; those of all selected tests run side by side, but
    under pytest-xdist, whose workers all know all tests, each when its test is reached."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        yield lambda process: process()
        return
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        started = {}
        for item in request.session.items:
            process = getattr(item, "callspec", None) and item.callspec.params.get("process")
            if process and not any(mark.args[0] for mark in item.iter_markers("skipif")):
                started[process] = pool.submit(process)
        yield lambda process: started[process].result()


def processes(cases):
    """Parameters of tests that look at what a script does when it is run with flags."""
    return pytest.mark.parametrize("process", [
        pytest.param(partial(run, f"{script}.py", *flags.split()), id=f"{script} {flags}") for script, flags in cases])


def test_every_script_is_tested():
    assert SCRIPTS == sorted(set(TABLES) - {"counters", "card", "sanitize"})


@processes([(script, "--help") for script in [*SCRIPTS, "counters", "sanitize", "report", "compare"]])
def test_help(process, outcome):
    done = outcome(process)
    assert done.returncode == 0 and not done.stderr
    for flag in ("--quick", "--check", "--rounds", "--warmup MS", "--rep MS", "--device", "--save", "--plot"):
        assert flag in done.stdout or process.args[0] in ("report.py", "compare.py")


@needs_gpu  # elsewhere a script does no more than that anyway
@processes([(script, "--check") for script in SCRIPTS if not script.startswith("05")])
def test_check_times_nothing(process, outcome):
    done = outcome(process)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] .startswith((common.CHECKED, "This step needs")) and "|" not in done.stdout


@processes([(script, "--quick") for script in SCRIPTS])
def test_quick(process, outcome):
    done = outcome(process)
    assert done.returncode == 0, done.stderr
    if not GPU:
        assert "Nothing is timed: no GPU here" in done.stdout
        assert not re.search(r"\b(ms|gbps|tflops|seconds)\b", done.stdout)


FLAGS = {"01_vector_add": ["--n 0", "--n -5", "--n abc", "--n 1.5", "--block-size 1000", "--block-size 0"],
         "02_fused_softmax": ["--n-cols 0", "--n-cols -5", "--n-cols abc", "--dtype fp8"],
         "03_matmul": ["--n 0", "--n -5", "--n abc", "--dtype fp8"],
         "04_autotune": ["--n 0", "--n 1000", "--n abc"],
         "05_inspect_ir": ["--arch 70", "--arch abc", "--kernel nothing", "--stage nothing", "--dump=", "--json="],
         "06_split_softmax": ["--n-cols 0", "--n-cols abc", "--dtype fp8", "--soak 0", "--soak abc", "--save --soak 5",
                              *([] if GPU else ["--soak 5"])],
         "07_persistent_matmul": ["--n 0", "--n abc", "--dtype fp32", "--save --n 512", "--save --dtype bf16"],
         "08_fp32_matmul": ["--n 0", "--n -5", "--n abc", "--dtype fp32", "--save --n 512"]}
WRONG = [(script, flags) for script in SCRIPTS for flags in (
    "--rounds 0", "--warmup -1", "--rep 0", "--device 99", "--nothing", "--save --quick", *FLAGS[script],
    *([] if GPU else ["--save", "--device 1"]))]


def refused(done):
    return done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "###" not in done.stdout


@processes(WRONG)
def test_wrong_flags_get_one_line(process, outcome):
    done = outcome(process)
    assert refused(done), (done.returncode, done.stdout, done.stderr)


@needs_gpu
@processes([("01_vector_add", "--n 100000000000"), ("02_fused_softmax", "--n-cols 100000000000"),
            ("03_matmul", "--n 10000000"), ("04_autotune", "--n 131072"),
            ("06_split_softmax", "--n-cols 100000000000"),
            *([("07_persistent_matmul", "--n 10000000"), ("08_fp32_matmul", "--n 10000000")] if WGMMA else [])])
def test_what_does_not_fit_is_refused_with_its_bytes(process, outcome):
    done = outcome(process)
    assert refused(done) and re.search(r"needs [0-9,]{12,} bytes .* [0-9,]+ bytes are free", done.stderr), done.stderr


@needs_gpu
@processes([(script, f"--quick {flag}") for script, flag in (
    ("01_vector_add", "--n 1"), ("02_fused_softmax", "--n-cols 1"), ("03_matmul", "--n 1"),
    *([("06_split_softmax", "--n-cols 1"), ("06_split_softmax", "--n-cols 24")] if TMA else []),
    *([("07_persistent_matmul", "--n 1"), ("08_fp32_matmul", "--n 1")] if WGMMA else []))])
def test_the_least_sizes_are_measured_too(process, outcome):
    done = outcome(process)
    assert done.returncode == 0 and ("triton" in done.stdout.partition("###")[2]), done.stderr


def planted(script, right, wrong):
    """The script's smoke run with a mistake in its kernel."""
    with tempfile.TemporaryDirectory() as folder:
        for path in ROOT.glob("*.py"):
            source = path.read_text()
            if path.stem == script:
                assert right in source
                source = source.replace(right, wrong)
            Path(folder, path.name).write_text(source)
        return run(f"{'07_persistent_matmul' if script == 'specialized' else script}.py", "--quick", cwd=folder)


@pytest.mark.parametrize("process", [pytest.param(partial(planted, *case), id=f"{case[0]} {case[2]}") for case in [
    ("01_vector_add", "mask = offsets < n ", "mask = offsets < n - 1 "),
    ("01_vector_add", "mask = offsets < n ", "mask = offsets < n + 1 "),
    ("02_fused_softmax", 'other=-float("inf")', "other=0.0"),
    ("02_fused_softmax", "tl.sum(num, axis=1, keep_dims=True)", "tl.sum(num)"),
    ("02_fused_softmax", "total * tl.exp(top - shift)", "total"),
    ("03_matmul", "range(0, tl.cdiv(K, BLOCK_K))", "range(1, tl.cdiv(K, BLOCK_K))"),
    ("03_matmul", "group_m = min(num_pid_m - first_m, GROUP_M)", "group_m = GROUP_M"),
    ("03_matmul", "a_mask = rk[None, :] < K - k * BLOCK_K", "a_mask = rk[None, :] < K"),
    ("03_matmul", "pid_m = first_m +", "pid_m = 0 * first_m +"),
    ("03_matmul", "pid_n = (pid", "pid_n = 0 * (pid"),
    *([("07_persistent_matmul", "first = unit // tiles * k_tiles", "first = 0 * k_tiles"),
       ("07_persistent_matmul", "row += unit // tiles * tl.cdiv(M, BLOCK_M) * BLOCK_M", "row += 0"),
       ("07_persistent_matmul", "(row + part * part_rows)", "(row + 0 * part_rows)"),
       ("07_persistent_matmul", "acc += tl.load(parts_ptr + (other * M", "acc += tl.load(parts_ptr + (0 * M"),
       ("08_fp32_matmul", "x -= top", "x = top"), ("08_fp32_matmul", "(part * R + r) * stride_out", "r * stride_out"),
       ] if WGMMA or not GPU else []),
    *([("07_persistent_matmul", "tl.atomic_xchg(counts_ptr + tl.program_id(0), 0)", "pass"),
       ("specialized", "* WGS * WG_M + WG * WG_M", "* WGS * WG_M"), ("specialized", "col + i * STORE_N", "col"),
       ("specialized", "first = unit // tiles *", "first = 0 *")] if WGMMA else []),
    *([("06_split_softmax", "gl.where(keep, y, 0.0)", "y"),
       ("06_split_softmax", "gl.where(keep, x, LEAST_WORD)", "x"),
       ("06_split_softmax", "max.{name}", "min.{name}"),
       ("06_split_softmax", "fma.rn.f32 s, b, a, s;", "add.f32 s, b, s;"),
       ("06_split_softmax", "max.f32 top, m, a;", "mov.f32 top, m;"),
       ("06_split_softmax", "mad.lo.u32 there, rank, 8, place;", "mov.u32 there, place;"),
       ("06_split_softmax", "[:, None, None] * length + lane", "[:, None, None] * 0 + lane"),
       ("06_split_softmax", "* LOG2E) * scale,)", "* LOG2E),)"),
       ] if TMA else [])]])  # nothing but a GPU runs Gluon
def test_a_wrong_kernel_ends_the_script(process, outcome):
    """Every mistake planted in a kernel is found by its script's own check, before anything is timed."""
    done = outcome(process)
    assert done.returncode not in (0, 2) and "###" not in done.stdout, done.stdout


# ---------------------------------------------------------------- comparison, pictures, progress

def timed(ms, spread=0.5, **fields):
    return {"n": 8, "dtype": "bf16", "provider": "triton", "ms": ms, "spread_pct": spread} | fields


@pytest.mark.parametrize("old, new, verdict, ratio", [
    (timed(2.0), timed(1.0), "better", 2), (timed(1.0), timed(2.0), "worse", 0.5),
    (timed(1.0), timed(1.0), "within noise", 1),
    (timed(1.0, 3.0), timed(1.06, 4.0), "within noise", 1 / 1.06),   # 6% of 3 + 4
    (timed(1.0, 3.0), timed(1.08, 4.0), "worse", 1 / 1.08),
    (timed(1.0, 0.0), timed(1.009, 0.0), "within noise", 1 / 1.009),  # the floor
    (timed(1.0, 0.0), timed(1.011, 0.0), "worse", 1 / 1.011),
    (timed(1.0, None), timed(1.049, None), "within noise", 1 / 1.049),
    ({"case": "copy roof", "gbps": 4000.0}, {"case": "copy roof", "gbps": 4400.0}, "better", 1.1),
    ({"seconds": 1.0}, {"seconds": 1.2}, "within noise", 1 / 1.2), ({"seconds": 1.0}, {"seconds": 0.5}, "better", 2)])
def test_a_verdict(old, new, verdict, ratio):
    found, back = comparing.verdict(old, new), comparing.verdict(new, old)
    assert (found["verdict"], found["ratio"]) == (verdict, pytest.approx(ratio))
    assert back["verdict"] == {"better": "worse", "worse": "better"}.get(verdict, verdict), "symmetric"


@pytest.mark.parametrize("new", [{"n": 8}, timed(None), timed(0), timed("fast"), timed(NAN), timed(INF), timed(True)])
def test_what_is_not_timed_has_no_verdict(new):
    assert comparing.verdict(timed(1.0), new) is None


@pytest.mark.parametrize("old, new, pairs", [
    # torch's kernel and the autotuner's config may change where the rest is unique
    ([{"provider": "torch", "n_cols": 9, "kernel": "a"}, {"provider": "torch", "n_cols": 10, "kernel": "a"}],
     [{"provider": "torch", "n_cols": 10, "kernel": "b"}, {"provider": "torch", "n_cols": 9, "kernel": "c"}],
     [(0, 1), (1, 0)]),
    ([timed(1.0, config="a", num_warps=4)], [timed(1.0, config="b", num_warps=8)], [(0, 0)]),
    # several configs of one case: by their names alone
    ([timed(1.0, config="a"), timed(1.0, config="b")], [timed(1.0, config="c"), timed(1.0, config="a")], [(0, 1)]),
    # the warps tell rows apart whose kernel has changed
    ([timed(1.0, kernel="a", num_warps=4), timed(1.0, kernel="a", num_warps=8)],
     [timed(1.0, kernel="b", num_warps=8), timed(1.0, kernel="b", num_warps=4)], [(0, 1), (1, 0)]),
    # 05's rows are of a kernel: another one is another row
    ([{"kernel": "a", "regs": 1}], [{"kernel": "b", "regs": 1}], []),
    # duplicates in order, and one that is left over
    ([timed(1.0), timed(2.0)], [timed(3.0), timed(4.0), timed(5.0)], [(0, 0), (1, 1)])])
def test_rows_are_paired_by_what_they_are_of(old, new, pairs):
    found, *alone = comparing.paired(old, new)
    assert [(id(a), id(b)) for a, b in found] == [(id(old[i]), id(new[j])) for i, j in pairs]
    assert [len(side) for side in alone] == [len(old) - len(pairs), len(new) - len(pairs)]


GPU_A = {"name": "NVIDIA H200", "driver": "1.0", "sms": 132, "power_limit_w": 700.0}


def saved(folder, rows, script="03_matmul", table="vs_cublas", **conditions):
    """A results file with one table."""
    folder.mkdir(exist_ok=True)
    record = {"script": f"{script}.py", "commit": "abc", "gpu": GPU_A, "versions": {"triton": "3.6.0"}, "tables": {
        table: {"title": "", "notes": [], "rows": rows}}} | conditions
    (folder / f"{script}.json").write_text(json.dumps(record))
    return folder


def compared(capsys, *arguments):
    """(status, standard output, standard error) of compare.py."""
    sys.argv[:] = ["compare.py", *map(str, arguments)]
    with pytest.raises(SystemExit) as end:
        comparing.main()
    return end.value.code, *capsys.readouterr()


@pytest.fixture(autouse=True)
def argv(monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv[:])


def test_a_run_compared_with_itself_is_within_noise(capsys):
    folder = ROOT / "results" / "nvidia-h200"
    rows = sum(any(row.get(key) for key in ("ms", "seconds", "gbps")) for path in folder.glob("*.json") for table
               in json.loads(path.read_text())["tables"].values() for row in table["rows"])
    status, out, _ = compared(capsys, folder, folder, "--fail-slower", "0")
    assert status == 0 and "The conditions are the same." in out and rows > 100
    assert out.splitlines()[-1] == (f"0 better, 0 worse, {rows} within noise; 0 changes of what is not timed; "
                                    "0 rows of one side only.")


@pytest.mark.parametrize("limit, status", [([], 0), (["--fail-slower", "9.9"], 1), (["--fail-slower", "10.1"], 0)])
def test_a_comparison_of_two_folders(tmp_path, capsys, limit, status):
    old = saved(tmp_path / "a", [timed(1.0), timed(1.0, n=16), timed(1.0, 9.0, n=32), timed(1.0, n=64)])
    new = saved(tmp_path / "b", [timed(1.1), timed(0.5, n=16), timed(1.1, 9.0, n=32), timed(1.0, n=128)],
                gpu=GPU_A | {"driver": "2.0"})
    found, out, _ = compared(capsys, old, new, *limit)
    assert found == status
    assert re.search(r"\| n 8, bf16, triton +\| 1.0000 ms \| 1.1000 ms \| 0.909 +\| 1.0 +\| worse ", out)
    assert re.search(r"\| n 16, bf16, triton .* 2.000 .* better ", out)
    assert re.search(r"\| n 32, bf16, triton .* 18.0 .* within noise ", out)
    assert "- only in OLD: n 64, bf16, triton" in out and "- only in NEW: n 128, bf16, triton" in out
    assert re.search(r"\| gpu.driver +\| 1.0 +\| 2.0 ", out) and "gpu.sms" not in out


def test_a_comparison_of_compilers_needs_no_gpu(tmp_path, capsys):
    """Two files of 05's --json, which have no script, commit or GPU."""
    rows = [{"kernel": "matmul_kernel", "dtype": "bf16", "config": "c", "num_warps": 4, "regs": 100, "spills": 0},
            {"kernel": "add_kernel", "dtype": "fp32", "config": "d", "num_warps": 4, "regs": 26, "spills": 0}]
    for name, regs, version in (("old", 100, "3.6.0"), ("new", 112, "3.7.0")):
        rows[0]["regs"] = regs
        (tmp_path / f"{name}.json").write_text(json.dumps({"arch": 90, "versions": {"triton": version}, "tables": {
            "resources": {"title": "", "notes": [], "rows": rows}}}))
    status, out, _ = compared(capsys, tmp_path / "old.json", tmp_path / "new.json", "--fail-slower", "5")
    assert status == 0 and re.search(r"matmul_kernel, .* \| regs +\| 100 +\| 112 +\| \+12 ", out)
    assert "1 of 2 untimed rows are the same" in out and re.search(r"versions.triton +\| 3.6.0 +\| 3.7.0", out)


@pytest.mark.parametrize("content", [None, "", '{"tables": {"x": {"rows": [{"n"', "[]", "{}", '{"tables": []}',
                                     '{"tables": {"x": {}}}', '{"tables": {"x": {"rows": [1]}}}', "[" * 100_000])
@pytest.mark.parametrize("folder", [False, True])
def test_a_file_that_is_no_result_gets_one_line(content, folder, tmp_path, capsys):
    good = saved(tmp_path / "good", [timed(1.0)])
    bad = tmp_path / "bad"
    bad.mkdir()
    if content is not None:
        (bad / "03_matmul.json").write_text(content)
    given = (good, bad) if folder else (good / "03_matmul.json", bad / "03_matmul.json")
    status, out, error = compared(capsys, *given)
    assert (status, out, error.count("\n")) == (2, "", 1) and "two results folders" in error and str(bad) in error


def test_what_cannot_be_compared_gets_one_line(tmp_path, capsys):
    a, b = saved(tmp_path / "a", [timed(1.0)]), saved(tmp_path / "b", [timed(1.0)], "01_vector_add")
    file = a / "03_matmul.json"
    for given in ((a, b), (file, b / "01_vector_add.json"), (a, file), (a,), (), (a, a, a), ("--plots", file),
                  ("", ""), (a, ""), *((a, a, "--fail-slower", wrong) for wrong in ("x", "-1", "nan"))):
        status, out, error = compared(capsys, *given)
        assert (status, out, error.count("\n")) == (2, "", 1), given


def test_flops_and_bytes_of_the_roofline():
    assert comparing.work({"m": 2, "n": 3, "k": 4, "flops": 48, "dtype": "bf16"}) == ("matmul", 48, 2 * (8 + 12 + 6))
    assert comparing.work({"m": 2, "n": 3, "k": 4, "flops": 48, "dtype": "fp32"}) == ("matmul", 48, 4 * (8 + 12 + 6))
    assert comparing.work({"n_rows": 2, "n_cols": 3, "bytes": 24}) == ("softmax", 30, 24)
    assert comparing.work({"n": 10, "bytes": 120}) == ("vector add", 10, 120)
    assert comparing.work({"case": "new process", "seconds": 1.0}) is None


LABELS = {"01_vector_add_block_size": ["BLOCK_SIZE (elements a program)", "GB/s", "rated roof", "roof of a copy"],
          "02_fused_softmax_widths": ["columns of a row", "GB/s", "rated roof", "roof of a copy", "262,144", "torch"],
          "03_matmul_vs_cublas": ["TFLOP/s", "peak, at the clock", "16,384", "cublas"],
          "04_autotune_configs": ["TFLOP/s", "picked", "128x256x64"],
          "roofline": ["FLOP a byte", "TFLOP/s", "BF16 peak at", "a copy's bandwidth", "softmax 5", "matmul: Triton"]}


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """The committed results, drawn anew."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    folder = tmp_path_factory.mktemp("pictures")
    drawn = comparing.draw(comparing.load(ROOT / "results" / "nvidia-h200"), folder)
    assert {path.stem for path in drawn} == set(LABELS) == set(comparing.PICTURES)
    return folder


@pytest.mark.parametrize("name", LABELS)
def test_pictures(pictures, name):
    """Each has its labels, units, GPU and versions; the committed one is what its results give."""
    text = (pictures / f"{name}.svg").read_text()
    words = " ".join("".join(node.itertext()).strip() for node in ElementTree.fromstring(text).iter()
                     if node.tag.endswith("}text"))
    for label in [*LABELS[name], "NVIDIA H200, driver", "triton 3.6.0"]:
        assert label in words, label
    kept = (ROOT / "results" / "nvidia-h200" / f"{name}.svg").read_text()
    drawn_by = re.compile(r"Matplotlib v[0-9.]+")
    if drawn_by.search(kept).group() == drawn_by.search(text).group():
        assert kept == text, "out of date: make plots"


def test_the_readme_s_pictures_are_there():
    shown = re.findall(r"!\[.+?\]\((results/.+?\.svg)\)", (ROOT / "README.md").read_text())
    assert len(shown) == 2 and all((ROOT / path).is_file() for path in shown)


@pytest.mark.parametrize("rows", [[], [timed(1.0)], [timed(1.0, tflops=None)], [timed(1.0, tflops=3.0)]])
def test_pictures_of_little(rows, tmp_path):
    """No table, no rate, no peak, no roof: what can be drawn is."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    files = comparing.load(saved(tmp_path, rows, gpu={"name": "NVIDIA H20"}))
    drawn = comparing.draw(files, tmp_path)
    assert [path.stem for path in drawn] == (["03_matmul_vs_cublas"] if rows and rows[0].get("tflops") else [])


def test_06_joins_the_picture_of_02(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    wide = [timed(1.0, provider=name, n_cols=n_cols, gbps=4.0) for name in ("triton", "torch") for n_cols in (64, 128)]
    files = comparing.load(saved(tmp_path, wide, "06_split_softmax", "wide"))
    for _ in range(2):                                       # alone, as --plot draws it, and beside 02
        drawn = next(path for path in comparing.draw(files, tmp_path) if path.stem == "02_fused_softmax_widths")
        assert drawn.read_text().count("triton, split (06)") and "torch" not in drawn.read_text()
        files |= comparing.load(saved(tmp_path / "02", [timed(1.0, n_cols=64, gbps=1.0)], "02_fused_softmax", "widths"))


def test_07_joins_the_picture_of_03(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    rows = [timed(1.0, provider=name, n=n, m=n, k=n, tflops=4.0) for name in ("triton", "cublas") for n in (64, 128)]
    rows.append(timed(1.0, n=64, m=64, k=128, tflops=4.0))   # no square
    files = comparing.load(saved(tmp_path, rows, "07_persistent_matmul"))
    for _ in range(2):                                       # alone, as --plot draws it, and beside 03
        drawn = next(path for path in comparing.draw(files, tmp_path) if path.stem == "03_matmul_vs_cublas")
        assert drawn.read_text().count("triton, persistent (07)") and "cublas" not in drawn.read_text()
        files |= comparing.load(saved(tmp_path / "03", [timed(1.0, n=64, tflops=1.0)]))


def test_pictures_without_matplotlib_get_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, error = compared(capsys, "--plots")
    assert (status, out, error.count("\n")) == (2, "", 1) and "-m pip install matplotlib" in error


def test_pictures_need_no_other_backend(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    folder = saved(tmp_path, [timed(1.0, tflops=3.0)])
    done = program("import compare; compare.main()", "--plots", str(folder), env={"MPLBACKEND": "bogus"})
    assert (done.returncode, done.stdout) == (0, f"{folder / '03_matmul_vs_cublas.svg'}\n"), done.stderr


def test_plot_draws_a_run(report):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    report.args.plot, report.args.save = True, False
    with report.table("block_size", "a title") as table:
        table.time({"n": 5}, {"triton": None}, {"triton": {"block_size": 64}}, bytes=192_000_000)
    report.finish()
    drawn = sorted(str(path.relative_to(common.ROOT)) for path in common.ROOT.rglob("*.svg"))
    assert drawn == ["plots/01_vector_add_block_size.svg", "plots/roofline.svg"]


real_bench = common.bench


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(report, monkeypatch, capsys, terminal):
    """On a terminal the row in hand, of how many, and the time left; elsewhere one line a table, and never more."""
    monkeypatch.setattr(common, "bench", real_bench)
    monkeypatch.setattr(triton.testing, "do_bench", lambda fn, **_: 1.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    seconds = iter(range(10**6))
    monkeypatch.setattr(common.time, "monotonic", lambda: next(seconds))
    report.args.warmup, ours = 0, lambda: None

    def measure():
        with report.table("providers", "a title", cases=2) as table:
            for n in (5000, 6000):
                table.time({"n": n}, {"triton": ours, "torch": ours}, bytes=192_000_000)
        with report.table("first_launch", "another", cases=2) as table:
            table.row(case="a", seconds=1.0)
            table.row(case="b", seconds=1.0)
    lines = "[01_vector_add] providers\n[01_vector_add] first_launch\n"
    if not terminal:
        measure()
        assert capsys.readouterr().err == lines
        return
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((120, 5)))
    master, slave = os.openpty()
    os.set_blocking(master, False)
    shown = ""

    class Stream(io.TextIOWrapper):
        def flush(self):                                     # a terminal keeps few bytes that nobody reads
            nonlocal shown
            super().flush()
            with contextlib.suppress(BlockingIOError):
                shown += os.read(master, 2**16).decode()
    with Stream(os.fdopen(slave, "wb"), write_through=True) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        measure()
        stream.flush()
    os.close(master)
    for text in ("providers: preparing case 1 of 2", "row 1 of 4: triton, n 5,000, first call", "row 3 of 4, about",
                 "first_launch: row 2 of 2, about 1 s left: preparing"):
        assert text in shown, text
    left = [int(s) for s in re.findall(r"row \d of 4, about (\d+) s left: \w+, n [56],000, round \d", shown)]
    assert len(left) == 12 and left[-1] <= 2
    screen = [line.rsplit("\033[K", 1)[-1] for line in shown.split("\r\n")]  # what is left of each line
    assert screen == [*lines.splitlines(), ""]
    printed = capsys.readouterr().out
    assert "row 1 of" not in printed and "\033" not in printed and "### providers: a title" in printed


def test_progress_is_cut_at_the_terminal_s_edge(monkeypatch):
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((20, 5)))
    stream = types.SimpleNamespace(isatty=lambda: True, fileno=lambda: 2, text="", flush=lambda: None)
    stream.write = lambda text: setattr(stream, "text", stream.text + text)
    monkeypatch.setattr(sys, "stderr", stream)
    common.progress("x" * 100)
    assert stream.text == "\r\033[K" + "x" * 19


def test_make_compare_without_its_folders_gets_one_line(tmp_path):
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    for given in ([], ["OLD=results/a"], ["NEW=results/b"]):
        done = make("compare", *given, cwd=tmp_path)
        assert done.returncode == 2 and not done.stdout and "OLD=results/a NEW=results/b" in done.stderr
        assert done.stderr.count("\n") == 1
# ---------------------------------------------------------------- any input, and faults: README, "What was tried"

LAUNCH = {"add": lambda x: vector.add(x, x), "softmax": lambda x: fused.softmax(x),
          "matmul": lambda x: product.matmul(x, x, config=product.ANY)}
launchers = pytest.mark.parametrize("name", LAUNCH)


@launchers
@pytest.mark.parametrize("x, error, line", [
    ([[1.0]], TypeError, "is <class 'list'>; it must be a dense"), (None, TypeError, "<class 'NoneType'>"),
    (1.0, TypeError, "<class 'float'>"), (torch.eye(4).to_sparse(), TypeError, "torch.sparse_coo"),
    (torch.eye(4, dtype=torch.bool), TypeError, "torch.bool"), (torch.eye(4) * 1j, TypeError, "torch.complex64"),
    (torch.eye(4).to(torch.float8_e4m3fn), TypeError, "torch.float8_e4m3fn"),
    (torch.eye(4, device="meta"), ValueError, "is on meta"), (torch.eye(4).requires_grad_(), RuntimeError, "detach"),
    ((torch.eye(4) * 1j).conj().imag.contiguous(), ValueError, "resolve_neg"),
    pytest.param(torch.eye(4).bfloat16(), TypeError, "interpreter", marks=without_gpu)],
    ids=["list", "None", "float", "sparse", "bool", "complex", "fp8", "meta", "grad", "negated", "bf16"])
def test_what_a_launcher_refuses(name, x, error, line):
    if getattr(x, "is_cpu", False):
        x = x.detach().to(DEVICE).requires_grad_(x.requires_grad)
        x = torch._neg_view(x) if line == "resolve_neg" else x
    with pytest.raises(error, match=rf"{name}: [xa] .*{line}"):
        LAUNCH[name](x)


def at_the_edge(*shape):
    """Random floats, and behind the last a page that ends the process which reads it."""
    nbytes = 4 * math.prod(shape)
    room = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    behind = ctypes.c_void_p(torch.frombuffer(memory, dtype=torch.uint8).data_ptr() + room)
    assert ctypes.CDLL(None).mprotect(behind, mmap.PAGESIZE, 0) == 0
    x = torch.frombuffer(memory, dtype=torch.float32, count=nbytes // 4, offset=room - nbytes)
    return x.view(shape).copy_(torch.randn(shape))


def launch_at_the_edge(name):
    for shape in [(33, 33)] + [(3, 600), (1, 33_000)] * (name != "matmul"):  # softmax: each kernel
        LAUNCH[name](at_the_edge(*shape))


@without_gpu
@launchers
def test_nothing_behind_a_tensor_is_read(name):
    """What a masked lane reads changes no result, so a mask that a load lacks shows only where nothing may be read."""
    done = run("-c", f"import test_all; test_all.launch_at_the_edge('{name}')")
    assert done.returncode == 0, (done.returncode, done.stderr)


@launchers
def test_forward_only_is_right_without_gradients(name):
    x = randn(8, 8).requires_grad_()
    with torch.no_grad():
        assert torch.equal(LAUNCH[name](x), LAUNCH[name](x.detach()))


@launchers
def test_autograd_hears_of_what_is_lost(name):
    """A tangent is refused; what autograd saved of out is marked as overwritten."""
    x, out = randn(20, 20), randn(20, 20)
    launch = {"add": lambda x, out=None: vector.add(x, x, out), "softmax": fused.softmax,
              "matmul": lambda x, out=None: product.matmul(x, x, out=out, config=product.ANY)}[name]
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="has a tangent"):
        launch(torch.autograd.forward_ad.make_dual(x, x))
    weight = randn(20, 20).requires_grad_()
    total = (weight * out).sum()
    with torch.no_grad():
        launch(x, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
    with torch.inference_mode():                             # which keeps no versions
        launch(x, out=torch.empty_like(x))


def test_what_may_be_read_after_it_is_overwritten_is_copied():
    """apart() by hand: overlap from either side, and the same place with other strides."""
    room = torch.zeros(100, device=DEVICE)
    for x, out, elementwise, copied in (
            (room[:50], room[50:], False, False), (room[:50], room[49:], False, True),
            (room[49:], room[:50], False, True),
            (room[:50], room[:50], True, False), (room[:50], room[:50], False, True),
            (room.as_strided((3, 2), (20, 1)), room.as_strided((3, 2), (40, 1)), True, True),
            (room.as_strided((3, 2), (20, 1)), room[42:], False, False),
            (room.as_strided((3, 2), (20, 1)), room[41:], False, True)):
        same = common.apart(x, out, elementwise)
        assert (same.data_ptr() != x.data_ptr()) == copied and torch.equal(same, x)


@pytest.mark.parametrize("far", ["a", "b", "out"])
def test_an_offset_of_any_matrix_asks_for_64_bits(far, monkeypatch):
    a, b, out = (randn(16, 16, dtype=torch.float16) for _ in range(3))
    seen = {}
    monkeypatch.setattr(product, "reach", lambda x: 2**31 if x is {"a": a, "b": b, "out": out}[far] else 0)
    monkeypatch.setattr(product, "launch", lambda kernel, grid, keywords, like: seen.update(keywords, like=like))
    product.matmul(a, b, out=out, config=product.ANY)
    assert seen["WIDE"] and True in seen["like"]


@pytest.mark.parametrize("kernel", fused.KERNELS)
@pytest.mark.parametrize("far", ["x", "out", None])
def test_an_offset_of_either_matrix_asks_02_for_64_bits(far, kernel, monkeypatch):
    """The third row of 64 begins at 2^31 or, so that its end still lies before, at 2^31 - 256."""
    seen = {}
    monkeypatch.setattr(fused, f"{'softmax' if kernel == 'whole-row' else kernel}_kernel",
                        {(3,): lambda *args, **switches: seen.update(switches)})
    x, out = (torch.empty_strided((3, 64), (2**30 - 128 * (name != far), 1), device="meta") for name in ("x", "out"))
    fused.launch(fused.Pick(64, kernel, 64, 4), x, out)
    assert seen["WIDE"] == (far is not None)


def test_offsets_need_64_bits_from_the_tile_that_passes_2_31_on():
    """reach(): up to 255 rows and columns of a tile hang over a matrix's edge."""
    row = torch.empty(1, 1, dtype=torch.float16, device="meta")
    for stride, wide in ((2**23 - 2, False), (2**23 - 1, True)):
        assert (product.reach(row.as_strided((1, 1), (stride, 1))) >= 2**31) == wide
    assert product.reach(row.as_strided((2, 3), (0, 0))) == 257 + 258  # as one element apart: a tile's own columns


@pytest.mark.parametrize("process", [pytest.param(partial(run, "-O", f"{script}.py", "--quick"), id=script)
                                     for script in ("01_vector_add", "08_fp32_matmul")])
def test_a_run_without_assertions_is_refused(process, outcome):
    done = outcome(process)
    assert done.returncode == 2 and "assertions" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


@pytest.mark.parametrize("dtype", [dtype for dtype in vector.ADDS if dtype != torch.bfloat16])
def test_add_of_every_dtype_wraps_as_torch(dtype):
    largest = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max
    x = torch.tensor([largest, 1, 0, largest], dtype=dtype, device=DEVICE)
    assert torch.equal(vector.add(x, x), x + x)


def test_add_of_no_dimensions():
    x = torch.tensor(1.5, device=DEVICE)
    assert vector.add(x, x).shape == () and vector.add(x, x) == 2 * x


@pytest.mark.parametrize("size", [1000, 0, -64, 2**21, "a", None, 64.0, True, [64]])
def test_add_refuses_a_block_size(size):
    with pytest.raises(ValueError, match="^add: block_size is .*; it must be an integer, a power of 2"):
        vector.add(randn(4), randn(4), block_size=size)


@pytest.mark.parametrize("shift", [-700, -1, 0, 1, 700])
def test_add_into_its_own_input(shift):
    room, y = randn(6000), randn(4000)
    x, out = room[1000:5000], room[1000 + shift:5000 + shift]
    expected = x + y
    assert torch.equal(vector.add(x, y, out=out), expected)
    room = randn(9000)
    x, y = room[:3000].clone(), room[100:3100]
    expected = y + x
    assert torch.equal(vector.add(y, x, out=room[:3000]), expected)


@pytest.mark.parametrize("n_cols", [5, 3000, 20_000])
def test_softmax_into_its_own_input(n_cols):
    for place in (lambda room: (room[:5], room[:5]), lambda room: (room[:5], room[2:7]),
                  lambda room: (room[2:7], room[:5]), lambda room: (room[:5, :-1], room[:5, 1:])):
        x, out = place(randn(8, n_cols))
        reference = torch.softmax(x.double(), 1)
        torch.testing.assert_close(fused.softmax(x, out=out).double(), reference, **SOFTMAX_TOLERANCE[x.dtype])
    x = randn(40, 40)
    reference = torch.softmax(x.t().double(), 1)
    torch.testing.assert_close(fused.softmax(x.t(), out=x).double(), reference, **SOFTMAX_TOLERANCE[x.dtype])


@pytest.mark.parametrize("which", ["a", "b", "both", "a part of a"])
def test_matmul_into_its_own_input(which):
    a, b = randn(64, 64, dtype=torch.float16), randn(64, 64, dtype=torch.float16)
    b = a if which == "both" else b
    reference, out = a.double() @ b.double(), b if which == "b" else a
    if which == "a part of a":
        a, out, reference = a[:40], a[20:60], reference[:40]
    result = product.matmul(a, b, out=out, config=product.ANY)
    torch.testing.assert_close(result.double(), reference, rtol=2**-10, atol=1e-2)


@pytest.mark.parametrize("strides", [(0, 1), (1, 0), (0, 0), (1, 1), (1, 2), (3, 1)])
def test_an_output_that_overlaps_itself_is_refused(strides):
    out = torch.zeros(100, device=DEVICE).as_strided((4, 5), strides)
    for launch in (lambda: fused.softmax(randn(4, 5), out=out),
                   lambda: product.matmul(randn(4, 3), randn(3, 5), out=out, config=product.ANY)):
        with pytest.raises(ValueError, match="share memory"):
            launch()


@needs_gpu
@pytest.mark.parametrize("m, k, n", [(2**31 - 1, 1, 1), (1, 1, 2**31 - 1), (2**31 + 33, 2, 1)])
def test_matmul_past_2_31_rows(m, k, n, much_memory):
    """From 2^31 less a tile on, the rows of the last tile wrap in 32 bits."""
    a, b = torch.ones(1, k, device="cuda").half().expand(m, k), torch.ones(k, 1, device="cuda").half().expand(k, n)
    if 8 * m * n > torch.cuda.mem_get_info()[0]:
        pytest.skip(f"needs {8 * m * n:,} bytes of GPU memory")
    out = torch.full((m, n), NAN, dtype=torch.float16, device="cuda")
    assert (product.matmul(a, b, out=out, config=product.cfg(128, 32, 32, 3, 4) if m > n else
                           product.cfg(32, 128, 32, 3, 4)) == k).all()


@needs_gpu
def test_matmul_of_a_sum_past_2_31(much_memory):
    """Few ones among zeros: FP32 holds no count of 2^31 ones, added to it 16 at a time."""
    k = 2**31 - 1
    b = torch.zeros(k, 1, device="cuda", dtype=torch.bfloat16)
    b[::2**25 - 1], b[-1] = 1, 1
    result = product.matmul(torch.ones_like(b[:1]).expand(1, k), b, config=product.cfg(16, 16, 512, 3, 4))
    assert result.item() == b.count_nonzero() == 66


@needs_gpu
@pytest.mark.parametrize("rows, cols", [(2**31 + 33, 1), (1, 2**31 + 33)])
def test_softmax_past_2_31(rows, cols, much_memory):
    if 4 * rows * cols + 2**30 > torch.cuda.mem_get_info()[0]:
        pytest.skip(f"needs {4 * rows * cols:,} bytes of GPU memory")
    x = torch.full((rows, cols), -INF, dtype=torch.float16, device="cuda")
    x[-1, -1], x[0, 0] = 1, 1
    out = fused.softmax(x)
    assert out[-1, -1] == out[0, 0] == (1 if rows > 1 else 0.5)
    assert out.isnan().sum() == max(0, rows - 2)             # rows of nothing but -inf


@needs_gpu
@launchers
def test_another_stream(name):
    """What is launched belongs to the current stream: it waits for what that stream did, and nothing else."""
    x, stream = randn(512, 512), torch.cuda.Stream()
    expected = LAUNCH[name](x)
    y = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        y.copy_(x)
        result = LAUNCH[name](y)
    stream.synchronize()
    assert torch.equal(result, expected)


@needs_gpu
@launchers
def test_a_cuda_graph(name):
    x = randn(512, 512)
    LAUNCH[name](x)                                          # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = LAUNCH[name](x)
    x.copy_(randn(512, 512))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, LAUNCH[name](x))


@needs_gpu
def test_a_search_is_not_captured():
    x = randn(272, 272)
    product.found.clear()
    with pytest.raises(RuntimeError, match="matmul once before"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            product.matmul(x, x)
    torch.cuda.synchronize()


@needs_gpu
def test_a_first_launch_is_not_captured():
    """Another dtype's, or other strides': there is nothing to search for, but a kernel to load."""
    x, y = randn(264, 264, dtype=torch.float16), torch.randn(264, 264, device=DEVICE).bfloat16()
    product.matmul(x, x)
    for a in (y, x.t()):
        with pytest.raises(RuntimeError, match="first launch .* cannot be captured"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                product.matmul(a, a)
        torch.cuda.synchronize()
        expected = product.matmul(a, a).clone()              # once before, in the words of the message
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            result = product.matmul(a, a)
        graph.replay()
        assert torch.equal(result, expected)


@needs_gpu
@pytest.mark.skipif(GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
@launchers
def test_a_gpu_that_is_not_the_current_one(name):
    x = randn(96, 96)
    far = x.to("cuda:1")
    result = LAUNCH[name](far)
    assert result.device == far.device and torch.cuda.current_device() == 0
    assert torch.equal(result.to(x.device), LAUNCH[name](x))
    if name != "softmax":
        with pytest.raises(ValueError, match="cuda:0 and [yb] on cuda:1"):
            (vector.add if name == "add" else product.matmul)(x, far)


@triton.jit
def identity_kernel(out_ptr, in_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(in_ptr + offsets, mask=offsets < n), mask=offsets < n)


@needs_gpu
def test_sizes_1_16_and_17_are_three_compilations_outside_the_windows(monkeypatch):
    seen, do_bench = [], triton.testing.do_bench
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **_: seen.append("compiled"))
    monkeypatch.setattr(triton.testing, "do_bench", lambda *a, **k: seen.append("timed") or do_bench(*a, **k))
    x = randn(32)
    common.bench({str(n): partial(identity_kernel[(1,)], torch.empty_like(x), x, n, BLOCK=32) for n in (1, 16, 17)},
                 warmup=0, rep=1, rounds=1)
    assert seen == ["compiled"] * 3 + ["timed"] * 3


@needs_gpu
def test_what_is_timed_is_random():
    """Zeros draw less power: a matmul on them is faster."""
    made = [*vector.inputs(10_000)[:2], *product.square(100, "fp16")[:2]]
    assert all(0.9 < x.float().std() < 1.1 for x in made) and not torch.equal(made[0], made[1])


SPECIALIZE = """
import importlib, json, common, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
def ptx(kernel, constexprs, aligned, size, **options):
    signature, values, attrs = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constexprs: signature[name], values[(i,)] = "constexpr", constexprs[name]
        else: signature[name] = size if name.endswith("_ptr") else "i32"
        if name not in constexprs and (aligned or name.endswith("_ptr")): attrs[(i,)] = [["tt.divisibility", 16]]
    built = triton.compile(ASTSource(kernel, signature, values, attrs), GPUTarget("cuda", 89, 32), options)
    return common.load_bits(built.asm["cubin"])
add = importlib.import_module("01_vector_add").add_kernel
product = importlib.import_module("03_matmul")
tile = {**product.ARTICLE.kwargs, "PRECISION": "ieee", "stride_ak": 1, "stride_bn": 1, "stride_cn": 1}
print(json.dumps([ptx(add, {"BLOCK_SIZE": 1024, "WIDE": False}, aligned, "*fp32") for aligned in (True, False)] + [
    ptx(product.matmul_kernel, {**tile, "RAGGED": False, "WIDE": False}, aligned, "*fp16", num_stages=4)
    for aligned in (True, False)]))
"""


def test_what_is_lost_where_sizes_and_strides_are_no_multiple_of_16():
    """Bits of the widest load: of add where n is none, of matmul where the strides are none."""
    done = subprocess.run([sys.executable, "-c", SPECIALIZE], cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "0"},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wide, narrow, tile_wide, tile_narrow = json.loads(done.stdout)
    assert (wide, narrow, tile_wide) == (128, 32, 128) and tile_narrow < 32


@pytest.mark.parametrize("name", ["01_vector_add", "02_fused_softmax", "03_matmul"])
def test_the_same_seed_gives_the_same_inputs(name, monkeypatch):
    made = []
    for given in ("5", "5", "6"):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--seed", given])
        report = common.start(common.parser("")) if not GPU else torch.manual_seed(int(given))
        assert GPU or report.args.seed == int(given)
        made.append(randn(100))
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


# ---- properties: shapes, strides, dtypes and special values at random

try:
    import hypothesis
    from hypothesis import strategies as st
except ImportError:
    hypothesis = None
SPECIAL = (0.0, -0.0, INF, -INF, NAN, 1e-40, 6e4, -6e4)
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * GPU
CASES = 120 if GPU else 150  # a property; with a GPU nearly every case is compiled


def given(**strategies):
    """hypothesis.given, the same cases in every run; without hypothesis the test is skipped."""
    if hypothesis is None:
        return pytest.mark.skip(reason="needs hypothesis")
    settings = hypothesis.settings(max_examples=CASES, deadline=None, derandomize=True, database=None)
    return lambda test: settings(hypothesis.given(**{name: strategy() for name, strategy in strategies.items()})(test))


def layout(draw, shape, dtype, special=SPECIAL, out=False):
    """Random values, some of them special, as a view into NaN: in any order of dimensions, padded, with steps, some
    dimensions expanded (an output's are not, and it is NaN all over); (the view, the tensor that it looks into)."""
    order = draw(st.permutations(range(len(shape))))
    cut, expanded, room = [], [], []
    for size in shape:
        expanded.append(not out and draw(st.integers(0, 9)) == 0)
        start, step, rest = (draw(st.sampled_from(values)) for values in ((0, 0, 1, 16), (1, 1, 1, 2, 3), (0, 0, 5)))
        wanted = min(size, 1) if expanded[-1] else size
        room.append(start + wanted * step + rest)
        cut.append(slice(start, start + wanted * step, step))
    whole = torch.full([room[dim] for dim in order], NAN, dtype=dtype, device=DEVICE)
    view = whole.permute([order.index(dim) for dim in range(len(shape))])[tuple(cut)]
    if not out:
        values = torch.randn(view.shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 999))))
        values = values * draw(st.sampled_from((1.0, 1.0, 30.0)))
        for value in draw(st.lists(st.sampled_from(special), max_size=3)) if values.numel() else ():
            values.view(-1)[draw(st.integers(0, values.numel() - 1))] = value
        view.copy_(values)
    return view.expand(shape), whole


def size(draw, largest):
    """Often one beside a power of 2 or a tile, where masks begin."""
    near = (0, 1, 2, 15, 16, 17, 31, 33, 64, 127, 129, 1024, 1025, 4097, 16_385)
    return draw(st.one_of(st.sampled_from([n for n in near if n <= largest]), st.integers(0, largest)))


def untouched(out, whole):
    """Whether everything beside out is still NaN."""
    out.fill_(NAN)
    return bool(whole.isnan().all())


@given(data=lambda: st.data())
def test_property_add(data):
    draw = data.draw
    shape = [size(draw, (70_000, 300, 40)[dims - 1]) for dims in [draw(st.integers(0, 3))] for _ in range(dims)]
    dtype = draw(st.sampled_from(DTYPES))
    (x, _), (y, _) = (layout(draw, shape, dtype) for _ in range(2))
    torch.testing.assert_close(vector.add(x, y), x + y, rtol=0, atol=0, equal_nan=True)


@given(data=lambda: st.data())
def test_property_softmax(data):
    draw = data.draw
    shape = size(draw, 40), size(draw, 70_000 if GPU else 3000)
    dtype = draw(st.sampled_from(DTYPES))
    (x, _), (out, whole) = layout(draw, shape, dtype), layout(draw, shape, dtype, out=True)
    before = x.clone()
    fused.close(fused.softmax(x, out=out), x)
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)
    assert untouched(out, whole)


def close_product(result, a, b, precision):
    """Where float64 is finite: the operands' rounding and that of K partial sums, each times the sum of |a||b|; the
    output's rounding, and fp16's subnormals. Elsewhere the same infinity, or NaN."""
    a, b, unit = a.double(), b.double(), UNIT_ROUNDOFF[precision] if result.dtype == torch.float32 else 0
    reference, terms = a @ b, torch.nan_to_num(a, 0, 0, 0).abs() @ torch.nan_to_num(b, 0, 0, 0).abs()
    slack = (2 * unit + 2**-23 * (a.shape[1] + 2)) * terms + torch.finfo(result.dtype).eps * reference.abs() + 2**-24
    over = result.isinf() & (reference.abs() + slack > torch.finfo(result.dtype).max)  # fp16 ends at 65,504
    reference = torch.where(over, reference.sign() * INF, reference)
    finite = reference.isfinite()
    wrong = torch.where(finite, (result.double() - reference).abs() > slack, ~torch.isclose(
        result.double(), reference, equal_nan=True)) | (finite & ~result.isfinite())
    assert not wrong.any(), f"not close: {wrong.sum()} of {wrong.numel()} elements"


@given(data=lambda: st.data())
def test_property_matmul(data):
    draw = data.draw
    m, n, k = (size(draw, 300 if GPU else 70) for _ in range(3))
    dtype, precision = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(("tf32", "ieee", "tf32x3")))
    special = (0.0, -0.0, 100.0) if precision == "tf32x3" else (0.0, -0.0, INF, -INF, NAN, 100.0)
    (a, _), (b, _), (out, whole) = (layout(draw, shape, dtype, special, out) for shape, out in (
        ((m, k), False), ((k, n), False), ((m, n), True)))
    close_product(product.matmul(a, b, precision, out, product.ANY), a, b, precision)
    assert untouched(out, whole)


def test_the_tolerances_of_the_properties_reject_what_is_wrong():
    """One dropped tile, a mask whose identity is 0 where -inf is right, a NaN, one element that was not written."""
    for dtype in (torch.float32, torch.float16):
        a, b = randn(64, 300, dtype=dtype), randn(300, 64, dtype=dtype)
        right = a.double() @ b.double()
        x = with_outliers(4, 300, dtype) - 30                # all below 0, which a masked 0 would win
        soft = torch.softmax(x.double(), 1)
        masked = torch.exp(x.double()) / (torch.exp(x.double()).sum(1, keepdim=True) + 212)  # 512 lanes, 300 columns
        close_product(right.to(dtype), a, b, "tf32")
        fused.close(soft.to(dtype), x)
        a_slice = right - a[:, 288:].double() @ b[288:].double()  # the last 12 of K
        a_tile, a_nan, last = right.clone(), right.clone(), right.clone()
        a_tile[32:, 32:], a_nan[5, 7], last[-1, -1] = 0, NAN, 0
        for wrong in (a_slice, a_tile, a_nan, last):
            with pytest.raises(AssertionError, match="not close"):
                close_product(wrong.to(dtype), a, b, "tf32")
        a_chunk, a_nan = soft.clone(), soft.clone()
        a_chunk[:, 256:], a_nan[0, 0] = 0, NAN
        for wrong in (masked, a_chunk, a_nan):
            with pytest.raises(AssertionError):
                fused.close(wrong.to(dtype), x)


# ---- faults: each is injected

def program(text, *flags, env=(), **options):
    """A Python program beside the scripts, as a process."""
    return subprocess.run([sys.executable, "-c", text, *flags], cwd=ROOT, env=os.environ | dict(env),
                          capture_output=True, text=True, timeout=300, **options)


def one_line(done, status, line):
    assert done.returncode == status and re.search(line, done.stderr.splitlines()[-1]), done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """tool(name, body): an executable shell script of that name, alone on the PATH with the shell's own."""
    def make(name, body):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    monkeypatch.setattr(common.ClockLog, "hung", None)
    monkeypatch.setattr(common.ClockLog, "known", None)
    return make


GOOD_SAMPLE = "2026/12/01 05:29:45.100, 1980, 3201, 512.34, 0x0000000000000004"


@pytest.mark.parametrize("body, problem", [
    (None, "not on the PATH"), ("exit 9", r"nothing usable \(CalledProcessError"), ("echo", "nothing usable"),
    ("echo Unable to determine the device handle", r"nothing usable \(ValueError"), ("printf '\\377\\376'", "Unicode"),
    ("echo 2026/12/01 05:29:45.100, nan, nan, nan, 0x0", "nothing usable"), ("sleep 60 & sleep 60", "did not answer"),
    (f"echo '{GOOD_SAMPLE}'; case $* in *lms*) exit 15;; esac", "ended early, with status 15"),
    (f"case $* in *lms*) while echo nonsense; do sleep 0.01; done;; esac; echo '{GOOD_SAMPLE}'", "logged nothing")])
def test_nvidia_smi_fails(body, problem, tool, monkeypatch, tmp_path):
    monkeypatch.setattr(common, "smi", partial(common.smi, seconds=1))
    if body is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        tool("nvidia-smi", body)
    log = common.ClockLog("GPU-0")
    if log.process:
        time.sleep(0.5)
    log.stop()
    assert re.search(problem, log.problem) and set(log.medians([(0, 4e9)]).values()) <= {None, 1980, 3201, 512.34,
                                                                                       "power cap"}
    if problem == "did not answer":                          # and is not asked again for the next table
        monkeypatch.setattr(common, "smi", None)
        assert common.ClockLog("GPU-0").problem == log.problem
    if "sleep 0.01" in str(body):                            # what it answers to is asked once, too
        monkeypatch.setattr(common, "smi", None)
        (again := common.ClockLog("GPU-0")).stop()
        assert again.problem == log.problem
        monkeypatch.setenv("PATH", str(tmp_path))
        assert common.ClockLog("GPU-0").problem == "nvidia-smi is not on the PATH"


def test_a_row_without_a_clock_has_the_reason(report, monkeypatch):
    monkeypatch.setattr(FakeLog, "problem", "nvidia-smi ended early, with status 15")
    monkeypatch.setattr(FakeLog, "medians", lambda *_: dict.fromkeys(("sm_mhz", "mem_mhz", "power_w", "throttle")))
    with report.table("vs_cublas", "a title") as table:
        table.time({"n": 5}, {"triton": None}, bytes=192_000_000, flops=6_144_000_000, unit="bf16")
    assert any("ended early" in note for note in table.notes) and table.rows[0]["pct_rated"] is None


def test_a_gpu_without_a_known_peak_has_the_reason(report):
    report.gpu["name"] = "NVIDIA H20"
    with report.table("vs_cublas", "a title") as table:
        table.time({"n": 5}, {"triton": None}, flops=6_144_000_000, unit="bf16")
    report.finish()
    assert table.rows[0]["pct_peak"] is None and any("peak is unknown" in note for note in table.notes)
    record = json.loads((common.ROOT / "results" / "nvidia-h20" / "01_vector_add.json").read_text())
    assert not problems(record | {"tables": {"vs_cublas": record["tables"]["vs_cublas"]}}, "03_matmul")


@pytest.mark.parametrize("fields, graph_ms, copy_gbps, bound", [
    ({"bytes": 80_000}, 0.002, 101.0, True), ({"bytes": 80_000}, 0.002, 99.0, False),   # 0.1 of 0.008 ms at 100 GB/s
    ({"flops": 1e6}, 0.0039, None, True), ({"flops": 1e6}, 0.0041, None, False)])
def test_what_is_launch_bound(fields, graph_ms, copy_gbps, bound, report, monkeypatch):
    times = {"ms": 0.008, "graph_ms": graph_ms, "launch_us": 5.0, "spread_pct": 0.5, "windows": []}
    monkeypatch.setattr(common, "bench", lambda *_, **__: {"triton": dict(times)})
    report._copy_gbps = copy_gbps
    with report.table("providers", "a title", roof=copy_gbps is not None) as table:
        table.time({"n": 4096}, {"triton": None}, **fields)
    assert (table.rows[0].get("mark") == "launch-bound") == bound


def test_a_changed_checkout_is_said_to_be(tmp_path, monkeypatch):
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=b"]
    (tmp_path / "results").mkdir()
    (tmp_path / "kernel.py").write_text("1")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    clean = importlib.import_module("tables").commit()
    (tmp_path / "results" / "new.json").write_text("{}")     # what a run writes is no change
    assert re.fullmatch("[0-9a-f]{40}", clean) and importlib.import_module("tables").commit() == clean
    (tmp_path / "kernel.py").write_text("2")
    assert importlib.import_module("tables").commit() == f"{clean}-dirty"


def test_a_launch_bound_row_is_marked(report, monkeypatch):
    times = {"ms": 0.008, "graph_ms": 0.002, "launch_us": 5.0, "spread_pct": 0.5, "windows": []}
    monkeypatch.setattr(common, "bench", lambda *_, **__: {"triton": times})
    report._copy_gbps = 200.0
    with report.table("providers", "a title", roof=True) as table:
        table.time({"n": 4096}, {"triton": None}, bytes=3 * 4096 * 4)
    assert table.rows[0]["mark"] == "launch-bound" and table.rows[0]["graph_ms"] == 0.002


@pytest.mark.parametrize("admins, rights, refused", [
    ("RmProfilingAdminOnly: 1", "0000000000000000", True), ("RmProfilingAdminOnly: 0", "0000000000000000", False),
    ("RmProfilingAdminOnly: 1", "000001ffffffffff", False), ("RmProfilingAdminOnly: 1", "00000000a80425fb", True),
    ("RmProfilingAdminOnly: 1", "0000004000000000", False), ("nothing", "0", False), (None, "0", False)])
def test_whether_counters_are_refused(admins, rights, refused, tmp_path):
    """By the driver's parameters and the process's capabilities: root's in a container are a80425fb."""
    params, status = tmp_path / "params", tmp_path / "status"
    if admins:
        params.write_text(f"EnableMSI: 1\n{admins}\n")
    status.write_text(f"CapPrm:\t0\nCapEff:\t{rights}\n")
    assert importlib.import_module("card").counters_refused(params, status) == refused


@pytest.mark.parametrize("body, line", [
    (None, "ncu is not on the PATH"), ("echo ==ERROR== ERR_NVGPUCTRPERM >&2; exit 1",
                                       "NVreg_RestrictProfilingToAdminUsers"),
    ("exit 3", "status 3; it ended with: nothing"), ("echo '\"ID\"'; echo '\"0\"'", "1 readings"),
    ("echo '\"ID\",\"x\"'; for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo '\"1\",\"2\"'; done", "no figure for each")])
def test_ncu_fails(body, line, tool, monkeypatch, tmp_path, capsys):
    counters = importlib.import_module("counters")
    if body is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        tool("ncu", body)
    with pytest.raises(SystemExit) as end:
        counters.profile(0)
    assert end.value.code == 2 and line in capsys.readouterr().err


def test_ncu_s_readings_are_medians_with_what_warps_wait_for(tool, monkeypatch):
    counters = importlib.import_module("counters")
    metric = counters.STALL.format
    names = [*counters.METRICS.values(), *(f"{metric(reason)}.ratio" for reason in ("barrier", "long_scoreboard"))]
    rows = [("add_kernel(int)", 1, 2, 3, 4, 30, 10), ("add_kernel(int)", "5,000", 2, 3, 4, 30, 10),
            ("add_kernel(int)", 3, 2, 3, 4, 30, 10), *[("split_kernel", 7, 8, 9, 10, 1, 3)] * 3]
    lines = [["ID", "Kernel Name", *names], ["", *[""] * 7], *([index, *row] for index, row in enumerate(rows, 1))]
    csv = "\n".join(",".join(f'"{value}"' for value in line) for line in lines)
    listed = "\n".join(f"{metric(reason)}   Ratio  warps" for reason in (
        "barrier", "barrier_not_issued", "long_scoreboard", "not_selected", "selected"))
    tool("ncu", f"case $1 in --query-metrics) echo '{listed}';; *) echo \"$*\" >&2; cat <<'END'\n{csv}\nEND\n;; esac")
    assert counters.stalls() == dict(zip(names[4:], ("barrier", "long_scoreboard")))
    assert counters.profile(0) == [
        {"read": 3, "written": 2, "l2_hit": 3, "ns": 4, "name": "add_kernel", "stall": "barrier 75%"},
        {"read": 7, "written": 8, "l2_hit": 9, "ns": 10, "name": "split_kernel", "stall": "long scoreboard 75%"}]


def test_the_second_clock_s_note():
    rows = [{"ms": 1.0, "loop_ms": 0.98, "sm_mhz": 2000.0, "loop_mhz": 2000.0},
            {"ms": 1.0, "loop_ms": 1.1, "sm_mhz": 2000.0, "loop_mhz": 1800.0, "k": 8},
            {"ms": 0.05, "loop_ms": 0.2, "sm_mhz": 2000.0, "loop_mhz": 2000.0, "k": 8}]
    note = importlib.import_module("counters").second_clock
    assert "at most 2.0%, of matmuls by at most 10.0%, and by 1.0% in cycles" in note(rows)
    rows[1]["sm_mhz"] = None
    assert "at most 2.0%, of matmuls by at most 10.0%. Below" in note(rows)


def test_without_nvrtc_its_rows_are_left_out(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.cuda._utils", None)
    monkeypatch.setattr(vector, "inputs", lambda n: (randn(n),) * 3)
    monkeypatch.setattr(vector, "launched", lambda *_: {"load_bits": 128})
    report._copy_gbps = 200.0
    vector.providers(report, 64)
    (table,) = report.tables
    assert {row["provider"] for row in table.rows} == {"triton", "torch"}
    assert any(note.startswith("No CUDA C++ rows: ModuleNotFoundError") for note in table.notes)


def heed_ctrl_c():
    """In a child: a shell that put the tests into the background has them ignore it, and their children too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def sweep(error):
    """Two rows, of which the second ends as `error` says, over a result that is there."""
    fake = types.SimpleNamespace(warmup=0, rep=1, rounds=1, seed=0, save=True, plot=False)
    common.ClockLog = FakeLog
    gpu = {"name": "NVIDIA H200", "cc": "9.0", "sms": 132, "l2_bytes": 2**25, "bus_bits": 6016, "memory_bytes": 2**37,
           "uuid": "GPU-0", "power_limit_w": None, "driver": None}
    times = iter([1.0])

    def bench(*_, **__):
        for ms in times:
            return {"triton": {"ms": ms, "graph_ms": None, "launch_us": None, "spread_pct": 0.5, "windows": []}}
        print("ready", flush=True)
        exec(error)

    def main():
        report = common.Report("01_vector_add", fake, gpu)
        with report.table("providers", "a title") as table:
            for n in (5, 6):
                table.time({"n": n}, {"triton": None}, bytes=192_000_000)
        report.finish()
    common.bench, common.ROOT = bench, Path.cwd()
    common.run(main)


SWEEP = "import sys; sys.path.insert(0, {!r}); import test_all; test_all.sweep({!r})"


@pytest.mark.parametrize("error, status, line, rows", [
    ("raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')", 2, "out of GPU memory: .*2 GiB", 1),
    ("import signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(60)", 130, "interrupted", 1),
    ("raise OSError(28, 'No space left on device')", 2, "No space left", 1), ("common.fail('no')", 2, "no", 1),
    ("raise AssertionError('a wrong product')", 1, "a wrong product", 0)],
    ids=["out of memory", "Ctrl-C", "full disk", "refused", "wrong"])
def test_a_sweep_that_ends_early(error, status, line, rows, tmp_path):
    """Prints what was measured (nothing, where a result was wrong), leaves older results whole, says why in a line."""
    old = tmp_path / "results" / "nvidia-h200" / "01_vector_add.json"
    common.write(old, "older")
    done = subprocess.run([sys.executable, "-c", SWEEP.format(str(ROOT), error)], cwd=tmp_path, capture_output=True,
                          text=True, timeout=100, preexec_fn=heed_ctrl_c)
    assert done.returncode == status and re.search(line, done.stderr.splitlines()[-1]), done.stderr
    assert ("Traceback" in done.stderr) == (rows == 0)
    assert done.stdout.count("| triton") == rows and ("Incomplete: " in done.stdout) == bool(rows)
    assert old.read_text() == "older" and list(tmp_path.rglob("*.*")) == [old]


@without_gpu
def test_ctrl_c_from_outside():
    """A real SIGINT into a script's compilations: one line, soon."""
    process = subprocess.Popen([sys.executable, "05_inspect_ir.py"], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env=os.environ | {"TRITON_ALWAYS_COMPILE": "1"},
                               preexec_fn=heed_ctrl_c)
    for line in process.stdout:
        if line.startswith("Compiled for"):
            break
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert (process.returncode, err) == (130, "interrupted; nothing was saved\n")


WRITES = """
import sys, common
from pathlib import Path
folder = Path(sys.argv[1])
for i in range(200):
    with common.one_at_a_time(folder):
        for name in ("x.json", "x.md"):
            common.write(folder / name, sys.argv[2] * 20_000)
"""


def test_two_runs_that_save_to_one_folder_leave_the_files_of_one(tmp_path):
    runs = [subprocess.Popen([sys.executable, "-c", WRITES, str(tmp_path), letter], cwd=ROOT) for letter in "ab"]
    seen = set()
    while any(one.poll() is None for one in runs):
        with contextlib.suppress(FileNotFoundError):
            text = (tmp_path / "x.json").read_text()
            assert len(text) == 20_000 and len(set(text)) == 1
            seen.add(text[0])
    assert [one.returncode for one in runs] == [0, 0] and seen == {"a", "b"}
    assert (tmp_path / "x.json").read_text() == (tmp_path / "x.md").read_text() and len(list(tmp_path.iterdir())) == 2


FILLS = """
import resource, sys, common
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))  # as a disk that is full halfway
common.write(Path(sys.argv[1], "x.json"), "new" * 10_000)
"""


def test_a_disk_that_is_full_halfway_leaves_the_old_file(tmp_path):
    (tmp_path / "x.json").write_text("old")
    one_line(program(FILLS, str(tmp_path)), 2, r"cannot write .*x\.json: File too large")
    assert (tmp_path / "x.json").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def shell(command, **env):
    """A script's call in bash: (what it says of itself on standard error, the status of the pipe's first part)."""
    done = subprocess.run(["bash", "-c", f"python() {{ {sys.executable} \"$@\"; }}; {command}; "
                           "echo \"${PIPESTATUS[*]}\" >&2"], cwd=ROOT, capture_output=True, text=True, timeout=300,
                          env={key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | env)
    *lines, statuses = done.stderr.splitlines()
    return [line for line in lines if re.match(r"\w+\.py: |Traceback|Exception", line)], int(statuses.split()[0])


# under a regular file, where not even root can make a folder
BLOCKED = str(ROOT / "README.md" / "x")


@pytest.mark.parametrize("process, status, line", [
    pytest.param(partial(shell, command, **env), status, line, id=command) for command, env, status, line in [
    ("python 01_vector_add.py --quick | true", {}, 141, None),
    ("python 05_inspect_ir.py --quick --kernel add_kernel | head -n 1", {}, 141, None),
    ("python 05_inspect_ir.py --stage ptx | true", {}, 141, None),
    ("python versions.py --help | true", {}, 141, None),
    ("python 05_inspect_ir.py --quick --kernel add_kernel > /dev/full", {}, 2, "standard output: No space left"),
    ("python 05_inspect_ir.py --stage ptx > /dev/full", {}, 2, "standard output: No space left"),
    ("python 02_fused_softmax.py --quick > /dev/full", {}, 2, "standard output: No space left"),
    ("python 06_split_softmax.py --quick > /dev/full", {}, 2, "standard output: No space left"),
    *((f"python {name}.py --quick", {"TRITON_CACHE_DIR": BLOCKED}, 2, "set TRITON_CACHE_DIR") for name in
      ("06_split_softmax", "07_persistent_matmul", "08_fp32_matmul")),
    (f"python 05_inspect_ir.py --kernel add_kernel --dump {BLOCKED}", {}, 2, "cannot write .*Not a directory"),
    (f"python 05_inspect_ir.py --quick --kernel add_kernel --json {BLOCKED}", {}, 2, "cannot write"),
    ("python 05_inspect_ir.py --quick --kernel add_kernel", {"TRITON_CACHE_DIR": BLOCKED}, 2,
     "cache .* cannot be written .*; set TRITON_CACHE_DIR"),
    ("python report.py --gpu ''", {}, 2, "there are: .*nvidia-h200"),
    ("python report.py --gpu ../results", {}, 2, "there are: .*nvidia-h200"),
    ("python report.py --check extra", {}, 2, "unrecognized"), ("python counters.py --device 99", {}, 2, "--device 99"),
    ("python counters.py --nothing", {}, 2, "unrecognized"),
    ("python sanitize.py --nothing", {}, 2, "unrecognized"), ("python common.py --nothing", {}, 2, "unrecognized"),
    ("python common.py --device 99", {}, 2, "--device 99"), ("python common.py > /dev/full", {}, 2, "No space left"),
    *((f"python {name}.py --help > /dev/full", {"PYTHONUNBUFFERED": unbuffered}, 2, "standard output: No space left")
      for name, unbuffered in (("01_vector_add", "1"), ("compare", "1"), ("versions", ""))),  # at once; at its end
    ("python compare.py --nothing", {}, 2, "unrecognized|OLD and NEW"),
    ("python compare.py a b", {}, 2, "cannot use a"),
    ("python compare.py results/nvidia-h200 results/nvidia-h200 > /dev/full", {}, 2, "No space left"),
    ("python compare.py results/nvidia-h200 results/nvidia-h200 | true", {}, 0, None),  # its status is its verdict
    ("python counters.py --save --quick", {}, 2, "--quick"),
    *([] if GPU else [("python 03_matmul.py", {"TRITON_INTERPRET": "0"}, 2, "TRITON_INTERPRET"),
                      ("python 08_fp32_matmul.py", {"TRITON_INTERPRET": "0"}, 2, "TRITON_INTERPRET"),
                      ("python 05_inspect_ir.py --inductor", {}, 2, "needs a GPU")])]])
def test_what_a_shell_can_do_to_a_script(process, status, line, outcome):
    lines, found = outcome(process)
    assert found == status and len(lines) == (line is not None) and re.search(line or "", "".join(lines)), lines


def test_a_results_file_that_is_none_is_named(tmp_path, monkeypatch, capsys):
    report = importlib.import_module("report")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(report, "README", tmp_path / "README.md")
    report.README.write_text("<!-- measured: 01_vector_add providers ms -->\n<!-- end -->\n")
    for text, line in (("{", "holds no results"), ("[]", "holds no results"), ("{}", "marker")):
        common.write(tmp_path / "results" / "a-gpu" / "01_vector_add.json", text)
        monkeypatch.setattr(sys, "argv", ["report.py", "--gpu", "a-gpu"])
        with pytest.raises(SystemExit) as end:
            report.main()
        assert end.value.code == 2 and line in capsys.readouterr().err


WITH_GPU = """
import runpy, sys, torch
torch.cuda.is_available, torch.cuda.device_count, torch.cuda.set_device = lambda: True, lambda: 1, lambda _: None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@without_gpu
def test_an_interpreter_asked_for_beside_a_gpu_times_and_saves_nothing():
    env = {"TRITON_INTERPRET": "1"}
    done = program(WITH_GPU, "01_vector_add.py", env=env)
    assert done.returncode == 0 and "Nothing is timed: TRITON_INTERPRET=1 is set" in done.stdout, done.stderr
    one_line(program(WITH_GPU, "01_vector_add.py", "--save", env=env), 2, "not together with TRITON_INTERPRET=1")


def test_what_does_not_fit_says_both_figures(report, monkeypatch, capsys):
    for name, value in (("mem_get_info", (1000, 5000)), ("memory_reserved", 300), ("memory_allocated", 100)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    report.need(1200, "--n 5")
    with pytest.raises(SystemExit) as end:
        report.need(1201, "--n 5")
    assert end.value.code == 2
    assert "--n 5 needs 1,201 bytes of GPU memory; 1,200 bytes are free" in capsys.readouterr().err


def test_a_config_that_ends_its_process_is_named(monkeypatch):
    """As a compiler that aborts does: every other config is still tried."""
    configs = [product.cfg(16 * i, 16, 16, 1, 4) for i in range(1, 7)]
    monkeypatch.setattr(tuning, "TRIAL", "import os, sys\nfor config in {configs}:\n    if config['BLOCK_M'] == 48: "
                                         "os.abort()\n    if config['BLOCK_M'] == 96: sys.exit('a bad address')")
    monkeypatch.setattr(tuning, "trial", functools.cache(tuning.trial.__wrapped__))
    found = tuning.lost.__wrapped__(*configs)
    assert found == {"48x16x16 s1 w4 g8": "ends the process that runs it: SIGABRT",
                     "96x16x16 s1 w4 g8": "ends the process that runs it: a bad address"}


def test_a_gpu_that_takes_no_second_process_gets_one_line(monkeypatch, capsys):
    monkeypatch.setattr(tuning, "TRIAL", "import sys; sys.exit('all CUDA-capable devices are busy')")
    monkeypatch.setattr(tuning, "trial", functools.cache(tuning.trial.__wrapped__))
    with pytest.raises(SystemExit) as end:
        tuning.lost.__wrapped__(*tuning.CONFIGS)
    assert end.value.code == 2 and capsys.readouterr().err.endswith("this GPU: all CUDA-capable devices are busy\n")


def test_a_config_that_raises_is_named():
    def launch():
        raise ValueError("PassManager::run failed")
    x = randn(4, 4)
    assert tuning.rejected(launch, x, x.double(), 0.1) == "cannot run: ValueError: PassManager::run failed"


@needs_gpu
def test_the_run_s_configs_survive_their_trial(monkeypatch):
    assert tuning.lost.__wrapped__(*tuning.CONFIGS) == {}
    bad = triton.Config(product.ANY.kwargs | {"BLOCK_M": 48}, num_stages=3, num_warps=4)  # no power of 2
    monkeypatch.setattr(tuning, "CONFIGS", [bad, product.ANY])
    a = randn(256, 256, dtype=torch.float16)
    good, named = tuning.valid(a, a, torch.empty_like(a))
    assert list(good) == [product.config_name(product.ANY)] and "cannot run" in named[product.config_name(bad)]


# ---------------------------------------------------------------- sanitizer and versions: README, "What was tried"

# A compute-sanitizer that knows its tool and whether it is to look at the planted fault.
SANITIZER = r"""tool=$2; for code; do :; done
fault=$(echo "$code" | sed -n "s/.*\['\(planted.*\)'\].*/\1/p")
echo "========= COMPUTE-SANITIZER"
if [ "$fault" ]; then echo "[case] $fault: 1"; else echo "$CASES"; fi
say() { printf "========= %s\n=========     at %s_kernel+0x110 in x.py:7\n=========     by thread 0\n" "$1" "$2"; }
summary() {
  if [ $tool = racecheck ]; then echo "========= RACECHECK SUMMARY: $1 hazards displayed ($1 errors, 0 warnings)"
  else echo "========= ERROR SUMMARY: $1 errors"; fi; }
"""
FINDS = r"""
if [ "$fault" ]; then
  case $tool in memcheck) say "Invalid __global__ read of size 16 bytes" planted;;
    initcheck) say "Uninitialized __global__ memory read of size 4 bytes" planted;;
    *) say "Error: Race reported between Write access and Read access [192 hazards]" planted;; esac
  summary 1; exit 99; fi
"""
CLEAN = SANITIZER + FINDS + "summary 0"
UNSEEN = SANITIZER + "summary 0"
FOUND = SANITIZER + FINDS + """
if [ $tool = initcheck ]; then say "Uninitialized __global__ memory read of size 4 bytes" add; summary 7; exit 99; fi
summary 0"""


@pytest.fixture
def sanitizer(tool, report, monkeypatch):
    """sanitizer(body): whether all is well by a compute-sanitizer of that body, and the table's rows."""
    module = importlib.import_module("sanitize")
    monkeypatch.setattr(module, "CASES", {"add": None, "rows": None})

    def call(body, cases="[case] rows: 2\n[case] add: 1", compiles=0):
        started = module.process
        monkeypatch.setattr(module, "process", lambda args, *command, **options: started(args, *command, **options)
                            if command else ("ends with this", compiles))
        monkeypatch.setenv("CASES", cases)
        tool("compute-sanitizer", body)
        report.args.device = 0
        well = module.sanitize(report)
        return well, {(row["tool"], row["case"].split(":")[0]): row["value"] for row in report.tables[0].rows}
    return call


def test_a_clean_sanitizer_run(sanitizer, report, capsys):
    well, values = sanitizer(CLEAN)
    assert well and set(values.values()) == {"clean", "caught"} and len(values) == 9
    assert [case for _, case in values] == 3 * ["planted", "add", "rows"]
    report.name = "sanitize"
    report.finish()
    record = json.loads(next((common.ROOT / "results").rglob("sanitize.json")).read_text())
    assert not problems(record, "sanitize") and "racecheck sees shared memory alone" in capsys.readouterr().out


def test_a_planted_fault_that_is_not_caught_fails(sanitizer):
    well, values = sanitizer(UNSEEN)
    assert not well and values["memcheck", "planted"] == "not caught: clean" and values["memcheck", "add"] == "clean"


def test_what_a_sanitizer_finds_fails(sanitizer):
    well, values = sanitizer(FOUND)
    assert not well and values["initcheck", "planted"] == "caught" and values["initcheck", "rows"] == "clean"
    assert re.search(r"the first: Uninitialized .* at add_kernel\+0x110 in x.py:7$", values["initcheck", "add"])


def test_a_process_without_a_result_takes_no_other_s_rows_with_it(sanitizer):
    """As one that ends for want of memory does."""
    well, values = sanitizer(CLEAN.replace("summary 0", "[ $tool != memcheck ] || exit 9; summary 0"))
    assert not well and values["racecheck", "add"] == "clean" and values["memcheck", "planted"] == "caught"
    assert values["memcheck", "rows"] == "no result, status 9; it ended with: [case] add: 1"


def test_what_comes_after_the_last_report_that_is_printed_is_unknown(sanitizer, monkeypatch):
    monkeypatch.setattr(importlib.import_module("sanitize"), "LIMIT", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    well, values = sanitizer(FOUND, cases="[case] add: 1\n[case] rows: 2")
    assert not well and values["initcheck", "rows"].startswith("1 printed, the first")
    assert values["initcheck", "add"] == "unknown: the tool stopped printing after 1 reports"


def test_a_case_that_a_sanitizer_does_not_reach_fails(sanitizer):
    well, values = sanitizer(CLEAN, cases="[case] add: 1")
    assert not well and "not reached" in values["racecheck", "rows"]


@pytest.mark.parametrize("body, compiles, line", [
    (None, 0, "not on the PATH; it comes with the CUDA toolkit.*nvidia-cuda-sanitizer-api"),
    ("exit 3", 0, "gave no result, status 3; it ended with: nothing$"), (CLEAN, 1, "without any tool, too: ends with"),
    ("echo '========= Error: Device not supported.'; echo '========= ERROR SUMMARY: 1 error'", 0, "gave no result")])
def test_a_sanitizer_that_does_not_run_gets_one_line(body, compiles, line, sanitizer, monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        if body is None:
            monkeypatch.setattr(importlib.import_module("sanitize").shutil, "which", lambda _: None)
        sanitizer(body or "true", compiles=compiles)
    *_, last = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and re.search(line, last)


@pytest.mark.parametrize("cores", [1, 2, 6, 16, 1000])
def test_each_tool_looks_at_every_case_once(cores, monkeypatch):
    module = importlib.import_module("sanitize")
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    found = [(tool, name) for tool, names in module.shares() for name in names]
    assert sorted(found) == sorted((tool, name) for tool, (fault, *_) in module.PLANTED.items()
                                   for name in (fault, *module.CASES))


def test_the_sanitizer_looks_at_every_kernel():
    names = {name for path in (*ROOT.glob("0*.py"), ROOT / "specialized.py")
             for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.M)}
    names |= set(re.findall(r"void (\w+)", vector.CUDA_FLOAT + vector.CUDA_FLOAT4)) | {"planted_kernel"}
    assert names == set(importlib.import_module("sanitize").KERNELS)


LISTING = "triton (3.10.0)\nAvailable versions: 3.10.0, 3.7.1, 3.7.0, 3.6.1, 3.6.0, 3.5.1, 2.3.1\n  LATEST: 3.10.0\n"


@pytest.mark.parametrize("asked, versions", [
    ("", "3.6.0 3.7.1 3.10.0"), ("3.6 newest", "3.6.0 3.10.0"), ("newest 3.10", "3.10.0"), ("3.7.0", "3.7.0"),
    ("3.5", None), ("newer", None)])
def test_which_versions_are_tested(asked, versions, capsys):
    chosen = importlib.import_module("versions").chosen
    if versions:
        assert chosen(LISTING, asked.split()) == versions.split()
        return
    with pytest.raises(SystemExit) as end:
        chosen(LISTING, asked.split())
    assert end.value.code == 2 and "there are: 3.6, 3.7, 3.10, newest" in capsys.readouterr().err


def test_an_index_without_triton_gets_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        importlib.import_module("versions").chosen("ERROR: No matching distribution found for triton")
    assert end.value.code == 2 and capsys.readouterr().err.endswith("No matching distribution found for triton\n")
# ---------------------------------------------------------------- 06

import triton.experimental.gluon  # noqa: E402, F401  before 06, since it cannot be imported once that has been
with pytest.MonkeyPatch.context() as patched:  # turned the interpreter off, which is for itself alone
    patched.setenv("TRITON_INTERPRET", str(int(common.INTERPRETED)))
    split = importlib.import_module("06_split_softmax")
DTYPE_OF = {2: torch.float16, 4: torch.float32}


def check_split(x):
    out = poisoned(x)
    assert split.split_softmax(x, out=out) is out
    fused.close(out, x)
    assert torch.equal(split.split_softmax(x).nan_to_num(2), out.nan_to_num(2)), "the same bits in every launch"


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (0, 8192), (1, 1), (3, 5), (2, 4096), (2, 4104)])
def test_split_softmax_of_narrow_and_no_rows(shape):
    check_split(randn(*shape))


@needs_tma
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("n_cols", [4097, 4104, 5000, 8191, 8192, 8200, 15_000, 16_376, 16_384, 16_385, 16_392, 32_760,
                                    32_768, 32_776, 50_000, 65_536, 65_537, 65_544, 100_000, 131_064, 151_936, 262_144,
                                    262_145, 262_152, 524_280, 1_000_008, 2**21, 2**21 + 8])
def test_split_softmax(n_cols, dtype):
    for n_rows in (1, 2, 67):
        check_split(fused.sample(n_rows, n_cols, dtype))


@needs_tma
@pytest.mark.parametrize("split_in", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("num_warps", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_every_cluster_at_any_width(split_in, num_warps, dtype):
    """Where most segments are short or empty, too, and with many more rows than are under way at once."""
    vec, plan = 16 // dtype.itemsize, split.Plan(split_in, num_warps, 2)
    for n_cols in (vec, 8 * vec, 1000, 8192 + vec, 32_768, 40_000):
        for n_rows in (1, 700):
            x = fused.sample(n_rows, n_cols, dtype)
            split.launch(plan, x, out := poisoned(x))
            fused.close(out, x)


@needs_tma
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_split_softmax_of_infinities_and_nan(dtype):
    for n_cols in (4104, 20_000, 65_528, 262_136):
        check_split(fused.hard_rows(n_cols, dtype))
    check_split(torch.full((3, 2**16), -INF, device=DEVICE, dtype=dtype))
    check_split(torch.full((3, 2**16), -10.0, device=DEVICE, dtype=dtype))


@needs_gpu
@pytest.mark.parametrize("view", [
    lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[:, 8:-8], lambda x: x[:, 1:], lambda x: x[:, :-1],
    lambda x: x[::2], lambda x: x[:1].expand(5, -1), lambda x: x[1:, 4:-12]])
def test_split_softmax_strides(view):
    x = view(fused.sample(9, 40_000, torch.float32))
    check_split(x)
    for left, right in ((8, 8), (5, 4), (4, 3)):             # 16 bytes apart or not
        room = torch.full((x.shape[0], x.shape[1] + left + right), NAN, device=DEVICE)
        fused.close(split.split_softmax(x, out=room[:, left:-right]), x)
        assert room[:, :left].isnan().all() and room[:, -right:].isnan().all()
    columns = poisoned(x.t()).t()                            # an output whose rows are no rows in memory
    fused.close(split.split_softmax(x, out=columns), x)


@needs_gpu
@pytest.mark.parametrize("n_cols", [8192, 40_000, 200_000])
def test_split_softmax_into_its_own_input(n_cols):
    for place in (lambda room: (room[:50], room[:50]), lambda room: (room[:50], room[2:52]),
                  lambda room: (room[2:52], room[:50]), lambda room: (room[:50, :-8], room[:50, 8:])):
        x, out = place(randn(60, n_cols))
        reference = x.clone()
        fused.close(split.split_softmax(x, out=out), reference)


def split_far_apart(stride):
    x = far_apart(3, 40_000, stride)
    fused.close(split.split_softmax(x), x)
    y = x.contiguous()
    fused.close(split.split_softmax(y, out=x), y)


@needs_tma
@FAR_APART
def test_split_softmax_offsets_past_2_31(stride, much_memory):
    check_far_apart("split_far_apart", stride)


@needs_tma
def test_split_softmax_in_streams_and_graphs():
    pairs = [(x, poisoned(x)) for x in (randn(70, 2**17) for _ in range(3))]
    streams = [torch.cuda.Stream() for _ in pairs]
    split.split_softmax(*pairs[0])                           # compiles
    torch.cuda.synchronize()
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        split.split_softmax(*pairs[0])
    for _ in range(20):
        for pair in pairs:
            pair[0].copy_(torch.randn_like(pair[0]))
            pair[1].fill_(NAN)
        torch.cuda.synchronize()
        graph.replay()
        for stream, pair in list(zip(streams, pairs))[1:]:
            with torch.cuda.stream(stream):
                split.split_softmax(*pair)
        torch.cuda.synchronize()
        for x, out in pairs:
            fused.close(out, x)


@needs_tma
def test_split_softmax_soaks(capsys):
    """Fresh data, ragged widths, 1 to 100 rows; `--soak 10000` is the same for longer."""
    split.soak(200, list(common.DTYPES), 0)
    assert "200 launches, each right" in capsys.readouterr().out


REFUSED = {
    "a list": lambda x: ([[1.0]],), "None": lambda x: (None,), "sparse": lambda x: (x.to_sparse(),),
    "bool": lambda x: (x > 0,), "float64": lambda x: (x.double(),), "fp8": lambda x: (x.to(torch.float8_e4m3fn),),
    "1-D": lambda x: (x[0],), "3-D": lambda x: (x[None],), "meta": lambda x: (x.to("meta"),),
    "a gradient": lambda x: (x.clone().requires_grad_(),), "negated": lambda x: (torch._neg_view(x),),
    "out a list": lambda x: (x, [1]), "out wider": lambda x: (x, torch.cat([x, x], 1)),
    "out fp16": lambda x: (x, x.half()), "out meta": lambda x: (x, x.to("meta")),
    "out a gradient": lambda x: (x, x.clone().requires_grad_()),
    "out expanded": lambda x: (x, x[:1].expand(4, -1)), "out overlaps": lambda x: (x, x.as_strided(x.shape, (8, 1)))}


@pytest.mark.parametrize("arguments", REFUSED.values(), ids=REFUSED)
def test_split_softmax_refuses_what_02_refuses_in_its_words(arguments):
    arguments, errors = arguments(randn(4, 8192)), []
    for launch in (fused.softmax, split.split_softmax):
        with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
            launch(*arguments)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1] and errors[0][1].startswith("softmax: ")


@needs_gpu
def test_split_softmax_is_right_without_gradients():
    x = randn(3, 8192).requires_grad_()
    with torch.no_grad():
        assert torch.equal(split.split_softmax(x), split.split_softmax(x.detach()))


# ---- 06 where nothing can run: its arithmetic, and what is compiled

SMALL_SMS = types.SimpleNamespace(major=12, shared_memory_per_block_optin=101_376,
                                  shared_memory_per_multiprocessor=102_400)
GPUS = pytest.mark.parametrize("gpu", [split.H200, SMALL_SMS], ids=["H200", "100 KB an SM"])


@GPUS
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_vector_belongs_to_one_thread(dtype, gpu):
    """What split_kernel loads and stores, by its arithmetic, at any width that has a Plan; and what an SM holds."""
    vec, splits = 16 // dtype.itemsize, {}
    for n_vecs in sorted({*range(1, 80), *range(80, 2**17, 997), *(row // 16 for row in split.EDGES)}):
        plan = split.choose(n_vecs * vec, dtype, gpu)
        if plan is None:
            continue
        constants = split.constants(plan, n_vecs * vec, dtype)
        splits[plan.split], r, threads = plan, constants["R"], 32 * plan.num_warps
        length = (n_vecs + 8 * plan.split - 1) // (8 * plan.split) * 8
        own = (torch.arange(r)[:, None] * threads + torch.arange(threads)).flatten()
        at = torch.arange(plan.split)[:, None] * length + own
        kept = at[(own < length) & (at < n_vecs)] if not constants["EVEN"] else at
        assert torch.equal(kept.flatten().sort().values, torch.arange(n_vecs)), (plan, n_vecs)
        shared = r * threads * 16 + 1024                     # reductions and the box: less than 1 KB
        assert shared <= gpu.shared_memory_per_block_optin
        assert plan.per_sm * (shared + 1024) <= gpu.shared_memory_per_multiprocessor
        assert 3 <= plan.per_sm <= 4 and constants["maxnreg"] * threads * plan.per_sm <= 2**16
    assert [*splits] == [1, 4, 8, 16][:4 if gpu is split.H200 else 3]


@pytest.mark.parametrize("dtype", list(common.DTYPES.values()), ids=str)
def test_the_edges_are_those_of_the_plans(dtype):
    """An H200's: the shortest row and the longest of each number of programs, so that the check runs all of them."""
    shortest, longest = {}, {}
    for row in range(16, 2**21, 16):
        if plan := split.choose(row // dtype.itemsize, dtype, split.H200):
            shortest.setdefault(plan.split, row)
            longest[plan.split] = row
    assert {*longest.values(), *shortest.values()} == {16, *split.EDGES[1:]}
    assert split.EDGES[0] // 2 == split.LEAST[2] + 8


def picked(monkeypatch, gpu, shape, dtype, strides=None):
    """pick() on a GPU that is not there, of tensors that take no memory."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    x = torch.empty_strided(shape, strides or (shape[1], 1), dtype=dtype, device="meta")
    return split.pick(x, torch.empty(shape, dtype=dtype, device="meta"))


@pytest.mark.parametrize("dtype", list(common.DTYPES.values()), ids=str)
def test_what_06_takes_and_what_it_leaves_to_02(dtype, monkeypatch):
    size = dtype.itemsize
    vec, last = 16 // size, split.EDGES[-1] // size
    ampere = types.SimpleNamespace(**vars(split.H200) | {"major": 8})
    for n_cols in (vec, 4096, split.LEAST[size], split.LEAST[size] + vec, 65_536, 151_936, last, last + vec):
        inside = split.LEAST[size] < n_cols <= last
        assert (picked(monkeypatch, split.H200, (3, n_cols), dtype) is not None) == inside, n_cols
        assert picked(monkeypatch, ampere, (3, n_cols), dtype) is None, "no clusters"
    n_cols = 2**16
    for strides in ((n_cols + 1, 1), (2 * n_cols, 2), (0, 1), (1, 3), (2**37, 1)):
        assert picked(monkeypatch, split.H200, (3, n_cols), dtype, strides) is None
    assert picked(monkeypatch, split.H200, (3, n_cols), dtype, (n_cols + vec, 1))
    assert picked(monkeypatch, split.H200, (3, n_cols + 1), dtype) is None


COMPILES = """
import concurrent.futures, importlib, json, os, re, common, offline
split = importlib.import_module("06_split_softmax")
def facts(case):
    dtype, n_cols = case
    plan = split.choose(n_cols, common.DTYPES[dtype], split.H200)
    kernel = offline.compiled(*split.form(n_cols, dtype))
    cubin, ptx = kernel.asm["cubin"], kernel.asm["ptx"]
    return [case, plan, kernel.metadata.num_ctas, kernel.metadata.shared, common.resources(cubin),
            re.findall("barrier.cluster.[a-z]+", ptx), re.findall(r"cp.async.c[ag].shared.global .*, (0x\\w+), ", ptx)]
cases = [(dtype, n_cols) for dtype in common.DTYPES for size in [common.DTYPES[dtype].itemsize]
         for n_cols in (*split.WIDTHS[size], *(row // size for row in split.EDGES))]
with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    print(json.dumps(list(pool.map(facts, cases))))
"""


def test_every_plan_compiles_and_fits_as_often_as_it_says():
    """For cc 9.0, rows full and ragged: no spills, 16-byte copies, no cluster barrier but the kernel's."""
    done = program(COMPILES, env={"TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) > 30
    for case, (splits, num_warps, per_sm), ctas, shared, used, barriers, copies in found:
        assert used["spills"] == 0 and ctas == splits, case
        assert per_sm * (shared + 8 * splits + 1024) <= 228 * 1024, (case, shared)
        assert per_sm * num_warps * 32 * triton.cdiv(used["regs"], 8) * 8 <= 2**16, (case, used)
        pair = ["barrier.cluster.arrive", "barrier.cluster.wait"]
        assert barriers in ([pair * 2, pair * 3] if splits > 1 else [[]]), (case, barriers)  # Triton 3.9 adds the last
        assert copies and {*copies} == {"0x10"}, (case, copies)


@without_gpu
def test_06_beside_a_gpu_whose_interpreter_is_asked_for_compiles():
    env = {"TRITON_INTERPRET": "1"}
    done = program(WITH_GPU, "06_split_softmax.py", "--quick", env=env)
    assert done.returncode == 0 and "Nothing is timed: TRITON_INTERPRET=1 is set" in done.stdout, done.stderr
    assert "no spills" in done.stdout
    one_line(program(WITH_GPU, "06_split_softmax.py", "--save", env=env), 2, "not together with TRITON_INTERPRET=1")


# ---------------------------------------------------------------- 07 and 08

persistent, packed = map(importlib.import_module, ("07_persistent_matmul", "08_fp32_matmul"))
Config = persistent.Config
# On a GPU every config of the table is checked by the script itself; these are one a kernel and way to launch it.
CONFIGS = [None, Config("tma", 32, 32, 32, 2, 2, group=1)] if not GPU else [
    Config("ws", 128, 256, 64, 4), Config("ws", 64, 64, 128, 4), Config("ws", 128, 128, 64, 5, 3),
    Config("tma", 64, 64, 128, 4, warps=4), Config("tma", 64, 32, 128, 4, 3, warps=4)]
ALIGNED = [(1, 8, 8), (17, 8, 16), (16, 16, 16), (33, 72, 24), (127, 136, 40), (128, 128, 64), (64, 64, 8), (5, 8, 304),
           (17, 520, 40), (260, 40, 264), (130, 264, 1000)]  # rows of a multiple of 16 bytes
pytestmark.append(pytest.mark.filterwarnings("ignore::UserWarning:triton.runtime.interpreter"))


def check_persistent(a, b, config=None, own=True):
    check_matmul(a, b, launch=partial(persistent.persistent_matmul, config=config))
    assert (persistent.persistent_matmul.config is not None) == (own and (WGMMA or not GPU)), "07's kernel or 03's"


@pytest.mark.skipif(GPU and not WGMMA, reason="needs compute capability 9.0")
@pytest.mark.parametrize("m, transposed, kernel", [(40, False, "narrow"), (8, True, "narrow/t"), (40, False, "bogus")])
def test_a_config_of_07_that_cannot_be_right_is_refused(m, transposed, kernel):
    b = randn(64, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="config is .*; it must be ws, tma or"):
        persistent.persistent_matmul(randn(m, 64, dtype=torch.float16), b.t() if transposed else b,
                                     config=persistent.Config(kernel, 16, 32, 32, 2, warps=4))


@pytest.mark.parametrize("wrong", ["ws", ("ws", 128, 256, 64, 4), product.ANY], ids=str)
def test_what_is_no_config_of_07_and_no_mode_of_08_is_refused(wrong):
    a = randn(16, 16, dtype=torch.float16)
    with pytest.raises(TypeError, match="config is .*; it must be None or a Config"):
        persistent.persistent_matmul(a, a, config=wrong)
    with pytest.raises(TypeError, match="mode is .*; it must be None, a Mode or an Fma"):
        packed.fp32_matmul(a.float(), a.float(), mode=wrong)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("m, n, k", ALIGNED)
def test_persistent_matmul(m, n, k, dtype, config):
    check_persistent(randn(m, k, dtype=dtype), randn(k, n, dtype=dtype), config)
    check_persistent(randn(m, k, dtype=dtype), randn(n, k, dtype=dtype).t(), config)


@pytest.mark.parametrize("kernel", ["narrow", "narrow/t"])
@pytest.mark.parametrize("split", [1, 2, 5])
@pytest.mark.parametrize("m, n, k", [(1, 8, 8), (3, 72, 200), (16, 136, 520)])
def test_persistent_matmul_of_few_rows(m, n, k, split, kernel):
    config = Config(kernel, 16, 64, 64, 3, split, warps=4)
    for _ in range(2):                                       # the counters of the first launch are zero again
        check_persistent(randn(m, k, dtype=torch.float16), randn(k, n, dtype=torch.float16), config)


@pytest.mark.parametrize("kernel", ["tma", "narrow"])
def test_a_launch_like_one_before_passes_on_all_arguments(kernel, monkeypatch):
    """By position, in the order of the kernel's parameters, constants too; a launch unlike it is Triton's."""
    a, b, out = (torch.empty(shape, dtype=torch.float16, device=DEVICE) for shape in ((16, 256), (256, 64), (16, 64)))
    seen = []

    class Compiled:
        def __getitem__(self, grid):
            return lambda *args: seen.append((grid, args))
    monkeypatch.setattr(common, "INTERPRETED", False)
    monkeypatch.setattr(product, "launched", {})
    for kernel, grid, keywords in persistent.launches(Config(kernel, 16, 32, 32, 2, 3, warps=4), a, b, out):
        names, jit = list(inspect.signature(kernel.fn).parameters), mock.MagicMock(arg_names=kernel.arg_names)
        jit[grid].return_value = own = Compiled()
        for like in (1, 2):
            assert product.launch(jit, grid, keywords, like) is own and jit[grid].call_args == mock.call(**keywords)
        assert jit[grid].call_count == 2 and product.launch(jit, grid, keywords, 1) is own
        assert jit[grid].call_count == 2, "found"
        given_grid, args = seen.pop()
        assert given_grid == (*grid, 1, 1)[:3] and len(args) == len(names) and not seen
        assert all(value is keywords[name] for name, value in zip(names, args))


@needs_gpu
def test_a_launch_like_one_before_is_right_where_it_is_not_alike():
    """Pointers, strides and sizes that 16 divides no longer: each needs a kernel of its own."""
    whole = randn(208, 208, dtype=torch.float16)
    for _ in range(2):
        for x in (whole, whole[:, :-16], whole[:, 1:], whole[:, 8:], whole[:, :-1], whole[:192], whole[1:, :192]):
            check_matmul(x, x.t(), launch=partial(product.matmul, config=product.ANY))
            check_persistent(x, whole[:x.shape[1]], CONFIGS[1], own=x.data_ptr() % 16 == 0)


@needs_wgmma
@pytest.mark.parametrize("m, n, k", [(512, 512, 512), (7, 512, 1024), (300, 520, 200)])
def test_persistent_matmul_by_search(m, n, k):
    a, b = randn(m, k, dtype=torch.float16), randn(k, n, dtype=torch.float16)
    for _ in range(2):
        check_persistent(a, b)
    found = persistent.persistent_matmul.found
    assert persistent.persistent_matmul.config == found[0]
    assert sorted(found) == sorted(persistent.candidates(m, n, k, persistent.sms_of(a.device)))


@pytest.mark.parametrize("m, n, k", [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0)])
def test_the_empty_is_03_s(m, n, k):
    check_persistent(randn(m, k, dtype=torch.float16), randn(k, n, dtype=torch.float16), own=False)
    for precision in product.PRECISIONS[:3]:
        check_matmul(randn(m, k), randn(k, n), precision, launch=partial(packed.fp32_matmul, precision=precision))


@pytest.mark.parametrize("view, own", [
    (lambda x: x[:, 8:80], True), (lambda x: x[::3], True), (lambda x: x[1:, 8:], True), (lambda x: x[:, ::2], False),
    (lambda x: x[:, 3:80], False), (lambda x: x[:1].expand(40, -1), False), (lambda x: x[:, :0], False)])
def test_persistent_matmul_strides(view, own):
    x, fp16, config = view(randn(72, 104, dtype=torch.float16)), partial(randn, dtype=torch.float16), CONFIGS[1]
    rows, columns = x.shape
    check_persistent(x, fp16(columns, 56), config, own)
    check_persistent(fp16(56, columns), x.t(), config, own and rows % 8 == 0)  # else the output is not what TMA takes
    check_persistent(fp16(40, triton.cdiv(rows, 8) * 8)[:, :rows], x, config, own)


def test_persistent_matmul_of_what_tma_cannot_take_is_03_s():
    fp16 = partial(randn, dtype=torch.float16)
    check_persistent(fp16(40, 41), fp16(41, 48), own=False)                      # A's rows
    check_persistent(fp16(40, 48), fp16(48, 41), own=False)                      # B's, and the output's
    check_persistent(fp16(40 * 48 + 1)[1:].view(40, 48), fp16(48, 48), own=False)
    check_persistent(fp16(48, 40).t(), fp16(48, 48), own=False)
    check_persistent(randn(40, 48), randn(48, 48), own=False)                    # FP32
    assert not persistent.tma_takes(torch.empty_strided((2, 8), (2**37, 1), device="meta"))
    assert not persistent.tma_takes(torch.empty((2**30, 8), device="meta"))


@pytest.mark.parametrize("launch", [lambda a, b, out: persistent.persistent_matmul(a, b, out, CONFIGS[1]),
                                    lambda a, b, out: packed.fp32_matmul(a, b, "ieee", out)], ids=["07", "08"])
@pytest.mark.parametrize("which", ["a", "b", "both", "a part of a", "columns of b"])
def test_07_and_08_into_their_own_input(which, launch):
    dtype = torch.float32 if "fp32_matmul" in launch.__code__.co_names else torch.float16
    a, b = randn(64, 64, dtype=dtype), randn(64, 64, dtype=dtype)
    b = a if which == "both" else b
    out = b if which == "b" else a
    reference = a.double() @ b.double()
    if which == "a part of a":
        a, out, reference = a[:40], a[16:56], reference[:40]
    if which == "columns of b":
        b, out, reference = b[:, :40], b[:, 16:56], reference[:, :40]
    assert launch(a, b, out) is out
    torch.testing.assert_close(out.double(), reference, rtol=2**-10, atol=1e-2)


@pytest.mark.parametrize("n", [24, 29, 30, 31, 65, 72])  # TMA writes a row's last 16 bytes whole
def test_07_and_08_write_no_other_element(n):
    launches = [*((partial(persistent.persistent_matmul, config=one), torch.float16) for one in CONFIGS if one),
                *((partial(packed.fp32_matmul, precision=one), torch.float32)
                  for one in product.PRECISIONS[:5 if GPU else 3])]  # no interpreter runs bf16
    for launch, dtype in launches:
        a, b, room = randn(40, 48, dtype=dtype), randn(48, n, dtype=dtype), poisoned(randn(60, 96).to(dtype))
        launch(a, persistent.framed(48, n, dtype).copy_(b), out=room[8:48, 8:8 + n])
        torch.testing.assert_close(room[8:48, 8:8 + n].double(), a.double() @ b.double(), rtol=1e-2, atol=0.05)
        assert room.isnan().sum() == 60 * 96 - 40 * n


def test_tma_fills_whole_16_bytes_alone():
    for dtype, whole in ((torch.float16, 8), (torch.float32, 4)):
        room = torch.empty(8, 64, dtype=dtype)
        assert [n for n in range(1, 17) if persistent.tma_fills(room[:, :n])] == list(range(whole, 17, whole))
    assert not persistent.tma_fills(room[:, 1:5]) and not persistent.tma_fills(room[:0])


REFUSED_MATMULS = {
    **{name: lambda x, bad=bad: (bad(x)[0], x) for name, bad in REFUSED.items() if not name.startswith("out")},
    **{f"b {name}": lambda x, bad=bad: (x, bad(x)[0]) for name, bad in REFUSED.items() if not name.startswith("out")},
    **{name: lambda x, bad=bad: (x, x, bad(x)[1]) for name, bad in REFUSED.items() if name.startswith("out")},
    "shapes": lambda x: (x, x[1:]), "dtypes": lambda x: (x, x.bfloat16()), "out fp16": lambda x: (x, x, x.bfloat16()),
    "out's strides": lambda x: (x, x, x.as_strided(x.shape, (1, 1)))}


@pytest.mark.parametrize("arguments", REFUSED_MATMULS.values(), ids=REFUSED_MATMULS)
def test_07_and_08_refuse_what_03_refuses_in_its_words(arguments):
    for launch, dtype in ((persistent.persistent_matmul, torch.float16), (packed.fp32_matmul, torch.float32)):
        x, errors = randn(16, 16, dtype=dtype), []
        for one in (product.matmul, launch):
            a, b, *out = arguments(x)
            with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
                one(a, b, out=out[0] if out else None)
            errors.append((error.type, str(error.value)))
        assert errors[0] == errors[1] and errors[0][1].startswith("matmul: ")


def test_08_refuses_a_precision_as_03_does():
    for launch in (product.matmul, packed.fp32_matmul):
        with pytest.raises(ValueError, match="matmul: precision is 'tf64'"):
            launch(randn(16, 16), randn(16, 16), precision="tf64")


def test_07_and_08_are_right_without_gradients():
    for launch, dtype in ((partial(persistent.persistent_matmul, config=CONFIGS[1]), torch.float16),
                          (packed.fp32_matmul, torch.float32)):
        x = randn(16, 16, dtype=dtype).requires_grad_()
        with torch.no_grad():
            assert torch.equal(launch(x, x), launch(x.detach(), x.detach()))


@pytest.mark.parametrize("precision", product.PRECISIONS)
@pytest.mark.parametrize("m, n, k", [(1, 4, 16), (33, 64, 17), (300, 520, 100) if GPU else (65, 72, 40)])
def test_fp32_matmul(m, n, k, precision):
    if not GPU and precision.startswith("bf16"):
        pytest.skip("no interpreter runs it")
    launch = partial(packed.fp32_matmul, precision=precision)
    for a, b in ((randn(m, k), randn(k, n)), (randn(k, m).t(), randn(n, k).t()),
                 (randn(m, 2 * k)[:, ::2], randn(k, n))):
        check_matmul(a, b, precision, launch=launch)
        own = WGMMA and (precision != "ieee" or persistent.tma_takes(a, b))
        assert (packed.fp32_matmul.config is not None) == own
    check_matmul(randn(m, k), randn(k, n + 1), precision, launch=launch)      # an output that TMA cannot take
    assert packed.fp32_matmul.config is None


@needs_wgmma
@pytest.mark.parametrize("m, n, k", [(40, 48, 56), (7, 512, 1024)])
def test_07_and_08_in_streams_and_graphs(m, n, k):
    """Launches that overlap share no counters, and a graph has its own; a search is not captured."""
    config = Config("narrow", 16, 64, 128, 4, 5, warps=4) if m <= 16 else CONFIGS[2]
    launch, fp16 = partial(persistent.persistent_matmul, config=config), partial(randn, dtype=torch.float16)
    calls = [(launch, fp16(m, k), fp16(k, n), fp16(m, n)) for _ in range(3)]
    calls.append((packed.fp32_matmul, randn(40, k), randn(k, n), randn(40, n)))
    for run_one, a, b, out in calls:
        run_one(a, b, out=out)                               # compiles
    torch.cuda.synchronize()
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        for run_one, a, b, out in calls[::3]:
            run_one(a, b, out=out)
    with pytest.raises(RuntimeError, match="matmul once before"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            persistent.persistent_matmul(fp16(24, 520), fp16(520, 24))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(10):
        for _, a, _, out in calls:
            a.copy_(torch.randn_like(a))
            out.fill_(NAN)
        torch.cuda.synchronize()
        graph.replay()
        for stream, (run_one, a, b, out) in list(zip(streams, calls))[1:3]:
            with torch.cuda.stream(stream):
                run_one(a, b, out=out)
        torch.cuda.synchronize()
        for _, a, b, out in calls:
            torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=2**-9, atol=2**-10 * 16 * k**0.5)


# ---- 07 and 08 where nothing can run: what is compiled, and by what arithmetic

TABLE_SHAPES = [(n, n, n) for n in persistent.SQUARES] + [*persistent.ODD]


@pytest.mark.parametrize("sms", [1, 20, 78, 132])
def test_candidates_suit_any_product(sms):
    for m in (1, 16, 17, 64, 300, 4096, 100_000):
        for n in (8, 64, 1000, 8192, 2**20):
            for k in (8, 256, 4096, 2**20):
                found = persistent.candidates(m, n, k, sms)
                assert len(found) == len(set(found)) or sms < 132
                assert any(config.kernel == "tma" for config in found), "what the interpreter and B transposed take"
                for config in found:
                    units = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n) * config.split
                    assert config.split == 1 or k >= 256 * config.split and units <= 3 * sms
                    assert m <= 16 or not config.kernel.startswith("narrow")


@pytest.mark.parametrize("quick", [False, True])
def test_the_searches_of_07_s_table_compile_nothing(quick, monkeypatch):
    """What Triton keeps a binary by: each launch of the table's searches has the key of one in check()."""
    keys, seen = set(), []

    def key(kernel, grid, keywords):
        name = kernel.fn.__name__
        return name, *((key, (value.dtype, value.data_ptr() % 16) if isinstance(value, torch.Tensor) else
                        (value.base.dtype, *value.block_shape) if hasattr(value, "block_shape") else
                        None if key in persistent.SIZES else (value == 1, value % 16 == 0) if type(value) is int and
                        key.islower() and key not in ("num_warps", "num_stages") else value)
                       for key, value in sorted(keywords.items()))
    monkeypatch.setattr(persistent, "run", lambda todo: keys.update(key(*launch) for launch in todo))
    monkeypatch.setattr(product, "verify", lambda a, b, config, pad, call=None: seen.append(config) if call is None else
                        call(a, b, None, poisoned(randn(len(a) + 2, b.shape[1] + pad)).to(a.dtype)[1:-1, :b.shape[1]],
                             config))
    monkeypatch.setattr(product, "fitting", lambda configs, _: product.CONFIGS[2])
    monkeypatch.setattr(product, "framed", lambda x, pad: torch.empty(
        len(x) + pad, x.shape[1] + pad, dtype=x.dtype)[:len(x), :x.shape[1]])
    shapes = [(n, n, n) for n in (512, 1024, 4096)] if quick else TABLE_SHAPES
    args = types.SimpleNamespace(quick=quick)
    persistent.check(types.SimpleNamespace(name="07", gpu={"sms": 132}, args=args),
                     [(*shape, dtype) for shape in shapes for dtype in ("bf16", "fp16")])
    assert len(seen) == 2 * len(product.CONFIGS[2]), "03's, too"
    for m, n, k in shapes:
        a, b, out = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((m, k), (k, n), (m, n)))
        for config in persistent.candidates(m, n, k, 132):
            for launch in persistent.launches(config, a, b, out):
                assert key(*launch) in keys, config


PTX = """
import importlib, json, re, common, offline
packed = importlib.import_module("08_fp32_matmul")
import torch
def count(mode):
    a, b, out = (torch.empty(4096, 4096) for _ in range(3))
    launches = packed.launches(packed.MODES[mode], a, b, out)
    kernels = [offline.compiled(*launch[::2]).asm for launch in launches]
    text = "".join(kernel["ptx"] + "\\n".join(common.sass(kernel["cubin"])) for kernel in kernels)
    return {word: len(re.findall(rf"\\b{word}", text)) for word in
            ("fma.rn", "mma.sync", "wgmma.mma_async", "cp.async.ca", "cp.async.bulk.tensor", "HGMMA", "DEPBAR.LE gsb0")}
print(json.dumps({mode: count(mode) for mode in ("ieee", "tf32", "bf16x6")}))
"""


def test_ieee_has_no_tensor_core_and_tf32_no_narrow_copy():
    done = program(PTX, env={"TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ieee, tf32, split = (found[mode] for mode in ("ieee", "tf32", "bf16x6"))
    assert ieee["fma.rn"] >= 64 and not ieee["mma.sync"] and not ieee["wgmma.mma_async"]
    assert tf32["wgmma.mma_async"] and not tf32["mma.sync"] and not tf32["fma.rn"]
    assert 2 * split["wgmma.mma_async"] == 3 * tf32["wgmma.mma_async"], "6 products, of 64 as TF32's of 32, 4 at once"
    for mode in (tf32, split):  # ptxas waits after each where it finds that registers are in the way
        assert mode["HGMMA"] >= 4 * mode["DEPBAR.LE gsb0"] > 0
    assert all(mode["cp.async.bulk.tensor"] and not mode["cp.async.ca"] for mode in found.values())


@pytest.mark.parametrize("precision", [name for name, mode in packed.MODES.items() if not isinstance(mode, packed.Fma)])
def test_packed_parts_add_up(precision):
    mode = packed.MODES[precision]
    packed.parts_add_up(mode if GPU else mode._replace(dtype=torch.float32))  # no interpreter runs bf16


def test_packing_rounds_to_nearest_and_keeps_what_is_no_number():
    """TF32 has 10 bits of fraction: ties away from zero; what would round to infinity does not."""
    step = 2.0**-10
    x = torch.tensor([[1 + step, 1 + 0.49 * step, 1 + 0.5 * step, -1 - 0.5 * step, 1 + 0.51 * step, 0.0, -0.0, INF,
                       -INF, NAN, 3.4028234e38, -3.4028234e38, 1e-40]], device=DEVICE)
    rounded, todo = packed.pack(x, packed.MODES["tf32"])
    persistent.run(todo)
    largest = 2.0**127 * (2 - step)
    expected = torch.tensor([[1 + step, 1, 1 + step, -1 - step, 1 + step, 0.0, -0.0, INF, -INF, NAN, largest,
                              -largest]], device=DEVICE)
    torch.testing.assert_close(rounded[:, :-1], expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(rounded[0, 5:7].signbit(), expected[0, 5:7].signbit())


@without_gpu
@pytest.mark.parametrize("name", ["07_persistent_matmul", "08_fp32_matmul"])
def test_07_and_08_beside_a_gpu_whose_interpreter_is_asked_for_compile(name):
    env = {"TRITON_INTERPRET": "1"}
    done = program(WITH_GPU, f"{name}.py", "--quick", env=env)
    assert done.returncode == 0 and "Nothing is timed: TRITON_INTERPRET=1 is set" in done.stdout, done.stderr
    assert "no spills" in done.stdout
    one_line(program(WITH_GPU, f"{name}.py", "--save", env=env), 2, "not together with TRITON_INTERPRET=1")


# ---------------------------------------------------------------- make

def make(*arguments, cwd, **env):
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))} | env
    return subprocess.run(["make", *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture
def steps(tmp_path):
    """A repository of three steps, the second of which fails."""
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    for name, status in (("01_a", 0), ("02_b", 7), ("03_c", 0)):
        (tmp_path / f"{name}.py").write_text(f'"""What does {name} do?"""\nimport sys\n'
                                             f"print({name!r}, sys.argv[1:])\nsys.exit({status})\n")
    return tmp_path


def test_make_alone_lists_its_targets(steps):
    done = make("PYTHON=/nowhere/python", cwd=steps)
    assert done.returncode == 0 and "make 02       What does 02_b do?" in done.stdout
    for target in ("all", "NN", "quick", "ncu", "sanitize", "compare", "plots", "test", "test-versions", "clean"):
        assert re.search(rf"^make {target} ", done.stdout, re.M)


def test_make_all_stops_at_a_failing_step_with_its_status(steps):
    done = make(f"PYTHON={sys.executable}", "all", cwd=steps)
    save = ["--save"] if GPU else []
    assert done.stdout.splitlines() == [f"01_a {save}", f"02_b {save}"]
    assert done.returncode == 2 and "Error 7" in done.stderr


def test_make_all_runs_every_check_at_once_and_then_step_by_step(steps):
    """A check that fails does not end it: the step will, where it still does."""
    (steps / "python").write_text('#!/bin/sh\n[ $1 = -W ] && { echo --save; exit; }\necho "$*" >>log\n'
                                  '[ "$*" != "02_b.py --check" ]\n')
    (steps / "python").chmod(0o755)
    done = make(f"PYTHON={steps}/python", "all", cwd=steps)
    assert done.returncode == 0 and not done.stdout
    ran = (steps / "log").read_text().splitlines()
    names = ["01_a.py", "02_b.py", "03_c.py"]
    assert sorted(ran[:3]) == [f"{name} --check" for name in names] and ran[3:] == [f"{name} --save" for name in names]


def test_make_one_step(steps):
    done = make(f"PYTHON={sys.executable}", "03", "ARGS=--n 8192", cwd=steps)
    assert (done.returncode, done.stdout) == (0, "03_c ['--n', '8192']\n")
    assert make("04", cwd=steps).returncode == 2


def test_make_uses_a_python_that_lacks_nothing_and_else_makes_a_venv(steps):
    """Read off `make -n`, with a python3 that answers as one with and one without the packages would."""
    (steps / "requirements.txt").touch()
    fake, path = steps / "python3", os.environ["PATH"]
    for answer in ("", "tabulate"):
        fake.write_text(f"#!/bin/sh\necho {answer}\n")
        fake.chmod(0o755)
        done = make("-n", "test", cwd=steps, PATH=f"{steps}:{path}")
        assert done.returncode == 0, done.stderr
        assert ("python3 lacks: tabulate." in done.stdout) == bool(answer)
        assert (".venv/bin/python -m pytest" in done.stdout) == bool(answer)


@pytest.mark.parametrize("gpu, interpret, save", [(True, "0", True), (True, "1", False), (False, "0", False)])
def test_make_saves_where_a_gpu_is_to_be_measured(gpu, interpret, save, steps):
    """Without a GPU the recipe asks again, which no run waits for."""
    for name in ("triton", "numpy", "tabulate"):
        (steps / f"{name}.py").write_text("__version__ = '3.6.0' if __name__ == 'triton' else '2.3.1'\n")
    (steps / "torch.py").write_text(f"import types\ncuda = types.SimpleNamespace(is_available=lambda: {gpu})\n")
    (steps / "02_b.py").unlink()
    (steps / "python3").symlink_to(sys.executable)
    path = f"{steps}:{os.environ['PATH']}"
    done = make("all", cwd=steps, PATH=path, PYTHONPATH=str(steps), TRITON_INTERPRET=interpret)
    given = ["--save"] * save
    assert done.returncode == 0 and done.stdout.splitlines() == [f"01_a {given}", f"03_c {given}"], done.stderr
    assert ("side by side" in done.stderr) == save
    done = make("all", f"TRITON_INTERPRET={interpret}", cwd=steps, PATH=path, PYTHONPATH=str(steps))
    assert done.stdout.splitlines() == [f"01_a {given}", f"03_c {given}"], done.stderr  # given behind the target, too


# ---------------------------------------------------------------- 05: the article's compiler output, exactly

@pytest.fixture(scope="session")
def arch_89(tmp_path_factory):
    """05's tables for the article's laptop, compiled here: {id: rows}."""
    if not triton.__version__.startswith("3.6."):
        pytest.skip("the figures are those of Triton 3.6")
    path = tmp_path_factory.mktemp("arch") / "89.json"
    done = run("05_inspect_ir.py", "--arch", "89", "--json", str(path))
    assert done.returncode == 0, done.stderr
    return {key: table["rows"] for key, table in json.loads(path.read_text())["tables"].items()}


def only(rows, key, **match):
    """The field `key` of the rows that match; all must agree."""
    values = {row[key] for row in rows if all(row.get(k) == v for k, v in match.items()) and row.get(key) is not None}
    assert len(values) == 1, f"{key} of {match} is {sorted(values)}"
    return values.pop()


@pytest.mark.parametrize("arch, instruction", [("100", "tcgen05.mma"), ("90", "wgmma.mma_async"), ("89", "mma.sync"),
                                               ("gfx942", "v_mfma"), ("gfx1100", "v_wmma")])
def test_each_maker_s_matrix_instructions_give_the_flops(arch, instruction, tmp_path):
    path = tmp_path / "tables.json"
    done = run("05_inspect_ir.py", "--arch", arch, "--kernel", "matmul_kernel", "--json", str(path))
    assert done.returncode == 0, done.stderr
    rows = [row for row in json.loads(path.read_text())["tables"]["loop"]["rows"]
            if row["dtype"] == "bf16" and row["instruction"].startswith(instruction)]
    assert rows and all(row["ratio"] == 1 for row in rows if row.get("ratio"))


def test_arch_89_stages(arch_89):
    assert only(arch_89["stages"], "lines", kernel="matmul_kernel", stage="ttir") == 210


@pytest.mark.parametrize("text", [
    "ld.global.v4.b32", "sizePerThread = [4]", "versionMajor = 2", "warpsPerCTA = [2, 2]", "instrShape = [16, 8]",
    "vec = 8, perPhase = 2, maxPhase = 4", "3x128x32x", "3x32x128x"])
def test_arch_89_layouts(arch_89, text):
    assert text in json.dumps(arch_89["layouts"])


def test_arch_89_loop(arch_89):
    assert only(arch_89["loop"], "count", kernel="matmul_kernel", dtype="bf16", instruction="mma.sync") == 64


@pytest.mark.parametrize("n_cols, num_warps, spills", [(65_536, 16, 26), (131_072, 16, 472), (131_072, 32, 174)])
def test_arch_89_spills(arch_89, n_cols, num_warps, spills):
    assert only(arch_89["resources"], "spills", kernel="softmax_kernel", dtype="bf16", n_cols=n_cols,
                num_warps=num_warps) == spills


def test_arch_89_shared_memory(arch_89):
    assert 49_152 in {row.get("shared_bytes") for row in arch_89["resources"] if row["kernel"] == "matmul_kernel"}
