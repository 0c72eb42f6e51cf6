"""Random traces that obey the laws of `_check`, as programs in the text form."""

from hypothesis import strategies as st

from lowtide._ir import Trace
from lowtide._trace.text import parse


@st.composite
def traces(draw: st.DrawFn, max_ops: int = 12) -> Trace:
    """A random program: storages come, are read, overwritten in place, and die."""
    lines = ["device cpu", f"granularity {draw(st.sampled_from([1, 512]))}"]
    lines.append(f"unseen {draw(st.integers(0, 50))}")
    lines.append("geometry float32 [2,3] [3,1] 0")
    names: list[str] = []
    live: list[str] = []
    lived: list[str] = []  # those whose newest version has seen an op

    def new() -> str:
        names.append(f"s{len(names)}")
        live.append(names[-1])
        return f"{names[-1]}:{draw(st.integers(0, 2000))}"

    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["input", "parameter", "state", "buffer"]))
        lines.append(f"have {new()} | {kind} @Net.fc name=Net.fc.w device=cpu")
    for i in range(draw(st.integers(1, max_ops))):
        if draw(st.booleans()) and lived:
            dead = draw(st.sampled_from(lived))
            lived.remove(dead)
            live.remove(dead)
            lines.append(f"free {dead}")
        choice = draw(st.integers(0, 9))
        if choice == 0:
            lines.append(f"appear {new()} | input")
        if choice == 1 and live:
            changed = draw(st.sampled_from(live))
            lines.append(f"opaque {changed}")
            lived = [name for name in lived if name != changed]
        reads = draw(st.lists(st.sampled_from(live), unique=True, max_size=3)) if live else []
        rewritten = draw(st.lists(st.sampled_from(live), unique=True, max_size=1)) if live else []
        operands = ",".join(f'["{name}",0]' for name in dict.fromkeys(reads + rewritten))
        blob = f'{{"args":"[[],{{}}]","in":[{operands}]}}' if operands else ""
        made = [new() for _ in range(draw(st.integers(0, 2)))]
        phase = draw(st.sampled_from(["forward", "backward", "optimizer"]))
        flags = draw(st.sampled_from(["", "random", "factory grad", "node=N workspace=7"]))
        lines.append(
            f"op{i % 3} {' '.join(reads)} -> {' '.join(made + rewritten)} "
            f"| {draw(st.integers(0, 9))}us {phase} @Net.fc {flags} {blob}"
        )
        lived = list(live)
        for result in made:
            if draw(st.booleans()):
                name = result.split(":")[0]
                lines.append(f"is {name} | activation @Net.fc device=cpu")
                lines.append(f"save {name} | op={i} node=MmBackward0 packed={i}")
    if draw(st.booleans()) and live:
        lines.append(f"keep {draw(st.sampled_from(live))}")
    return parse("\n".join(lines))
