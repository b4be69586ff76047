"""How near to the memory roof does a six-line Triton kernel come, and does anything in it matter?

S1's vector add. Run it:

    python 01_vector_add.py                  every table, n = 2^26
    python 01_vector_add.py --n 1000000      one size, all providers
    python 01_vector_add.py --quick          a smoke run

The answer is the row `triton` of the table `providers`: as fast as torch.add and as a copy, because the compiler
gave each thread 16-byte loads; `alignment` shows what it costs where it cannot.
"""
import numbers
import tempfile
import time

import torch

import common  # before triton: it chooses the interpreter where there is no GPU
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK_SIZE: tl.constexpr, WIDE: tl.constexpr = False):
    pid = tl.program_id(axis=0)                              # which block this program owns
    if WIDE:                                                 # more than 2^31 elements: 32-bit offsets wrap
        pid = pid.to(tl.int64)
    offsets = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)    # a tensor of BLOCK_SIZE indices
    mask = offsets < n                                       # the last block may overhang n
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


# S1's Part 2 kernel, and the float4 variant that Part 5 wrote by hand; NVRTC compiles both at run time.
CUDA_FLOAT = """
extern "C" __global__ void add_float(const float* x, const float* y, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] + y[i];
}
"""
CUDA_FLOAT4 = """
extern "C" __global__ void add_float4(const float4* x, const float4* y, float4* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n / 4) {
        float4 a = x[i], b = y[i];
        out[i] = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
    }
    int tail = n / 4 * 4 + i;                                // the last n % 4 floats
    if (i < n % 4) ((float*)out)[tail] = ((const float*)x)[tail] + ((const float*)y)[tail];
}
"""
FULL_N = 1 << 26                                             # 67,108,864 floats, as in S1
ADDS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8)
BLOCK_SIZES = [64, 128, 256, 512, 1024, 2048, 4096, 8192]


# ---------------------------------------------------------------- launchers

def add(x, y, out=None, block_size=1024):
    """x + y, elementwise, by add_kernel; the compiled kernel is add.kernel afterwards.

    x, y: tensors of one shape (any, also empty), any strides, one integer or floating dtype, one CUDA device
    (CPU under the interpreter). out: None, or a contiguous tensor to write, of x's shape and dtype; it may be x or y.
    Operands that are not contiguous, or overlap out otherwise, are copied first. Forward only. Raises TypeError on
    dtypes, ValueError on shapes, devices and block sizes that do not fit, RuntimeError where a gradient would be lost.
    """
    common.operands("add", ADDS, x=x, y=y, out=x if out is None else out)
    if (isinstance(block_size, bool) or not isinstance(block_size, numbers.Integral) or not 0 < block_size <= 2**20
            or block_size & (block_size - 1)):
        raise ValueError(f"add: block_size is {block_size!r}; it must be an integer, a power of 2 up to 2^20")
    if x.shape != y.shape:
        raise ValueError(f"add: x is {tuple(x.shape)} and y is {tuple(y.shape)}; both must have one shape")
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        x, y = x.contiguous(), y.contiguous()
    elif out.shape != x.shape or not out.is_contiguous():
        raise ValueError(f"add: out is {tuple(out.shape)} with strides {out.stride()}; it must be {tuple(x.shape)} and "
                         "contiguous")
    else:
        common.writable("add", out, x.shape)
        x, y = (common.apart(z.contiguous(), out, elementwise=True) for z in (x, y))
    n = x.numel()
    if n:
        with torch.cuda.device_of(x):                        # Triton launches on the current device
            add.kernel = add_kernel[(triton.cdiv(n, block_size),)](
                x, y, out, n, BLOCK_SIZE=block_size, WIDE=n > 2**31 - block_size)
    return out


def cuda_adds():
    """({name: launcher(x, y, out)}, {name: cubin}) of the two CUDA C++ kernels; raises where NVRTC is not to be had."""
    from torch.cuda._utils import _cuda_load_module, _nvrtc_compile  # the NVRTC that torch carries
    launchers, cubins = {}, {}
    for name, source, symbol, per_thread in (("cuda", CUDA_FLOAT, "add_float", 1),
                                             ("cuda/float4", CUDA_FLOAT4, "add_float4", 4)):
        cubins[name], _ = _nvrtc_compile(source, symbol)
        kernel = _cuda_load_module(cubins[name], [symbol])[symbol]

        def launch(x, y, out, kernel=kernel, per_block=256 * per_thread):
            n = x.numel()
            kernel(grid=(triton.cdiv(n, per_block), 1, 1), block=(256, 1, 1), args=[x, y, out, n])
            return out
        launchers[name] = launch
    return launchers, cubins


# ---------------------------------------------------------------- proof

def check_one(fn, n, dtype, name):
    """fn(x, y, out) equals x + y exactly, and writes nothing past the n-th element."""
    x, y = (torch.randn(n).to(dtype) if dtype.is_floating_point else torch.randint(-9, 9, (n,), dtype=dtype)
            for _ in range(2))
    x, y = x.to(common.device()), y.to(common.device())
    poison = float("nan") if dtype.is_floating_point else 77
    room = torch.full((n + 8192,), poison, dtype=dtype, device=x.device)
    fn(x, y, room[:n])
    tail = room[n:]
    untouched = tail.isnan() if dtype.is_floating_point else tail == poison
    if not torch.equal(room[:n], x + y) or not untouched.all():
        raise AssertionError(f"{name} is wrong at n = {n:,} in {dtype}")


def check(report):
    """Every path against torch, exactly: one float addition is rounded in one way only."""
    sizes = [0, 1, 2, 15, 16, 17, 127, 1023, 1024, 1025, 5000]
    dtypes = [torch.float32, torch.float16, torch.float64, torch.int32, torch.int8]
    if report.gpu:
        sizes += [98_432, FULL_N + 1]
        dtypes.append(torch.bfloat16)                        # which no interpreter can run
    for n in sizes:
        for dtype in dtypes if n <= 5000 else dtypes[:1]:
            check_one(lambda x, y, out: add(x, y, out), n, dtype, "add")
    for block_size in BLOCK_SIZES:
        check_one(lambda x, y, out: add(x, y, out, block_size), 5000, torch.float32, f"add, BLOCK_SIZE {block_size},")

    def wide(x, y, out):                                     # the 64-bit path, at a size that any machine can hold
        add_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, out, x.numel(), BLOCK_SIZE=1024, WIDE=True)
    check_one(wide, 5000, torch.float32, "add_kernel, WIDE,")
    x = torch.randn(64, 96, device=common.device())
    for view in (x.t(), x[:, ::3], x[1:, 5:50], x.expand(2, 64, 96)):
        if not torch.equal(add(view, view), view + view):
            raise AssertionError(f"add is wrong on strides {view.stride()}")
    if report.gpu:
        n = 2**31 + 5                                        # 32-bit offsets would wrap here
        if 3 * n + 2**30 < torch.cuda.mem_get_info()[0] and not report.args.quick:
            x = torch.randint(-60, 60, (n,), dtype=torch.int8, device="cuda")
            if not torch.equal(add(x, x), x + x):
                raise AssertionError(f"add is wrong at n = {n:,}")
        try:
            for name, launch in cuda_adds()[0].items():
                for n in (1, 3, 1023, 1025, 98_432):
                    check_one(launch, n, torch.float32, name)
        except (ImportError, AttributeError, OSError, RuntimeError):
            pass                                             # the table `providers` says why there is no CUDA C++


# ---------------------------------------------------------------- tables

def inputs(n):
    """Two random vectors of n floats and a result to write."""
    x, y = (torch.randn(n, device="cuda") for _ in range(2))
    return x, y, torch.full_like(x, float("nan"))


def launched(x, y, out, block_size=1024):
    """{"regs", "spills", "load_bits"} of the kernel that add() runs on these arguments."""
    add(x, y, out, block_size)
    cubin = add.kernel.asm["cubin"]
    return {**common.resources(cubin), "load_bits": common.load_bits(cubin)}


def providers(report, n):
    with report.table("providers", "vector add, FP32: Triton, torch, CUDA C++ by NVRTC", baseline="torch",
                      roof=True) as table:
        x, y, out = inputs(n)
        fns = {"triton": lambda: add(x, y, out), "torch": lambda: torch.add(x, y, out=out)}
        extra = {"triton": launched(x, y, out)}
        try:
            if n >= 2**31:
                raise RuntimeError("their index is a 32-bit int")
            launchers, cubins = cuda_adds()
            for name, launch in launchers.items():
                fns[name] = lambda launch=launch: launch(x, y, out)
                extra[name] = {**common.resources(cubins[name]), "load_bits": common.load_bits(cubins[name])}
        except (ImportError, AttributeError, OSError, RuntimeError) as error:
            table.note(f"No CUDA C++ rows: {type(error).__name__}: {str(error).splitlines()[0]}")
        rows = table.time({"n": n, "dtype": "fp32"}, fns, extra, bytes=3 * n * 4)  # two reads, one write
        table.note("load_bits is the widest global load in the machine code: LDG.E is 32 bits a thread, LDG.E.128 is "
                   "128. torch.add runs a precompiled kernel whose code is not read here.")
        if rows["triton"].get("load_bits") == 128:
            table.note("Triton's 128-bit loads: every pointer and n are multiples of 16 (tt.divisibility = 16), so "
                       "a thread may take 4 consecutive floats at once.")


def block_size(report, n, only=None):
    with report.table("block_size", "vector add by BLOCK_SIZE, 4 warps a program", roof=True) as table:
        x, y, out = inputs(n)
        sizes = [only] if only else BLOCK_SIZES
        fns = {str(size): lambda size=size: add(x, y, out, size) for size in sizes}
        extra = {str(size): {"provider": "triton", "block_size": size, **launched(x, y, out, size)} for size in sizes}
        rows = table.time({"n": n, "dtype": "fp32"}, fns, extra, bytes=3 * n * 4)  # two reads, one write
        if not only:
            best = min(row["ms"] for row in rows.values())
            slow = [f"{row['block_size']:,} by {100 * (row['ms'] / best - 1):.0f}%" for row in rows.values()
                    if row["ms"] > 1.05 * best]
            table.note("The article: every size within 5%, no trend. Here: " + (
                f"slower than the fastest by more than 5%: {', '.join(slow)}." if slow else "the same."))
            table.note("128 threads a program: below 512 elements a thread has fewer than the 4 floats of a 16-byte "
                       "load, and each program moves too few bytes for the cost of starting it.")


def alignment(report, n):
    with report.table("alignment", "what losing tt.divisibility = 16 costs", baseline="torch", roof=True,
                      cases=2) as table:
        x, y, out = inputs(n + 1)
        for size, case in ((n, "n divisible by 16"), (n + 1, "n not divisible by 16")):
            a, b, c = x[:size], y[:size], out[:size]
            table.time({"case": case, "n": size, "dtype": "fp32"},
                       {"triton": lambda: add(a, b, c), "torch": lambda: torch.add(a, b, out=c)},
                       {"triton": launched(a, b, c)}, bytes=3 * size * 4)  # two reads, one write
        table.note("The mask compares with n: where n is no multiple of 16, four neighbours may disagree, so the "
                   "compiler cannot join them into one 16-byte access. The kernel's source is the same.")


def first_launch(report):
    with report.table("first_launch", "seconds of a launch, by what is cached", cases=3) as table:
        code = f"import importlib; importlib.import_module('01_vector_add').child({report.args.device})"
        cases = "new process, empty cache", "new process, kernel cached"
        with tempfile.TemporaryDirectory() as cache:
            for case, out in zip(cases, common.in_turn("first_launch", [code] * 2, [{"TRITON_CACHE_DIR": cache}] * 2)):
                first, later = map(float, out.split())
                table.row(case=case, kernel="add_kernel", seconds=first)
            table.row(case="a launch after that", kernel="add_kernel", seconds=later)
        table.note("Wall clock of one launch and a synchronize, n = 1,024; importing and creating the CUDA context "
                   "are over by then. The first launch of a process also loads Triton's launcher and its driver.")


def child(device):
    """What first_launch times, in a process of its own: prints the seconds of the first launch and of a later one."""
    torch.cuda.set_device(device)
    x, y, out = inputs(1024)
    torch.cuda.synchronize()
    common.my_turn()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        add(x, y, out)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    print(seconds[0], seconds[-1])


def main():
    p = common.parser(__doc__)
    p.add_argument("--n", type=common.whole(1), help="elements (default 2^26); alone, the table `providers`")
    p.add_argument("--block-size", type=common.power_of_two(16, 65536),
                   help="elements a program, a power of 2 from 16 to 65,536; alone, the table `block_size`")
    report = common.start(p, narrowing=("n", "block_size"))
    args = report.args
    n = args.n or FULL_N
    if report.gpu:
        report.need(4 * 4 * n + 2**28, f"--n {n}")           # x, y, out and do_bench's flush; a spare for torch
    check(report)
    if not report.gpu:
        print("01_vector_add: add() equals torch at every size that was tried; bf16 does not run in the interpreter, "
              "05_inspect_ir.py compiles it.")
        return
    if args.check:
        return print(common.CHECKED)
    if args.block_size:
        block_size(report, n, args.block_size)
    elif args.n:
        providers(report, n)
    else:
        providers(report, n)
        block_size(report, n)
        alignment(report, n)
        first_launch(report)
    report.finish()


if __name__ == "__main__":
    common.run(main)
