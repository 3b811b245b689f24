"""CUDA of a Program: one function per output, which kernels call per score.

As a function of CUDA a program costs TileLang no time. As expressions of TileLang, a value that several others need would be written
out in each of them.
"""

from __future__ import annotations

import math

from tl_attention.kernels.cuda import source
from tl_attention.kernels.scores.accurate_code import ACCURATE_EXPRESSIONS
from tl_attention.problem.program import BOOL, FLOAT, INT, LONG, MASK, SHOW_ALL, SHOW_TO_LAST, Program, Value

TYPES = {FLOAT: "float", INT: "int", LONG: "long long", BOOL: "bool"}
# Dtype of a captured tensor -> its type in memory
STORED = {
    "float32": "float",
    "bfloat16": "__nv_bfloat16",
    "float16": "__half",
    "int64": "long long",
    "int32": "int",
    "int16": "short",
    "int8": "signed char",
    "uint8": "unsigned char",
    "bool": "unsigned char",
}
MAX_CHAIN = 16  # integer exponent up to which a power is a chain of products
# Arguments of all functions; those of tensors and numbers follow. The last two are the query and the key as floats
LEAVES = "float score, int batch, int head, int query, int key, float query_position, float key_position"


def program_code(program: Program, accurate: bool = False) -> str:
    """Functions of a program: tl_attention_new_score; _seen, whose first argument is how keys are seen, program.MASK or another; _slope;
    and per gradient _factor0, _target0, .. the offset that it is added at.

    accurate: with the functions of accurate_code.py.
    """
    parameters = [LEAVES]
    for i, captured in enumerate(program.tensors):
        dims = range(max(captured.ndim, 1))
        parameters += [f"const void* tensor{i}", *(f"int size{i}_{dim}, int stride{i}_{dim}" for dim in dims)]
    parameters += [f"{TYPES[dtype]} number{i}" for i, dtype in enumerate(program.numbers)]
    of_tensors = parameters.copy()  # of functions that no fetched value is given to
    parameters += [
        f"{fetched_type(program, i)} fetched{i}" for i in (*program.dense_loads, *program.diagonals)
    ]

    def function(
        name: str, dtype: str, roots: list[int], result: str, first: str = "", of: list[str] | None = None
    ) -> str:
        lines = [
            f"  const {TYPES[program.values[i].dtype]} v{i} = {_expression(program, i, of is None, accurate)};"
            for i in sorted(program.needed(roots))
        ]
        head = f"static __device__ __forceinline__ {TYPES[dtype]} tl_attention_{name}({first}{', '.join(of or parameters)}) {{"
        return "\n".join([head, *lines, f"  return {result};", "}"])

    functions = []
    for i in program.dense_loads:
        value = program.values[i]
        terms = _terms(program, value)[:-2]
        functions.append(
            function(f"base{i}", INT, list(value.args[:-2]), " + ".join(terms) or "0", of=of_tensors)
        )
    for i in program.diagonals:
        functions.append(function(f"diagonal{i}", FLOAT, [i], f"v{i}", of=of_tensors))
    if program.score is not None:
        functions.append(function("new_score", FLOAT, [program.score], f"v{program.score}"))
    if program.hides and not program.bits:
        of_mask = "true" if program.mask is None else f"v{program.mask}"
        roots = [] if program.mask is None else [program.mask]
        functions.append(
            function(
                "seen",
                BOOL,
                roots,
                f"how & {SHOW_ALL & SHOW_TO_LAST} | (how == {MASK} & {of_mask})",
                "int how, ",
            )
        )
    if program.slope is not None:
        functions.append(function("slope", FLOAT, [program.slope], f"v{program.slope}"))
    for i, gradient in enumerate(program.gradients):
        functions.append(function(f"factor{i}", FLOAT, [gradient.factor], f"v{gradient.factor}"))
        if i in program.stored:
            continue
        # The sums are contiguous and have the sizes of the tensor
        offset = "0"
        for dim, index in enumerate(gradient.index):
            offset = (
                f"({offset}) * size{gradient.tensor}_{dim} + {_index(program, gradient.tensor, dim, index)}"
            )
        of = of_tensors if i in program.diagonal_gradients else None
        functions.append(function(f"target{i}", INT, list(gradient.index), offset, of=of))
    return _called_code(program, accurate) + "\n".join(functions) + "\n"


def _called_code(program: Program, accurate: bool) -> str:
    """CUDA that the functions of a program call, or the kernel with them."""
    code = source("program")
    if program.gradients:
        code += source("program_gradients")
    if accurate:
        code += source("accurate").removeprefix("\n")
    if program.bits:
        code += source("bits")
    if program.dense_loads or program.stored:
        code += source("dense")
    if program.diagonals or program.diagonal_gradients:
        code += source("diagonals")
    if accurate and program.diagonal_gradients:
        code += source("diagonals_fp32")
    return code


def _expression(program: Program, i: int, fetches: bool, accurate: bool) -> str:
    """Right-hand side of the declaration of a value. fetches: fetched values are arguments."""
    value = program.values[i]
    if fetches and (i in program.dense_loads or i in program.diagonals):
        return f"fetched{i}"
    args = [f"v{arg}" for arg in value.args]
    if value.op in ("score", "batch", "head", "query", "key"):
        return value.op
    if value.op == "constant":
        return _literal(value.data)
    if value.op == "number":
        return f"number{value.data}"
    if value.op == "load":
        return _load(program, value)
    if value.op == "cast":
        position = _position(program, value.args[0]) if value.dtype == FLOAT else None
        return position or f"({TYPES[value.dtype]}){args[0]}"
    if value.op == "div" and program.values[value.args[1]].op in ("constant", "number"):
        return f"{args[0]} * (1.f / {args[1]})"  # the reciprocal does not change from score to score
    if value.op == "pow" and (power := _constant_power(program, *value.args)):
        return power
    if value.op in ("floor_divide", "remainder") and value.dtype != FLOAT:
        if all(_never_negative(program, arg) for arg in value.args):
            return f"{args[0]} {'/' if value.op == 'floor_divide' else '%'} {args[1]}"
        return f"tl_attention_{value.op}({', '.join(args)})"
    if value.op == "not" and value.dtype == BOOL:
        return f"!{args[0]}"
    tables = [EXPRESSIONS]
    if value.dtype == FLOAT:
        tables = [*([ACCURATE_EXPRESSIONS] if accurate else []), FLOAT_EXPRESSIONS, EXPRESSIONS]
    expression = next(table[value.op] for table in tables if value.op in table)
    return expression.format(*args)


def _literal(number: float | int | bool) -> str:
    if isinstance(number, bool):
        return "true" if number else "false"
    if isinstance(number, int):
        return f"{number}ll" if abs(number) >= 2**31 else f"({number})"
    if math.isnan(number):
        return "__int_as_float(0x7fffffff)"
    if math.isinf(number):
        return f"({'-' if number < 0 else ''}__int_as_float(0x7f800000))"
    return f"({number!r}f)"


def fetched_type(program: Program, i: int) -> str:
    """Type of a value that is loaded by a dense index."""
    return TYPES[program.values[i].dtype]


def _terms(program: Program, value: Value) -> list[str]:
    """Offsets in a captured tensor by the dimensions of an index."""
    return [
        f"{_index(program, value.data, dim, index)} * stride{value.data}_{dim}"
        for dim, index in enumerate(value.args)
    ]


def _load(program: Program, value: Value) -> str:
    tensor, captured, terms = value.data, program.tensors[value.data], _terms(program, value)
    load = f"tl_attention_captured<{STORED[captured.dtype]}, {TYPES[INT if value.dtype == BOOL else value.dtype]}>"
    loaded = f"{load}(tensor{tensor}, {' + '.join(terms) or '0'})"
    return f"{loaded} != 0" if value.dtype == BOOL else loaded


def _index(program: Program, tensor: int, dim: int, index: int) -> str:
    """Index into a dimension of a captured tensor, within its size. Negative indices count from the end.

    The host compares a direct index by b, h, q_idx or kv_idx with the size. Rows of a tile past the last query or key read the last.
    """
    if program.values[index].op in ("batch", "head"):
        return f"v{index}"
    size = f"size{tensor}_{dim}"
    if _never_negative(program, index) and program.values[index].dtype == INT:
        return f"min(v{index}, {size} - 1)"
    return f"tl_attention_index(v{index}, {size})"


def _never_negative(program: Program, i: int) -> bool:
    value = program.values[i]
    args = [_never_negative(program, arg) for arg in value.args if program.values[arg].dtype != FLOAT]
    if value.op in ("batch", "head", "query", "key"):
        return True
    if value.op == "constant":
        return value.data >= 0
    if value.op in ("add", "mul", "minimum", "and", "floor_divide"):
        return all(args)
    if value.op == "maximum":
        return any(args)
    if value.op == "remainder":
        return args[1]
    return value.op == "cast" and all(args) and value.dtype != FLOAT and bool(args)


def _position(program: Program, i: int) -> str | None:
    """A sum of positions and numbers as a float, exact below 2**24; None for other values."""
    value = program.values[i]
    if value.dtype != INT:
        return None
    if value.op in ("query", "key"):
        return f"{value.op}_position"
    if value.op in ("batch", "head", "number", "constant"):
        return f"(float)v{i}" if value.op != "constant" else _literal(float(value.data))
    if value.op in ("add", "sub"):
        x, y = (_position(program, arg) for arg in value.args)
        if x is None or y is None:
            return None
        return f"({x} {'+' if value.op == 'add' else '-'} {y})"
    return None


def _constant_power(program: Program, base: int, exponent: int) -> str | None:
    """A power with a small integer or a half as exponent; None for others."""
    value, x = program.values[exponent], f"v{base}"
    if value.op != "constant":
        return None
    if value.data in (0.5, -0.5):
        return f"{'sqrtf' if value.data > 0 else 'rsqrtf'}({x})"
    if value.data != int(value.data) or not 1 <= abs(value.data) <= MAX_CHAIN:
        return None
    product = " * ".join([x] * int(abs(value.data)))
    return product if value.data > 0 else f"1.f / ({product})"


# Operations of trace_ops.OPS on floats, where they differ from those on other dtypes
FLOAT_EXPRESSIONS: dict[str, str] = {
    "maximum": "fmaxf({0}, {1})",
    "minimum": "fminf({0}, {1})",
    "abs": "fabsf({0})",
    "floor_divide": "floorf({0} / {1})",
    "remainder": "{0} - floorf({0} / {1}) * {1}",
    "fmod": "{0} - truncf({0} / {1}) * {1}",
    "sign": "({0} > 0.f ? 1.f : {0} < 0.f ? -1.f : {0})",
}
EXPRESSIONS: dict[str, str] = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "maximum": "max({0}, {1})",
    "minimum": "min({0}, {1})",
    "fmod": "{0} % {1}",
    "pow": "tl_attention_power({0}, {1})",
    "abs": "abs({0})",
    "neg": "-{0}",
    "sign": "({0} > 0) - ({0} < 0)",
    "detach": "{0}",
    "where": "{0} ? {1} : {2}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "not": "~{0}",
    "shift_left": "{0} << {1}",
    "shift_right": "{0} >> {1}",
    "sigmoid": "1.f / (1.f + expf(-{0}))",
    "sin": "__sinf(tl_attention_within_pi({0}))",
    "cos": "__cosf(tl_attention_within_pi({0}))",
    "round": "rintf({0})",
} | {
    name: f"{name}f({{0}})"
    for name in (
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log1p",
        "sqrt",
        "rsqrt",
        "tanh",
        "atan",
        "erf",
        "floor",
        "ceil",
        "trunc",
    )
}
