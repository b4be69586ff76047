"""What changed between two runs, and what does a run look like? Comparison and pictures, from results files alone.

    python compare.py results/a results/b                    two results folders, row by row
    python compare.py old.json new.json                      two results files, or two of 05_inspect_ir.py --json
    python compare.py results/a results/b --fail-slower 5    status 1 where a row is over 5% slower, beyond noise
    python compare.py --plots [FOLDER ...]                   SVGs beside the tables of results/*/ (needs matplotlib)

The answer is the column `ratio`, old time over new: above 1 the new run is faster. It is "within noise" where the two
times differ by no more than the sum of both rows' spread_pct, or 1%; a spread that was not recorded counts as 2.5%;
of seconds, which are taken once, up to 25% is noise. A roof, which has no time, is compared by its GB/s. What is
counted and not timed (instructions, registers, spills, shared memory, lines) is shown where it changed.
"""
import argparse
import collections
import io
import json
import math
import os
import statistics
import sys
from pathlib import Path

import tabulate

import common

ACCEPTED = "OLD and NEW are two results folders (results/<gpu>), two results files, or two of 05_inspect_ir.py --json"
# What a row is, in contrast to what was measured of it: the first columns, up to `instruction`.
IDENTITY = list(common.COLUMNS)[:list(common.COLUMNS).index("instruction") + 1]
CHOICES = ["config", "kernel", "num_warps"]  # of an autotuner, or of torch: not the same in every run
COUNTED = ["lines", "count", "regs", "spills", "shared_bytes", "load_bits", "searches", *CHOICES, "pick", "value"]
FLOOR_PCT = {"ms": 1.0, "seconds": 25.0, "gbps": 1.0}  # of what is compared, the first that both rows have
NO_SPREAD_PCT = 2.5                          # of a row that has none


# ---------------------------------------------------------------- files

def record_of(path):
    """A results file, or one of 05's --json, if it is one; else one line and status 2."""
    try:
        record = json.loads(path.read_text())
        if all(isinstance(row, dict) for table in record["tables"].values() for row in table["rows"]):
            return record
        problem = "a row of a table is no object"
    except OSError as error:
        problem = error.strerror
    except (ValueError, RecursionError):
        problem = "it is no JSON, or only half of one"
    except (KeyError, TypeError, AttributeError):
        problem = "it has no tables of rows"
    common.fail(f"cannot use {path}: {problem}. {ACCEPTED}")


def load(name):
    """{script: record} of a results folder; {"": record} of one file."""
    path = Path(name)
    if not path.is_dir():
        return {"": record_of(path)}
    files = {file.stem: record_of(file) for file in sorted(path.glob("*.json"))}
    if not files:
        common.fail(f"no results (*.json) in {path}. {ACCEPTED}")
    return files


# ---------------------------------------------------------------- pairs and verdicts

def number(value):
    """The value where it is a positive, finite number, else None."""
    return value if type(value) in (int, float) and 0 < value < math.inf else None


def identity(row, without=()):
    """A row's key. `kernel` is a choice where the row names a provider; 05's rows are of a kernel."""
    return tuple(str(row[key]) if row.get(key) is not None and (
        key not in without or key == "kernel" and "provider" not in row) else "" for key in IDENTITY)


def paired(old, new):
    """([(old row, new row)], old rows alone, new rows alone); equal keys pair in order.

    First without CHOICES, then with num_warps, where that is unique on both sides; then by the whole key.
    """
    pairs, sides = {}, [dict(enumerate(old)), dict(enumerate(new))]
    for without in (CHOICES, CHOICES[:2], ()):
        keys = [collections.defaultdict(list) for _ in sides]
        for side, by_key in zip(sides, keys):
            for index, row in side.items():
                by_key[identity(row, without)].append(index)
        for key in keys[0].keys() & keys[1].keys():
            if not without or len(keys[0][key]) == len(keys[1][key]) == 1:
                for i, j in zip(keys[0][key], keys[1][key]):
                    pairs[i] = sides[0].pop(i), sides[1].pop(j)
    return [pairs[i] for i in sorted(pairs)], list(sides[0].values()), list(sides[1].values())


def verdict(old, new):
    """{"unit", "old", "new", "ratio", "noise_pct", "verdict"} of a pair, or None where a side is not timed."""
    for unit, floor in FLOOR_PCT.items():
        before, after = number(old.get(unit)), number(new.get(unit))
        if before and after:
            spreads = [row.get("spread_pct") for row in (old, new)]
            noise = max(floor, sum(NO_SPREAD_PCT if spread is None else number(spread) or 0 for spread in spreads))
            ratio = after / before if unit == "gbps" else before / after
            beyond = 100 * (max(ratio, 1 / ratio) - 1) > noise
            return {"unit": unit, "old": before, "new": after, "ratio": ratio, "noise_pct": noise,
                    "verdict": ("better" if ratio > 1 else "worse") if beyond else "within noise"}
    return None


def changes(old, new):
    """[(column, old value, new value)] of what is counted or chosen, and of a time that one side lacks."""
    unlike = [key for key in COUNTED if old.get(key) != new.get(key)]
    unlike += [unit for unit in ("ms", "seconds") if bool(number(old.get(unit))) != bool(number(new.get(unit)))]
    return [(key, old.get(key), new.get(key)) for key in unlike]


# ---------------------------------------------------------------- comparison, as text

def cell(key, value):
    plain = value is None or isinstance(value, (str, dict, list))
    return ("" if value is None else str(value)) if plain else format(value, common.COLUMNS.get(key, ""))


def label(row):
    """A row's identity in words: n 4,096, bf16, triton."""
    keys = [key for key in IDENTITY if row.get(key) is not None and not (key in "mk" and row[key] == row.get("n"))]
    return ", ".join(cell(key, row[key]) if isinstance(row[key], str) else f"{key} {cell(key, row[key])}"
                     for key in keys) or "(the row)"


def grid(headers, rows):
    return tabulate.tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def compare_tables(old, new):
    """(lines of text, verdicts, numbers of changes and of rows alone) of two lists of rows."""
    pairs, *alone = paired(old, new)
    timed = [(a, found) for a, b in pairs if (found := verdict(a, b))]
    changed = [(label(a), key, cell(key, before), cell(key, after), f"{after - before:+,}" if
                type(before) is type(after) is int else "") for a, b in pairs for key, before, after in changes(a, b)]
    lines = []
    if timed:
        units = {"ms": "ms", "seconds": "s", "gbps": "GB/s"}
        shown = [[label(a), *(f"{cell(v['unit'], v[side])} {units[v['unit']]}" for side in ("old", "new")),
                  f"{v['ratio']:.3f}", f"{v['noise_pct']:.1f}", v["verdict"]] for a, v in timed]
        lines += [grid(["row", "old", "new", "ratio", "noise %", "verdict"], shown), ""]
    if changed:
        lines += [grid(["row", "changed", "old", "new", "by"], changed), ""]
    lines += [f"- only in {side}: {label(row)}" for side, rows in zip(("OLD", "NEW"), alone) for row in rows]
    if len(pairs) > len(timed):
        same = sum(not changes(a, b) for a, b in pairs if not verdict(a, b))
        lines.append(f"- {same} of {len(pairs) - len(timed)} untimed rows are the same")
    return lines, [v for _, v in timed], len(changed), sum(map(len, alone))


def conditions(files):
    """{condition: value}, flat; where the files of a folder differ in one, all its values."""
    found = collections.defaultdict(dict)
    for record in files.values():
        for part in ("gpu", "versions", "settings", "arch", "seed", "commit"):
            value = record.get(part)
            for key, entry in ({f"{part}.{k}": v for k, v in value.items()} if isinstance(value, dict) else
                               {part: value}).items():
                if entry is not None:
                    found[key][str(entry)] = True
    return {key: " / ".join(values) for key, values in found.items()}


def compare(names, fail_slower):
    """Print the comparison; the status: 1 where --fail-slower is exceeded."""
    old, new = map(load, names)
    if ("" in old) != ("" in new):
        common.fail(f"one of them is a folder and the other a file. {ACCEPTED}")
    if "" in old:
        scripts = [side[""].get("script") for side in (old, new)]
        if None not in scripts and scripts[0] != scripts[1]:
            common.fail(f"{names[0]} is of {scripts[0]} and {names[1]} of {scripts[1]}. {ACCEPTED}")
    tables = [{f"{script} {key}".strip(): table["rows"] for script, record in side.items()
               for key, table in record["tables"].items()} for side in (old, new)]
    if not tables[0].keys() & tables[1].keys():
        common.fail(f"{names[0]} and {names[1]} have no table in common. {ACCEPTED}")

    were, are = conditions(old), conditions(new)
    out = [f"{side} {name}: {known.get('gpu.name', 'no GPU')}, driver {known.get('gpu.driver', 'unknown')}, "
           f"triton {known.get('versions.triton', 'unknown')}, torch {known.get('versions.torch', 'unknown')}"
           for side, name, known in zip(("OLD", "NEW"), names, (were, are))]
    unlike = [(key, were.get(key, ""), are.get(key, "")) for key in {**were, **are} if were.get(key) != are.get(key)]
    out += ["", grid(["condition", "OLD", "NEW"], unlike) if unlike else "The conditions are the same.", ""]
    verdicts, changed, alone = [], 0, 0
    for key in {**tables[0], **tables[1]}:
        if key in tables[0] and key in tables[1]:
            lines, found, counted, single = compare_tables(tables[0][key], tables[1][key])
            out += [f"### {key}", "", *lines, ""]
            verdicts, changed, alone = verdicts + found, changed + counted, alone + single
        else:
            side, rows = ("OLD", tables[0][key]) if key in tables[0] else ("NEW", tables[1][key])
            out += [f"### {key}: only in {side}", "", *(f"- only in {side}: {label(row)}" for row in rows), ""]
            alone += len(rows)
    counts = collections.Counter(v["verdict"] for v in verdicts)
    out.append(", ".join(f"{counts[name]} {name}" for name in ("better", "worse", "within noise"))
               + f"; {changed} changes of what is not timed; {alone} rows of one side only.")
    slow = [v for v in verdicts if v["verdict"] == "worse" and fail_slower is not None
            and 100 * (1 / v["ratio"] - 1) > fail_slower]
    if slow:
        out.append(f"{len(slow)} rows are slower by more than {fail_slower:g}% and beyond noise.")
    try:
        print("\n".join(out), flush=True)
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(bool(slow))


# ---------------------------------------------------------------- pictures

MARKERS, DASHES = "osv^DX*P<>", ("-", "--", "-.", ":")  # a provider is known without its colour
RATES = {"gbps": "GB/s", "tflops": "TFLOP/s"}
STYLE = {"svg.hashsalt": "triton", "svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3,
         "axes.axisbelow": True, "legend.fontsize": 7.5, "hatch.linewidth": 0.6}


def rows_of(files, script, table, *needed):
    """The rows of a table that have all of these numbers; none where there is no such table."""
    rows = files.get(script, {"tables": {}})["tables"].get(table, {"rows": []})["rows"]
    return [row for row in rows if all(number(row.get(key)) for key in needed)]


def roof(rows, percent):
    """The GB/s that a percentage column is of: pct_rated or pct_copy."""
    return statistics.median([100 * row["gbps"] / row[percent] for row in rows if number(row.get(percent))] or [0])


def roofs(axes, rows):
    for percent, name, dash in (("pct_rated", "rated roof", "-"), ("pct_copy", "roof of a copy", "--")):
        if gbps := roof(rows, percent):
            axes.axhline(gbps, color="black", linewidth=1, linestyle=dash, label=f"{name}, {gbps:,.0f} GB/s")


def finished(figure):
    """From zero up, once everything is drawn; one legend for all panels, beside them, where it covers nothing."""
    for axes in figure.axes:
        axes.set_ylim(0, None)
    figure.tight_layout()
    named = {name: line for axes in figure.axes for line, name in zip(*axes.get_legend_handles_labels())}
    figure.legend(named.values(), named.keys(), loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def lines(axes, rows, x, y):
    """One line a provider over x, a size, every value of which is a tick."""
    series = {}
    for row in rows:
        series.setdefault(str(row.get("provider")), []).append((row[x], row[y]))
    for index, (name, points) in enumerate(series.items()):
        axes.plot(*zip(*sorted(points)), marker=MARKERS[index % 10], linestyle=DASHES[index % 4], markersize=5,
                  label=name)
    ticks = sorted({row[x] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45)
    axes.minorticks_off()
    axes.set(ylabel=RATES[y])


def block_size(plt, files):
    rows = rows_of(files, "01_vector_add", "block_size", "block_size", "gbps")
    if rows:
        figure, axes = plt.subplots(figsize=(6.5, 4))
        lines(axes, rows, "block_size", "gbps")
        roofs(axes, rows)
        axes.set(xlabel="BLOCK_SIZE (elements a program)", title=f"vector add, n = {rows[0].get('n', 0):,}")
        return finished(figure), "01_vector_add", ""


def by_dtype(plt, rows):
    """A figure with one pair of axes a dtype: (figure, [(axes, dtype, its rows)])."""
    dtypes = list(dict.fromkeys(row.get("dtype") for row in rows))
    figure, axes = plt.subplots(1, len(dtypes), figsize=(5 * len(dtypes), 4.2), sharey=True, squeeze=False)
    return figure, [(one, dtype, [row for row in rows if row.get("dtype") == dtype])
                    for one, dtype in zip(axes[0], dtypes)]


def widths(plt, files):
    rows = rows_of(files, "02_fused_softmax", "widths", "n_cols", "gbps") + [
        row | {"provider": "triton, split (06)"} for row in rows_of(files, "06_split_softmax", "wide", "n_cols", "gbps")
        if row.get("provider") == "triton"]
    if rows:
        figure, panels = by_dtype(plt, rows)
        for axes, dtype, own in panels:
            lines(axes, own, "n_cols", "gbps")
            roofs(axes, rows)
            axes.set(xlabel="columns of a row (elements)", title=f"softmax, {dtype}")
        return finished(figure), min(files.keys() & {"02_fused_softmax", "06_split_softmax"}), ""


def vs_cublas(plt, files):
    rows = rows_of(files, "03_matmul", "vs_cublas", "n", "tflops") + [
        row | {"provider": "triton, persistent (07)"}
        for row in rows_of(files, "07_persistent_matmul", "vs_cublas", "n", "tflops")
        if row.get("provider") == "triton" and row["n"] == row.get("m") == row.get("k")]
    if rows:
        figure, panels = by_dtype(plt, rows)
        for axes, dtype, own in panels:
            lines(axes, own, "n", "tflops")
            fastest = {}
            for row in own:
                if number(row.get("pct_peak")) and row["tflops"] > fastest.get(row["n"], row)["tflops"] * 0.999:
                    fastest[row["n"]] = row
            peaks = [(n, 100 * row["tflops"] / row["pct_peak"]) for n, row in sorted(fastest.items())]
            if peaks:
                axes.plot(*zip(*peaks), color="black", linewidth=1, linestyle=(0, (6, 2)),
                          label="peak, at the clock of the fastest")
            axes.set(xlabel="n (rows and columns)", title=f"n x n x n matmul, {dtype}")
        name = min(files.keys() & {"03_matmul", "07_persistent_matmul"})
        return finished(figure), name, "" if peaks else "The peak of this GPU, or its clock, is unknown."


def configs(plt, files):
    rows = sorted(rows_of(files, "04_autotune", "configs", "tflops"), key=lambda row: row["tflops"])
    if rows:
        figure, axes = plt.subplots(figsize=(6.5, 0.6 + 0.28 * len(rows)))
        for place, row in enumerate(rows):
            ours, picked = row.get("config"), row.get("pick")
            axes.barh(place, row["tflops"], edgecolor="black", color="C0" if picked else "white" if ours else "0.8",
                      hatch="///" if picked else None if ours else "xx")
            axes.text(row["tflops"], place, f" {row['tflops']:.0f}" + ("  picked" if picked else ""), va="center")
        axes.set_yticks(range(len(rows)), [str(row.get("config") or row.get("provider")) for row in rows])
        axes.set(xlim=(0, 1.2 * rows[-1]["tflops"]), xlabel="TFLOP/s",
                 title=f"matmul {rows[0].get('dtype')}, n = {rows[0].get('n', 0):,}, by config")
        axes.grid(axis="y", visible=False)
        figure.tight_layout()
        return figure, "04_autotune", "A config: BLOCK_M x BLOCK_N x BLOCK_K, s stages, w warps, g GROUP_M."


def work(row):
    """(operation, FLOPs, bytes) of a timed row, or None; matmul: 2MNK, and A, B and C once each; vector add: one FLOP
    an element; softmax: 5 an element (maximum, subtraction, exponential, sum, division), however it is computed."""
    if all(number(row.get(key)) for key in ("m", "n", "k", "flops")):
        m, n, k = row["m"], row["n"], row["k"]
        return "matmul", row["flops"], (m * k + k * n + m * n) * (4 if row.get("dtype") == "fp32" else 2)
    if all(number(row.get(key)) for key in ("n_rows", "n_cols", "bytes")):
        return "softmax", 5 * row["n_rows"] * row["n_cols"], row["bytes"]
    return ("vector add", row["n"], row["bytes"]) if all(number(row.get(key)) for key in ("n", "bytes")) else None


def roofline(plt, files):
    """Every timed row of the numbered scripts."""
    rows = [row for script in files if script[:2].isdigit() for table in files[script]["tables"]
            for row in rows_of(files, script, table, "ms") if work(row)]
    if not rows:
        return None
    figure, axes = plt.subplots(figsize=(8.5, 5.2))
    for operation, marker in (("vector add", "o"), ("softmax", "s"), ("matmul", "^")):
        for ours in (False, True):
            points = [(flops / nbytes, flops / row["ms"] / 1e9) for row in rows for what, flops, nbytes in [work(row)]
                      if what == operation and ours == str(row.get("provider")).startswith("triton")]
            if points:
                axes.plot(*zip(*points), marker, markersize=5, alpha=0.8, fillstyle="full" if ours else "none",
                          color="black", markerfacecolor="C0" if ours else "none", markeredgewidth=0.8,
                          label=f"{operation}: {'Triton' if ours else 'others'}, {len(points)} rows")
    timed = [row for row in rows if number(row.get("gbps"))]
    bandwidths = {name: roof(timed, percent) for percent, name in (("pct_rated", "rated"), ("pct_copy", "a copy's"))}
    gpu = next(iter(files.values())).get("gpu") or {}
    mhz = max((row["sm_mhz"] for row in rows if number(row.get("sm_mhz"))), default=0)
    peaks = {unit: common.peak_tflops(gpu.get("name", ""), gpu.get("sms", 0), mhz, unit)
             for unit in ("bf16", "tf32", "fp32") if mhz}
    left, right = 0.04, 2 * max(flops / nbytes for _, flops, nbytes in map(work, rows))
    top = max(filter(None, peaks.values()), default=math.inf)
    for (name, gbps), dash in zip(bandwidths.items(), ("-", "--")):
        if gbps:
            ridge = min(right, 1000 * top / gbps)
            axes.plot((left, ridge), (left * gbps / 1000, ridge * gbps / 1000), color="black", linewidth=1,
                      linestyle=dash, label=f"{name} bandwidth, {gbps:,.0f} GB/s")
    for (unit, peak), dash in zip(peaks.items(), ("-", "-.", ":")):
        if peak and any(bandwidths.values()):
            axes.plot((1000 * peak / max(bandwidths.values()), right), (peak, peak), color="black", linewidth=1.2,
                      linestyle=dash, label=f"{unit.upper()} peak at {mhz:,.0f} MHz, {peak:,.0f} TFLOP/s")
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte of DRAM that must move", ylabel="TFLOP/s",
             title="Roofline: every row that was timed")
    axes.legend(loc="lower right")
    figure.tight_layout()
    note = ("FLOPs: add 1 an element; softmax 5 (max, subtract, exp, sum, divide); matmul 2MNK. Bytes: the table's; "
            "matmul (MK + KN + MN) x element size.")
    return figure, next(iter(files)), note + ("" if any(peaks.values()) else " The GPU's peak is unknown.")


PICTURES = {"01_vector_add_block_size": block_size, "02_fused_softmax_widths": widths,
            "03_matmul_vs_cublas": vs_cublas, "04_autotune_configs": configs, "roofline": roofline}


def pyplot():
    """matplotlib.pyplot, which nothing else needs, or one line and status 2."""
    os.environ["MPLBACKEND"] = "svg"  # where it names no backend, matplotlib cannot be imported
    try:
        import matplotlib
        matplotlib.use("svg")
        import matplotlib.pyplot as plt
        return plt
    except ImportError:
        common.fail(f"pictures need matplotlib, which is not installed: {sys.executable} -m pip install matplotlib")


def draw(files, folder):
    """Draw every picture whose table these results hold; the same results give the same bytes."""
    plt, drawn = pyplot(), []
    with plt.rc_context(STYLE):
        for name, picture in PICTURES.items():
            if not (made := picture(plt, files)):
                continue
            figure, script, note = made
            record = files[script]
            known = conditions({script: record})
            caption = ["{}, driver {}, {} W".format(*(known.get(f"gpu.{key}", "unknown") for key in
                                                      ("name", "driver", "power_limit_w")))
                       + f"; commit {known.get('commit', 'unknown')[:7]}",
                       ", ".join(f"{key[9:]} {value}" for key, value in known.items() if key.startswith("versions."))]
            figure.text(0.5, 0, "\n".join(filter(None, [note, *caption])), ha="center", va="top", fontsize=7)
            text = io.StringIO()
            figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
            plt.close(figure)
            drawn.append(folder / f"{name}.svg")
            common.write(drawn[-1], text.getvalue())
    return drawn


def plots(names):
    for name in names or sorted(path.parent for path in (common.ROOT / "results").glob("*/01_*.json")):
        if not Path(name).is_dir():
            common.fail(f"{name} is no folder; pictures are of results folders, as results/<gpu>")
        drawn = draw(load(name), Path(name))
        print("\n".join(map(str, drawn)) or f"{name}: no table of which there is a picture", flush=True)


def main():
    p = common.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("runs", nargs="*", type=common.path, metavar="OLD NEW", help="two results folders, or two files")
    p.add_argument("--fail-slower", type=percent, metavar="PCT", help="status 1 where a row is slower by more")
    p.add_argument("--plots", action="store_true", help="draw results folders (default: all of results/) as SVGs")
    args = p.parse_args()
    if args.plots:
        if args.fail_slower is not None:
            p.error("--fail-slower is of a comparison, not of --plots")
        return plots(args.runs)
    if len(args.runs) != 2:
        p.error(f"{len(args.runs)} given. {ACCEPTED}")
    raise SystemExit(compare(args.runs, args.fail_slower))


def percent(text):
    """An argparse type: a percentage from 0 up."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage from 0 up")
    return value


if __name__ == "__main__":
    common.run(main)
