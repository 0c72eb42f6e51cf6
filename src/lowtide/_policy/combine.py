"""Scores -> their weighted sum, the weights tuned by Bayesian optimisation (optuna's TPE).

Each score is normalised to its rank, from 0 for the worst candidate to 1 for the best: DOA is in
seconds, AOA in byte-seconds of either sign, so that values themselves do not add up. What is
minimised is the simulated length of the step at the limit.
"""

from collections.abc import Sequence

import numpy as np

from lowtide._errors import BadInput
from lowtide._policy.problem import Pace, Problem, best_within, choose
from lowtide._policy.scores import Scores, aoa, doa, swdoa, vote, wdoa

Weights = tuple[float, float, float, float]  # of DOA, AOA, WDOA, SWDOA
TRIALS = 40
_NAMES = ("doa", "aoa", "wdoa", "swdoa")


def combined(problem: Problem, weights: Weights, limit: int) -> Scores:
    """The weighted sum of the ranks of the four scores."""
    return _sum(_ranks(problem, limit), weights)


def tune_weights(problem: Problem, limit: int, *, trials: int = TRIALS, seed: int = 0) -> Weights:
    """The weights with the shortest simulated step within `limit`; the same each time."""
    try:
        import optuna
    except ImportError as error:
        raise BadInput(
            "score bayes needs optuna: install it with pip install 'lowtide[bayes]'"
        ) from error

    ranks = _ranks(problem, limit)
    if not problem.found:
        return (0.0, 0.0, 0.0, 1.0)

    def cost(trial: optuna.Trial) -> float:
        weights = [trial.suggest_float(name, 0.0, 1.0) for name in _NAMES]
        selection = choose(problem, _sum(ranks, weights), limit)
        tried = best_within(problem, selection.chosen, limit, paces=(Pace(1.0),))
        # Over the limit is worse than any wait, and the further the worse.
        excess = max(0, selection.peak_bytes - limit) / max(limit, 1)
        return tried.outcome.seconds + 1e3 * excess * (1.0 + tried.outcome.plain_seconds)

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        for k in range(4):  # no worse than any one score alone
            study.enqueue_trial({name: float(i == k) for i, name in enumerate(_NAMES)})
        study.optimize(cost, n_trials=trials)
    finally:
        optuna.logging.set_verbosity(level)
    best = study.best_params
    return (best["doa"], best["aoa"], best["wdoa"], best["swdoa"])


def _sum(ranks: Sequence[Scores], weights: Sequence[float]) -> Scores:
    total = np.zeros(len(ranks[0]))
    for weight, rank in zip(weights, ranks, strict=True):
        total += weight * rank
    return total


def _ranks(problem: Problem, limit: int) -> list[Scores]:
    found, clock, machine = problem.found, problem.clock, problem.machine
    load = problem.ground.curve
    scores = (
        doa(found, clock, machine),
        aoa(found, clock, machine),
        wdoa(found, clock, load, limit),
        swdoa(found, clock, load, limit),
    )
    return [1.0 + vote(score) / max(len(found), 1) for score in scores]
