"""What a run under a budget has to tell: a summary, and a line about the last step."""

from statistics import median

from lowtide._report.delta_text import DeltaSummary
from lowtide._report.status_text import render_status
from lowtide._runtime.delta.driver import Dynamic
from lowtide._runtime.delta.modes import Mode as PlannedMode
from lowtide._runtime.swap.driver import Driver
from lowtide._runtime.swap.follow import in_words


def summarize(dynamic: Dynamic, policy: str, budget_bytes: int | None) -> DeltaSummary:
    """What was seen where steps are watched op by op."""
    counts = dynamic.room.counts
    planned, fuser, chains = dynamic.planned, dynamic.replayer.fuser, dynamic.seer.chains
    script = None if planned is None else planned.main_script()
    return DeltaSummary(
        policy=policy,
        modes="" if planned is None else in_words(planned.steps, PlannedMode),
        plan=None if script is None else script.plan,
        seconds=0.0 if script is None else median(script.seconds or (0.0,)),
        budget_bytes=budget_bytes,
        steps=dynamic.steps,
        peak_bytes=max(dynamic.watching.peaks, default=0),
        plain_peak_bytes=dynamic.watching.plain_peak,
        dropped=counts["dropped"],
        dropped_bytes=counts["dropped bytes"],
        swapped=counts["swapped"],
        swapped_bytes=counts["swapped bytes"],
        replayed_ops=dynamic.replayer.calls,
        replayed_seconds=dynamic.replayer.seconds,
        checked=counts["checked"],
        demoted=len(dynamic.trust.wrong),
        out_of_memory=counts["out of memory"],
        made_do=counts["made do"],
        flushes=dynamic.cap.flushes,
        ops=dynamic.seer.ops,
        driver_seconds=dynamic.seer.own_seconds_per_op(),
        kernels=0 if fuser is None else fuser.right,
        chains=0 if chains is None else chains.right,
        kernels_refused=0 if fuser is None else fuser.wrong,
    )


def tell_status(driver: Driver, dynamic: Dynamic | None, budget_bytes: int | None) -> str:
    """The last step in one line."""
    if dynamic is None:
        script = driver.following.script
        mode = str(driver.modes[-1]) if driver.modes else ""
        step, peak = driver.steps.total(), 0
    else:
        planned = dynamic.planned
        script = None if planned is None else planned.following.script
        mode = str(planned.modes[-1]) if planned is not None and planned.modes else "dynamic"
        step, peak = dynamic.steps, dynamic.watching.peaks[-1] if dynamic.watching.peaks else 0
    by_plan = script is not None and mode == PlannedMode.PLANNED and len(script.seconds) > 0
    return render_status(
        step=step,
        mode=mode,
        peak_bytes=peak,
        budget_bytes=budget_bytes or 0,
        seconds=script.seconds[-1] if script is not None and by_plan else 0.0,
        plain_seconds=script.plan.plain_seconds if script is not None and by_plan else 0.0,
    )
