"""Does a kernel touch memory that is not its own, read what nothing wrote, or race in shared memory?

`make sanitize` runs this on a GPU: every kernel of 01 to 04 and 06 to 08, at small and ragged sizes, under three tools
of NVIDIA's compute-sanitizer. It is no numbered step: it times nothing, and launches the kernels of all of them.
racecheck knows shared memory alone: of races in global memory nothing is said. The answer is column `value` of table
`sanitize`: "clean" for every case, and "caught" for the fault planted for each tool; else the status is 1.
"""
import concurrent.futures
import functools
import importlib
import itertools
import os
import re
import shutil
import subprocess
import sys
from functools import partial

import torch

import common  # before triton: it chooses the interpreter where there is no GPU
import triton
import triton.language as tl

vector, fused, product, tuning = map(importlib.import_module, ("01_vector_add", "02_fused_softmax", "03_matmul",
                                                               "04_autotune"))


# ---------------------------------------------------------------- what is launched

def given(*shape, dtype=torch.float32):
    """A random tensor, copied from the host: what a kernel of torch's wrote, which no tool follows here, would be
    unwritten in initcheck's eyes. Without torch's cache it is an allocation of its own, to the byte."""
    return torch.randn(shape).to(dtype).cuda()


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="cuda")


def adds():
    for dtype in (*common.DTYPES.values(), torch.int8):
        for n in (1, 1000, 1024, 4099):
            x, y = given(n + 1, dtype=dtype), given(n + 1, dtype=dtype)
            yield partial(vector.add, x[:n], y[:n])
            yield partial(vector.add, x[1:], y[1:])          # no 16-byte alignment; ends with its allocation
    x, out = given(5000), empty(5000)
    yield lambda: vector.add_kernel[(5,)](x, x, out, 5000, BLOCK_SIZE=1024, WIDE=True)


def cuda_adds():
    try:
        launchers = vector.cuda_adds()[0].values()
    except (ImportError, AttributeError, OSError, RuntimeError):
        return                                               # 01's table `providers` says why; here: 0 launches
    for launch in launchers:
        for n in (1, 3, 1025, 5000):
            yield partial(launch, given(n), given(n), empty(n))


def softmaxes(kernel):
    """Every Pick of a kernel at its widest row, at one less, and at rows of padded matrices."""
    for dtype in common.DTYPES.values():
        picks = [pick for pick in (*fused.PICKS[dtype.itemsize], *fused.WHOLE_ROW) if pick.kernel == kernel]
        for pick in dict.fromkeys(picks):
            widest = min(pick.n_cols, 100_001)
            for n_cols, pad in ((widest, 0), (widest - 1, 0), (5, 0), (min(widest, 300), 3)):
                x = given(3, n_cols + pad, dtype=dtype)[:, pad:]
                yield partial(fused.launch, pick, x, empty(3, n_cols, dtype=dtype))


def products(configs, dtype, precision="tf32", kinds=("whole tiles", "cut by 16", "odd", "transposed")):
    """What fits on the GPU of these configs. "cut by 16": tiles overhang, and the copies stay 16 bytes wide."""
    cc, limit = (torch.cuda.get_device_capability()[0], triton.runtime.driver.active.utils.get_device_properties(
        torch.cuda.current_device())["max_shared_mem"])
    for config in configs:
        if product.shared_bytes(config, dtype.itemsize, cc) > limit:
            continue
        m, n, k = (config.kwargs[f"BLOCK_{axis}"] for axis in "MNK")
        shapes = {"whole tiles": (m, 2 * n, 3 * k), "cut by 16": (m + 16, n + 16, 2 * k + 16)}
        for kind in kinds:
            rows, columns, depth = shapes.get(kind, (m + 3, n + 5, k + 7))
            if kind == "transposed":
                a, b = given(depth, rows, dtype=dtype).t(), given(columns, depth, dtype=dtype).t()
            else:
                a, b = given(rows, depth, dtype=dtype), given(depth, columns, dtype=dtype)
            yield partial(product.matmul, a, b, precision, config=config)


def step(name):
    """A step in Gluon, of compute capability 9.0, or None. Imported here: beside the interpreter Gluon cannot be."""
    return importlib.import_module(name) if torch.cuda.get_device_capability()[0] == 9 else None


def splits():
    """Clusters of 06 of every size, at their shortest row, which is ragged, and at their longest."""
    split = step("06_split_softmax")
    for dtype in common.DTYPES.values() if split else ():
        for n_cols in (row // dtype.itemsize for row in split.EDGES):
            plan = split.choose(n_cols, dtype, split.H200)
            yield partial(split.launch, plan, given(3, n_cols, dtype=dtype), empty(3, n_cols, dtype=dtype))


def persistents():
    """Every Config of 07's searches, ragged; few programs, so that each has several tiles."""
    seven = step("07_persistent_matmul")
    if seven:  # narrow_kernel's counters, which it leaves as zeros; from the host, as given()'s
        seven.counts[torch.empty(0).cuda().device, torch.cuda.current_stream().cuda_stream] = torch.zeros(
            256, dtype=torch.int32).cuda()
    shapes = [(n, n, n) for n in seven.SQUARES] + [*seven.ODD] if seven else []
    for config in dict.fromkeys(config for shape in shapes for config in seven.candidates(*shape, 132)):
        m, n, k = (7 if config.kernel.startswith("narrow") else 300), 264, 584
        a, b, out = given(m, k, dtype=torch.float16), given(k, n, dtype=torch.float16), empty(m, n, dtype=torch.float16)
        yield lambda config=config, a=a, b=b, out=out: seven.run(seven.launches(config, a, b, out, sms=4))


def packed():
    eight = step("08_fp32_matmul")
    for precision in product.PRECISIONS if eight else ():
        yield partial(eight.fp32_matmul, given(200, 264), given(264, 136), precision)


# A kernel to come: its name, and a line that yields its launches.
KERNELS = ("add_kernel", "add_float", "add_float4", "softmax_kernel", "rows_kernel", "online_kernel", "matmul_kernel",
           "split_kernel", "persistent_kernel", "reduce_kernel", "narrow_kernel", "specialized_kernel", "pack_kernel",
           "fma_kernel", "planted_kernel")
CASES = {"add": adds, "add, CUDA C++": cuda_adds,
         **{f"softmax, {kernel}": partial(softmaxes, kernel) for kernel in fused.KERNELS},
         **{f"matmul, {name}": partial(products, [product.ANY], dtype) for name, dtype in common.DTYPES.items()
            if dtype.itemsize == 2},
         **{f"matmul, fp32 as {precision}": partial(products, [product.ANY], torch.float32, precision)
            for precision in product.PRECISIONS},
         "matmul, 03's configs": partial(products, product.CONFIGS[2], torch.bfloat16),
         "matmul, 03's configs, fp32": partial(products, product.CONFIGS[4], torch.float32, kinds=("cut by 16",)),
         "matmul, 04's configs": partial(products, tuning.CONFIGS, torch.bfloat16, kinds=("cut by 16",)),
         "split softmax": splits, "persistent matmul": persistents, "packed fp32 matmul": packed}


# ---------------------------------------------------------------- faults that must be found

@triton.jit
def planted_kernel(out_ptr, in_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(in_ptr + offsets))   # no mask


RACE = """
extern "C" __global__ void planted_kernel(float* x) {
    __shared__ float row[256];
    row[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = row[255 - threadIdx.x];                 // another warp's, and no __syncthreads() before
}
"""


def race():
    from torch.cuda._utils import _cuda_load_module, _nvrtc_compile
    kernel = _cuda_load_module(_nvrtc_compile(RACE, "planted_kernel")[0], ["planted_kernel"])["planted_kernel"]
    yield lambda: kernel(grid=(1, 1, 1), block=(256, 1, 1), args=[given(256)])


def read(x):
    yield lambda: planted_kernel[(1,)](empty(1024), x(), BLOCK=1024)


# By tool: the fault's name, its launch, what the tool says of it.
PLANTED = {"memcheck": ("planted: 24 floats read past the end", partial(read, lambda: given(1000)),
                        "Invalid __global__ read"),
           "initcheck": ("planted: memory read that nothing wrote", partial(read, lambda: empty(1024)),
                         "Uninitialized __global__ memory read"),
           "racecheck": ("planted: a row turned round without a barrier", race, "Race reported between")}


# ---------------------------------------------------------------- the tools

MARK = "[case] "
MEMCHECK = ["--padding", "65536", "--report-api-errors", "no"]
TENSOR_OPS = ["--check-tensor-ops", "yes"]  # of memcheck: TMA's loads, where the release knows them
LIMIT = 1000  # reports that a tool prints


def launch(device, seed, names, compile_only=False):
    """What runs in a process of its own, under a tool or, once before, without one: then Triton's cache is filled,
    side by side, and no compiler runs under the tools."""
    torch.cuda.set_device(device)
    torch.manual_seed(seed)
    for name in names:
        calls = list((CASES | {fault: call for fault, call, _ in PLANTED.values()})[name]())
        print(f"{MARK}{name}: {len(calls)}", flush=True)
        for call in [partial(common.side_by_side, calls)] if compile_only else calls:
            call()
        torch.cuda.synchronize()


def process(args, *command, names, tell=lambda name: None, **options):
    """launch() in a process that `command` starts: (what it and the tool printed, its status). tell is called with the
    name of each case that begins."""
    code = f"import sanitize; sanitize.launch({args.device}, {args.seed}, {names}, **{options})"
    lines = []
    with subprocess.Popen([*command, sys.executable, "-c", code], cwd=os.path.dirname(os.path.abspath(__file__)),
                          env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace") as child:
        for line in child.stdout:
            lines.append(line)
            if line.startswith(MARK):
                tell(line[len(MARK):].strip())
    return "".join(lines), child.returncode


@functools.cache
def knows_tensor_ops():
    return TENSOR_OPS[0] in subprocess.run(["compute-sanitizer", "--help"], capture_output=True, text=True).stdout


def command(tool):
    # application-only: not ptxas and its like. kernel: after an error the launches that follow still run. padding:
    # what is read far past the end of one allocation is not the next one's. api-errors: those that PyTorch asks for
    # on purpose; a launch that fails ends the process.
    return ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99", "--target-processes", "application-only",
            "--destroy-on-device-error", "kernel", "--print-limit", str(LIMIT),
            *(MEMCHECK + TENSOR_OPS * knows_tensor_ops() if tool == "memcheck" else []),
            *(option for name in KERNELS for option in ("--kernel-name", f"kernel_name={name}"))]


def parse(text):
    """({case: (launches, what was found, a line each)}, errors or hazards in all; None where no summary came)."""
    _, *parts = re.split(rf"^{re.escape(MARK)}(.+): (\d+)\n", text, flags=re.M)
    found = {}
    for name, launches, output in zip(*[iter(parts)] * 3):
        reports = re.findall(r"^=+ (?!COMPUTE-SANITIZER|\w+ SUMMARY)(\S.*)\n(?:=+ {2,}(at .*))?", output, re.M)
        found[name] = int(launches), [" ".join(filter(None, lines)) for lines in reports]
    totals = re.findall(r"^=+ (?:ERROR|RACECHECK) SUMMARY: ([\d,]+) (?:error|hazard)", text, re.M)
    return found, sum(int(total.replace(",", "")) for total in totals) if totals else None


def examine(tool, names, args, tell):
    """The tool's rows of these cases, and whether all is well: its planted fault is caught, and every case clean."""
    fault, _, message = PLANTED[tool]
    text, status = process(args, *command(tool), names=names, tell=tell)
    found, total = parse(text)
    if total is None or not found:
        last = ([line for line in text.splitlines() if line.strip("= ")] or ["nothing"])[-1]
        value = f"no result, status {status}; it ended with: {last[:200]}"
        return [{"tool": tool, "case": name, "count": 0, "value": value} for name in names], False
    rows, printed = [], sum(len(reports) for _, reports in found.values())
    for name in names:
        launches, reports = found.get(name, (0, ["not reached"]))
        value = f"{len(reports)} printed, the first: {reports[0]}" if reports else "clean"
        if not reports and printed >= LIMIT:
            value = f"unknown: the tool stopped printing after {printed} reports"
        if name == fault:
            value = "caught" if any(message in line for line in reports) else f"not caught: {value}"
        rows.append({"tool": tool, "case": name, "count": launches, "value": value})
        if value not in ("clean", "caught"):                 # at once: others may take minutes
            common.progress()
            print(f"[sanitize] {tool}, {name}: {value}", file=sys.stderr, flush=True)
    if names == [fault]:
        return rows, value == "caught"
    return rows, total == 0 and status == 0 and all(row["value"] == "clean" for row in rows)


def shares():
    """[(tool, cases)]: each tool's planted fault, and every case once a tool, in as many processes as cores keep busy:
    a tool patches each kernel that it sees, on the CPU, for seconds."""
    parts = max(1, min(len(CASES), os.cpu_count() // len(PLANTED)))
    return [(tool, names) for tool in PLANTED
            for names in ([PLANTED[tool][0]], *(list(CASES)[part::parts] for part in range(parts)))]


def sanitize(report):
    """Prints the table; True where all is well."""
    if shutil.which("compute-sanitizer") is None:
        common.fail("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit, and by itself as package "
                    "cuda-sanitizer-<version> or pip's nvidia-cuda-sanitizer-api")
    print("[sanitize] compiling every kernel", file=sys.stderr, flush=True)
    text, status = process(report.args, names=list(CASES), compile_only=True)
    if status:
        common.fail(f"the launches fail without any tool, too: {(text.splitlines() or ['no message'])[-1][:200]}")
    with report.table("sanitize", "every kernel under NVIDIA's compute-sanitizer", cases=0) as table:
        todo, begun = shares(), itertools.count(1)
        cases = sum(len(names) for _, names in todo)

        def one(tool, names):
            return examine(tool, names, report.args, lambda name: common.progress(
                f"[sanitize] case {next(begun)} of {cases}: {tool}, {name}"))
        with concurrent.futures.ThreadPoolExecutor(max(1, os.cpu_count())) as pool:
            examined = list(pool.map(one, *zip(*todo)))
        common.progress()
        values = [row["value"] for rows, _ in examined for row in rows]
        if all(value.startswith("no result") for value in values):
            common.fail(f"compute-sanitizer gave {values[0]}")
        order = {name: place for place, name in enumerate([*(fault for fault, *_ in PLANTED.values()), *CASES])}
        for row in sorted((row for rows, _ in examined for row in rows),
                          key=lambda row: (list(PLANTED).index(row["tool"]), order[row["case"]])):
            table.row(**row)
        table.note("count: launches. racecheck sees shared memory alone. Each tensor is an allocation of its own "
                   "(PYTORCH_NO_CUDA_MEMORY_CACHING=1); what torch's own kernels do is not looked at.")
        if not knows_tensor_ops():
            table.note("memcheck of this release looks at no TMA copy (--check-tensor-ops), by which 07 and 08 read "
                       "their matrices and write most of their outputs.")
    return all(well for _, well in examined)


def main():
    report = common.start(p := common.parser(__doc__))
    if report.args.check:
        p.error("--check is a numbered script's")
    if not report.gpu:
        print("sanitize: compute-sanitizer needs a GPU.")
        return
    if not sanitize(report):
        sys.stderr.write("sanitize.py: not clean, or a planted fault was not caught; nothing was saved\n")
        raise SystemExit(1)
    report.finish()


if __name__ == "__main__":
    common.run(main)
