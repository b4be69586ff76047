"""What does FP32 cost on tensor cores when it is rounded or split before the product, and without them?

03 hands FP32 to `tl.dot`, which splits every tile anew in each program that reads it. Here one pass (`pack_kernel`)
rounds or splits each matrix once and lays B out as wgmma wants FP32, with K contiguous; then 07's warp-specialized
kernel multiplies the parts ("tf32" rounds A there, in registers). "ieee" is `fma_kernel`: the same ring of TMA tiles,
and no tensor core. Run it:

    python 08_fp32_matmul.py              the table, at 4,096
    python 08_fp32_matmul.py --n 8192     another size; any n, in elements a side
    python 08_fp32_matmul.py --quick      a smoke run

The answer is the column `ratio` of the rows `triton`, whose times contain the packing; "triton/pointers" is 03's
matmul, "triton/pack" the packing alone. Needs compute capability 9.0.
"""
import importlib
import sys
from functools import partial
from typing import NamedTuple

import torch

import common  # before triton: it chooses the interpreter where there is no GPU
import offline
import triton
import triton.language as tl
from specialized import SIZES, _barriers, _next, _produce, _ring, _tile
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

product, persistent = map(importlib.import_module, ("03_matmul", "07_persistent_matmul"))
Config = persistent.Config


@triton.jit
def _top(x, DROP: tl.constexpr):
    """FP32 rounded to its upper 32 - DROP bits, ties away from zero, as cvt.rna.tf32.f32 does for DROP = 13; what would
    round to infinity is cut off instead, and infinity and NaN stay."""
    bits = x.to(tl.int32, bitcast=True)
    up = bits + (1 << (DROP - 1))
    top = (tl.where((up & 0x7F800000) == 0x7F800000, bits, up) & (-1 << DROP)).to(tl.float32, bitcast=True)
    return tl.where(x == x, top, x)


@triton.jit
def pack_kernel(x_ptr, out_ptr, R, C, stride_r, stride_c, stride_out, PARTS: tl.constexpr, DROP: tl.constexpr,
                BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """x[R, C] as PARTS matrices of R rows below each other, whose sum it is but for the last part's rounding.
    C is the product's K, and contiguous afterwards; before, either dimension is."""
    num_c = tl.cdiv(C, BLOCK_C)
    r = (tl.program_id(0) // num_c).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    c = (tl.program_id(0) % num_c).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    mask = (r < R) & (c < C)
    x = tl.load(x_ptr + r * stride_r + c * stride_c, mask=mask)
    for part in tl.static_range(PARTS):
        top = _top(x, DROP)
        tl.store(out_ptr + (part * R + r) * stride_out + c, top.to(out_ptr.dtype.element_ty), mask=mask)
        x -= top


@gluon.jit
def _fma(a_bufs, b_bufs, ready, empty, c_ptr, stride_c, M, N, K, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
         GROUP_M: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr):
    """Eight warps of fma alone: FP32 as the standard has it."""
    tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    BLOCK_K: gl.constexpr = a_bufs.shape[2]
    stage, phase = 0, 0
    for unit in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, col = _tile(unit, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
        for k in range(gl.cdiv(K, BLOCK_K)):
            mbarrier.wait(ready.index(stage), phase)
            a = a_bufs.index(stage).load(gl.DotOperandLayout(0, layout, 0))
            b = b_bufs.index(stage).load(gl.DotOperandLayout(1, layout, 0))
            acc = gl.dot_fma(a, b, acc)
            mbarrier.arrive(empty.index(stage))
            stage, phase = _next(stage, phase, STAGES)
        rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))[:, None]
        cols = col + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))[None, :]
        gl.store(c_ptr + rows.to(gl.int64) * stride_c + cols, acc, mask=(rows < M) & (cols < N))


@gluon.jit(do_not_specialize=SIZES)
def fma_kernel(a_desc, b_desc, c_ptr, stride_c, M, N, K, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
               GROUP_M: gl.constexpr, STAGES: gl.constexpr, TM: gl.constexpr, TN: gl.constexpr, LM: gl.constexpr,
               WM: gl.constexpr):
    """FP32 without tensor cores: eight warps that multiply and one that loads. A thread has blocks of TM by TN; LM of
    a warp's 32 threads and WM of the 8 warps stand below each other."""
    layout: gl.constexpr = gl.BlockedLayout([TM, TN], [LM, 32 // LM], [WM, 8 // WM], [1, 0])
    ready, empty = _barriers(STAGES, 1), _barriers(STAGES, 1)
    fence_async_shared()
    a_bufs, b_bufs = _ring(a_desc, STAGES), _ring(b_desc, STAGES)
    gl.warp_specialize([
        (_fma, (a_bufs, b_bufs, ready, empty, c_ptr, stride_c, M, N, K, BLOCK_M, BLOCK_N, GROUP_M, STAGES, layout)),
        (_produce, (a_desc, b_desc, a_bufs, b_bufs, ready, empty, M, N, K, 1, GROUP_M, 1, False))], [1], [24])


# ---------------------------------------------------------------- launchers

class Mode(NamedTuple):
    parts: int          # an operand becomes the sum of so many
    drop: int           # bits of FP32 that a part lacks
    dtype: torch.dtype  # of a part
    config: Config
    fresh: bool = False    # tensor cores, which truncate every partial sum, sum one k tile; FP32 additions the tiles
    batch: int = 1         # above 1 the product rounds A, which TMA takes as it is: so many k tiles at once


class Fma(NamedTuple):
    """A config of fma_kernel; its letters are the kernel's.

    What limits it is the register file. In the loop's SASS (Triton 3.6, cc 9.0), with two banks that each give one
    operand a cycle and operands marked .reuse given for nothing, 776 of 2,048 FFMAs take two cycles: with all other
    instructions 2,989 cycles, of which 2,048 are 68.5%: compare pct_peak in its table.
    """
    block_m: int = 128
    block_n: int = 256
    block_k: int = 16
    stages: int = 4
    tm: int = 2
    tn: int = 4
    lm: int = 4
    wm: int = 4
    group: int = 8

    def __str__(self):
        return f"fma {self.block_m}x{self.block_n}x{self.block_k} s{self.stages} g{self.group}"


# "tf32x3" and "bf16x3" need 3 products of parts, "bf16x6" 6; as many stages as fit in 227 KB
MODES = {"tf32": Mode(1, 13, torch.float32, Config("ws", 128, 256, 32, 4, group=16), batch=4),
         "tf32x3": Mode(2, 13, torch.float32, Config("ws", 128, 128, 32, 3), True),
         "bf16x3": Mode(2, 16, torch.bfloat16, Config("ws", 128, 128, 64, 3), True),
         "bf16x6": Mode(3, 16, torch.bfloat16, Config("ws", 128, 128, 64, 2), True), "ieee": Fma()}


def pack(x, mode):
    """(parts of x below each other, [the launch that fills them]); x: rows by K, of any strides."""
    (rows, k), align = x.shape, 16 // mode.dtype.itemsize
    packed = torch.empty((mode.parts * rows, common.cdiv(k, align) * align), dtype=mode.dtype, device=x.device)[:, :k]
    return packed, [(pack_kernel, (common.cdiv(rows, 64) * common.cdiv(k, 64),), {
        "x_ptr": x, "out_ptr": packed, "R": rows, "C": k, "stride_r": x.stride(0), "stride_c": x.stride(1),
        "stride_out": packed.stride(0), "PARTS": mode.parts, "DROP": mode.drop, "BLOCK_R": 64, "BLOCK_C": 64,
        "num_warps": 8})]


def launches(mode, a, b, out, sms=132):
    """All that a product needs, as 07's: packing counts."""
    if isinstance(mode, Fma):
        (m, n), k, (bm, bn, bk, stages, tm, tn, lm, wm, group) = out.shape, a.shape[1], mode
        return [(fma_kernel, (min(sms, common.cdiv(m, bm) * common.cdiv(n, bn)),), {
            "a_desc": persistent.descriptor(a, [bm, bk], True), "b_desc": persistent.descriptor(b, [bk, bn], True),
            "c_ptr": out, "stride_c": out.stride(0), "M": m, "N": n, "K": k, "BLOCK_M": bm, "BLOCK_N": bn,
            "GROUP_M": group, "STAGES": stages, "TM": tm, "TN": tn, "LM": lm, "WM": wm, "num_warps": 8})]
    a, packing = pack(a, mode) if mode.batch == 1 or not persistent.tma_takes(a) else (a, [])
    b, more = pack(b.t(), mode)
    return packing + more + persistent.launches(mode.config, a, b.t(), out, True, mode.parts, sms, mode.fresh,
                                                1 if packing else mode.batch)


def fp32_matmul(a, b, precision="tf32", out=None, mode=None):
    """a @ b for FP32: 03's matmul with the same arguments, errors and results.

    a: (M, K), b: (K, N), any strides; "ieee" needs what TMA can copy (rows that are 16-byte aligned and without gaps).
    It is 03's, fp32_matmul.config then None, for other dtypes, where TMA cannot take out, or for "ieee" a or b, and off
    compute capability 9.0. Split in parts, infinity becomes NaN; "tf32" keeps it. mode: one of MODES' kind, to run
    instead.
    """
    a, b, out = product.checked(a, b, precision, out)
    if not isinstance(mode, Mode | Fma | None):
        raise TypeError(f"fp32_matmul: mode is {mode!r}; it must be None, a Mode or an Fma")
    mode = mode or MODES[precision]
    read = (a, b) if isinstance(mode, Fma) else ()
    # No interpreter runs Gluon: there it is 03's, too. Rows of parts are counted in 32 bits.
    if (common.INTERPRETED or a.dtype != torch.float32 or not persistent.sms_of(a.device)
            or not persistent.tma_fills(out) or not persistent.tma_takes(*read) or not 0 < a.shape[1]
            or max(*out.shape, a.shape[1]) >= 2**28):
        fp32_matmul.config = None
        return product.matmul(a, b, precision, out)
    with torch.cuda.device_of(a):  # Triton launches on the current device
        persistent.run(launches(mode, a, b, out, persistent.sms_of(a.device)))
    fp32_matmul.config = mode if isinstance(mode, Fma) else mode.config
    return out


# ---------------------------------------------------------------- proof

def cases():
    """(kernel, keywords) of all that fp32_matmul launches on large matrices."""
    a, b, out = (torch.empty(4096, 4096) for _ in range(3))
    return [launch[::2] for mode in MODES.values() for launch in launches(mode, a, b, out)]


def parts_add_up(mode):
    """Packed parts against what they came from, also where rounding up would be infinite; of both strides; and sums of
    their products, as the kernel adds them up, against the product."""
    x = torch.randn(70, 90, device=common.device())
    y = x * torch.logspace(-30, 37, 90, device=x.device)
    y[0, :4] = torch.tensor([3.4028234e38, -3.4028234e38, 0.0, -0.0])
    for z in (y, y.t(), y[3:, ::2]):
        packed, todo = pack(z, mode)
        persistent.run(todo)
        wrong = (packed.double().view(mode.parts, *z.shape).sum(0) - z.double()).abs() / z.double().abs()
        bits = min(23, mode.parts * (24 - mode.drop)) - 2  # of a part, and one is the rounding's
        assert not wrong.nan_to_num(0).max() > 2.0**-bits, f"{mode}: the parts miss {wrong.nan_to_num(0).max():.2e}"
    (a, todo), (b, more) = pack(x, mode), pack(x[:40], mode)
    persistent.run(todo + more)
    a, b = a.double().view(mode.parts, 70, 90), b.double().view(mode.parts, 40, 90)
    total = sum(a[i] @ b[s - i].t() for s in range(mode.parts) for i in range(s + 1))
    torch.testing.assert_close(total, x.double() @ x[:40].double().t(), rtol=0, atol=2.0**-(bits - 5))


def verify(precision, m, n, k, mode=None):
    """fp32_matmul's launches on ragged sizes between NaN, twice: 3 programs with many tiles each, then all."""
    mode = mode or MODES[precision]
    a, b, b_t = (persistent.framed(*shape, torch.float32) for shape in ((m, k), (k, n), (n, k)))
    for x, y in ((a, b), (a, b_t.t()), (a[:, 1:], b[1:])):
        for sms in (3, persistent.sms_of(a.device)):
            def call(x, y, precision, out, config):
                persistent.run(launches(mode, x, y, out, sms))
            if not isinstance(mode, Fma) or persistent.tma_takes(x, y):  # else fp32_matmul hands it to 03
                product.verify(x, y, precision, mode, call, persistent.pad(n))


def check(report, precisions):
    """Every path before anything is timed, also 03's, so that its searches compile nothing; without a GPU the packing
    in the interpreter, while Gluon's kernels are compiled."""
    print(f"[{report.name}] check", file=sys.stderr, flush=True)
    splits = [mode for mode in MODES.values() if not isinstance(mode, Fma)]
    if report.gpu is None:  # no interpreter runs bf16: its parts, kept in FP32, are the same numbers
        splits = [mode._replace(dtype=torch.float32) for mode in splits]
    checks = [partial(parts_add_up, mode) for mode in splits]
    if report.gpu:
        checks += [partial(verify, precision, *shape) for precision in precisions
                   for shape in ((1, 4, 16), (300, 520, 1111), (129, 1000, 200))]
        checks.append(partial(verify, "tf32", 300, 520, 1111, MODES["tf32"]._replace(batch=1)))
        a, b = (torch.randn(256, 256, device="cuda") for _ in range(2))
        checks += [partial(product.verify, a, b, precision, config, pad=16) for precision in precisions
                   for config in product.fitting(None, {"a_ptr": a})]
    common.side_by_side(checks)
    if report.gpu is None:
        offline.compile_apart("08_fp32_matmul")


# ---------------------------------------------------------------- the table

def need(n):
    """GPU memory in bytes: 03's, and all packed parts at once."""
    return product.need(n, 4) + n * n * (16 + sum(2 * mode.parts * mode.dtype.itemsize for mode in MODES.values()
                                                  if not isinstance(mode, Fma)))


def fp32_precision(report, n, precisions):
    with report.table("fp32_precision", "FP32 operands, packed before the product: what each precision costs, and "
                      "gives", baseline="cublas ieee") as table:
        a, b, out = product.square(n, "fp32")
        providers, extra = {}, {}

        def add(name, provider, precision, call, baseline, last=None):
            error = product.proven(name, call, a, b, out, 2**-9)
            config = last and last.config
            providers[name] = partial(call, a, b, out=out)
            extra[name] = {"provider": provider, "precision": precision, "unit": product.UNITS[precision],
                           "rel_error": error, "baseline": baseline, "config": config and (
                               str(config) if last is fp32_matmul else product.config_name(config))}
        ours = persistent.tma_takes(out)
        if not ours:
            table.note(f"No rows triton at {n:,}: TMA takes no such rows, so fp32_matmul is 03's matmul.")
        for precision in precisions:
            baseline = "cublas tf32" if precision == "tf32" else "cublas ieee"
            if ours:
                add(precision, "triton", precision, partial(fp32_matmul, precision=precision), baseline, fp32_matmul)
            add(f"03 {precision}", "triton/pointers", precision, partial(product.matmul, precision=precision), baseline,
                product.matmul)
        for mode in ("ieee", "tf32"):
            add(f"cublas {mode}", "cublas", mode, partial(product.cublas, mode=mode), f"cublas {mode}")
        for precision in precisions:
            mode = MODES[precision]
            if ours and not isinstance(mode, Fma):
                packing = [launch for launch in launches(mode, a, b, out) if launch[0] is pack_kernel]
                providers[f"pack {precision}"] = partial(persistent.run, packing)
                extra[f"pack {precision}"] = {
                    "provider": "triton/pack", "precision": precision, "flops": None, "baseline": "none",
                    "bytes": len(packing) * n * n * (4 + mode.parts * mode.dtype.itemsize)}
        table.time(product.case(n, "fp32"), providers, extra, flops=2 * n**3)
        table.note("triton/pack: the pass over A and B alone, for \"tf32\" over B, which the rows above it contain; it "
                   "has no ratio. \"ieee\" packs nothing.")
        table.note("ratio: \"tf32\" over cuBLAS's TF32, all others over cuBLAS's FP32 (\"ieee\"). pct_peak is of the "
                   "unit that does the work, for 2MNK useful FLOPs: TF32 for \"tf32\" and \"tf32x3\", BF16 for "
                   "\"bf16x3\" and \"bf16x6\", which multiply 3, 3 and 6 times, FP32 for \"ieee\".")


def main():
    p = common.parser(__doc__)
    p.add_argument("--n", type=common.whole(1), help="rows and columns of each matrix (default 4096)")
    report = common.start(p, narrowing=("n",))
    args = report.args
    if report.gpu and not report.gpu["cc"].startswith("9."):
        print(f"This step needs TMA and wgmma, which compute capability 9.0 has; this GPU has {report.gpu['cc']}.")
        return
    if report.gpu and args.n:
        report.need(need(args.n), f"--n {args.n}")
    precisions = product.PRECISIONS[::2 if args.quick else 1]
    check(report, precisions)
    if report.gpu is None:
        print("The packed parts add up, and so do their products, in the interpreter.")
        return
    if args.check:
        return print(common.CHECKED)
    fp32_precision(report, args.n or 4096, precisions)
    report.finish()


if __name__ == "__main__":
    common.run(main)
