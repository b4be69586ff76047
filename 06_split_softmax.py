"""How fast is a softmax of rows that outgrow a program, when every row is read from DRAM once?

Programs stay for the whole launch. A row, or its 1/SPLIT, waits in a ring in shared memory that TMA keeps filling:
it is reduced from there and, when its maximum and sum are known, read from there again and written. The programs that
share a row tell each other theirs, and reduce their next row before they need the answer. In Gluon: Triton 3.6
pipelines no such loop.

    python 06_split_softmax.py                    the table `wide`
    python 06_split_softmax.py --n-cols 151936    one width; --dtype fp16: one dtype; --quick: a smoke run
    python 06_split_softmax.py --soak 10000       so many launches on fresh data, each checked; no table

The answer is the row `triton` of the table `wide`, beside 02's kernel for such rows, which reads them twice.
"""
import math
import os
import random
import sys
import threading
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
import triton  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: E402

narrow = import_module("02_fused_softmax")
common.INTERPRETED |= (asked or "").lower() in ("1", "y", "yes", "on", "true")  # then nothing is timed
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the names before Triton 3.8, 3.9
buffer = gl.shared_memory_descriptor
reinterpret = getattr(buffer, "reinterpret", None) or buffer._reinterpret
LOG2E = gl.constexpr(1.4426950408889634)
# TMA moves up to 256 elements at once, whatever their size: bytes go as elements of 8, from Triton 3.7 on of 4.
WORD = torch.int64 if [*map(int, triton.__version__.split(".")[:2])] < [3, 7] else torch.int32
WORDS = gl.constexpr(16 // WORD.itemsize)                 # a vector
LAYOUT = gl.NVMMASharedLayout(0, 8 * WORD.itemsize, rank=2)  # a row's bytes as they come


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
def publish(word, top, total, tag):
    """Thread 0 writes two words, a value and its tag each: no fence, which would wait for every output store."""
    gl.inline_asm_elementwise("""{
        .reg .pred p; .reg .b32 t; .reg .b64 a, b;
        mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; mov.b64 a, {$2, $4}; mov.b64 b, {$3, $4};
        @p st.relaxed.gpu.global.v2.b64 [$1], {a, b}; mov.u32 $0, 0;
    }""", "=r,l,r,r,r", [word.to(gl.int64), top, total, tag], gl.int32, is_pure=False, pack=1)


@gluon.jit
def peek(word):
    """Load the words of a row's programs and do not wait for them."""
    return gl.inline_asm_elementwise("""{
        .reg .b64 a, b;
        ld.relaxed.gpu.global.v2.b64 {a, b}, [$4]; mov.b64 {$0, $1}, a; mov.b64 {$2, $3}, b;
    }""", "=r,=r,=r,=r,l", [word.to(gl.int64)], (gl.float32, gl.int32, gl.float32, gl.int32), is_pure=False, pack=1)


@gluon.jit
def settle(word, peeked, tag):
    """Maxima and sums: what peek saw where the tag is right, else loaded until it is. All programs are resident: it
    comes; should it not in 10 s and 2^20 loads (a GPU that is shared may stand still), the launch ends in error."""
    top, top_tag, total, total_tag = peeked
    return gl.inline_asm_elementwise("""{
        .reg .pred p; .reg .b32 u, v, n; .reg .b64 a, b, start, now;
        mov.b32 $0, $3; mov.b32 u, $4; mov.b32 $1, $5; mov.b32 v, $6; mov.b32 n, 0; mov.u64 start, %globaltimer;
    again:
        setp.eq.u32 p, u, $7; setp.eq.and.u32 p, v, $7, p; @p bra done;
        ld.relaxed.gpu.global.v2.b64 {a, b}, [$2]; mov.b64 {$0, u}, a; mov.b64 {$1, v}, b;
        add.u32 n, n, 1; setp.lt.u32 p, n, 0x100000; @p bra again;
        mov.u64 now, %globaltimer; sub.u64 now, now, start; setp.lt.u64 p, now, 10000000000; @p bra again;
        trap;
    done:
    }""", "=&r,=&r,l,r,r,r,r,r", [word.to(gl.int64), top, top_tag, total, total_tag, tag], (gl.float32, gl.float32),
        is_pure=False, pack=1)


@gluon.jit
def _load(source, ring, bars, t, rows, group, groups, first, CHUNKS: gl.constexpr):
    """Start the load of this program's segment of its t-th row, where there is one. TMA writes zeros beyond a row."""
    slot = t % bars.shape[0]
    mbarrier.expect(bars.index(slot), CHUNKS * source.block_type.nbytes, pred=t < rows)
    for c in gl.static_range(CHUNKS):
        async_load(source, [group + t * groups, first + c * source.block_type.shape[1]], bars.index(slot),
                   ring.index(slot * CHUNKS + c), pred=t < rows)


@gluon.jit(do_not_specialize=["epoch", "n_rows", "n_vecs", "out_stride"])
def split_kernel(out_ptr, source, words, epoch, n_rows, n_vecs, out_stride,
                 DTYPE: gl.constexpr, SPLIT: gl.constexpr, R: gl.constexpr, CHUNKS: gl.constexpr, RING: gl.constexpr,
                 LAG: gl.constexpr, EVEN: gl.constexpr, HINT: gl.constexpr):
    """Program SPLIT x g + s: segment s of the rows g, g + groups, ...; a vector is 16 bytes of a row.

    A step reduces a row's segment, CHUNKS chunks in one of RING slots, writes that of LAG steps before, which waited
    for its maxima and sums, and starts the load that takes its slot.
    """
    num_warps: gl.constexpr = gl.num_warps()
    THREADS: gl.constexpr = 32 * num_warps
    CHUNK: gl.constexpr = R * THREADS                     # vectors
    PARTS: gl.constexpr = 32 // DTYPE.primitive_bitwidth  # elements a word
    tile: gl.constexpr = gl.BlockedLayout([R, 1, 4], [1, 32, 1], [1, num_warps, 1], [2, 1, 0])
    lane: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, tile))  # one value a thread
    linear: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    r = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(2, tile)))[:, None, None]
    vecs = r * THREADS + gl.arange(0, THREADS, lane)[None, :, None]  # of a chunk
    offs = vecs * 4 + gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, tile)))[None, None, :]
    ring = gl.allocate_shared_memory(source.dtype, [RING * CHUNKS, 1, source.block_type.shape[1]], source.layout)
    bars = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(RING):
        mbarrier.init(bars.index(slot), count=1)
    gl.static_assert(LAG < RING and LAG <= 3 and (SPLIT > 1 or LAG == 0))

    segment, group, groups = gl.program_id(0) % SPLIT, gl.program_id(0) // SPLIT, gl.num_programs(0) // SPLIT
    rows = (n_rows - group + groups - 1) // groups        # of this group
    length = (n_vecs + 8 * SPLIT - 1) // (8 * SPLIT) * 8  # segments are alike, to a line of 8 vectors
    first = segment * length
    end = gl.minimum(first + length, n_vecs)
    word = words + group * (8 * SPLIT * 2)                # of 8 rows: 2 x LAG + 2 or more are in use
    theirs = word + gl.arange(0, SPLIT, gl.BlockedLayout([max(1, SPLIT // 32)], [32], [num_warps], [0])) * 2
    for t in range(RING):
        _load(source, ring, bars, t, rows, group, groups, first * WORDS, CHUNKS)
    own_tops, own_totals = (gl.to_tensor(0.0),) * LAG, (gl.to_tensor(0.0),) * LAG  # of the rows that wait
    for t in range(rows + LAG):                           # the last LAG steps reduce what is thrown away
        tag, old = epoch + t, epoch + t - LAG
        if SPLIT > 1:                                     # on their way while this row is reduced
            peeked = peek(theirs + (old & 7) * (SPLIT * 2))
        mbarrier.wait(bars.index(t % RING), (t // RING) & 1, pred=t < rows)
        top = gl.full([THREADS], -float("inf"), gl.float32, lane)
        total = gl.full([THREADS], 0.0, gl.float32, lane)
        for c in gl.static_range(CHUNKS):
            x = reinterpret(ring.index(t % RING * CHUNKS + c), gl.int32, [R, THREADS, 4], linear).load(tile)
            for part in gl.static_range(PARTS):
                y = widen(x, DTYPE)[part]
                if not EVEN:
                    y = gl.where(first + c * CHUNK + vecs < end, y, -float("inf"))
                top = gl.maximum(top, gl.max(gl.max(y, 2), 0))
        top = gl.max(top, 0)
        shift = gl.where(top == -float("inf"), 0.0, top)  # -inf - -inf would be NaN
        for c in gl.static_range(CHUNKS):
            x = reinterpret(ring.index(t % RING * CHUNKS + c), gl.int32, [R, THREADS, 4], linear).load(tile)
            for part in gl.static_range(PARTS):
                y = exp2((widen(x, DTYPE)[part] - shift) * LOG2E)
                if not EVEN:
                    y = gl.where(first + c * CHUNK + vecs < end, y, 0.0)
                total += gl.sum(gl.sum(y, 2), 0)
        total = gl.sum(total, 0)
        if SPLIT > 1 and t < rows:
            publish(word + ((tag & 7) * SPLIT + segment) * 2, top, total, tag)
        own_tops, own_totals = own_tops + (top,), own_totals + (total,)
        if t >= LAG:
            peak, scale = own_tops[0], own_totals[0]
            if SPLIT > 1:
                tops, totals = settle(theirs + (old & 7) * (SPLIT * 2), peeked, old)
                peak = gl.max(tops, 0)
                scale = gl.sum(totals * exp2((tops - gl.where(peak == -float("inf"), 0.0, peak)) * LOG2E), 0)
            peak = gl.where(peak == -float("inf"), 0.0, peak)
            scale = 1 / scale                             # a row of -inf is 0 x 1 / 0: NaN, as torch
            out_row = out_ptr + ((group + (t - LAG) * groups).to(gl.int64) * out_stride + first) * 4
            for c in gl.static_range(CHUNKS):
                z = reinterpret(ring.index((t - LAG) % RING * CHUNKS + c), gl.int32, [R, THREADS, 4], linear).load(tile)
                out = ()
                for part in gl.static_range(PARTS):
                    out += (exp2((widen(z, DTYPE)[part] - peak) * LOG2E) * scale,)
                gl.store(out_row + c * (CHUNK * 4) + offs, shorten(out, DTYPE),
                         mask=None if EVEN else first + c * CHUNK + vecs < end, cache_modifier=HINT)
            _load(source, ring, bars, t - LAG + RING, rows, group, groups, first * WORDS, CHUNKS)  # all have read it
        own_tops, own_totals = own_tops[1:], own_totals[1:]


# ---------------------------------------------------------------- launchers

class Plan(NamedTuple):
    split: int           # programs a row: a power of 2
    chunk: int           # bytes of a chunk: a power of 2, 512 x num_warps or more
    num_warps: int
    per_sm: int          # programs an SM
    ring: int = 3        # segments in shared memory
    lag: int = 1         # of which so many wait for their row's maxima and sums, where split > 1
    hint: str = ""       # cache modifier of the stores


# Up to so many columns, by bytes an element: a row of up to 64 KB is one program's, else segments are of up to 32 KB.
# More loads under way, by a longer ring or more programs, were no faster on an H200. Up to LEAST columns 02's whole row
# was, there.
PICKS = {size: [(2**15 // size * split, Plan(split, 2**13, 8, 2)) for split in (4, 8, 16, 32, 64, 128, 256)]
         for size in (2, 4)}
PICKS[2].insert(0, (2**15, Plan(1, 2**14, 16, 1)))
LEAST, WIDTHS = {2: 2**14, 4: 2**15}, {2: (2**15, 2**16, 2**17, 2**18), 4: (2**16, 2**17, 2**18)}
H200 = types.SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448,  # to compile without
                             shared_memory_per_multiprocessor=233472)
_words, _lock = {}, threading.Lock()                      # mailbox's


def geometry(plan, n_cols, dtype, gpu):
    """(groups of programs, the kernel's constants, its options) for rows of n_cols elements, or None where the plan
    does not hold such rows on this GPU (its torch.cuda.get_device_properties)."""
    vecs, chunk_vecs, lag = common.cdiv(n_cols * dtype.itemsize, 16), plan.chunk // 16, plan.lag * (plan.split > 1)
    chunks = common.cdiv(common.cdiv(vecs, 8 * plan.split) * 8, chunk_vecs)
    shared = min(gpu.shared_memory_per_block_optin, gpu.shared_memory_per_multiprocessor // plan.per_sm - 1024)
    ring = min(plan.ring, (shared - 512) // (plan.chunk * chunks))  # beside it: barriers, what reductions need
    groups = plan.per_sm * gpu.multi_processor_count // plan.split
    if ring <= lag or not groups or chunks > 8:           # each chunk is code of its own
        return None
    return groups, {"DTYPE": getattr(gl, str(dtype).removeprefix("torch.")), "SPLIT": plan.split,
                    "R": chunk_vecs // (32 * plan.num_warps), "CHUNKS": chunks, "RING": ring, "LAG": lag,
                    "EVEN": vecs == plan.split * chunks * chunk_vecs, "HINT": plan.hint}, {
        "num_warps": plan.num_warps,
        "maxnreg": min(255, 2**16 // (32 * plan.num_warps * plan.per_sm) // 8 * 8),  # so that per_sm fit
        "launch_cooperative_grid": plan.split > 1}         # programs that wait: all are resident, or it is refused


def pick(x, out):
    """The first of PICKS that holds rows of x; None where there is none, out is not like x, a row of either begins or
    ends at no multiple of 16 bytes, or the GPU has no TMA."""
    size, gpu, n_cols = x.element_size(), torch.cuda.get_device_properties(x.device), x.shape[1]
    if (gpu.major < 9 or (out.shape, out.dtype, out.device) != (x.shape, x.dtype, x.device) or not all(
            t.stride(1) == 1 and n_cols <= t.stride(0) < 2**37 and not any(n % 16 for n in (
                t.data_ptr(), *(size * n for n in (t.storage_offset(), n_cols, t.stride(0))))) for t in (x, out))):
        return None
    plans = (plan for limit, plan in PICKS[size] if LEAST[size] < n_cols <= limit)
    return next((plan for plan in plans if geometry(plan, n_cols, x.dtype, gpu)), None)


def mailbox(device, rows):
    """(words, first tag) for a launch that uses so many tags: one set of words a device and stream, since launches
    that may overlap must not share; a captured graph gets, and clears, its own. Enough for 8 programs an SM."""
    stream, sms = torch.cuda.current_stream(device), torch.cuda.get_device_properties(device).multi_processor_count
    new = partial(torch.zeros, 8 * 16 * sms, dtype=torch.int64, device=device)
    if torch.cuda.is_current_stream_capturing():
        return new(), 1
    with _lock:
        words, tag = _words.get((device, stream.cuda_stream), (None, 2**30))
        if tag + rows > 2**30:
            words, tag = new(), 1
        _words[device, stream.cuda_stream] = words, tag + rows
    return words, tag


def launch(plan, x, out):
    """Launch one Plan on tensors that `pick` accepts; returns the compiled kernel."""
    (n_rows, n_cols), size = x.shape, x.element_size()
    with torch.cuda.device_of(x):
        groups, constants, options = geometry(plan, n_cols, x.dtype, torch.cuda.get_device_properties(x.device))
        groups = common.cdiv(n_rows, common.cdiv(n_rows, groups))  # as many rows each, or one less
        words, tag = mailbox(x.device, common.cdiv(n_rows, groups)) if plan.split > 1 else (out, 0)
        source = TensorDescriptor.from_tensor(x.view(WORD), [1, plan.chunk // WORD.itemsize], LAYOUT)
        sizes = n_rows, n_cols * size // 16, out.stride(0) * size // 16
        return split_kernel[(groups * plan.split,)](out.view(torch.int32), source, words, tag, *sizes, **constants,
                                                    **options)


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
    """Against float64: every pick, ragged widths, few rows and many, hard rows, views, overlap, graphs."""
    print(f"[{report.name}] check", file=sys.stderr, flush=True)
    inputs = []
    for dtype in (common.DTYPES[name] for name in dtypes):
        vec = 16 // dtype.itemsize
        for limit, plan in PICKS[dtype.itemsize]:
            many = 1 + 2 * plan.per_sm * report.gpu["sms"] // plan.split
            inputs += [narrow.sample(n_rows, n_cols, dtype) for n_rows in (1, many)
                       for n_cols in (limit, limit - 8 * vec, limit * 3 // 4 + vec)]
            inputs.append(narrow.hard_rows(limit - vec, dtype))
        base = narrow.sample(9, 2**16 + 64, dtype)
        inputs += [base[::2], base[:, 16:-16], base[:1].expand(9, -1), base[:, 1:], base[:, ::2], base[:0],
                   *(narrow.sample(3, n_cols, dtype) for n_cols in (*widths[dtype.itemsize], 2**15 + 1, 151_936,
                                                                     2**20 + vec))]
    common.side_by_side(partial(verify, x) for x in inputs)
    frame = torch.full_like(base, float("nan"))
    verify(base[:, 16:-16], out=frame[:, 16:-16])
    assert frame[:, :16].isnan().all() and frame[:, -16:].isnan().all(), "split_softmax wrote outside its rows"
    narrow.close(split_softmax(copy := base.clone(), out=copy), base)
    pairs = [(x, torch.empty_like(x)) for x in (narrow.sample(70, 2**17, dtype) for _ in range(2))]
    streams = [torch.cuda.Stream() for _ in pairs]
    torch.cuda.synchronize()
    for stream, pair in 50 * list(zip(streams, pairs)):
        with torch.cuda.stream(stream):
            split_softmax(*pair)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        for pair in pairs:
            split_softmax(*pair)
    for replay in range(4):                                # first what the streams wrote, then fresh data
        for x, out in pairs:
            narrow.close(out, x)
            verify(x.copy_(torch.randn_like(x)))
        graph.replay()


def soak(launches, dtypes, seed):
    """As many launches as asked, on fresh data of ragged widths and any number of rows, each against torch."""
    draw, start = random.Random(seed), time.monotonic()
    for dtype in (common.DTYPES[draw.choice(dtypes)] for _ in range(launches)):
        n_cols = draw.choice((*WIDTHS[2], 32_000, 50_000, 151_936))
        if draw.random() < 0.01:                           # each of these may compile a kernel
            n_cols = draw.randrange(LEAST[2], 2**18, 8)
        x = draw.randint(1, 4) * torch.randn(draw.randint(1, 100), n_cols, device="cuda").to(dtype)
        torch.testing.assert_close(split_softmax(x, torch.full_like(x, float("nan"))).float(), x.float().softmax(-1),
                                   atol=1e-7, rtol=torch.finfo(dtype).eps + 3e-5)
    print(f"{launches:,} launches, each right; {time.monotonic() - start:.0f} s")


def form(plan, dtype, n_cols, gpu=H200):
    """(kernel, keywords) of launch() for rows of n_cols (dtype is its name), with no GPU."""
    x = torch.empty(1, n_cols, dtype=common.DTYPES[dtype])
    _, constants, options = geometry(plan, n_cols, x.dtype, gpu)
    source = TensorDescriptor.from_tensor(x.view(WORD), [1, plan.chunk // WORD.itemsize], LAYOUT)
    arguments = x.view(torch.int32), source, torch.empty(1, dtype=torch.int64), 1, 1, 1, 1
    return split_kernel, dict(zip(split_kernel.arg_names, arguments)) | constants | options


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
    parser.add_argument("--n-cols", type=common.whole(1), metavar="N", help="one width (default: 32,768 to 262,144)")
    parser.add_argument("--dtype", choices=common.DTYPES, help="one dtype (default: bf16 and fp32)")
    parser.add_argument("--soak", type=common.whole(1), metavar="N", help="check N launches on fresh data, no table")
    report = common.start(parser, narrowing=("n_cols", "dtype", "soak"))
    args, gpu = report.args, report.gpu
    dtypes = [args.dtype] if args.dtype else ["bf16", "fp32"]
    checked = dtypes if args.dtype or args.quick else list(common.DTYPES)
    if gpu is None:
        return parser.error("--soak needs a GPU") if args.soak else offline.compile_all([
            form(plan, dtype, n_cols) for dtype in checked for limit, plan in PICKS[common.DTYPES[dtype].itemsize][
                :4 if args.quick else None] for n_cols in (limit, limit - 8)])  # full rows and ragged ones
    if float(gpu["cc"]) < 9:
        return print(f"This step needs TMA, so compute capability 9.0 or newer; {gpu['name']} has {gpu['cc']}.")
    if args.soak:
        return soak(args.soak, checked, args.seed)
    widths = {size: [args.n_cols] if args.n_cols else WIDTHS[size][::3 if args.quick else 1] for size in WIDTHS}
    for n_cols in {*widths[2], *widths[4]}:                # input, output, two of peers; or references in float64
        report.need(max(4 * 4 * math.prod(narrow.matrix(gpu, 4, n_cols)), 2 * n_cols * 64),
                    f"a softmax of rows of {n_cols:,} (input, outputs, check)")
    shapes = [(name, narrow.matrix(gpu, size, n_cols)) for name in dtypes for size in [common.DTYPES[name].itemsize]
              for n_cols in widths[size]]
    with peers.compiled_ahead(report, shapes):
        check(report, checked, widths)
    time_wide(report, dtypes, widths)
    report.finish()


if __name__ == "__main__":
    common.run(main)
