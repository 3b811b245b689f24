"""Type stubs of the public packages: `python scripts/stubs.py` writes them from the signatures and docstrings of the code.

A function whose result depends on a flag gets an overload per value of the flag, which would repeat its options four times in the code.
The result of such a function is a union: its first member is the result without flags, and then each flag has one, in their order. One
more member is the result with all flags on.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

PACKAGES = "tl_attention", "tl_attention.distributed"
FLAGS = (
    "return_attn_probs",
    "return_max_logits",
    "return_softmax_lse",
    "return_lse",
    "return_aux",
    "return_kernel",
)
HEADER = "# Written by `python scripts/stubs.py`: change the signatures and docstrings of the code instead\n"


def path_of(package: str) -> Path:
    """Stub of a package, beside its code."""
    return Path(importlib.import_module(package).__file__ or "").with_suffix(".pyi")


def stub(package: str) -> str:
    """Text of the stub of a package: its public names, formatted."""
    module = importlib.import_module(package)
    imports = {"from typing import Literal, overload"}
    bodies = []
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isfunction(value) and (text := _overloads(value, set(module.__all__), imports)):
            bodies.append(text)
        elif hasattr(value, "__module__"):
            imports.add(f"from {value.__module__} import {name} as {name}")
        else:
            bodies.append(f"{name}: {type(value).__name__}")
    if package == PACKAGES[0]:
        modules = {name for name in dir(module) if not name.startswith("_")} - set(module.__all__)
        imports |= {f"from tl_attention import {name} as {name}" for name in modules}
    text = "\n".join([HEADER, *sorted(imports), f"__all__ = {module.__all__!r}", *bodies])
    return _formatted(text)


def flags_of(function: Callable[..., object]) -> list[str]:
    """Parameters of a function that decide on what it returns."""
    return [name for name in inspect.signature(function).parameters if name in FLAGS]


def _overloads(function: Callable[..., object], public: set[str], imports: set[str]) -> str:
    """Overloads of a function by its flags, with its docstring; empty if it has no flag.

    Args:
        public: names that the stub has anyway.
        imports: gets the other ones that the overloads need.
    """
    flags = flags_of(function)
    if not flags:
        return ""
    module = inspect.getmodule(function)
    tree = ast.parse(inspect.getsource(module))
    node = next(x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == function.__name__)
    node.args.kwarg = None  # unknown keywords, which the function refuses
    node.body = [ast.Expr(ast.Constant(...))]
    node.decorator_list = [ast.Name("overload")]
    forms = list(_forms(node, flags, _members(node.returns, tree)))
    names = {x.id for form in forms for x in ast.walk(form) if isinstance(x, ast.Name)}
    imports |= _imports_for(names - public, module, tree)
    docstring = textwrap.indent(f'"""{inspect.cleandoc(function.__doc__)}\n"""', " " * 4)
    documented = ast.unparse(forms[0]).removesuffix("...").rstrip() + f"\n{docstring}\n"
    return "\n".join([documented, *map(ast.unparse, forms[1:])])


def _forms(node: ast.FunctionDef, flags: list[str], results: list[ast.expr]) -> Iterator[ast.FunctionDef]:
    """Forms of a function: all flags off; one of them, or all, on, as a keyword and by position; flags whose values are not known."""
    off, *on = results
    form = copy.deepcopy(node)
    form.returns = off
    for flag in flags:
        _parameter(form, flag).annotation = _values(form, flag)[0]
    yield form
    cases = [[flag] for flag in flags] + [flags] * (len(on) > len(flags))
    for are_on, result in zip(cases, on, strict=True):
        form = copy.deepcopy(node)
        form.returns = result
        for other in flags:
            _parameter(form, other).annotation = _values(form, other)[other in are_on]
        positional, keywords = ([x.arg for x in args] for args in (form.args.args, form.args.kwonlyargs))
        for flag in are_on:
            if flag in keywords:
                form.args.kw_defaults[keywords.index(flag)] = None
        flag = next((flag for flag in are_on if flag in positional), None)
        if flag is None:
            yield form
            continue
        by_position = copy.deepcopy(form)
        place = positional.index(flag)
        after = len(positional) - place - 1
        arguments = form.args
        # A keyword without a default, and so are the parameters after it
        arguments.kwonlyargs = arguments.args[place:] + arguments.kwonlyargs
        arguments.kw_defaults = [
            None,
            *arguments.defaults[len(arguments.defaults) - after :],
            *arguments.kw_defaults,
        ]
        del arguments.args[place:], arguments.defaults[len(arguments.defaults) - after - 1 :]
        yield form
        del by_position.args.defaults[: len(by_position.args.defaults) - after]
        yield by_position
    node.returns = _union(results)
    yield node


def _parameter(node: ast.FunctionDef, name: str) -> ast.arg:
    return next(x for x in (*node.args.args, *node.args.kwonlyargs) if x.arg == name)


def _values(node: ast.FunctionDef, flag: str) -> tuple[ast.expr, ast.expr]:
    """Types of a flag that is off and on: a bool, or None and the rest of a union with None."""
    annotation = _parameter(node, flag).annotation
    if isinstance(annotation, ast.BinOp):
        return annotation.right, annotation.left
    return tuple(ast.parse(f"Literal[{value}]", mode="eval").body for value in (False, True))


def _members(annotation: ast.expr, tree: ast.Module) -> list[ast.expr]:
    """Members of a union, whose alias a module may define."""
    if isinstance(annotation, ast.BinOp):
        return [*_members(annotation.left, tree), *_members(annotation.right, tree)]
    if isinstance(annotation, ast.Name):
        for x in tree.body:
            if (
                isinstance(x, ast.Assign)
                and x.targets[0].id == annotation.id
                and isinstance(x.value, ast.BinOp)
            ):
                return _members(x.value, tree)
    return [annotation]


def _union(members: list[ast.expr]) -> ast.expr:
    return ast.parse(" | ".join(map(ast.unparse, members)), mode="eval").body


def _imports_for(names: set[str], module: ModuleType, tree: ast.Module) -> set[str]:
    """Imports of names that a module imports or defines."""
    found = set()
    for x in ast.walk(tree):
        if isinstance(x, ast.ImportFrom) and x.module != "__future__":
            found |= {f"from {x.module} import {alias.name}" for alias in x.names if alias.name in names}
        elif isinstance(x, ast.Import):
            found |= {f"import {alias.name}" for alias in x.names if alias.name in names}
    defined = {
        x.targets[0].id for x in tree.body if isinstance(x, ast.Assign) and isinstance(x.targets[0], ast.Name)
    }
    return found | {f"from {module.__name__} import {name}" for name in names & defined}


def _formatted(text: str) -> str:
    for words in (["check", "--select=I", "--fix", "--quiet"], ["format", "--quiet"]):
        command = [sys.executable, "-m", "ruff", *words, "--stdin-filename=__init__.pyi", "-"]
        text = subprocess.run(command, input=text, text=True, capture_output=True, check=True).stdout
    return text


def main() -> None:
    """Write the stubs."""
    for package in PACKAGES:
        path_of(package).write_text(stub(package))


if __name__ == "__main__":
    main()
