"""What a team left: the ended attempts of its event log, and the segments of its records."""

from afm.distill.event_log import ENDS, EventKind, read_events
from afm.trajectory.tags import Segment


def read_attempts(path):
    """Every ended attempt with all its events, in the order of the run's tasks; of one task in the order of the log."""
    running, ended = {}, []
    for event in read_events(path):
        if event.kind is EventKind.TASK:
            running[event.task_id] = []
        running[event.task_id].append(event)
        if event.kind in ENDS:
            ended.append(tuple(running.pop(event.task_id)))
    return sorted(ended, key=lambda events: events[0].meta["position"])


def segments_of(record):
    """The segments of a record as the rules of an agent take them."""
    return tuple(Segment(part.author, part.text) for part in record.segments)
