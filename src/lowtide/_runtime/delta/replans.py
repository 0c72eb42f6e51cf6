"""Steps that turn out otherwise than planned -> other plans for steps like them."""

from collections.abc import Callable
from math import inf

from lowtide._ir import Plan
from lowtide._policy.host import Host
from lowtide._runtime.delta.feedback import Spent, Verdict, host_of, judge, measured_seconds
from lowtide._runtime.swap.follow import Follower
from lowtide._runtime.swap.script import Observed, Script, write_script

_MOST_REPLANS = 3  # for steps that hold more than planned
_SHORT, _OFTEN = 6, 10  # steps by a plan in a row that are short of memory; times in one; until ...
_LESS = 0.03  # ... it is so much of the budget lower


class Replans:
    """`plan` makes one for a step, within so many bytes; who carries them out is told of others."""

    def __init__(
        self,
        plan: Callable[[Observed, int | None, Host | None], Plan | None],
        following: Follower,
        exchanged: Callable[[Script], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._plan = plan
        self._following = following
        self._exchanged = exchanged
        self._failed = failed
        self.anew = False  # steps go by another plan than memory is laid out for
        self.reruns, self.acts = Spent(), Spent()  # in steps by a plan
        self.hooked: Callable[[], float] = lambda: 0.0  # seconds of the host for saves, so far
        self._hooked = 0.0  # ... when it was last begun to count

    def shrink(self, old: Script | None, less: int, slower: float = inf) -> bool:
        """Plan anew, so that steps hold so much less. False: that was done, or cannot be.

        Nor is it done if they took more than `slower` times as long.
        """
        if old is None or old not in self._following.scripts or old.replans >= _MOST_REPLANS:
            return False
        new = self._made_anew(old, old.plan.peak_bytes - less, None)
        if new is not None and new.plan.seconds > slower * old.plan.seconds:
            return False  # it may be asked for less
        old.replans += 1
        if new is None:
            return False
        new.replans, new.rounds = old.replans, old.rounds
        self._exchange(old, new)
        return True

    def was_short(self, script: Script, times: int, budget: int) -> bool:
        """In a step that has ended, so many times: whether the next ones go by another plan.

        What lies between blocks is not known before: steps show how much a plan has to leave.
        """
        often = _SHORT // 2 if times >= _OFTEN else 1  # then it is clear sooner
        script.short = script.short + often if times else 0
        self.anew = script.short >= _SHORT and self.shrink(script, int(_LESS * budget))
        return self.anew

    def settled(self, script: Script) -> None:
        """A step has gone by it as those to come do: whether they had better go by another."""
        if script.judged:
            return
        if not script.settled:  # steps before took longer: kernels were compiled and compared
            self.reruns.begin()
            self.acts.begin()
            self._hooked = self.hooked()
        script.settled.append(script.seconds[-1])
        verdict = judge(script)
        if verdict is Verdict.WAIT:
            return
        script.judged = True
        if verdict is Verdict.BACK and script.rival is not None:
            script.rival.judged = True
            self._exchange(script, script.rival)
        elif verdict is Verdict.ANOTHER:
            most = script.plan.peak_bytes if script.replans else None
            hooked = (self.hooked() - self._hooked) / (len(script.settled) - 1)
            host = host_of(script, self.reruns, self.acts, hooked)
            new = self._made_anew(script, most, host)
            if new is not None and new.plan.seconds < measured_seconds(script):
                new.replans, new.rounds, new.rival = script.replans, script.rounds + 1, script
                self._exchange(script, new)
        self.anew = script not in self._following.scripts

    def _made_anew(self, old: Script, most: int | None, host: Host | None) -> Script | None:
        try:
            plan = self._plan(old.observed, most, host)
            return None if plan is None else write_script(old.observed, plan)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._failed(error)
            return None

    def _exchange(self, old: Script, new: Script) -> None:
        self._following.replace(old, new)
        self._exchanged(new)
