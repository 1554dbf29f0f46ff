"""Stand-ins for the program in its tests: functions and objects whose answers are looked up."""

from __future__ import annotations

import builtins
from collections import deque
from functools import partial
from typing import Any, NoReturn, Protocol

from afm.rewards.code_tests.inside.plain import NotPlainError, decode, encode, has_nan


class UnsupportedError(BaseException):
    """The tests need the program in the same process."""


class FailedError(BaseException):
    """The program crashed or was stopped in this call. No ``except Exception`` of the tests may hide that."""


class UnknownError(BaseException):
    """The tests cannot continue without an answer from the program."""


class Table(Protocol):
    """The program's answers.

    Attributes:
        hole: Placeholder for an unknown answer.
        nan: Whether the tests expect NaN.
        patience: How often the truth of placeholders may still be tested before a new call appears.
        words: Answers of the program's own methods by name, where the tests let them judge an answer.
    """

    hole: type[Hole]
    nan: bool
    patience: int
    words: dict[str, set[bool]]

    def ask_object(self) -> None:
        """Raise an error that ends the tests if they must not use an object of the program."""

    def outcome(self, session: list[Any]) -> Any:
        """Return the program's answer to the last step of ``session``, or ``None`` if not asked yet."""

    def refused(self, reason: str) -> UnsupportedError:
        """Return the error to raise if the tests cannot judge."""

    def lost(self, reason: str) -> FailedError:
        """Return the error to raise if the program crashed."""

    def ended(self, reason: str) -> BaseException:
        """Return one of the two errors above. A problem that appears only with answers is the program's fault."""


class _Call:
    """A step of a session (see ``candidate.py``) without its arguments.

    Attributes:
        in_place: Whether the tests look at the changed arguments instead of the value.
    """

    def __init__(self, how: str, name: str, index: Any = None, in_place: bool = False) -> None:
        self.how, self.name, self.index, self.in_place = how, name, index, in_place
        self.makes_instance = how == "call" and _is_class(name)


def _is_class(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _is_plain(name: str) -> bool:
    """Return whether strings, numbers or collections have a method of that name."""
    return any(
        hasattr(kind, name) for kind in (str, bytes, int, float, complex, list, tuple, dict, set, range)
    )


class _Steps:
    """The calls that lead to an object of the program."""

    def __init__(self, table: Table, steps: list[Any]) -> None:
        self.table, self.steps = table, steps

    def take(self, call: _Call, values: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Make a call: return its value, raise its error, or return a placeholder."""
        if call.how != "call":
            self.table.ask_object()
        arguments, named = self._encoded(list(values), call.name), self._encoded(keywords, call.name)
        if arguments is _UNKNOWN or named is _UNKNOWN:
            return self.table.hole(self.table)
        self.steps.append([call.how, call.name, arguments, named, call.index])
        outcome = self.table.outcome(list(self.steps))
        if outcome is None:
            # What a class returns is an object: its calls can be foreseen. Of a function's or a method's result they
            # cannot be: `f(1).startswith("gold")` would hand the gold answer to the program.
            return self.table.hole(self.table, self if call.makes_instance else None, of_answer=True)
        if "failed" in outcome:
            raise self.table.lost(outcome["failed"])
        if "raised" in outcome:
            raise self._exception(outcome)
        if call.how == "method" and call.name != "__call__" and (values or keywords) and not call.in_place:
            self._note_word(call.name, outcome)
        if "value" not in outcome:
            return (_Instance if call.makes_instance else _Thing)(self, len(self.steps) - 1)
        if not self.table.nan and has_nan([outcome["value"], outcome.get("arguments")]):
            raise self.table.lost("not a number (NaN)")
        value = decode(outcome["value"])
        if value is None or call.in_place:
            # Only work in place is visible. Otherwise `f(data) == sum(data)` would compare with data that the program changed.
            for argument, now in zip(values, decode(outcome.get("arguments", []))):  # noqa: B905 - Python 3.9
                _change(argument, now)
        return value

    def _encoded(self, value: Any, name: str) -> Any:
        try:
            return encode(value)
        except NotPlainError as error:
            kind = str(error)
        if kind in (Hole.__name__, NayHole.__name__):
            return _UNKNOWN
        if kind == _Thing.__name__:
            raise self.table.lost("the program returned an object; only plain data can be passed on")
        if kind == _Member.__name__:
            raise self.table.ended(
                "the tests pass a part of an object of the program on; only plain data can be passed"
            )
        raise self.table.refused(
            f"the tests pass an object of type {kind.lstrip('_')!r} to {name!r}; only plain data can be passed"
        )

    def _exception(self, outcome: dict[str, Any]) -> BaseException:
        """Return the program's error, as the built-in class that it is or inherits from."""
        name, text = outcome["raised"], outcome.get("message", "")
        known = getattr(builtins, outcome.get("known", name), None)
        kind = known if isinstance(known, type) and issubclass(known, BaseException) else Exception
        if issubclass(kind, _SWALLOWED):
            # `all(map(f, cases))` would take it for the end of the cases.
            return self.table.lost(f"{name}: {text}".rstrip(": "))
        return kind(text) if kind.__name__ == name else type(name, (kind,), {})(text)

    def _note_word(self, name: str, outcome: dict[str, Any]) -> None:
        """Record the answer of a method, called with arguments, of an object that a function returned."""
        how, first = self.steps[0][:2]
        answer = outcome.get("value", True)
        made_by_tests = how == "call" and _is_class(first) and first != "Solution"
        if isinstance(answer, bool) and not made_by_tests and len(self.steps) > 1 + (first == "Solution"):
            self.table.words.setdefault(name, set()).add(answer)


def _change(argument: Any, now: Any) -> None:
    """Change ``argument`` in place as the program did."""
    if type(argument) is not type(now) or argument == now:
        return
    if isinstance(argument, list):
        argument[:] = now
    elif isinstance(argument, (dict, set, deque)):
        argument.clear()
        (argument.extend if isinstance(argument, deque) else argument.update)(now)


class Function:
    """A name of the program: a function or a class."""

    def __init__(self, table: Table, name: str) -> None:
        self.__table, self.__name = table, name
        self.__name__ = name

    def __call__(self, *values: Any, **keywords: Any) -> Any:
        """Return the program's answer to this call."""
        return self._asked(False, *values, **keywords)

    def __instancecheck__(self, thing: Any) -> NoReturn:
        raise self.__table.refused(f"the tests ask whether something is a {self.__name!r} of the program")

    __subclasscheck__ = __instancecheck__

    def _asked(self, in_place: bool, /, *values: Any, **keywords: Any) -> Any:
        return _Steps(self.__table, []).take(_Call("call", self.__name, None, in_place), values, keywords)


def in_place(function: Any) -> Any:
    """Return ``function`` for a call whose value the tests do not use."""
    return partial(function._asked, True) if isinstance(function, (Function, _Member)) else function


class _Thing:
    """An object that a function of the program returned.

    It equals only itself, whatever the program's ``__eq__`` returns. It lacks the methods of strings, numbers and
    collections, because a test such as ``f(1).startswith("a")`` expects a string.
    """

    def __init__(self, steps: _Steps, index: int) -> None:
        self._steps, self._index = steps, index

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or (not isinstance(self, _Instance) and _is_plain(name)):
            raise AttributeError(f"the program returned an object without {name!r}")
        return _Member(self._steps, self._index, name)

    def __call__(self, *values: Any, **keywords: Any) -> Any:
        return self._steps.take(_Call("method", "__call__", self._index), values, keywords)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Thing) and self._related(other))

    __hash__ = object.__hash__

    def _related(self, other: _Thing) -> NoReturn:
        if isinstance(self, _Instance) or isinstance(other, _Instance):  # the tests have made one
            raise self._steps.table.refused(
                "the tests relate two objects of the program; only values can be compared"
            )
        raise self._steps.table.lost("the program returned objects; only values can be compared")


class _Instance(_Thing):
    """An instance of a class of the program. Its own methods count, whatever their names."""

    def __bool__(self) -> bool:
        return True


class _Member:
    """A method of an object, or an attribute if it is used as a value."""

    def __init__(self, steps: _Steps, index: int, name: str) -> None:
        self._steps, self._index, self._name = steps, index, name

    def __call__(self, *values: Any, **keywords: Any) -> Any:
        return self._asked(False, *values, **keywords)

    def _asked(self, in_place: bool, /, *values: Any, **keywords: Any) -> Any:
        return self._steps.take(_Call("method", self._name, self._index, in_place), values, keywords)

    def value(self) -> Any:
        return self._steps.take(_Call("get", self._name, self._index), (), {})


class Hole:
    """A placeholder for an unknown value. It agrees with everything and records the calls of its methods.

    Args:
        steps: The steps that lead to an object of the program, if it will be one.
        of_answer: Whether it replaces the program's answer or a method of it, not a value that the tests derive from it.
    """

    def __init__(self, table: Table, steps: Any = None, of_answer: bool = False) -> None:
        self.__table, self.__steps, self.__of_answer = table, steps, of_answer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__steps:
            return _Member(self.__steps, 0, name)
        return type(self)(self.__table, None, self.__of_answer and not _is_plain(name))

    def __call__(self, *values: Any, **keywords: Any) -> Any:
        """Call the unknown value or a method of it."""
        if self.__of_answer and (values or keywords):
            self.__table.ask_object()
        return self._derived()

    def _derived(self) -> Hole:
        return type(self)(self.__table)

    def __bool__(self) -> bool:
        self.__table.patience -= 1
        if self.__table.patience < 0:
            raise UnknownError("the tests wait for what the program answers")
        return True


class NayHole(Hole):
    """A placeholder that agrees with nothing. A check that passes with both placeholders passes with any answer."""

    def __bool__(self) -> bool:
        return False

    def __contains__(self, item: Any) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter([self])


_UNKNOWN = object()
_SWALLOWED = (StopIteration, StopAsyncIteration, GeneratorExit)
_ITERATE = "__iter__"
_AGREEING = (
    "add sub mul truediv floordiv mod pow and or xor eq ne lt le gt ge getitem neg pos abs invert round"
)
_RELATING = "add sub mul truediv floordiv mod pow and or xor lt le gt ge"
_OF_INSTANCES: dict[str, Any] = {
    "len": int,
    "str": str,
    "repr": str,
    "contains": bool,
    "getitem": lambda value: value,
}
"""Methods by which Python asks an instance of a class of the program, and what each must return."""
_CONSTANT: dict[str, Any] = {"len": 0, "int": 0, "float": 0.0, "index": 0, "str": "", "hash": 0}
_CONSTANT |= {"contains": True, "setitem": None, "delitem": None, "enter": None, "exit": None}


def _equip() -> None:
    """Give every operator to the placeholder and the member, and give objects those that they must reject."""

    def constant(value: Any) -> Any:
        return lambda self, *others, **keywords: value

    def through(method: str) -> Any:
        return lambda self, *others: getattr(self.value(), method)(*others)

    def related(self: Any, other: Any) -> Any:
        return self._related(other) if isinstance(other, _Thing) else NotImplemented

    def asked(method: str, kind: Any) -> Any:
        return lambda self, *values: kind(self._steps.take(_Call("method", method, self._index), values, {}))

    for word, kind in _OF_INSTANCES.items():
        setattr(_Instance, f"__{word}__", asked(f"__{word}__", kind))

    for word in _RELATING.split():
        setattr(_Thing, f"__{word}__", related)
    for word in _AGREEING.split():
        for method in (f"__{word}__", f"__r{word}__"):
            setattr(Hole, method, lambda self, *others: self._derived())
            setattr(_Member, method, through(method))
    for word, value in _CONSTANT.items():
        setattr(Hole, f"__{word}__", constant(value))
    for word in ("bool", *_CONSTANT):
        setattr(_Member, f"__{word}__", through(f"__{word}__"))
    for proxy, begin in ((Hole, lambda self: iter(())), (_Member, lambda self: iter(self.value()))):
        setattr(proxy, _ITERATE, begin)


_equip()
