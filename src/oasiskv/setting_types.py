"""What can be said of a setting from its field in ``OasisConfig``: type, legal values, default."""

from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def parts_of(field: FieldInfo) -> list[Any]:
    """The types of a setting that may be of several, None's being ``NoneType``."""
    if get_origin(field.annotation) in (Union, UnionType):
        return list(get_args(field.annotation))
    return [field.annotation]


def may_be_none(field: FieldInfo) -> bool:
    """Whether None is legal."""
    return NoneType in parts_of(field)


def is_switch(field: FieldInfo) -> bool:
    """Whether it is on or off."""
    return parts_of(field) == [bool]


def type_of(field: FieldInfo) -> str:
    """Name of the type."""
    names = [_name(part) for part in parts_of(field) if part is not NoneType]
    return " or ".join([*names, "None"] if may_be_none(field) else names)


def choices_of(field: FieldInfo) -> list[str]:
    """The values of a setting that has a few."""
    return [choice for part in parts_of(field) for choice in _choices(part)]


def bounds_of(field: FieldInfo) -> list[str]:
    """Bounds of a number, such as ``>= 0``."""
    return [
        f"{sign} {getattr(rule, rule_name)}"
        for rule in field.metadata
        for rule_name, sign in SIGNS.items()
        if hasattr(rule, rule_name)
    ]


def default_of(field: FieldInfo) -> str:
    """The default, as it is written."""
    default = field.default.value if isinstance(field.default, Enum) else field.default
    return str(default)


def _choices(part: Any) -> list[str]:  # noqa: ANN401 - a type, or a form of typing
    if get_origin(part) is Literal:
        return [str(choice) for choice in get_args(part)]
    if isinstance(part, type) and issubclass(part, Enum):
        return [str(member.value) for member in part]
    return []


def _name(part: Any) -> str:  # noqa: ANN401 - a type, or a form of typing
    return "choice" if _choices(part) else str(part.__name__)
