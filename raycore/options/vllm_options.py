"""vLLM's options that raycore does not have. A value that needs nothing to be done, such as the default, is accepted.

So scripts and command lines that set such an option to its default run unchanged. Other values raise InvalidConfig.
`raycore.config.vllm_table` lists them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from raycore.errors import InvalidConfig
from raycore.json_fields import shortened

ANY = "any value"


class VllmOption(NamedTuple):
    """A vLLM option that raycore does not have."""

    name: str
    values: tuple[object, ...]
    """The accepted values, which have no effect. None is always accepted. `ANY` stands for all values."""
    reason: str
    """Why other values are refused, and what to use instead. Shown in the docs and in the error."""
    flags: tuple[str, ...] = ()
    """The option's flags. Empty: the name with hyphens."""

    @property
    def is_bool(self) -> bool:
        """Whether the option's flag takes no value."""
        return bool(self.values) and isinstance(self.values[0], bool)

    @property
    def takes_any(self) -> bool:
        """Whether all values are accepted."""
        return ANY in self.values

    @property
    def neutral(self) -> object:
        """What an option is that the user doesn't set: the value that says what raycore does, if there is only one."""
        return None if self.takes_any or not self.values else self.values[0]

    @property
    def is_without_effect(self) -> bool:
        """Whether all values that vLLM takes are accepted."""
        return self.takes_any or (self.is_bool and {True, False} <= set(self.values))

    @staticmethod
    def parse(text: str) -> object:
        """The value that a flag's text stands for: None, True, False, decoded JSON, or else the text itself."""
        if text.lower() in ("none", "true", "false"):
            return {"none": None, "true": True, "false": False}[text.lower()]
        try:
            return json.loads(text)
        except ValueError:
            return text

    def check(self, value: object) -> None:
        """Raise InvalidConfig if raycore doesn't accept this value of the option."""
        if value is not None and not self.takes_any and value not in self.values:
            raise InvalidConfig(f"{self.name}={shortened(value)} is not supported: {self.reason}{self._advice}")

    @property
    def _advice(self) -> str:
        usable = [each for each in self.values if each is not None]
        return f"; omit it, or give {' or '.join(map(repr, usable))}" if usable else "; omit it"


def without_effect(option: str, given: dict[str, Any], settings: Iterable[VllmOption]) -> dict[str, Any]:
    """Check those settings of an option, an object in JSON, that raycore doesn't have. Return the other settings.

    Raises:
        InvalidConfig: one of them has a value that raycore does not support.
    """
    own = dict(given)
    for each in settings:
        try:
            each.check(own.pop(each.name, None))
        except InvalidConfig as error:
            raise InvalidConfig(f"{option}: {error}") from None
    return own
