"""What a plan does to a saved storage at an event."""

from collections.abc import Callable
from contextlib import suppress

import torch

from lowtide._errors import OutOfBudget
from lowtide._runtime.delta.cell import DeltaCell
from lowtide._runtime.delta.room import Room
from lowtide._runtime.swap.cell import State
from lowtide._runtime.swap.script import Act


def move(cell: DeltaCell, act: Act, room: Room, *, waits: bool, has: Callable[[int], bool]) -> bool:
    """False: not yet. `waits`: something else is late for it; `has`: so much may come back now."""
    if act is Act.FETCH:
        if cell.state is State.AWAY and has(cell.bytes):
            with suppress(OutOfBudget, torch.OutOfMemoryError):  # who needs it asks again
                cell.fetch()
        return True
    if act is Act.RELEASE:
        return cell.state is not State.LEAVING or room.let_leave(cell) or not waits
    if cell.state is not State.HERE or not cell.handles:
        if act is Act.DROP:
            room.note(cell)  # of the steps to come, one may have to drop it
        return True
    if not cell.can_go() or not cell.alone():
        return False
    if act is Act.DROP:
        room.drop(cell)
    else:
        cell.leave()
    return True
