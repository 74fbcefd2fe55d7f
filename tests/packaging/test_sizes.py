"""Files stay under 300 lines, functions under 40 lines of code, and names say what a thing is."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for folder in ("hyper_parallel", "platform") for path in (ROOT / folder).rglob("*.py"))
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 40
VAGUE = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def docstring_lines(function: Function) -> set[int]:
    if ast.get_docstring(function, clean=False) is None:
        return set()
    return set(range(function.body[0].lineno, function.body[0].end_lineno + 1))


def code_lines(function: Function, lines: list[str]) -> int:
    """The lines of a function's body, without docstrings, blank lines and comments."""
    skipped = set().union(*(docstring_lines(inner) for inner in functions(function)))
    body = range(function.body[0].lineno, function.end_lineno + 1)
    kept = (lines[number - 1].strip() for number in body if number not in skipped)
    return sum(1 for line in kept if line and not line.startswith("#"))


def test_there_are_files_to_check() -> None:
    assert len(FILES) >= 3


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_size_of(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) < MAX_FILE_LINES, f"{path.name} has {len(lines)} lines"
    sizes = {f.name: code_lines(f, lines) for f in functions(ast.parse("\n".join(lines)))}
    long = {name: size for name, size in sizes.items() if size >= MAX_FUNCTION_LINES}
    assert not long, f"{path.name} has long functions: {long}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_name_of(path: Path) -> None:
    words = {word for part in path.relative_to(ROOT).with_suffix("").parts for word in part.split("_")}
    assert words.isdisjoint(VAGUE)


def test_code_lines_skips_docstrings_blank_lines_and_comments() -> None:
    source = 'def f():\n    """Two\n    lines."""\n    # why\n\n    x = 1\n    return x\n'
    (function,) = functions(ast.parse(source))
    assert code_lines(function, source.splitlines()) == 2
