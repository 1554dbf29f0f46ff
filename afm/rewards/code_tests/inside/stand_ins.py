"""What tests see in place of the program: functions and objects whose answers are looked up."""

from __future__ import annotations

import builtins
from typing import Any, Protocol

from afm.rewards.code_tests.inside.plain import NotPlainError, decode, encode


class UnsupportedError(BaseException):
    """The tests need the program in the same process."""


class FailedError(BaseException):
    """The program was stopped or crashed in this call; no ``except Exception`` of the tests may hide that."""


class Table(Protocol):
    """Knows what the program answered."""

    def outcome(self, session: list[Any]) -> Any:
        """What the program answered to the last step of ``session``; ``None`` when it was not asked yet."""


class _Steps:
    """The calls that lead to an object of the program."""

    def __init__(self, table: Table, steps: list[Any]) -> None:
        self.table, self.steps = table, steps

    def take(self, how: str, name: str, given: tuple[Any, ...], keywords: dict[str, Any], index: Any) -> Any:
        """Make a call: its value, or what it raised, or a placeholder."""
        arguments, named = _encoded(list(given), name), _encoded(keywords, name)
        if arguments is _UNKNOWN or named is _UNKNOWN:
            return _Hole(None, 0)
        self.steps.append([how, name, arguments, named, index])
        outcome = self.table.outcome(list(self.steps))
        if outcome is None:
            # What a class returns is an object: its calls can be foreseen. Of a function's or a method's result they
            # cannot be: `f(1).startswith("gold")` would hand the gold answer to the program.
            return _Hole(self, 0) if _makes_instances(how, name) else _Hole(None, 0)
        if "failed" in outcome:
            raise FailedError(outcome["failed"])
        if "raised" in outcome:
            raise _exception(outcome["raised"], outcome.get("message", ""))
        for argument, now in zip(given, decode(outcome.get("arguments", []))):  # noqa: B905 - Python 3.9
            _change(argument, now)
        if "value" in outcome:
            return decode(outcome["value"])
        return (_Instance if _makes_instances(how, name) else _Thing)(self, len(self.steps) - 1)


def _encoded(value: Any, name: str) -> Any:
    try:
        return encode(value)
    except NotPlainError as error:
        if str(error) == _Hole.__name__:
            return _UNKNOWN
        raise UnsupportedError(
            f"the tests pass an object of type {str(error).lstrip('_')!r} to {name!r}; only plain data can be passed"
        ) from None


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
        return _Steps(self.__table, []).take("call", self.__name, given, keywords, None)


def _makes_instances(how: str, name: str) -> bool:
    return how == "call" and name.lstrip("_")[:1].isupper()


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
        return self._steps.take("method", "__call__", given, keywords, self._index)

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
        return self._steps.take("method", name, given, {}, self._index)

    def _not_of(self) -> tuple[type, ...]:
        return ()


class _Member:
    """A method of an object, or an attribute when it is used as a value."""

    def __init__(self, steps: _Steps, index: int, name: str) -> None:
        self._steps, self._index, self._name = steps, index, name

    def __call__(self, *given: Any, **keywords: Any) -> Any:
        return self._steps.take("method", self._name, given, keywords, self._index)

    def value(self) -> Any:
        return self._steps.take("get", self._name, (), {}, self._index)


class _Hole:
    """Stands for a value that is not known yet: agrees with everything, and notes the calls of its methods."""

    def __init__(self, steps: Any, index: int) -> None:
        self.__steps, self.__index = steps, index

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Member(self.__steps, self.__index, name) if self.__steps else self


_UNKNOWN = object()
_ITERATE = "__iter__"
_AGREEING = (
    "add sub mul truediv floordiv mod pow and or xor eq ne lt le gt ge getitem neg pos abs invert call round"
)
_CONSTANT: dict[str, Any] = {"bool": True, "len": 0, "int": 0, "float": 0.0, "index": 0, "str": "", "hash": 0}
_CONSTANT |= {"contains": True, "setitem": None, "delitem": None, "enter": None, "exit": None}


def _equip() -> None:
    """Give the placeholder and the member every operator."""

    def constant(value: Any) -> Any:
        return lambda self, *others, **keywords: value

    def through(method: str) -> Any:
        return lambda self, *others: getattr(self.value(), method)(*others)

    for word in _AGREEING.split():
        for method in (f"__{word}__", f"__r{word}__"):
            setattr(_Hole, method, lambda self, *others, **keywords: self)
            if word != "call":
                setattr(_Member, method, through(method))
    for word, value in _CONSTANT.items():
        setattr(_Hole, f"__{word}__", constant(value))
        setattr(_Member, f"__{word}__", through(f"__{word}__"))
    for kind, begin in ((_Hole, lambda self: iter(())), (_Member, lambda self: iter(self.value()))):
        setattr(kind, _ITERATE, begin)


_equip()
