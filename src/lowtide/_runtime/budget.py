"""A training loop under a budget of bytes: hooks, tiers, policy and driver put together."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import inf
from pathlib import Path
from statistics import median
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lowtide._analyze.load import find_peak
from lowtide._errors import BadInput
from lowtide._ir import Machine, Plan
from lowtide._machine.host import available_bytes
from lowtide._machine.link import seconds as link_seconds
from lowtide._machine.measure import machine_here
from lowtide._policy.budget import is_share, parse_bytes
from lowtide._policy.host import Host
from lowtide._report.delta_text import DeltaSummary
from lowtide._report.plan_html import Measured, render_plan
from lowtide._report.swap_text import SwapSummary
from lowtide._runtime.awaited import Awaited
from lowtide._runtime.delta.cap import Giver
from lowtide._runtime.delta.choose import POLICIES as DYNAMIC
from lowtide._runtime.delta.driver import Dynamic
from lowtide._runtime.delta.gate import load_gate
from lowtide._runtime.delta.idle import IdleState
from lowtide._runtime.delta.native_tape import load_tape
from lowtide._runtime.delta.planned import Planned
from lowtide._runtime.fused.groups import make_fuser
from lowtide._runtime.holdings import device_in_use, device_of, parameters, persistent, trained
from lowtide._runtime.plans import SWAPPING_SPARE, plan_by_swapping, plan_by_tide
from lowtide._runtime.swap.driver import Driver
from lowtide._runtime.swap.file_tier import FileTier
from lowtide._runtime.swap.follow import in_words
from lowtide._runtime.swap.modes import Mode as SwapMode
from lowtide._runtime.swap.native_saves import load_saves
from lowtide._runtime.swap.pinned_tier import PinnedTier
from lowtide._runtime.swap.quiet import quiet
from lowtide._runtime.swap.saved import Saved, Unwatched
from lowtide._runtime.swap.script import Observed
from lowtide._runtime.swap.states import hook_state
from lowtide._runtime.swap.tier import Tier
from lowtide._runtime.told import summarize, tell_status

TIDE = "tide"  # DELTA's driver, with plans
POLICIES = (TIDE, "autoswap", *DYNAMIC)
_OURS = (TIDE, "delta")  # the others are as they were published
FREE = "free"  # the budget that is as low as can be without a wait
_SMALLEST = 1 << 20  # bytes of a storage that is worth moving
_SMALLEST_SAVED = 1 << 14  # ... where values may also be dropped
_FILE_SPEED = 1e9  # bytes a second, of a file on the disk
_LARGE, _PIECE = 64 << 20, 512 << 20  # bytes: of a fast copy; of state that is stepped at once
_UNKNOWN_SHARE, _KNOWN_SHARE = 0.5, 0.8  # of the room that may be used before all that can leaves
_LEAST_PAGED = 1 << 30  # bytes: of less, too much is lost in pages that are not full
_LONG_ENOUGH = 12  # steps without a plan
_PACED = 4  # steps without a plan that show how fast the host can be, beside a device
_HOST_SHARE = 0.5  # of the main memory that is free, unless the user says how much


class Budgeted:
    """Holds a loop under its budget until `undo`."""

    def __init__(
        self,
        budget: str | float,
        *,
        policy: str,
        verify: str,
        host_budget: str | int | None,
        folder: Path | None,
        model: nn.Module | None,
        optimizers: Sequence[Optimizer],
        undo: ExitStack,
        tell: Callable[[str], None],
        live: Callable[[str], None] | None = None,
    ) -> None:
        self._budget = budget
        self._live = live or (lambda _: None)  # for those who watch
        self._bytes: int | None = None
        if budget != FREE and not is_share(str(budget)):
            self._bytes = parse_bytes(str(budget), 1)
        self._host_budget = None if host_budget is None else parse_bytes(str(host_budget), 1)
        self._folder = folder
        self._machine: Machine | None = None
        self._model = model
        self._given = optimizers
        self._device = device_of(itertools.chain(parameters(model), *map(trained, optimizers)))
        self._tiers: dict[torch.device, Tier] = {}
        on_cuda = self._device is not None and self._device.type == "cuda"
        self._driver = Driver(
            *(self._tier, self._plan, self._is_short, _SMALLEST, _PIECE, load_saves),
            may_rest=budget == FREE,
            first_trace=_PACED if on_cuda else 2,
        )
        self._dynamic: Dynamic | None = None
        self._awaited: Awaited | None = None  # the device, where steps are watched op by op
        self._policy, self._verify, self._tell = policy, verify, tell
        if policy == TIDE and budget == FREE:
            self._policy = "autoswap"  # which knows what swapping costs no time
        elif policy in DYNAMIC and budget == FREE:
            raise BadInput(f"policy {policy} needs a budget in bytes or as a share: give one")
        is_dynamic = self._policy in (TIDE, *DYNAMIC)
        self._saved = Saved(self._tier, Unwatched() if is_dynamic else self._driver, _SMALLEST)
        if not is_dynamic:
            self._driver.start(self._saved)
        self._known: WeakSet[Optimizer] = WeakSet()  # those whose state is watched
        self._undo = ExitStack()
        self._measured_peak = 0
        self._follows_plan = False
        self._closed = False
        undo.callback(self._close)
        undo.callback(self._undo.close)
        undo.callback(register_optimizer_step_pre_hook(self._stepping).remove)
        undo.callback(register_optimizer_step_post_hook(self._stepped).remove)
        if not self._saved.install(undo):
            raise BadInput("hooks on saved tensors are there already: enter lowtide.fit first")
        device = self._device or device_in_use()
        if is_dynamic and device is not None:
            self._begin(device)
        elif is_dynamic:
            self._awaited = Awaited(self._begin, undo)

    def _begin(self, device: torch.device) -> None:
        """Watch every op, now that the device is known."""
        self._device = device
        self._dynamic = Dynamic(
            device,
            self._bytes,
            "delta" if self._policy == TIDE else self._policy,
            self._verify,
            self._speed,
            lambda keeper: IdleState(self._tier, keeper, _SMALLEST, _PIECE),
            make_fuser(device, self._verify, self._tell) if self._policy in _OURS else None,
            Planned(self._plan_tide, self._tell) if self._policy == TIDE else None,
            *(lambda: load_gate(self._tell), load_saves, load_tape),
        )
        self._saved.watch(self._dynamic, _SMALLEST_SAVED, self._dynamic.make_cell)
        self._dynamic.start(self._saved, self._given)

    def waits(self) -> bool:
        """For a model that runs, to know the device."""
        return self._dynamic is None and self._awaited is not None

    def mark(self) -> None:
        """A step is over."""
        if self.waits():
            return
        if self._dynamic is not None:
            with self._saved:
                self._dynamic.mark()
            watching = self._dynamic.watching
            if self._bytes is None and watching.has_trained:
                self._bytes = parse_bytes(str(self._budget), watching.plain_peak)
                self._dynamic.set_budget(self._bytes)
            return
        with self._saved:
            self._driver.mark()
        on_cuda = self._device is not None and self._device.type == "cuda"
        if on_cuda and self._driver.following.scripts and not self._follows_plan:
            self._follows_plan = True  # once: the peak of the steps before is not the plan's
            torch.cuda.reset_peak_memory_stats(self._device)

    def is_settled(self) -> bool:
        """Whether steps go by a plan, need none, or are not going to have one soon.

        Until then they say little of the steps to come, and what is going to leave is taken for
        what stays: no time to lay anything out.
        """
        if self._dynamic is not None:
            return self._dynamic.is_settled()
        return self._driver.has_followed() or self._driver.steps.total() >= _LONG_ENOUGH

    def summary(self) -> SwapSummary:
        """What was planned and what was seen."""
        self._look_at_peak()
        scripts = self._driver.following.scripts
        script = max(scripts, key=lambda script: len(script.seconds), default=None)
        seconds = sorted(script.seconds) if script is not None else []
        return SwapSummary(
            budget_bytes=self._bytes,
            steps=in_words(self._driver.steps, SwapMode),
            plan=script.plan if script is not None else None,
            swapped_bytes=script.swapped_bytes if script is not None else 0,
            measured_peak_bytes=self._measured_peak,
            measured_seconds=seconds[len(seconds) // 2] if seconds else 0.0,
            below_bytes=sum(tier.held_bytes() for tier in self._tiers.values()),
        )

    def render(self) -> str:
        """A page about the plan that was followed most."""
        self._look_at_peak()
        dynamic = self._dynamic
        peak = self._measured_peak
        scripts = self._driver.following.scripts
        if dynamic is not None and dynamic.planned is not None:
            scripts = dynamic.planned.following.scripts
            peak = dynamic.watching.peaks[-1] if dynamic.watching.peaks else 0
        script = max(scripts, key=lambda script: len(script.seconds), default=None)
        if script is None:
            raise BadInput("no step was planned yet: a report needs a few steps by policy tide")
        measured = Measured(peak, median(script.seconds)) if script.seconds else None
        return render_plan(
            script.trace, script.plan, self._machine, measured, budget_bytes=self._bytes
        )

    def status(self) -> str:
        """The last step in one line."""
        return tell_status(self._driver, self._dynamic, self._bytes)

    def dynamic_summary(self) -> DeltaSummary | None:
        """What was seen where steps are watched op by op."""
        if self._dynamic is None:
            return None
        return summarize(self._dynamic, self._policy, self._bytes)

    def _speed(self) -> float:
        """Bytes a second to the tier below."""
        assert self._device is not None
        if self._device.type != "cuda":
            return _FILE_SPEED
        return _LARGE / link_seconds(self._machine_on(self._device).out, _LARGE)

    def _look_at_peak(self) -> None:
        if self._follows_plan and not self._closed:
            self._measured_peak = torch.cuda.max_memory_allocated(self._device)

    def _close(self) -> None:
        self._look_at_peak()
        self._closed = True
        failures: list[Exception] = []
        with self._saved:
            stop = self._driver.stop if self._dynamic is None else self._dynamic.stop
            for come_back in (stop, *(cell.have for cell in self._saved.cells())):
                try:
                    come_back()
                except Exception as error:  # noqa: BLE001 - the others come back all the same
                    failures.append(error)
            self._model, self._given = None, ()  # whoever keeps the summary keeps no model
            self._driver.forget()
            if self._dynamic is not None:
                self._dynamic.forget()
            if failures:
                raise failures[0]  # what is still below keeps its tier
            for tier in self._tiers.values():
                tier.close()

    def _tier(self, device: torch.device) -> Tier | None:
        """What lies below `device`, if it is the one under a budget."""
        if self.waits():
            return None
        if self._device is None and (device.type != "cpu" or not torch.cuda.is_initialized()):
            self._device = device
        if device != self._device:
            return None
        tier = self._tiers.get(device)
        if tier is None:
            if device.type == "cuda":
                if self._host_budget is None:  # from now on: what is pinned is no longer free
                    self._host_budget = int(_HOST_SHARE * available_bytes())
                tier = PinnedTier(device, self._host_budget)
            elif device.type == "cpu":
                tier = FileTier(self._folder, self._host_budget)
            else:
                return None
            self._tiers[device] = tier
        return tier

    def _stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._known:
            self._known.add(optimizer)
            self._watch(optimizer)
            if self._awaited is not None:
                self._awaited.is_on(device_of(trained(optimizer)))
        driver = self._driver if self._dynamic is None else self._dynamic
        with self._saved:
            driver.stepping(optimizer, (*args[1:], *kwargs.values()))

    def _watch(self, optimizer: Optimizer) -> None:
        """Have its state on the device whenever somebody asks for it as a whole."""

        def need(optimizer: Optimizer) -> None:
            if self._dynamic is None:  # else there may be no room: it shows where it is
                with self._saved:
                    self._driver.optimizers.need(optimizer)

        def reloaded() -> None:
            driver = self._driver if self._dynamic is None else self._dynamic.idle
            with self._saved:
                driver.reloaded()

        hook_state(optimizer, need, reloaded, self._undo)

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        driver = self._driver if self._dynamic is None else self._dynamic
        with self._saved:
            driver.stepped(optimizer)

    def _is_short(self) -> bool:
        """Whether so much of what is not taken for good is in use that all that can leave should.

        Half of it as long as nothing is known of a step; later only the last part: steps that do
        not go by their plan are mostly like those that do.
        """
        if self._bytes is None or self._device is None or self._budget == FREE:
            return False
        optimizers = {id(o): o for o in (*self._given, *self._driver.optimizers.all())}
        stays = sum(p.nbytes for p in persistent(self._model, [*optimizers.values()], self._device))
        if self._device.type == "cuda":
            held = torch.cuda.memory_allocated(self._device)
        else:
            held = stays + sum(cell.bytes for cell in self._saved.cells() if cell.holds())
        share = _KNOWN_SHARE if self._driver.following.scripts else _UNKNOWN_SHARE
        return held > stays + share * (self._bytes - stays)

    def shrink(self, less: int, slower: float = inf) -> bool:
        """Hold so much less, and take at most `slower` times as long. False: that cannot be."""
        if self._dynamic is None:
            with self._saved:
                return self._budget != FREE and self._driver.shrink(less, slower)
        return self._dynamic.shrink(less, slower)

    def take_planned_anew(self) -> bool:
        """Whether the last step has shown that the next ones have to hold less. Told once."""
        planned = None if self._dynamic is None else self._dynamic.planned
        if planned is None or not planned.replans.anew:
            return False
        planned.replans.anew = False
        return True

    def use_pages(self, place: Giver | None) -> bool:
        """Whether what is allocated lies in pages from now on: where a budget is held."""
        if self._dynamic is None:
            return self._plan_in_pages(place)
        if place is not None:
            with self._saved:
                self._dynamic.room.make(0)  # what there is may be more than the budget
        with quiet():
            return self._dynamic.use_pages(place)

    def _plan_in_pages(self, place: Giver | None) -> bool:
        """The same where steps go by a plan alone, as soon as they do: the first holds more."""
        device = self._device
        if device is None or device.type != "cuda" or self._budget == FREE:
            return False
        if place is None or (self._bytes or 0) < _LEAST_PAGED or not self._driver.has_followed():
            return False
        with torch.cuda.device(device), quiet():
            return place.use_pages(torch.cuda.current_device(), lambda: self._bytes)

    def _plan_tide(
        self, observed: Observed, most: int | None, host: Host | None = None
    ) -> Plan | None:
        """Of steps that hold no more than `most`, or than the budget; None: none was found."""
        dynamic, budget = self._dynamic, self._bytes
        assert dynamic is not None
        assert budget is not None
        self._live("planning the steps to come, which takes some seconds")
        highest = None
        if most is None:
            most, highest = dynamic.cap.left_to_plans(budget, dynamic.room.margin)
        machine = self._machine_on(observed.trace.device)
        return plan_by_tide(
            observed,
            machine,
            limit=most,
            highest=highest,
            host_budget=self._host_budget or machine.host_bytes,
            smallest=_SMALLEST,
            host=host,
        )

    def _plan(self, observed: Observed, most: int | None) -> Plan:
        plain, free = find_peak(observed.trace).bytes, self._budget == FREE
        budget = plain if free else parse_bytes(str(self._budget), plain)
        self._bytes = max(self._bytes or 0, budget)  # a share is one of the largest step's peak
        machine = self._machine_on(observed.trace.device)
        return plan_by_swapping(
            observed,
            machine,
            limit=None if free else self._bytes if most is None else most,
            spare=SWAPPING_SPARE if most is None and observed.trace.device != "cpu" else 0.0,
            host_budget=self._host_budget or machine.host_bytes,  # what the tier gives, too
            smallest=_SMALLEST,
        )

    def _machine_on(self, device: torch.device | str) -> Machine:
        if self._machine is None:
            self._machine = machine_here(device, folder=self._folder, only_link=True)
        return self._machine
