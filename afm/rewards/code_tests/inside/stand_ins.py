"""What tests see in place of the program: functions and objects whose answers are looked up."""

from __future__ import annotations

import builtins
from functools import partial
from typing import Any, NoReturn, Protocol

from afm.rewards.code_tests.inside.plain import NotPlainError, decode, encode


class UnsupportedError(BaseException):
    """The tests need the program in the same process."""


class FailedError(BaseException):
    """The program was stopped or crashed in this call; no ``except Exception`` of the tests may hide that."""


class Table(Protocol):
    """Knows what the program answered.

    Attributes:
        hole: What stands for an answer that is not known.
    """

    hole: type[Hole]

    def outcome(self, session: list[Any]) -> Any:
        """What the program answered to the last step of ``session``; ``None`` when it was not asked yet."""

    def refused(self, reason: str) -> UnsupportedError:
        """The error to raise when the tests cannot judge."""

    def lost(self, reason: str) -> FailedError:
        """The error to raise when the program crashed."""


class _Call:
    """A step of a session (see ``candidate.py``), but for its arguments.

    Attributes:
        in_place: Whether the tests look at what became of the arguments, not at the value.
    """

    def __init__(self, how: str, name: str, index: Any = None, in_place: bool = False) -> None:
        self.how, self.name, self.index, self.in_place = how, name, index, in_place
        self.makes_instance = how == "call" and name.lstrip("_")[:1].isupper()


class _Steps:
    """The calls that lead to an object of the program."""

    def __init__(self, table: Table, steps: list[Any]) -> None:
        self.table, self.steps = table, steps

    def take(self, call: _Call, given: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Make a call: its value, or what it raised, or a placeholder."""
        arguments, named = self._encoded(list(given), call.name), self._encoded(keywords, call.name)
        if arguments is _UNKNOWN or named is _UNKNOWN:
            return self.table.hole(None, 0)
        self.steps.append([call.how, call.name, arguments, named, call.index])
        outcome = self.table.outcome(list(self.steps))
        if outcome is None:
            # What a class returns is an object: its calls can be foreseen. Of a function's or a method's result they
            # cannot be: `f(1).startswith("gold")` would hand the gold answer to the program.
            return self.table.hole(self if call.makes_instance else None, 0)
        if "failed" in outcome:
            raise self.table.lost(outcome["failed"])
        if "raised" in outcome:
            raise _exception(outcome["raised"], outcome.get("message", ""))
        if "value" not in outcome:
            return (_Instance if call.makes_instance else _Thing)(self, len(self.steps) - 1)
        value = decode(outcome["value"])
        if value is None or call.in_place:
            # Only work in place shows: otherwise `f(data) == sum(data)` would compare with what the program made of it.
            for argument, now in zip(given, decode(outcome.get("arguments", []))):  # noqa: B905 - Python 3.9
                _change(argument, now)
        return value

    def _encoded(self, value: Any, name: str) -> Any:
        try:
            return encode(value)
        except NotPlainError as error:
            kind = str(error)
        if kind in (Hole.__name__, NayHole.__name__):
            return _UNKNOWN
        raise self.table.refused(
            f"the tests pass an object of type {kind.lstrip('_')!r} to {name!r}; only plain data can be passed"
        )


def _exception(name: str, text: str) -> BaseException:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        return kind(text)
    return type(name, (Exception,), {})(text)  # type: ignore[no-any-return]


def _change(argument: Any, now: Any) -> None:
    """Let ``argument`` be what the program made of it."""
    if type(argument) is not type(now) or argument == now:
        return
    if isinstance(argument, list):
        argument[:] = now
    elif isinstance(argument, (dict, set)):
        argument.clear()
        argument.update(now)


class Function:
    """A name of the program: a function or a class."""

    def __init__(self, table: Table, name: str) -> None:
        self.__table, self.__name = table, name
        self.__name__ = name

    def __call__(self, *given: Any, **keywords: Any) -> Any:
        """What the program answers to this call."""
        return self._asked(False, *given, **keywords)

    def _asked(self, in_place: bool, /, *given: Any, **keywords: Any) -> Any:
        return _Steps(self.__table, []).take(_Call("call", self.__name, None, in_place), given, keywords)


def in_place(function: Any) -> Any:
    """``function`` for a call whose value the tests do not use."""
    return partial(function._asked, True) if isinstance(function, (Function, _Member)) else function


class _Thing:
    """An object that a function of the program returned.

    It equals nothing but itself, whatever the program's ``__eq__`` would say, and has no method that text, numbers or
    collections have: who tests ``f(1).startswith("a")`` expects text.
    """

    def __init__(self, steps: _Steps, index: int) -> None:
        self._steps, self._index = steps, index

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or any(hasattr(kind, name) for kind in self._not_of()):
            raise AttributeError(f"the program returned an object without {name!r}")
        return _Member(self._steps, self._index, name)

    def __call__(self, *given: Any, **keywords: Any) -> Any:
        return self._steps.take(_Call("method", "__call__", self._index), given, keywords)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Thing) and self._related())

    __hash__ = object.__hash__

    def _related(self) -> NoReturn:
        raise self._steps.table.refused(
            "the tests relate two objects of the program; only values can be compared"
        )

    def _not_of(self) -> tuple[type, ...]:
        return (str, bytes, int, float, complex, list, tuple, dict, set, range)


class _Instance(_Thing):
    """An object of a class of the program: its own methods count, whatever their names."""

    def __len__(self) -> int:
        return int(self._asked("__len__"))

    def __str__(self) -> str:
        return str(self._asked("__str__"))

    def __repr__(self) -> str:
        return str(self._asked("__repr__"))

    def __getitem__(self, key: Any) -> Any:
        return self._asked("__getitem__", key)

    def __contains__(self, item: Any) -> bool:
        return bool(self._asked("__contains__", item))

    def __bool__(self) -> bool:
        return True

    def _asked(self, name: str, *given: Any) -> Any:
        return self._steps.take(_Call("method", name, self._index), given, {})

    def _not_of(self) -> tuple[type, ...]:
        return ()


class _Member:
    """A method of an object, or an attribute when it is used as a value."""

    def __init__(self, steps: _Steps, index: int, name: str) -> None:
        self._steps, self._index, self._name = steps, index, name

    def __call__(self, *given: Any, **keywords: Any) -> Any:
        return self._asked(False, *given, **keywords)

    def _asked(self, in_place: bool, /, *given: Any, **keywords: Any) -> Any:
        return self._steps.take(_Call("method", self._name, self._index, in_place), given, keywords)

    def value(self) -> Any:
        return self._steps.take(_Call("get", self._name, self._index), (), {})


class Hole:
    """Stands for a value that is not known yet: agrees with everything, and notes the calls of its methods."""

    def __init__(self, steps: Any, index: int) -> None:
        self.__steps, self.__index = steps, index

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Member(self.__steps, self.__index, name) if self.__steps else self


class NayHole(Hole):
    """Agrees with nothing: whatever passes with it as well would pass with any answer."""

    def __bool__(self) -> bool:
        return False

    def __contains__(self, item: Any) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter([self])


_UNKNOWN = object()
_ITERATE = "__iter__"
_AGREEING = (
    "add sub mul truediv floordiv mod pow and or xor eq ne lt le gt ge getitem neg pos abs invert call round"
)
_RELATING = "add sub mul truediv floordiv mod pow and or xor lt le gt ge"
_CONSTANT: dict[str, Any] = {"bool": True, "len": 0, "int": 0, "float": 0.0, "index": 0, "str": "", "hash": 0}
_CONSTANT |= {"contains": True, "setitem": None, "delitem": None, "enter": None, "exit": None}


def _equip() -> None:
    """Give the placeholder and the member every operator, and objects those that are not for them."""

    def constant(value: Any) -> Any:
        return lambda self, *others, **keywords: value

    def through(method: str) -> Any:
        return lambda self, *others: getattr(self.value(), method)(*others)

    def related(self: Any, other: Any) -> Any:
        return self._related() if isinstance(other, _Thing) else NotImplemented

    for word in _RELATING.split():
        setattr(_Thing, f"__{word}__", related)
    for word in _AGREEING.split():
        for method in (f"__{word}__", f"__r{word}__"):
            setattr(Hole, method, lambda self, *others, **keywords: self)
            if word != "call":
                setattr(_Member, method, through(method))
    for word, value in _CONSTANT.items():
        setattr(Hole, f"__{word}__", constant(value))
        setattr(_Member, f"__{word}__", through(f"__{word}__"))
    for kind, begin in ((Hole, lambda self: iter(())), (_Member, lambda self: iter(self.value()))):
        setattr(kind, _ITERATE, begin)


_equip()
