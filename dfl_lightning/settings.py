"""Which settings a class has: its constructor's arguments, and those that it hands on to its bases."""

import inspect


def settings(found: type) -> list[str]:
    """Names of a class's constructor arguments; where it ends in ``**options``, those of the next base follow.

    >>> class Base:
    ...     def __init__(self, size: int = 1) -> None: ...
    >>> class Rule(Base):
    ...     def __init__(self, width: int = 2, **options) -> None: ...
    >>> settings(Rule)
    ['width', 'size']
    """
    names: list[str] = []
    for base in found.__mro__:
        if (constructor := vars(base).get("__init__")) is None:
            continue
        try:
            arguments = list(inspect.signature(constructor).parameters.values())[1:]
        except ValueError:  # a class of another language
            break
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names += [one.name for one in arguments if one.kind in kinds and one.name not in names]
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in arguments):
            break
    return names
