"""Mutations of the library's source for `mutate.py`: which there are, and a choice that edits elsewhere leave alone."""

import ast
import collections
import hashlib
import itertools
import re
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any, NamedTuple

# The modules of each area, and its size in hundreds of lines: its share of the mutations above the first six.
AREAS = {
    "steps": (1, "steps.py"),
    "engine": (25, "engine/_*.py"),
    "data": (7, "data/_shuffle.py data/_arrays.py data/_stream.py"),
    "tasks": (7, "tasks/_*.py"),
    "nn": (25, "nn/_*.py"),
    "optim": (7, "optim/_*.py"),
    "record": (10, "_disk.py _json.py record/_[cr]*.py record/_state_files.py record/_metric_log.py"),
    "sweeps": (25, "sweeps/_*.py"),
    "search": (3, "search.py"),
}
LEAST = 6
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift},
    **{ast.BitAnd: ast.BitOr, ast.BitXor: ast.BitOr},
}
OPPOSITES = "min max, any all, minimum maximum, floor ceil, argmin argmax, zeros ones, sum mean, append remove"
RENAMED = {a: b for pair in OPPOSITES.split(", ") for a, b in (pair.split(), reversed(pair.split()))}
NOT_SWAPPED = {"asarray", "array", "zeros", "ones", "full", "broadcast_to", "maximum", "minimum", "add", "multiply"}
# Calls with messages, or for the type checker.
SKIPPED = re.compile(r"print|warn|warning|info|debug|cast|isinstance|\w*Error|getLogger")
TEXT = (ast.JoinedStr, ast.List, ast.Tuple)
# Fields of a statement that are blocks, annotations, or else never mutated.
BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")
FIXED = (*BLOCKS, "annotation", "returns", "decorator_list", "bases", "keywords", "type_params", "args", "type")


type Node = ast.expr | ast.stmt
type Change = tuple[str, Node, Node]
type Scoped = tuple[ast.stmt, str, str | None]


class Mutation(NamedTuple):
    """One change of one module: ``source[start:end]`` becomes ``after``; tests that execute ``lines`` may notice."""

    id: str
    area: str
    module: str
    line: int
    lines: Set[int]
    kind: str
    start: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        before, after = (text if len(text) <= 90 else text[:90] + " …" for text in (self.before, self.after))
        return f"{self.area:7} jaxnn/{self.module}:{self.line}  {self.kind}: {before}  ->  {after}"


def changed[N: ast.AST](node: N, **fields: Any) -> N:
    """A shallow copy of ``node`` with other fields."""
    return ast.copy_location(type(node)(**{name: getattr(node, name, None) for name in node._fields} | fields), node)


def span(node: Node) -> range:
    """The lines of ``node``."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def negated(test: ast.expr) -> ast.expr:
    """``not test``, without a double negation."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
    return ast.UnaryOp(ast.Not(), test)


def in_expression(node: ast.AST) -> Iterator[Change]:
    """Yields ``(kind, node, replacement)`` for each mutation of an expression and of those within it."""
    name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    if isinstance(node, ast.JoinedStr) or SKIPPED.fullmatch(name):
        return
    match node:
        case ast.Compare(ops=[op, *rest]):
            yield "comparison", node, changed(node, ops=[OPERATORS[type(op)](), *rest])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            if not any(isinstance(side, TEXT) or isinstance(getattr(side, "value", 0), str) for side in (left, right)):
                yield "arithmetic", node, changed(node, op=OPERATORS[type(op)]())
        case ast.BoolOp(op=op):
            yield "boolean", node, changed(node, op=OPERATORS[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield "boolean" if isinstance(node.op, ast.Not) else "arithmetic", node, operand
        case ast.Constant(value=bool() | int() | float() as value):
            other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value * 2 or 1.0
            yield "constant", node, ast.Constant(other)
        case ast.keyword(arg="axis", value=value) if ast.unparse(value) in ("0", "1", "-1"):
            yield "axis", value, ast.Constant(1 if ast.unparse(value) == "0" else 0)
        case ast.IfExp(test=test):
            yield "condition", test, negated(test)
        case ast.Call(func=func, args=args):
            if name in RENAMED:
                field = "id" if isinstance(func, ast.Name) else "attr"
                yield "opposite", func, changed(func, **{field: RENAMED[name]})
            at = 1 if name == "where" else 0
            if re.match(r"(jnp|np|jax|lax)\.", ast.unparse(func)) and len(args) > at + 1 and name not in NOT_SWAPPED:
                swapped = [*args[:at], args[at + 1], args[at], *args[at + 2 :]]
                yield "arguments", node, changed(node, args=swapped)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.comprehension):
            yield from (("condition", test, negated(test)) for test in child.ifs)
        if not isinstance(child, ast.arg):
            yield from in_expression(child)


def in_statement(node: ast.stmt, returns: str) -> Iterator[Change]:
    """Yields the mutations of a statement without the blocks in it, in a function that returns ``returns``."""
    text = ast.unparse(node)
    if isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.TypeAlias)) or "TYPE_CHECKING" in text:
        return
    match node:
        case ast.If(test=test):
            yield "condition", test, negated(test)
        case ast.Expr(value=ast.Call(func=func)) if not SKIPPED.fullmatch(ast.unparse(func).rpartition(".")[2]):
            yield "dropped", node, ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign(target=ast.Attribute()):
            yield "dropped", node, ast.Pass()
        case ast.Return(value=ast.Tuple(elts=[first, second, *rest]) as value):
            yield "return", value, ast.Tuple([second, first, *rest], ast.Load())
        case ast.Return(value=ast.expr() as value) if returns == "bool":
            yield "return", value, negated(value)
        case ast.Return(value=ast.Call(args=[first, *_]) as value) if not isinstance(first, ast.Starred):
            yield "return", value, first
        case ast.Return(value=ast.Name() | ast.Attribute() | ast.BinOp() as value):
            yield "return", value, ast.Constant(None)
    if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
        yield "arithmetic", node, changed(node, op=OPERATORS[type(node.op)]())
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            yield from in_expression(default)
    for name, field in ast.iter_fields(node):
        for child in field if isinstance(field, list) else [field]:
            if name not in FIXED and isinstance(child, ast.AST):
                yield from in_expression(child)


def statements(body: list[ast.stmt], scope: str = "", returns: str | None = None) -> Iterator[Scoped]:
    """Yields each statement, nested too, its scope's name and return annotation (None outside functions)."""
    for node in body:
        yield node, scope, returns
        inner = scope, returns
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = f"{scope}.{node.name}", ast.unparse(node.returns) if node.returns else ""
        elif isinstance(node, ast.ClassDef):
            inner = f"{scope}.{node.name}", None
        for name in BLOCKS:
            for part in getattr(node, name, []):
                yield from statements([part] if isinstance(part, ast.stmt) else part.body, *inner)


def candidates(root: Path, area: str, module: str, seed: int) -> Iterator[tuple[str, Mutation]]:
    """Yields every mutation of ``jaxnn/<module>`` with the scope and text of its statement."""
    source = (root / "jaxnn" / module).read_bytes()
    starts = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
    found, occurrences = list(statements(ast.parse(source).body)), collections.Counter[str]()
    # Importing a module executes the other lines, in every test.
    in_functions = {line for node, _, returns in found if returns is not None for line in span(node)}
    for node, scope, returns in found:
        header = changed(node, **{name: [] for name in (*BLOCKS, "decorator_list") if hasattr(node, name)})
        text, body = f"{scope}\0{ast.unparse(header)}", getattr(node, "body", None)
        lines = set(span(node)) - {line for inner in body or () for line in span(inner)}
        for kind, old, new in in_statement(node, returns or ""):
            if ast.unparse(new) == ast.unparse(old):
                continue
            key = f"{seed}\0{Path(module).name}\0{text}\0{kind}"
            occurrences[key] += 1
            digest = hashlib.sha256(f"{key}\0{occurrences[key]}".encode()).hexdigest()
            after = ast.unparse(new) if isinstance(new, ast.stmt) else f"({ast.unparse(new)})"
            start, end = starts[old.lineno - 1] + old.col_offset, starts[span(old)[-1] - 1] + (old.end_col_offset or 0)
            before, reached = " ".join(source[start:end].decode().split()), in_functions if returns is None else lines
            yield text, Mutation(digest, area, module, old.lineno, reached, kind, start, end, before, after)


def choose(root: Path, count: int, seed: int) -> list[Mutation]:
    """Returns ``count`` mutations, at most one per statement: those of the least ids, the areas taking turns."""
    least = min(LEAST, count // len(AREAS))
    total, done, ranked = sum(size for size, _ in AREAS.values()), 0, []
    for area, (size, patterns) in AREAS.items():
        # Rounds the sums, so that the shares add up.
        spare = count - least * len(AREAS)
        share = least + round(spare * (done + size) / total) - round(spare * done / total)
        done += size
        library = root / "jaxnn"
        paths = {path.relative_to(library) for pattern in patterns.split() for path in library.glob(pattern)}
        best: dict[tuple[str, str], Mutation] = {}
        # People judge what figures look like.
        for module in sorted(str(path) for path in paths if not re.search("figure|plot", path.name)):
            for statement, mutation in candidates(root, area, module, seed):
                best[module, statement] = min(mutation, best.get((module, statement), mutation))
        ranked += [(index / share, mutation) for index, mutation in enumerate(sorted(best.values())[:share])]
    return [mutation for _, mutation in sorted(ranked)]
