"""Records through filters in one process: for those who have records at hand and need no files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import islice

from afm.distill.filters.base import Filter
from afm.trajectory.record import Record


async def run_filters(
    records: Iterable[Record], filters: Sequence[Filter], *, parallel: int = 32
) -> AsyncIterator[Record]:
    """Stream every record through the filters, in order, ``parallel`` at a time; dropped ones come out too."""
    rows = iter(records)
    while batch := list(islice(rows, parallel)):
        for record in await asyncio.gather(*(pass_filters(record, filters) for record in batch)):
            yield record


async def pass_filters(record: Record, filters: Sequence[Filter]) -> Record:
    """One record through the filters, until one drops it."""
    for stage in filters:
        if not record.kept:
            return record
        record = await stage.check(record)
    return record
