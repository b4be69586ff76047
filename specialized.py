"""The matmul kernel that 07 times and 08 gives FP32 to: on each SM one warp that asks TMA for tiles and one or two
warpgroups that multiply them, coupled by barriers in shared memory. In Gluon, Triton's lower level.

Apart from them since both launch it, and no step, since 07's tables are its tables. Needs compute capability 9.0.
"""
import common  # noqa: F401  before triton: it chooses the interpreter where there is no GPU
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (fence_async_shared, mbarrier, tma, warpgroup_mma,
                                                              warpgroup_mma_wait)

SIZES = ("M", "N", "K")  # one binary for all: nothing in it is faster for knowing that they are multiples of 16


@triton.jit
def _tile(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """First row and first column of an output tile, in 03's grouped order."""
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = tile // (GROUP_M * num_n)
    rows = min(num_m - group * GROUP_M, GROUP_M)
    local = tile % (GROUP_M * num_n)
    return (group * GROUP_M + local % rows) * BLOCK_M, local // rows * BLOCK_N


async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the names before Triton 3.8
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """The ring's next stage; the phase of its barriers turns with every round."""
    wrap = stage + 1 == STAGES
    return gl.where(wrap, 0, stage + 1), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def _produce(a_desc, b_desc, a_bufs, b_bufs, ready, empty, M, N, K, WGS: gl.constexpr, GROUP_M: gl.constexpr,
             SPLIT_K: gl.constexpr, B_T: gl.constexpr, BATCH: gl.constexpr = 1):
    """One warp that keeps the ring of stages full, tile after tile, each of a multiple of BATCH."""
    STAGES: gl.constexpr = ready.shape[0]
    PARTS: gl.constexpr = b_bufs.shape[0] // STAGES
    WG_M: gl.constexpr = a_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0 if B_T else 1]
    tiles = gl.cdiv(M, WGS * WG_M) * gl.cdiv(N, BLOCK_N)
    k_tiles = gl.cdiv(gl.cdiv(gl.cdiv(K, BLOCK_K), SPLIT_K), BATCH) * BATCH  # beyond K TMA fills in zeros
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
                    async_load(a_desc, [part * M + row + wg * WG_M, k * BLOCK_K], full,
                                                    a_bufs.index((stage * PARTS + part) * WGS + wg))
                b_at = [part * N + col, k * BLOCK_K] if B_T else [k * BLOCK_K, col]
                async_load(b_desc, b_at, full, b_bufs.index(stage * PARTS + part))
            stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _rounded(x):
    """FP32 such that tensor cores, which leave out 13 bits of it, round it to TF32, ties away from zero. What would
    become infinite is cut off."""
    bits = x.to(gl.int32, bitcast=True)
    bits += gl.where((bits & 0x7FFFFFFF) < 0x7F7FF000, 0x1000, 0)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _consume(WG: gl.constexpr, c_desc, c_bufs, a_bufs, b_bufs, ready, empty, M, N, K, WGS: gl.constexpr,
             GROUP_M: gl.constexpr, SPLIT_K: gl.constexpr, B_T: gl.constexpr, FRESH: gl.constexpr,
             BATCH: gl.constexpr):
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
    k_tiles = gl.cdiv(gl.cdiv(gl.cdiv(K, BLOCK_K), SPLIT_K), BATCH) * BATCH
    stage, phase = 0, 0
    for unit in range(gl.program_id(0), tiles * SPLIT_K, gl.num_programs(0)):
        row, col = _tile(unit % tiles, M, N, WGS * WG_M, BLOCK_N, GROUP_M)
        row += unit // tiles * gl.cdiv(M, WGS * WG_M) * WGS * WG_M + WG * WG_M
        acc = gl.zeros((WG_M, BLOCK_N), gl.float32, layout)
        total = acc
        last = 0
        if BATCH > 1:  # A through registers
            for k in range(0, k_tiles, BATCH):
                for i in gl.static_range(BATCH):
                    mbarrier.wait(ready.index(stage), phase)
                    a = _rounded(a_bufs.index(stage * WGS + WG).load(gl.DotOperandLayout(0, layout, 1)))
                    b = b_bufs.index(stage)
                    acc = warpgroup_mma(a, b.permute((1, 0)) if B_T else b, acc, use_acc=(k > 0) | (i > 0),
                                        is_async=True)
                    if i > 0:
                        acc = warpgroup_mma_wait(1, deps=(acc, ))
                        mbarrier.arrive(empty.index(last))
                    last = stage
                    stage, phase = _next(stage, phase, STAGES)
                acc = warpgroup_mma_wait(0, deps=(acc, ))  # were it later, ptxas would wait for each instruction
                mbarrier.arrive(empty.index(last))
        for k in range(k_tiles if BATCH == 1 else 0):
            mbarrier.wait(ready.index(stage), phase)
            for s in gl.static_range(PARTS - 1, -1, -1):  # small products first; the smallest are left out
                for i in gl.static_range(s + 1):
                    b = b_bufs.index(stage * PARTS + s - i)
                    acc = warpgroup_mma(a_bufs.index((stage * PARTS + i) * WGS + WG), b.permute((1, 0)) if B_T else b,
                                        acc, use_acc=(not FRESH and k > 0) | (s + 1 < PARTS) | (i > 0), is_async=True)
            if FRESH:  # tensor cores truncate every partial sum: they sum a k tile, FP32 additions the tiles
                acc = warpgroup_mma_wait(0, deps=(acc, ))
                mbarrier.arrive(empty.index(stage))
                total += acc
            else:
                acc = warpgroup_mma_wait(PRODUCTS, deps=(acc, ))  # only this stage's are left: the one before is read
                mbarrier.arrive(empty.index(last), pred=k > 0)
            last = stage
            stage, phase = _next(stage, phase, STAGES)
        if FRESH:
            chunks = (total, )
        elif BATCH > 1:
            chunks = (acc, )
        else:
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
            async_store(c_desc, [row, col + i * STORE_N], buf)
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
                       SPLIT_K: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, B_T: gl.constexpr,
                       FRESH: gl.constexpr, BATCH: gl.constexpr):
    """persistent_kernel with a warp that loads and WGS warpgroups that multiply, coupled by two barriers a stage:
    `ready` when TMA has filled it, `empty` when each warpgroup has read it. BATCH: above 1, FP32 A is rounded to TF32
    in registers, so many stages at once."""
    ready, empty = _barriers(STAGES, 1), _barriers(STAGES, WGS)
    fence_async_shared()
    a_bufs, b_bufs = _ring(a_desc, STAGES * PARTS * WGS), _ring(b_desc, STAGES * PARTS)
    c_bufs = _ring(c_desc, WGS * 2)
    if WGS == 1:
        gl.warp_specialize([
            (_consume, (0, c_desc, c_bufs, a_bufs, b_bufs, ready, empty, M, N, K, WGS, GROUP_M, SPLIT_K, B_T,
                        FRESH, BATCH)),
            (_produce, (a_desc, b_desc, a_bufs, b_bufs, ready, empty, M, N, K, WGS, GROUP_M, SPLIT_K, B_T, BATCH)),
        ], [1], [24])
    else:  # no third: ptxas would have 128 registers a thread for it
        gl.warp_specialize([
            (_consume, (0, c_desc, c_bufs, a_bufs, b_bufs, ready, empty, M, N, K, WGS, GROUP_M, SPLIT_K, B_T,
                        FRESH, BATCH)),
            (_consume, (1, c_desc, c_bufs, a_bufs, b_bufs, ready, empty, M, N, K, WGS, GROUP_M, SPLIT_K, B_T,
                        FRESH, BATCH)),
            (_produce, (a_desc, b_desc, a_bufs, b_bufs, ready, empty, M, N, K, WGS, GROUP_M, SPLIT_K, B_T, BATCH)),
        ], [4, 1], [240, 24])
