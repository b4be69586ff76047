"""What does a matmul need to be as fast as cuBLAS on Hopper?

What 03's kernel leaves out: programs that stay on their SM and walk over output tiles, and tiles that the tensor memory
accelerator (TMA) copies (`persistent_kernel`, "tma"); then a warp that does nothing but ask for them, beside two
warpgroups that multiply (`specialized_kernel`, "ws", in Gluon, in specialized.py); several programs a tile where there
are few tiles (split K: `reduce_kernel`, and `narrow_kernel` for up to 16 rows). Needs compute capability 9.0. Run it:

    python 07_persistent_matmul.py               the table
    python 07_persistent_matmul.py --n 8192      one size, BF16 and FP16; any n, in elements a side
    python 07_persistent_matmul.py --dtype bf16  one dtype
    python 07_persistent_matmul.py --quick       a smoke run

The answer is the column `ratio` of the rows `triton`, beside "triton/pointers", which is 03's matmul, and "triton/tma".
"""
import functools
import importlib
import sys
from functools import partial
from typing import NamedTuple

import torch

import common  # before triton: it chooses the interpreter where there is no GPU
import offline
import triton
import triton.language as tl
from specialized import SIZES, _tile, specialized_kernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

product, tuning = map(importlib.import_module, ("03_matmul", "04_autotune"))


# ---------------------------------------------------------------- tiles by TMA, programs that stay

@triton.jit(do_not_specialize=SIZES)
def persistent_kernel(a_desc, b_desc, c_desc, M, N, K,
                      BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
                      SPLIT_K: tl.constexpr, B_T: tl.constexpr, HALVES: tl.constexpr):
    """C = A B, a program an SM. B is K by N, or (B_T) N by K; C is SPLIT_K times M, rounded up to whole tiles, by N.
    No masks: what TMA reads outside of a matrix is zero, and what it would write there is left out, but for the rest
    of the 16 bytes in which a row ends (`tma_fills`)."""
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    k_tiles = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    for unit in range(tl.program_id(0), tiles * SPLIT_K, tl.num_programs(0)):
        row, col = _tile(unit % tiles, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        first = unit // tiles * k_tiles
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(first, first + k_tiles):
            a = a_desc.load([row, k * BLOCK_K])
            b = b_desc.load([col, k * BLOCK_K]).T if B_T else b_desc.load([k * BLOCK_K, col])
            acc = tl.dot(a, b, acc)
        row += unit // tiles * tl.cdiv(M, BLOCK_M) * BLOCK_M
        if HALVES:  # the store of one half overlaps with the conversion of the other
            left, right = acc.reshape((BLOCK_M, 2, BLOCK_N // 2)).permute((0, 2, 1)).split()
            c_desc.store([row, col], left.to(c_desc.dtype))
            c_desc.store([row, col + BLOCK_N // 2], right.to(c_desc.dtype))
        else:
            c_desc.store([row, col], acc.to(c_desc.dtype))


@triton.jit
def reduce_kernel(parts_ptr, out_ptr, N, part_rows, stride_row, stride_out, SPLIT_K: tl.constexpr,
                  BLOCK: tl.constexpr):
    """The sum of SPLIT_K matrices of N columns that lie below each other, part_rows rows each."""
    num_n = tl.cdiv(N, BLOCK)
    row = (tl.program_id(0) // num_n).to(tl.int64)
    cols = tl.program_id(0) % num_n * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLIT_K):
        acc += tl.load(parts_ptr + (row + part * part_rows) * stride_row + cols, mask=cols < N, other=0.0)
    tl.store(out_ptr + row * stride_out + cols, acc.to(out_ptr.dtype.element_ty), mask=cols < N)


@triton.jit(do_not_specialize=SIZES)
def narrow_kernel(a_desc, b_desc, parts_ptr, counts_ptr, out_ptr, M, N, K, stride_out,
                  BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
                  STAGES: tl.constexpr, SWAP: tl.constexpr):
    """Up to BLOCK_M rows of A against all of B, which is read once: SPLIT_K programs a tile of columns, the last of
    which to arrive adds up what they found, in the same order whoever it is."""
    part, col = tl.program_id(1), tl.program_id(0) * BLOCK_N
    k_tiles = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(part * k_tiles, part * k_tiles + k_tiles, num_stages=STAGES):
        a, b = a_desc.load([0, k * BLOCK_K]), b_desc.load([k * BLOCK_K, col])
        acc = tl.dot(b.T, a.T, acc) if SWAP else tl.dot(a, b, acc)  # wgmma wants 64 rows, and has them in B's columns
    if SWAP:
        acc = acc.T
    rows, cols = tl.arange(0, BLOCK_M)[:, None].to(tl.int64), col + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (cols < N)
    if SPLIT_K > 1:
        tl.store(parts_ptr + (part * M + rows) * N + cols, acc, mask=mask)
        tl.debug_barrier()  # every thread's store comes before the count
        if tl.atomic_add(counts_ptr + tl.program_id(0), 1, sem="acq_rel") == SPLIT_K - 1:
            tl.debug_barrier()
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for other in tl.static_range(SPLIT_K):
                acc += tl.load(parts_ptr + (other * M + rows) * N + cols, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(out_ptr + rows * stride_out + cols, acc.to(out_ptr.dtype.element_ty), mask=mask)
            tl.atomic_xchg(counts_ptr + tl.program_id(0), 0)  # ready for the next launch
    else:
        tl.store(out_ptr + rows * stride_out + cols, acc.to(out_ptr.dtype.element_ty), mask=mask)


# ---------------------------------------------------------------- launchers

class Config(NamedTuple):
    kernel: str      # "ws": specialized_kernel; "tma": persistent_kernel; "narrow", "narrow/t" (SWAP): narrow_kernel
    block_m: int
    block_n: int
    block_k: int
    stages: int
    split: int = 1   # programs that share a tile's K
    group: int = 8   # rows of tiles that are walked together
    warps: int = 8   # of "tma" and "narrow"

    def __str__(self):
        """ "ws 128x256x64 s4 k2 g8": kernel, BLOCK_M x BLOCK_N x BLOCK_K, stages, SPLIT_K where above 1, GROUP_M."""
        return (f"{self.kernel} {self.block_m}x{self.block_n}x{self.block_k} s{self.stages}"
                + f" k{self.split}" * (self.split > 1) + f" w{self.warps}" * (self.kernel != "ws") + f" g{self.group}")


def candidates(m, n, k, sms):
    """The Configs worth timing for a product, by how many tiles of 128 x 256 it has for how many SMs."""
    def filling(bm, bn, programs=sms):  # programs a tile, so that all SMs have work
        return max(1, min(16, programs // (common.cdiv(m, bm) * common.cdiv(n, bn)), k // 256))
    tiles = common.cdiv(m, 128) * common.cdiv(n, 256)
    if m <= 16:
        return [*(Config(kernel, 16, 64, bk, stages, filling(16, 64, programs), warps=4)
                  for kernel, bk, stages, programs in (
                      ("narrow", 128, 5, 2 * sms), ("narrow/t", 128, 5, 2 * sms), ("narrow", 256, 3, 2 * sms),
                      ("narrow/t", 128, 10, sms), ("narrow", 128, 10, sms))), Config("tma", 64, 64, 128, 4)]
    if 10 * tiles >= 9 * sms:
        # not "ws" of 256 x 128: it won searches on an H200 and lost 3% to "tma" over a second, at the power limit
        return [Config("ws", 128, 256, 64, 4), Config("ws", 128, 256, 64, 4, group=16), Config("tma", 128, 256, 64, 4)]
    if k >= 4096:
        return [Config("ws", 128, 256, 64, 4, filling(128, 256)), Config("ws", 128, 128, 64, 5, filling(128, 128)),
                Config("ws", 256, 128, 64, 3, filling(256, 128)), Config("tma", 128, 256, 64, 3, filling(128, 256))]
    if m * n > 2**19:
        return [Config("ws", 128, 64, 128, 4), Config("ws", 64, 128, 128, 4), Config("ws", 128, 128, 64, 5),
                Config("tma", 128, 64, 128, 4, warps=4), Config("tma", 64, 128, 128, 4, warps=4)]
    return [Config("tma", 64, 32, 128, 4, warps=4), Config("tma", 64, 64, 128, 4, warps=4),
            Config("ws", 64, 32, 128, 4)]


GL_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
counts = {}  # narrow_kernel's counters, zero between launches, by device and stream
found = {}   # candidates() from the fastest on, by sizes, B's order and device


@functools.cache
def shared_layout(block, dtype):
    return gl.NVMMASharedLayout.get_default_for(list(block), GL_DTYPES[dtype])


def descriptor(x, block, for_gluon):
    args = x, list(x.shape), list(x.stride()), block
    return GluonDescriptor(*args, shared_layout(tuple(block), x.dtype)) if for_gluon else TensorDescriptor(*args)


def counters(size, device):
    """So many zeros, which a launch leaves as zeros; a CUDA graph, which may run beside others, has its own."""
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        key = device, torch.cuda.current_stream(device).cuda_stream
        if key not in counts or len(counts[key]) < size:
            counts[key] = torch.zeros(size, dtype=torch.int32, device=device)
        return counts[key]
    return torch.zeros(size, dtype=torch.int32, device=device)


def launches(config, a, b, out, b_t=False, parts=1, sms=132, fresh=False, batch=1):
    """What a product needs: [(kernel, grid, keywords)]. b_t: b.t() is what TMA can copy. parts: a and b.t() are so many
    matrices of M and N rows below each other, whose sums are multiplied. sms: programs that stay. fresh: "ws" adds up
    in FP32 what tensor cores sum over BLOCK_K, not over K. batch: above 1, "ws" rounds FP32 A to TF32, so many k
    tiles at once."""
    (m, n), k, (kind, bm, bn, bk, stages, split, group, warps) = out.shape, a.shape[1], config
    units = common.cdiv(m, bm) * common.cdiv(n, bn)
    sizes = {"M": m, "N": n, "K": k, "SPLIT_K": split}
    if kind.startswith("narrow"):
        scratch = torch.empty(split * m * n if split > 1 else 1, dtype=torch.float32, device=out.device)
        return [(narrow_kernel, (units, split), sizes | {
            "a_desc": descriptor(a, [bm, bk], False), "b_desc": descriptor(b, [bk, bn], False), "parts_ptr": scratch,
            "counts_ptr": counters(units, out.device), "out_ptr": out, "stride_out": out.stride(0), "BLOCK_M": bm,
            "BLOCK_N": bn, "BLOCK_K": bk, "STAGES": stages, "SWAP": kind == "narrow/t", "num_warps": warps})]
    ws, target, part_rows = kind == "ws", out, common.cdiv(m, bm) * bm
    if split > 1:
        target = torch.empty((split * part_rows, common.cdiv(n, 4) * 4), dtype=torch.float32,
                             device=out.device)[:, :n]
    if ws:
        wgs = 1 if bm == 64 else 2
        own = {"WGS": wgs, "STAGES": stages, "PARTS": parts, "FRESH": fresh, "BATCH": batch, "num_warps": 4}
        a_block, c_block = [bm // wgs, bk], [bm // wgs, min(bn, 128 // target.element_size())]
    else:
        own = {"BLOCK_M": bm, "BLOCK_N": bn, "BLOCK_K": bk, "HALVES": bn >= 128, "num_warps": warps,
               "num_stages": stages}
        a_block, c_block = [bm, bk], [bm, bn // 2 if bn >= 128 else bn]
    b, b_block = (b.t(), [bn, bk]) if b_t else (b, [bk, bn])
    main = (specialized_kernel if ws else persistent_kernel, (min(sms, units * split),), sizes | own | {
        "a_desc": descriptor(a, a_block, ws), "b_desc": descriptor(b, b_block, ws),
        "c_desc": descriptor(target, c_block, ws), "GROUP_M": group, "B_T": b_t})
    return [main] if split == 1 else [main, (reduce_kernel, (m * common.cdiv(n, 1024),), {
        "parts_ptr": target, "out_ptr": out, "N": n, "part_rows": part_rows, "stride_row": target.stride(0),
        "stride_out": out.stride(0), "SPLIT_K": split, "BLOCK": 1024})]


def run(todo, like=None):
    """Launch them in turn; the first one's CompiledKernel. like: as 03's launch has it."""
    return [product.launch(*one, like) if like else one[0][one[1]](**one[2]) for one in todo][0]


@functools.cache
def sms_of(device):
    """SMs of a GPU that has wgmma, as compute capability 9.0 alone does, else None; without a GPU those of an H200."""
    gpu = None if device.type == "cpu" else torch.cuda.get_device_properties(device)
    return 132 if gpu is None else gpu.multi_processor_count if gpu.major == 9 else None


def tma_takes(*matrices):
    """Whether TMA can copy them: 16-byte aligned rows, without gaps between elements, and none on another."""
    return all(min(x.shape) > 0 and max(x.shape) < 2**30 and x.stride(1) == 1 and x.shape[1] <= x.stride(0) < 2**37
               and x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in matrices)


def tma_fills(out):
    """Whether TMA can also write it, and no element beyond: it writes a row's last 16 bytes whole, wherever in them the
    row ends (seen on an H200, of 2- and 4-byte elements; what it reads there is zero)."""
    return tma_takes(out) and out.shape[1] * out.element_size() % 16 == 0


def search(configs, a, b, out, b_t):
    """The configs from the fastest on, by 04's Search; without the autotuner, which knows one kernel, and no
    descriptors that depend on the config."""
    product.not_captured(f"search at {' x '.join(map(str, (*out.shape, a.shape[1])))}")
    calls = {config: partial(run, launches(config, a, b, out, b_t, sms=sms_of(a.device))) for config in configs}
    torch.cuda.synchronize()  # the threads that compile, where check() did not, launch on the default stream
    common.side_by_side(calls.values())
    torch.cuda.synchronize()
    timing = tuning.Search(None)
    times = {config: timing.bench(call, None)[0] for config, call in calls.items()}
    return sorted(configs, key=times.get)


def persistent_matmul(a, b, out=None, config=None):
    """a @ b for bf16 and fp16, accumulated in FP32: 03's matmul without its precision: the same arguments, errors and
    results otherwise.

    a: (M, K), b: (K, N) or a transposed view of (N, K). It is 03's, persistent_matmul.config then None, for fp32, where
    TMA cannot take a, b or out (a pointer or a row stride that is no multiple of 16 bytes, columns that are not
    adjacent, no elements; rows of out that end at no multiple of 16 bytes) and off compute capability 9.0. config: a
    Config to run; without it the fastest of candidates(), found at the first call with each M, N, K.
    """
    a, b, out = product.checked(a, b, "ieee", out)
    if not isinstance(config, Config | None):
        raise TypeError(f"persistent_matmul: config is {config!r}; it must be None or a Config")
    (m, k), n, sms, b_t = a.shape, b.shape[1], sms_of(a.device), not tma_takes(b)
    if a.dtype == torch.float32 or not sms or not tma_takes(a, b.t() if b_t else b) or not tma_fills(out):
        persistent_matmul.config = None
        return product.matmul(a, b, out=out)
    if config and (config.kernel not in ("ws", "tma", "narrow", "narrow/t") or config.kernel.startswith("narrow") and (
            m > config.block_m or b_t)):
        raise ValueError(f"persistent_matmul: config is {config}; it must be ws, tma or, for up to BLOCK_M rows and b "
                         "with adjacent columns, narrow or narrow/t")
    key = m, n, k, b_t, a.device  # bf16's and fp16's fastest are the same
    with torch.cuda.device_of(a):  # Triton launches on the current device
        if config is None:
            if key not in found:
                some = [one for one in candidates(m, n, k, sms) if not (b_t and one.kernel.startswith("narrow"))]
                found[key] = [one for one in some if one.kernel != "ws"] if common.INTERPRETED else search(
                    some, a, b, out, b_t)
            persistent_matmul.found, config = found[key], found[key][0]
        persistent_matmul.kernel = run(launches(config, a, b, out, b_t, sms=sms), (key, a.dtype, config, out.stride(0)))
    persistent_matmul.config = config
    return out


# ---------------------------------------------------------------- proof

SQUARES = (512, 1024, 2048, 4096, 8192, 16384)
ODD = ((16384, 16384, 1024), (1024, 1024, 16384), (16, 8192, 8192))


def cases():
    """(kernel, keywords) of all that the table's products may launch on 132 SMs, and of one with B transposed."""
    found = {}
    for m, n, k in [(n, n, n) for n in SQUARES] + [*ODD]:
        a, b, out = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((m, k), (k, n), (m, n)))
        for config in candidates(m, n, k, 132):
            for kernel, _, keywords in launches(config, a, b, out):
                found[config, kernel] = kernel, keywords
    return [*found.values(), launches(Config("ws", 128, 256, 64, 4), a, b.t(), out, b_t=True)[0][::2]]


def framed(rows, cols, dtype):
    """A random matrix that TMA takes, a view into NaN: what is read beyond its edge shows."""
    return product.framed(torch.randn(rows, cols, device=common.device()).to(dtype), pad(cols))


def pad(cols):
    return 16 + -cols % 16  # columns between rows, so that strides are multiples of 16, as the tables' are


def verify(config, m, n, k, dtype, b_t=False):
    """One Config on ragged sizes, twice: 3 programs with many tiles each, then all; counters are left as found."""
    a, b = framed(m, k, dtype), framed(n, k, dtype).t() if b_t else framed(k, n, dtype)
    for sms in (3, sms_of(a.device)):
        def call(a, b, precision, out, config):
            run(launches(config, a, b, out, b_t, sms=sms))
        product.verify(a, b, config=config, call=call, pad=pad(n))


def check(report, shapes):
    """Every path on poisoned outputs before anything is timed: on a GPU each Config that the table's searches try, so
    that they compile nothing, and 03's; in the interpreter Triton's kernels with small tiles, while Gluon's are
    compiled."""
    print(f"[{report.name}] check", file=sys.stderr, flush=True)
    checks, dtypes = [], {dtype: None for *_, dtype in shapes} if report.gpu else ["fp16"]  # no interpreter runs bf16
    for dtype in (common.DTYPES[name] for name in dtypes):
        configs = {config: (300, 528, 1111) for config in (          # 16 divides N and no tile's does
            *(config for m, n, k, _ in shapes for config in candidates(m, n, k, report.gpu["sms"])),
            *(Config(kernel, 128, 128, 64, 4, 3) for kernel in ("ws", "tma")))} if report.gpu else {
            Config("tma", 32, 32, 32, 2): (40, 72, 70), Config("tma", 16, 128, 32, 2, 3): (20, 136, 101),
            Config("tma", 32, 32, 32, 2, 2, group=1): (70, 40, 30)}
        for config, (m, n, k) in configs.items():
            narrow = config.kernel.startswith("narrow")
            checks.append(partial(verify, config, 7 if narrow else m, n, k, dtype))
            checks += [partial(verify, config, 129, 200, 72, dtype, True)] * (not narrow and not report.args.quick)
        for split in (1, 3):
            checks += [partial(verify, Config(kernel, 16, 32, 32, 2, split, warps=4), m, 70, 101, dtype)
                       for kernel in ("narrow", "narrow/t") for m in (1, 16)]
        a, b = (torch.randn(512, 512, device=common.device()).to(dtype) for _ in range(2))
        for config in product.fitting(None, {"a_ptr": a}) if report.gpu else ():
            checks.append(partial(product.verify, a, b, config=config, pad=16))
    common.side_by_side(checks)
    if report.gpu is None:
        offline.compile_apart("07_persistent_matmul")


# ---------------------------------------------------------------- the table

def vs_cublas(report, shapes):
    with report.table("vs_cublas", "matmul against cuBLAS", baseline="cublas", cases=len(shapes)) as table:
        for m, n, k, dtype in shapes:
            if product.need(max(m, n, k), 2) > torch.cuda.mem_get_info()[0]:
                table.note(f"{m:,} x {n:,} x {k:,} is left out: there is too little GPU memory.")
                continue
            a, b, out = (torch.randn(*shape, dtype=common.DTYPES[dtype], device="cuda")
                         for shape in ((m, k), (k, n), (m, n)))
            calls = {"triton": persistent_matmul, "triton/pointers": product.matmul, "cublas": product.cublas}
            persistent_matmul(a, b, out)
            if persistent_matmul.config is None:
                table.note(f"No row triton at {m:,} x {n:,} x {k:,}: TMA takes no such rows, so it is 03's matmul.")
                del calls["triton"]
            elif dtype == "fp16":
                del calls["triton/pointers"]
            elif persistent_matmul.config.kernel == "ws" and min(m, n, k) >= 4096:
                tma = next(config for config in persistent_matmul.found if config.kernel == "tma")
                calls["triton/tma"] = partial(persistent_matmul, config=tma)
            extra = {}
            for name, call in calls.items():
                extra[name] = {"rel_error": product.proven(name, call, a, b, out, 2 * torch.finfo(a.dtype).eps)}
                last = product.matmul if name == "triton/pointers" else persistent_matmul
                extra[name] |= {} if name == "cublas" else {
                    "config": str(last.config) if last is persistent_matmul else product.config_name(last.config),
                    "regs": last.kernel.n_regs, "spills": last.kernel.n_spills}
            table.time({"n": n, "m": m, "k": k, "dtype": dtype},
                       {name: partial(call, a, b, out=out) for name, call in calls.items()}, extra,
                       flops=2 * m * n * k, unit=dtype, burst=min(m, n) >= 2048)
            del a, b, out
        table.note("triton: the fastest of candidates(), by a search; triton/tma: of those the fastest that is plain "
                   "Triton, where that is not it, from 4,096 up; triton/pointers: 03's matmul. In FP16 the first and "
                   "cuBLAS alone.")
        table.note("burst: the first 50 ms after 250 ms of rest, from 2,048 up; ms is the settled state. "
                   "launch_us: what a call takes the host, below 100 us.")


def main():
    p = common.parser(__doc__)
    p.add_argument("--n", type=common.whole(1), help="rows and columns of each matrix, in place of the table's sizes")
    p.add_argument("--dtype", choices=("bf16", "fp16"), help="this one alone")
    report = common.start(p, narrowing=("n", "dtype"))
    args = report.args
    if report.gpu and not report.gpu["cc"].startswith("9."):
        print(f"This step needs TMA and wgmma, which compute capability 9.0 has; this GPU has {report.gpu['cc']}.")
        return
    squares = [args.n] if args.n else SQUARES[:2] + SQUARES[3:4] if args.quick else SQUARES
    dtypes = [args.dtype] if args.dtype else ["bf16", "fp16"][:1 if args.quick else 2]
    shapes = [(n, n, n, dtype) for n in squares for dtype in dtypes]
    if not args.n and not args.quick and "bf16" in dtypes:
        shapes += [(*shape, "bf16") for shape in ODD]
    if report.gpu and args.n:
        report.need(product.need(args.n, 2), f"--n {args.n}")
    check(report, shapes)
    if report.gpu is None:
        print("The plain Triton kernels agree with float64 at small sizes, in fp16, in the interpreter.")
        return
    if args.check:
        return print(common.CHECKED)
    vs_cublas(report, shapes)
    report.finish()


if __name__ == "__main__":
    common.run(main)
