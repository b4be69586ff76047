"""The GPU's sheet, which `python common.py` prints: what it is, its roofs, its peaks, and what this machine lacks.

Apart from common.py only so that what every script reads stays short. `python common.py --save` writes
results/<gpu>/card.json and .md, as `make all` does.
"""
import importlib.util
import re
import shutil
import statistics
import subprocess
from pathlib import Path

import torch

import common
import triton
import triton.language as tl


@triton.jit
def read_kernel(out_ptr, in_ptr, BLOCK: tl.constexpr):
    """Reads, and writes nothing of random numbers; without the store the loads would be left out."""
    largest = tl.max(tl.load(in_ptr + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)), axis=0)
    tl.store(out_ptr, largest, mask=largest > 1e30)


def counters_refused(params=Path("/proc/driver/nvidia/params"), status=Path("/proc/self/status")):
    """Whether the driver keeps counters for administrators and this process is none, without CAP_SYS_ADMIN (21) and
    CAP_PERFMON (38), as root is in a container. Nsight Compute itself says it only once it profiles."""
    try:
        rights = int(re.search(r"^CapEff:\s*(\w+)", status.read_text(), re.M).group(1), 16)
        return "RmProfilingAdminOnly: 1" in params.read_text() and not rights & (1 << 21 | 1 << 38)
    except (OSError, AttributeError, ValueError):
        return False


def lacks():
    """[(what is not to be had here, what that costs, its cure)], found by trying each."""
    found = []
    if shutil.which("nvidia-smi") is None:
        found.append(("nvidia-smi", "no clock, power or throttle", "the driver carries it: put it on the PATH"))
    if shutil.which("ncu") is None:
        found.append(("ncu", "no `make ncu`", "install Nsight Compute, which the CUDA toolkit carries"))
    elif counters_refused():
        found.append(("the permission to read counters", "no `make ncu`",
                      "run as root, or set the nvidia module's option NVreg_RestrictProfilingToAdminUsers=0"))
    if torch.cuda.is_available():
        try:
            from torch.cuda._utils import _nvrtc_compile
            _nvrtc_compile('extern "C" __global__ void nothing() {}', "nothing")
        except (ImportError, AttributeError, OSError, RuntimeError) as error:
            found.append(("NVRTC", f"no CUDA C++ rows in 01 ({type(error).__name__})", "install PyTorch's CUDA build"))
    for name in ("cuobjdump", "nvdisasm"):
        try:
            subprocess.run([getattr(triton.knobs.nvidia, name).path, "--version"], capture_output=True, check=True)
        except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError):
            found.append((name, "no SASS and no register counts", "reinstall triton: its package carries it"))
    for name, cost in (("matplotlib", "no pictures"), ("hypothesis", "no property tests")):
        if importlib.util.find_spec(name) is None:
            found.append((name, cost, f"pip install {name}"))
    return found


def roofs(gpu, args):
    """(memory clock in MHz, rated GB/s, {name: GB/s measured on 16 times the L2 or more}); None without clocks."""
    x = torch.randn(max(16 * gpu["l2_bytes"], 2**28) // 4, device="cuda")
    y = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 8192),)                    # 16 times any L2 is a multiple of it
    cases = {"copy": (lambda: y.copy_(x), 2), "fill": (lambda: y.fill_(1.0), 1),
             "read only": (lambda: read_kernel[grid](y, x, BLOCK=8192, num_warps=8), 1)}
    log = common.ClockLog(gpu["uuid"])
    timed = common.bench({name: fn for name, (fn, _) in cases.items()}, args.warmup, args.rep, args.rounds)
    log.stop()
    clocks = [log.medians(timed[name]["windows"])["mem_mhz"] for name in cases]
    mem_mhz = statistics.median(clocks) if None not in clocks else None
    rated = common.rated_gbps(mem_mhz, gpu["bus_bits"]) if mem_mhz else None
    return mem_mhz, rated, {name: times * x.nbytes / (timed[name]["ms"] * 1e6) for name, (_, times) in cases.items()}


def vendor(name):
    """The line of common.PEAKS that a GPU's peaks were checked against."""
    for pattern, *_, (checked, sms, ghz, rate) in common.PEAKS:
        if re.search(rf"\b(?:{pattern})(?![\w])", name):
            return f"checked: {checked}, {sms} SMs at {ghz} GHz, {rate} TFLOP/s in BF16"
    return None


def sheet(report):
    gpu = report.gpu
    with report.table("card", "the GPU in hand") as table:
        for key, unit, scale in (("cc", "", 1), ("sms", "", 1), ("l2_bytes", "MiB", 2**20), ("bus_bits", "bit", 1),
                                 ("memory_bytes", "GiB", 2**30), ("power_limit_w", "W", 1), ("driver", "", 1)):
            value = gpu[key] if scale == 1 else round(gpu[key] / scale, 1)
            table.row(case=key.removesuffix("_bytes").removesuffix("_w"), value=f"{value} {unit}".strip())
        top = None
        try:
            fields = ["clocks.sm", "clocks.max.sm", "clocks.max.mem"]
            now, top, memory = map(float, common.smi(fields, "-i", gpu["uuid"]))
            table.row(case="clocks", value=f"SM {now:.0f} now, {top:.0f} at most; memory {memory:.0f} MHz at most")
        except (OSError, subprocess.SubprocessError, ValueError):
            table.note("nvidia-smi gave no clocks.")
        mem_mhz, rated, measured = roofs(gpu, report.args)
        if rated:
            table.row(case="rated roof", value=f"memory at {mem_mhz:.0f} MHz", gbps=rated, pct_rated=100.0)
        for name, gbps in measured.items():
            table.row(case=f"{name} roof", value="measured", gbps=gbps,
                      pct_rated=100 * gbps / rated if rated else None)
        if not rated:
            table.note("The rated roof needs the memory clock, which could not be logged.")
        for dtype in ("bf16", "fp16", "tf32", "fp32"):
            peak = top and common.peak_tflops(gpu["name"], gpu["sms"], top, dtype)
            table.row(case=f"peak {dtype}", value=f"at {top:.0f} MHz; {vendor(gpu['name'])}" if peak else "unknown",
                      tflops=peak or None)
        table.note("Peaks are dense, at the highest clock; a timed row of the scripts uses the clock that it ran at.")
        for what, cost, cure in lacks():
            table.row(case=f"lacks {what}", value=f"{cost}: {cure}")


def main():
    p = common.parser(__doc__)
    report = common.start(p)
    report.name = "card"
    if report.gpu is None or report.args.check:
        for what, cost, cure in lacks():
            print(f"lacks {what}: {cost}; {cure}")
        return
    sheet(report)
    report.finish()
