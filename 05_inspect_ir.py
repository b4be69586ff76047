"""What did the compiler write: which layouts, which instructions, how many registers?

The kernels of 01, 02 and 03, compiled for an architecture of your choice, whether its GPU is here or not. Run it:

    python 05_inspect_ir.py                                    every table, for the GPU in hand, else for sm_89
    python 05_inspect_ir.py --arch 90                          for another architecture; gfx942: for AMD's
    python 05_inspect_ir.py --kernel matmul_kernel --stage ptx   one stage of one kernel, and nothing else
    python 05_inspect_ir.py --arch 90 --dump out/              every stage of every kernel, as files

The answer is the row of the table `loop` that has a `ratio`: the multiplies that the assembly of the matmul's loop
holds are exactly those that a slice of the product needs, or three or six times as many in the split precision modes.
"""
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

import assembly  # noqa: E402
import common  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402

vector, fused, product = map(importlib.import_module, ("01_vector_add", "02_fused_softmax", "03_matmul"))

ARCHS = [arch for maker in assembly.VENDORS.values() for arch in maker.archs]
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

def target_of(arch):
    """The GPUTarget of "89" or "gfx942"."""
    if not arch.startswith("gfx"):
        return GPUTarget("cuda", int(arch), 32)
    return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)  # CDNA's waves, and RDNA's


def title(target):
    return f"sm_{target.arch}" if target.backend == "cuda" else target.arch


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


def matmul_case(dtype, precision="ieee", tile=(128, 128, 32), stages=4, warps=4):
    """Row-major operands whose sizes are multiples of 16; S1's tile. Of bf16 all precisions are the same."""
    constexprs = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile), GROUP_M=8, PRECISION=precision, RAGGED=False,
                      WIDE=False, stride_ak=1, stride_bn=1, stride_cn=1)
    return Case(product.matmul_kernel, dtype, constexprs, warps, f"{'x'.join(map(str, tile))} s{stages} w{warps}",
                {"precision": precision} if dtype == "fp32" else {}, {"num_stages": stages})


def every_case(target, quick):
    """(one case a kernel, for stages and layouts; the matmuls of `loop`; all, for resources)."""
    cc, stages = (target.arch, 4) if target.backend == "cuda" else (None, 2)  # 4 of FP32 are more than AMD's 64 KB
    narrow, wide = fused.Pick(1024, "rows", 2048, 4), fused.Pick(4096, "whole-row", None, 4)
    main = [Case(vector.add_kernel, "fp32", {"BLOCK_SIZE": 1024, "WIDE": False}, 4, "BLOCK_SIZE 1024"),
            softmax_case(wide, "bf16", 4096), softmax_case(narrow, "bf16", 512),
            softmax_case(fused.ONLINE, "bf16", 65536), matmul_case("bf16", stages=stages)]
    # Below sm_80 a product of bf16x6 is 24,576 FMAs a thread: half a minute of ptxas, for no other instruction.
    offered = make_backend(target).parse_options({}).allowed_dot_input_precisions
    matmuls = main[-1:] + [matmul_case("fp32", precision, stages=stages) for precision in product.PRECISIONS
                           if precision in offered and not (cc and cc < 80 and precision.startswith("bf16"))]
    matmuls.append(main[-1]._replace(aligned=False, fields={"case": "odd strides"}))
    if cc in (90, 100):                                    # elsewhere it needs more shared memory than there is
        matmuls.append(matmul_case("bf16", tile=(128, 256, 64), warps=8))
    softmaxes = [softmax_case(fused.Pick(n_cols, "whole-row", None, warps), "bf16", n_cols)
                 for n_cols, warps in ((65536, 16), (131072, 16), (131072, 32))]
    for dtype in () if quick else ("bf16", "fp32"):        # all that 02 times
        softmaxes += [softmax_case(choice, dtype, n_cols) for n_cols in fused.WIDTHS
                      for choice in fused.ours(n_cols, common.DTYPES[dtype].itemsize).values()]
    distinct = {}                                          # n_cols alone makes no other code
    for case in main + softmaxes + matmuls:
        if case.num_warps * target.warp_size <= 1024:      # both vendors' limit
            distinct.setdefault(str((case.name, case.dtype, case.num_warps, case.constexprs, case.options,
                                     case.aligned)), case)
    return main, matmuls, sorted(distinct.values(), key=lambda case: (
        [one.name for one in main].index(case.name), case.dtype, case.fields.get("n_cols", 0)))


def compiled(case, target):
    """The CompiledKernel; pointers and, where the case is aligned, integers are promised to be multiples of 16; AMD's
    compiler also, as at a launch, that a tensor has less than 2 GB: its buffer instructions have 32-bit offsets."""
    signature, constexprs, attrs = {}, {}, {}
    for index, name in enumerate(case.kernel.arg_names):
        pointer = name.endswith("_ptr")
        if name in case.constexprs:
            signature[name], constexprs[(index,)] = "constexpr", case.constexprs[name]
        else:
            signature[name] = f"*{case.dtype}" if pointer else "i32"
            attrs[(index,)] = [["tt.divisibility", 16]] * (case.aligned or pointer)
            attrs[(index,)] += [["tt.pointer_range", 32]] * (pointer and target.backend == "hip")
    return triton.compile(ASTSource(case.kernel, signature, constexprs, attrs), target=target,
                          options={"num_warps": case.num_warps, **case.options})


def compile_all(cases, target):
    """[(case, CompiledKernel, or the error that its compilation ended with)], compiled side by side."""
    def attempt(case):
        try:
            return case, compiled(case, target)
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


# ---------------------------------------------------------------- tables

def show_stages(report, target, built):
    with report.table("stages", f"lines of each stage, {title(target)}") as table:
        for case, kernel in good(table, built):
            for stage in assembly.VENDORS[target.backend].stages:
                lines = len(stage_text(kernel, stage).splitlines())
                table.row(**case.row(num_warps=case.num_warps, stage=stage, lines=lines))
        low = ("llir, ptx: one thread's code. sass: instructions." if target.backend == "cuda" else
               "llir: one lane's code. amdgcn: instructions, and directives; Triton's package has no tool that reads "
               "hsaco back.")
        table.note(f"ttir: tensors, no threads. ttgir: every tensor with its layout. {low} ttir and ttgir count "
                   "their source locations, too.")


def show_layouts(report, target, built):
    maker = assembly.VENDORS[target.backend]
    with report.table("layouts", f"layouts, buffers and what follows from them, {title(target)}") as table:
        for case, kernel in good(table, built):
            ttgir, seen = kernel.asm["ttgir"], {"kernel": case.name, "dtype": case.dtype}
            layouts = dict(re.findall(r"^(#(?!loc|smem)\w+) = (#ttn?g\..+)$", ttgir, re.M))
            for name, text in layouts.items():
                table.row(**seen, case=name, value=text)
            accesses = re.findall(maker.access, ttgir)
            for operation, shape, name in dict.fromkeys(accesses):
                tile = shape.strip("x")
                lists = re.findall(r"(?:sizePer|threadsPer|warpsPer)\w+ = \[(.+?)\]", layouts.get(name, ""))
                if len(lists) == 3:                        # #blocked; not #mma or #linear
                    a_pass = [math.prod(factors) for factors in zip(*(map(int, text.split(", ")) for text in lists))]
                    passes = math.prod(triton.cdiv(int(size), part) for size, part in zip(tile.split("x"), a_pass))
                    table.row(**seen, case=f"{operation} {tile}", value=f"{name}: {passes} pass(es) of "
                              f"{'x'.join(map(str, a_pass))} elements")
            buffers = re.findall(r"(local|tmem)_alloc.*-> !ttg\.memdesc<(((?:\d+x)+)[a-z]+(\d+).*?)>", ttgir)
            for memory, text, shape, bits in dict.fromkeys(buffers):
                size = math.prod(map(int, shape.strip("x").split("x"))) * int(bits) // 8
                more = {"shared_bytes": size} if memory == "local" else {}
                table.row(**seen, case=f"{memory}_alloc", value=text, **more)
            loads, stores = assembly.accesses(maker, kernel.asm[maker.text].splitlines())
            for access, found in ("loads", loads), ("stores", stores):
                table.row(**seen, case=access, value=", ".join(found))
        table.note("A pass is sizePerThread x threadsPerWarp x warpsPerCTA elements; sizePerThread is what a thread "
                   "may load or store at once: 16 bytes at most, " +
                   ("v4.b32." if target.backend == "cuda" else "dwordx4 or b128. buffer_ instructions check bounds."))


def show_loop(report, target, matmuls, softmaxes):
    maker, cc = assembly.VENDORS[target.backend], target.arch if target.backend == "cuda" else None
    with report.table("loop", f"instructions of the matmul's K loop and of the reductions, {title(target)}") as table:
        seen = set()
        for case, kernel in good(table, matmuls):
            body = max(assembly.loops(kernel.asm[maker.text]), key=len, default=[])  # the kernel's only loop
            counts = assembly.count(maker, body)
            units = assembly.multiplies(maker, body, case.num_warps, target.warp_size)
            seen |= counts.keys()
            rows = {name: table.row(**case.row(instruction=name, count=n)) for name, n in counts.items()}
            if not units:
                table.note(f"{case}: no multiply was found in a loop of the {maker.text}.")
                continue
            needed = 2 * math.prod(case.constexprs[key] for key in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
            total = sum(counts[name] * flops * how_many for name, _, flops, _, how_many in units)
            terms = " + ".join(f"{shape}: {counts[name]:,} x {flops:,} x {how_many} {who}"
                               for name, shape, flops, who, how_many in units)
            rows[units[0][0]] |= {"flops": total, "ratio": total / needed, "value": f"{terms} = {total:,}"}
            if not (cc and cc < 80) and total != needed * PRODUCTS.get(case.constexprs["PRECISION"], 1):
                table.note(f"{case}: the count does not come out; part of the product is elsewhere.")
        if matmuls:
            table.note("flops: count x FLOPs of the instruction x the warps, warpgroups, threads or blocks that run "
                       "it. ratio: over 2 x BLOCK_M x BLOCK_N x BLOCK_K, what a slice needs. 1 is right; 3 in tf32x3 "
                       "and bf16x3, 6 in bf16x6, which take that many products of the smaller type for one.")
            if cc is None:
                offered = {case.fields.get("precision") for case, _ in matmuls}
                table.note(f"Left out, since Triton has no such precision for {target.arch}: "
                           f"{', '.join(name for name in product.PRECISIONS if name not in offered)}.")
                table.note("TMA, wgmma, tcgen05, mma.sync, ldmatrix and cp.async are NVIDIA's alone. MFMA (CDNA) and "
                           "WMMA (RDNA) are a wave's each.")
            elif cc < 80:
                table.note("No tensor-core instruction and no cp.async: Triton emits mma.sync, and NVIDIA has "
                           "cp.async, from sm_80 on. Every precision is the same FMAs; bf16x3 and bf16x6, three and "
                           "six times as many, are left out.")
            if any(not case.aligned for case, _ in matmuls):
                table.note("odd strides: sizes and strides that are no multiple of 16. Nothing is known of the "
                           "addresses of neighbours, so copies of 16 bytes become loads of one element.")
            if cc and cc >= 80 and not any("TMA" in name for name in seen):
                table.note("No TMA (cp.async.bulk.tensor): the kernel loads through pointers; Triton uses TMA for "
                           "tensor descriptors, on sm_90 and newer.")
        for case, kernel in good(table, softmaxes):
            text = kernel.asm[maker.text]
            inside = assembly.count(maker, [line for lines in assembly.loops(text) for line in lines])
            whole = assembly.count(maker, text.splitlines())
            for place, counts in [("kernel", whole), ("its loops", inside)][:2 if inside else 1]:
                for name in maker.reductions:
                    if name in counts or name != "redux.sync":
                        table.row(**case.row(case=place, instruction=name, count=counts[name]))
        if softmaxes:
            within = ("five shuffles within a warp (or one redux), then shared memory, barriers and shuffles "
                      "between warps" if cc else
                      "lanes reading each other's registers (DPP, permlane), then LDS and barriers")
            table.note(f"A reduction is {within}. online_kernel's loops have none: it reduces once, after them.")


def show_resources(report, target, built):
    with report.table("resources", f"registers, spills, shared memory, {title(target)}") as table:
        for case, kernel in good(table, built):
            table.row(**case.row(num_warps=case.num_warps, **assembly.resources(kernel),
                                 shared_bytes=kernel.metadata.shared))
        case = built[0][0]
        with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
            triton.knobs.cache.dir = folder
            compiled(case, target)
            files = ", ".join(f"{path.name} {path.stat().st_size:,}" for path in sorted(Path(folder).glob("*/*")))
        table.note(f"Triton's cache (~/.triton/cache, or TRITON_CACHE_DIR) keeps of {case.name}, in bytes: {files}.")
        table.note("regs, spills: of a thread, 32 bits each. online_kernel's code is the same for every n_cols.")
        if target.backend == "hip":
            table.note("regs are VGPRs, AGPRs included, sgprs a wave's: from the amdgcn's metadata, as spills are. "
                       "shared_bytes is Triton's: LDS is sized at launch, and the metadata has 0. Blocks of more "
                       "than 1,024 lanes, AMD's limit, are left out.")


# ---------------------------------------------------------------- files, Inductor

def dump(built, folder, stages):
    """Every stage under a plain name, such as matmul_kernel.bf16.ptx."""
    for case, kernel in built:
        if isinstance(kernel, Exception):
            common.fail(f"{case} does not compile: {reason(kernel)}")
        for stage in stages:
            common.write(folder / f"{case.name}.{case.dtype}.{stage}", stage_text(kernel, stage))
    print(f"{len(built) * len(stages)} files are in {folder}.")


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
    names = [case.name for case in every_case(target_of("80"), quick=True)[0]]
    parser.add_argument("--arch", choices=ARCHS, metavar="CC",
                        help=f"architecture to compile for: {', '.join(ARCHS)} (default: the GPU's own, else 89)")
    parser.add_argument("--kernel", choices=names, metavar="NAME", help=f"this kernel alone: {', '.join(names)}")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--stage", metavar="NAME",
                      help="print one stage of --kernel (default matmul_kernel), no table: " + "; for gfx... ".join(
                          ", ".join(maker.stages) for maker in assembly.VENDORS.values()))
    what.add_argument("--dump", type=common.path, metavar="DIR", help="write every stage of every kernel, no table")
    what.add_argument("--json", type=common.path, metavar="FILE", help="write the tables also as JSON")
    what.add_argument("--inductor", action="store_const", const=True,
                      help="print the Triton that torch.compile writes for a softmax, no table (needs a GPU)")
    args = parser.parse_args()
    one, stages = args.stage, assembly.VENDORS[target_of(args.arch or "89").backend].stages
    if one and one not in stages:
        parser.error(f"--stage {one}: the stages of {args.arch or 'an NVIDIA GPU'} are {', '.join(stages)}")
    # Standard output is for a stage's text alone.
    with contextlib.redirect_stdout(sys.stderr if one else sys.stdout):
        report = common.start(parser, narrowing=("arch", "kernel", "stage", "dump", "inductor"))
    target = target_of(args.arch or (report.gpu["cc"].replace(".", "") if report.gpu else "89"))
    if args.inductor:
        if report.gpu is None:
            common.fail("--inductor needs a GPU: torch.compile writes Triton for CUDA tensors")
        return inductor()
    main_cases, matmuls, everything = ([case for case in cases if args.kernel in (None, case.name)]
                                       for cases in every_case(target, args.quick))
    if one:
        case = main_cases[-1]                              # matmul_kernel, where none is named
        try:
            print(stage_text(compiled(case, target), one), end="", flush=True)
        except OSError:                                    # | head, a full disk
            raise
        except Exception as error:
            common.fail(f"{case} does not compile: {reason(error)}")
        return
    if args.dump:
        return dump(compile_all(main_cases, target), args.dump, stages)
    print(f"Compiled for {title(target)} by Triton {triton.__version__}.\n", flush=True)
    built = compile_all(everything, target)

    def of(cases):
        return [(case, kernel) for case, kernel in built if case in cases]
    show_stages(report, target, of(main_cases))
    show_layouts(report, target, of(main_cases))
    softmaxes = [case for case in main_cases if case.kernel in fused.KERNELS.values()]
    if matmuls or softmaxes:
        show_loop(report, target, of(matmuls), of(softmaxes))
    show_resources(report, target, built)
    if args.json:
        record = {"arch": target.arch, "versions": common.versions(), "tables": {
            t.key: {"title": t.title, "notes": t.notes, "rows": t.rows} for t in report.tables}}
        common.write(args.json, json.dumps(record, indent=1) + "\n")
    report.finish()


if __name__ == "__main__":
    common.run(main)
