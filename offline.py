"""Kernels that no interpreter runs, where there is no GPU either: what a script launches, compiled for compute
capability 9.0, which shows spilled registers and shared memory, and its PTX. Apart, since 06 to 08 need it.
"""
import concurrent.futures
import os
import subprocess
import sys

import common
import tables
import triton


def compiled(kernel, keywords):
    """The CompiledKernel of a launch with these arguments, specialized as the launch does, for compute capability 9.0
    and with no GPU."""
    from triton.backends.compiler import BaseBackend, GPUTarget  # here: a release that moves them breaks this alone
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
        return common.resources(kernel.asm["cubin"]) | {"shared_bytes": kernel.metadata.shared}
    found = []
    tables.writable_cache()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for own in pool.map(facts, cases):
            found.append(own)
            common.progress(f"compiling: {len(found)} of {len(cases)}")
    common.progress()
    for (kernel, keywords), own in zip(cases, found):
        assert not own["spills"] and own["shared_bytes"] <= 227 * 1024, (kernel, keywords, own)
    print(f"No interpreter runs these kernels. Compiled for sm_90 instead: {len(cases)} kernels, no spills, up to "
          f"{max(own['regs'] for own in found)} registers.")


def compile_apart(script):
    """Compile a script's cases(), in a process of its own: in this one Triton's interpreter is on."""
    code = (f"import importlib, sys, common, offline; sys.argv[0] = '{script}.py'; "
            f"common.run(lambda: offline.compile_all(importlib.import_module({script!r}).cases()))")
    done = subprocess.run([sys.executable, "-c", code], cwd=common.ROOT, env=os.environ | {"TRITON_INTERPRET": "0"})
    if done.returncode:  # it has said why
        raise SystemExit(done.returncode)
