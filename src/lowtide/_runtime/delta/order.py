"""Calls that run again and cells that are dropped, in order: what of it is of use, how long."""

from collections import Counter
from collections.abc import Callable, Sequence

from lowtide._runtime.delta.cell import DeltaCell
from lowtide._runtime.delta.recipe import Call, Value
from lowtide._runtime.swap.cell import State

Item = Call | DeltaCell  # what runs again, or is dropped

ON_DEVICE = (State.HERE, State.LEAVING, State.COMING, State.AWAY)  # it can be read


class Gone(Exception):
    """Something cannot be made again, as what it is made from is no more."""

    def __str__(self) -> str:
        return "what a dropped value is made from is no more: please report it"


def made_by(call: Call) -> list[Value]:
    """Its results, and what it wrote to, as far as anybody knows them."""
    known = [ref() for _, ref in (*call.makes, *call.writes)]
    return [value for value in known if value is not None]


def useful(
    items: Sequence[Item], is_there: Callable[[Value], bool]
) -> tuple[list[Item], list[Value]]:
    """Without calls whose results nobody is short of; and what the others are short of.

    Who wrote `items` may have expected other values to be there. A value that is saved is followed
    from item to item. Any other is there if it is now, or when a call has made it for those that
    read it before it is made again.
    """
    short = _shortages(items, is_there)
    wanted: dict[int, Value] = {}
    found: list[Item] = []
    for item, missing in zip(reversed(items), reversed(short), strict=True):
        if isinstance(item, Call):
            made = made_by(item)
            if not any(id(value) in missing or id(value) in wanted for value in made):
                continue
            for value in made:
                wanted.pop(id(value), None)
            for source in item.sources:
                if not source.ignored and id(source.value) in missing:
                    wanted[id(source.value)] = source.value
        found.append(item)
    found.reverse()
    return found, [value for value in wanted.values() if not is_there(value)]


def _shortages(items: Sequence[Item], is_there: Callable[[Value], bool]) -> list[set[int]]:
    """For each item, of what it reads and of the saved values that it makes: those not there."""
    gone: dict[int, bool] = {}  # of those that are saved, by now

    def is_gone(value: Value) -> bool:
        if value.saved() is None:
            return not is_there(value)
        return gone.setdefault(id(value), not is_there(value))

    found: list[set[int]] = []
    for item in items:
        missing: set[int] = set()
        if isinstance(item, Call):
            made = [value for value in made_by(item) if value.saved() is not None]
            read = [source.value for source in item.sources if not source.ignored]
            missing = {id(value) for value in (*made, *read) if is_gone(value)}
            gone.update((id(value), False) for value in made)
        elif item.value is not None and not item.value.spoilt and item.alone():
            gone[id(item.value)] = True
        found.append(missing)
    return found


def reads(
    items: Sequence[Item], target: Value | None
) -> tuple["Counter[int]", list[dict[int, int]]]:
    """How often values are read before they are made again: from the start; from each item on."""
    left = Counter(() if target is None else (id(target),))
    later: list[dict[int, int]] = []
    for item in reversed(items):
        then: dict[int, int] = {}
        if isinstance(item, Call):
            then = {id(value): left.pop(id(value), 0) for value in made_by(item)}
            left.update(id(source.value) for source in item.sources if not source.ignored)
        later.append(then)
    later.reverse()
    return left, later
