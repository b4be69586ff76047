"""What did the compiler write: which layouts, which instructions, how many registers?

The kernels of 01, 02 and 03, compiled for an architecture of your choice, whether its GPU is here or not. Run it:

    python 05_inspect_ir.py                                    every table, for the GPU in hand, else for sm_89
    python 05_inspect_ir.py --arch 90                          for another architecture
    python 05_inspect_ir.py --kernel matmul_kernel --stage ptx   one stage of one kernel, and nothing else
    python 05_inspect_ir.py --arch 90 --dump out/              every stage of every kernel, as files

The answer is the row of the table `loop` that has a `ratio`: the multiplies that the PTX of the matmul's loop holds
are exactly those that a slice of the product needs, or three or six times as many in the split precision modes.
"""
import collections
import concurrent.futures
import contextlib
import importlib
import json
import math
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "0"  # before common: here kernels are compiled, GPU or not
import torch  # noqa: E402

import common  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

vector, fused, product = map(importlib.import_module, ("01_vector_add", "02_fused_softmax", "03_matmul"))

ARCHS = ("75", "80", "86", "89", "90", "100", "120")
STAGES = ("ttir", "ttgir", "llir", "ptx", "sass")
PRODUCTS = {"tf32x3": 3, "bf16x3": 3, "bf16x6": 6}         # of the smaller type, for one of FP32; else 1


class Case(NamedTuple):
    """One kernel with all that the compiler is told of it; fields: what its rows are labelled with."""
    kernel: Any
    dtype: str
    constexprs: dict[str, Any]
    num_warps: int
    config: str
    fields: dict[str, Any] = {}
    options: dict[str, int] = {}
    aligned: bool = True                                   # every integer argument is a multiple of 16

    @property
    def name(self):
        return self.kernel.__name__

    def row(self, **more):
        return {"kernel": self.name, "dtype": self.dtype, **self.fields, "config": self.config, **more}

    def __str__(self):
        return " ".join(map(str, self.row().values()))


# ---------------------------------------------------------------- what is compiled

def softmax_case(choice, dtype, n_cols):
    """The specialization that 02's launch() gives to contiguous rows of n_cols, a multiple of 16."""
    block, size, fields = triton.next_power_of_2(n_cols), common.DTYPES[dtype].itemsize, {"n_cols": n_cols}
    if choice.kernel == "online":
        stages = fused.ONLINE_STAGES[size]
        constexprs = {"BLOCK_SIZE": choice.tile, "STAGES": stages, "ALIGN": 16 // size, "EDGE": 1024}
        config = f"chunks of {choice.tile} s{stages}"
    elif choice.kernel == "rows":
        rows = max(1, choice.tile // block)
        constexprs, config = {"ROWS": rows, "BLOCK_SIZE": block}, f"{rows} rows of {block}"
    else:
        constexprs, config = {"BLOCK_SIZE": block, "in_stride": None, "out_stride": None}, f"BLOCK_SIZE {block}"
    return Case(fused.KERNELS[choice.kernel], dtype, constexprs | {"WIDE": False}, choice.num_warps, config, fields)


def matmul_case(dtype, precision="tf32", tile=(128, 128, 32), stages=4, warps=4):
    """Row-major operands whose sizes are multiples of 16; S1's tile."""
    constexprs = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile), GROUP_M=8, PRECISION=precision, RAGGED=False,
                      WIDE=False, stride_ak=1, stride_bn=1, stride_cn=1)
    return Case(product.matmul_kernel, dtype, constexprs, warps, f"{'x'.join(map(str, tile))} s{stages} w{warps}",
                {"precision": precision} if dtype == "fp32" else {}, {"num_stages": stages})


def every_case(arch, quick):
    """(one case a kernel, for stages and layouts; the matmuls of `loop`; all, for resources)."""
    narrow, wide = fused.Pick(1024, "rows", 2048, 4), fused.Pick(4096, "whole-row", None, 4)
    main = [Case(vector.add_kernel, "fp32", {"BLOCK_SIZE": 1024, "WIDE": False}, 4, "BLOCK_SIZE 1024"),
            softmax_case(wide, "bf16", 4096), softmax_case(narrow, "bf16", 512),
            softmax_case(fused.ONLINE, "bf16", 65536), matmul_case("bf16")]
    # Below sm_80 a product of bf16x6 is 24,576 FMAs a thread: half a minute of ptxas, for no other instruction.
    matmuls = main[-1:] + [matmul_case("fp32", precision) for precision in product.PRECISIONS
                           if arch >= 80 or not precision.startswith("bf16")]
    matmuls.append(main[-1]._replace(aligned=False, fields={"case": "odd strides"}))
    if arch in (90, 100):                                  # elsewhere it needs more shared memory than there is
        matmuls.append(matmul_case("bf16", tile=(128, 256, 64), warps=8))
    softmaxes = [softmax_case(fused.Pick(n_cols, "whole-row", None, warps), "bf16", n_cols)
                 for n_cols, warps in ((65536, 16), (131072, 16), (131072, 32))]
    for dtype in () if quick else ("bf16", "fp32"):        # all that 02 times
        softmaxes += [softmax_case(choice, dtype, n_cols) for n_cols in fused.WIDTHS
                      for choice in fused.ours(n_cols, common.DTYPES[dtype].itemsize).values()]
    distinct = {}                                          # n_cols alone makes no other code
    for case in main + softmaxes + matmuls:
        distinct.setdefault(str((case.name, case.dtype, case.num_warps, case.constexprs, case.options, case.aligned)), case)
    return main, matmuls, sorted(distinct.values(), key=lambda case: (
        [one.name for one in main].index(case.name), case.dtype, case.fields.get("n_cols", 0)))


def compiled(case, arch):
    """The CompiledKernel; pointers and, where the case is aligned, integers are promised to be multiples of 16."""
    signature, constexprs, attrs = {}, {}, {}
    for index, name in enumerate(case.kernel.arg_names):
        if name in case.constexprs:
            signature[name], constexprs[(index,)] = "constexpr", case.constexprs[name]
        else:
            signature[name] = f"*{case.dtype}" if name.endswith("_ptr") else "i32"
            if case.aligned or name.endswith("_ptr"):
                attrs[(index,)] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(case.kernel, signature, constexprs, attrs), target=GPUTarget("cuda", arch, 32),
                          options={"num_warps": case.num_warps, **case.options})


def compile_all(cases, arch):
    """[(case, CompiledKernel, or the error that its compilation ended with)], compiled side by side."""
    def attempt(case):
        try:
            return case, compiled(case, arch)
        except OSError:                                    # a full disk, no tool: nothing of the kernel's
            raise
        except Exception as error:                         # whatever a compiler's passes raise: a row's note
            return case, error
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:  # passes and ptxas run without Python's lock
        built = []
        for pair in pool.map(attempt, cases):
            built.append(pair)
            common.progress(f"[05_inspect_ir] compiled {len(built)} of {len(cases)} kernels")
    common.progress()
    return built


def stage_text(kernel, stage):
    return kernel.asm[stage] if stage != "sass" else "\n".join(common.sass(kernel.asm["cubin"])) + "\n"


def reason(error):
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:120]}"


def good(table, built):
    """The pairs that can be shown; the others become notes."""
    for case, kernel in built:
        if isinstance(kernel, Exception):
            table.note(f"{case} does not compile: {reason(kernel)}")
        elif "llvm.trap" in kernel.asm["llir"]:
            tmem = getattr(kernel.metadata, "tmem_size", 0)  # an SM has 512 columns (PTX ISA, tcgen05.alloc)
            why = f", since it asks for {tmem} columns of tensor memory, of 512" * (tmem > 512)
            table.note(f"{case} compiles to a kernel that only traps{why}.")
        else:
            yield case, kernel


# ---------------------------------------------------------------- PTX

def opcodes(lines):
    """(opcode, line) of each instruction, its predicate left out."""
    for line in lines:
        if match := re.match(r"\s*(?:\{\s*)?(?:@!?%?\w+\s+)?([a-z][\w:]*(?:\.[\w:]+)+)", line):
            yield match.group(1), line


def loops(ptx):
    """Lines of each loop: from a label to the last branch back to it; nested and interleaved ones are one."""
    lines, labels, spans = ptx.splitlines(), {}, []
    for index, line in enumerate(lines):
        if match := re.match(r"\s*(\$\w+):", line):
            labels[match.group(1)] = index
        elif (match := re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line)) and match.group(1) in labels:
            spans.append((labels[match.group(1)], index))
    merged = []
    for start, end in sorted(spans):
        if not merged or start > merged[-1][1]:
            merged.append([start, end])
        merged[-1][1] = max(end, merged[-1][1])
    return [lines[start:end + 1] for start, end in merged]


# What is counted, by how the opcode begins, and its name where it is another; cp.async with its bytes
COUNTED = {"mma.sync": None, "wgmma.mma_async": None, "tcgen05.mma": None, "fma.rn.f32x2": "fma.f32x2",
           "fma.rn.f32": "fma.f32", "ldmatrix": None, "cp.async.bulk.tensor": "cp.async.bulk.tensor (TMA)",
           "cp.async.cg": "cp.async", "cp.async.ca": "cp.async", "cp.async.wait_group": None,
           "wgmma.wait_group": None, "ld.global": None, "ld.shared": None, "st.shared": None, "shfl.sync": None,
           "redux.sync": None, "bar.sync": None, "barrier.sync": "bar.sync", "mbarrier.try_wait": None}


def copied(line):
    """The bytes of a cp.async, its third operand, as " 16 B"; of other instructions nothing."""
    match = re.search(r"cp\.async\.c[ag]\b.*\], (\w+)", line)
    return f" {int(match.group(1), 0)} B" if match else ""


def count(lines):
    """{instruction: how many}, in the order of COUNTED."""
    ops, found = list(opcodes(lines)), collections.Counter()
    for prefix, name in COUNTED.items():
        found.update((name or prefix) + copied(line) for opcode, line in ops if f"{opcode}.".startswith(f"{prefix}."))
    return found


def multiply(lines, num_warps):
    """(name, shape, FLOPs an instruction, who executes it, how many of those) of the loop's multiplies, or None.

    The shape is the instruction's own. mma.sync is a warp's, wgmma a warpgroup's (four warps); tcgen05.mma is the
    whole block's, with M and N in its descriptor and 32 bytes of K (PTX ISA).
    """
    ops = list(opcodes(lines))
    for opcode, line in ops:
        if match := re.match(r"(mma\.sync|wgmma\.mma_async)\S*\.m(\d+)n(\d+)k(\d+)", opcode):
            m, n, k = map(int, match.groups()[1:])
            own = ("warps", num_warps) if opcode.startswith("mma") else ("warpgroup(s)", num_warps // 4)
            return match.group(1), f"m{m}n{n}k{k}", 2 * m * n * k, *own
        if opcode.startswith("tcgen05.mma"):
            register = re.findall(r"%r\d+", line.rsplit("]", 1)[1])[-1]
            descriptor = next(int(other.rsplit(",", 1)[1].strip(" ;")) for op, other in ops
                              if op == "mov.b32" and re.search(rf"{register},", other))
            m, n = (descriptor >> 24 & 31) * 16, (descriptor >> 17 & 63) * 8
            k = 8 if "kind::tf32" in opcode else 16
            return "tcgen05.mma", f"m{m}n{n}k{k}", 2 * m * n * k, "block", 1
    found = count(lines)
    name, shape, flops = ("fma.f32x2", "two FMAs", 4) if "fma.f32x2" in found else ("fma.f32", "one FMA", 2)
    return (name, shape, flops, "threads", 32 * num_warps) if name in found else None


# ---------------------------------------------------------------- tables

def show_stages(report, arch, built):
    with report.table("stages", f"lines of each stage, sm_{arch}") as table:
        for case, kernel in good(table, built):
            for stage in STAGES:
                lines = len(stage_text(kernel, stage).splitlines())
                table.row(**case.row(num_warps=case.num_warps, stage=stage, lines=lines))
        table.note("ttir: tensors, no threads. ttgir: every tensor with its layout. llir, ptx: one thread's code. "
                   "sass: instructions. ttir and ttgir count their source locations, too.")


def show_layouts(report, arch, built):
    with report.table("layouts", f"layouts, buffers and what follows from them, sm_{arch}") as table:
        for case, kernel in good(table, built):
            ttgir, seen = kernel.asm["ttgir"], {"kernel": case.name, "dtype": case.dtype}
            layouts = dict(re.findall(r"^(#(?!loc|smem)\w+) = (#ttn?g\..+)$", ttgir, re.M))
            for name, text in layouts.items():
                table.row(**seen, case=name, value=text)
            accesses = re.findall(r"(load|store|async_copy)(?:_global_to_local)? .*?: "
                                  r"tensor<((?:\d+x)+)!tt\.ptr<\w+>, (#\w+)>", ttgir)
            for operation, shape, name in dict.fromkeys(accesses):
                tile = shape.strip("x")
                if lists := re.findall(r"(?:sizePer|threadsPer|warpsPer)\w+ = \[(.+?)\]", layouts.get(name, "")):
                    a_pass = [math.prod(factors) for factors in zip(*(map(int, text.split(", ")) for text in lists))]
                    passes = math.prod(triton.cdiv(int(size), part) for size, part in zip(tile.split("x"), a_pass))
                    table.row(**seen, case=f"{operation} {tile}", value=f"{name}: {passes} pass(es) of "
                              f"{'x'.join(map(str, a_pass))} elements")
            buffers = re.findall(r"(local|tmem)_alloc.*-> !ttg\.memdesc<(((?:\d+x)+)[a-z]+(\d+).*?)>", ttgir)
            for memory, text, shape, bits in dict.fromkeys(buffers):
                size = math.prod(map(int, shape.strip("x").split("x"))) * int(bits) // 8
                more = {"shared_bytes": size} if memory == "local" else {}
                table.row(**seen, case=f"{memory}_alloc", value=text, **more)
            ops = list(opcodes(kernel.asm["ptx"].splitlines()))
            for access, pattern in ("loads", r"ld\.global|cp\.async\.(c[ag]|bulk)"), ("stores", r"st\.global"):
                found = dict.fromkeys(opcode + copied(line) for opcode, line in ops if re.match(pattern, opcode))
                table.row(**seen, case=access, value=", ".join(found))
        table.note("A pass is sizePerThread x threadsPerWarp x warpsPerCTA elements; sizePerThread is what a thread "
                   "may load or store at once: 16 bytes at most, v4.b32.")


def show_loop(report, arch, matmuls, softmaxes):
    with report.table("loop", f"instructions of the matmul's K loop and of the reductions, sm_{arch}") as table:
        seen = set()
        for case, kernel in good(table, matmuls):
            body = max(loops(kernel.asm["ptx"]), key=len, default=[])  # the K loop is the kernel's only one
            counts, unit = count(body), multiply(body, case.num_warps)
            seen |= counts.keys()
            rows = {name: table.row(**case.row(instruction=name, count=n)) for name, n in counts.items()}
            if unit is None:
                table.note(f"{case}: no multiply was found in a loop of the PTX.")
                continue
            name, shape, flops, who, how_many = unit
            needed = 2 * math.prod(case.constexprs[key] for key in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
            total = counts[name] * flops * how_many
            rows[name] |= {"flops": total, "ratio": total / needed, "value":
                           f"{shape}: {counts[name]:,} x {flops:,} x {how_many} {who} = {total:,}"}
            if arch >= 80 and total != needed * PRODUCTS.get(case.constexprs["PRECISION"], 1):
                table.note(f"{case}: the count does not come out; part of the product is elsewhere.")
        if matmuls:
            table.note("flops: count x FLOPs of the instruction x the warps, warpgroups, threads or blocks that run "
                       "it. ratio: over 2 x BLOCK_M x BLOCK_N x BLOCK_K, what a slice needs. 1 is right; 3 in tf32x3 "
                       "and bf16x3, 6 in bf16x6, which take that many products of the smaller type for one.")
            if arch < 80:
                table.note("No tensor-core instruction and no cp.async: Triton emits mma.sync, and NVIDIA has "
                           "cp.async, from sm_80 on. Every precision is the same FMAs; bf16x3 and bf16x6, three and "
                           "six times as many, are left out.")
            elif any(not case.aligned for case, _ in matmuls):
                table.note("odd strides: sizes and strides that are no multiple of 16. Nothing is known of the addresses "
                           "of neighbours, so the copies of 16 bytes (cp.async) become loads of one element.")
            if arch >= 80 and not any("TMA" in name for name in seen):
                table.note("No TMA (cp.async.bulk.tensor): the kernel loads through pointers; Triton uses TMA for "
                           "tensor descriptors, on sm_90 and newer.")
        for case, kernel in good(table, softmaxes):
            ptx = kernel.asm["ptx"]
            inside = count([line for lines in loops(ptx) for line in lines])
            for place, counts in [("kernel", count(ptx.splitlines())), ("its loops", inside)][:2 if inside else 1]:
                for name in ("shfl.sync", *(["redux.sync"] if "redux.sync" in counts else []), "bar.sync"):
                    table.row(**case.row(case=place, instruction=name, count=counts[name]))
        if softmaxes:
            table.note("A reduction is five shuffles within a warp (or one redux), then shared memory, barriers and "
                       "shuffles between warps. online_kernel's loops have none: it reduces once, after them.")


def show_resources(report, arch, built):
    with report.table("resources", f"registers, spills, shared memory, sm_{arch}") as table:
        for case, kernel in good(table, built):
            table.row(**case.row(num_warps=case.num_warps, **common.resources(kernel.asm["cubin"]),
                                 shared_bytes=kernel.metadata.shared))
        case = built[0][0]
        with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
            triton.knobs.cache.dir = folder
            compiled(case, arch)
            files = ", ".join(f"{path.name} {path.stat().st_size:,}" for path in sorted(Path(folder).glob("*/*")))
        table.note(f"Triton's cache (~/.triton/cache, or TRITON_CACHE_DIR) keeps of {case.name}, in bytes: {files}.")
        table.note("regs, spills: of a thread, 32 bits each. online_kernel's code is the same for every n_cols.")


# ---------------------------------------------------------------- files, Inductor

def dump(built, folder):
    """Every stage under a plain name, such as matmul_kernel.bf16.ptx."""
    for case, kernel in built:
        if isinstance(kernel, Exception):
            common.fail(f"{case} does not compile: {reason(kernel)}")
        for stage in STAGES:
            common.write(folder / f"{case.name}.{case.dtype}.{stage}", stage_text(kernel, stage))
    print(f"{len(built) * len(STAGES)} files are in {folder}.")


def inductor():
    """Print the Triton that torch.compile writes for a softmax, and its kernels' names (TORCH_LOGS=output_code)."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code
    x = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    with config.patch(force_disable_caches=True):          # from a cache, no code is written
        _, codes = run_and_get_code(torch.compile(lambda t: torch.softmax(t, dim=-1), dynamic=False), x)
    print("\n".join(codes))
    names = list(dict.fromkeys(re.findall(r"def (triton_\w+)\(", "\n".join(codes))))
    print(f"Inductor wrote {len(names)} Triton kernel(s) for softmax(x) of 4,096 x 4,096 bf16: {', '.join(names)}")


def main():
    parser = common.parser(__doc__)
    names = [case.name for case in every_case(80, quick=True)[0]]
    parser.add_argument("--arch", choices=ARCHS, metavar="CC",
                        help=f"architecture to compile for: {', '.join(ARCHS)} (default: the GPU's own, else 89)")
    parser.add_argument("--kernel", choices=names, metavar="NAME", help=f"this kernel alone: {', '.join(names)}")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--stage", choices=STAGES, help="print one stage of --kernel (default matmul_kernel), no table")
    what.add_argument("--dump", type=Path, metavar="DIR", help="write every stage of every kernel, no table")
    what.add_argument("--json", type=Path, metavar="FILE", help="write the tables also as JSON")
    what.add_argument("--inductor", action="store_const", const=True,
                      help="print the Triton that torch.compile writes for a softmax, no table (needs a GPU)")
    one = parser.parse_args().stage                        # standard output is for its text alone
    with contextlib.redirect_stdout(sys.stderr if one else sys.stdout):
        report = common.start(parser, narrowing=("arch", "kernel", "stage", "dump", "inductor"))
    args = report.args
    arch = int(args.arch or (report.gpu["cc"].replace(".", "") if report.gpu else 89))
    if args.inductor:
        if report.gpu is None:
            common.fail("--inductor needs a GPU: torch.compile writes Triton for CUDA tensors")
        return inductor()
    main_cases, matmuls, everything = ([case for case in cases if args.kernel in (None, case.name)]
                                       for cases in every_case(arch, args.quick))
    if one:
        case = main_cases[-1]                              # matmul_kernel, where none is named
        try:
            print(stage_text(compiled(case, arch), one), end="", flush=True)
        except OSError:                                    # | head, a full disk
            raise
        except Exception as error:
            common.fail(f"{case} does not compile: {reason(error)}")
        return
    if args.dump:
        return dump(compile_all(main_cases, arch), args.dump)
    print(f"Compiled for sm_{arch} by Triton {triton.__version__}.\n", flush=True)
    built = compile_all(everything, arch)

    def of(cases):
        return [(case, kernel) for case, kernel in built if case in cases]
    show_stages(report, arch, of(main_cases))
    show_layouts(report, arch, of(main_cases))
    softmaxes = [case for case in main_cases if case.kernel in fused.KERNELS.values()]
    if matmuls or softmaxes:
        show_loop(report, arch, of(matmuls), of(softmaxes))
    show_resources(report, arch, built)
    if args.json:
        record = {"arch": arch, "versions": common.versions(), "tables": {
            t.key: {"title": t.title, "notes": t.notes, "rows": t.rows} for t in report.tables}}
        common.write(args.json, json.dumps(record, indent=1) + "\n")
    report.finish()


if __name__ == "__main__":
    common.run(main)
