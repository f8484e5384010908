"""Palestra: train and evaluate multi-turn, long-horizon LLM agents with reinforcement learning."""

from palestra.errors import InfrastructureError, PalestraError, ToolError, UsageError
from palestra.message import Image, Message, Text, ToolCall, assistant, system, user
from palestra.task import Score, Task
from palestra.tool import Finish, Rewrite, Tool
from palestra.trajectory import Trajectory
from palestra.verbs import check, evaluate, train

__all__ = [
    "Finish",
    "Image",
    "InfrastructureError",
    "Message",
    "PalestraError",
    "Rewrite",
    "Score",
    "Task",
    "Text",
    "Tool",
    "ToolCall",
    "ToolError",
    "Trajectory",
    "UsageError",
    "assistant",
    "check",
    "evaluate",
    "system",
    "train",
    "user",
]
