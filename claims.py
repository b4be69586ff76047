"""The two articles' claims that a figure can judge, each beside this GPU's figure and the row that it comes from.

`report.py` puts the table into the README. S1 is the measured article, S2 the Triton page. An entry is (source, claim
as the article's, rows that judge it, judge): the judge takes Results and returns (what this GPU gives, verdict). No
figure of this repository is typed here: the numbers in a claim are the article's, the others are limits of a verdict.
"""
HOLDS, NOT, DIFFERS = "holds", "does not", "differs"
ADD, SOFTMAX, MATMUL, TUNE, IR = "01_vector_add", "02_fused_softmax", "03_matmul", "04_autotune", "05_inspect_ir"


def is_true(condition):
    return HOLDS if condition else NOT


def near(value, article, within=0.05):
    """The article's figure, on another GPU: holds within 5%, else it differs."""
    return HOLDS if abs(value - article) <= within * article else DIFFERS


# ---------------------------------------------------------------- 01

def bandwidth(r):
    value = r.get(ADD, "providers", "pct_rated", provider="triton")
    copy = r.get(ADD, "providers", "pct_copy", provider="triton")
    return f"{value:.1f}% of the rated bandwidth, {copy:.1f}% of a copy's", near(value, 90)


def as_torch_add(r):
    value = r.get(ADD, "providers", "ratio", provider="triton")
    return f"{value:.3f} of torch.add's speed", is_true(value >= 0.98)


def load_width(r):
    ours, cuda = (r.get(ADD, "providers", "load_bits", provider=name) for name in ("triton", "cuda"))
    return f"{ours} bits a load; the one-float CUDA kernel {cuda}", is_true((ours, cuda) == (128, 32))


def against_cuda(r):
    value, float4 = (r.get(ADD, "providers", "ms", provider=name) / r.get(ADD, "providers", "ms", provider="triton")
                     for name in ("cuda", "cuda/float4"))
    return f"{value:.2f} times as fast as one float a thread, {float4:.2f} times float4", is_true(float4 > 0.98)


def block_sizes(r):
    rows = r.rows(ADD, "block_size")
    best = min(rows, key=lambda row: row["ms"])
    slow = [row for row in rows if row["ms"] > 1.05 * best["ms"]]
    text = ", ".join(f"{row['block_size']:,} by {100 * (row['ms'] / best['ms'] - 1):.0f}%" for row in slow)
    return f"fastest {best['block_size']:,}; slower by more than 5%: {text or 'none'}", is_true(not slow)


def registers(r):
    value = r.get(ADD, "providers", "regs", provider="triton")
    return f"{value} registers a thread", near(value, 26, 0)


# ---------------------------------------------------------------- 02

def widths(r, dtype=None, provider="triton", up_to=2**30):
    return [row for row in r.rows(SOFTMAX, "widths", provider=provider)
            if row["n_cols"] <= up_to and dtype in (None, row["dtype"])]


def span(values, form):
    low, high = min(values), max(values)
    return f"{low:{form}} to {high:{form}}"


def at_4096(r):
    value = r.get(SOFTMAX, "widths", "ratio", provider="triton/whole-row", n_cols=4096, dtype="bf16")
    return f"{value:.2f} times torch.softmax", HOLDS if 1.4 <= value <= 1.8 else DIFFERS


def elsewhere(r):
    ratios = [row["ratio"] for row in widths(r, provider="triton/whole-row", up_to=65536)
              if (row["n_cols"], row["dtype"]) != (4096, "bf16")]
    return f"{span(ratios, '.2f')} times torch.softmax", is_true(all(0.96 <= ratio <= 1.04 for ratio in ratios))


def roof(r):
    shares = [row["pct_rated"] for row in widths(r, provider="triton/whole-row", up_to=65536)]
    return f"{span(shares, '.1f')}% of the rated bandwidth", is_true(min(shares) >= 86)


def unfused(dtype, article):
    def judge(r):
        value = (r.get(SOFTMAX, "unfused", "ms", provider="unfused", dtype=dtype)
                 / r.get(SOFTMAX, "unfused", "ms", provider="triton", dtype=dtype))
        return f"{value:.2f} times as long", near(value, article)
    return judge


def spills(n_cols, num_warps, article):
    def judge(r):
        value = r.get(SOFTMAX, "cliff", "spills", provider="triton/whole-row", n_cols=n_cols, num_warps=num_warps)
        return f"{value} on this GPU's architecture", near(value, article, 0)
    return judge


def cliff(r):
    rows = r.rows(SOFTMAX, "cliff", n_cols=131072)
    value = (next(row["ms"] for row in rows if row["provider"] == "triton/whole-row" and row["num_warps"] == 16)
             / next(row["ms"] for row in rows if row["provider"] == "torch"))
    return f"{value:.2f} times slower than torch.softmax", HOLDS if value >= 3.8 else DIFFERS


def more_warps(r):
    few, many = (r.get(SOFTMAX, "cliff", "gbps", provider="triton/whole-row", n_cols=131072, num_warps=warps)
                 for warps in (16, 32))
    return f"{few:,.0f} GB/s at 16 warps, {many:,.0f} at 32", is_true(many > few)


def streaming(r):
    name = next(row["kernel"] for row in r.rows(SOFTMAX, "cliff", n_cols=131072) if row["provider"] == "torch")
    return f"torch runs {name}", is_true(name and "cunn_SoftMaxForward" in name)


def online(r):
    values = [row["ratio"] for row in widths(r) if row["n_cols"] >= 131072]
    return f"softmax(x) is {span(values, '.2f')} times torch.softmax from 131,072 columns up", is_true(min(values) >= 1)


# ---------------------------------------------------------------- 03

def squares(r, provider="triton", dtype="bf16"):
    return {row["n"]: row for row in r.rows(MATMUL, "vs_cublas", provider=provider, dtype=dtype)}


def small_sizes(r):
    value = {n: squares(r)[n]["ratio"] for n in (512, 1024)}
    graph = {n: squares(r, "cublas")[n]["graph_ms"] / squares(r)[n]["graph_ms"] for n in (512, 1024)}
    text = "; ".join(f"{n:,}: {value[n]:.2f} of cuBLAS, {graph[n]:.2f} by CUDA graph" for n in value)
    return text, is_true(min(graph.values()) > 1)


def large_sizes(r):
    value = squares(r)[8192]["ratio"]
    return f"{value:.3f} of cuBLAS at 8,192", is_true(value >= 0.98)


def of_peak(r):
    ours, theirs = (squares(r, name)[8192]["pct_peak"] for name in ("triton", "cublas"))
    return f"{ours:.1f}% of the peak at its clock, cuBLAS {theirs:.1f}%", near(ours, 99)


def half_types(r):
    bf16, fp16 = ({n: row.get("graph_ms") or row["ms"] for n, row in squares(r, dtype=dtype).items()}
                  for dtype in ("bf16", "fp16"))
    values = [100 * (ms / fp16[n] - 1) for n, ms in bf16.items()]
    return f"FP16 is {span(values, '+.1f')}% faster than BF16", is_true(max(map(abs, values)) <= 3)


def s2_gemm(r):
    ours, theirs = ({n: row.get("graph_ms") or row["ms"] for n, row in squares(r, name).items() if n >= 2048}
                    for name in ("triton", "cublas"))  # below 100 us a launch may take longer than the product
    values = [theirs[n] / ours[n] for n in ours]
    return (f"{span(values, '.3f')} of cuBLAS from 2,048 up (S1's claim above contradicts this one)",
            is_true(max(values) < 0.98))


def grouping_dram(n, article):
    def judge(r):
        row_order, grouped = (r.get("counters", "grouping", "dram_read_gb", n=n, group_m=g) for g in (1, 8))
        return (f"{row_order:.2f} against {grouped:.2f} GB, {row_order / grouped:.2f} times",
                near(row_order / grouped, article))
    return judge


def grouping_time(n, article):
    def judge(r):
        row_order, grouped = (r.rows(MATMUL, "grouping", n=n, group_m=g)[0] for g in (1, 8))
        value = row_order["ms"] / grouped["ms"]
        return (f"{value:.2f} times faster; {row_order['sm_mhz']:,.0f} against {grouped['sm_mhz']:,.0f} MHz",
                near(value, article))
    return judge


def grouping_clock(r):
    row_order, grouped = (r.rows(MATMUL, "grouping", n=8192, group_m=g)[0] for g in (1, 8))
    value = 100 * (grouped["sm_mhz"] / row_order["sm_mhz"] - 1)
    return f"the SM clock is {value:+.0f}% with grouping", near(value, 27)


def precision(r, provider, mode, key):
    return r.get(MATMUL, "fp32_precision", key, provider=provider, precision=mode)


def tf32_error(r):
    ours = precision(r, "triton", "tf32", "rel_error") / precision(r, "triton", "ieee", "rel_error")
    theirs = precision(r, "cublas", "tf32", "rel_error") / precision(r, "cublas", "ieee", "rel_error")
    return (f"{ours:,.0f} times in Triton, {theirs:,.0f} in cuBLAS",
            HOLDS if 100 <= min(ours, theirs) and max(ours, theirs) <= 270 else DIFFERS)


def tf32_speed(r):
    ours = precision(r, "triton", "tf32", "tflops") / precision(r, "triton", "ieee", "tflops")
    theirs = precision(r, "cublas", "tf32", "tflops") / precision(r, "cublas", "ieee", "tflops")
    return f"{ours:.1f} times in Triton, {theirs:.1f} in cuBLAS", near(ours, 2, 0.1)


def ieee_peak(r):
    ours, theirs = (precision(r, name, "ieee", "pct_peak") for name in ("triton", "cublas"))
    return f"{ours:.0f}% of peak, cuBLAS {theirs:.0f}%", near(ours, 58)


def tf32x3(r):
    error, fp32 = precision(r, "triton", "tf32x3", "rel_error"), precision(r, "cublas", "ieee", "rel_error")
    cost = precision(r, "triton", "tf32x3", "ms") / precision(r, "triton", "tf32", "ms")
    return (f"error {error:.1e} against cuBLAS FP32's {fp32:.1e}, at {cost:.1f} times TF32's time",
            HOLDS if error < fp32 and 2.7 <= cost <= 3.3 else DIFFERS if error < fp32 else NOT)


# ---------------------------------------------------------------- 04

def config_spread(r):
    times = [row["ms"] for row in r.rows(TUNE, "configs", provider="triton")]
    return f"{max(times) / min(times):.2f} times", near(max(times) / min(times), 1.35)


def pipelining(r):
    rows = r.rows(TUNE, "configs")
    values = [next(row["pct_peak"] for row in rows if row["config"].startswith(f"128x128x32 s{stages} w4"))
              for stages in (1, 2, 4)]
    return ", ".join(f"{value:.0f}%" for value in values) + " of peak", is_true(values == sorted(values))


def tuning_cost(index, article):
    def judge(r):
        row = r.rows(TUNE, "cost")[index]
        return f"{row['seconds']:.1f} s ({row['case']})", near(row["seconds"], article)
    return judge


def tuner_gap(r):
    gaps = {row["n"]: row["gap_pct"] for row in r.rows(TUNE, "picks") if row.get("case") != "Search"}
    value, worst = gaps[4096], max(gaps.values())
    return f"{value:.1f}% at 4,096; at most {worst:.1f}% at any size", near(value, 7)


# ---------------------------------------------------------------- the table

CLAIMS = [
    ("S1", "the vector add moves 90% of the rated bandwidth", "01/providers", bandwidth),
    ("S1", "as fast as torch.add", "01/providers", as_torch_add),
    ("S1", "Triton loads 16 bytes (LDG.E.128) where the CUDA kernel loads one float", "01/providers", load_width),
    ("S1", "26 registers a thread", "01/providers", registers),
    ("S1", "misconception: \"Python kernels must be slower than CUDA\"", "01/providers", against_cuda),
    ("S1", "every BLOCK_SIZE within 5%, no trend; 64 the fastest", "01/block_size", block_sizes),
    ("S1", "the fused softmax is 1.4 to 1.8 times torch.softmax at 4,096 BF16 columns", "02/widths", at_4096),
    ("S1", "elsewhere, up to 65,536 columns, within 4% of torch.softmax (first round)", "02/widths", elsewhere),
    ("S1", "86% to 89% of the roof from 512 to 65,536 columns", "02/widths", roof),
    ("S1", "the unfused softmax takes 4.05 times as long in BF16", "02/unfused", unfused("bf16", 4.05)),
    ("S1", "and 3.79 times in FP32", "02/unfused", unfused("fp32", 3.79)),
    ("S1", "26 spilled registers at 65,536 columns, 16 warps", "02/cliff", spills(65536, 16, 26)),
    ("S1", "472 at 131,072 columns, 16 warps", "02/cliff", spills(131072, 16, 472)),
    ("S1", "174 at 131,072 columns, 32 warps", "02/cliff", spills(131072, 32, 174)),
    ("S1", "4 times slower than PyTorch at 131,072 columns", "02/cliff", cliff),
    ("S1", "32 warps are faster than 16 there", "02/cliff", more_warps),
    ("S1", "for rows this long PyTorch switches to cunn_SoftMaxForward", "02/cliff", streaming),
    ("S1", "misconception: \"fused is always faster\": the cure is the online softmax", "02/widths", online),
    ("S1", "the matmul beats cuBLAS at 512 and 1,024", "03/vs_cublas", small_sizes),
    ("S1", "and matches it at 8,192", "03/vs_cublas", large_sizes),
    ("S1", "99.0% of the tensor-core peak at its clock, cuBLAS 98.5%", "03/vs_cublas", of_peak),
    ("S1", "FP16 within 3% of BF16", "03/vs_cublas", half_types),
    ("S2", "on a tuned dense GEMM Triton does not match cuBLAS", "03/vs_cublas", s2_gemm),
    ("S1", "grouped order reads 6.7 times less from DRAM at 8,192", "counters/grouping", grouping_dram(8192, 6.7)),
    ("S1", "417 against 168 MB (2.5 times) at 4,096", "counters/grouping", grouping_dram(4096, 417 / 168)),
    ("S1", "grouping is 1.27 times faster at 8,192", "03/grouping", grouping_time(8192, 1.27)),
    ("S1", "and 1.07 times at 4,096", "03/grouping", grouping_time(4096, 1.07)),
    ("S1", "misconception: \"L2 reuse only matters for memory-bound kernels\": it let the clock run 27% higher",
     "03/grouping", grouping_clock),
    ("S1", "misconception: \"tl.dot on FP32 inputs is FP32 math\": TF32 has 100 to 270 times more error",
     "03/fp32_precision", tf32_error),
    ("S1", "TF32 runs twice as fast as FP32", "03/fp32_precision", tf32_speed),
    ("S1", "\"ieee\" reaches 58% of peak, cuBLAS 62%", "03/fp32_precision", ieee_peak),
    ("S1", "\"tf32x3\" is more exact than FP32, at three times TF32's cost", "03/fp32_precision", tf32x3),
    ("S1", "the slowest config takes 1.35 times as long as the fastest", "04/configs", config_spread),
    ("S1", "128x128x32 with 1, 2 and 4 stages: 82.7%, 91.9%, 98.0% of peak, rising", "04/configs", pipelining),
    ("S1", "the first call takes 6.1 s with an empty cache", "04/cost", tuning_cost(0, 6.1)),
    ("S1", "and 2.1 s with the kernels cached", "04/cost", tuning_cost(1, 2.1)),
    ("S1", "misconception: \"the autotuner finds the best config\": its pick at 4,096 is 7% slower", "04/picks",
     tuner_gap),
]


def table(results):
    """The claims as Markdown"""
    import tabulate
    rows = []
    for source, claim, where, judge in CLAIMS:
        here, verdict = judge(results)
        rows.append({"article": source, "claim": claim, "this GPU": here, "row": where, "verdict": verdict})
    return tabulate.tabulate([list(row.values()) for row in rows], headers=list(rows[0]), tablefmt="github",
                             disable_numparse=True)
