"""An agent that knows the answer and works for it like any other: it searches, views, edits, checks and finishes, with a model's
tools. It shows that a bug can be mended end to end: `backend.kind=scripted backend.script=factory_oracle:mend`.
"""

from factory import recipes

from palestra.message import JSON, Message, ToolCall, assistant
from palestra.swe.factory.edit import apply
from palestra.swe.factory.packages import python_files
from palestra.swe.factory.recipe import Recipe

AROUND = 3
"""Lines that it views on either side."""


def mend(said: str) -> Message:
    """The next turn of whoever was told this. What it says in each turn tells it later how far it is."""
    known = [each for each in recipes() if each.statement in said]  # two bugs may look the same from outside
    first = known[0]
    start, end, _, _ = _change(first)
    turns = [
        _turn("What is there?", "bash", command="git log --oneline && git status --short && ls"),
        _turn(f"Where is {first.symbol}?", "search_symbol", name=first.symbol.rpartition(".")[2]),
        _turn("What does it say?", "view", path=first.edit.path, start=max(1, start - AROUND), end=end + AROUND),
    ]
    if "is edited. It now reads:" not in said:
        for number, each in enumerate(known, 1):
            _, _, old, new = _change(each)
            turns.append(_turn(f"Attempt {number}.", "edit", path=each.edit.path, old=old, new=new))
    turns += [
        _turn("What has changed?", "bash", command="git diff --stat"),
        _turn("It is mended.", "finish", answer=f"{first.symbol} does again what it should."),
    ]
    return next(turn for turn in turns if turn.text not in said)


def _turn(text: str, tool: str, **arguments: JSON) -> Message:
    return assistant(text, ToolCall("call_0", tool, arguments))


def _change(recipe: Recipe) -> tuple[int, int, str, str]:
    """The lines that are wrong, from where to where; they, with as many around them as make them unique; and what is right."""
    files, path = python_files(recipe.package), recipe.edit.path
    right, whole = files[path].decode(), apply([recipe.edit], files)[path].decode()
    before, after = whole.splitlines(keepends=True), right.splitlines(keepends=True)
    first = files[path][: recipe.edit.start].count(b"\n")
    behind = len(after) - first - recipe.edit.old.count("\n") - 1
    start, end = first, len(before) - behind
    while whole.count("".join(before[start:end])) > 1:
        start, end, behind = max(0, start - 1), min(len(before), end + 1), max(0, behind - 1)
    return start + 1, end, "".join(before[start:end]), "".join(after[start : len(after) - behind])
