"""Options that several commands share, declared once: a parameter that is a dataclass stands for its fields."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import update_wrapper
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer is to see it: with the options of each group in the place of the group.

    A group is a parameter whose type is a dataclass; its fields are options, or groups of their own. What the command
    lists by itself, too, stays where it lists it and with the words that it gives; the group is given its value.
    """
    own = inspect.signature(command).parameters
    flat: dict[str, inspect.Parameter] = {}
    for parameter in own.values():
        group = parameter.annotation
        options = _options_of(group) if is_dataclass(group) else (parameter,)
        flat |= {each.name: _by_name(each) for each in options if each is parameter or each.name not in own}

    def run(**given: Any) -> None:
        command(**{name: _value(parameter, given) for name, parameter in own.items()})

    update_wrapper(run, command)
    del run.__wrapped__  # type: ignore[attr-defined]  # or its signature would be looked at instead of this one
    run.__signature__ = inspect.Signature(list(flat.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in flat.items()}
    return run


def flags_given(group: Any) -> Iterator[str]:
    """The flags of a group's options, and of the groups in it, whose values are not their defaults."""
    hints = get_type_hints(type(group), include_extras=True)
    for each in fields(group):
        value = getattr(group, each.name)
        if is_dataclass(value):
            yield from flags_given(value)
        elif value != each.default and value != []:
            (option,) = hints[each.name].__metadata__
            yield str(option.default)  # typer's name for the first spelling, where an option is an annotation


def _options_of(group: Any) -> Iterator[inspect.Parameter]:
    """The options of a group and of the groups in it, in order."""
    hints = get_type_hints(group, include_extras=True)
    for each in fields(group):
        if is_dataclass(hints[each.name]):
            yield from _options_of(hints[each.name])
        else:
            default = inspect.Parameter.empty if each.default is MISSING else each.default
            yield inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[each.name]
            )


def _by_name(parameter: inspect.Parameter) -> inspect.Parameter:
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)


def _value(parameter: inspect.Parameter, given: Mapping[str, Any]) -> Any:
    """What the command is given: the option's value, or the group made of its own."""
    group = parameter.annotation
    return _made(group, given) if is_dataclass(group) else given[parameter.name]


def _made(group: Any, given: Mapping[str, Any]) -> Any:
    hints = get_type_hints(group, include_extras=True)
    values = {
        each.name: _made(hints[each.name], given) if is_dataclass(hints[each.name]) else given[each.name]
        for each in fields(group)
    }
    return group(**values)
