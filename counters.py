"""What do the hardware counters say of the program order: DRAM bytes read, L2 hit rate, duration?

`make ncu` runs this on a GPU where Nsight Compute may read its counters. It is no numbered step: it times nothing
itself, it launches 03's kernel under ncu (at the clocks as they are: --clock-control none) and reads what ncu prints.
The answer is the column dram_read_gb of the table `grouping`.
"""
import csv
import importlib
import io
import shutil
import subprocess
import sys

import torch

import common

METRICS = {"dram_read": "dram__bytes_read.sum", "l2_hit": "lts__t_sector_hit_rate.pct", "ns": "gpu__time_duration.sum"}
SIZES, GROUPS, LAUNCHES = (4096, 8192), (1, 8), 3
TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 32, "num_stages": 4, "num_warps": 4}  # S1's


def launch():
    """What runs under ncu: for each size and order, in turn, LAUNCHES launches of the matmul."""
    matmul_kernel = importlib.import_module("03_matmul").matmul_kernel
    for n in SIZES:
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        c = torch.empty_like(a)
        for group_m in GROUPS:
            for _ in range(LAUNCHES):
                matmul_kernel[((n // 128) ** 2,)](a, b, c, n, n, n, n, 1, n, 1, n, 1, **TILE, GROUP_M=group_m,
                                                  PRECISION="ieee")
    torch.cuda.synchronize()


def profile(device):
    """ncu's readings: one {metric: value} a launch, in base units. Fails in one line where ncu may not read them."""
    if shutil.which("ncu") is None:
        common.fail("ncu is not on the PATH; it comes with the CUDA toolkit as Nsight Compute")
    code = f"import torch, importlib; torch.cuda.set_device({device}); importlib.import_module('counters').launch()"
    command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base", "--kernel-name",
               "matmul_kernel", "--metrics", ",".join(METRICS.values()), sys.executable, "-c", code]
    done = subprocess.run(command, cwd=common.ROOT, capture_output=True, text=True)
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        common.fail("the driver lets only administrators read performance counters (ERR_NVGPUCTRPERM); run as root, or "
                    "set the nvidia module's option NVreg_RestrictProfilingToAdminUsers=0")
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    readings = [row for row in csv.DictReader(io.StringIO("\n".join(lines))) if row.get("ID")]  # the units have no ID
    if done.returncode or len(readings) != len(SIZES) * len(GROUPS) * LAUNCHES:
        tail = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["nothing"]
        common.fail(f"ncu gave {len(readings)} readings, status {done.returncode}; it ended with: {tail[0]}")
    try:
        return [{key: float(row[name].replace(",", "")) for key, name in METRICS.items()} for row in readings]
    except (KeyError, ValueError) as error:
        common.fail(f"ncu gave no figure for each of {', '.join(METRICS.values())}: {error}")


def grouping(report):
    with report.table("grouping", "Nsight Compute's counters for both program orders, BF16") as table:
        readings = iter(profile(report.args.device))
        for n in SIZES:
            for group_m in GROUPS:
                three = [next(readings) for _ in range(LAUNCHES)]
                median = {key: sorted(r[key] for r in three)[LAUNCHES // 2] for key in METRICS}
                table.row(n=n, m=n, k=n, dtype="bf16", provider="triton", config="128x128x32 s4 w4", group_m=group_m,
                          bytes=2 * n * n * 2,                # the least: A and B, each read once
                          dram_read_gb=median["dram_read"] / 1e9, l2_hit_pct=median["l2_hit"],
                          ms=median["ns"] / 1e6)
        table.note("bytes is the least that can be read: A and B once each. Medians of three launches under "
                   "`ncu --clock-control none`, which flushes every cache before each launch; ms is ncu's duration.")
        for n in SIZES:
            first, last = (next(row for row in table.rows if row["n"] == n and row["group_m"] == g) for g in GROUPS)
            more = first["dram_read_gb"] / last["dram_read_gb"]
            table.note(f"{n:,}: row order reads {more:.2f} times the bytes that grouped order does.")


def main():
    report = common.start(common.parser(__doc__))
    if not report.gpu:
        print("counters: Nsight Compute needs a GPU.")
        return
    grouping(report)
    report.finish()


if __name__ == "__main__":
    common.run(main)
