"""Readers of SVAMP and GSM8K: word problems whose annotations become programs.

If the annotation can be read, a task has its program as ``extra_info.program``, which the scripted math team runs.
``extra_info.slip`` is the same program with one difference or quotient reversed, if its result shows the mistake.
``extra_info.steps`` is the number of operations in the equation, or of calculations in the solution.
"""

from __future__ import annotations

import ast
import keyword
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from afm.datasets.readers.row import Row, abbreviate, text_field
from afm.datasets.schema import Task, solution_result
from afm.errors import DataError
from afm.trajectory.chat import row_id

_OPERATIONS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_TIES = {"+": 1, "-": 1, "*": 2, "/": 2}
"""Operators of prefix equations and their precedence."""
_ATOM = 3
_SAME = 1e-9
_SLOT = re.compile(r"number(\d+)")
_LOOSE_MARK = re.compile(r" (?=[.,?!;:%](?:\s|$))")
_LOOSE_ENDING = re.compile(r" (?='(?:s|t|d|ll|re|ve)\b|n't\b)")
_CALCULATION = re.compile(r"<<([^=<>]+)=([^<>]+)>>")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
_SPACED = re.compile(r" ([-+*/]) ")
_NAME_WORDS = 2
_NO_NAMES = re.compile(
    r"an?|all|also|and|are|a[st]|but|by|each|every|for|from|ha[dsv]e?|hers?|he|his|i[fnst]|its|more|of|o[nr]|per|print|round"
    r"|she|so|than|that|the|their|them|there|they|this|to|was|were|which|with"
)


def read_svamp(row: Row, default: str) -> Task:
    """Read both published forms of SVAMP (arXiv 2103.07191), as in arkilpatel/SVAMP.

    Training files are ``{Question, Numbers, Equation, Answer}``. ``number0`` is the first of ``Numbers``, and the
    equation is in prefix notation. SVAMP.json is ``{ID, Body, Question, Equation, Answer, Type}``. Its equation, in
    brackets, gives the number of steps and no program.
    """
    gold = _tidy(row.get("Answer"), "Answer")
    if row.get("Numbers") is not None:
        numbers = [_tidy(text, "Numbers") for text in str(row["Numbers"]).split()]
        question = _SLOT.sub(lambda slot: _slot(slot[1], numbers), text_field(row, "Question"))
        program = [f"print({_infix(text_field(row, 'Equation'), numbers)})"]
    else:
        question, program = _joined(text_field(row, "Body"), text_field(row, "Question")), []
    steps = sum(word in _TIES for word in str(row.get("Equation") or "").split())
    extra: dict[str, Any] = {"steps": steps} | program_fields(program, gold)
    if kind := row.get("Type"):
        extra["type"] = str(kind).replace("Divison", "Division")
    return Task(
        id=row_id(row, "ID") or default,
        question=_plain_sentences(question),
        ground_truth=gold,
        extra_info=extra,
    )


def read_gsm8k(row: Row, default: str) -> Task:
    """Read GSM8K: ``{question, answer}``, as in openai/gsm8k. The answer is a worked solution that ends in ``#### 18``.

    Its calculations, such as ``<<48/2=24>>``, become the lines of the program.
    """
    solution = text_field(row, "answer")
    gold = solution_result(solution)
    if gold is None:
        raise DataError(
            f"`answer`: expected a last line like '#### 18', got {solution.splitlines()[-1][:60]!r}"
        )
    return Task(
        id=row_id(row) or default,
        question=text_field(row, "question"),
        ground_truth=gold,
        extra_info={"steps": len(_CALCULATION.findall(solution))}
        | program_fields(_named_steps(solution), gold),
    )


def program_fields(lines: list[str], gold: str) -> dict[str, str]:
    """Return ``extra_info.program``, if it can run, and its ``slip``, if there is one.

    The program rounds to the gold answer's decimals if only that makes them equal.
    """
    try:
        value = printed_number(lines)
    except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
        return {}
    if value is None:
        return {}
    decimals = len(gold.partition(".")[2])
    slip = _slip(lines, value)
    if value != float(gold) and round(value, decimals) == float(gold):
        printed = lines[-1].removeprefix("print(").removesuffix(")")
        lines = [*lines[:-1], f"print(round({printed}, {decimals}))"]
    return {"program": "\n".join(lines)} | ({"slip": slip} if slip else {})


def _slip(lines: Sequence[str], value: float) -> str | None:
    """Reverse one difference or quotient, so that the result is negative, or a fraction in place of a whole number."""
    for index, line in enumerate(lines):
        for number in range(line.count("-") + line.count("/")):
            statement = ast.parse(line)
            found = [
                node
                for node in ast.walk(statement)
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.Div)
            ]
            if number >= len(found):
                break
            node = found[number]
            node.left, node.right = node.right, node.left
            wrong = [*lines[:index], _SPACED.sub(r"\1", ast.unparse(statement)), *lines[index + 1 :]]
            try:
                result = printed_number(wrong)
            except ZeroDivisionError:
                continue
            if result is not None and _is_implausible(result, value):
                return "\n".join(wrong)
    return None


def _is_implausible(result: float, value: float) -> bool:
    """Return whether ``result`` is negative or a fraction, and ``value`` is not."""
    return (result < 0 <= value) or (float(value).is_integer() and not float(result).is_integer())


def printed_number(program: Sequence[str]) -> float | None:
    """Return what the last line prints, or ``None`` without a program. Supports only assignments and one ``print``."""
    values: dict[str, float] = {}
    for line in program:
        statement = ast.parse(line).body[0]
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=expression):
                values[name] = _value(expression, values)
            case ast.Expr(value=ast.Call(args=[expression])):
                return _value(expression, values)
    return None


def _value(node: ast.expr, names: Mapping[str, float]) -> float:
    match node:
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_value(left, names), _value(right, names))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, names)
        case ast.Name(id=name):
            return names[name]
        case ast.Constant(value=int() | float() as number):
            return number
    raise ValueError(f"not arithmetic: {ast.unparse(node)}")


def _tidy(value: Any, key: str) -> str:
    """Return a number as written in text: ``56`` for ``56.0``."""
    try:
        number = float(value)
        return str(int(number)) if number.is_integer() else repr(number)
    except (TypeError, ValueError, OverflowError):
        raise DataError(f"`{key}`: expected a number, got {abbreviate(value)}") from None


def _slot(index: str, numbers: Sequence[str]) -> str:
    if int(index) >= len(numbers):
        raise DataError(f"`Question`: number{index} is not among the {len(numbers)} of `Numbers`")
    return numbers[int(index)]


def _infix(equation: str, numbers: Sequence[str]) -> str:
    """Convert ``* number0 + number1 2.0`` to ``5*(3+2)``, with only the necessary brackets."""
    words = iter(equation.split())

    def read() -> tuple[str, int]:
        word = next(words, "")
        if word not in _TIES:
            slot = _SLOT.fullmatch(word)
            return (_slot(slot[1], numbers) if slot else _tidy(word, "Equation")), _ATOM
        ties, (left, left_ties), (right, right_ties) = _TIES[word], read(), read()
        left = f"({left})" if left_ties < ties else left
        right = f"({right})" if right_ties < ties or (right_ties == ties and word in "-/") else right
        return f"{left}{word}{right}", ties

    expression, _ = read()
    if rest := list(words):
        raise DataError(f"`Equation`: {abbreviate(' '.join(rest))} is left over in {abbreviate(equation)}")
    return expression


def _joined(body: str, question: str) -> str:
    """Join body and question. The body may be a clause: "If there are 11 sets" and "How many chairs do they have?"."""
    if body[-1] in ".?!":
        return f"{body} {question}"
    return f"{body.rstrip(', ')}, {question[0].lower()}{question[1:]}"


def _plain_sentences(text: str) -> str:
    """Rejoin words that a tokeniser split, and capitalise the beginning of each sentence."""
    text = _LOOSE_ENDING.sub("", _LOOSE_MARK.sub("", " ".join(text.split())))
    text = text.replace("$ ", "$")
    return re.sub(r"(?:^|(?<=[.?!] ))[a-z]", lambda first: first[0].upper(), text)


def _named_steps(solution: str) -> list[str]:
    """Return the calculations of a worked solution as program lines. A number from an earlier line becomes its name.

    Names come from the words after the result: ``<<48/2=24>>24 clips in May`` becomes ``clips_may = 48/2``.
    """
    lines: list[str] = []
    results: dict[float, str] = {}
    names: set[str] = set()
    for match in _CALCULATION.finditer(solution):
        expression = _PERCENT.sub(r"(\1/100)", match[1].replace("$", "").replace(",", "").replace(" ", ""))
        result = _NUMBER.search(match[2].replace(",", ""))
        if result is None:
            return []
        expression = _with_names(expression, results)
        name = _name(solution[match.end() :], names)
        names.add(name)
        lines.append(f"{name} = {expression}")
        results[float(result[0])] = name
    return [*lines, f"print({lines[-1].partition(' = ')[0]})"] if lines else []


def _with_names(expression: str, results: Mapping[float, str]) -> str:
    return _NUMBER.sub(lambda number: results.get(float(number[0]), number[0]), expression)


def _name(behind: str, taken: set[str]) -> str:
    """Return a name that no earlier line has, from the words in the rest of the sentence."""
    sentence = re.split(
        r"[.;:\n]\s|[.;:\n]?$|<<", re.sub(r"^[\s$]*[\d.,]*", "", behind.partition("\n")[0]), maxsplit=1
    )[0]
    words = [word for word in re.findall(r"[a-z]+", sentence.lower()) if not _NO_NAMES.fullmatch(word)]
    name = "_".join(words[:_NAME_WORDS]) or "result"
    if name in taken or keyword.iskeyword(name):
        number = 2
        while f"{name}_{number}" in taken:
            number += 1
        name = f"{name}_{number}"
    return name
