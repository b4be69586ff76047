"""Does a 30-line matmul reach cuBLAS, and what is FP32 on tensor cores?

S1's matmul on tensor cores, grouped and autotuned; S2 says that a library should be used instead. Run it:

    python 03_matmul.py                    every table
    python 03_matmul.py --n 8192           one size against cuBLAS, BF16 and FP16; any n, in elements a side
    python 03_matmul.py --dtype fp32       every way to multiply FP32, at --n or 4,096
    python 03_matmul.py --quick            a smoke run

The answer is the column `ratio` of the table `vs_cublas`; `grouping` shows what the order of the programs is worth,
and `fp32_precision` what each way of multiplying FP32 costs and how exact it is.
"""
import contextlib
import functools
import sys
from functools import partial

import torch

import common  # before triton: it chooses the interpreter where there is no GPU
import triton
import triton.language as tl


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K,
                  stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                  GROUP_M: tl.constexpr, PRECISION: tl.constexpr,
                  RAGGED: tl.constexpr = False, WIDE: tl.constexpr = False):
    if WIDE:                                             # some offset, or a size and its tile's overhang, passes 2^31
        M, N, K = tl.cast(M, tl.int64), tl.cast(N, tl.int64), tl.cast(K, tl.int64)
    # Which output tile is this program's? Grouped ordering: walk GROUP_M tile-rows at a time.
    pid = tl.program_id(0)
    num_pid_m = tl.cdiv(M, BLOCK_M)
    num_pid_n = tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP_M * num_pid_n)
    first_m = group * GROUP_M
    group_m = min(num_pid_m - first_m, GROUP_M)
    pid_m = first_m + (pid % (GROUP_M * num_pid_n)) % group_m
    pid_n = (pid % (GROUP_M * num_pid_n)) // group_m

    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    step = BLOCK_K
    if WIDE:                                             # rm and rn are 64-bit since M and N are
        rk = rk.to(tl.int64)
        step = tl.full((), BLOCK_K, tl.int64)
    a_ptrs = a_ptr + rm[:, None] * stride_am + rk[None, :] * stride_ak    # BLOCK_M x BLOCK_K tile of A
    b_ptrs = b_ptr + rk[:, None] * stride_bk + rn[None, :] * stride_bn    # BLOCK_K x BLOCK_N tile of B
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        a_mask = rk[None, :] < K - k * BLOCK_K
        b_mask = rk[:, None] < K - k * BLOCK_K
        if RAGGED:                                       # M or N is no multiple of the tile
            a_mask = a_mask & (rm[:, None] < M)
            b_mask = b_mask & (rn[None, :] < N)
        a = tl.load(a_ptrs, mask=a_mask, other=0.0)
        b = tl.load(b_ptrs, mask=b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)              # tensor cores
        a_ptrs += step * stride_ak
        b_ptrs += step * stride_bk
    c_ptrs = c_ptr + rm[:, None] * stride_cm + rn[None, :] * stride_cn
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(rm[:, None] < M) & (rn[None, :] < N))


# ---------------------------------------------------------------- configs

def cfg(bm, bn, bk, stages, warps, g=8):
    return triton.Config({"BLOCK_M": bm, "BLOCK_N": bn, "BLOCK_K": bk, "GROUP_M": g}, num_stages=stages,
                         num_warps=warps)


# By bytes an element, from small tiles (a small product has programs for all SMs only with those) to the largest,
# whose operands are read from L2 the least often. 4 stages of 128 x 256 x 64 fit in Hopper's 227 KB and Ampere's 163;
# with 16 rows in a group, the 132 tiles that an H200 works on at once need the fewest rows and columns. Where they do
# not fit, half as deep ones stand in; where they do, a search, whose windows end before the power limit is felt, would
# pick those at times, which are slower in the long run.
DEEP, SHALLOW = cfg(128, 256, 64, 4, 8, g=16), cfg(128, 256, 32, 4, 8)
CONFIGS = {2: [cfg(64, 32, 128, 4, 4), cfg(64, 64, 64, 4, 4), cfg(64, 128, 64, 4, 4), cfg(128, 64, 64, 4, 4),
               cfg(128, 128, 32, 4, 4), cfg(128, 128, 64, 3, 8), SHALLOW, DEEP],
           4: [cfg(32, 32, 32, 3, 4), cfg(64, 64, 32, 3, 4), cfg(64, 128, 16, 4, 8), cfg(128, 64, 32, 3, 4),
               cfg(128, 128, 32, 3, 8), cfg(128, 256, 32, 3, 8)]}
ANY = cfg(32, 32, 32, 3, 4)  # runs everywhere, with every dtype: what the interpreter takes, which cannot be tuned
ARTICLE = cfg(128, 128, 32, 4, 4)  # S1's, for its grouping experiment and its compiler output
PRECISIONS = ("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6")
UNITS = {"tf32": "tf32", "tf32x3": "tf32", "ieee": "fp32", "bf16x3": "bf16", "bf16x6": "bf16"}  # what does the work
SIZES, GROUPING = (512, 1024, 2048, 4096, 8192, 16384), (4096, 8192)


def config_name(config):
    """ "128x128x32 s4 w4 g8": BLOCK_M x BLOCK_N x BLOCK_K, num_stages, num_warps, GROUP_M."""
    tile = "x".join(str(config.kwargs[f"BLOCK_{axis}"]) for axis in "MNK")
    return f"{tile} s{config.num_stages} w{config.num_warps} g{config.kwargs['GROUP_M']}"


def shared_bytes(config, element_size, cc):
    """Least shared memory of a config: one A and one B tile a slice in flight. wgmma (cc 9.0 and newer) reads the
    slice in hand from shared memory, too; mma.sync takes it from registers, so there it is one slice less."""
    block_m, block_n, block_k = (config.kwargs[f"BLOCK_{axis}"] for axis in "MNK")
    return (config.num_stages - (cc < 9)) * (block_m + block_n) * block_k * element_size


def fitting(configs, named_args, **_):
    """prune_configs_by for the autotuner: the configs for these operands' element size that fit in shared memory."""
    a = named_args["a_ptr"]
    limit = triton.runtime.driver.active.utils.get_device_properties(a.device.index)["max_shared_mem"]
    cc = torch.cuda.get_device_capability(a.device)[0]
    size = a.element_size()
    fit = [config for config in CONFIGS[size] if shared_bytes(config, size, cc) <= limit]
    return [config for config in fit if config is not SHALLOW or DEEP not in fit]


def ragged(args):
    """RAGGED follows from the tile, which the autotuner chooses: so it is a heuristic under it, not an argument."""
    return args["M"] % args["BLOCK_M"] > 0 or args["N"] % args["BLOCK_N"] > 0


@functools.cache
def tuned(device):
    """The kernel under the autotuner, whose cache knows no devices: so one for each."""
    return triton.autotune(configs=CONFIGS[2] + CONFIGS[4], key=["M", "N", "K", "PRECISION"],
                           prune_configs_by={"early_config_prune": fitting})(
        triton.heuristics({"RAGGED": ragged})(matmul_kernel))


found = {}     # what a search found, by shape, precision, element size and device: later calls skip the autotuner
launched = {}  # launch()'s CompiledKernels, by kernel and `like`


# ---------------------------------------------------------------- launchers

def matmul(a, b, precision="tf32", out=None, config=None):
    """a @ b on tensor cores, accumulated in FP32.

    a: (M, K), b: (K, N), any strides and sizes, also 0, both bf16, fp16 or fp32, on one CUDA device (CPU under the
    interpreter). precision: how FP32 is multiplied, one of PRECISIONS (ignored for bf16 and fp16). out: (M, N) of the
    same dtype and device, any strides without overlap (an operand that it overlaps is copied first); without it, a new
    tensor. config: a triton.Config to run; without it the fastest of CONFIGS, found by a search at the first call with
    each M, N, K, precision and element size. No CUDA graph can capture a search, or the first launch with some sizes,
    dtypes and strides. Forward only; the split precisions ("tf32x3", "bf16x3", "bf16x6") make NaN of infinities. Raises
    TypeError on dtypes and configs, ValueError on shapes, devices and precisions that do not fit, RuntimeError where a
    gradient would be lost or one of these captured.
    """
    a, b, out = checked(a, b, precision, out)
    if config is not None and not (isinstance(config, triton.Config) and config.kwargs.keys() == ANY.kwargs.keys()):
        raise TypeError(f"matmul: config is {config!r}; it must be None or a triton.Config of {', '.join(ANY.kwargs)}")
    (m, k), n = a.shape, b.shape[1]
    if m == 0 or n == 0:
        return out
    args = (a, b, out, m, n, k, *a.stride(), *b.stride(), *out.stride())
    switches = {"PRECISION": precision if a.dtype == torch.float32 else "ieee",
                "WIDE": max(reach(a), reach(b), reach(out)) >= 2**31}
    key = m, n, k, switches["PRECISION"], a.element_size(), a.device  # bf16's and fp16's fastest are the same
    config = config or (ANY if common.INTERPRETED else found.get(key))
    with torch.cuda.device_of(a):  # Triton launches on the current device
        if config is None:
            not_captured(f"search at {m} x {n} x {k}")
            search = tuned(a.device)
            search[lambda meta: programs(m, n, meta)](*args, **switches)
            config = found[key] = search.best_config
        # After a search, too: the autotuner keeps its CompiledKernel, and a graph's capture may follow.
        switches["RAGGED"] = ragged({"M": m, "N": n, **config.kwargs})
        own = config.all_kwargs()
        like = key, a.dtype, *own.items(), args[6:], switches["WIDE"], *(x.data_ptr() % 16 for x in args[:3])
        keywords = dict(zip(matmul_kernel.arg_names, args)) | own | switches
        matmul.kernel = launch(matmul_kernel, programs(m, n, config.kwargs), keywords, like)
    matmul.config = config
    return out


def launch(kernel, grid, keywords, like):
    """kernel[grid](**keywords); its CompiledKernel. like: all that Triton compiles anew for, as dtypes, constants, and
    which sizes, strides and pointers 16 divides. A launch like one before goes past Triton's look-up of the compiled
    kernel, 20 us of the host's time."""
    if common.INTERPRETED:
        return kernel[grid](**keywords)
    if (kernel, like) in launched:
        launched[kernel, like][(*grid, 1, 1)[:3]](*(keywords[name] for name in kernel.arg_names))
    else:
        not_captured("first launch for these sizes, dtypes and strides")
        launched[kernel, like] = kernel[grid](**keywords)
    return launched[kernel, like]


def checked(a, b, precision, out):
    """(a, b, out) as matmul multiplies them, out made and what it overlaps copied; or matmul's errors."""
    common.operands("matmul", common.DTYPES.values(), a=a, b=b, out=a if out is None else out)
    for name, x in ("a", a), ("b", b):
        if x.dim() != 2:
            raise ValueError(f"matmul: {name} has {x.dim()} dimensions; it must be a matrix")
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise ValueError(f"matmul: precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"matmul: a is {tuple(a.shape)} and b is {tuple(b.shape)}; a's columns must be b's rows")
    shape = a.shape[0], b.shape[1]
    if out is None:
        return a, b, torch.empty(shape, dtype=a.dtype, device=a.device)
    common.writable("matmul", out, shape)
    return *(common.apart(x, out, elementwise=False) for x in (a, b)), out


def not_captured(what):
    """Raise RuntimeError in a CUDA graph's capture: nothing can be timed there, and no kernel loaded."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"matmul: the {what} cannot be captured in a CUDA graph; call matmul once before")


def programs(m, n, meta):
    return (common.cdiv(m, meta["BLOCK_M"]) * common.cdiv(n, meta["BLOCK_N"]),)


def reach(x):
    """The largest offset that a program computes, its tile's overhang included: past 2^31 it needs 64 bits."""
    (rows, columns), (down, right) = x.shape, x.stride()
    return (rows + 255) * max(down, 1) + (columns + 255) * max(right, 1)


@contextlib.contextmanager
def cublas_fp32(mode):
    """torch.matmul multiplies FP32 as "ieee" or "tf32" inside; afterwards as before, whichever of PyTorch's two
    interfaces had set it."""
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = mode
    try:
        yield
    finally:
        setting.fp32_precision = before


def cublas(a, b, out, mode="ieee"):
    with cublas_fp32(mode):
        return torch.matmul(a, b, out=out)


def tile_loads(num_pid_m, num_pid_n, num_k, group_m, programs):
    """Input tiles that the first `programs` programs need in matmul_kernel's order, each counted once (S1: in a grid
    of 9 x 9 tiles with K of 9, the first 9 programs need 90 in row order, group_m = 1, and 54 with group_m = 3)."""
    rows, columns = set(), set()
    for pid in range(programs):
        first_m = pid // (group_m * num_pid_n) * group_m
        height = min(num_pid_m - first_m, group_m)
        rows.add(first_m + pid % (group_m * num_pid_n) % height)
        columns.add(pid % (group_m * num_pid_n) // height)
    return (len(rows) + len(columns)) * num_k


# ---------------------------------------------------------------- proof

# An operand's relative rounding (the parts that "tf32x3", "bf16x3" and "bf16x6" leave out count as such).
ROUNDING = {"tf32": 2**-10, "tf32x3": 2**-20, "ieee": 0, "bf16x3": 2**-14, "bf16x6": 2**-20}


def framed(x, pad=3):
    """The same matrix as a view into NaN: whatever is read beyond its edge shows."""
    room = torch.full((x.shape[0] + pad, x.shape[1] + pad), float("nan"), dtype=x.dtype, device=x.device)
    return room[:x.shape[0], :x.shape[1]].copy_(x)


def verify(a, b, precision="tf32", config=None, call=None, pad=3):
    """matmul (or call, with its arguments) against float64 on an output of NaN, nothing written beside it: between its
    rows are `pad` columns. The tolerance for randn: operands rounded, summed over K as a random walk; a partial sum, up
    to 5 sqrt(K), truncated by tensor cores after each of 3K/8 instructions ("tf32x3" and "bf16x6"; others take fewer).
    """
    m, n, k = a.shape[0], b.shape[1], a.shape[1]
    room = torch.full((m + 2, n + pad), float("nan"), dtype=a.dtype, device=a.device)
    out = room[1:m + 1, :n]
    (call or matmul)(a, b, precision, out, config)
    unit = ROUNDING[precision] if a.dtype == torch.float32 else 0
    what = f"matmul {m} x {n} x {k}, {a.dtype}, {precision}, {config}"
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=torch.finfo(a.dtype).eps + 2 * unit,
                               atol=16 * unit * k**0.5 + 2**-22 * k**1.5 + 2**-24, msg=lambda text: f"{what}: {text}")
    assert room.isnan().sum() == room.numel() - m * n, f"{what} wrote outside of its output"


def check(report):
    """Every path against float64 before anything is timed: each config, ragged and aligned, each precision."""
    print(f"[{report.name}] check", file=sys.stderr, flush=True)

    def randn(*shape, dtype):
        return torch.randn(*shape, device=common.device()).to(dtype)
    checks, searches = [], []
    names = common.DTYPES if report.gpu else ("fp16", "fp32")  # no interpreter runs bf16
    dtypes = [common.DTYPES[name] for name in names]
    for dtype in dtypes:
        for m, n, k in ((1, 1, 1), (5, 7, 0), (0, 5, 3), (1, 300, 70), (300, 1, 70), (33, 65, 17), (321, 130, 100)):
            a, b = randn(m, k, dtype=dtype), randn(k, n, dtype=dtype)
            checks.append(partial(verify, framed(a), framed(b), config=ANY))
        a, b = randn(70, 90, dtype=dtype), randn(90, 50, dtype=dtype)
        for x, y in ((b.t(), a.t()), (a[:, ::2], b[::2]), (a[3:, 1:], b[1:, 2:]), (a[:1].expand(20, 90), b)):
            checks.append(partial(verify, x, y, config=ANY))
    if report.gpu and torch.cuda.mem_get_info()[0] > 8 * 2**30:  # the 33rd slice of K begins past 2^31
        far = torch.empty_strided((48, 64), (2**31 // 40, 1), dtype=torch.float16, device="cuda")
        far.copy_(torch.randn(48, 64))
        checks += [partial(verify, far, randn(64, 20, dtype=far.dtype), config=ANY),
                   partial(verify, randn(20, 48, dtype=far.dtype), far, config=ANY)]
    for dtype in dtypes if report.gpu else ():
        a, b = randn(512, 384, dtype=dtype), randn(384, 768, dtype=dtype)
        for config in fitting(None, {"a_ptr": a}):
            checks += [partial(verify, a, b, precision, config, pad=16)  # the tables' alignment: their searches compile
                       for precision in (PRECISIONS if dtype == torch.float32 and not report.args.quick else ["tf32"])]
            checks.append(partial(verify, framed(a[:300, :200]), framed(b[:200, :500]), config=config))
        searches.append(partial(verify, a, b))
    common.side_by_side(checks)
    for search in searches:                                  # an autotuner is for one thread; its kernels are compiled
        search()


def rel_error(out, a, b):
    """Largest difference from a float64 product over its largest entry; above 4,096 rows, of every eighth row."""
    step = 8 if a.shape[0] > 4096 else 1
    rows, largest, difference = a[::step].double(), 0.0, 0.0
    for columns in torch.arange(b.shape[1], device=b.device).split(2048):
        reference = rows @ b[:, columns].double()
        wrong = (out[::step, columns].double() - reference).abs().max().item()
        difference, largest = max(difference, wrong), max(largest, reference.abs().max().item())
    return difference / largest


def proven(name, call, a, b, out, limit):
    """The rel_error of one provider on a poisoned output; ends the run where it is no rounding."""
    call(a, b, out=out.fill_(float("nan")))
    error = rel_error(out, a, b)
    if not error <= limit:  # NaN fails, too
        raise AssertionError(f"{name}: an error of {error:.2e} of the largest entry at {tuple(a.shape)}, {a.dtype}")
    return error


# ---------------------------------------------------------------- tables

def square(n, dtype):
    """Two random n x n matrices and a result to write."""
    a, b = (torch.randn(n, n, dtype=common.DTYPES[dtype], device="cuda") for _ in range(2))
    return a, b, torch.empty_like(a)


def case(n, dtype):
    return {"n": n, "m": n, "k": n, "dtype": dtype}


def need(n, itemsize):
    """GPU memory of a square product in bytes: the matrices, and rel_error's float64 parts."""
    return 3 * n * n * itemsize + 8 * 2048 * (n + min(n, 4096)) + 8 * n * min(n, 4096) + 2**28


def vs_cublas(report, sizes, dtypes):
    with report.table("vs_cublas", "square matmul against cuBLAS", baseline="cublas",
                      cases=len(sizes) * len(dtypes)) as table:
        for n in sizes:
            if need(n, 2) > torch.cuda.mem_get_info()[0]:
                table.note(f"{n:,} is left out: it needs {need(n, 2):,} bytes of GPU memory.")
                continue
            for dtype in dtypes:
                a, b, out = square(n, dtype)
                limit = 2 * torch.finfo(a.dtype).eps
                providers = {"triton": matmul, "cublas": cublas}
                extra = {name: {"rel_error": proven(name, call, a, b, out, limit)} for name, call in providers.items()}
                extra["triton"] |= {"config": config_name(matmul.config), "regs": matmul.kernel.n_regs,
                                    "spills": matmul.kernel.n_spills}
                table.time(case(n, dtype), {name: partial(call, a, b, out=out) for name, call in providers.items()},
                           extra, flops=2 * n**3, unit=dtype, burst=n >= 2048)  # n^2 sums of n products
                del a, b, out
        table.note("Both round the same FP32 sums to the output's dtype, which is most of rel_error "
                   "(above 4,096: over every eighth row).")
        table.note("burst: the first 50 ms after 250 ms of rest, from 2,048 up; ms is the settled state, where "
                   "the power limit has brought the clock down. launch_us: what a call takes the host, below 100 us.")


def cycles(row):
    if row["sm_mhz"]:
        row["mcycles"] = row["ms"] * row["sm_mhz"] / 1000


def grouping(report, sizes):
    with report.table("grouping", "the order of the programs: rows of tiles, and groups of 8", derive=cycles,
                      cases=len(sizes)) as table:
        for n in sizes:
            a, b, out = square(n, "bf16")
            orders = {str(group_m): cfg(128, 128, 32, 4, 4, group_m) for group_m in (1, 8)}
            for name, config in orders.items():
                proven(f"GROUP_M = {name}", partial(matmul, config=config), a, b, out, 2**-7)
            table.time(case(n, "bf16"), {
                name: partial(matmul, a, b, out=out, config=config) for name, config in orders.items()}, {
                name: {"provider": "triton", "group_m": int(name), "config": config_name(config)}
                for name, config in orders.items()}, flops=2 * n**3, unit="bf16")
        table.note("mcycles: ms x SM clock, in millions. Where both orders take the same cycles but not the same time, "
                   "the power that DRAM drew came out of the SMs' clock. `make ncu` counts the DRAM bytes.")
        table.note(f"In a grid of 9 x 9 tiles the first 9 programs need {tile_loads(9, 9, 9, 1, 9)} input tiles in row "
                   f"order and {tile_loads(9, 9, 9, 3, 9)} in groups of 3.")


def fp32_precision(report, n):
    with report.table("fp32_precision", "FP32 operands: what each precision costs, and gives",
                      baseline="cublas ieee") as table:
        a, b, out = square(n, "fp32")
        start, setting = torch.matmul(a, b), torch.backends.cuda.matmul.fp32_precision  # read, not assumed
        for mode in ("ieee", "tf32"):
            if torch.equal(start, cublas(a, b, out, mode)):
                table.note(f"torch.matmul, as PyTorch is set in this run, multiplies FP32 as \"{mode}\" "
                           f"(torch.backends.cuda.matmul.fp32_precision = {setting!r}).")
                break
        providers, extra = {}, {}
        for precision in PRECISIONS:
            error = proven(precision, partial(matmul, precision=precision), a, b, out, 2**-9)
            providers[precision] = partial(matmul, a, b, precision, out)
            extra[precision] = {"provider": "triton", "precision": precision, "unit": UNITS[precision],
                                "config": config_name(matmul.config), "rel_error": error,
                                "baseline": "cublas tf32" if precision == "tf32" else "cublas ieee"}
        for mode in ("ieee", "tf32"):
            name = f"cublas {mode}"
            error = proven(name, partial(cublas, mode=mode), a, b, out, 2**-9)
            providers[name] = partial(cublas, a, b, out, mode)
            extra[name] = {"provider": "cublas", "precision": mode, "unit": UNITS[mode], "rel_error": error,
                           "baseline": name}
        table.time(case(n, "fp32"), providers, extra, flops=2 * n**3)
        table.note("ratio: \"tf32\" over cuBLAS's TF32, all others over cuBLAS's FP32 (\"ieee\"). pct_peak is of the "
                   "unit that does the work, for 2MNK useful FLOPs: TF32 for \"tf32\" and \"tf32x3\", BF16 for "
                   "\"bf16x3\" and \"bf16x6\", which multiply 3, 3 and 6 times, FP32 for \"ieee\".")


def data(report, n):
    with report.table("data", "the same product of other numbers: why only random ones are timed") as table:
        out = torch.empty(n, n, dtype=torch.bfloat16, device="cuda")
        inputs = {"random normal": square(n, "bf16")[:2], "zeros": [torch.zeros_like(out)] * 2,
                  "integers from -2 to 2": [torch.randint(-2, 3, (n, n), device="cuda").bfloat16() for _ in range(2)]}
        ms = {}
        for name, (a, b) in inputs.items():  # one after the other: each brings the GPU to its own power and clock
            rows = table.time(case(n, "bf16") | {"case": name}, {"triton": partial(matmul, a, b, out=out)},
                              flops=2 * n**3, unit="bf16")
            ms[name] = rows["triton"]["ms"]
        less = 100 * (1 - ms["zeros"] / ms["random normal"])
        table.note(f"Bits that do not change draw no power: zeros take {less:.0f}% less time than random numbers.")


def main():
    p = common.parser(__doc__)
    p.add_argument("--n", type=common.whole(1), help="rows and columns of each matrix; alone, the table `vs_cublas`")
    p.add_argument("--dtype", choices=common.DTYPES, help="bf16, fp16: `vs_cublas` alone; fp32: `fp32_precision` alone")
    report = common.start(p, narrowing=("n", "dtype"))
    args = report.args
    if report.gpu is None:
        check(report)
        print("matmul() agrees with float64 at small sizes, in fp16 and fp32. The interpreter has no bf16, \"bf16x3\" "
              "or \"bf16x6\", and computes \"tf32\" as fp32: 05_inspect_ir.py compiles those.")
        return
    if args.n:
        report.need(need(args.n, 4 if args.dtype == "fp32" else 2), f"--n {args.n}")
    check(report)
    if args.check:
        return print(common.CHECKED)
    if args.dtype != "fp32":
        sizes = [args.n] if args.n else SIZES[:2] + SIZES[3:4] if args.quick else SIZES
        vs_cublas(report, sizes, [args.dtype] if args.dtype else ["bf16", "fp16"])
    if not args.n and not args.dtype:
        grouping(report, GROUPING)
        data(report, 8192)
    if args.dtype == "fp32" or not args.n and not args.dtype:
        fp32_precision(report, args.n or 4096)
    report.finish()


if __name__ == "__main__":
    common.run(main)
