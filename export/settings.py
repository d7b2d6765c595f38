"""JSON objects and metadata whose values are checked as they are read."""

import math

from export.errors import ExportError


class Settings:
    """A JSON object whose values are checked as they are read."""

    def __init__(self, values: dict, where: str):
        self.values, self.where = values, where

    def wrong(self, key: str, expected: str, found: str = "") -> ExportError:
        """found: in words, where the value itself does not show what is wrong."""
        found = found or repr(self.values.get(key))[:100]
        return ExportError(f"{self.where}: {key}: expected {expected}, found {found}")

    def integer(self, key: str, default: int | None, most: int = 1 << 24) -> int:
        """most: what no size of a model comes near, so that what is built of it fits in memory."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, "a whole number above 0")
        if value > most:
            raise self.wrong(key, f"a number up to {most}")
        return value

    def number(self, key: str, default: float | None) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, "a number")
        if not math.isfinite(value):
            raise self.wrong(key, "a finite number")
        return float(value)

    def number_or(self, key: str, default: float) -> float:
        """The default also where the key is null."""
        return default if self.values.get(key) is None else self.number(key, None)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key, default)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return bool(value)

    def refuse(self, **usual: bool) -> None:
        """Flags that change the arithmetic, each with the value that it has to have."""
        for key, value in usual.items():
            if self.values.get(key) is not None and self.flag(key) != value:
                said = f"{key} false" if value else key
                raise ExportError(f"{self.where}: {said} is not supported")

    def ids(self, key: str, default: int | None) -> list[int]:
        """An id, a list of ids, or null; negative ones mean none."""
        value = self.values.get(key, default)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise self.wrong(key, "a token id, a list of them, or null")
        return [i for i in dict.fromkeys(ids) if i >= 0]
