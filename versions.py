"""Do the tests that need no GPU pass under Triton 3.6 and under every later release?

    make test-versions                           3.6.0, and the newest of each later minor release that pip finds
    make test-versions VERSIONS='3.6 newest'     some of them: a release, a minor release (3.7), or newest

Each runs in an environment of its own under .versions/, made from requirements.txt. The answer is the last table; the
status is 1 where a test failed. This needs Python and its pip alone, so it imports nothing else from here.
"""
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
FIRST = "3.6.0"                                  # whose compiler output the tests know to the digit


def fail(message):
    """Bad input: one line on standard error, status 2."""
    sys.stderr.write(f"versions.py: {message}\n")
    raise SystemExit(2)


def numbers(version):
    return [int(part) for part in version.split(".")]


def chosen(listing, asked=()):
    """The versions to test, of what `pip index versions triton` prints: FIRST and the newest of each later minor."""
    line = re.search(r"^Available versions: (.+)$", listing, re.M)
    there = sorted({v for v in line.group(1).split(", ") if re.fullmatch(r"\d+\.\d+\.\d+", v)
                    and numbers(v) >= numbers(FIRST)} | {FIRST}, key=numbers) if line else []
    if not line:
        fail("pip found no releases of triton; it printed: " + (listing.strip().splitlines() or ["nothing"])[-1])
    names = {v.rpartition(".")[0]: v for v in there} | {"3.6": FIRST}
    every = list(names.values())
    names |= {"newest": every[-1]} | {v: v for v in there}
    unknown = [name for name in asked if name not in names]
    if unknown:
        fail(f"VERSIONS has {unknown[0]!r}; there are: {', '.join(names)}")
    return list(dict.fromkeys(names[name] for name in asked)) or every


def environment(version):
    """The Python of .versions/<version>, made where it is not there or requirements.txt has changed."""
    folder = ROOT / ".versions" / version
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    lines = [line for line in lines if line and not line.startswith("triton")]
    if version != FIRST:                         # later interpreters take every numpy
        lines = ["numpy" if line.startswith("numpy") else line for line in lines]
    ready, python = folder / "ready", folder / "bin" / "python"
    if not ready.exists() or ready.read_text().splitlines() != lines:
        print(f"== making {folder.relative_to(ROOT)}", file=sys.stderr, flush=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for command in ([sys.executable, "-m", "venv", "--clear", folder], [*pip, *lines],
                        [*pip, "--no-deps", f"triton=={version}"]):  # in place of the one that torch may have brought
            if subprocess.run(command).returncode:
                fail(f"{' '.join(map(str, command))} failed")
        ready.write_text("\n".join(lines))
    return python


def tested(python, version, flags):
    """One run of the tests with every GPU hidden: a row of the table, pytest's status last."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    process = subprocess.Popen([python, "-m", "pytest", "-q", "test_all.py", *flags], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, env=env | {"CUDA_VISIBLE_DEVICES": ""})
    line = ""
    for line in process.stdout:
        print(line, end="", flush=True)
    found = {word: count for count, word in re.findall(r"(\d+) (passed|skipped|failed|error)", line)}  # pytest's last
    code = "import torch, numpy; print(torch.__version__, numpy.__version__)"
    others = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.split()
    return [version, *others, *(found.get(word, 0) for word in ("passed", "skipped", "failed")), process.wait()]


def main():
    if "--help" in sys.argv[1:]:
        return print(__doc__)
    pip = subprocess.run([sys.executable, "-m", "pip", "index", "versions", "triton"], capture_output=True, text=True)
    rows = []
    for version in chosen(pip.stdout or pip.stderr, os.environ.get("VERSIONS", "").split()):
        python = environment(version)
        print(f"== triton {version}", file=sys.stderr, flush=True)
        rows.append(tested(python, version, sys.argv[1:]))
    for row in (["triton", "torch", "numpy", "passed", "skipped", "failed", "status"], *rows):
        print("".join(f"{cell!s:>14}" for cell in row))
    sys.exit(any(row[-1] for row in rows))


if __name__ == "__main__":
    try:
        try:
            main()
        finally:
            print(end="", flush=True)                # also where standard output is closed
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more at its end
        if isinstance(error, BrokenPipeError):       # | head
            raise SystemExit(141) from None
        fail(f"{error.filename or 'standard output'}: {error.strerror or error}")
    except KeyboardInterrupt:
        sys.stderr.write("versions.py: interrupted\n")
        raise SystemExit(130) from None
