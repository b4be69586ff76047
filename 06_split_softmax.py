"""How fast is a softmax of rows that outgrow a program's registers, when every row is read from DRAM once?

A row is a thread-block cluster's: each of its 1 to 16 programs copies a segment into its shared memory, asynchronously,
reduces it there, writes its maximum and sum into the shared memory of the others, and reads its segment once more to
write the result. In Gluon, which leaves layouts and copies to the kernel, with the exchange in PTX.

    python 06_split_softmax.py                    the table `wide`
    python 06_split_softmax.py --n-cols 151936    one width; --dtype fp16: one dtype; --quick: a smoke run
    python 06_split_softmax.py --soak 10000       so many launches on fresh data, each checked; no table

The answer is the row `triton` of the table `wide`, beside 02's kernel for such rows.
"""
import functools
import math
import os
import random
import sys
import time
import types
from functools import partial
from importlib import import_module
from typing import NamedTuple

asked, os.environ["TRITON_INTERPRET"] = os.environ.get("TRITON_INTERPRET"), "0"  # no interpreter runs Gluon
import torch  # noqa: E402

import common  # noqa: E402
import offline  # noqa: E402
import peers  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.language.nvidia.ampere import async_copy  # noqa: E402

narrow = import_module("02_fused_softmax")
common.INTERPRETED |= (asked or "").lower() in ("1", "y", "yes", "on", "true")  # then nothing is timed
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # before Triton 3.9
buffer = gl.shared_memory_descriptor
reinterpret = getattr(buffer, "reinterpret", None) or buffer._reinterpret
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def exp2(x):  # the library's scales subnormals, two more instructions for what is rounded away
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def widen(x, dtype: gl.constexpr):
    """32-bit words as FP32, in a tuple: of 16-bit elements the lower halves, then the upper ones."""
    if dtype == gl.float32:
        return (x.to(gl.float32, bitcast=True),)
    elif dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x],
                                         (gl.float32, gl.float32), is_pure=True, pack=1)
    else:
        return gl.inline_asm_elementwise("""{
            .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;
        }""", "=f,=f,r", [x], (gl.float32, gl.float32), is_pure=True, pack=1)


@gluon.jit
def shorten(parts, dtype: gl.constexpr):
    """The words of such a tuple, rounded to the nearest."""
    if dtype == gl.float32:
        return parts[0].to(gl.int32, bitcast=True)
    else:
        name: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
        return gl.inline_asm_elementwise(f"cvt.rn.{name}.f32 $0, $2, $1;", "=r,f,f", [parts[0], parts[1]], gl.int32,
                                         is_pure=True, pack=1)


@gluon.jit
def larger(x, y, dtype: gl.constexpr):
    """Words of the larger elements of two words each; NaN, which the sum has too, may be lost."""
    if dtype == gl.float32:
        return gl.maximum(x.to(gl.float32, bitcast=True), y.to(gl.float32, bitcast=True)).to(gl.int32, bitcast=True)
    else:
        name: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
        return gl.inline_asm_elementwise(f"max.{name} $0, $1, $2;", "=r,r,r", [x, y], gl.int32, is_pure=True, pack=1)


@gluon.jit
def announce(x):
    """Arrive at the cluster's barrier without waiting: `exchange` waits until all of the cluster's programs run. x has
    one value a thread, since the instruction runs once a value."""
    return gl.inline_asm_elementwise("barrier.cluster.arrive.relaxed.aligned; mov.u32 $0, $1;", "=r,r", [x], gl.int32,
                                     is_pure=False, pack=1)


@gluon.jit
def exchange(top, total, SPLIT: gl.constexpr):
    """A row's maximum and sum, from those of its SPLIT programs, as each thread has its own program's.

    Thread i of a program writes them into the box of program i, at its own program's place. After the barrier they are
    there, and no program ends while another may still write to it. Then every thread adds up its program's box.
    """
    return gl.inline_asm_elementwise(f"""{{
        .shared .align 16 .b8 box[{8 * SPLIT}]; .reg .pred p; .reg .b32 t, rank, place, there, i;
        .reg .f32 m, s, a, b, top, shift;
        mov.u32 t, %tid.x; mov.u32 rank, %cluster_ctarank; mov.u32 place, box;
        mad.lo.u32 there, rank, 8, place; setp.lt.u32 p, t, {SPLIT};
        barrier.cluster.wait.acquire.aligned;
        @p mapa.shared::cluster.u32 there, there, t;
        @p st.shared::cluster.v2.f32 [there], {{$2, $3}};
        barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
        ld.shared.v2.f32 {{m, s}}, [place]; mov.b32 i, 1;
    next:
        mad.lo.u32 there, i, 8, place; ld.shared.v2.f32 {{a, b}}, [there];
        max.f32 top, m, a; setp.eq.f32 p, top, 0fFF800000; selp.f32 shift, 0f00000000, top, p;  // -inf - -inf is NaN
        sub.f32 m, m, shift; mul.f32 m, m, 0f3FB8AA3B; ex2.approx.ftz.f32 m, m; mul.f32 s, s, m;
        sub.f32 a, a, shift; mul.f32 a, a, 0f3FB8AA3B; ex2.approx.ftz.f32 a, a; fma.rn.f32 s, b, a, s;
        mov.f32 m, top; add.u32 i, i, 1; setp.lt.u32 p, i, {SPLIT}; @p bra next;
        mov.f32 $0, m; mov.f32 $1, s;
    }}""", "=f,=f,f,f", [top, total], (gl.float32, gl.float32), is_pure=False, pack=1)


@gluon.jit(do_not_specialize=["n_vecs", "in_stride", "out_stride"])
def split_kernel(out_ptr, in_ptr, n_vecs, in_stride, out_stride, DTYPE: gl.constexpr, SPLIT: gl.constexpr,
                 R: gl.constexpr, CHUNK: gl.constexpr, EVEN: gl.constexpr, tile: gl.constexpr, flat: gl.constexpr):
    """Cluster r: row r, of n_vecs vectors of 16 bytes; its program s: segment s, R vectors a thread.

    Shapes are the cluster's, and the first dimension of `tile` and `flat` goes over its programs: what is reduced over
    the others stays within one.
    """
    THREADS: gl.constexpr = 32 * gl.num_warps()
    PARTS: gl.constexpr = 32 // DTYPE.primitive_bitwidth  # elements a word
    LEAST_WORD: gl.constexpr = -0x800000 if PARTS == 1 else -0x7F0080 if DTYPE == gl.bfloat16 else -0x3FF0400  # -inf
    one: gl.constexpr = gl.SliceLayout(2, tile)           # one value a thread
    length = (n_vecs + 8 * SPLIT - 1) // (8 * SPLIT) * 8  # segments are alike, to a line of 8 vectors
    program = gl.arange(0, SPLIT, gl.SliceLayout(1, one))  # one value a program, and so a thread
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, tile)))[None, None, :]
    row = gl.program_id(0).to(gl.int64)
    segment = gl.allocate_shared_memory(gl.int32, [R // CHUNK, SPLIT, CHUNK * THREADS, 4], flat)
    if SPLIT > 1:
        announce(program)
    lane = gl.arange(0, CHUNK * THREADS, gl.SliceLayout(0, one))[None, :, None]
    vecs = program[:, None, None] * length + lane
    for r in gl.static_range(0, R, CHUNK):
        read = (lane + r * THREADS < length) & (vecs + r * THREADS < n_vecs)
        async_load(segment.index(r // CHUNK), in_ptr + row * in_stride * 4 + (vecs * 4 + word) + r * (THREADS * 4),
                   mask=None if EVEN else read)
    async_copy.commit_group()
    async_copy.wait_group(0)
    segment = reinterpret(segment, gl.int32, [R, SPLIT, THREADS, 4], flat)
    lane = gl.arange(0, THREADS, gl.SliceLayout(0, one))[None, :, None]
    vecs = program[:, None, None] * length + lane
    out_row = out_ptr + row * out_stride * 4 + (vecs * 4 + word)

    tops = gl.full([SPLIT, THREADS, 4], LEAST_WORD, gl.int32, tile)
    for r in range(R):                                    # no static_range: all of it at once would spill
        x = segment.index(r).load(tile)
        keep = (lane + r * THREADS < length) & (vecs + r * THREADS < n_vecs)
        tops = larger(tops, x if EVEN else gl.where(keep, x, LEAST_WORD), DTYPE)
    top = widen(tops, DTYPE)[0]
    for part in gl.static_range(1, PARTS):
        top = gl.maximum(top, widen(tops, DTYPE)[part])
    top = gl.max(gl.max(top, 2), 1)
    shift = gl.where(top == -float("inf"), 0.0, top)[:, None][:, :, None]  # -inf - -inf would be NaN
    total = gl.full([SPLIT, THREADS, 4], 0.0, gl.float32, tile)
    for r in range(R):
        x = segment.index(r).load(tile)
        keep = (lane + r * THREADS < length) & (vecs + r * THREADS < n_vecs)
        for part in gl.static_range(PARTS):
            y = exp2((widen(x, DTYPE)[part] - shift) * LOG2E)
            total += y if EVEN else gl.where(keep, y, 0.0)
    total = gl.sum(gl.sum(total, 2), 1)
    if SPLIT > 1:
        top, total = exchange(top, total, SPLIT)
    shift = gl.where(top == -float("inf"), 0.0, top)[:, None][:, :, None]
    scale = (1 / total)[:, None][:, :, None]              # a row of -inf is 0 x 1 / 0: NaN, as torch
    for r in range(R):
        x = segment.index(r).load(tile)
        keep = (lane + r * THREADS < length) & (vecs + r * THREADS < n_vecs)
        out = ()
        for part in gl.static_range(PARTS):
            out += (exp2((widen(x, DTYPE)[part] - shift) * LOG2E) * scale,)
        gl.store(out_row + r * (THREADS * 4), shorten(out, DTYPE), mask=None if EVEN else keep)


# ---------------------------------------------------------------- launchers

class Plan(NamedTuple):
    split: int       # programs a row, a cluster: a power of 2 up to 16
    num_warps: int
    per_sm: int      # programs an SM, for which registers are spared


CHUNK = 4            # vectors of a thread that are copied at once: Triton 3.6 puts a barrier between two copies

# Rows up to LEAST columns, by bytes an element, are 02's: its whole row keeps up to 4,096 of 2 bytes and 32,768 of 4,
# and falls behind at 16,384 of 2 (an H200). WIDTHS: the table's.
LEAST, WIDTHS = {2: 2**13, 4: 2**15}, {2: (2**14, 2**15, 2**16, 2**17, 2**18), 4: (2**16, 2**17, 2**18)}
# Bytes, an H200's: the shortest and the longest row of 1, 4, 8 and 16 programs; at first: the shortest above LEAST.
EDGES = 16400, 65536, 65552, 294912, 294928, 589824, 589840, 1179648
H200 = types.SimpleNamespace(major=9, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472)


def choose(n_cols, dtype, gpu):
    """The Plan for rows of n_cols elements on a GPU (its torch.cuda.get_device_properties), or None where no cluster
    holds one: as few programs as have room three times on an SM, since the fewer, the less they wait for each other.
    On an H200, where programs share a row, 4 warps were up to 5% faster than 8 in FP32 and at ragged widths, and within
    2% in BF16; more than 4 programs an SM were no faster. Two programs a row were 3 to 5% slower than four (64 KB in
    a program of 4 warps is too little in flight, of 8 warps too much to wait for; at 40,960 columns of BF16 2% faster).
    """
    room = min(gpu.shared_memory_per_block_optin, gpu.shared_memory_per_multiprocessor // 3 - 1024) - 1024
    for split in (1, 4, 8, 16)[:4 if gpu.major in (9, 10) else 3]:  # more than 8 is not for every GPU
        plan = Plan(split, 8 if split == 1 else 4, 1)
        if (size := 512 * plan.num_warps * vectors(plan, n_cols, dtype)) <= room:
            return plan._replace(per_sm=min(4, gpu.shared_memory_per_multiprocessor // (size + 2048)))
    return None


def vectors(plan, n_cols, dtype):
    """Vectors of 16 bytes that a thread holds."""
    length = common.cdiv(common.cdiv(n_cols * dtype.itemsize, 16), 8 * plan.split) * 8
    return common.cdiv(length, 32 * plan.num_warps * CHUNK) * CHUNK


@functools.cache
def constants(plan, n_cols, dtype):
    """split_kernel's constants and options, which take longer to make than a launch does."""
    r, programs = vectors(plan, n_cols, dtype), [[1 << bit, 0, 0] for bit in range(plan.split.bit_length() - 1)]
    return {"DTYPE": getattr(gl, str(dtype).removeprefix("torch.")), "SPLIT": plan.split, "R": r, "CHUNK": CHUNK,
            "EVEN": n_cols * dtype.itemsize == plan.split * r * 512 * plan.num_warps,
            "tile": gl.BlockedLayout([1, 1, 4], [1, 32, 1], [1, plan.num_warps, 1], [2, 1, 0], programs),
            "flat": gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0], programs),
            "num_warps": plan.num_warps, "num_ctas": plan.split,
            "maxnreg": min(255, 2**16 // (32 * plan.num_warps * plan.per_sm) // 8 * 8)}


def pick(x, out):
    """The Plan for rows of x; None where 02's kernels are for them: rows up to LEAST, or of no Plan, an out that is not
    like x, rows of either that are not apart, or not of adjacent elements, or begin or end at no multiple of 16 bytes,
    a GPU without clusters."""
    size, gpu, n_cols = x.element_size(), torch.cuda.get_device_properties(x.device), x.shape[1]
    if (gpu.major < 9 or n_cols <= LEAST[size] or (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device)
            or not all(t.stride(1) == 1 and n_cols <= t.stride(0) < 2**37 and not any(n % 16 for n in (
                t.data_ptr(), *(size * n for n in (t.storage_offset(), n_cols, t.stride(0))))) for t in (x, out))):
        return None
    return choose(n_cols, x.dtype, gpu)


def given(x, out):
    """split_kernel's arguments: words, and in vectors a row's length and those between rows' beginnings."""
    return out.view(torch.int32), x.view(torch.int32), *(n * x.element_size() // 16 for n in (
        x.shape[1], x.stride(0), out.stride(0)))


def launch(plan, x, out):
    """Launch a Plan on tensors that `pick` accepts; returns the compiled kernel."""
    with torch.cuda.device_of(x):
        return split_kernel[(x.shape[0],)](*given(x, out), **constants(plan, x.shape[1], x.dtype))


def form(n_cols, dtype, gpu=H200):
    """(kernel, keywords) of launch() for rows of n_cols (dtype is its name), with no GPU."""
    x = torch.empty(1, n_cols, dtype=common.DTYPES[dtype])
    return split_kernel, dict(zip(split_kernel.arg_names, given(x, x))) | constants(
        choose(n_cols, x.dtype, gpu), n_cols, x.dtype)


def split_softmax(x, out=None):
    """Softmax of each row of a 2-D tensor, as torch.softmax(x, dim=-1); forward only, fp32 arithmetic.

    x, out, errors: as 02's softmax, which does what `pick` declines.
    """
    common.operands("softmax", common.DTYPES.values(), x=x, out=x if out is None else out)
    if x.is_cuda and x.dim() == 2 and len(x):
        new = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        if plan := pick(x, new):                           # rows of new then share no memory
            common.writable("softmax", new, x.shape)
            launch(plan, common.apart(x, new, elementwise=True), new)
            return new
    return narrow.softmax(x, out)


# ---------------------------------------------------------------- checks

def verify(x, out=None):  # an output of NaN
    narrow.close(split_softmax(x, torch.full_like(x, float("nan")) if out is None else out), x)


def check(report, dtypes, widths):
    """Against float64: every Plan, full and ragged, few rows and many, hard rows, views, in place, a graph."""
    print(f"[{report.name}] check", file=sys.stderr, flush=True)
    inputs = []
    for dtype in (common.DTYPES[name] for name in dtypes):
        vec = 16 // dtype.itemsize
        for n_cols in (row // dtype.itemsize for row in EDGES):
            inputs += [narrow.sample(3, n_cols, dtype), narrow.hard_rows(n_cols - 3 * vec, dtype)]
        inputs += [narrow.sample(2, n_cols, dtype) for n_cols in (*widths[dtype.itemsize], 151_936)]
        base = narrow.sample(9, 2**16 + 64, dtype)
        inputs += [narrow.sample(401, 2**16, dtype), base[::2], base[:, 16:-16], base[:1].expand(9, -1), base[:, 1:],
                   base[:, ::2], base[:0], *(narrow.sample(3, n_cols, dtype) for n_cols in (2**15 + 1, 2**21 + vec))]
    common.side_by_side(partial(verify, x) for x in inputs)
    frame = torch.full_like(base, float("nan"))
    verify(base[:, 16:-16], out=frame[:, 16:-16])
    assert frame[:, :16].isnan().all() and frame[:, -16:].isnan().all(), "split_softmax wrote outside its rows"
    narrow.close(split_softmax(copy := base.clone(), out=copy), base)
    x, out = narrow.sample(70, 2**17, dtype), torch.empty(70, 2**17, dtype=dtype, device="cuda")
    split_softmax(x, out)                                  # compiles, where nothing before it has
    torch.cuda.synchronize()
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        split_softmax(x, out)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        narrow.close(out, x)


def soak(launches, dtypes, seed):
    """As many launches as asked, on fresh data of ragged widths and any number of rows, each against torch."""
    draw, start = random.Random(seed), time.monotonic()
    for dtype in (common.DTYPES[draw.choice(dtypes)] for _ in range(launches)):
        n_cols = draw.choice((*WIDTHS[dtype.itemsize], 50_000, 151_936))
        if draw.random() < 0.01:                           # each of these may compile a kernel
            n_cols = draw.randrange(LEAST[dtype.itemsize] + 8, 2**18, 8)
        x = draw.randint(1, 4) * torch.randn(draw.randint(1, 100), n_cols, device="cuda").to(dtype)
        torch.testing.assert_close(split_softmax(x, torch.full_like(x, float("nan"))).float(), x.float().softmax(-1),
                                   atol=1e-7, rtol=torch.finfo(dtype).eps + 3e-5)
    print(f"{launches:,} launches, each right; {time.monotonic() - start:.0f} s")


# ---------------------------------------------------------------- the table

def time_wide(report, dtypes, widths):
    with report.table("wide", "softmax of wide rows, each read once", baseline="torch", roof=True,
                      cases=sum(len(widths[common.DTYPES[name].itemsize]) for name in dtypes)) as table:
        timed = []
        for case, x, out in (one for name in dtypes for one in narrow.cases(
                report, [name], widths[common.DTYPES[name].itemsize])):
            old, own = narrow.pick(x.shape[1], x.element_size()), {}
            others = peers.compiled(table, x) | peers.installed(table, x, narrow.close)
            if plan := pick(x, out):
                kernel, others = launch(plan, x, out), {"triton": partial(launch, plan, x, out), **others}
                own["triton"] = {"kernel": kernel.name, "config": f"1/{plan.split} of a row, {plan.per_sm} an SM",
                                 "num_warps": plan.num_warps, "regs": kernel.n_regs, "spills": kernel.n_spills}
            else:
                table.note(f"No row triton at {x.shape[1]:,} columns: split_softmax gives them to 02's softmax.")
            timed.append(narrow.time_case(table, case, x, out, {f"triton/{old.kernel}": old}, others, own))
        peers.explain(table, timed)
        table.note("torch.compile, liger and quack allocate their output; the others write into one that is there.")


def main():
    parser = common.parser(__doc__)
    parser.add_argument("--n-cols", type=common.whole(1), metavar="N",
                        help="one width (default: 16,384 to 262,144; fp32: from 65,536)")
    parser.add_argument("--dtype", choices=common.DTYPES, help="one dtype (default: bf16 and fp32)")
    parser.add_argument("--soak", type=common.whole(1), metavar="N", help="check N launches on fresh data, no table")
    report = common.start(parser, narrowing=("n_cols", "dtype", "soak"))
    args, gpu = report.args, report.gpu
    dtypes = [args.dtype] if args.dtype else ["bf16", "fp32"]
    checked = dtypes if args.dtype or args.quick else list(common.DTYPES)
    if gpu is None:
        return parser.error("--soak needs a GPU") if args.soak else offline.compile_all([
            form(n_cols, dtype) for dtype in checked for size in [common.DTYPES[dtype].itemsize]
            for n_cols in (WIDTHS[size][:2] if args.quick else (*WIDTHS[size], *(row // size for row in EDGES)))])
    if float(gpu["cc"]) < 9:
        return print(f"This step needs clusters, so compute capability 9.0 or newer; {gpu['name']} has {gpu['cc']}.")
    if args.soak:
        return soak(args.soak, checked, args.seed)
    widths = {size: [args.n_cols] if args.n_cols else WIDTHS[size][::3 if args.quick else 1] for size in WIDTHS}
    for n_cols in {*widths[2], *widths[4]}:                # input, output, two of peers; or references in float64
        report.need(max(4 * 4 * math.prod(narrow.matrix(gpu, 4, n_cols)), 2**32 + 2 * n_cols * 64 * len(checked)),
                    f"a softmax of rows of {n_cols:,} (input, outputs, check)")
    shapes = [(name, narrow.matrix(gpu, size, n_cols)) for name in dtypes for size in [common.DTYPES[name].itemsize]
              for n_cols in widths[size]]
    with peers.compiled_ahead(report, shapes):
        check(report, checked, widths)
    if args.check:
        return print(common.CHECKED)
    time_wide(report, dtypes, widths)
    report.finish()


if __name__ == "__main__":
    common.run(main)
