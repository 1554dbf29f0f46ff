"""Our own trajectory JSONL (:class:`afm.trajectory.record.Record`)."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import ValidationError

from afm.errors import DataError
from afm.trajectory.convert.base import Context, Format, Read
from afm.trajectory.io import explain
from afm.trajectory.record import Record


class Coa(Format):
    """One record a line."""

    name: ClassVar[str] = "coa"

    def known(self, row: Any) -> bool:
        """See :class:`Format`."""
        return isinstance(row, dict) and "segments" in row

    def read(self, row: Any, context: Context) -> Read:
        """See :class:`Format`."""
        try:
            return Read(Record.model_validate(row))
        except ValidationError as error:
            raise DataError(explain(error)) from None

    def write(self, record: Record, context: Context) -> Any:
        """See :class:`Format`."""
        return record.model_dump(mode="json")
