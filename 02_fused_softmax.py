"""How fast is a softmax whose row stays on chip, and what happens to rows that do not fit?

S1's and S2's fused softmax, with what they leave open: short rows, several a program, and rows that outgrow the
registers, with a running maximum and sum. Run it:

    python 02_fused_softmax.py                    every table
    python 02_fused_softmax.py --n-cols 151936    one width, all providers
    python 02_fused_softmax.py --dtype fp16       one dtype
    python 02_fused_softmax.py --quick            a smoke run

The answer is the row `triton` of the table `widths`: at every width at least torch's speed, because one read and
one write of the row is all that a softmax needs; `cliff` shows the row that no longer fits and what cures it.
"""
import math
import sys
import warnings
from functools import partial
from typing import NamedTuple

import torch

import common  # before triton: it chooses the interpreter where there is no GPU
import peers
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(out_ptr, in_ptr, n_cols, BLOCK_SIZE: tl.constexpr, in_stride=None, out_stride=None,
                   WIDE: tl.constexpr = False):
    row = tl.program_id(0)                               # one program per row
    if WIDE:                                             # row x stride passes 2^31
        row = row.to(tl.int64)
    offs = tl.arange(0, BLOCK_SIZE)                      # BLOCK_SIZE >= n_cols, a power of 2
    mask = offs < n_cols
    in_row = row * (n_cols if in_stride is None else in_stride)
    out_row = row * (n_cols if out_stride is None else out_stride)
    x = tl.load(in_ptr + in_row + offs, mask=mask, other=-float("inf")).to(tl.float32)
    x = x - tl.max(x, axis=0)                            # subtract the row max (stability)
    num = tl.exp(x)
    y = num / tl.sum(num, axis=0)
    tl.store(out_ptr + out_row + offs, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rows_kernel(out_ptr, in_ptr, n_rows, n_cols, in_stride, out_stride,
                ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDE: tl.constexpr = False):
    """The same for several short rows: one of 512 leaves a program too few bytes in flight to cover its barriers."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    rows = pid * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    mask = (rows < n_rows) & (cols < n_cols)
    x = tl.load(in_ptr + rows * in_stride + cols, mask=mask, other=-float("inf")).to(tl.float32)
    x = x - tl.max(x, axis=1, keep_dims=True)
    num = tl.exp(x)
    y = num / tl.sum(num, axis=1, keep_dims=True)
    tl.store(out_ptr + rows * out_stride + cols, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _grow(top, total, x):
    """Running maximum and sum, a lane each: no reduction and so no barrier until the row's end."""
    new = tl.maximum(top, x)
    shift = tl.where(new == -float("inf"), 0.0, new)     # -inf alone so far: -inf - -inf would be NaN
    return new, total * tl.exp(top - shift) + tl.exp(x - shift)


@triton.jit
def online_kernel(out_ptr, in_ptr, n_cols, in_stride, out_stride, BLOCK_SIZE: tl.constexpr, STAGES: tl.constexpr,
                  ALIGN: tl.constexpr, WIDE: tl.constexpr = False, EDGE: tl.constexpr = 1024):
    """Online softmax (Milakov and Gimelshein, 2018): a row of any length in chunks, read twice, written once.

    The chunks begin at the row's first multiple of ALIGN elements (16 bytes) and are whole: no mask, so 16 bytes a
    thread, however odd the row's length. What stays before and after them, the edges, goes element by element.
    """
    row = tl.program_id(0)
    offs, edge = tl.arange(0, BLOCK_SIZE), tl.arange(0, EDGE)
    if WIDE:
        row, n_cols = row.to(tl.int64), n_cols.to(tl.int64)
    head = min((ALIGN - (row * in_stride) % ALIGN) % ALIGN, n_cols)  # ALIGN is 1 where out is aligned differently
    body = (n_cols - head) // BLOCK_SIZE * BLOCK_SIZE
    in_row, out_row = in_ptr + row * in_stride, out_ptr + row * out_stride
    in_body = in_ptr + tl.multiple_of(row * in_stride + head, ALIGN)
    out_body = out_ptr + tl.multiple_of(row * out_stride + head, ALIGN)

    top, total = tl.full((BLOCK_SIZE,), -float("inf"), tl.float32), tl.zeros((BLOCK_SIZE,), tl.float32)
    for start in tl.range(0, body, BLOCK_SIZE, num_stages=STAGES):  # later chunks load before this one is done
        x = tl.load(in_body + (start + offs), eviction_policy="evict_last").to(tl.float32)
        top, total = _grow(top, total, x)
    edge_top, edge_total = tl.full((EDGE,), -float("inf"), tl.float32), tl.zeros((EDGE,), tl.float32)
    for start in tl.range(0, n_cols - body, EDGE, num_stages=1):
        cols = start + edge
        mask = cols < n_cols - body
        cols = tl.where(cols < head, cols, cols + body)
        x = tl.load(in_row + cols, mask=mask, other=-float("inf")).to(tl.float32)
        edge_top, edge_total = _grow(edge_top, edge_total, x)

    row_top = tl.maximum(tl.max(top, axis=0), tl.max(edge_top, axis=0))
    shift = tl.where(row_top == -float("inf"), 0.0, row_top)  # a row of -inf divides 0 by 0: NaN, as torch
    denominator = tl.sum(total * tl.exp(top - shift), axis=0) + tl.sum(edge_total * tl.exp(edge_top - shift), axis=0)

    for start in tl.range(0, n_cols - body, EDGE, num_stages=1):
        cols = start + edge
        mask = cols < n_cols - body
        cols = tl.where(cols < head, cols, cols + body)
        y = tl.exp(tl.load(in_row + cols, mask=mask).to(tl.float32) - shift) / denominator
        tl.store(out_row + cols, y.to(out_ptr.dtype.element_ty), mask=mask)
    for start in tl.range(0, body, BLOCK_SIZE, num_stages=STAGES):  # backwards: what was read last is still in L2
        cols = body - BLOCK_SIZE - start + offs
        x = tl.load(in_body + cols, eviction_policy="evict_first").to(tl.float32)
        y = tl.exp(x - shift) / denominator
        tl.store(out_body + cols, y.to(out_ptr.dtype.element_ty), cache_modifier=".cs")  # L2 is for the input


# ---------------------------------------------------------------- launchers

class Pick(NamedTuple):
    n_cols: int | float  # up to this many columns
    kernel: str          # a key of KERNELS
    tile: int | None     # elements of a program's tile: ROWS x BLOCK_SIZE, or a chunk; None: the whole row
    num_warps: int


KERNELS = {"rows": rows_kernel, "whole-row": softmax_kernel, "online": online_kernel}
# Warps of the whole-row kernel up to a width: 32 values a thread; beyond 32,768 it spills, fewer warps the least.
WHOLE_ROW = [Pick(limit, "whole-row", None, warps)
             for limit, warps in ((4096, 4), (16384, 16), (32768, 32), (65536, 16), (131072, 32))]
ONLINE = Pick(float("inf"), "online", 8192, 16)
# Chunks in flight, by bytes an element. 2 bytes: the loads of 16 warps are enough; 4: two more chunks, in 64 KB of
# shared memory, which every GPU has.
ONLINE_STAGES = {2: 1, 4: 3}
# By bytes an element: the shortest rows by 2 warps, since the more warps share a row, the more wait for each other;
# short rows until a program has 4 KB in flight; whole rows until they spill (`cliff`); chunks.
PICKS = {size: [Pick(256, "rows", 1024, 2), Pick(2048 // size, "rows", 4096 // size, 4), *WHOLE_ROW[:3],
                Pick(98304, "online", 4096, 8), ONLINE] for size in (2, 4)}

WIDTHS, UNFUSED, CLIFF = (512, 1024, 4096, 16384, 32768, 65536, 131072, 262144), (4096,), (65536, 131072)  # columns


def pick(n_cols, element_size):
    """The row of PICKS for rows of n_cols elements of element_size bytes."""
    return next(row for row in PICKS[element_size] if n_cols <= row.n_cols)


def ours(n_cols, element_size):
    """What the table `widths` times: {provider: Pick}."""
    whole = [row for row in WHOLE_ROW if n_cols <= row.n_cols]
    return {"triton": pick(n_cols, element_size)} | ({"triton/whole-row": whole[0]} if whole else {})


# What the table `cliff` times; the warps are no part of the provider's name.
CLIFFS = {f"triton/{row.kernel} {row.num_warps}": row
          for row in (*(Pick(CLIFF[-1], "whole-row", None, warps) for warps in (4, 16, 32)), ONLINE)}


def launch(choice, x, out):
    """Launch one Pick on 2-D tensors with unit column strides; returns the compiled kernel (None if interpreted)."""
    (n_rows, n_cols), in_stride, out_stride = x.shape, x.stride(0), out.stride(0)
    block = triton.next_power_of_2(n_cols)
    options = {"num_warps": choice.num_warps,
               "WIDE": (n_rows - 1) * max(in_stride, out_stride) + n_cols + (choice.tile or 0) >= 2**31}
    with torch.cuda.device_of(x):  # the tensor's own device, current or not
        if choice.kernel == "online":
            size = x.element_size()
            align = 16 // size if (in_stride - out_stride) % (16 // size) == 0 else 1
            return online_kernel[(n_rows,)](out, x, n_cols, in_stride, out_stride, BLOCK_SIZE=choice.tile,
                                            STAGES=ONLINE_STAGES[size], ALIGN=align, **options)
        if choice.kernel == "rows":
            rows = max(1, choice.tile // block)
            return rows_kernel[(triton.cdiv(n_rows, rows),)](out, x, n_rows, n_cols, in_stride, out_stride,
                                                             ROWS=rows, BLOCK_SIZE=block, **options)
        strides = {} if in_stride == out_stride == n_cols else {"in_stride": in_stride, "out_stride": out_stride}
        return softmax_kernel[(n_rows,)](out, x, n_cols, BLOCK_SIZE=block, **strides, **options)


def softmax(x, out=None):
    """Softmax of each row of a 2-D tensor, as torch.softmax(x, dim=-1); forward only, fp32 arithmetic.

    x: (n_rows, n_cols), bf16, fp16 or fp32, any strides, any size, on any GPU of the process. out: where to write,
    of x's shape, dtype and device, any strides without overlap, or x itself (an x that overlaps it otherwise is copied
    first); without it, a new contiguous tensor. Raises TypeError for other dtypes, ValueError for other shapes and
    devices, RuntimeError where a gradient would be lost.
    """
    common.operands("softmax", common.DTYPES.values(), x=x, out=x if out is None else out)
    if x.dim() != 2:
        raise ValueError(f"softmax: x has {x.dim()} dimensions; it must have 2, and its rows are taken")
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    else:
        common.writable("softmax", out, x.shape)
    n_rows, n_cols = x.shape
    if n_rows == 0 or n_cols == 0:
        return out
    if n_cols > 1 and x.stride(1) != 1:
        x = x.contiguous()  # one copy costs less than a strided read of every element
    if (n_cols > 1 and out.stride(1) != 1) or (n_rows > 1 and out.stride(0) < n_cols):
        return out.copy_(softmax(x))  # rows of out are no rows in memory: torch scatters
    launch(pick(n_cols, x.element_size()), common.apart(x, out, elementwise=True), out)
    return out


def unfused(x):
    """The softmax as five PyTorch kernels, for M x N elements: 5MN + 2M read, 3MN + 2M written."""
    top = x.amax(dim=1)                        # reads MN, writes M
    z = x - top[:, None]                       # reads MN + M, writes MN
    numerator = torch.exp(z)                   # reads MN, writes MN
    denominator = numerator.sum(dim=1)         # reads MN, writes M
    return numerator / denominator[:, None]    # reads MN + M, writes MN


def verify(x, choice=None, out=None):
    """softmax(x), or the kernel of a Pick, against float64, on an output of NaN."""
    out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out).fill_(float("nan"))
    softmax(x, out) if choice is None else launch(choice, x, out)
    close(out, x)


def close(out, x, slack=1):
    """The tolerance: the output's rounding; x - max and its product with log2(e), each rounded and up to 88 large
    before exp is zero; the additions that a value goes through; subnormals may be flushed. slack: times that."""
    rtol = torch.finfo(x.dtype).eps / 2 + 2**-24 * (2 * 88 + 32 + x.shape[1] / 2048)
    torch.testing.assert_close(out.double(), torch.softmax(x.double(), dim=-1), rtol=slack * rtol,
                               atol=2**-24 if x.dtype == torch.float16 else 2**-126, equal_nan=True)


def sample(n_rows, n_cols, dtype):
    """Random rows, every second one with an outlier: with it a lost maximum shows, without it a lost summand."""
    x = torch.randn(n_rows, n_cols, device=common.device())
    x[1::2, n_cols * 2 // 3] = 30
    return x.to(dtype)


def hard_rows(n_cols, dtype):
    """Rows that break a careless softmax: huge, equal, infinite, NaN."""
    inf, largest = float("inf"), torch.finfo(dtype).max
    x = torch.randn(10, n_cols, device=common.device()).to(dtype)
    x[0] += 1e4                          # exp overflows without the maximum's shift
    x[1] = -1e4                          # a padded lane must not win the maximum
    x[2], x[2, -1] = -largest, largest   # their difference overflows
    x[3] = largest
    x[4, :-1] = -inf                     # chunks of -inf alone before and after finite ones
    x[5, 1:] = -inf
    x[6, : n_cols // 2] = -inf
    x[7] = -inf                          # NaN, as torch, and so are the next two
    x[8, n_cols // 2] = inf
    x[9, -1] = float("nan")
    return x


def check(report, dtypes, timed=(), widths=()):
    """Every path against float64, before anything is timed; dtypes and timed are names, timed those of the tables."""
    print(f"[{report.name}] check", file=sys.stderr, flush=True)
    every_kernel = [Pick(1024, "rows", 2048, 4), Pick(1024, "whole-row", None, 4), Pick(1024, "online", 64, 4)]
    checks = []

    def later(x, choices=(None,), out=None):
        checks.extend(partial(verify, x, choice, out) for choice in choices)
    for name, dtype in ((name, common.DTYPES[name]) for name in dtypes):
        for shape in ((1, 1), (7000, 1), (5, 2), (3, 3), (9, 127), (11, 1000), (1, 1024), (3, 1025), (2, 5000)):
            later(sample(*shape, dtype))
        limits = [row.n_cols for row in PICKS[dtype.itemsize][:-1]]  # both sides of each, and a million and one
        for n_cols in (*limits, *(n + 1 for n in limits), 151_936, 2**20 + 1) if report.gpu else ():
            later(sample(2, n_cols, dtype))
        for n_cols in widths if name in timed else ():
            later(sample(2, n_cols, dtype), (None, *ours(n_cols, dtype.itemsize).values()))
        for n_cols in CLIFF if name in timed[:1] else ():
            later(sample(2, n_cols, dtype), CLIFFS.values())
        for x in (hard_rows(n_cols, dtype) for n_cols in (5, 16, 300)):
            later(x, (None, *every_kernel))
        base = sample(40, 900, dtype)
        for x in (base.t(), base[:, ::2], base[:, 5:5], base[7:7]):
            later(x)
        for x in (base[:, 3:-2], base[::3], base[:1].expand(6, 900), base[:, :1]):
            later(x, (None, *every_kernel))
        later(base, out=torch.empty_like(base.t()).t())
    common.side_by_side(checks)
    for dtype in (common.DTYPES[name] for name in dtypes):
        base = sample(40, 900, dtype)
        frame = torch.full_like(base, float("nan"))
        verify(base[:, 3:-2], out=frame[:, 3:-2])
        assert frame[:, :3].isnan().all() and frame[:, -2:].isnan().all(), "softmax wrote outside its rows"
        copy = base.clone()
        close(softmax(copy, out=copy), base)
        x = sample(6, *UNFUSED, dtype)
        close(unfused(x), x, slack=48)  # it rounds x - max, up to 40 large, to the dtype before the exponential
    if report.gpu and torch.cuda.mem_get_info()[0] > 6 * 2**30:  # offsets past 2^31: rows 2^30 elements apart
        store = torch.empty(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
        for n_cols in (500, 4000, 100_000):
            verify(store.as_strided((3, n_cols), (2**30, 1)).copy_(sample(3, n_cols, torch.bfloat16)))


# ---------------------------------------------------------------- tables

def matrix(gpu, itemsize, n_cols):
    """2^25 elements as in S1, or more where that is less than 8 times the L2, as rows of n_cols."""
    n = max(2**25, triton.next_power_of_2(triton.cdiv(8 * gpu["l2_bytes"], itemsize)))
    return max(1, n // n_cols), n_cols


def cases(report, dtypes, widths):
    """(fields of a case, x, out) for each dtype and width; the widths are views of one pair of tensors."""
    for dtype in dtypes:
        shapes = [matrix(report.gpu, common.DTYPES[dtype].itemsize, n_cols) for n_cols in widths]
        x = torch.randn(max(map(math.prod, shapes)), dtype=common.DTYPES[dtype], device="cuda")
        out = torch.empty_like(x)
        for rows, n_cols in shapes:
            yield ({"n_rows": rows, "n_cols": n_cols, "dtype": dtype},
                   *(tensor[:rows * n_cols].view(rows, n_cols) for tensor in (x, out)))


def time_case(table, case, x, out, picks, others=None, own=None):
    """Time Picks, torch and others on the same tensors, equal Picks once, for both rows; returns (rows, torch's call).
    """
    own, same = dict(own or {}), {}
    for name, choice in picks.items():
        kernel = launch(choice, x, out)
        own[name] = {"provider": name.split()[0], "kernel": KERNELS[choice.kernel].__name__,
                     "num_warps": choice.num_warps, "regs": kernel.n_regs, "spills": kernel.n_spills}
        first = next(other for other in picks if picks[other] == choice)
        same |= {name: first} if first != name else {}
    providers = {name: partial(launch, choice, x, out) for name, choice in picks.items() if name not in same}
    providers["torch"] = partial(torch.softmax, x, dim=-1, out=out)
    # bytes: MN elements read, MN written, however often a kernel reads or spills them
    return table.time(case, providers | (others or {}), own, bytes=2 * x.nbytes, same=same), providers["torch"]


def time_widths(report, dtypes, widths):
    with report.table("widths", "softmax, rows of every width", baseline="torch", roof=True,
                      cases=len(dtypes) * len(widths)) as table:
        peers.explain(table, [time_case(table, case, x, out, ours(x.shape[1], x.element_size()),
                                        peers.compiled(table, x)) for case, x, out in cases(report, dtypes, widths)])
        table.note(f"triton/whole-row ends at {WHOLE_ROW[-1].n_cols:,} columns, where it already spills (`cliff`). "
                   "Where softmax() takes it as it is, one timing is in both rows.")
        table.note("torch.compile allocates its output; the others write into one that is there.")


def time_unfused(report, dtypes):
    with report.table("unfused", "five PyTorch kernels against one", baseline="torch",
                      cases=len(dtypes)) as table:
        for case, x, out in cases(report, dtypes, UNFUSED):
            m, mn = x.shape[0], x.numel()
            five = ((5 * mn + 2 * m) + (3 * mn + 2 * m)) * x.element_size()  # read, written
            rows, _ = time_case(table, case, x, out, {"triton": pick(x.shape[1], x.element_size())},
                                {"unfused": partial(unfused, x)}, {"unfused": {"bytes": five}})
            more, longer = (rows["unfused"][key] / rows["triton"][key] for key in ("bytes", "ms"))
            table.note(f"{case['dtype']}: the five move {more:.2f} times the bytes in {longer:.2f} times the time.")


def time_cliff(report, dtype):
    with report.table("cliff", "whole rows that outgrow the registers, and the cure", baseline="torch",
                      cases=len(CLIFF)) as table:
        peers.explain(table, [time_case(table, case, x, out, CLIFFS) for case, x, out in cases(report, [dtype], CLIFF)])
        table.note("spills: 32-bit registers a thread. triton/online reads a row twice, the second time backwards: "
                   "L2 still has the end of it.")


def main():
    parser = common.parser(__doc__)
    parser.add_argument("--n-cols", type=common.whole(1), metavar="N",
                        help="the table widths at this many columns, and no other table (default: 512 to 262,144)")
    parser.add_argument("--dtype", choices=common.DTYPES, help="one dtype (default: bf16 and fp32; cliff: bf16)")
    report = common.start(parser, narrowing=("n_cols", "dtype"))
    if report.gpu is None:
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, at the NaN that is wanted
        check(report, ["fp16", "fp32"])
        print("Every kernel agrees with float64 at small sizes, in fp16 and fp32. The interpreter has no bf16: "
              "05_inspect_ir.py compiles it.")
        return
    args = report.args
    dtypes = [args.dtype] if args.dtype else ["bf16", "fp32"]
    widths = [args.n_cols] if args.n_cols else WIDTHS[::3] if args.quick else WIDTHS
    for dtype, n_cols in ((common.DTYPES[name], n_cols) for name in dtypes for n_cols in widths):
        rows, _ = matrix(report.gpu, dtype.itemsize, n_cols)
        # five tensors: input, output, what unfused() holds; or check()'s two rows, with references in float64
        report.need(max(5 * rows * n_cols * dtype.itemsize, 2 * n_cols * 64),
                    f"a softmax of {rows:,} x {n_cols:,} {dtype} elements (input, outputs, check)")
    shapes = [(name, matrix(report.gpu, common.DTYPES[name].itemsize, n_cols)) for name in dtypes for n_cols in widths]
    with peers.compiled_ahead(report, shapes):
        check(report, dtypes if args.dtype else common.DTYPES, dtypes, widths)
    if args.check:
        return print(common.CHECKED)
    time_widths(report, dtypes, widths)
    if not args.n_cols:
        time_unfused(report, dtypes)
        time_cliff(report, dtypes[0])
    report.finish()


if __name__ == "__main__":
    common.run(main)
