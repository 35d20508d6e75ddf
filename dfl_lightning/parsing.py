"""A command-line parser whose errors are one sentence each, with the nearest right name where a name is wrong."""

import difflib
import re
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import lightning
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser
from omegaconf.errors import OmegaConfBaseException

from dfl_lightning.errors import UserError
from dfl_lightning.settings import settings

NO_SUCH_SETTING = re.compile(
    r"Option '(?P<a>[\w.]+)' is not accepted"
    r"|Group '(?P<group>[\w.]+)' does not accept option '(?P<b>[\w.]+)'"
    r"|unrecognized arguments: (?P<c>\S+)"
)
CLASS_NAME = re.compile(r"(?:dot import path string|Given value|Got value): (?P<name>\S[^\n]*)")
WHY_NO_CLASS = re.compile(
    r"No module named [^\n]*|has no attribute [^\n]*|is abstract|subclass of [^\n]*|returns [^\n]*"
)
WRONG_VALUE = re.compile(
    r'Parser key "(?P<key>[\w.]+)":\s+(?:Expected an? (?P<kind>.+?)\. Got value: (?P<a>.*)'
    r"|Does not validate.*?Subtypes: (?P<kinds>.*?)\n.*Given value: (?P<b>.*))",
    re.S,
)
LIGHTNINGS_OWN = (RuntimeError, TypeError, ValueError)  # raised by Lightning's code itself, these are about its options


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
        if "Unexpected config" in message:
            return (
                f"A config must be a mapping of sections, but one is: {message.partition(':')[2].strip() or 'empty'}."
            )
        key = re.search(r'Parser key "([\w.]+)":', message)
        if key and (classes := self.choices.get(key[1])) and (found := CLASS_NAME.search(message)):
            names = [choice.__name__ for choice in classes]
            why = WHY_NO_CLASS.search(message)
            return (
                f"{key[1]} is {found['name']}, but it must be one of {', '.join(names)} or the class path of an own one"
                f"{f' ({why[0]})' if why else ''}.{nearest(found['name'], names)}"
            )
        if found := WRONG_VALUE.search(message):
            value = (found["a"] or found["b"] or "").strip().split("\n")[0]
            return f"{self._section(found['key'])} is {value}, but it must be {_kind(found['kind'] or found['kinds'])}."
        if "arguments are required" in message:
            return f"{message[0].upper()}{message[1:]}; start from a config, such as --config configs/quickstart.yaml."
        return re.sub(r'^Parser key "([\w.]+)":', r"\1:", message)

    def _section(self, key: str) -> str:
        """The whole name of a class's argument, where one section alone has an argument of that name."""
        sections = [
            section for section, classes in self.choices.items() if any(key in settings(found) for found in classes)
        ]
        return f"{sections[0]}.{key}" if len(sections) == 1 else key

    def _settings(self) -> list[str]:
        """Every name that a setting may have: keys of the sections, and arguments of the classes that can be named."""
        arguments = {name for classes in self.choices.values() for found in classes for name in settings(found)}
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
    types = re.sub(r"typing\.(?:Literal)?|<class '(?:[\w.]*\.)?(?=\w+'>)|[']|(?<=')>", "", types).replace(
        "NoneType", "null"
    )
    return " or ".join(part.strip(" []>") for part in types.split(","))


def fail(message: str) -> NoReturn:
    """Ends the program with one line on standard error and status 2."""
    sys.stderr.write(f"train.py: error: {' '.join(message.split())}\n")
    sys.exit(2)


def mistake(error: Exception) -> str | None:
    """What a person did wrong, if an exception stems from that: in one sentence, or None if it is the program's fault.

    The parser wraps what constructors raise, and Lightning refuses options by exceptions of many kinds.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UserError):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, OmegaConfBaseException):
        return f"The config cannot be resolved: {str(error).splitlines()[0]}."
    if isinstance(error, UnicodeDecodeError):
        return f"A file that should be text is not: {error}."
    frames = traceback.extract_tb(error.__traceback__)
    by_lightning = bool(frames) and Path(frames[-1].filename).is_relative_to(Path(lightning.__file__).parent)
    if isinstance(error, OSError | MisconfigurationException) or (by_lightning and isinstance(error, LIGHTNINGS_OWN)):
        return str(error)
    return None
