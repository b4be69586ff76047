"""Draft: rows split over a thread-block cluster; the segment stays in registers, as it came; exchange through DSMEM."""
import os
from functools import partial
from importlib import import_module
from typing import NamedTuple
os.environ["TRITON_INTERPRET"] = "0"
import torch
import common
import offline
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

narrow = import_module("02_fused_softmax")
LOG2E = gl.constexpr(1.4426950408889634)
GL_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@gluon.jit
def arrive(x):
    """All warps of the cluster's programs have started where `exchange` waits for this."""
    return gl.inline_asm_elementwise("barrier.cluster.arrive.relaxed.aligned; mov.u32 $0, $1;", "=r,r", [x], gl.int32,
                                     is_pure=False, pack=1)


@gluon.jit
def exchange(top, total, SPLIT: gl.constexpr):
    """The row's maximum and sum, of those of the cluster's programs: each writes its own into every one's shared memory."""
    return gl.inline_asm_elementwise(f"""{{
        .shared .align 16 .b8 box[1024]; .reg .pred p; .reg .b32 t, rank, place, there, i; .reg .f32 m, s, d, a, b;
        barrier.cluster.wait.acquire.aligned;
        mov.u32 t, %tid.x; mov.u32 rank, %cluster_ctarank; mov.u32 place, box; mad.lo.u32 there, rank, 8, place;
        setp.lt.u32 p, t, {SPLIT};
        @p mapa.shared::cluster.u32 there, there, t;
        @p st.shared::cluster.v2.f32 [there], {{$2, $3}};
        barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
        ld.shared.v2.f32 {{m, s}}, [place]; mov.b32 i, 1;
    next:
        mad.lo.u32 there, i, 8, place; ld.shared.v2.f32 {{a, b}}, [there];
        max.f32 d, m, a; setp.eq.f32 p, d, 0fFF800000; selp.f32 t, 0f00000000, d, p;
        sub.f32 m, m, t; mul.f32 m, m, 0f3FB8AA3B; ex2.approx.ftz.f32 m, m; mul.f32 s, s, m;
        sub.f32 a, a, t; mul.f32 a, a, 0f3FB8AA3B; ex2.approx.ftz.f32 a, a; fma.rn.f32 s, b, a, s;
        mov.f32 m, d; add.u32 i, i, 1; setp.lt.u32 p, i, {SPLIT}; @p bra next;
        mov.f32 $0, m; mov.f32 $1, s;
    }}""".replace("selp.f32 t,", "selp.f32 c,").replace(", t; mul", ", c; mul").replace(".reg .f32 m,", ".reg .f32 c, m,"), "=f,=f,f,f", [top, total], (gl.float32, gl.float32), is_pure=False, pack=1)


@gluon.jit
def most(x, y, DTYPE: gl.constexpr):
    """Words of maxima of two elements, or of one."""
    if DTYPE == gl.float32:
        return gl.maximum(x.to(gl.float32, bitcast=True), y.to(gl.float32, bitcast=True)).to(gl.int32, bitcast=True)
    else:
        name: gl.constexpr = "bf16x2" if DTYPE == gl.bfloat16 else "f16x2"
        return gl.inline_asm_elementwise(f"max.{name} $0, $1, $2;", "=r,r,r", [x, y], gl.int32, is_pure=True, pack=1)


@gluon.jit
def _most_bf16(x, y):
    return most(x, y, gl.bfloat16)


@gluon.jit
def _most_fp16(x, y):
    return most(x, y, gl.float16)


@gluon.jit
def widen(x, DTYPE: gl.constexpr, USE: gl.constexpr):
    if DTYPE == gl.float32:
        return (x.to(gl.float32, bitcast=True),)
    elif DTYPE == gl.bfloat16:
        if USE == 0:
            return gl.inline_asm_elementwise("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x],
                                             (gl.float32, gl.float32), is_pure=True, pack=1)
        else:
            return gl.inline_asm_elementwise("prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;", "=f,=f,r", [x],
                                             (gl.float32, gl.float32), is_pure=True, pack=1)
    else:
        return gl.inline_asm_elementwise(f"""{{ // {USE}
            .reg .b16 a, b; mov.b32 {{a, b}}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;
        }}""", "=f,=f,r", [x], (gl.float32, gl.float32), is_pure=True, pack=1)


@gluon.jit
def shorten(parts, DTYPE: gl.constexpr):
    if DTYPE == gl.float32:
        return parts[0].to(gl.int32, bitcast=True)
    else:
        name: gl.constexpr = "bf16x2" if DTYPE == gl.bfloat16 else "f16x2"
        return gl.inline_asm_elementwise(f"cvt.rn.{name}.f32 $0, $2, $1;", "=r,f,f", [parts[0], parts[1]], gl.int32,
                                         is_pure=True, pack=1)


@gluon.jit
def ex2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def lg2(x):
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit(do_not_specialize=["n_vecs", "in_stride", "out_stride"])
def cluster_kernel(out_ptr, in_ptr, n_vecs, in_stride, out_stride, DTYPE: gl.constexpr, SPLIT: gl.constexpr,
                   R: gl.constexpr, EVEN: gl.constexpr, tile: gl.constexpr):
    num_warps: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * num_warps
    SEGMENT: gl.constexpr = R * THREADS                   # vectors of 16 bytes
    PARTS: gl.constexpr = 32 // DTYPE.primitive_bitwidth
    l3: gl.constexpr = gl.SliceLayout(3, tile)
    l23: gl.constexpr = gl.SliceLayout(2, l3)
    one: gl.constexpr = gl.SliceLayout(1, l23)            # [SPLIT]: one a program
    segment = gl.arange(0, SPLIT, one)
    r = gl.arange(0, R, gl.SliceLayout(0, l23))
    lane = gl.arange(0, THREADS, gl.SliceLayout(0, gl.SliceLayout(1, l3)))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, tile))))
    vecs = segment[:, None, None, None] * SEGMENT + r[None, :, None, None] * THREADS + lane[None, None, :, None]
    offs = vecs * 4 + word[None, None, None, :]
    row = gl.program_id(0).to(gl.int64)
    low: gl.constexpr = -8388608 if DTYPE == gl.float32 else (-8323200 if DTYPE == gl.bfloat16 else -67044352)  # -inf
    if SPLIT > 1:
        arrive(segment)
    x = gl.load(in_ptr + row * in_stride * 4 + offs, mask=None if EVEN else vecs < n_vecs,
                other=None if EVEN else low)
    if DTYPE == gl.float32:
        top = gl.max(gl.max(x.to(gl.float32, bitcast=True), 3), 1)
    else:
        if DTYPE == gl.bfloat16:
            y = gl.reduce(gl.reduce(x, 3, _most_bf16), 1, _most_bf16)
        else:
            y = gl.reduce(gl.reduce(x, 3, _most_fp16), 1, _most_fp16)
        ys = widen(y, DTYPE, 0)
        top = gl.maximum(ys[0], ys[1])
    top = gl.max(top, 1)
    shift = gl.where(top == -float("inf"), 0.0, top)
    low2 = (shift * LOG2E)[:, None][:, None, :][:, :, :, None]
    total = gl.full([SPLIT, THREADS], 0.0, gl.float32, gl.SliceLayout(1, l3))
    for part in gl.static_range(PARTS):
        total += gl.sum(gl.sum(ex2(widen(x, DTYPE, 0)[part] * LOG2E - low2), 3), 1)
    total = gl.sum(total, 1)
    if SPLIT > 1:
        top, total = exchange(top, total, SPLIT)
        shift = gl.where(top == -float("inf"), 0.0, top)
    bias = (shift * LOG2E + lg2(total))[:, None][:, None, :][:, :, :, None]
    parts = ()
    for part in gl.static_range(PARTS):
        parts += (ex2(widen(x, DTYPE, 1)[part] * LOG2E - bias),)
    gl.store(out_ptr + row * out_stride * 4 + offs, shorten(parts, DTYPE), mask=None if EVEN else vecs < n_vecs)


class Plan(NamedTuple):
    split: int
    num_warps: int
    r: int
    per_sm: int


def constants(plan, n_cols, dtype):
    vecs = -(-n_cols * dtype.itemsize // 16)
    room = plan.split * plan.num_warps * 32 * plan.r
    if vecs > room or room >= 2 * vecs + 64: return None
    bits = plan.split.bit_length() - 1
    return {"DTYPE": GL_DTYPES[dtype], "SPLIT": plan.split, "R": plan.r, "EVEN": vecs == room,
            "tile": gl.BlockedLayout([1, plan.r, 1, 4], [1, 1, 32, 1], [1, 1, plan.num_warps, 1], [3, 2, 1, 0],
                                     [[1 << i, 0, 0, 0] for i in range(bits)])}, {"num_warps": plan.num_warps, "num_ctas": plan.split,
            "maxnreg": min(255, 2**16 // (32 * plan.num_warps * plan.per_sm) // 8 * 8)}


def arguments(plan, x, out):
    given = out.view(torch.int32), x.view(torch.int32), -(-x.shape[1] * x.element_size() // 16), \
        x.stride(0) * x.element_size() // 16, out.stride(0) * x.element_size() // 16
    return given, *constants(plan, x.shape[1], x.dtype)


def launch(plan, x, out):
    given, const, options = arguments(plan, x, out)
    return cluster_kernel[(x.shape[0],)](*given, **const, **options)


def plans(n_cols, dtype):
    for split in (1, 2, 4, 8, 16):
        for warps in (4, 8, 16, 32):
            for r in (2, 4, 8, 16):
                for per_sm in (1, 2, 3, 4, 6, 8):
                    p = Plan(split, warps, r, per_sm)
                    regs = 2**16 // (32 * warps * per_sm)
                    if constants(p, n_cols, dtype) and warps * per_sm <= 64 and 4 * r + 24 <= regs <= 4 * r * 4 + 64:
                        yield p


def explore(n_cols, dtype):
    x = torch.randn(2**29 // dtype.itemsize // n_cols, n_cols, device="cuda").to(dtype)
    out, calls, some = torch.empty_like(x), {}, list(plans(n_cols, dtype))
    import random
    some = random.Random(0).sample(some, min(len(some), 36))
    def first(plan):
        try:
            launch(plan, x[:1], out[:1])
        except Exception as error:
            print("FAIL", plan, str(error)[:150].replace("\n", " "))
    common.side_by_side([partial(first, plan) for plan in some])
    torch.cuda.synchronize()
    for plan in some:
        try:
            k = launch(plan, x, out.fill_(float("nan")))
            torch.cuda.synchronize()
            narrow.close(out[::37], x[::37])
            assert not out.isnan().any()
        except Exception as error:
            print("WRONG", plan, str(error)[:150].replace("\n", " "))
            if "CUDA" in str(error): raise
            continue
        calls[f"{tuple(plan)} regs {k.n_regs} spills {k.n_spills}"] = partial(launch, plan, x, out)
    split = import_module("06_split_softmax")
    if p := split.pick(x, out):
        calls["06"] = partial(split.launch, p, x, out)
    calls["02"] = partial(narrow.softmax, x, out)
    times = {k: triton.testing.do_bench(f, warmup=4, rep=14, return_mode="median") for k, f in calls.items()}
    best = sorted(times, key=times.get)[:8]
    times = {k: triton.testing.do_bench(calls[k], warmup=10, rep=80, return_mode="median")
             for k in {*best, "02", *({"06"} & set(calls))}}
    for k in sorted(times, key=times.get):
        print(f"{n_cols:>8,} {dtype}  {2 * x.nbytes / times[k] / 1e6:6,.0f} GB/s  {k}", flush=True)


if __name__ == "__main__" and torch.cuda.is_available():
    for n_cols, dtype in ((2**16, torch.bfloat16), (2**15, torch.bfloat16), (2**14, torch.bfloat16), (2**18, torch.bfloat16),
                          (2**16, torch.float32), (2**18, torch.float32), (151936, torch.bfloat16), (20000, torch.bfloat16)):
        explore(n_cols, dtype)
elif __name__ == "__main__":
    import concurrent.futures as cf, sys
    cases = [(d, n, p) for d in (torch.bfloat16, torch.float32, torch.float16) for n in (2**15, 2**16, 2**17, 2**18, 2**16 - 8) for p in plans(n, d)]
    print(len(cases))
    def one(case):
        d, n, p = case
        x = torch.empty(1, n, dtype=d)
        given, const, options = arguments(p, x, x)
        k = offline.compiled(cluster_kernel, dict(zip(cluster_kernel.arg_names, given)) | const | options)
        return case, common.resources(k.asm["cubin"]), k.metadata.shared, k
    if "all" not in sys.argv: cases = [c for c in cases if c[1] in (2**16, 2**16 - 8) and c[2].num_warps == 8 and c[2].r == 8] 
    with cf.ThreadPoolExecutor(2) as pool:
        for case, res, shared, k in pool.map(one, cases): print(*case, res, shared)
    open("/tmp/prof/cluster.ptx", "w").write(k.asm["ptx"])
