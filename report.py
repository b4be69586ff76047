"""What was measured, told: the README's tables from results/. Measures nothing, needs no GPU.

    python report.py            write the README's measured parts anew, from results/<gpu>/
    python report.py --check    end with status 1 where they differ from what the README holds

A measured part of the README stands between two markers, and nothing between them is typed by hand:

    <!-- measured: 01_vector_add providers provider ms gbps -->    a table of results, with these columns
    <!-- measured: claims -->                                      the articles' claims beside this GPU's figures
    <!-- end -->
"""
import argparse
import json
import re
import sys

import common

README = common.ROOT / "README.md"
MARKED = re.compile(r"(<!-- measured: (.+?) -->\n).*?(<!-- end -->)", re.S)


class Results:
    """The results of one GPU: results/<gpu>/*.json, by script and table."""

    def __init__(self, folder):
        self.files = {path.stem: loaded(path) for path in sorted(folder.glob("*.json"))}

    def rows(self, script, table, **match):
        """A table's rows whose fields equal `match`."""
        return [row for row in self.files[script]["tables"][table]["rows"]
                if all(row.get(key) == value for key, value in match.items())]

    def get(self, script, table, key, **match):
        """One field of the one row that matches; KeyError where none or several do."""
        rows = self.rows(script, table, **match)
        if len(rows) != 1:
            raise KeyError(f"{script}/{table}: {len(rows)} rows match {match}")
        return rows[0][key]


def loaded(path):
    """A results file; fails in one line where it is none."""
    try:
        return {**json.loads(path.read_text())}
    except (ValueError, TypeError, RecursionError) as error:
        common.fail(f"{path} holds no results: {error}")


def measured(results, what):
    """The Markdown that belongs between a pair of markers."""
    if what == "claims":
        import claims
        return claims.table(results)
    if what == "conditions":
        record = next(iter(results.files.values()))
        commits = sorted({f"`{str(record['commit'])[:7]}`" for record in results.files.values()})
        return common.header(record["gpu"], record["versions"]).replace("\n", "; ") + f"; code of {', '.join(commits)}"
    script, table, *columns = what.split()
    rows = results.rows(script, table)
    if columns:
        rows = [{key: row.get(key) for key in columns} for row in rows]
    return common.format_table(rows)


def readme(text, results):
    """The README with every measured part written anew."""
    return MARKED.sub(lambda m: f"{m.group(1)}{measured(results, m.group(2))}\n{m.group(3)}", text)


def main():
    p = common.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--check", action="store_true", help="write nothing; status 1 where the README is out of date")
    p.add_argument("--gpu", default="nvidia-h200", help="folder of results/ (default nvidia-h200)")
    args = p.parse_args()
    folder = common.ROOT / "results" / args.gpu
    there = sorted({path.parent.name for path in (common.ROOT / "results").glob("*/*.json")})
    if args.gpu not in there:
        p.error(f"no results/{args.gpu}; there are: {', '.join(there) or 'none'}")
    text = README.read_text()
    try:
        new = readme(text, Results(folder))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        common.fail(f"a marker of README.md names what {folder} has not: {error}")
    if args.check and new != text:
        sys.stderr.write("README.md differs from results/: run `python report.py`\n")
        raise SystemExit(1)
    if not args.check:
        common.write(README, new)


if __name__ == "__main__":
    common.run(main)
