"""What the numbered scripts share: do_bench settings, roofs and peaks, the clock log; by it, tables and arguments.

Import this before triton: where no GPU can be used, it switches Triton to its interpreter, and Triton reads
that switch when it is imported. A script reads

    report = common.start(__doc__, ...)                       # flags, device, header
    with report.table("providers", "title") as table:         # warm-up, clock log, printed table
        table.time({"n": n}, {"triton": f, "torch": g}, bytes=3 * n * 4)
    report.finish()                                           # results/<gpu>/, with --save; plots/, with --plot
"""
import datetime
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
    known = None  # the fields that nvidia-smi answered to, found once a run

    def __init__(self, uuid):
        self.process, self.samples, self.problem = None, [], ClockLog.hung
        if self.problem or not (fields := ClockLog.known or self._answered(uuid)):
            return
        ClockLog.known = fields
        self.file = tempfile.TemporaryFile("w+", errors="replace")
        command = ["nvidia-smi", "-i", uuid, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits",
                   "-lms", "20"]
        try:
            self.process = subprocess.Popen(command, stdout=self.file, stderr=subprocess.DEVNULL)
        except OSError:
            self.problem = "nvidia-smi is not on the PATH"

    def _answered(self, uuid):
        """The fields that this driver's nvidia-smi knows, by asking once; None, and self.problem, where it has none."""
        for reasons in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):
            for power in ("power.draw.instant", "power.draw"):
                fields = ["timestamp", "clocks.sm", "clocks.mem", power, reasons]
                try:
                    self._parse(", ".join(smi(fields, "-i", uuid)))
                except FileNotFoundError:
                    self.problem = "nvidia-smi is not on the PATH"
                    return None
                except subprocess.TimeoutExpired as error:
                    self.problem = ClockLog.hung = f"nvidia-smi did not answer in {error.timeout:.0f} s"
                    return None
                except (OSError, subprocess.SubprocessError, ValueError) as error:
                    self.problem = f"nvidia-smi answered with nothing usable ({type(error).__name__})"
                    continue
                self.problem = None
                return fields
        return None

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
    50 ms after 250 ms of rest, before a power limit is felt. windows are the (start, end) times of the rounds,
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
            begin = time.time()
            times[name].append(triton.testing.do_bench(fn, warmup=min(10, rep), rep=rep / rounds,
                                                       return_mode="median"))
            windows[name].append((begin, time.time()))
    result = {}
    for name, fn in providers.items():
        ms = statistics.median(times[name])
        result[name] = {"ms": ms, "graph_ms": None, "launch_us": None, "windows": windows[name],
                        "spread_pct": 100 * (max(times[name]) - min(times[name])) / ms}
    small = [name for name in providers if result[name]["ms"] < graph_below_ms]
    graphs = {name: [] for name in small}
    for _ in range(rounds):
        # do_bench_cudagraph replays a graph of `rep` ms ten times. Before that the host launches all of it, which takes
        # several times as long where a launch outlasts its kernel: so short ones.
        for name in small:
            tell(list(providers).index(name), "CUDA graph")
            graphs[name].append(triton.testing.do_bench_cudagraph(
                providers[name], rep=min(5, rep / rounds / 10), return_mode="median"))
    for name in small:
        result[name]["graph_ms"] = statistics.median(graphs[name])
        result[name]["launch_us"] = 1e6 * statistics.median(_host_seconds(providers[name]) for _ in range(50))
        torch.cuda.synchronize()
    for index, name in enumerate(providers if burst else ()):
        tell(index, "burst")
        torch.cuda.synchronize()
        time.sleep(0.25)
        begin = time.time()
        result[name]["burst_ms"] = triton.testing.do_bench(providers[name], warmup=5, rep=min(50, rep),
                                                           return_mode="median")
        result[name]["burst_windows"] = [(begin, time.time())]
    return result


def _host_seconds(fn):
    begin = time.perf_counter()
    fn()
    return time.perf_counter() - begin


def loop_ms(calls, rep=300):
    """A second clock, without do_bench: ms a call of `calls` in turn, back to back between two CUDA events for about
    `rep` ms. To be compared with do_bench's, the calls must work on buffers that together exceed the L2."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    turns = 1
    while True:
        torch.cuda.synchronize()
        begin.record()
        for _ in range(turns):
            for call in calls:
                call()
        end.record()
        end.synchronize()
        total = begin.elapsed_time(end)
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
        return subprocess.run([tool, *arguments, file.name], capture_output=True, text=True, check=True,
                              env=os.environ | {"TMPDIR": tempfile.gettempdir()}).stdout  # one that is there


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


def load_bits(cubin):
    """Width in bits of the widest global load of a thread: LDG.E is 32, LDG.E.128 is 128."""
    opcodes = [re.search(r"\bLDG(?:STS)?(?:\.\w+)+", line) for line in sass(cubin)]  # not R2.64, the address register
    widths = [re.search(r"\.[SU]?(8|16|64|128)\b", opcode.group()) for opcode in opcodes if opcode]
    return max((int(m.group(1)) if m else 32 for m in widths), default=None)


def cdiv(x, y):
    """x / y, rounded up: triton.cdiv, which takes the host 5 us outside of a kernel."""
    return -(-x // y)


# ---------------------------------------------------------------- what else a script needs

def device():
    """Where a check's tensors live: the GPU, or the CPU under the interpreter."""
    if not INTERPRETED and not torch.cuda.is_available():
        fail("no GPU here, and TRITON_INTERPRET is set to other than 1; unset it")
    return "cpu" if INTERPRETED else "cuda"


def progress(text=""):
    """On a terminal, write this over the last line of standard error, or clear it; elsewhere nothing."""
    if sys.stderr.isatty():
        width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        sys.stderr.write(f"\r\033[K{text[:width - 1]}")
        sys.stderr.flush()


def fail(message):
    """End the run on bad input: one line on standard error, status 2."""
    progress()
    sys.stderr.write(f"{Path(sys.argv[0]).name}: {message}\n")
    raise SystemExit(2)


if __name__ == "__main__":  # `python common.py`: the GPU's sheet
    import card
    card.common.run(card.main)
else:  # what has to do with neither clocks nor roofs stands apart, so that this file stays short; it uses what is above
    from arguments import apart, extent, operands, writable  # noqa: F401
    from parallel import in_turn, my_turn, side_by_side  # noqa: F401
    from tables import (CHECKED, COLUMNS, Parser, Report, Table, format_table, header, one_at_a_time,  # noqa: F401
                        parser, path, power_of_two, run, start, versions, whole, write)
