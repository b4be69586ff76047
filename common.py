"""What the numbered scripts share: do_bench settings, roofs and peaks, the clock log, tables and results.

Import this before triton: where no GPU can be used, it switches Triton to its interpreter, and Triton reads
that switch when it is imported. A script reads

    report = common.start(__doc__, ...)                       # flags, device, header
    with report.table("providers", "title") as table:         # warm-up, clock log, printed table
        table.time({"n": n}, {"triton": f, "torch": g}, bytes=3 * n * 4)
    report.finish()                                           # results/<gpu>/, with --save; plots/, with --plot
"""
import argparse
import concurrent.futures
import contextlib
import datetime
import fcntl
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

# Before triton is imported. FMAs as in every release up to 3.9, which warns that the next will make none.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported; 05, which compiles, sets "0"
import tabulate
import triton
import triton.testing

ROOT = Path(__file__).resolve().parent
INTERPRETED = triton.knobs.runtime.interpret
if INTERPRETED:  # numpy warns of -inf - -inf and of exp(1e4), which a GPU computes without a word
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


# ---------------------------------------------------------------- roofs and peaks

# Dense FLOPs per clock per SM with FP32 accumulation, and the vendor's dense BF16 rate that each row must give:
# SMs x boost GHz x FLOPs per clock = TFLOP/s (NVIDIA's architecture whitepapers and datasheets).
# name pattern, {BF16 and FP16, TF32, FP32}, (GPU, SMs, GHz, vendor's BF16 TFLOP/s)
PEAKS = [
    (r"A100\b", 2048, 1024, 128, ("NVIDIA A100-SXM4-80GB", 108, 1.41, 312.0)),
    (r"A10|A40|RTX A[2-6][05]00", 1024, 512, 256, ("NVIDIA A40", 84, 1.74, 149.7)),
    (r"GeForce RTX 30[5-9]0", 512, 256, 256, ("NVIDIA GeForce RTX 3090", 82, 1.695, 71.0)),
    (r"L4|L40S|RTX (?:4000|4500|5000|6000)(?: SFF)? Ada", 1024, 512, 256, ("NVIDIA L4", 58, 2.04, 121.0)),
    (r"L40|GeForce RTX 40[5-9]0", 512, 256, 256, ("NVIDIA GeForce RTX 4090", 128, 2.52, 165.2)),
    (r"H100|H200|GH200", 4096, 2048, 256, ("NVIDIA H100 80GB HBM3", 132, 1.83, 989.4)),
    (r"B200|GB200", 8192, 4096, 256, ("NVIDIA B200", 148, 1.86, 2250.0)),
    (r"GeForce RTX 50[5-9]0", 512, 256, 256, ("NVIDIA GeForce RTX 5090", 170, 2.407, 209.5)),
    (r"RTX PRO \d+ Blackwell", 1024, 512, 256, ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 188, 2.617, 503.8)),
]


def rated_gbps(mem_mhz, bus_bits):
    """Rated DRAM bandwidth in GB/s: memory clock in MHz x 2 (double data rate) x bus width in bytes."""
    return mem_mhz * 2 * bus_bits / 8 / 1000


def peak_tflops(gpu_name, sms, sm_mhz, dtype):
    """Dense peak in TFLOP/s at a clock, or None where the GPU is not in PEAKS ("peak unknown", never a guess).

    gpu_name is what torch.cuda.get_device_name gives; dtype is the unit that does the work: "bf16", "fp16",
    "tf32" or "fp32". SMs x FLOPs per clock per SM x clock.
    """
    if dtype not in ("bf16", "fp16", "tf32", "fp32"):
        raise ValueError(f"dtype is {dtype!r}; peaks are known for bf16, fp16, tf32 and fp32")
    for pattern, bf16, tf32, fp32, _ in PEAKS:
        if re.search(rf"\b(?:{pattern})(?![\w])", gpu_name):
            per_clock = {"bf16": bf16, "fp16": bf16, "tf32": tf32, "fp32": fp32}[dtype]
            return sms * per_clock * sm_mhz * 1e6 / 1e12
    return None


# ---------------------------------------------------------------- the GPU in hand

def smi(fields, *extra, seconds=20):
    """One nvidia-smi query as a list of strings; raises OSError, SubprocessError or ValueError where it cannot be had.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", *extra]
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()  # and not waited for: one that hangs in the driver may never end
            raise
        if status:
            raise subprocess.CalledProcessError(status, command)
        file.seek(0)
        return [field.strip() for field in (file.read().decode().splitlines() or [""])[0].split(",")]


def finite(text):
    """A number that JSON can hold; ValueError for "nan", as for "[N/A]"."""
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


def gpu_facts(device):
    """What the tables need to know of a CUDA device (sizes in bytes, the bus in bits, the limit in watts)."""
    props = torch.cuda.get_device_properties(device)
    facts = {"name": props.name, "cc": f"{props.major}.{props.minor}", "sms": props.multi_processor_count,
             "l2_bytes": props.L2_cache_size, "memory_bytes": props.total_memory, "uuid": f"GPU-{props.uuid}",
             "bus_bits": triton.runtime.driver.active.utils.get_device_properties(device)["mem_bus_width"],
             "power_limit_w": None, "driver": None}
    try:
        limit, facts["driver"] = smi(["power.limit", "driver_version"], "-i", facts["uuid"])
        facts["power_limit_w"] = finite(limit)
    except (OSError, subprocess.SubprocessError, ValueError):
        pass  # the clock log's note says that there is no nvidia-smi
    return facts


class ClockLog:
    """nvidia-smi running beside a table, every 20 ms: SM and memory clock, power, throttle reasons.

    Samples carry nvidia-smi's own time stamps, so that its buffering does not matter: the log is read once, at
    the end, and each row takes the medians of the samples that fall into its timed windows.
    """
    REASONS = {0x4: "power cap", 0x8: "hw slowdown", 0x20: "sw thermal", 0x40: "hw thermal", 0x80: "power brake",
               0x2: "app clocks", 0x10: "sync boost", 0x100: "display clocks"}
    hung = None  # waited for once a run

    def __init__(self, uuid):
        self.process, self.samples, self.problem = None, [], ClockLog.hung
        for reasons in () if self.problem else ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):
            for power in ("power.draw.instant", "power.draw"):
                fields = ["timestamp", "clocks.sm", "clocks.mem", power, reasons]
                try:
                    self._parse(", ".join(smi(fields, "-i", uuid)))
                except FileNotFoundError:
                    self.problem = "nvidia-smi is not on the PATH"
                    return
                except subprocess.TimeoutExpired as error:
                    self.problem = ClockLog.hung = f"nvidia-smi did not answer in {error.timeout:.0f} s"
                    return
                except (OSError, subprocess.SubprocessError, ValueError) as error:
                    self.problem = f"nvidia-smi answered with nothing usable ({type(error).__name__})"
                    continue
                self.problem = None
                self.file = tempfile.TemporaryFile("w+", errors="replace")
                command = ["nvidia-smi", "-i", uuid, f"--query-gpu={','.join(fields)}",
                           "--format=csv,noheader,nounits", "-lms", "20"]
                self.process = subprocess.Popen(command, stdout=self.file, stderr=subprocess.DEVNULL)
                return

    @staticmethod
    def _parse(line):
        stamp, sm, mem, power, reasons = [field.strip() for field in line.split(",")]
        when = datetime.datetime.strptime(stamp, "%Y/%m/%d %H:%M:%S.%f").timestamp()
        return when, finite(sm), finite(mem), finite(power), int(reasons, 16)

    def stop(self):
        if self.process is None:
            return
        if self.process.poll() is not None:
            self.problem = f"nvidia-smi ended early, with status {self.process.returncode}"
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.file.seek(0)
        for line in self.file:
            try:
                self.samples.append(self._parse(line))
            except ValueError:
                continue  # the last line may be cut where the process ended
        self.file.close()
        self.process = None
        if not self.samples and not self.problem:
            self.problem = "nvidia-smi logged nothing usable"

    def medians(self, windows):
        """The row's columns from the samples inside its windows, a list of (start, end) in time.time() seconds."""
        inside = [s for s in self.samples if any(a <= s[0] <= b for a, b in windows)]
        if not inside:
            return {"sm_mhz": None, "mem_mhz": None, "power_w": None, "throttle": None}
        seen = [name for bit, name in self.REASONS.items()
                if sum(bool(s[4] & bit) for s in inside) * 2 >= len(inside)]
        sm, mem, power = (statistics.median(s[i] for s in inside) for i in (1, 2, 3))
        return {"sm_mhz": sm, "mem_mhz": mem, "power_w": power, "throttle": ", ".join(seen) or "none"}


# ---------------------------------------------------------------- timing

def bench(providers, warmup=1000, rep=1000, rounds=3, graph_below_ms=0.1, burst=False, tell=lambda index, what: None):
    """Time several callables against each other: {name: {"ms", "graph_ms", "launch_us", "spread_pct", "windows"}}.

    triton.testing.do_bench takes each sample (L2 flushed before each call, one event pair a call) and its median
    is kept; `rep` ms a callable are split over `rounds` interleaved rounds (A B C A B C ...). ms is the median
    of the rounds, spread_pct their range over it. `warmup` ms are spent first, over all of them in turn (0 where
    the table is warm). Below `graph_below_ms`, graph_ms is the time in a replayed CUDA graph: no launch
    overhead, L2 warm; and launch_us what a call takes the host. burst: also "burst_ms" and "burst_windows", the first
    50 ms after half a second of rest, before a power limit is felt. windows are the (start, end) times of the rounds,
    for ClockLog.medians. tell is called with the place of the provider that is next, and what is done with it.
    """
    for index, fn in enumerate(providers.values()):
        tell(index, "first call")
        fn()  # compiles and tunes outside every timed window
    torch.cuda.synchronize()
    tell(0, "warm-up")
    end = time.monotonic() + warmup / 1000
    while time.monotonic() < end:
        for fn in providers.values():
            for _ in range(5):
                fn()
        torch.cuda.synchronize()
    times, windows = ({name: [] for name in providers} for _ in range(2))
    for turn in range(rounds):
        for index, (name, fn) in enumerate(providers.items()):
            tell(index, f"round {turn + 1} of {rounds}")
            start = time.time()
            times[name].append(triton.testing.do_bench(fn, warmup=min(25, rep), rep=rep / rounds,
                                                       return_mode="median"))
            windows[name].append((start, time.time()))
    result = {}
    for name, fn in providers.items():
        ms = statistics.median(times[name])
        result[name] = {"ms": ms, "graph_ms": None, "launch_us": None, "windows": windows[name],
                        "spread_pct": 100 * (max(times[name]) - min(times[name])) / ms}
    small = [name for name in providers if result[name]["ms"] < graph_below_ms]
    graphs = {name: [] for name in small}
    for _ in range(rounds):
        for name in small:  # do_bench_cudagraph replays a graph of `rep` ms ten times
            tell(list(providers).index(name), "CUDA graph")
            graphs[name].append(triton.testing.do_bench_cudagraph(
                providers[name], rep=min(20, rep / rounds / 10), return_mode="median"))
    for name in small:
        result[name]["graph_ms"] = statistics.median(graphs[name])
        result[name]["launch_us"] = 1e6 * statistics.median(_host_seconds(providers[name]) for _ in range(50))
        torch.cuda.synchronize()
    for index, name in enumerate(providers if burst else ()):
        tell(index, "burst")
        torch.cuda.synchronize()
        time.sleep(0.5)
        start = time.time()
        result[name]["burst_ms"] = triton.testing.do_bench(providers[name], warmup=5, rep=min(50, rep),
                                                           return_mode="median")
        result[name]["burst_windows"] = [(start, time.time())]
    return result


def _host_seconds(fn):
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def loop_ms(calls, rep=300):
    """A second clock, without do_bench: ms a call of `calls` in turn, back to back between two CUDA events for about
    `rep` ms. To be compared with do_bench's, the calls must work on buffers that together exceed the L2."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    turns = 1
    while True:
        torch.cuda.synchronize()
        start.record()
        for _ in range(turns):
            for call in calls:
                call()
        end.record()
        end.synchronize()
        total = start.elapsed_time(end)
        if total >= rep / 2:
            return total / turns / len(calls)
        turns = max(2 * turns, int(turns * rep / max(total, 1e-3)))


def copy_roof_gbps(gpu, rounds=3, rep=1000):
    """Bytes read plus written a second, in GB/s, of a device-to-device copy of 16 times the L2 or more."""
    size = max(16 * gpu["l2_bytes"], 2**28)
    source = torch.randn(size // 4, device="cuda")
    target = torch.empty_like(source)
    result = bench({"copy": lambda: target.copy_(source)}, warmup=rep / 2, rep=rep, rounds=rounds)
    return 2 * source.nbytes / (result["copy"]["ms"] * 1e6)


# ---------------------------------------------------------------- the code that the GPU runs

def _binary_tool(name, *arguments, cubin):
    """Output of cuobjdump or nvdisasm, as Triton's package carries them, on a cubin given as bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = getattr(triton.knobs.nvidia, name).path
        return subprocess.run([tool, *arguments, file.name], capture_output=True, text=True, check=True).stdout


def sass(cubin):
    """SASS of a cubin, one instruction a line, without addresses and encodings."""
    lines = _binary_tool("cuobjdump", "-sass", cubin=cubin).splitlines()
    return [m.group(1).strip() for m in (re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.+?);", line) for line in lines) if m]


def resources(cubin):
    """{"regs", "spills"} of a cubin's kernel, with no GPU: 32-bit registers, and the local memory that a thread
    uses in units of one (what CompiledKernel.n_regs and n_spills give once a GPU has loaded the kernel)."""
    usage = _binary_tool("cuobjdump", "-res-usage", cubin=cubin)
    regs, stack, local = (int(re.search(rf"{key}:(\d+)", usage).group(1)) for key in ("REG", "STACK", "LOCAL"))
    return {"regs": regs, "spills": (stack + local) // 4}


def compiled(kernel, keywords):
    """The CompiledKernel of a launch with these arguments, specialized as the launch does, for compute capability 9.0
    and with no GPU."""
    from triton.backends.compiler import BaseBackend, GPUTarget  # here, since releases may move them
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import native_specialize_impl
    signature, constexprs, attrs = {}, {}, {}
    for index, param in enumerate(kernel.params):
        value = keywords[param.name]
        kind, key = ("constexpr", None) if param.is_constexpr else native_specialize_impl(
            BaseBackend, value, False, not param.do_not_specialize, True)
        signature[param.name] = kind
        constexprs |= {(index,): value} if kind == "constexpr" else {}
        attrs |= {(index,): [["tt.divisibility", 16]]} if key == "D" else {}
    options = {key: value for key, value in keywords.items() if key not in kernel.arg_names}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constexprs, attrs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def compile_all(cases):
    """Where Gluon's kernels cannot run: each (kernel, keywords) is compiled, side by side; none may spill, or need more
    than Hopper's 227 KB of shared memory."""
    def facts(case):
        kernel = compiled(*case)
        return resources(kernel.asm["cubin"]) | {"shared_bytes": kernel.metadata.shared}
    found = []
    writable_cache()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for own in pool.map(facts, cases):
            found.append(own)
            progress(f"compiling: {len(found)} of {len(cases)}")
    progress()
    for (kernel, keywords), own in zip(cases, found):
        assert not own["spills"] and own["shared_bytes"] <= 227 * 1024, (kernel, keywords, own)
    print(f"The interpreter runs neither Gluon nor programs that wait for each other. Compiled for sm_90 instead: "
          f"{len(cases)} kernels, no spills, up to {max(own['regs'] for own in found)} registers.")


def load_bits(cubin):
    """Width in bits of the widest global load of a thread: LDG.E is 32, LDG.E.128 is 128."""
    opcodes = [re.search(r"\bLDG(?:STS)?(?:\.\w+)+", line) for line in sass(cubin)]  # not R2.64, the address register
    widths = [re.search(r"\.[SU]?(8|16|64|128)\b", opcode.group()) for opcode in opcodes if opcode]
    return max((int(m.group(1)) if m else 32 for m in widths), default=None)


def side_by_side(calls):
    """Call each without arguments, in threads: most of a check's time is compilation, which runs without Python's
    lock. In turn under the interpreter, which is Python. The first exception, in the order of calls, is raised."""
    calls = list(calls)

    def each(steps):
        for index, step in enumerate(steps):
            progress(f"compiling and checking: {index + 1:,} of {len(calls):,}")
            step()
    try:
        if device() == "cpu":
            return each(calls)
        current = torch.cuda.current_device()  # a new thread begins at device 0
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count(), initializer=torch.cuda.set_device,
                                                   initargs=(current,)) as pool:
            try:
                each([pool.submit(call).result for call in calls])
            except BaseException:  # Ctrl-C, too: what has not begun need not
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        progress()


# ---------------------------------------------------------------- arguments of the launchers

def device():
    """Where a check's tensors live: the GPU, or the CPU under the interpreter."""
    if not INTERPRETED and not torch.cuda.is_available():
        fail("no GPU here, and TRITON_INTERPRET is set to other than 1; unset it")
    return "cpu" if INTERPRETED else "cuda"


def operands(launcher, dtypes, **tensors):
    """Raise, naming the argument, unless all are dense tensors of one of dtypes, the same for all, on one CUDA device
    (or CPU, if interpreted): TypeError on types and dtypes, ValueError on devices and views that a kernel would
    misread, RuntimeError where a gradient would be lost."""
    (first, one), *_ = tensors.items()
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
            raise TypeError(f"{launcher}: {name} is {getattr(x, 'layout', type(x))}; it must be a dense torch.Tensor")
        if x.dtype not in dtypes or x.dtype != one.dtype:
            pair = f"{first} is {one.dtype} and " if x.dtype != one.dtype else ""
            raise TypeError(f"{launcher}: {pair}{name} is {x.dtype}; all must have one dtype of "
                            + ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes))
        if INTERPRETED and x.dtype == torch.bfloat16:
            raise TypeError(f"{launcher}: {name} is bfloat16, which Triton's interpreter computes wrong")
        if not x.is_cuda and not (INTERPRETED and x.is_cpu):
            raise ValueError(f"{launcher}: {name} is on {x.device}; it must be on a CUDA device")
        if x.device != one.device:
            raise ValueError(f"{launcher}: {first} is on {one.device} and {name} on {x.device}; they must be "
                             "on one device")
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"{launcher}: {name} requires grad, and {launcher} is forward only: pass "
                               f"{name}.detach(), or call it under torch.no_grad()")
        if x.is_neg():  # as .imag of a .conj(): the sign is not in memory
            raise ValueError(f"{launcher}: {name} is a negated view; pass {name}.resolve_neg()")


def writable(launcher, out, shape):
    """Raise ValueError unless out has this shape, and a place of its own for every element."""
    if out.shape == shape and out.is_contiguous():
        return
    span = 0  # from the innermost dimension outwards: each step must leave all before it behind
    for stride, size in sorted(zip(out.stride(), out.shape)) if out.shape == shape else [(0, 2)]:
        if size > 1 and stride <= span:
            raise ValueError(f"{launcher}: out is {tuple(out.shape)} with strides {out.stride()}; it must be "
                             f"{tuple(shape)}, without elements that share memory")
        span += (size - 1) * stride if size > 1 else 0


def apart(x, out, elementwise):
    """x, or a copy where a write to out might change an element of x that is still to be read.

    elementwise: x may be out itself, since each element is read before it is written."""
    if elementwise and (x.data_ptr(), x.stride()) == (out.data_ptr(), out.stride()):
        return x
    low, start = x.data_ptr(), out.data_ptr()
    return x.clone() if low < start + extent(out) and start < low + extent(x) else x


def extent(x):
    """Bytes from the first element of a tensor to the end of its last."""
    last = x.numel() - 1 if x.is_contiguous() else sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return x.element_size() * (1 + last)


# ---------------------------------------------------------------- tables

def progress(text=""):
    """On a terminal, write this over the last line of standard error, or clear it; elsewhere nothing."""
    if sys.stderr.isatty():
        width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        sys.stderr.write(f"\r\033[K{text[:width - 1]}")
        sys.stderr.flush()


# Every column that a table may have, in printed order, with its format; up to `instruction`: what a row is of.
COLUMNS = {
    "kernel": "", "stage": "", "arch": "", "case": "", "n": ",", "m": ",", "k": ",", "n_rows": ",", "n_cols": ",",
    "dtype": "", "provider": "", "precision": "", "block_size": ",", "group_m": "", "config": "", "num_warps": "",
    "instruction": "", "count": ",", "lines": ",", "bytes": ".4g", "flops": ".4g", "seconds": ".4g", "ms": ".4f",
    "graph_ms": ".4f", "launch_us": ".1f", "burst_ms": ".4f", "burst_ratio": ".3f", "burst_mhz": ".0f",
    "loop_ms": ".4f", "ncu_ms": ".4f", "gbps": ",.1f", "tflops": ".1f", "pct_rated": ".1f", "pct_copy": ".1f",
    "pct_peak": ".1f", "ratio": ".3f", "spread_pct": ".1f", "sm_mhz": ".0f", "mem_mhz": ".0f", "power_w": ".0f",
    "throttle": "", "regs": "", "sgprs": "", "spills": "", "shared_bytes": ",", "load_bits": "", "rel_error": ".2e",
    "mcycles": ".2f",
    "dram_read_gb": ".3f", "dram_write_gb": ".3f", "l2_hit_pct": ".1f", "pick": "", "best": "", "gap_pct": ".1f",
    "searches": "", "value": "", "mark": "",
}


def format_table(rows):
    """Rows (dictionaries) as a Markdown table, columns in the order of COLUMNS, null as an empty cell."""
    keys = [key for key in COLUMNS if any(key in row for row in rows)]
    keys += sorted({key for row in rows for key in row} - set(keys))

    def cell(key, value):
        return "" if value is None else value if isinstance(value, str) else format(value, COLUMNS.get(key, ""))
    body = [[cell(key, row.get(key)) for key in keys] for row in rows]
    right = ["right" if any(isinstance(row.get(key), (int, float)) for row in rows) else "left" for key in keys]
    return tabulate.tabulate(body, headers=keys, tablefmt="github", colalign=right if body else None,
                             disable_numparse=True)


class Table:
    """One printed table: rows of one case and one provider each, a title, notes, and a clock log beside it."""

    def __init__(self, report, key, title, baseline=None, roof=False, derive=None, cases=1):
        """baseline: the provider of ratio 1. roof: measure the copy roof. derive: called with each timed row at the
        end, when its clocks are known. cases: how many calls of time() or row() there will be, for the progress."""
        self.report, self.key, self.title = report, key, title
        self.baseline, self.roof, self.derive = baseline, roof, derive
        self.rows, self.notes, self.timed = [], [], []
        self.log, self.copy_gbps = None, None
        self.cases, self.done, self.start = cases, 0, time.monotonic()

    def __enter__(self):
        print(f"[{self.report.name}] {self.key}", file=sys.stderr, flush=True)
        progress(f"[{self.report.name}] {self.key}: preparing case 1 of {self.cases}")  # its rows are not known yet
        return self

    def progress(self, index, what, width, share):
        """Which row of how many, what of it, and the time that the table's other rows will take at this one's rate.
        index: the row in a case of `width` rows, `share` of whose time is over. Other cases are taken to be alike."""
        rows = self.done + width * max(self.cases, 1)
        over = self.done + share * width
        left = (time.monotonic() - self.start) * (rows / over - 1) if over else 0
        about = f", about {left:.0f} s left" if over else ""  # first: the terminal may be narrow
        progress(f"[{self.report.name}] {self.key}: row {self.done + index + 1} of {rows}{about}: {what}")

    def case_done(self, width=1):
        self.cases, self.done = self.cases - 1, self.done + width
        if self.cases > 0:
            self.progress(0, "preparing", width, 0)

    def note(self, text):
        if text not in self.notes:
            self.notes.append(text)

    def row(self, **fields):
        """Add a row that is not timed here."""
        self.rows.append(fields)
        if self.log is None:  # else the rows of time() are the ones to wait for
            self.case_done()
        return fields

    def time(self, case, providers, extra=None, bytes=None, flops=None, unit=None, burst=False):
        """Time one case's providers, interleaved, and add a row each; returns {name: row}.

        case: fields of every row. extra: {name: fields of its row alone}; "provider" there replaces the name,
        "baseline" names the provider that its ratio is taken against, "bytes", "flops" and "unit" (a dtype of
        peak_tflops) override the case's.
        """
        args, gpu = self.report.args, self.report.gpu
        first = self.log is None
        if first:
            self.log = ClockLog(gpu["uuid"])
            if self.roof:
                self.copy_gbps = self.report.copy_gbps()
        names, steps = list(providers), iter(range(10**9))

        def tell(index, what):
            of = ", ".join(f"{key} {value:,}" if type(value) is int else str(value) for key, value in case.items())
            share = min(next(steps) / (len(names) * (args.rounds + 1) + 1), 1)
            self.progress(index, f"{names[index]}, {of}, {what}", len(names), share)
        measured = bench(providers, args.warmup if first else 0, args.rep, args.rounds, burst=burst, tell=tell)
        rows = {}
        for name, times in measured.items():
            own = {"bytes": bytes, "flops": flops, "unit": unit, "baseline": self.baseline, "provider": name,
                   **(extra or {}).get(name, {})}
            base = measured.get(own.pop("baseline"))
            windows = times.pop("windows"), times.pop("burst_windows", None)
            unit_ = own.pop("unit")
            row = {**case, **{k: v for k, v in own.items() if v is not None}, **times}
            for key in ("ms", "burst_ms") if self.baseline else ():
                if key in times:
                    row["ratio" if key == "ms" else "burst_ratio"] = base[key] / times[key] if base else None
            rows[name] = row
            self.rows.append(row)
            self.timed.append((row, windows, unit_))
        self.case_done(len(names))
        return rows

    def _derive(self):
        """Rates and percentages: they need the clocks, which are known once the log is closed."""
        gpu = self.report.gpu
        if self.log is None:
            return
        self.log.stop()
        for row, (windows, burst), unit in self.timed:
            clocks = self.log.medians(windows)
            if burst:
                row["burst_mhz"] = self.log.medians(burst)["sm_mhz"]
            floor_ms = 0
            if row.get("bytes"):
                row["gbps"] = row["bytes"] / (row["ms"] * 1e6)
                rated = rated_gbps(clocks["mem_mhz"], gpu["bus_bits"]) if clocks["mem_mhz"] else None
                row["pct_rated"] = 100 * row["gbps"] / rated if rated else None
                if self.copy_gbps:
                    row["pct_copy"] = 100 * row["gbps"] / self.copy_gbps
                    floor_ms = row["bytes"] / (self.copy_gbps * 1e6)
                if rated and row["gbps"] > rated:
                    row["mark"] = "L2-resident"
                elif floor_ms and row["graph_ms"] and floor_ms < 0.1 * row["ms"]:
                    row["mark"] = "launch-bound"
            if row.get("flops"):
                if row["graph_ms"] and 2 * row["graph_ms"] < row["ms"]:
                    row["mark"] = "launch-bound"
                row["tflops"] = row["flops"] / (row["ms"] * 1e9)
                peak = unit and clocks["sm_mhz"] and peak_tflops(gpu["name"], gpu["sms"], clocks["sm_mhz"], unit)
                row["pct_peak"] = 100 * row["tflops"] / peak if peak else None
                if not peak:
                    self.note("pct_peak is empty where the clock or the GPU's peak is unknown.")
            row.update(clocks)
            if clocks["sm_mhz"] is None:
                self.note(f"No clock log: {self.log.problem or 'nvidia-smi logged nothing while a row was timed'}; the "
                          "columns that need a clock are empty.")
            if self.derive:
                self.derive(row)
        marks = {row.get("mark") for row in self.rows}
        if "L2-resident" in marks:
            self.note("L2-resident: faster than the rated DRAM bandwidth, so part of the data came from L2.")
        if "launch-bound" in marks:
            self.note("launch-bound: ms is mostly the launch (moving the bytes would take under a tenth of it, or "
                      "graph_ms is under half of it); graph_ms leaves the launch out.")
        if all(row["graph_ms"] is None for row, *_ in self.timed):
            for row, *_ in self.timed:
                del row["graph_ms"], row["launch_us"]
        if self.copy_gbps:
            self.note(f"Copy roof {self.copy_gbps:,.0f} GB/s, measured in this run (read plus written).")

    def text(self):
        return "\n".join([f"### {self.key}: {self.title}", "", format_table(self.rows), "",
                          *(f"- {note}" for note in self.notes)]).rstrip() + "\n"

    def __exit__(self, kind, error, trace):
        progress()
        self._derive()
        if kind is None or (self.rows and not issubclass(kind, AssertionError)):  # what was measured so far
            if kind:
                self.note(f"Incomplete: {kind.__name__} ended the run here.")
            self.report.tables.append(self)
            print(self.text(), flush=True)


# ---------------------------------------------------------------- flags, header, results

class Parser(argparse.ArgumentParser):
    def error(self, message):
        """Bad input gets one line, and status 2."""
        sys.stderr.write(f"{self.prog}: {message} (--help lists what is accepted)\n")
        raise SystemExit(2)


def fail(message):
    """End the run on bad input: one line on standard error, status 2."""
    progress()
    sys.stderr.write(f"{Path(sys.argv[0]).name}: {message}\n")
    raise SystemExit(2)


def whole(low, high=2**40):
    """An argparse type: a whole number from low to high."""
    def parse(text):
        try:
            value = int(text.replace("_", "").replace(",", ""))
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low:,} to {high:,}")
        return value
    return parse


def power_of_two(low, high):
    """An argparse type: a power of two from low to high."""
    def parse(text):
        value = whole(low, high)(text)
        if value & (value - 1):
            raise argparse.ArgumentTypeError(f"{text!r} is not a power of 2 from {low:,} to {high:,}")
        return value
    return parse


def parser(doc):
    """An argument parser with the flags that every script has; the script adds its own."""
    p = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help="smoke run: short windows, one round")
    p.add_argument("--rounds", type=whole(1, 100), default=3, help="interleaved rounds a row (default 3)")
    p.add_argument("--warmup", type=whole(0, 60_000), default=1000, metavar="MS",
                   help="warm-up before each table, ms (default 1000)")
    p.add_argument("--rep", type=whole(1, 60_000), default=1000, metavar="MS",
                   help="timed window of a row over all its rounds, ms, L2 flushes included (default 1000)")
    p.add_argument("--device", type=whole(0, 1023), default=0, metavar="N", help="CUDA device (default 0)")
    p.add_argument("--seed", type=whole(0), default=0, help="seed of the random inputs (default 0)")
    p.add_argument("--save", action="store_true", help="write results/<gpu>/ (what `make all` does)")
    p.add_argument("--plot", action="store_true", help="draw plots/*.svg of the tables (needs matplotlib)")
    return p


class Report:
    """The run of one script: its flags, its GPU (None without one), its tables."""

    def __init__(self, name, args, gpu):
        self.name, self.args, self.gpu, self.tables = name, args, gpu, []
        self._copy_gbps = None

    def table(self, key, title, **options):
        return Table(self, key, title, **options)

    def copy_gbps(self):
        """The copy roof, measured once a run."""
        if self._copy_gbps is None:
            self._copy_gbps = copy_roof_gbps(self.gpu, self.args.rounds, self.args.rep)
        return self._copy_gbps

    def need(self, nbytes, what):
        """Refuse, before anything is allocated, what does not fit in the GPU's free memory."""
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if nbytes > free:
            fail(f"{what} needs {nbytes:,} bytes of GPU memory; {free:,} bytes are free")

    def finish(self):
        """Write results/<gpu>/<script>.json and .md with --save; draw with --plot."""
        record = {"script": f"{self.name}.py", "time": datetime.datetime.now().astimezone().isoformat("T", "seconds"),
                  "commit": commit(), "gpu": self.gpu, "versions": versions(),
                  "settings": {key: getattr(self.args, key) for key in ("warmup", "rep", "rounds")},
                  "seed": self.args.seed,
                  "tables": {t.key: {"title": t.title, "notes": t.notes, "rows": t.rows} for t in self.tables}}
        if self.args.save:
            texts = {"json": json.dumps(record, indent=1, allow_nan=False) + "\n",
                     "md": "\n".join([f"# {self.name}", "", header(self.gpu), ""] + [t.text() for t in self.tables])}
            folder = ROOT / "results" / re.sub(r"[^a-z0-9]+", "-", self.gpu["name"].lower()).strip("-")
            with one_at_a_time(folder):
                for suffix, text in texts.items():
                    write(folder / f"{self.name}.{suffix}", text)
        if self.args.plot:
            import compare  # only here: it draws what any script measured
            compare.draw({self.name: record}, ROOT / "plots")


@contextlib.contextmanager
def one_at_a_time(folder):
    """Two runs that save to one folder leave both files of the one or of the other."""
    handle = None
    with contextlib.suppress(OSError):  # where the folder cannot be made, write() says so; some systems lock nothing
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def write(path, text):
    """Write a file aside, then rename it: a reader sees the old one or the new one, whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                file.write(text)
                file.close()
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")


def commit():
    """The commit that was measured, "-dirty" where files differ from it; null outside a git checkout."""
    if os.environ.get("GIT_COMMIT"):
        return os.environ["GIT_COMMIT"]
    try:
        head, status = (subprocess.run(["git", "-C", ROOT, *command], capture_output=True, text=True, check=True).stdout
                        for command in (["rev-parse", "HEAD"], ["status", "--porcelain"]))
        changed = [line for line in status.splitlines() if "results/" not in line]
        return head.strip() + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def versions():
    import numpy
    return {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda,
            "numpy": numpy.__version__, "python": sys.version.split()[0]}


def header(gpu, software=None):
    """The conditions, in two lines, as every printed result carries them."""
    software = ", ".join(f"{name} {value}" for name, value in (software or versions()).items())
    if gpu is None:
        return software
    limit = f"{gpu['power_limit_w']:.0f} W" if gpu["power_limit_w"] else "power limit unknown"
    return (f"{gpu['name']}, cc {gpu['cc']}, {gpu['sms']} SMs, L2 {gpu['l2_bytes'] / 2**20:.0f} MiB, "
            f"{gpu['bus_bits']}-bit bus, {gpu['memory_bytes'] / 2**30:.0f} GiB, {limit}, driver {gpu['driver']}\n"
            f"{software}")


def start(p, narrowing=()):
    """Parse the flags, choose the device, seed, print the header; returns the Report.

    narrowing: the script's own flags (destinations, default None) that make a run less than the full one, and so
    never saved. report.gpu is None where nothing can be timed: no GPU, or TRITON_INTERPRET=1.
    """
    args = p.parse_args()
    if args.quick:
        args.warmup, args.rep, args.rounds = min(args.warmup, 50), min(args.rep, 30), 1
    name = Path(sys.argv[0]).stem
    timed = torch.cuda.is_available() and not INTERPRETED
    narrowed = [flag for flag in narrowing if getattr(args, flag) is not None]
    if args.save and (args.quick or narrowed or not timed):
        why = ("--quick" if args.quick else f"--{narrowed[0].replace('_', '-')}" if narrowed else
               "TRITON_INTERPRET=1" if torch.cuda.is_available() else "no GPU to measure")
        p.error(f"--save writes full runs only, not together with {why}")
    if args.plot:
        import compare
        compare.pyplot()  # or one line that it is not there, before anything is measured
    if not INTERPRETED:
        writable_cache()
    gpu = None
    if torch.cuda.is_available():
        if args.device >= torch.cuda.device_count():
            p.error(f"--device {args.device}: devices 0 to {torch.cuda.device_count() - 1} are there")
        torch.cuda.set_device(args.device)
    elif args.device:
        p.error(f"--device {args.device}: there is no GPU here")
    if timed:
        gpu = gpu_facts(args.device)
        if float(gpu["cc"]) < 8:
            p.error(f"{gpu['name']} has compute capability {gpu['cc']}; Triton needs 8.0 or newer to emit "
                    "tensor-core instructions")
    torch.manual_seed(args.seed)
    print(header(gpu), flush=True)
    if not timed:
        why = "TRITON_INTERPRET=1 is set" if torch.cuda.is_available() else "no GPU here"
        print(f"Nothing is timed: {why}. Kernels are checked in Triton's interpreter or compiled, at small sizes.\n")
    return Report(name, args, gpu)


def writable_cache():
    """Fail in one line where Triton could not keep what it compiles."""
    folder = triton.knobs.cache.dir
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        fail(f"Triton's cache {folder} cannot be written ({error.strerror}); set TRITON_CACHE_DIR to a folder that can")


def run(main):
    """Call a script's main(): what stands in its way from outside ends in one line and a non-zero status."""
    try:
        try:
            main()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing was saved\n")
        raise SystemExit(130) from None
    except torch.OutOfMemoryError as error:
        fail(f"out of GPU memory: {(str(error) or 'no more is known').splitlines()[0]}")
    except OSError as error:  # a full disk, a reader that is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        if isinstance(error, BrokenPipeError):  # | head
            raise SystemExit(141) from None     # 128 + SIGPIPE, as other programs end
        fail(f"{error.filename or 'standard output'}: {error.strerror or error}")


if __name__ == "__main__":
    import card  # apart, so that this file stays short
    card.common.run(card.main)
