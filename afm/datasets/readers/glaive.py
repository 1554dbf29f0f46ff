"""Function calling: ``{system, chat}`` as in glaiveai/glaive-function-calling-v2, the rows of Agent-FLAN's Agent-H (arXiv 2403.12881).

Agent-H asks in four circumstances: tools are given or not, and the question asks for one or not. A row is one of them by its
functions and its first answer. A row whose answer is a call makes a second task: the same question without any functions.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from afm.datasets.readers.row import Reader, abbreviate, row_id, text_field
from afm.datasets.schema import Task
from afm.errors import DataError

_EXCHANGE = re.compile(
    r"\s*USER:(?P<asked>.*?)\n\s*ASSISTANT:(?P<reply>.*?)(?:<\|endoftext\|>|\n\s*(?:USER|FUNCTION RESPONSE):|\Z)",
    re.DOTALL,
)
_CALL = "<functioncall>"
_CALLED = re.compile(r'"name"\s*:\s*"([^"]+)"')
_TWIN = "without_functions"


def _unpacked(_: str, row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield row
    exchange = _EXCHANGE.match(str(row.get("chat")))
    if exchange and _CALL in exchange["reply"] and _functions(str(row.get("system"))):
        yield {**row, _TWIN: True}


def _read(row: Mapping[str, Any], default: str) -> Task:
    exchange = _EXCHANGE.match(text_field(row, "chat"))
    question, answer = (exchange["asked"].strip(), exchange["reply"].strip()) if exchange else ("", "")
    if not question or not answer:
        raise DataError(f"`chat`: expected USER: and ASSISTANT: with texts, got {abbreviate(row['chat'])}")
    system = text_field(row, "system").removeprefix("SYSTEM:").strip()
    tools, asked = _functions(system), _CALL in answer
    called = _CALLED.search(answer)
    if asked and (called is None or (called[1] not in tools)):
        raise DataError(f"`chat`: the answer calls none of the functions {tools}, got {abbreviate(answer)}")
    if row.get(_TWIN):
        system, tools = "", []
    case = f"{'given' if tools else 'absent'}_{'asked' if asked else 'not_asked'}"
    user = {"role": "user", "content": question}
    return Task(
        id=_name(row, default),
        question=question,
        ground_truth=called[1] if called and asked and tools else answer,
        data_source=f"agent_h_{case}",
        extra_info={"agent_h": {"tools": tools, "asked": asked}},
        prompt=({"role": "system", "content": system}, user) if system else (user,),
    )


def _name(row: Mapping[str, Any], default: str) -> str:
    """Rows have no ids, and those of an array may all stand in one line, so what they say is part of the name."""
    digest = hashlib.blake2b(f"{row['system']}{row['chat']}".encode("utf-8", "surrogatepass"), digest_size=6)
    name = row_id(row, f"{default}-{digest.hexdigest()}", "id")
    return f"{name}/{_TWIN}" if row.get(_TWIN) else name


def _functions(system: str) -> list[str]:
    """Names of the functions: JSON objects one after another in the text."""
    names, place, decoder = [], 0, json.JSONDecoder(strict=False)
    while (place := system.find("{", place)) >= 0:
        try:
            function, place = decoder.raw_decode(system, place)
        except ValueError:
            place += 1
            continue
        name = function.get("name")
        if isinstance(name, str):
            names.append(name)
    return names


GLAIVE = Reader("glaive", "", _read, unpack=_unpacked)
