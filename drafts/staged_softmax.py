"""A form of 06 still to be measured: a segment stays in shared memory and is read twice from there, so that registers
hold little and an SM has room for many programs; while some wait for a row's maximum and sum, others load or store.

    PYTHONPATH=.:drafts python drafts/staged_softmax.py     on a GPU: every plan is checked and timed; else compiled
"""
import os
from functools import partial
from importlib import import_module
from typing import NamedTuple

os.environ["TRITON_INTERPRET"] = "0"
import torch  # noqa: E402

import common  # noqa: E402
import offline  # noqa: E402
import triton  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.language.nvidia.hopper import mbarrier  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: E402

split = import_module("06_split_softmax")
exp2, publish, peek, settle, LOG2E = split.exp2, split.publish, split.peek, split.settle, split.LOG2E
async_load, reinterpret, WORDS = split.async_load, split.reinterpret, split.WORDS


@gluon.jit
def lg2(x):
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _join(m, s, n, t):
    top = gl.maximum(m, n)
    shift = gl.where(top == -float("inf"), 0.0, top)
    return top, s * exp2((m - shift) * LOG2E) + t * exp2((n - shift) * LOG2E)


@gluon.jit
def _segment(source, ring, bar, t, rows, group, groups, first, CHUNKS: gl.constexpr):
    mbarrier.expect(bar, CHUNKS * source.block_type.nbytes, pred=t < rows)
    for c in gl.static_range(CHUNKS):
        async_load(source, [group + t * groups, first + c * source.block_type.shape[1]], bar,
                                        ring.index(c), pred=t < rows)


@gluon.jit(do_not_specialize=["epoch", "n_rows", "n_vecs", "out_stride"])
def staged_kernel(out_ptr, source, words, epoch, n_rows, n_vecs, out_stride,
                  SPLIT: gl.constexpr, R: gl.constexpr, CHUNKS: gl.constexpr, EVEN: gl.constexpr):
    num_warps: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * num_warps
    CHUNK: gl.constexpr = R * THREADS                     # vectors
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    VEC: gl.constexpr = 128 // dtype.primitive_bitwidth
    tile: gl.constexpr = gl.BlockedLayout([R, 1, VEC], [1, 32, 1], [1, num_warps, 1], [2, 1, 0])
    lane: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, tile))  # one value a thread
    linear: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    r = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(2, tile)))[:, None, None]
    vecs = r * THREADS + gl.arange(0, THREADS, lane)[None, :, None]  # of a chunk
    offs = vecs * VEC + gl.arange(0, VEC, gl.SliceLayout(0, gl.SliceLayout(1, tile)))[None, None, :]
    ring = gl.allocate_shared_memory(source.dtype, [CHUNKS, 1, source.block_type.shape[1]], source.layout)
    bars = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bars, count=1)
    segment, group, groups = gl.program_id(0) % SPLIT, gl.program_id(0) // SPLIT, gl.num_programs(0) // SPLIT
    rows = (n_rows - group + groups - 1) // groups        # of this group
    length = (n_vecs + 8 * SPLIT - 1) // (8 * SPLIT) * 8  # segments are alike, to a line of 8 vectors
    first = segment * length
    end = gl.minimum(first + length, n_vecs)
    word = words + group * (8 * SPLIT * 2)
    theirs = word + gl.arange(0, SPLIT, gl.BlockedLayout([max(1, SPLIT // 32)], [32], [num_warps], [0])) * 2
    _segment(source, ring, bars, 0, rows, group, groups, first * WORDS, CHUNKS)
    for t in range(rows):
        top = gl.full([THREADS], -float("inf"), gl.float32, lane)
        total = gl.full([THREADS], 0.0, gl.float32, lane)
        mbarrier.wait(bars, t & 1)
        for c in gl.static_range(CHUNKS):
            x = reinterpret(ring.index(c), dtype, [R, THREADS, VEC], linear).load(tile).to(gl.float32)
            if not EVEN:
                x = gl.where(first + c * CHUNK + vecs < end, x, -float("inf"))
            new = gl.maximum(top, gl.max(gl.max(x, 2), 0))
            shift = gl.where(new == -float("inf"), 0.0, new)
            more = gl.sum(gl.sum(exp2((x - shift[None, :, None]) * LOG2E), 2), 0)
            total = total * exp2((top - shift) * LOG2E) + more
            top = new
        top, total = gl.reduce((top, total), 0, _join)
        if SPLIT > 1:
            at = (epoch + t) & 7
            publish(word + (at * SPLIT + segment) * 2, top, total, epoch + t)
            place = theirs + at * (SPLIT * 2)
            tops, totals = settle(place, peek(place), epoch + t)
            top, total = gl.reduce((tops, totals), 0, _join)
        shift = gl.where(top == -float("inf"), 0.0, top)
        bias = lg2(total)                                 # of no finite element: -inf, and so NaN, as torch
        out_row = out_ptr + ((group + t * groups).to(gl.int64) * out_stride + first) * VEC
        for c in gl.static_range(CHUNKS):
            x = reinterpret(ring.index(c), dtype, [R, THREADS, VEC], linear).load(tile).to(gl.float32)
            gl.store(out_row + c * (CHUNK * VEC) + offs, exp2((x - shift) * LOG2E - bias).to(dtype),
                     mask=None if EVEN else first + c * CHUNK + vecs < end)
        _segment(source, ring, bars, t + 1, rows, group, groups, first * WORDS, CHUNKS)  # all have read by now


class Plan(NamedTuple):
    split: int           # programs a row
    r: int               # vectors of 16 bytes a thread and chunk
    num_warps: int
    per_sm: int          # programs an SM


def geometry(plan, n_cols, size, sms=132):
    """(groups of programs, bytes of a chunk, constants, options), or None where a plan does not hold such rows."""
    split_, r, warps, per_sm = plan
    vecs, chunk = triton.cdiv(n_cols * size, 16), r * 32 * warps
    chunks = triton.cdiv(triton.cdiv(vecs, 8 * split_) * 8, chunk)
    shared = chunks * chunk * 16 + 1024
    if (shared + 1024) * per_sm > 233472 or shared > 232448 or warps * per_sm > 64 or chunks > 16:
        return None
    return per_sm * sms // split_, chunk * 16, {"SPLIT": split_, "R": r, "CHUNKS": chunks, "EVEN":
                                                vecs == split_ * chunks * chunk}, {
        "num_warps": warps, "maxnreg": min(255, 2**16 // (32 * warps * per_sm) // 8 * 8),
        "launch_cooperative_grid": split_ > 1}


def arguments(plan, x, out, words, tag):
    _, chunk, constants, options = geometry(plan, x.shape[1], x.element_size())
    source = TensorDescriptor.from_tensor(x.view(split.WORD), [1, chunk // split.WORD.itemsize], split.LAYOUT)
    vector = 16 // x.element_size()
    given = out, source, words, tag, len(x), triton.cdiv(x.shape[1], vector), out.stride(0) // vector
    return given, constants | options


def launch(plan, x, out):
    groups = min(geometry(plan, x.shape[1], x.element_size())[0], len(x))
    words, tag = split.mailbox(x.device, triton.cdiv(len(x), groups)) if plan.split > 1 else (out, 0)
    given, keywords = arguments(plan, x, out, words, tag)
    return staged_kernel[(groups * plan.split,)](*given, **keywords)


def plans(n_cols, size):
    """Segments of 16 to 64 KB, one to twelve programs an SM."""
    for n in (2**k for k in range(8) if 2**14 <= n_cols * size / 2**k <= 2**16):
        for warps, per_sm in ((4, 12), (4, 8), (4, 6), (8, 6), (8, 4), (8, 3), (16, 3), (16, 2)):
            if geometry(plan := Plan(n, 4, warps, per_sm), n_cols, size):
                yield plan


def explore(n_cols, dtype):
    x = torch.randn(2**29 // dtype.itemsize // n_cols, n_cols, device="cuda").to(dtype)
    out, calls = torch.empty_like(x), {}
    some = list(plans(n_cols, dtype.itemsize))
    common.side_by_side([partial(launch, plan, x[:1], out[:1]) for plan in some])
    for plan in some:
        launch(plan, x, out.fill_(float("nan")))
        split.narrow.close(out[::37], x[::37])
        assert not out.isnan().any(), plan
        calls[plan] = partial(launch, plan, x, out)
    if old := split.pick(x, out):
        calls["06"] = partial(split.launch, old, x, out)
    calls["02"] = partial(split.narrow.softmax, x, out)
    times = {name: triton.testing.do_bench(call, warmup=5, rep=25, return_mode="median")
             for name, call in calls.items()}
    best = sorted(times, key=times.get)[:6]
    for name in [*best, *(name for name in ("06", "02") if name in times and name not in best)]:
        print(f"{n_cols:>8,} {dtype}  {2 * x.nbytes / times[name] / 1e6:6,.0f} GB/s  {name}", flush=True)


if __name__ == "__main__":
    for n_cols in (16384, 32768, 65536, 131072, 262144, 151936):
        for dtype in (torch.bfloat16, torch.float32):
            if torch.cuda.is_available():
                explore(n_cols, dtype)
            else:
                x = torch.empty(2, n_cols, dtype=dtype)
                for plan in list(plans(n_cols, dtype.itemsize))[::5]:
                    given, keywords = arguments(plan, x, x, torch.empty(1, dtype=torch.int64), 1)
                    names = staged_kernel.arg_names
                    found = offline.compiled(staged_kernel, dict(zip(names, given)) | keywords)
                    print(n_cols, dtype, plan, common.resources(found.asm["cubin"]), flush=True)
