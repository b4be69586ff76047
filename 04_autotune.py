"""What does autotuning find, what does it cost, and when is its answer wrong?

S1's twelve configs over 03's matmul, and S2's five over 02's softmax. Run it:

    python 04_autotune.py              every table
    python 04_autotune.py --n 2048     one size: the tables `configs` and `picks`
    python 04_autotune.py --quick      a smoke run

The answer is the column `gap_pct` of the table `picks`: how much slower the autotuner's pick is than the best config
timed for a full second. `cost` says what the first call pays for it, `softmax` what goes wrong where a config changes
the result.
"""
import collections
import concurrent.futures
import contextlib
import functools
import importlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial

import torch

import common  # before triton: it chooses the interpreter where there is no GPU
import triton
from triton.runtime.errors import OutOfResources

fused, product = map(importlib.import_module, ("02_fused_softmax", "03_matmul"))
cfg, config_name = product.cfg, product.config_name

CONFIGS = [  # S1's: the first eight are the Triton tutorial's CUDA configs for fp16 and bf16
    cfg(128, 256, 64, 3, 8), cfg(64, 256, 32, 4, 4), cfg(128, 128, 32, 4, 4), cfg(128, 64, 32, 4, 4),
    cfg(64, 128, 32, 4, 4), cfg(128, 32, 32, 4, 4), cfg(64, 32, 32, 5, 2), cfg(32, 64, 32, 5, 2),
    cfg(128, 128, 64, 3, 8), cfg(128, 128, 32, 2, 4), cfg(128, 128, 32, 1, 4), cfg(64, 64, 64, 3, 4),
]
BLOCKS = [triton.Config({"BLOCK_SIZE": block}, num_warps=warps)  # S2's
          for block, warps in ((128, 4), (256, 4), (512, 8), (1024, 8), (2048, 16))]
SIZES = (512, 1024, 2048, 4096, 8192)
STREAM = tuple(range(1000, 2000, 143))  # widths of a stream of requests, all distinct
NARROW = 1000                          # columns: S2's configs have BLOCKs below and above it


# ---------------------------------------------------------------- which config may win

def autotuned(kernel, configs, key, **options):
    """triton.autotune as a reader would write it; the interpreter cannot time, so there each config just runs."""
    if common.INTERPRETED:
        options["do_bench"] = lambda fn, quantiles: [fn() or 0.0] * 3
    return triton.autotune(configs=configs, key=key, **options)(kernel)


def rejected(launch, out, reference, rtol):
    """Why a config may not win, or None: it does not compile, cannot run on this GPU, or rows of a poisoned output
    come out wrong."""
    out.fill_(float("nan"))
    try:
        launch()
    except OutOfResources as error:
        return f"needs {error.required:,} of {error.name}, {error.limit:,} allowed"
    except Exception as error:  # whatever the compiler raises
        return f"cannot run: {type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[-1][:120]}"
    right = torch.isclose(out.double(), reference, rtol=rtol, atol=rtol * reference.abs().max().item())
    wrong = (~right.all(dim=1)).sum().item()
    return f"{wrong:,} of {len(out):,} rows wrong" if wrong else None


def multiply(kernel, a, b, out, **config):
    """matmul_kernel, or an autotuner over it, on matrices whose sides are multiples of every tile."""
    (m, k), n = a.shape, b.shape[1]

    def grid(meta):
        return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)
    return kernel[grid](a, b, out, m, n, k, *a.stride(), *b.stride(), *out.stride(), PRECISION="ieee", **config)


def compile_all(configs, a, b):
    def launch(config):
        with contextlib.suppress(Exception):                 # rejected() names it
            multiply(product.matmul_kernel, a, b, torch.empty_like(a), **config)
    common.side_by_side([partial(launch, config) for config in configs])


TRIAL = "import importlib; importlib.import_module('04_autotune').try_out({device}, {configs})"


@functools.cache
def trial(*configs):
    """Compile and launch them in a process of its own; the ended process."""
    code = TRIAL.format(device=torch.cuda.current_device() if torch.cuda.is_available() else 0,
                        configs=[config.all_kwargs() for config in configs])
    return subprocess.run([sys.executable, "-c", code], cwd=common.ROOT, capture_output=True, text=True)


@functools.cache
def lost(*configs):
    """{name: how} of the configs that end the process which compiles and launches them: an abort in the compiler or a
    bad address on the GPU, neither of which can be caught. So all are tried in one other process, and if that ends, in
    halves of them. Costs the start of a process a run: the kernels that it compiles are cached for this one."""
    child = trial(*configs)
    if child.returncode and trial().returncode:              # the GPU takes one process alone, say
        common.fail(f"a second process cannot use this GPU: {(trial().stderr.splitlines() or ['it ended'])[-1][:200]}")
    if child.returncode and len(configs) > 1:
        half = len(configs) // 2
        return lost(*configs[:half]) | lost(*configs[half:])
    how = signal.Signals(-child.returncode).name if child.returncode < 0 else (child.stderr.splitlines() or ["?"])[-1]
    return {config_name(*configs): f"ends the process that runs it: {how[:120]}"} if child.returncode else {}


def try_out(device, configs):
    """What lost() runs in a process of its own."""
    torch.cuda.set_device(device)
    a, b = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    compile_all(configs, a, b)
    torch.cuda.synchronize()


def valid(a, b, out):
    """The configs that run here and are right on a, b; ({name: config}, {name: why not})."""
    good, bad = {}, {} if common.INTERPRETED else dict(lost(*CONFIGS))
    reference = a.double() @ b.double()
    configs = [config for config in CONFIGS if config_name(config) not in bad]
    compile_all([config.all_kwargs() for config in configs], a, b)
    for config in configs:
        why = rejected(lambda: multiply(product.matmul_kernel, a, b, out, **config.all_kwargs()), out, reference, 2**-7)
        (bad if why else good)[config_name(config)] = why or config
    return good, bad


def tuned_matmul(configs, **options):
    return autotuned(product.matmul_kernel, configs, ["M", "N", "K", "PRECISION"], **options)


class Search:
    """A faster and steadier search, through what triton.autotune takes: prune_configs_by and do_bench.

        search = Search(kernel)
        triton.autotune(configs, key, cache_results=True, do_bench=search.bench,
                        prune_configs_by={"early_config_prune": search.prune})(kernel)

    prune compiles the candidates side by side, where the autotuner would one after the other, and drops those that
    compile-time facts rule out. bench heats the GPU first, gives a slow candidate a few launches, and a near one
    longer windows in turn with the best so far: what the clock does in between happens to both. Triton prunes before
    it looks for cached timings: a new process reads its kernels from the cache, times nothing, and must get the same
    list again.
    """
    HEAT = 300                                               # ms: a power limit is felt after a tenth of a second
    TRIALS = (1.15, 20), (1.05, 100)                         # below so many times the best, again with windows of ms

    def __init__(self, kernel):
        self.kernel, self.best, self.small, self.timed = kernel, None, False, 0

    def prune(self, configs, named_args, grid=None, warmup=None, **kwargs):
        """The configs that compile, fit in shared memory and do not spill; all that run, where each one spills."""
        self.best = None  # a new search
        with (concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
              triton.AsyncCompileMode(pool, ignore_errors=True)):
            pending = [self.kernel.warmup(*named_args.values(), grid=(1,), **kwargs, **config.all_kwargs())
                       for config in configs]
        spills = {}
        for config, kernel in zip(configs, pending):
            kernel = kernel.result(ignore_errors=True) if hasattr(kernel, "result") else kernel
            with contextlib.suppress(OutOfResources, AttributeError):  # the second time it only has no n_spills
                kernel.run  # loads it: what it needs is known from here on
                spills[config] = kernel.n_spills
        return [config for config in spills if spills[config] == 0] or list(spills)

    def bench(self, launch, quantiles):
        """do_bench for the autotuner: [median, low, high] in ms, the three alike."""
        self.timed += 1
        if self.best is None:
            self.small = triton.testing.do_bench(launch, warmup=self.HEAT, rep=5, return_mode="median") < 0.1
            self.best = launch, self.clock(launch, 100)
            return [self.best[1]] * 3
        rival, best_ms = self.best
        ratio = self.clock(launch, 5) / best_ms
        for limit, window in self.TRIALS:
            if ratio < limit:
                ratio = statistics.mean(self.clock(launch, window) / self.clock(rival, window) for _ in range(2))
        if ratio < 1:
            self.best = launch, ratio * best_ms
        return [ratio * best_ms] * 3

    def clock(self, launch, window):
        """ms a call, from `window` ms: of a CUDA graph where a launch may take longer than the kernel."""
        if self.small:
            return triton.testing.do_bench_cudagraph(launch, rep=window / 10, return_mode="median")  # replayed 10 times
        return triton.testing.do_bench(launch, warmup=window / 4, rep=window, return_mode="median")


def searched_matmul(configs, **options):
    search = Search(product.matmul_kernel)
    return tuned_matmul(configs, do_bench=search.bench, prune_configs_by={"early_config_prune": search.prune},
                        **options)


TUNERS = {"triton.autotune": tuned_matmul, "Search": searched_matmul}


def soften(kernel, x, out, **config):
    """A softmax kernel of 02, or an autotuner over it, on contiguous rows."""
    if (kernel.base_fn if hasattr(kernel, "base_fn") else kernel.fn) is fused.online_kernel.fn:
        config |= {"in_stride": x.stride(0), "out_stride": out.stride(0), "STAGES": 1, "ALIGN": 16 // x.element_size()}
    return kernel[(len(x),)](out, x, n_cols=x.shape[1], **config)


def whole_rows(configs, named_args, **kwargs):
    """prune_configs_by for softmax_kernel: only a BLOCK_SIZE that holds the row."""
    n_cols = {**named_args, **kwargs}["n_cols"]
    return [config for config in configs if config.kwargs["BLOCK_SIZE"] >= n_cols]


# What S2's five configs are searched over: its own whole-row kernel, as listed and pruned, and one that loops.
SOFTMAX = {"whole rows, S2's configs": (fused.softmax_kernel, {}),
           "whole rows, pruned": (fused.softmax_kernel, {"prune_configs_by": {"early_config_prune": whole_rows}}),
           "online, S2's configs": (fused.online_kernel, {})}


def tuned_softmax(case):
    kernel, options = SOFTMAX[case]
    return autotuned(kernel, BLOCKS, ["n_cols"], **options)


def wrong_rows(launch, x, out):
    return rejected(launch, out, torch.softmax(x.double(), dim=1), 2**-7)


def check(report):
    """Each config and each search on a poisoned output, before anything is timed."""
    print(f"[{report.name}] check", file=sys.stderr, flush=True)
    dtype = torch.bfloat16 if report.gpu else torch.float16  # no interpreter runs bf16
    a, b = (torch.randn(256, 256, device=common.device()).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    good, bad = valid(a, b, out)
    if any("wrong" in why for why in bad.values()) or not good:
        raise AssertionError(f"configs that give wrong products: {bad}")
    why = rejected(lambda: multiply(tuned_matmul(list(good.values())), a, b, out), out, a.double() @ b.double(), 2**-7)
    if why:
        raise AssertionError(f"the autotuned matmul: {why}")
    x = fused.sample(6, NARROW, dtype)
    out = torch.empty_like(x)
    for config in BLOCKS:                                    # the proof: below the width S2's configs are wrong
        block = config.kwargs["BLOCK_SIZE"]
        for kernel in (fused.softmax_kernel, fused.online_kernel):
            why = wrong_rows(lambda: soften(kernel, x, out, **config.all_kwargs()), x, out)
            if bool(why) != (kernel is fused.softmax_kernel and block < NARROW):
                raise AssertionError(f"{kernel.fn.__name__}, BLOCK_SIZE {block}, {NARROW} columns: {why or 'right'}")
    for case in list(SOFTMAX)[1:]:                           # the cures
        why = wrong_rows(lambda: soften(tuned_softmax(case), x, out), x, out)
        if why:
            raise AssertionError(f"softmax, {case}: {why}")


# ---------------------------------------------------------------- tables

def configs(report, n):
    with report.table("configs", f"the article's twelve configs at {n:,}, one at a time", baseline="cublas") as table:
        a, b, out = product.square(n, "bf16")
        good, bad = valid(a, b, out)
        providers = {name: lambda config=config: multiply(product.matmul_kernel, a, b, out, **config.all_kwargs())
                     for name, config in good.items()}
        extra = {}
        for name, launch in providers.items():
            kernel = launch()
            extra[name] = {"provider": "triton", "config": name, "regs": kernel.n_regs, "spills": kernel.n_spills,
                           "shared_bytes": kernel.metadata.shared}
        tuned = tuned_matmul(list(good.values()))
        providers["cublas"] = lambda: product.cublas(a, b, out)
        rows = table.time(product.case(n, "bf16"), providers, extra, flops=2 * n**3, unit="bf16")
        multiply(tuned, a, b, out)                           # on the warm GPU
        rows[config_name(tuned.best_config)]["pick"] = "picked"
        times = [rows[name]["ms"] for name in good]
        table.note(f"The slowest takes {max(times) / min(times):.2f} times as long as the fastest. picked: by one "
                   "search of triton.autotune (25 ms of warm-up, 100 ms of runs a config, median).")
        for name, why in bad.items():
            table.note(f"Left out: {name}, which {why}.")


def cost(report, n):
    with report.table("cost", f"seconds of the first call of the autotuned matmul at {n:,}") as table:
        runs = [("triton.autotune", 0, True), ("triton.autotune", 1, False), ("triton.autotune", 2, True),
                ("Search", 0, True), ("Search", 1, True)]    # tuner, call, cache_results
        code = "import importlib; importlib.import_module('04_autotune').child({}, {}, {!r}, {})"
        codes = [code.format(report.args.device, n, tuner, keep) for tuner, _, keep in runs]
        with tempfile.TemporaryDirectory() as cache:         # a folder a tuner
            envs = [{"TRITON_CACHE_DIR": os.path.join(cache, tuner)} for tuner, *_ in runs]
            seconds = {run[:2]: float(out.split()[-1]) for run, out in zip(runs, common.in_turn("cost", codes, envs))}
        for tuner, call, case in (("triton.autotune", 0, "new process, empty cache"),
                                  ("triton.autotune", 1, "new process, kernels cached"),
                                  ("triton.autotune", 2, "new process, cache_results=True and tuned before"),
                                  ("Search", 0, "Search: new process, empty cache"),
                                  ("Search", 1, "Search: new process, tuned before")):
            table.row(case=case, n=n, m=n, k=n, dtype="bf16", seconds=seconds[tuner, call])
        share = seconds["Search", 0] / seconds["triton.autotune", 0]
        table.note("Wall clock of the call and a synchronize; importing and creating the CUDA context are over by "
                   "then. Kernels are kept between processes, timings only with cache_results=True.")
        table.note(f"Search, in this script, takes {100 * share:.0f}% of the plain autotuner's first call for the same "
                   f"list, on {os.cpu_count()} CPU cores.")


def child(device, n, tuner, keep):
    """What `cost` times, in a process of its own: prints the seconds of the first call."""
    torch.cuda.set_device(device)
    a, b, out = product.square(n, "bf16")
    tuned = TUNERS[tuner](CONFIGS, cache_results=keep)
    torch.cuda.synchronize()
    common.my_turn()
    start = time.perf_counter()
    multiply(tuned, a, b, out)
    torch.cuda.synchronize()
    print(time.perf_counter() - start)


def picks(report, sizes):
    copies = []  # (row of the table, timed row that it shows, its own fields)

    def follow(timed):                                       # once the clocks are known
        for row, original, own in copies:
            if original is timed:
                row.update(original | own)
    with report.table("picks", "three searches at each size against a full second of each config",
                      baseline="cublas", derive=follow, cases=len(sizes)) as table:
        for n in sizes:
            a, b, out = product.square(n, "bf16")
            good, _ = valid(a, b, out)
            picked, least = {}, {}
            for tuner, tuned_by in TUNERS.items():
                for _ in range(3):
                    tuned = tuned_by(list(good.values()))
                    multiply(tuned, a, b, out)
                    picked.setdefault(tuner, []).append(config_name(tuned.best_config))
                    for config, (ms, *_) in tuned.configs_timings.items() if tuner == "Search" else ():
                        name = config_name(config)
                        least[name] = min(ms, least.get(name, ms))
            near = [name for name, ms in least.items() if ms <= 1.08 * min(least.values())]
            near += {name for names in picked.values() for name in names} - set(near)
            providers = {name: lambda config=good[name]: multiply(product.matmul_kernel, a, b, out,
                                                                  **config.all_kwargs()) for name in near}
            providers["cublas"] = lambda: product.cublas(a, b, out)
            kept = list(table.rows)                          # a row for each tuner and size, not for each config
            rows = table.time(product.case(n, "bf16"), providers, flops=2 * n**3, unit="bf16")
            key = "ms" if any(rows[name].get("graph_ms") is None for name in near) else "graph_ms"
            best = min(near, key=lambda name: rows[name][key])
            table.rows = kept
            for tuner, names in picked.items():
                slowest = max(names, key=lambda name: rows[name][key])
                own = {"case": tuner, "provider": "triton", "best": best,
                       "gap_pct": 100 * (rows[slowest][key] / rows[best][key] - 1),
                       "pick": " or ".join(name for name, _ in collections.Counter(names).most_common())}
                copies.append((table.row(), rows[slowest], own))
        table.note("pick: what three searches picked; where they differ, the row is the slowest one's. gap_pct: how "
                   "much longer it takes than the best, by graph_ms where there is one. Timed for a full second each: "
                   "all picks, and the configs that a Search put within 8% of its fastest. triton.autotune times "
                   "launches: below 100 us a kernel may hide behind them.")


def softmax(report):
    with report.table("softmax", "S2's five BLOCKs: wrong as listed, right when pruned or looped; a stream of shapes",
                      baseline="torch", cases=3) as table:
        gpu = report.gpu
        for n_cols in (NARROW, 2048):
            n_rows, _ = fused.matrix(gpu, 2, n_cols)
            x = torch.randn(n_rows, n_cols, device="cuda", dtype=torch.bfloat16)
            out = torch.empty_like(x)
            tuned, why = {case: tuned_softmax(case) for case in SOFTMAX}, {}
            for case, kernel in tuned.items():
                why[case] = wrong_rows(lambda: soften(kernel, x, out), x, out) or "right"
            right = [case for case in SOFTMAX if why[case] == "right"]
            providers = {case: lambda kernel=tuned[case]: soften(kernel, x, out) for case in right}
            providers |= {"triton": lambda: fused.softmax(x, out), "torch": lambda: torch.softmax(x, 1, out=out)}
            extra = {case: {"case": case, "provider": "triton/autotuned", "value": "right",
                            "pick": "BLOCK_SIZE {BLOCK_SIZE}".format(**tuned[case].best_config.kwargs),
                            "num_warps": tuned[case].best_config.num_warps} for case in right}
            for case in set(SOFTMAX) - set(right):           # a wrong kernel is never timed
                table.row(case=case, n_rows=n_rows, n_cols=n_cols, dtype="bf16", provider="triton/autotuned",
                          value=why[case], num_warps=tuned[case].best_config.num_warps,
                          pick="BLOCK_SIZE {BLOCK_SIZE}".format(**tuned[case].best_config.kwargs))
            table.time({"n_rows": n_rows, "n_cols": n_cols, "dtype": "bf16"}, providers, extra,
                       bytes=2 * x.nbytes)                   # MN read, MN written
        stream(table, STREAM[:3] if report.args.quick else STREAM)
        table.note("S2 lists BLOCKs for a kernel that reads one BLOCK of its row: below the width it leaves the rest "
                   "of the row unwritten, is the faster for it, and wins. No time is taken of a kernel that is wrong.")
        table.note("Each new value of the key is a search, with its compilations: a stream of distinct widths pays for "
                   "all of them; a coarser key, here the next power of 2, for one a bucket. Cells that do not apply to "
                   "a row are empty.")


def stream(table, widths):
    """Rows for requests of distinct widths: the searches they cost, keyed on n_cols and on the next power of 2."""
    exact, buckets = tuned_softmax("online, S2's configs"), {}

    def by_n_cols(x, out):
        soften(exact, x, out)

    def by_power_of_two(x, out):
        bucket = triton.next_power_of_2(x.shape[1])
        if bucket not in buckets:                            # the first width of a bucket decides for all of it
            buckets[bucket] = tuned_softmax("online, S2's configs")
            soften(buckets[bucket], x, out)
        else:
            soften(fused.online_kernel, x, out, **buckets[bucket].best_config.all_kwargs())
    for case, launch in (("key n_cols", by_n_cols), ("key n_cols, the same stream again", by_n_cols),
                         ("key next power of 2", by_power_of_two)):
        before, start = len(exact.cache) + len(buckets), time.perf_counter()
        for n_cols in widths:
            x = torch.randn(4096, n_cols, device="cuda", dtype=torch.bfloat16)
            launch(x, torch.empty_like(x))
        torch.cuda.synchronize()
        table.row(case=f"{len(widths)} widths, {case}", dtype="bf16", provider="triton/autotuned",
                  searches=len(exact.cache) + len(buckets) - before, seconds=time.perf_counter() - start)


def main():
    p = common.parser(__doc__)
    p.add_argument("--n", type=common.power_of_two(256, 2**17),
                   help="rows and columns, a power of 2 from 256: the tables configs and picks alone (default 4,096)")
    report = common.start(p, narrowing=("n",))
    args = report.args
    if report.gpu is None:
        check(report)
        print("Every config multiplies right and S2's configs are wrong below their width, as shown, at small sizes.")
        return
    n = args.n or 4096
    report.need(product.need(n, 2) + 3 * 8 * n * n, f"--n {n}")
    check(report)
    if args.check:
        return print(common.CHECKED)
    configs(report, n)
    if not args.n:
        cost(report, n)
    picks(report, [args.n] if args.n else SIZES[:1] if args.quick else SIZES)
    if not args.n:
        softmax(report)
    report.finish()


if __name__ == "__main__":
    common.run(main)
