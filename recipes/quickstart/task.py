"""Word problems, solved with a calculator and handed in with finish. Small enough for a 135M model on two CPU cores."""

import ast
import operator
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache

from palestra import Finish, Message, Task, ToolError, Trajectory, system, user

EXAMPLES = """\
Solve the problem with the tools: first compute with calculator, then hand in the number with finish.

Example 1. Problem: Ann has 12 pens and buys 7 more. How many pens?
<tool_call>
{"name": "calculator", "arguments": {"expression": "12 + 7"}}
</tool_call>
The result is 19, so:
<tool_call>
{"name": "finish", "arguments": {"answer": "19"}}
</tool_call>
Example 2. Problem: 6 trays hold 15 eggs each. How many eggs?
<tool_call>
{"name": "calculator", "arguments": {"expression": "6 * 15"}}
</tool_call>
The result is 90, so:
<tool_call>
{"name": "finish", "arguments": {"answer": "90"}}
</tool_call>"""

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def calculator(expression: str) -> str:
    """Compute a whole-number expression with +, - and *.

    Args:
        expression: such as 12 + 7
    """
    try:
        return str(_value(ast.parse(expression, mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(f"cannot compute {expression[:60]!r}; write an expression such as 12 + 7") from None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)) if abs(number) < 10**9:
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError("not a whole-number expression")


def finish(answer: str) -> Finish:
    """Hand in the answer.

    Args:
        answer: the number
    """
    return Finish(answer)


@dataclass(frozen=True)
class WordProblem(Task[None, str]):
    question: str
    answer: int

    def prompt(self, env: None) -> Sequence[Message]:
        return [system(EXAMPLES), user(f"Problem: {self.question}")]

    def tools(self, env: None) -> Sequence[Callable[..., object]]:
        return [calculator, finish]

    async def score(self, artifact: str, trajectory: Trajectory, stack: AsyncExitStack) -> float:
        return 1.0 if trajectory.stop == "finish" and str(artifact).strip() == str(self.answer) else 0.0

    async def solve(self, env: None) -> str:
        return str(self.answer)


_NAMES = ("Ann", "Ben", "Carla", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jon", "Kim", "Leo", "Mia", "Nils", "Olga", "Paul")
_THINGS = ("apples", "books", "coins", "cards", "eggs", "marbles", "nails", "pens", "shells", "stamps", "stones", "tickets")


def _problem(chance: random.Random) -> tuple[str, int]:
    name, things = chance.choice(_NAMES), chance.choice(_THINGS)
    a, b = chance.randint(12, 99), chance.randint(12, 99)
    match chance.randrange(3):
        case 0:
            return f"{name} has {a} {things} and finds {b} more. How many {things}?", a + b
        case 1:
            return f"{name} has {a + b} {things} and gives away {b}. How many {things} are left?", a
        case _:
            return f"{name} fills {a} boxes with {b} {things} each. How many {things}?", a * b


@cache
def _all(count: int) -> tuple[WordProblem, ...]:
    chance = random.Random(0)
    problems: dict[str, int] = {}
    while len(problems) < count:
        question, answer = _problem(chance)
        problems[question] = answer
    return tuple(WordProblem(f"problem-{i:04d}", question, answer) for i, (question, answer) in enumerate(problems.items()))


def heldout() -> Sequence[WordProblem]:
    """The first 200 problems: never trained on."""
    return _all(2200)[:200]


def train() -> Sequence[WordProblem]:
    return _all(2200)[200:]
