"""Find docstrings and comments that a reflow tore: `python -m tests.check_docstrings [folder or file …]`.

An orphan is a line of at most three words that goes on below although the next word would have fitted. Blocks
that are indented after an empty line (formulas, aligned tables, pseudo-code) have rules of their own.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

LIMIT, SLACK = 110, 10  # prose may end that much before the limit
NEW = re.compile(r"[-*•|]|>>> |\.\.\. |\d+[.)] |[\w*`]+(, [\w*`]+)*( \([^)]*\))?:( |$)")  # an item, a section
STEP = re.compile(r" *(\d+)  +\S")  # a line of pseudo-code
GAP = re.compile(r"(?<=\S) {2,}(?=\S)")  # between columns


def texts(source: str) -> Iterator[list[tuple[int, str]]]:
    """Every docstring, and every run of comments that have their lines to themselves."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines = source.split("\n")[node.lineno - 1 : node.end_lineno]
                yield [(node.lineno + k, line.replace('"""', "")) for k, line in enumerate(lines)]
    run: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        (row, column), alone = token.start, not token.line[: token.start[1]].strip()
        if token.type == tokenize.COMMENT and alone:
            if run and row != run[-1][0] + 1:
                yield run
                run = []
            run.append((row, " " * column + token.string.lstrip("# ")))
    yield run


def faults(source: str) -> Iterator[tuple[int, str]]:
    """The lines where something is torn, and what."""
    for text in filter(None, texts(source)):
        bars = step = block = 0  # block: the indentation of the one that this line is in, 0 in prose
        padded = [(0, ""), *text, (0, "")]
        for (_, before), (row, line), (_, after) in zip(padded, padded[1:], padded[2:], strict=False):
            if not line.strip():
                bars = 0
                continue
            if indent(line) < block:
                block = 0
            if not block and not before.strip() and indent(line) >= indent(text[0][1]) + 4:
                block = indent(line)
            if line.lstrip().startswith("|"):
                if bars not in (0, line.count("|")):
                    yield row, "a row with other columns than the one above"
                bars = line.count("|")
            elif block:
                if number := STEP.match(line):
                    if int(number[1]) not in (1, step + 1):
                        yield row, f"line {number[1]} after line {step}"
                    step = int(number[1])
                if wrapped(re.sub(r"\s+# .*", "", before), line):
                    yield row, "wrapped inside a block"
            elif orphaned(line, after):
                yield row, "an orphan"


def orphaned(line: str, after: str) -> bool:
    """Whether a line of prose stops short of the next, which belongs to the same paragraph."""
    if not after.strip() or indent(after) != indent(line) or len(line.split()) > 3:
        return False
    fits = len(line) + 1 + len(after.split()[0]) <= LIMIT - SLACK
    return fits and not NEW.match(line.strip()) and not NEW.match(after.strip())


def wrapped(before: str, line: str) -> bool:
    """Whether a line of a block is the rest of the one before, which is full."""
    if not before.strip() or len(before) + 1 + len(line.split()[0]) <= LIMIT:
        return False
    if indent(line) > indent(before):
        return len(line.split()) <= 2
    columns, below = ({gap.end() for gap in GAP.finditer(row)} for row in (before, line))
    return indent(line) == indent(before) and bool(columns) and not columns & below


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def report(root: Path) -> list[str]:
    """What is torn in a file, or in the files of a folder."""
    sources = {path: path.read_text() for path in (sorted(root.rglob("*.py")) if root.is_dir() else [root])}
    return [f"{path}:{row}: {what}" for path, source in sources.items() for row, what in faults(source)]


if __name__ == "__main__":
    found = [line for root in sys.argv[1:] or ["fedstrata"] for line in report(Path(root))]
    sys.exit("\n".join(found) or 0)
