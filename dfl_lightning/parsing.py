"""A command-line parser whose errors are one sentence each, with the nearest right name where a name is wrong."""

import difflib
import inspect
import re
import sys
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from dfl_lightning.errors import UserError

NO_SUCH_SETTING = re.compile(
    r"Option '(?P<a>[\w.]+)' is not accepted"
    r"|Group '(?P<group>[\w.]+)' does not accept option '(?P<b>[\w.]+)'"
    r"|unrecognized arguments: (?P<c>\S+)"
)
NO_SUCH_CLASS = re.compile(r'Parser key "(?P<key>[\w.]+)":.*Expected a dot import path string: (?P<name>\S+)', re.S)
WRONG_VALUE = re.compile(
    r'Parser key "(?P<key>[\w.]+)":\s+(?:Expected an? (?P<kind>.+?)\. Got value: (?P<a>.*)'
    r"|Does not validate.*?Subtypes: (?P<kinds>.*?)\n.*Given value: (?P<b>.*))",
    re.S,
)


class OneSentenceParser(LightningArgumentParser):
    """Lightning's parser with short errors, and a main help that fits a screen.

    Attributes:
        choices: the classes that can be named, by the setting that names them.
        main_help: text of ``--help``; None for the parsers of single classes, which print their own.
    """

    choices: dict[str, list[type]] = {}
    main_help: str | None = None

    def format_help(self, formatter: Any = None) -> str:
        return self.main_help or super().format_help(formatter)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        fail(self.explain(message))

    def explain(self, message: str) -> str:
        """The parser's message in one sentence about settings instead of types."""
        if found := NO_SUCH_SETTING.search(message):
            name = (found["a"] or found["b"] or found["c"]).lstrip("-").split("=")[0]
            name = f"{found['group']}.{name}" if found["group"] else name.removesuffix(".class_path")
            return f"There is no setting {name}.{nearest(name, self._settings())}"
        if (found := NO_SUCH_CLASS.search(message)) and (classes := self.choices.get(found["key"])):
            names = [choice.__name__ for choice in classes]
            return (
                f"{found['key']} is {found['name']}, but it must be one of {', '.join(names)} "
                f"or the class path of an own one.{nearest(found['name'], names)}"
            )
        if found := WRONG_VALUE.search(message):
            value = (found["a"] or found["b"] or "").strip().split("\n")[0]
            return f"{found['key']} is {value}, but it must be {_kind(found['kind'] or found['kinds'])}."
        return re.sub(r'^Parser key "([\w.]+)":', r"\1:", message)

    def _settings(self) -> list[str]:
        """Every name that a setting may have: keys of the sections, and arguments of the classes that can be named."""
        arguments = {
            name
            for classes in self.choices.values()
            for found in classes
            for name in inspect.signature(found).parameters
        }
        return [action.dest for action in self._actions] + sorted(arguments)


def nearest(name: str, known: list[str]) -> str:
    """`` Did you mean ...?`` for the known name that is nearest to a wrong one, or nothing.

    >>> nearest("gama", ["gamma", "kappa"])
    ' Did you mean gamma?'
    """
    close = difflib.get_close_matches(name, known, n=1) or difflib.get_close_matches(
        name.rpartition(".")[2], known, n=1
    )
    return f" Did you mean {close[0]}?" if close else ""


def _kind(types: str) -> str:
    """Python's names of types in a reader's words.

    >>> _kind("[<class 'int'>, <class 'NoneType'>]"), _kind("typing.Literal['each', 'none']")
    ('int or null', 'each or none')
    """
    types = re.sub(r"typing\.Literal|<class '(?:[\w.]*\.)?(?=\w+'>)|[][>']", "", types).replace("NoneType", "null")
    return " or ".join(part.strip() for part in types.split(","))


def fail(message: str) -> NoReturn:
    """Ends the program with one line on standard error and status 2."""
    sys.stderr.write(f"train.py: error: {' '.join(message.split())}\n")
    sys.exit(2)


def user_error(error: BaseException | None) -> UserError | None:
    """The mistake of the user that an exception stems from, if any; the parser wraps those of constructors."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error
