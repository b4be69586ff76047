"""Work beside other work: threads that compile and check, processes that start together and are timed one by one.

Scripts reach these functions as common.side_by_side and so on.
"""
import concurrent.futures
import contextlib
import os
import subprocess
import sys

import torch

import common


def _enter(index):
    """A new thread begins at device 0, and without the CUDA context that TMA's descriptors need: set_device makes none
    where the device is 0 already."""
    torch.cuda.set_device(index)
    torch.cuda.synchronize()


def side_by_side(calls):
    """Call each without arguments, in threads: most of a check's time is compilation, which runs without Python's
    lock. In turn under the interpreter, which is Python. The first exception, in the order of calls, is raised."""
    calls = list(calls)

    def each(steps):
        for index, step in enumerate(steps):
            common.progress(f"compiling and checking: {index + 1:,} of {len(calls):,}")
            step()
    try:
        if common.device() == "cpu":
            return each(calls)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count(), initializer=_enter,
                                                   initargs=(torch.cuda.current_device(),)) as pool:
            try:
                each([pool.submit(call).result for call in calls])
            except BaseException:  # Ctrl-C, too: what has not begun need not
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        common.progress()


def in_turn(what, codes, environments):
    """What each Python program prints after its my_turn(), in a new process with some variables of its own. All start
    together, since importing torch takes seconds; each goes on when those before it have ended. what: the table, for
    the one line that ends the run where one fails (a GPU that takes one process alone, say)."""
    with contextlib.ExitStack() as stack:
        children = []
        for code, variables in zip(codes, environments):
            children.append(stack.enter_context(subprocess.Popen(
                [sys.executable, "-c", code], cwd=common.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, env=os.environ | variables)))
            stack.callback(children[-1].kill)
        for child in children:
            child.stdout.readline()
        printed = []
        for index, child in enumerate(children):
            common.progress(f"{what}: process {index + 1} of {len(children)}")
            out, errors = child.communicate("go\n")
            if child.returncode:
                last = (errors.strip().splitlines() or [f"status {child.returncode}"])[-1]
                common.fail(f"{what}: a process of its own failed: {last[:300]}")
            printed.append(out)
        return printed


def my_turn():
    """Say that this process of in_turn() is ready, and wait until it is its turn."""
    print("ready", flush=True)
    sys.stdin.readline()
