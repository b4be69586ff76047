"""What 05 reads in a compiler's assembly, NVIDIA's PTX or AMD's: instructions, loops, multiplies, registers.

A Vendor says what is looked for; the code below it is the same for both. Compiles nothing, measures nothing.
"""
import collections
import re
from typing import NamedTuple

import common


class Vendor(NamedTuple):
    backend: str                   # of triton.backends.compiler.GPUTarget
    archs: tuple[str, ...]
    stages: tuple[str, ...]
    text: str                      # the stage that is read here
    opcode: str                    # finds the opcodes of a line, their predicates left out
    counted: dict[str, str | None]  # how an opcode begins, and its name in the tables where it is another
    loads: str
    stores: str
    access: str                    # loads and stores in ttgir: operation, shape, layout
    reductions: tuple[str, ...]    # counted names: what a reduction is made of
    threads: tuple[str, str]       # what the vendor calls those, and 32 or 64 of them


NVIDIA = Vendor(
    "cuda", ("75", "80", "86", "89", "90", "100", "120"), ("ttir", "ttgir", "llir", "ptx", "sass"), "ptx",
    r"^\s*(?:\{\s*)?(?:@!?%?\w+\s+)?([a-z][\w:]*(?:\.[\w:]+)+)",
    {"mma.sync": None, "wgmma.mma_async": None, "tcgen05.mma": None, "fma.rn.f32x2": "fma.f32x2",
     "fma.rn.f32": "fma.f32", "ldmatrix": None, "cp.async.bulk.tensor": "cp.async.bulk.tensor (TMA)",
     "cp.async.c[ag]": "cp.async", "cp.async.wait_group": None, "wgmma.wait_group": None, "ld.global": None,
     "ld.shared": None, "st.shared": None, "shfl.sync": None, "redux.sync": None, "(?:bar|barrier).sync": "bar.sync",
     "mbarrier.try_wait": None},
    r"ld\.global|cp\.async\.(c[ag]|bulk)", r"st\.global",
    r"(load|store|async_copy)(?:_global_to_local)? .*?: tensor<((?:\d+x)+)!tt\.ptr<\w+>, (#\w+)>",
    ("shfl.sync", "redux.sync", "bar.sync"), ("threads", "warps"))
# Archs: all with matrix instructions whose kernels every Triton from 3.6 on compiles (gfx1250 has none in 3.6).
AMD = Vendor(
    "hip", ("gfx908", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151",
            "gfx1152", "gfx1153", "gfx1200", "gfx1201", "gfx1250"),
    ("ttir", "ttgir", "llir", "amdgcn"), "amdgcn",        # the package has no tool that disassembles hsaco
    r"(?:^\t|:: )([a-z]\w+?)(?:_e32|_e64)?(?!\w)",        # RDNA 3 and 4 issue two in one line
    {r"v_(?:mfma|wmma)\w+": None, r"v_(?:pk_|dual_)?fm\w+_f32": None, r"(?:buffer|global)_load\w+": None,
     r"ds_(?:read|load)\w+": None, r"ds_(?:write|store)\w+": None,
     r"\w+_dpp\d*|v_permlane\w+|ds_(?:bpermute|swizzle)\w+": "cross-lane",
     r"s_barrier(?:_wait)?": "s_barrier", r"s_wait\w+": None},  # gfx12 has s_barrier_signal and s_barrier_wait
    r"(buffer|global)_load", r"(buffer|global)_store",
    r"(?:tt|amdg)\.((?:buffer_)?(?:load|store)(?:_to_local)?) .*?tensor<((?:\d+x)+)(?:!tt\.ptr<)?\w+>?, (#\w+)>",
    ("cross-lane", "s_barrier"), ("lanes", "waves"))


VENDORS = {maker.backend: maker for maker in (NVIDIA, AMD)}


def opcodes(maker, lines):
    """(opcode, line) of each instruction."""
    return [(opcode, line) for line in lines for opcode in re.findall(maker.opcode, line)]


def loops(text):
    """Lines of each loop, by what LLVM remarks on each block; nested and adjacent ones are one."""
    text = re.sub(r"\n\s+(;|//) ", r" \1 ", text)          # remarks that go on in a line of their own
    found, inside, before = [], False, False
    for line in text.splitlines():
        if re.match(r"(\S*_?BB\d+_\d+:|(;|//) %bb\.\d+:)", line):
            inside = "in Loop: Header" in line or "Loop Header: Depth" in line
            if inside and not before:
                found.append([])
            before = inside
        if inside:
            found[-1].append(line)
    return found


def copied(line):
    """The bytes of a cp.async, its third operand, as " 16 B"; of other instructions nothing."""
    match = re.search(r"cp\.async\.c[ag]\b.*\], (\w+)", line)
    return f" {int(match.group(1), 0)} B" if match else ""


def count(maker, lines):
    """{instruction: how many}, in the order of maker.counted; a cp.async with its bytes."""
    ops, found = opcodes(maker, lines), collections.Counter()
    for prefix, name in maker.counted.items():
        for opcode, line in ops:
            if match := re.match(rf"(?:{prefix})(?![^.])", opcode):
                found[(name or match.group()) + copied(line)] += 1
    return found


def accesses(maker, lines):
    """The distinct (loads, stores) of global memory, as opcodes."""
    ops = opcodes(maker, lines)
    return [list(dict.fromkeys(opcode + copied(line) for opcode, line in ops if re.match(pattern, opcode)))
            for pattern in (maker.loads, maker.stores)]


def multiplies(maker, lines, num_warps, warp_size):
    """[(name, shape, FLOPs an instruction, who executes it, how many of those)] of a loop, a row a kind.

    Matrix instructions, and FMAs only where there are none. The shape is the instruction's own. mma.sync, MFMA and
    WMMA are a warp's (a wave's), wgmma a warpgroup's (four warps); tcgen05.mma is the whole block's, with M and N in
    its descriptor and 32 bytes of K (PTX ISA).
    """
    ops, units = opcodes(maker, lines), {}
    for opcode, line in ops:
        if match := re.match(r"(mma\.sync|wgmma\.mma_async)\S*\.m(\d+)n(\d+)k(\d+)", opcode):
            name, (m, n, k) = match.group(1), map(int, match.groups()[1:])
            who = ("warps", num_warps) if name == "mma.sync" else ("warpgroup(s)", num_warps // 4)
        elif match := re.match(r"v_(?:mfma|wmma)\w*?_(\d+)x(\d+)x(\d+)", opcode):
            name, (m, n, k), who = opcode, map(int, match.groups()), ("waves", num_warps)
        elif opcode.startswith("tcgen05.mma"):
            register = re.findall(r"%r\d+", line.rsplit("]", 1)[1])[-1]
            descriptor = next(int(re.search(r", (-?\d+);", other).group(1)) for op, other in ops
                              if op == "mov.b32" and re.search(rf"{register},", other))
            name, m, n = "tcgen05.mma", (descriptor >> 24 & 31) * 16, (descriptor >> 17 & 63) * 8
            k, who = 8 if "kind::tf32" in opcode else 16, ("block", 1)
        else:
            continue
        units.setdefault(name, (name, f"m{m}n{n}k{k}", 2 * m * n * k, *who))
    lanes = maker.threads[0], warp_size * num_warps
    for name in () if units else count(maker, lines):
        if name.startswith(("fma.f32", "v_fm", "v_dual_fm", "v_pk_fm")):
            two = name == "fma.f32x2" or "_pk_" in name
            units[name] = (name, "two FMAs", 4, *lanes) if two else (name, "one FMA", 2, *lanes)
    return list(units.values())


def resources(kernel):
    """Of a CompiledKernel, with no GPU: {"regs", "spills"} in 32 bits a thread; AMD's also {"sgprs"}, of a wave, and
    in "value" what is part of regs or spilled beside it. regs are AMD's VGPRs."""
    if "cubin" in kernel.asm:
        return common.resources(kernel.asm["cubin"])
    found = {key: int(n) for key, n in re.findall(r"\.(\w+):\s+(\d+)$", kernel.asm["amdgcn"], re.M)}
    more = {"AGPRs": found.get("agpr_count", 0), "SGPR spills": found["sgpr_spill_count"],
            "scratch bytes": found["private_segment_fixed_size"]}
    return {"regs": found["vgpr_count"], "sgprs": found["sgpr_count"], "spills": found["vgpr_spill_count"],
            "value": ", ".join(f"{n} {name}" for name, n in more.items() if n)}
