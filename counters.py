"""Do the hardware's counters and a second clock agree with the formulas and the times of the tables?

`make ncu` runs this on a GPU where Nsight Compute may read its counters. It is no numbered step: it launches the
kernels of all of them, times each with do_bench and with an event pair round a loop (`common.loop_ms`), then once more
under ncu, at the clocks as they are (--clock-control none). The answers are the column dram_read_gb of the table
`grouping`, what each program order reads, and in the table `kernels` the columns `mark`, where bytes differ from the
formula by more than 5%, and `stall`, what warps wait for most.
"""
import csv
import importlib
import io
import re
import shutil
import statistics
import subprocess
import sys
import time
from functools import partial

import torch

import common

vector, fused, product = map(importlib.import_module, ("01_vector_add", "02_fused_softmax", "03_matmul"))

METRICS = {"read": "dram__bytes_read.sum", "written": "dram__bytes_write.sum", "l2_hit": "lts__t_sector_hit_rate.pct",
           "ns": "gpu__time_duration.sum"}
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active"  # warps that wait for one thing, whenever one issues
KERNELS = r"regex:^(add|softmax|rows|online|matmul|split|specialized|persistent|narrow|reduce|pack|fma)_kernel$"
SIZES, GROUPS, LAUNCHES = (4096, 8192), (1, 8), 3
WIDTHS = ((512, "bf16"), (4096, "bf16"), (4096, "fp32"), (16384, "fp32"), (65536, "bf16"), (131072, "bf16"))
WIDE = ((16384, "bf16"), (32768, "bf16"), (65536, "bf16"), (131072, "bf16"), (262144, "bf16"), (131072, "fp32"))


# ---------------------------------------------------------------- what is launched

def orders():
    """S1's tile in both program orders: [(n, group_m, call)]."""
    for n in SIZES:
        a, b, out = product.square(n, "bf16")
        for group_m in GROUPS:
            yield n, group_m, partial(product.matmul, a, b, out=out, config=product.cfg(128, 128, 32, 4, 4, group_m))


def cases(gpu):
    """Every kernel of the steps at its main sizes: (fields of its row, bytes that it must read and write, calls on
    buffers that together exceed the L2)."""
    n = vector.FULL_N
    x, y, out = vector.inputs(n)
    yield {"kernel": "add_kernel", "n": n, "dtype": "fp32"}, 2 * x.nbytes, x.nbytes, [partial(vector.add, x, y, out)]
    for n_cols, dtype in WIDTHS:
        n_rows, _ = fused.matrix(gpu, common.DTYPES[dtype].itemsize, n_cols)
        x = torch.randn(n_rows, n_cols, dtype=common.DTYPES[dtype], device="cuda")
        out = torch.empty_like(x)
        for choice in fused.ours(n_cols, x.element_size()).values():
            yield ({"kernel": fused.KERNELS[choice.kernel].__name__, "n_rows": n_rows, "n_cols": n_cols, "dtype": dtype,
                    "num_warps": choice.num_warps}, x.nbytes, x.nbytes, [partial(fused.launch, choice, x, out)])
    config = product.CONFIGS[2][-1]
    for n in SIZES:
        sets = [product.square(n, "bf16") for _ in range(1 + gpu["l2_bytes"] // (6 * n * n))]
        yield ({"kernel": "matmul_kernel", "n": n, "m": n, "k": n, "dtype": "bf16",
                "config": product.config_name(config)},
               4 * n * n, 2 * n * n, [partial(product.matmul, a, b, out=out, config=config) for a, b, out in sets])
    if gpu["cc"].startswith("9."):
        yield from beyond(gpu)


def beyond(gpu):
    """Those of 06 to 08, launch by launch, where a product takes several."""
    wide, persistent, packed = map(importlib.import_module, ("06_split_softmax", "07_persistent_matmul",
                                                             "08_fp32_matmul"))
    for n_cols, dtype in WIDE:
        n_rows, _ = fused.matrix(gpu, common.DTYPES[dtype].itemsize, n_cols)
        x = torch.randn(n_rows, n_cols, dtype=common.DTYPES[dtype], device="cuda")
        out, plan = torch.empty_like(x), wide.choose(n_cols, x.dtype, torch.cuda.get_device_properties(x.device))
        yield ({"kernel": "split_kernel", "n_rows": n_rows, "n_cols": n_cols, "dtype": dtype,
                "num_warps": plan.num_warps}, x.nbytes, x.nbytes, [partial(wide.launch, plan, x, out)])

    def one(name, todo, dtype, config, m, n, k, read, written, precision=None):
        calls = [partial(persistent.run, [step for step in steps if step[0].__name__ == name][:1]) for steps in todo]
        return {"kernel": name, "n": n, "m": m, "k": k, "dtype": dtype, "config": config} | (
            {"precision": precision} if precision else {}), read, written, calls

    def operands(m, n, k, dtype, least):
        for _ in range(1 + gpu["l2_bytes"] // least):  # of the bytes that each launch moves, the fewest
            yield [torch.randn(*shape, device="cuda").to(dtype) for shape in ((m, k), (k, n), (m, n))]
    for (m, n, k), kind in (((4096,) * 3, "ws"), ((8192,) * 3, "ws"), ((8192,) * 3, "tma"),
                            ((1024, 1024, 16384), "ws"), ((16, 8192, 8192), "narrow")):
        config = next(one for one in persistent.candidates(m, n, k, gpu["sms"]) if one.kernel == kind)
        parts, read = config.split * m * n * 4, 2 * (m * k + k * n)
        least = min(read, parts) if config.split > 1 and kind != "narrow" else read
        todo = [persistent.launches(config, *abc, sms=gpu["sms"]) for abc in operands(m, n, k, torch.bfloat16, least)]
        main = todo[0][0][0].__name__
        yield one(main, todo, "bf16", str(config), m, n, k, read, parts if len(todo[0]) > 1 else 2 * m * n)
        if len(todo[0]) > 1:
            yield one("reduce_kernel", todo, "bf16", str(config), m, n, k, parts, 2 * m * n)
    n = 4096
    for precision in ("tf32", "bf16x6", "ieee"):
        mode = packed.MODES[precision]
        todo = [packed.launches(mode, *abc, gpu["sms"]) for abc in operands(n, n, n, torch.float32, 8 * n * n)]
        if precision == "ieee":
            yield one("fma_kernel", todo, "fp32", str(mode), n, n, n, 8 * n * n, 4 * n * n, precision)
        else:
            part = mode.parts * mode.dtype.itemsize * n * n  # of an operand; "tf32" takes A as it is
            yield one("pack_kernel", todo, "fp32", None, n, n, n, 4 * n * n, part, precision)
            yield one("specialized_kernel", todo, "fp32", str(mode.config), n, n, n, 2 * part, 4 * n * n, precision)


def launch(device):
    """What runs under ncu: LAUNCHES launches of each, in the order of orders() and cases()."""
    torch.cuda.set_device(device)
    for *_, call in orders():
        for _ in range(LAUNCHES):
            call()
    for *_, calls in cases(common.gpu_facts(device)):
        for _ in range(LAUNCHES):
            calls[0]()
    torch.cuda.synchronize()


def stalls():
    """{metric: reason} of what this GPU's warps can be seen to wait for."""
    known = subprocess.run(["ncu", "--query-metrics"], capture_output=True, text=True).stdout
    found = re.findall(rf"^({STALL.format('([a-z_]+)')})\b", known, re.M)
    return {f"{metric}.ratio": reason for metric, reason in found  # a warp that is or may be selected does not wait
            if not reason.endswith(("_not_issued", "selected"))}


def profile(device):
    """ncu's readings in base units, the medians of each LAUNCHES launches: a reading has METRICS' keys, "name" and
    "stall". Fails in one line where ncu may not read."""
    if shutil.which("ncu") is None:
        common.fail("ncu is not on the PATH; it comes with the CUDA toolkit as Nsight Compute")
    code, reasons = f"import counters; counters.launch({device})", stalls()
    command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base", "--kernel-name",
               KERNELS, "--metrics", ",".join([*METRICS.values(), *reasons]), sys.executable, "-c", code]
    done = subprocess.run(command, cwd=common.ROOT, capture_output=True, text=True)
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        common.fail("the driver lets only administrators read performance counters (ERR_NVGPUCTRPERM); run as root, or "
                    "set the nvidia module's option NVreg_RestrictProfilingToAdminUsers=0")
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    rows = [row for row in csv.DictReader(io.StringIO("\n".join(lines))) if row.get("ID")]  # the units have no ID
    if done.returncode or not rows or len(rows) % LAUNCHES:
        tail = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["nothing"]
        common.fail(f"ncu gave {len(rows)} readings, status {done.returncode}; it ended with: {tail[0]}")
    try:
        values = [{key: float(row[name].replace(",", "")) for key, name in (METRICS | {m: m for m in reasons}).items()}
                  for row in rows]
        names = [row["Kernel Name"].split("(")[0] for row in rows]
    except (KeyError, ValueError) as error:
        common.fail(f"ncu gave no figure for each of {', '.join(METRICS.values())}: {error}")
    found = []
    for i in range(0, len(values), LAUNCHES):
        middle = {key: statistics.median(value[key] for value in values[i:i + LAUNCHES]) for key in values[0]}
        worst = max(reasons, key=middle.get, default=None)
        share = worst and 100 * middle[worst] / (sum(middle[metric] for metric in reasons) or 1)
        found.append({key: middle[key] for key in METRICS} | {
            "name": names[i], "stall": f"{reasons[worst].replace('_', ' ')} {share:.0f}%" if worst else None})
    return found


# ---------------------------------------------------------------- tables

def grouping(report, readings):
    with report.table("grouping", "Nsight Compute's counters for both program orders, BF16") as table:
        for (n, group_m, _), reading in zip(orders(), readings):
            table.row(n=n, m=n, k=n, dtype="bf16", provider="triton", config="128x128x32 s4 w4", group_m=group_m,
                      bytes=2 * n * n * 2,                    # the least: A and B, each read once
                      dram_read_gb=reading["read"] / 1e9, l2_hit_pct=reading["l2_hit"], ms=reading["ns"] / 1e6)
        table.note("bytes is the least that can be read: A and B once each. Medians of three launches under "
                   "`ncu --clock-control none`, which flushes every cache before each launch; ms is ncu's duration.")
        for n in SIZES:
            first, last = (next(row for row in table.rows if row["n"] == n and row["group_m"] == g) for g in GROUPS)
            more = first["dram_read_gb"] / last["dram_read_gb"]
            table.note(f"{n:,}: row order reads {more:.2f} times the bytes that grouped order does.")


def rated_gbps(gpu):
    """At the highest memory clock; None where nvidia-smi does not tell it."""
    try:
        return common.rated_gbps(float(common.smi(["clocks.max.mem"], "-i", gpu["uuid"])[0]), gpu["bus_bits"])
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def meaning(read, written, least_read, least_written, spills):
    """Why the DRAM's bytes differ from the formula's by more than 5%; None where they do not."""
    difference = (read + written) / (least_read + least_written) - 1
    if abs(difference) <= 0.05:
        return None
    if difference < 0:
        return "write-back left in L2" if written < least_written else "part of the input left in L2"
    return "spills" if spills else "re-reads" if read > least_read else "written twice"


def kernels(report, readings):
    with report.table("kernels", "every kernel: bytes by formula and by counter, time by three clocks") as table:
        log, windows = common.ClockLog(report.gpu["uuid"]), []
        rated = rated_gbps(report.gpu)
        for (case, least_read, least_written, calls), reading in zip(cases(report.gpu), readings):
            if reading["name"] != case["kernel"]:
                common.fail(f"ncu read {reading['name']} where {case['kernel']} was launched")
            timed = common.bench({"do_bench": calls[0]}, 200, report.args.rep, report.args.rounds)["do_bench"]
            begin = time.time()
            loop = common.loop_ms(calls)
            windows.append((timed["windows"], [(begin, time.time())]))
            kernel = calls[0]()
            spills = getattr(kernel, "n_spills", 0)
            table.row(**case, bytes=least_read + least_written, ms=timed["ms"], loop_ms=loop,
                      ncu_ms=reading["ns"] / 1e6, spread_pct=timed["spread_pct"], dram_read_gb=reading["read"] / 1e9,
                      dram_write_gb=reading["written"] / 1e9, l2_hit_pct=reading["l2_hit"], stall=reading["stall"],
                      dram_pct=100 * (reading["read"] + reading["written"]) / reading["ns"] / rated if rated else None,
                      mark=meaning(reading["read"], reading["written"], least_read, least_written, spills))
        log.stop()
        for row, (ours, theirs) in zip(table.rows, windows):
            row["sm_mhz"], row["loop_mhz"] = (log.medians(window)["sm_mhz"] for window in (ours, theirs))
        table.note(second_clock(table.rows))
        table.note("ncu_ms: the kernel alone, no launch, no events, and the clock of a GPU that rests between "
                   "launches.")
        table.note("mark: where DRAM's bytes differ from the formula's by more than 5%; empty where they agree. What a "
                   "kernel wrote last is still in L2 when it ends, and is no DRAM traffic of its own.")
        table.note("stall: what warps that cannot issue wait for most, and its share of their waiting. dram_pct: "
                   "DRAM's bytes over ncu_ms, of the rated bandwidth.")


def second_clock(rows):
    """The note on the two clocks, from the rows above 100 us: how far apart they are, for matmuls also in cycles, which
    a power limit leaves alone."""
    def apart(rows, cycles=False):
        return max((100 * abs(row["loop_ms"] / row["ms"] * (row["loop_mhz"] / row["sm_mhz"] if cycles else 1) - 1)
                    for row in rows), default=0.0)
    memory, matmuls = ([row for row in rows if row["ms"] > 0.1 and ("k" in row) == one] for one in (False, True))
    clocked = all(row["sm_mhz"] and row["loop_mhz"] for row in matmuls)
    return ("ms: do_bench, L2 flushed before each call. loop_ms: an event pair round back-to-back launches on buffers "
            f"larger than the L2. Above 100 us they differ by at most {apart(memory):.1f}%, of matmuls by at most "
            f"{apart(matmuls):.1f}%" + (
                f", and by {apart(matmuls, True):.1f}% in cycles (ms x clock): a flush is a rest for the tensor cores, "
                "after which a power-limited GPU runs faster." if clocked else ".")
            + " Below, ms also holds each call's event pair, and loop_ms the launch, where that takes longer than the "
            "kernel.")


def main():
    report = common.start(p := common.parser(__doc__))
    if report.args.check:
        p.error("--check is a numbered script's")
    if not report.gpu:
        print("counters: Nsight Compute needs a GPU.")
        return
    readings = profile(report.args.device)
    split = len(SIZES) * len(GROUPS)
    grouping(report, readings[:split])
    kernels(report, readings[split:])
    report.finish()


if __name__ == "__main__":
    common.run(main)
