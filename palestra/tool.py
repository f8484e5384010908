"""Tools: typed Python functions, with the schema that a model reads made from signature and docstring.

A tool's effects are its return value: text (or content parts) is observed, `Finish` ends the run, `Rewrite` begins the
context anew. `ToolError` is told to the model; any other exception is a failure of the rollout.
"""

import inspect
import itertools
import json
import re
import textwrap
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, get_type_hints, runtime_checkable

import pydantic

from palestra.errors import ToolDefinitionError, ToolError, nearest
from palestra.message import JSON, Content, Image, Message, Text, ToolCall

Schema = dict[str, JSON]

ERROR = "Error: "
"""How a result begins that tells the model of a `ToolError`."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Returned by a tool: the run is over, and this is its answer."""

    answer: JSON = None
    changed: bool | None = None
    """Whether the agent has changed anything, where the tool can tell; see `hints.py`."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Returned by a tool: the context becomes these messages, and a new segment begins."""

    messages: tuple[Message, ...]


Outcome = Content | Finish | Rewrite


@runtime_checkable
class AnyTool(Protocol):
    """What an agent is given. A `Tool` is a function of this process; those of MCP servers are elsewhere."""

    @property
    def name(self) -> str: ...

    def schema(self, strict: bool = False) -> Schema: ...

    async def call(self, arguments: Mapping[str, JSON]) -> Outcome: ...


def function_schema(name: str, description: str, parameters: Schema, strict: bool = False) -> Schema:
    """A tool as OpenAI's `tools` JSON."""
    function: Schema = {"name": name, "description": description, "parameters": parameters}
    schema = {"type": "function", "function": function}
    return strict_schema(schema) if strict else schema


@dataclass(frozen=True)
class Tool:
    name: str
    description: str
    function: Callable[..., object]
    arguments: type[pydantic.BaseModel]

    @staticmethod
    def of(function: Callable[..., object]) -> "Tool":
        """Make a tool of a function or bound method. Every parameter needs a type hint; the docstring describes them."""
        name = getattr(function, "__name__", "")
        if not name.isidentifier():
            raise ToolDefinitionError(f"{function!r} has no name that a model could call; write it as a function")
        summary, described = _read_docstring(inspect.getdoc(function) or "")
        try:
            hints = get_type_hints(function, include_extras=True)
        except NameError as error:
            raise ToolDefinitionError(f"tool {name!r}: a type hint cannot be resolved: {error}") from None
        parameters = inspect.signature(function).parameters
        fields: dict[str, Any] = {}
        for parameter in parameters.values():
            _refuse_unusable(name, parameter, hints)
            default = ... if parameter.default is parameter.empty else parameter.default
            about: Schema = {"alias": parameter.name}
            if parameter.name in described:  # else a description in the hint, `Annotated[int, Field(...)]`, stands
                about["description"] = described.pop(parameter.name)
            # The prefix keeps parameters such as `json` or `model_config` apart from the attributes of pydantic's models.
            fields[f"arg_{parameter.name}"] = (hints[parameter.name], pydantic.Field(default, **about))
        if described:
            stray = next(iter(described))
            raise ToolDefinitionError(
                f"tool {name!r}: its docstring describes {stray!r}, which is no parameter{nearest(stray, parameters)}"
            )
        rules = pydantic.ConfigDict(extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)
        try:
            arguments = pydantic.create_model(name, __config__=rules, **fields)
            arguments.model_json_schema()
        except (pydantic.PydanticUserError, NameError) as error:
            reason = str(error).splitlines()[0]
            raise ToolDefinitionError(f"tool {name!r}: a type hint has no JSON schema: {reason}") from None
        return Tool(name, summary, function, arguments)

    @cached_property
    def parameters(self) -> Schema:
        """The JSON schema of the arguments."""
        schema: Schema = _without_titles(self.arguments.model_json_schema())
        schema.pop("description", None)
        schema.setdefault("properties", {})
        return schema

    def schema(self, strict: bool = False) -> Schema:
        return function_schema(self.name, self.description, self.parameters, strict)

    def bind(self, arguments: Mapping[str, JSON]) -> dict[str, Any]:
        """The arguments as Python values: coerced and checked. A `ToolError` says what is wrong with each."""
        given: JSON = dict(arguments)
        try:
            checked = self.arguments.model_validate(given)
        except pydantic.ValidationError as error:
            for problem in error.errors():
                given = _mend(given, problem["loc"])
            try:
                checked = self.arguments.model_validate(given)
            except pydantic.ValidationError as remaining:
                raise ToolError(self._complaint(remaining)) from None
        fields = (field for field in type(checked).model_fields if field in checked.model_fields_set)
        return {field.removeprefix("arg_"): getattr(checked, field) for field in fields}

    async def call(self, arguments: Mapping[str, JSON]) -> Outcome:
        result = self.function(**self.bind(arguments))
        if isinstance(result, Awaitable):
            result = await result
        return _as_outcome(result)

    def _complaint(self, error: pydantic.ValidationError) -> str:
        known = self.parameters["properties"]
        problems = []
        for problem in error.errors():
            where = ".".join(str(step) for step in problem["loc"]) or "arguments"
            match problem["type"]:
                case "missing":
                    problems.append(f"argument {where!r} is missing")
                case "extra_forbidden":
                    problems.append(f"unknown argument {where!r}{nearest(where, known) if len(problem['loc']) == 1 else ''}")
                case _:
                    problems.append(f"argument {where!r}: {problem['msg']}")
        return f"{self.name}: {'; '.join(problems)}. Parameters: {json.dumps(self.parameters)}"


class Toolbox:
    """The tools of one rollout, by name."""

    def __init__(self, functions: Iterable[Callable[..., object] | AnyTool]) -> None:
        self._tools: dict[str, AnyTool] = {}
        for function in functions:
            tool = function if isinstance(function, AnyTool) else Tool.of(function)
            if tool.name in self._tools:
                raise ToolDefinitionError(f"two tools are named {tool.name!r}; rename one of the functions")
            self._tools[tool.name] = tool

    def schemas(self, strict: bool = False) -> list[Schema]:
        return [tool.schema(strict) for tool in self._tools.values()]

    async def run(self, call: ToolCall) -> Outcome:
        """Run one call. What the model did wrong comes back as a `ToolError`."""
        if call.fault is not None:
            raise ToolError(call.fault)
        tool = self._tools.get(call.name)
        if tool is None:
            raise ToolError(f"unknown tool {call.name[:80]!r}{nearest(call.name[:80], self._tools)}")
        return await tool.call(call.arguments)


def strict_schema(schema: Schema) -> Schema:
    """A tool's schema in strict mode: every property is required, and optional ones may be null."""
    function = schema["function"]
    return {**schema, "function": {**function, "parameters": _strict(function["parameters"]), "strict": True}}


def _refuse_unusable(tool: str, parameter: inspect.Parameter, hints: Mapping[str, object]) -> None:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise ToolDefinitionError(f"tool {tool!r}: parameter '{parameter}' cannot be in a schema; name each parameter")
    if parameter.name not in hints:
        raise ToolDefinitionError(
            f"tool {tool!r}: parameter {parameter.name!r} has no type hint; write e.g. `{parameter.name}: str`"
        )
    if parameter.name.startswith("_"):
        raise ToolDefinitionError(f"tool {tool!r}: parameter {parameter.name!r} may not begin with an underscore")


_ENTRY = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a Google-style docstring into what it says before `Args:` and what it says of each argument."""
    summary, _, rest = f"\n{text}".partition("\nArgs:")
    section = itertools.takewhile(lambda line: not line.strip() or line.startswith(" "), rest.splitlines())
    described: dict[str, str] = {}
    current = None
    for line in textwrap.dedent("\n".join(section)).splitlines():
        entry = _ENTRY.match(line)  # what is indented further goes on with the entry above it
        if entry:
            current = entry[1]
            described[current] = entry[2]
        elif current and line:
            described[current] += " " + line.strip()
    return re.split(r"\n(?:Returns|Raises|Yields):", summary)[0].strip(), described


def _without_titles(value: JSON) -> JSON:
    """Drop the titles that pydantic adds; a property that is itself named `title` stays."""
    if isinstance(value, list):
        return [_without_titles(item) for item in value]
    if isinstance(value, dict):
        return {
            key: {name: _without_titles(sub) for name, sub in item.items()}
            if key in ("properties", "$defs")
            else _without_titles(item)
            for key, item in value.items()
            if key != "title"
        }
    return value


def _strict(schema: JSON) -> JSON:
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: _strict(item) for key, item in schema.items() if key not in ("default", "properties", "$defs")}
    if "$defs" in schema:
        out["$defs"] = {name: _strict(item) for name, item in schema["$defs"].items()}
    if schema.get("type") == "object" and "properties" in schema:
        required = schema.get("required", ())
        out["properties"] = {
            name: _strict(item) if name in required else _nullable(_strict(item)) for name, item in schema["properties"].items()
        }
        out["required"] = list(schema["properties"])
        out["additionalProperties"] = False
    return out


def _nullable(schema: Schema) -> Schema:
    options = schema.get("anyOf", [schema])
    if {"type": "null"} in options:
        return schema
    described = {"description": schema["description"]} if "description" in schema else {}
    options = [{key: item for key, item in option.items() if key != "description"} for option in options]
    return {"anyOf": [*options, {"type": "null"}], **described}


def _mend(value: JSON, path: Sequence[str | int]) -> JSON:
    """Mend what models often write on the way to what did not fit: a list or object as a JSON string, or null for a property
    that is left out, as strict mode has them do."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    if path and isinstance(value, dict) and path[0] in value:
        others = {key: item for key, item in value.items() if key != path[0]}
        return others if value[path[0]] is None else others | {path[0]: _mend(value[path[0]], path[1:])}
    if path and isinstance(value, list) and isinstance(path[0], int):
        return [_mend(item, path[1:]) if index == path[0] else item for index, item in enumerate(value)]
    return value


def _as_outcome(value: object) -> Outcome:
    if isinstance(value, str | Finish | Rewrite):
        return value
    if isinstance(value, Text | Image):
        return (value,)
    if isinstance(value, tuple | list) and value and all(isinstance(part, Text | Image) for part in value):
        return tuple(value)
    if value is None:
        return ""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
