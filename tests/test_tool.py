import enum
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, Optional

import pydantic
import pytest
from typing_extensions import TypedDict

from palestra.errors import ToolDefinitionError, ToolError
from palestra.message import Image, Text, ToolCall, user
from palestra.tool import Finish, Rewrite, Schema, Tool, Toolbox


def properties(function: Callable[..., object]) -> Schema:
    return Tool.of(function).parameters["properties"]


def search(pattern: str, path: str = ".", limit: int = 10) -> str:
    """Search files for a pattern.

    Both plain text and regular expressions work.

    Args:
        pattern: What to look for,
            e.g.: `def main`.
        path (str): Where to look.

    Returns:
        One match per line.
    """
    return f"{pattern} in {path}, {limit}"


def test_the_schema_is_the_signature_and_the_docstring() -> None:
    assert Tool.of(search).schema() == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search files for a pattern.\n\nBoth plain text and regular expressions work.",
            "parameters": {
                "type": "object",
                "properties": {
                    "pattern": {"type": "string", "description": "What to look for, e.g.: `def main`."},
                    "path": {"type": "string", "description": "Where to look.", "default": "."},
                    "limit": {"type": "integer", "default": 10},
                },
                "required": ["pattern"],
                "additionalProperties": False,
            },
        },
    }


def test_a_tool_without_parameters_has_an_empty_object() -> None:
    def ping() -> None: ...

    assert Tool.of(ping).parameters == {"type": "object", "properties": {}, "additionalProperties": False}


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: int = 0


class Options(TypedDict):
    deep: bool
    note: NotRequired[str]


class Edit(pydantic.BaseModel):
    line: int
    tags: list[str] = []


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (Literal["a", "b"], {"enum": ["a", "b"], "type": "string"}),
        (Optional[int], {"anyOf": [{"type": "integer"}, {"type": "null"}]}),  # noqa: UP045
        (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        (list[str], {"type": "array", "items": {"type": "string"}}),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (bool, {"type": "boolean"}),
        (
            Annotated[int, pydantic.Field(ge=1, description="how many")],
            {"type": "integer", "minimum": 1, "description": "how many"},
        ),
    ],
)
def test_hints_become_schemas(hint: Any, schema: Schema) -> None:
    def tool(x): ...

    tool.__annotations__["x"] = hint
    assert properties(tool) == {"x": schema}


def draw(point: Point, options: Options, edits: list[Edit], colour: Colour = Colour.RED) -> str:
    """Draw.

    Args:
        point: Where.
    """
    return repr((point, options, edits, colour))


def test_nested_types_become_definitions() -> None:
    schema = Tool.of(draw).parameters
    assert schema["properties"] == {
        "point": {"$ref": "#/$defs/Point", "description": "Where."},
        "options": {"$ref": "#/$defs/Options"},
        "edits": {"type": "array", "items": {"$ref": "#/$defs/Edit"}},
        "colour": {"$ref": "#/$defs/Colour", "default": "red"},
    }
    definitions = schema["$defs"]
    assert definitions["Colour"] == {"enum": ["red", "blue"], "type": "string"}
    assert definitions["Point"]["properties"] == {"x": {"type": "integer"}, "y": {"type": "integer", "default": 0}}
    assert definitions["Options"]["required"] == ["deep"]
    assert definitions["Edit"]["required"] == ["line"]


async def test_nested_arguments_arrive_as_their_types() -> None:
    outcome = await Tool.of(draw).call({"point": {"x": 1}, "options": {"deep": True}, "edits": [{"line": 2}], "colour": "blue"})
    assert outcome == repr((Point(1), {"deep": True}, [Edit(line=2)], Colour.BLUE))


class Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, amount: int) -> str:
        """Add to the total."""
        self.total += amount
        return str(self.total)

    async def add_slowly(self, amount: int) -> str:
        """Add to the total, later."""
        return self.add(amount)


async def test_bound_methods_work_on_their_object_synchronous_or_not() -> None:
    counter = Counter()
    assert list(properties(counter.add)) == ["amount"]
    assert await Tool.of(counter.add).call({"amount": 2}) == "2"
    assert await Tool.of(counter.add_slowly).call({"amount": 3}) == "5"
    assert counter.total == 5


def test_parameters_may_be_named_like_attributes_of_pydantic(recwarn: pytest.WarningsRecorder) -> None:
    def post(json: str, model_config: str, title: str, copy: int = 1) -> None: ...

    tool = Tool.of(post)
    assert list(tool.parameters["properties"]) == ["json", "model_config", "title", "copy"]
    given = {"json": "{}", "model_config": "m", "title": "t", "copy": 2}
    assert tool.bind(given) == given
    assert [str(warning.message) for warning in recwarn] == []


def test_docstrings_that_begin_with_args_or_indent_by_two() -> None:
    def bare(x: int, y: int) -> None:
        """
        Args:
          x: the first
            default: none
          y: the second
        """

    tool = Tool.of(bare)
    assert tool.description == ""
    described = {name: schema["description"] for name, schema in tool.parameters["properties"].items()}
    assert described == {"x": "the first default: none", "y": "the second"}


def test_in_strict_mode_everything_is_required_and_options_may_be_null() -> None:
    function = Tool.of(draw).schema(strict=True)["function"]
    schema = function["parameters"]
    assert function["strict"] is True
    assert schema["required"] == ["point", "options", "edits", "colour"]
    assert schema["properties"]["colour"] == {"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}]}
    assert schema["properties"]["edits"] == {"type": "array", "items": {"$ref": "#/$defs/Edit"}}
    point = schema["$defs"]["Point"]
    assert (point["required"], point["additionalProperties"]) == (["x", "y"], False)
    assert point["properties"]["y"] == {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    assert schema["$defs"]["Edit"]["additionalProperties"] is False
    assert '"default"' not in json.dumps(schema)


def test_strict_mode_keeps_descriptions_and_does_not_double_null() -> None:
    def tool(a: int = 1, b: int | None = None) -> None:
        """Do.

        Args:
            a: first
            b: second
        """

    null = {"type": "null"}
    assert Tool.of(tool).schema(strict=True)["function"]["parameters"]["properties"] == {
        "a": {"anyOf": [{"type": "integer"}, null], "description": "first"},
        "b": {"anyOf": [{"type": "integer"}, null], "description": "second"},
    }


def test_null_means_left_out_where_it_is_no_legal_value() -> None:
    def tool(a: int = 1, b: int | None = 5, point: Point | None = None) -> None: ...

    assert Tool.of(tool).bind({"a": None, "b": None}) == {"b": None}
    # What strict mode allows inside an object is accepted there too.
    assert Tool.of(tool).bind({"point": {"x": 1, "y": None}}) == {"point": Point(1, 0)}


def test_null_is_no_value_for_a_required_argument() -> None:
    with pytest.raises(ToolError, match="argument 'pattern' is missing"):
        Tool.of(search).bind({"pattern": None})


def test_arguments_are_coerced_where_the_meaning_is_plain() -> None:
    def tool(count: int, ratio: float, flag: bool, name: str, items: list[int], point: Point, edits: list[Edit]) -> None: ...

    given = {
        "count": "3",
        "ratio": "0.5",
        "flag": "true",
        "name": 42,
        "items": "[1, 2]",
        "point": ' {"x": "1"}',
        "edits": ['{"line": 7}'],
    }
    assert Tool.of(tool).bind(given) == {
        "count": 3,
        "ratio": 0.5,
        "flag": True,
        "name": "42",
        "items": [1, 2],
        "point": Point(1),
        "edits": [Edit(line=7)],
    }


def test_json_in_a_string_argument_stays_a_string() -> None:
    def write(text: str, count: int) -> None: ...

    assert Tool.of(write).bind({"text": '{"a": 1}', "count": "1"}) == {"text": '{"a": 1}', "count": 1}
    # Also when another argument has to be mended.
    assert Tool.of(search).bind({"pattern": "[a-z]", "path": None}) == {"pattern": "[a-z]"}


def test_only_arguments_that_were_given_are_bound() -> None:
    assert Tool.of(search).bind({"limit": 3, "pattern": "x"}) == {"pattern": "x", "limit": 3}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "search: argument 'pattern' is missing. Parameters: {"),
        ({"pattern": "x", "limt": 3}, "unknown argument 'limt'; did you mean 'limit'?"),
        ({"pattern": "x", "zzz": 3}, "unknown argument 'zzz'; known: limit, path, pattern"),
        ({"pattern": "x", "limit": "many"}, "argument 'limit': Input should be a valid integer"),
        ({"pattern": "x", "limit": "[1"}, "argument 'limit': Input should be a valid integer"),
        ({"pattern": ["x"]}, "argument 'pattern': Input should be a valid string"),
        ({"limit": 2.5}, "argument 'pattern' is missing; argument 'limit': Input should be a valid integer"),
    ],
)
def test_faults_are_told_in_helpful_words(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ToolError) as error:
        Tool.of(search).bind(arguments)
    assert complaint in str(error.value)
    assert '"description": "Where to look."' in str(error.value)  # the schema goes with the complaint


def test_faults_inside_an_object_name_their_place() -> None:
    with pytest.raises(ToolError) as error:
        Tool.of(draw).bind({"point": {}, "options": {"deep": True, "colour": 1}, "edits": '[{"line": "x"}]'})
    complaint, _, schema = str(error.value).partition(". Parameters: ")
    assert "argument 'point.x' is missing" in complaint
    # The names of the tool's own parameters would mislead here.
    assert "unknown argument 'options.colour'" in complaint
    assert "did you mean" not in complaint
    assert "known:" not in complaint
    # The string was read as JSON, so the fault is inside it.
    assert "argument 'edits.0.line': Input should be a valid integer" in complaint
    assert json.loads(schema) == Tool.of(draw).parameters


def test_not_a_number_is_refused() -> None:
    def tool(x: float) -> None: ...

    for value in (float("nan"), "inf"):
        with pytest.raises(ToolError, match="finite"):
            Tool.of(tool).bind({"x": value})


def no_hint(x): ...


def unresolved(x: "Nowhere"): ...  # type: ignore[name-defined]  # noqa: F821


def many(*xs: int): ...


def options(**xs: int): ...


def positional(x: int, /): ...


def private(_x: int): ...


def opaque(x: Counter): ...


def callback(x: Callable[[int], int]): ...


def stray(pattern: str):
    """Do.

    Args:
        patern: misspelt
    """


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (no_hint, "tool 'no_hint': parameter 'x' has no type hint; write e.g. `x: str`"),
        (unresolved, "tool 'unresolved': a type hint cannot be resolved: name 'Nowhere' is not defined"),
        (many, "tool 'many': parameter '*xs: int' cannot be in a schema"),
        (options, "tool 'options': parameter '**xs: int' cannot be in a schema"),
        (positional, "tool 'positional': parameter 'x: int' cannot be in a schema"),
        (private, "tool 'private': parameter '_x' may not begin with an underscore"),
        (opaque, "tool 'opaque': a type hint has no JSON schema"),
        (callback, "tool 'callback': a type hint has no JSON schema"),
        (stray, "tool 'stray': its docstring describes 'patern', which is no parameter; did you mean 'pattern'?"),
        (lambda: "x", "has no name that a model could call"),
        (functools.partial(search, "x"), "has no name that a model could call"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_by_name(function: Callable[..., object], reason: str) -> None:
    with pytest.raises(ToolDefinitionError) as error:
        Tool.of(function)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


PICTURE = Image(b"png")


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        ("text", "text"),
        (None, ""),
        (PICTURE, (PICTURE,)),
        ((Text("a"), PICTURE), (Text("a"), PICTURE)),
        ([Text("a"), PICTURE], (Text("a"), PICTURE)),
        ({"naïve": [1, None]}, '{"naïve": [1, null]}'),
        ([], "[]"),
        (Point(1, 2), "Point(x=1, y=2)"),
        (Finish({"x": 1}), Finish({"x": 1})),
        (Rewrite((user("so far"),)), Rewrite((user("so far"),))),
    ],
)
async def test_what_a_tool_returns_becomes_its_outcome(value: object, outcome: object) -> None:
    def tool() -> object:
        return value

    assert await Tool.of(tool).call({}) == outcome


async def test_a_tool_error_and_any_other_exception_pass_unchanged() -> None:
    told, bug = ToolError("no such file"), ZeroDivisionError("bug")

    def fail(how: str) -> str:
        raise told if how == "told" else bug

    toolbox = Toolbox([fail])
    with pytest.raises(ToolError) as first:
        await toolbox.run(ToolCall("1", "fail", {"how": "told"}))
    assert first.value is told
    with pytest.raises(ZeroDivisionError) as second:
        await toolbox.run(ToolCall("2", "fail", {"how": "bug"}))
    assert second.value is bug


async def test_a_toolbox_runs_tools_by_name() -> None:
    counter = Counter()
    toolbox = Toolbox([search, counter.add, Tool.of(counter.add_slowly)])
    assert [schema["function"]["name"] for schema in toolbox.schemas()] == ["search", "add", "add_slowly"]
    assert all(schema["function"]["strict"] for schema in toolbox.schemas(strict=True))
    assert await toolbox.run(ToolCall("1", "search", {"pattern": "x", "limit": "2"})) == "x in ., 2"
    assert await toolbox.run(ToolCall("2", "add_slowly", {"amount": 4})) == "4"


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (ToolCall("1", "serch", {}), "unknown tool 'serch'; did you mean 'search'?"),
        (ToolCall("1", "fly", {}), "unknown tool 'fly'; known: search"),
        (ToolCall("1", "search", {"pattern": "x"}, fault="the JSON was cut off"), "the JSON was cut off"),
    ],
)
async def test_a_call_that_cannot_run_is_told_to_the_model(call: ToolCall, complaint: str) -> None:
    with pytest.raises(ToolError) as error:
        await Toolbox([search]).run(call)
    assert str(error.value) == complaint


async def test_a_runaway_tool_name_is_cut_in_the_complaint() -> None:
    with pytest.raises(ToolError) as error:
        await Toolbox([search]).run(ToolCall("1", "x" * 10_000, {}))
    assert len(str(error.value)) < 200


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ToolDefinitionError, match="two tools are named 'search'"):
        Toolbox([search, Tool.of(search)])
