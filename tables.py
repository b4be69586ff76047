"""Tables, flags and results: what a numbered script prints and saves.

Scripts reach these as common.start, common.parser and so on, and import common, which imports this at its end.
"""
import argparse
import contextlib
import datetime
import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tabulate
import torch

import common
import triton


CHECKED = "Every kernel is right here; nothing is timed."  # the end of a run with --check

# Every column that a table may have, in printed order, with its format; up to `instruction`: what a row is of.
COLUMNS = {
    "tool": "", "kernel": "", "stage": "", "arch": "", "case": "",
    "n": ",", "m": ",", "k": ",", "n_rows": ",", "n_cols": ",",
    "dtype": "", "provider": "", "precision": "", "block_size": ",", "group_m": "", "config": "", "num_warps": "",
    "instruction": "", "count": ",", "lines": ",", "bytes": ".4g", "flops": ".4g", "seconds": ".4g", "ms": ".4f",
    "graph_ms": ".4f", "launch_us": ".1f", "burst_ms": ".4f", "burst_ratio": ".3f", "burst_mhz": ".0f",
    "loop_ms": ".4f", "ncu_ms": ".4f", "gbps": ",.1f", "tflops": ".1f", "pct_rated": ".1f", "pct_copy": ".1f",
    "pct_peak": ".1f", "ratio": ".3f", "spread_pct": ".1f", "sm_mhz": ".0f", "mem_mhz": ".0f", "power_w": ".0f",
    "loop_mhz": ".0f", "throttle": "", "regs": "", "sgprs": "", "spills": "", "shared_bytes": ",",
    "load_bits": "", "rel_error": ".2e", "mcycles": ".2f",
    "dram_read_gb": ".3f", "dram_write_gb": ".3f", "l2_hit_pct": ".1f", "dram_pct": ".1f", "stall": "",
    "pick": "", "best": "", "gap_pct": ".1f",
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
        what = f"preparing case 1 of {self.cases}"  # how many rows it has is not known yet
        common.progress(f"[{self.report.name}] {self.key}: {what}")
        return self

    def progress(self, index, what, width, share):
        """Which row of how many, what of it, and the time that the table's other rows will take at this one's rate.
        index: the row in a case of `width` rows, `share` of whose time is over. Other cases are taken to be alike."""
        rows = self.done + width * max(self.cases, 1)
        over = self.done + share * width
        left = (time.monotonic() - self.start) * (rows / over - 1) if over else 0
        about = f", about {left:.0f} s left" if over else ""  # first: the terminal may be narrow
        common.progress(f"[{self.report.name}] {self.key}: row {self.done + index + 1} of {rows}{about}: {what}")

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

    def time(self, case, providers, extra=None, bytes=None, flops=None, unit=None, burst=False, same=()):
        """Time one case's providers, interleaved, and add a row each; returns {name: row}.

        case: fields of every row. extra: {name: fields of its row alone}; "provider" there replaces the name,
        "baseline" names the provider that its ratio is taken against, "bytes", "flops" and "unit" (a dtype of
        peak_tflops) override the case's. same: {name: provider} of rows that a provider's timing is for, too.
        """
        args, gpu = self.report.args, self.report.gpu
        first = self.log is None
        if first:
            self.log = common.ClockLog(gpu["uuid"])
            if self.roof:
                self.copy_gbps = self.report.copy_gbps()
        names, steps = list(providers), iter(range(10**9))

        def tell(index, what):
            of = ", ".join(f"{key} {value:,}" if type(value) is int else str(value) for key, value in case.items())
            share = min(next(steps) / (len(names) * (args.rounds + 1) + 1), 1)
            self.progress(index, f"{names[index]}, {of}, {what}", len(names), share)
        measured = common.bench(providers, args.warmup if first else 0, args.rep, args.rounds, burst=burst, tell=tell)
        measured |= {name: dict(measured[provider]) for name, provider in dict(same).items()}
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
                rated = common.rated_gbps(clocks["mem_mhz"], gpu["bus_bits"]) if clocks["mem_mhz"] else None
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
                peak = unit and clocks["sm_mhz"] and common.peak_tflops(gpu["name"], gpu["sms"], clocks["sm_mhz"], unit)
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
        common.progress()
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

    def print_help(self, file=None):
        """argparse's own ignores what cannot be written, as on a full disk; run() says it."""
        (file or sys.stdout).write(self.format_help())


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


def path(text):
    """An argparse type: a path. The empty one, as of a shell's unset variable, would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("'' is not a path")
    return Path(text)


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
    p.add_argument("--check", action="store_const", const=True, help="prove the kernels right, time nothing")
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
            self._copy_gbps = common.copy_roof_gbps(self.gpu, self.args.rounds, self.args.rep)
        return self._copy_gbps

    def need(self, nbytes, what):
        """Refuse, before anything is allocated, what does not fit in the GPU's free memory."""
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if nbytes > free:
            common.fail(f"{what} needs {nbytes:,} bytes of GPU memory; {free:,} bytes are free")

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
            folder = common.ROOT / "results" / re.sub(r"[^a-z0-9]+", "-", self.gpu["name"].lower()).strip("-")
            with one_at_a_time(folder):
                for suffix, text in texts.items():
                    write(folder / f"{self.name}.{suffix}", text)
        if self.args.plot:
            import compare  # only here: it draws what any script measured
            compare.draw({self.name: record}, common.ROOT / "plots")


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
    """Write a file aside, then rename it: a reader sees the old one or the new one, whole. What is no file, as
    /dev/stdout, is written to, not replaced."""
    try:
        path = path.resolve()                                # a link stays
        if path.exists() and not path.is_file() and not path.is_dir():
            with open(path, "w") as file:
                file.write(text)
            return
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
        common.fail(f"cannot write {path}: {error.strerror}")


def commit():
    """The commit that was measured, "-dirty" where files differ from it; null outside a git checkout."""
    if os.environ.get("GIT_COMMIT"):
        return os.environ["GIT_COMMIT"]
    try:
        head, status = (subprocess.run(["git", "-C", common.ROOT, *command], capture_output=True, text=True,
                                       check=True).stdout
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
    if not __debug__:
        p.error("python -O, or PYTHONOPTIMIZE, leaves out the assertions that prove the kernels; run without it")
    if args.quick:
        args.warmup, args.rep, args.rounds = min(args.warmup, 50), min(args.rep, 30), 1
    name = Path(sys.argv[0]).stem
    timed = torch.cuda.is_available() and not common.INTERPRETED
    narrowed = [flag for flag in ("check", *narrowing) if getattr(args, flag) is not None]
    if args.save and (args.quick or narrowed or not timed):
        why = ("--quick" if args.quick else f"--{narrowed[0].replace('_', '-')}" if narrowed else
               "TRITON_INTERPRET=1" if torch.cuda.is_available() else "no GPU to measure")
        p.error(f"--save writes full runs only, not together with {why}")
    if args.plot:
        import compare
        compare.pyplot()  # or one line that it is not there, before anything is measured
    if not common.INTERPRETED:
        writable_cache()
    gpu = None
    if torch.cuda.is_available():
        if args.device >= torch.cuda.device_count():
            p.error(f"--device {args.device}: devices 0 to {torch.cuda.device_count() - 1} are there")
        torch.cuda.set_device(args.device)
    elif args.device:
        p.error(f"--device {args.device}: there is no GPU here")
    if timed:
        gpu = common.gpu_facts(args.device)
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
        common.fail(f"Triton's cache {folder} cannot be written ({error.strerror}); set TRITON_CACHE_DIR to a folder "
                    "that can")


def run(main):
    """Call a script's main(): what stands in its way from outside ends in one line and a non-zero status."""
    if sys.stdout is None:  # closed, >&-
        sys.stdout = open(os.devnull, "w")
    try:
        try:
            main()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing was saved\n")
        raise SystemExit(130) from None
    except torch.OutOfMemoryError as error:
        common.fail(f"out of GPU memory: {(str(error) or 'no more is known').splitlines()[0]}")
    except OSError as error:  # a full disk, a reader that is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        if isinstance(error, BrokenPipeError):  # | head
            raise SystemExit(141) from None     # 128 + SIGPIPE, as other programs end
        common.fail(f"{error.filename or 'standard output'}: {error.strerror or error}")
