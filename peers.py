"""What 02 and 06 are compared with: torch's kernel, by name and shape, torch.compile, and Liger and quack if installed.
"""
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from functools import partial, reduce
from importlib import import_module
from pathlib import Path

import torch

import common
import triton

# Inductor's pool of compilers, a process a core, would start beside whatever is being timed, and in every process of
# compiled_ahead(); what is compiled does not depend on it.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def inductor(x):
    """torch.compile of the softmax, for this shape alone."""
    torch._dynamo.reset()
    fn = torch.compile(lambda t: torch.softmax(t, dim=-1), dynamic=False)
    fn(x)
    return fn


@contextlib.contextmanager
def compiled_ahead(report, shapes):
    """What torch.compile makes of each (dtype, shape) is in its cache at the end: by other processes, meanwhile. Each
    takes seconds to start, so they have two shapes or more; and 4 GB of the GPU's memory."""
    missing = [one for one in shapes if not compiled_mark(*one).exists()]
    parts = min(triton.cdiv(len(missing), 2), max(1, os.cpu_count() // 2), 1 + torch.cuda.mem_get_info()[0] // 2**32)
    code = "import peers; peers.fill_cache({}, {!r})"
    children = [subprocess.Popen([sys.executable, "-c", code.format(report.args.device, missing[part::parts])],
                                 cwd=common.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                for part in range(parts)]
    try:
        yield
        for child in children:
            child.wait()
    finally:
        for child in children:
            child.kill()


def compiled_mark(dtype, shape):
    """A file beside Inductor's cache that says that it holds a shape's code, of these versions and for this GPU."""
    from torch._inductor.runtime import runtime_utils
    key = torch.__version__, triton.__version__, torch.cuda.get_device_name(), dtype, *shape
    return Path(runtime_utils.cache_dir(), "softmax-" + re.sub(r"[^\w.]+", "-", "-".join(map(str, key))))


def fill_cache(device, shapes):
    torch.cuda.set_device(device)
    for dtype, shape in shapes:
        if not (mark := compiled_mark(dtype, shape)).exists():  # another script's may have been here
            inductor(torch.empty(shape, dtype=common.DTYPES[dtype], device="cuda"))
            mark.touch()


def compiled(table, x):
    """torch.compile as a provider; none, and a note, where it fails."""
    try:
        fn = inductor(x)
    except Exception as error:  # a compiler's failure is not this script's
        table.note(f"torch.compile failed at {x.shape[1]:,} columns, {x.dtype}: {type(error).__name__}.")
        return {}
    return {"torch.compile": partial(fn, x)}


def installed(table, x, close):
    """{name: call} of the softmax of Liger and of quack, where installed and right at x's shape; a note where not.
    close(out, x) raises where out is not the softmax of x."""
    found, some = {}, slice(None, None, max(1, len(x) // 64))
    for name, module, *path in (("liger", "liger_kernel.ops.softmax", "LigerSoftmaxFunction", "apply"),
                                ("quack", "quack.softmax", "softmax")):
        try:
            fn = reduce(getattr, path, import_module(module))
            close(fn(x)[some], x[some], slack=4)
            found[name] = partial(fn, x)
        except Exception as error:                         # a peer's failure is not this script's
            table.note(f"{name}: left out, not installed here." if isinstance(error, ImportError) else
                       f"{name}: left out at {x.shape[1]:,} columns, {x.dtype}: {type(error).__name__}.")
    return found


def blocks_per_sm(threads, regs, shared):
    """Blocks that fit on an SM of the current GPU (CUDA programming guide: registers go to warps by 256, and a
    block's shared memory has 1 KB of the system's beside it)."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    warps = triton.cdiv(threads, 32)
    return min({(8, 6): 16, (8, 9): 24}.get((gpu.major, gpu.minor), 32),
               gpu.max_threads_per_multi_processor // (warps * 32),
               gpu.regs_per_multiprocessor // (warps * triton.cdiv(regs * 32, 256) * 256),
               gpu.shared_memory_per_multiprocessor // (shared + 1024))


def profiled(calls):
    """The one CUDA kernel of each call: (name, threads a block, blocks, blocks an SM); [] where none was recorded."""
    from torch.profiler import ProfilerActivity, profile
    found = []
    with (tempfile.TemporaryDirectory() as folder,
          contextlib.suppress(RuntimeError, OSError, ValueError, KeyError)):  # no CUPTI, or not permitted
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as prof:
            for call in calls:
                call()
            torch.cuda.synchronize()
        path = Path(folder, "trace.json")
        prof.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "kernel"]
        for event in sorted(events, key=lambda event: event["ts"]):
            args = event["args"]
            threads, blocks = math.prod(args["block"]), math.prod(args["grid"])
            name = re.search(r"(\w+)<", event["name"])  # of "void at::native::(...)::name<8, float, ...>(...)"
            found.append((name.group(1) if name else event["name"][:60], threads, blocks,
                          blocks_per_sm(threads, args["registers per thread"], args["shared memory"])))
    return found if len(found) == len(calls) else []


def explain(table, timed):
    """Name torch's kernel in its rows, and say what it does where it loses; timed: what time_case returned."""
    kernels = profiled([call for _, call in timed])
    if not kernels:
        table.note("The profiler recorded no kernels (CUPTI missing or not permitted), so torch's are not named.")
    alike = {}
    for (rows, _), (name, threads, blocks, per_sm) in zip(timed, kernels):
        row = rows["torch"]
        row["kernel"] = name
        if max(other["ratio"] for other in rows.values()) > 1.1:
            key = row["dtype"], name, threads * blocks / row["n_rows"], per_sm * row["n_rows"] / blocks
            alike.setdefault(key, []).append(f"{row['n_cols']:,}")
    for (dtype, name, threads, per_sm), n_cols in alike.items():
        table.note(f"torch, {dtype}, over 10% behind at {', '.join(n_cols)} columns: {name} gives a row {threads:,g} "
                   f"threads and an SM {per_sm:,g} rows at once (from a profile of this run).")
    if any(threads > 32 for _, _, threads, _ in alike):
        table.note("A row of more than a warp waits at barriers for its maximum and its sum; the fewer rows an SM "
                   "holds, the fewer loads are under way meanwhile.")
