"""Word problems, solved with a calculator and handed in with finish. Small enough for a 135M model on two CPU cores."""

import ast
import operator
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache

from palestra import Finish, Message, Task, ToolCall, ToolError, Trajectory, assistant, system, user

EXAMPLES = (
    ("Ann has 12 pens and finds 7 more. How many pens?", "12 + 7", "19"),
    ("Ben fills 6 boxes with 15 eggs each. How many eggs?", "6 * 15", "90"),
    ("Eva has 81 coins and gives away 40. How many coins are left?", "81 - 40", "41"),
)

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
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(f"cannot compute {expression[:60]!r}; write an expression such as 12 + 7") from None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool) and abs(number) < 10**9:
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
        return [system("Compute with calculator, then hand in the result with finish."), *_shown(), user(self.question)]

    def tools(self, env: None) -> Sequence[Callable[..., object]]:
        return [calculator, finish]

    async def score(self, artifact: str, trajectory: Trajectory, stack: AsyncExitStack) -> float:
        return 1.0 if trajectory.stop == "finish" and str(artifact).strip() == str(self.answer) else 0.0

    async def solve(self, env: None) -> str:
        return str(self.answer)


def _shown() -> list[Message]:
    """The worked examples, as turns."""
    turns = []
    for question, expression, result in EXAMPLES:
        compute = ToolCall("call_0", "calculator", {"expression": expression})
        hand_in = ToolCall("call_0", "finish", {"answer": result})
        turns += [user(question), assistant("", compute), Message("tool", result, name="calculator"), assistant("", hand_in)]
    return turns


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
