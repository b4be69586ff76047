"""What does a matmul need to be as fast as cuBLAS on Hopper?

What 03's kernel leaves out: programs that stay on their SM and walk over output tiles, and tiles that the tensor memory
accelerator (TMA) copies (`persistent_kernel`, "tma"); then a warp that does nothing but ask for them, beside two
warpgroups that multiply (`specialized_kernel`, "ws", written in Gluon); several programs a tile where there are few
tiles (split K: `reduce_kernel`, and `narrow_kernel` for up to 16 rows). Needs compute capability 9.0. Run it:

    python 07_persistent_matmul.py               the table
    python 07_persistent_matmul.py --n 8192      one size, BF16 and FP16; any n, in elements a side
    python 07_persistent_matmul.py --dtype bf16  one dtype
    python 07_persistent_matmul.py --quick       a smoke run

The answer is the column `ratio` of the rows `triton`, beside "triton/pointers", which is 03's matmul, and "triton/tma".
"""
import concurrent.futures
import functools
import importlib
import os
import subprocess
import sys
from functools import partial
from typing import NamedTuple

import torch

import common  # before triton: it chooses the interpreter where there is no GPU
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia.hopper import (fence_async_shared, mbarrier, tma, warpgroup_mma,
                                                              warpgroup_mma_wait)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.jit import mangle_type
from triton.tools.tensor_descriptor import TensorDescriptor

product, tuning = map(importlib.import_module, ("03_matmul", "04_autotune"))


@triton.jit
def _tile(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """First row and first column of an output tile, in 03's grouped order."""
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = tile // (GROUP_M * num_n)
    rows = min(num_m - group * GROUP_M, GROUP_M)
    local = tile % (GROUP_M * num_n)
    return (group * GROUP_M + local % rows) * BLOCK_M, local // rows * BLOCK_N


# ---------------------------------------------------------------- Triton: tiles by TMA, programs that stay

SIZES = ("M", "N", "K")  # one binary for all: nothing in it is faster for knowing that they are multiples of 16


@triton.jit(do_not_specialize=SIZES)
def persistent_kernel(a_desc, b_desc, c_desc, M, N, K,
                      BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
                      SPLIT_K: tl.constexpr, B_T: tl.constexpr, HALVES: tl.constexpr):
    """C = A B, a program an SM. B is K by N, or (B_T) N by K; C is SPLIT_K times M, rounded up to whole tiles, by N.
    No masks: what TMA reads outside of a matrix is zero, and what it would write there is left out."""
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


# ---------------------------------------------------------------- Gluon: who loads, who multiplies

@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """The ring's next stage; the phase of its barriers turns with every round."""
    wrap = stage + 1 == STAGES
    return gl.where(wrap, 0, stage + 1), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def _produce(a_desc, b_desc, a_bufs, b_bufs, ready, empty, M, N, K, WGS: gl.constexpr, GROUP_M: gl.constexpr,
             SPLIT_K: gl.constexpr, B_T: gl.constexpr):
    """One warp that keeps the ring of stages full, tile after tile."""
    STAGES: gl.constexpr = ready.shape[0]
    PARTS: gl.constexpr = b_bufs.shape[0] // STAGES
    WG_M: gl.constexpr = a_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0 if B_T else 1]
    tiles = gl.cdiv(M, WGS * WG_M) * gl.cdiv(N, BLOCK_N)
    k_tiles = gl.cdiv(gl.cdiv(K, BLOCK_K), SPLIT_K)
    stage, phase = 0, 0
    for unit in range(gl.program_id(0), tiles * SPLIT_K, gl.num_programs(0)):
        row, col = _tile(unit % tiles, M, N, WGS * WG_M, BLOCK_N, GROUP_M)
        first = unit // tiles * k_tiles
        for k in range(first, first + k_tiles):
            mbarrier.wait(empty.index(stage), phase ^ 1)  # which the first round passes
            full = ready.index(stage)
            mbarrier.expect(full, PARTS * (WGS * a_desc.block_type.nbytes + b_desc.block_type.nbytes))
            for part in gl.static_range(PARTS):
                for wg in gl.static_range(WGS):
                    tma.async_copy_global_to_shared(a_desc, [part * M + row + wg * WG_M, k * BLOCK_K], full,
                                                    a_bufs.index((stage * PARTS + part) * WGS + wg))
                b_at = [part * N + col, k * BLOCK_K] if B_T else [k * BLOCK_K, col]
                tma.async_copy_global_to_shared(b_desc, b_at, full, b_bufs.index(stage * PARTS + part))
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _consume(WG: gl.constexpr, c_desc, c_bufs, a_bufs, b_bufs, ready, empty, M, N, K, WGS: gl.constexpr,
             GROUP_M: gl.constexpr, SPLIT_K: gl.constexpr, B_T: gl.constexpr):
    """One warpgroup: its rows of every tile. While one stores its rows, the other has the tensor cores."""
    STAGES: gl.constexpr = ready.shape[0]
    PARTS: gl.constexpr = b_bufs.shape[0] // STAGES  # above 1 the operands are sums, which 08 makes of FP32
    PRODUCTS: gl.constexpr = PARTS * (PARTS + 1) // 2
    WG_M: gl.constexpr = c_desc.block_type.shape[0]
    STORE_N: gl.constexpr = c_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = a_bufs.shape[2]
    BLOCK_N: gl.constexpr = b_bufs.shape[1 if B_T else 2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1],
                                                     [16, BLOCK_N, 256 // b_bufs.dtype.primitive_bitwidth])
    tiles = gl.cdiv(M, WGS * WG_M) * gl.cdiv(N, BLOCK_N)
    k_tiles = gl.cdiv(gl.cdiv(K, BLOCK_K), SPLIT_K)
    stage, phase = 0, 0
    for unit in range(gl.program_id(0), tiles * SPLIT_K, gl.num_programs(0)):
        row, col = _tile(unit % tiles, M, N, WGS * WG_M, BLOCK_N, GROUP_M)
        row += unit // tiles * gl.cdiv(M, WGS * WG_M) * WGS * WG_M + WG * WG_M
        acc = gl.zeros((WG_M, BLOCK_N), gl.float32, layout)
        last = 0
        for k in range(k_tiles):
            mbarrier.wait(ready.index(stage), phase)
            for s in gl.static_range(PARTS - 1, -1, -1):  # small products first; the smallest are left out
                for i in gl.static_range(s + 1):
                    b = b_bufs.index(stage * PARTS + s - i)
                    acc = warpgroup_mma(a_bufs.index((stage * PARTS + i) * WGS + WG), b.permute((1, 0)) if B_T else b,
                                        acc, use_acc=(k > 0) | (s + 1 < PARTS) | (i > 0), is_async=True)
            acc = warpgroup_mma_wait(PRODUCTS, deps=(acc, ))  # only this stage's are left: the one before is read
            mbarrier.arrive(empty.index(last), pred=k > 0)
            last = stage
            stage, phase = _next(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc, ))
        mbarrier.arrive(empty.index(last))
        chunks = (acc, )
        for _ in gl.static_range((BLOCK_N // STORE_N).bit_length() - 1):
            halves = ()
            for i in gl.static_range(len(chunks)):
                x = chunks[i]
                halves += x.reshape((WG_M, 2, x.shape[1] // 2)).permute((0, 2, 1)).split()
            chunks = halves
        for i in gl.static_range(BLOCK_N // STORE_N):
            tma.store_wait(1 if BLOCK_N > STORE_N else 0)  # the store before last has left its buffer
            buf = c_bufs.index(WG * 2 + i % 2)
            buf.store(chunks[i].to(c_desc.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(c_desc, [row, col + i * STORE_N], buf)
    tma.store_wait(0)


@gluon.jit
def _ring(desc, BUFFERS: gl.constexpr):
    return gl.allocate_shared_memory(desc.dtype, [BUFFERS] + desc.block_type.shape, desc.layout)


@gluon.jit
def _barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit(do_not_specialize=SIZES)
def specialized_kernel(a_desc, b_desc, c_desc, M, N, K, WGS: gl.constexpr, GROUP_M: gl.constexpr,
                       SPLIT_K: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, B_T: gl.constexpr):
    """persistent_kernel with a warp that loads and WGS warpgroups that multiply, coupled by two barriers a stage:
    `ready` when TMA has filled it, `empty` when each warpgroup has read it."""
    ready, empty = _barriers(STAGES, 1), _barriers(STAGES, WGS)
    fence_async_shared()
    a_bufs, b_bufs = _ring(a_desc, STAGES * PARTS * WGS), _ring(b_desc, STAGES * PARTS)
    c_bufs = _ring(c_desc, WGS * 2)
    if WGS == 1:
        gl.warp_specialize([
            (_consume, (0, c_desc, c_bufs, a_bufs, b_bufs, ready, empty, M, N, K, WGS, GROUP_M, SPLIT_K, B_T)),
            (_produce, (a_desc, b_desc, a_bufs, b_bufs, ready, empty, M, N, K, WGS, GROUP_M, SPLIT_K, B_T)),
        ], [1], [24])
    else:  # no third: ptxas would have 128 registers a thread for it
        gl.warp_specialize([
            (_consume, (0, c_desc, c_bufs, a_bufs, b_bufs, ready, empty, M, N, K, WGS, GROUP_M, SPLIT_K, B_T)),
            (_consume, (1, c_desc, c_bufs, a_bufs, b_bufs, ready, empty, M, N, K, WGS, GROUP_M, SPLIT_K, B_T)),
            (_produce, (a_desc, b_desc, a_bufs, b_bufs, ready, empty, M, N, K, WGS, GROUP_M, SPLIT_K, B_T)),
        ], [4, 1], [240, 24])


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
        return max(1, min(16, programs // (triton.cdiv(m, bm) * triton.cdiv(n, bn)), k // 256))
    tiles = triton.cdiv(m, 128) * triton.cdiv(n, 256)
    if m <= 16:
        return [*(Config(kernel, 16, 64, bk, stages, filling(16, 64, 2 * sms), warps=4)
                  for kernel, bk, stages in (("narrow", 128, 5), ("narrow/t", 128, 5), ("narrow", 256, 3))),
                Config("narrow", 16, 128, 64, 5, filling(16, 128, 3 * sms), warps=4), Config("tma", 64, 64, 128, 4)]
    if 10 * tiles >= 9 * sms:
        return [Config("ws", 128, 256, 64, 4), Config("ws", 128, 256, 64, 4, group=16), Config("ws", 256, 128, 64, 3),
                Config("tma", 128, 256, 64, 4)]
    if k >= 4096:
        return [Config("ws", 128, 256, 64, 4, filling(128, 256)), Config("ws", 128, 128, 64, 5, filling(128, 128)),
                Config("ws", 256, 128, 64, 3, filling(256, 128)), Config("tma", 128, 256, 64, 3, filling(128, 256))]
    if m * n > 2**19:
        return [Config("ws", 128, 64, 128, 4), Config("ws", 128, 64, 64, 7), Config("ws", 64, 128, 128, 4),
                Config("ws", 128, 128, 64, 5), Config("ws", 128, 256, 64, 4, filling(128, 256)),
                Config("tma", 128, 64, 64, 6, warps=4), Config("tma", 64, 128, 128, 4, warps=4)]
    return [Config("tma", 64, 32, 128, 4, warps=4), Config("tma", 64, 64, 128, 4, warps=4),
            Config("ws", 64, 32, 128, 4), Config("ws", 64, 64, 128, 4)]


GL_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
counts = {}  # narrow_kernel's counters, zero between launches, by device and stream
found = {}   # what a search found, by sizes, dtype, B's order and device


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


def launches(config, a, b, out, b_t=False, parts=1, sms=132):
    """What a product needs: [(kernel, grid, keywords)]. b: K by N, or (b_t) N by K. parts: a and b are so many
    matrices of M and (b_t) N rows below each other, whose sums are multiplied. sms: programs that stay."""
    (m, n), k, (kind, bm, bn, bk, stages, split, group, warps) = out.shape, a.shape[1], config
    units = triton.cdiv(m, bm) * triton.cdiv(n, bn)
    sizes = {"M": m, "N": n, "K": k, "SPLIT_K": split}
    if kind.startswith("narrow"):
        scratch = torch.empty(split * m * n if split > 1 else 1, dtype=torch.float32, device=out.device)
        return [(narrow_kernel, (units, split), sizes | {
            "a_desc": descriptor(a, [bm, bk], False), "b_desc": descriptor(b, [bk, bn], False), "parts_ptr": scratch,
            "counts_ptr": counters(units, out.device), "out_ptr": out, "stride_out": out.stride(0), "BLOCK_M": bm,
            "BLOCK_N": bn, "BLOCK_K": bk, "STAGES": stages, "SWAP": kind == "narrow/t", "num_warps": warps})]
    ws, target, part_rows = kind == "ws", out, triton.cdiv(m, bm) * bm
    if split > 1:
        target = torch.empty((split * part_rows, triton.cdiv(n, 4) * 4), dtype=torch.float32,
                             device=out.device)[:, :n]
    if ws:
        wgs = 1 if bm == 64 else 2
        own = {"WGS": wgs, "STAGES": stages, "PARTS": parts, "num_warps": 4}
        a_block, c_block = [bm // wgs, bk], [bm // wgs, min(bn, 128 // target.element_size())]
    else:
        own = {"BLOCK_M": bm, "BLOCK_N": bn, "BLOCK_K": bk, "HALVES": bn >= 128, "num_warps": warps,
               "num_stages": stages}
        a_block, c_block = [bm, bk], [bm, bn // 2 if bn >= 128 else bn]
    main = (specialized_kernel if ws else persistent_kernel, (min(sms, units * split),), sizes | own | {
        "a_desc": descriptor(a, a_block, ws), "b_desc": descriptor(b, [bn, bk] if b_t else [bk, bn], ws),
        "c_desc": descriptor(target, c_block, ws), "GROUP_M": group, "B_T": b_t})
    return [main] if split == 1 else [main, (reduce_kernel, (m * triton.cdiv(n, 1024),), {
        "parts_ptr": target, "out_ptr": out, "N": n, "part_rows": part_rows, "stride_row": target.stride(0),
        "stride_out": out.stride(0), "SPLIT_K": split, "BLOCK": 1024})]


def run(todo):
    """Launch them in turn; the first one's CompiledKernel."""
    return [kernel[grid](**keywords) for kernel, grid, keywords in todo][0]


@functools.cache
def sms_of(device):
    return 132 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def tma_takes(*matrices):
    """Whether TMA can copy them: 16-byte aligned rows, without gaps between elements, and none on another."""
    return all(x.dim() == 2 and min(x.shape) > 0 and x.stride(1) == 1 and x.stride(0) >= x.shape[1]
               and x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in matrices)


def hopper(x):
    """wgmma, and so the kernels here, exist for compute capability 9.0 alone."""
    return common.INTERPRETED or x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9


def search(configs, a, b, out, b_t):
    """The fastest, by 04's Search; without the autotuner, which knows one kernel, and no descriptors that depend on
    the config."""
    sms, timing = sms_of(a.device), tuning.Search(None)
    calls = {config: partial(run, launches(config, a, b, out, b_t, sms=sms)) for config in configs}
    torch.cuda.synchronize()  # the threads that compile launch on the default stream
    common.side_by_side(calls.values())
    torch.cuda.synchronize()
    times = {config: timing.bench(call, None)[0] for config, call in calls.items()}
    return min(times, key=times.get)


def persistent_matmul(a, b, out=None, config=None):
    """a @ b for bf16 and fp16, accumulated in FP32: 03's matmul with the same arguments, errors and results.

    a: (M, K), b: (K, N) or a transposed view of (N, K). It is 03's where TMA cannot take a, b or out (a pointer or a
    row stride that is no multiple of 16 bytes, columns that are not adjacent, no elements) and off compute capability
    9.0. config: a Config to run; without it the fastest of candidates(), found at the first call with each M, N, K.
    """
    if a.dtype == torch.float32:
        raise TypeError("persistent_matmul: a is torch.float32; it must be bf16 or fp16 (03's matmul takes fp32)")
    usual = a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0] and a.dtype == b.dtype and a.device == b.device
    result = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device) if out is None and usual else out
    b_t = usual and not tma_takes(b) and tma_takes(b.t())
    used = b.t() if b_t else b
    if (not usual or a.dtype not in GL_DTYPES or not hopper(a) or not tma_takes(a, used, result)
            or (result.shape, result.dtype, result.device) != ((a.shape[0], b.shape[1]), a.dtype, a.device)):
        persistent_matmul.config = None
        return product.matmul(a, b, out=out)  # which raises an error where one is due
    sms, key = sms_of(a.device), (*a.shape, b.shape[1], a.dtype, b_t, a.device)
    with torch.cuda.device_of(a):  # Triton launches on the current device
        config = config or found.get(key)
        if config is None:
            some = [one for one in candidates(a.shape[0], b.shape[1], a.shape[1], sms)
                    if not (b_t and one.kernel.startswith("narrow"))]
            config = found[key] = some[0] if common.INTERPRETED else search(some, a, used, result, b_t)
        persistent_matmul.kernel = run(launches(config, a, used, result, b_t, sms=sms))
    persistent_matmul.config = config
    return result


# ---------------------------------------------------------------- proof

def compiled(kernel, keywords, cc=90):
    """The CompiledKernel of a launch, with no GPU."""
    signature, constexprs, attrs = {}, {}, {}
    for index, param in enumerate(kernel.params):
        signature[param.name] = "constexpr" if param.is_constexpr else mangle_type(keywords[param.name])
        if param.is_constexpr:
            constexprs[(index,)] = keywords[param.name]
        elif not param.do_not_specialize:
            attrs[(index,)] = [["tt.divisibility", 16]]
    options = {key: keywords[key] for key in ("num_warps", "num_stages") if key in keywords}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constexprs, attrs)
    return triton.compile(source, target=GPUTarget("cuda", cc, 32), options=options)


SQUARES = (512, 1024, 2048, 4096, 8192, 16384)
ODD = ((16384, 16384, 1024), (1024, 1024, 16384), (16, 8192, 8192))


def cases():
    """{name: launch} of every kernel with every Config that the table's products can have, on 132 SMs."""
    found = {}
    for m, n, k in [(n, n, n) for n in SQUARES] + [*ODD]:
        a, b, out = (torch.empty_strided(shape, (shape[1], 1), dtype=torch.bfloat16) for shape in
                     ((m, k), (k, n), (m, n)))
        for config in candidates(m, n, k, 132):
            for kernel, _, keywords in launches(config, a, b, out):
                found[f"{config} {kernel.fn.__name__}"] = kernel, keywords
    return found | {"B transposed": launches(Config("ws", 128, 256, 64, 4), a, b, out, b_t=True)[0][::2]}


def no_spills(module, names=None):
    """Compile the launches that a script's cases() lists; what does not compile, or spills, ends the run. Without a GPU
    in a process of its own, since Triton's interpreter is switched on in this one."""
    if common.INTERPRETED:
        code = f"import importlib; importlib.import_module('07_persistent_matmul').no_spills({module!r})"
        done = subprocess.run([sys.executable, "-c", code], cwd=common.ROOT, capture_output=True, text=True,
                              env={**os.environ, "TRITON_INTERPRET": "0"})
        if done.returncode:
            raise AssertionError(f"for compute capability 9.0: {done.stderr.strip().splitlines()[-1]}")
        return
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        todo = importlib.import_module(module).cases()
        for name, kernel in zip(todo, pool.map(lambda one: compiled(*one), todo.values())):
            spills, shared = common.resources(kernel.asm["cubin"])["spills"], kernel.metadata.shared
            if spills or shared > 227 * 1024:
                raise AssertionError(f"{name}: {spills} spills, {shared:,} bytes of shared memory")


def framed(rows, cols, dtype, fill=True):
    """A random matrix (fill: else NaN) that TMA takes, a view into NaN on all sides but the left: what is read or
    written beyond its edge shows."""
    room = torch.full((rows + 8, triton.cdiv(cols + 8, 8) * 8), float("nan"), dtype=dtype, device=common.device())
    view = room[:rows, :cols]
    return (view.copy_(torch.randn(rows, cols)) if fill else view), room


def agrees(out, room, a, b, what, unit=0):
    """out against float64, as in 03's verify; unit: the relative rounding of an FP32 operand."""
    (m, n), k = out.shape, a.shape[1]
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=torch.finfo(a.dtype).eps + 2 * unit,
                               atol=16 * unit * k**0.5 + 2**-22 * k**1.5 + 2**-24, msg=lambda text: f"{what}: {text}")
    assert room.isnan().sum() == room.numel() - m * n, f"{what} wrote outside of its output"


def verify(config, m, n, k, dtype, b_t=False):
    """One Config on ragged sizes, twice: 3 programs with many tiles each, then all; counters are left as found."""
    (a, _), (b, _) = framed(m, k, dtype), framed(n, k, dtype) if b_t else framed(k, n, dtype)
    for sms in (3, sms_of(a.device)):
        out, room = framed(m, n, dtype, fill=False)
        run(launches(config, a, b, out, b_t, sms=sms))
        agrees(out, room, a, b.t() if b_t else b, f"{config} {m} x {n} x {k}, {dtype}, {sms} programs")


def check(report):
    """Every path on poisoned outputs before anything is timed: on a GPU each Config of the table's, in the interpreter
    Triton's kernels with small tiles, while Gluon's are compiled."""
    print(f"[{report.name}] check", file=sys.stderr, flush=True)
    checks = []
    for dtype in (torch.bfloat16, torch.float16) if report.gpu else (torch.float16,):  # no interpreter runs bf16
        configs = {config: (300, 520, 1111) for m, n, k in [(n, n, n) for n in SQUARES] + [*ODD]
                   for config in candidates(m, n, k, 132)} if report.gpu else {
            Config("tma", 32, 32, 32, 2): (40, 72, 70), Config("tma", 16, 128, 32, 2, 3): (20, 136, 101),
            Config("tma", 32, 32, 32, 2, 2, group=1): (70, 40, 30)}
        for config, (m, n, k) in configs.items():
            narrow = config.kernel.startswith("narrow")
            checks.append(partial(verify, config, 7 if narrow else m, n, k, dtype))
            checks += [partial(verify, config, 129, 200, 72, dtype, True)] * (report.gpu is not None and not narrow)
        for split in (1, 3):
            checks += [partial(verify, Config(kernel, 16, 32, 32, 2, split, warps=4), m, 70, 101, dtype)
                       for kernel in ("narrow", "narrow/t") for m in (1, 16)]
    common.side_by_side(checks)
    dtype = torch.float16
    (a, _), (b, _) = framed(72, 96, dtype), framed(96, 56, dtype)
    for x, y in ((a, b), (a, framed(56, 96, dtype)[0].t()), (b.t(), a.t()), (a[:, 1:], b[1:]), (a[:, :0], b[:0])):
        out, room = framed(x.shape[0], y.shape[1], dtype, fill=False)
        for _ in range(2):  # by a search, or 03's; then as it was found
            assert persistent_matmul(x, y, out=out.fill_(float("nan"))) is out
            agrees(out, room, x, y, f"persistent_matmul {tuple(x.shape)} {x.stride()} x {tuple(y.shape)} {y.stride()}")
    if report.gpu is None:
        no_spills("07_persistent_matmul")


# ---------------------------------------------------------------- the table

def vs_cublas(report, shapes):
    with report.table("vs_cublas", "matmul against cuBLAS", baseline="cublas", cases=len(shapes)) as table:
        for m, n, k, dtype in shapes:
            if product.need(max(m, n, k), 2) > torch.cuda.mem_get_info()[0]:
                table.note(f"{m:,} x {n:,} x {k:,} is left out: there is too little GPU memory.")
                continue
            a, b, out = (torch.randn(*shape, dtype=common.DTYPES[dtype], device="cuda")
                         for shape in ((m, k), (k, n), (m, n)))
            tma_configs = [one for one in candidates(m, n, k, sms_of(a.device)) if one.kernel == "tma"]
            with_tma = partial(persistent_matmul, config=search(tma_configs, a, b, out, False))
            calls = {"triton": persistent_matmul, "triton/tma": with_tma, "triton/pointers": product.matmul,
                     "cublas": product.cublas}
            if dtype == "fp16":
                calls = {name: calls[name] for name in ("triton", "cublas")}
            extra = {}
            for name, call in calls.items():
                error = product.proven(name, call, a, b, out, 2 * torch.finfo(a.dtype).eps)
                call(a, b, out=out)  # again: 03's search's kernel was the autotuner's
                last = product.matmul if name == "triton/pointers" else persistent_matmul
                extra[name] = {"rel_error": error} if name == "cublas" else {
                    "rel_error": error, "config": str(last.config) if isinstance(last.config, Config)
                    else product.config_name(last.config), "regs": last.kernel.n_regs, "spills": last.kernel.n_spills}
            table.time({"n": n, "m": m, "k": k, "dtype": dtype},
                       {name: partial(call, a, b, out=out) for name, call in calls.items()}, extra,
                       flops=2 * m * n * k, unit=dtype, burst=min(m, n) >= 2048)
            del a, b, out
        table.note("triton: the fastest of candidates(), by a search; triton/tma: of its plain Triton kernel alone; "
                   "triton/pointers: 03's matmul. In FP16 the first and cuBLAS alone.")
        table.note("burst: the first 50 ms after half a second of rest, from 2,048 up; ms is the settled state. "
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
    if report.gpu and args.n:
        report.need(product.need(args.n, 2), f"--n {args.n}")
    check(report)
    if report.gpu is None:
        print("The plain Triton kernels agree with float64 at small sizes, in fp16. No interpreter runs Gluon: every "
              "kernel of the table was compiled for compute capability 9.0 instead, without spills.")
        return
    squares = [args.n] if args.n else SQUARES[:2] + SQUARES[3:4] if args.quick else SQUARES
    shapes = [(n, n, n, dtype) for n in squares for dtype in ([args.dtype] if args.dtype else ["bf16", "fp16"])]
    if not args.n and args.dtype != "fp16":
        shapes += [(*shape, "bf16") for shape in ODD]
    vs_cublas(report, shapes)
    report.finish()


if __name__ == "__main__":
    common.run(main)
