"""Random but valid values of everything in core."""

import dataclasses

from hypothesis import strategies as st

from halfstep.core import (
    ACTIONS,
    FAMILIES,
    FORMATS,
    SEVERITIES,
    Candidate,
    Cast,
    Diagnosis,
    Exponents,
    Fault,
    Finding,
    LossScale,
    Machine,
    Measured,
    Moment,
    Plan,
    Policy,
    Range,
    Ranges,
    Report,
    Rule,
    Rules,
    Step,
)
from halfstep.core._formats import COMPUTE_DTYPES

WORDS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
OPERATIONS = st.builds("{}::{}".format, WORDS, WORDS)
TARGETS = st.sampled_from(FAMILIES) | OPERATIONS | st.builds("{}.{}".format, OPERATIONS, WORDS)
PATTERNS = st.text(max_size=8).map(str.strip) | st.sampled_from(["", "head.*", "layers.[0-3].*"])

RULES_ROWS = st.builds(
    Rule,
    target=TARGETS,
    action=st.sampled_from(ACTIONS),
    reason=st.text(min_size=1, max_size=12).filter(str.strip),
    where=PATTERNS,
    device=st.sampled_from(["", "cpu", "cuda", "mps"]),
    dtype=st.sampled_from(["", *COMPUTE_DTYPES]),
)

RULES = st.builds(
    Rules,
    base=st.sampled_from(Rules.names()),
    edits=st.lists(RULES_ROWS, max_size=4, unique_by=lambda rule: rule.key).map(tuple),
)


@st.composite
def loss_scales(draw, **fixed):
    low, middle, high = sorted(
        draw(st.lists(st.floats(2.0**-126, 2.0**127), min_size=3, max_size=3)),
    )
    settings = {
        "init_scale": middle,
        "min_scale": low,
        "max_scale": high,
        "growth_factor": draw(st.floats(1.0, 1e6)),
        "backoff_factor": draw(st.floats(1e-6, 0.999)),
        "growth_interval": draw(st.integers(1, 5)),
        "hysteresis": draw(st.integers(1, 4)),
    }
    kept = draw(st.sets(st.sampled_from(["growth_factor", "growth_interval", "hysteresis"])))
    return LossScale(**{key: settings[key] for key in settings if key not in kept} | fixed)


LOSS_SCALES = (
    loss_scales()
    | st.builds(LossScale.static, st.floats(2.0**-16, 2.0**127))
    | st.sampled_from([LossScale(), LossScale.none(), LossScale.static(1024.0)])
)

POLICIES = st.builds(
    Policy,
    param_dtype=st.sampled_from(COMPUTE_DTYPES),
    compute_dtype=st.sampled_from(COMPUTE_DTYPES),
    output_dtype=st.sampled_from(COMPUTE_DTYPES),
    rules=RULES,
    scale=LOSS_SCALES,
) | st.sampled_from([Policy.named(name) for name in Policy.names()])

STEPS = st.lists(st.booleans(), max_size=60)

SECONDS = st.floats(0.0, 1e3) | st.just(float("inf"))
PLANS = st.builds(
    Plan,
    policy=POLICIES,
    machine=st.builds(
        Machine,
        device=WORDS,
        name=st.text(max_size=8),
        threads=st.integers(0, 99),
        versions=st.lists(st.builds("{} {}".format, WORDS, WORDS), max_size=2).map(tuple),
    ),
    candidates=st.lists(
        st.builds(
            Candidate,
            policy=st.text(max_size=8),
            seconds=SECONDS,
            spread=SECONDS,
            saved_bytes=st.integers(0, 2**50),
        ),
        max_size=2,
    ).map(tuple),
    measured=st.lists(
        st.builds(
            Measured,
            operation=OPERATIONS,
            module=st.text(max_size=8),
            inputs=st.text(max_size=8),
            count=st.integers(1, 99),
            rule=st.sampled_from(["", *ACTIONS]),
            float32_seconds=SECONDS,
            low_seconds=SECONDS,
            low_error=SECONDS,
        ),
        max_size=2,
    ).map(tuple),
    made=st.text(max_size=8),
)


def field_names(value):
    return [field.name for field in dataclasses.fields(value)]


FAULTS = st.builds(
    Fault,
    module=st.text(max_size=8),
    operation=st.sampled_from(["matmul", "cast", "data"]),
    phase=st.sampled_from(["forward", "backward"]),
    role=st.sampled_from(["input", "output", "grad_weight"]),
    kind=st.sampled_from(["inf", "nan", "inf and nan"]),
    dtype=st.sampled_from([entry.name for entry in FORMATS]),
    shape=st.tuples(st.integers(0, 9)),
    largest=st.floats(0, 1e30),
    in_float32=st.booleans(),
    remedy=st.text(max_size=8),
    source=st.text(max_size=8),
)
DIAGNOSES = st.builds(Diagnosis, st.lists(FAULTS, max_size=2).map(tuple))


EXPONENTS = st.lists(st.floats(width=32), max_size=30).map(Exponents.of)
COUNTS = st.integers(0, 10**12)
FORMAT_NAMES = st.sampled_from([entry.name for entry in FORMATS])
KINDS = st.sampled_from(["inf", "nan", "inf and nan", "unknown"])
REPORTED_STEPS = st.builds(
    Step,
    number=st.integers(1, 10**9),
    loss=st.none() | st.floats(allow_nan=False),
    scale=st.none() | st.floats(2.0**-126, 2.0**127),
    skipped=st.booleans(),
    reason=st.text(max_size=8),
    nonfinite=st.lists(st.tuples(st.text(max_size=8), KINDS), max_size=2).map(tuple),
)
RANGES = st.builds(
    Ranges,
    rows=st.lists(
        st.builds(
            Range,
            module=st.text(max_size=8),
            role=st.sampled_from(["output", "weight", "grad_weight"]),
            reference=EXPONENTS,
            run=EXPONENTS,
            form=FORMAT_NAMES,
            families=st.lists(st.text(max_size=4), max_size=2).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
    form=FORMAT_NAMES,
    entering=st.floats(0.0, 1e30),
    updates=st.lists(st.tuples(st.text(max_size=4), st.floats(0, 1)), max_size=2).map(tuple),
    moments=st.lists(
        st.builds(Moment, st.text(max_size=4), FORMAT_NAMES, st.floats(0, 1), EXPONENTS), max_size=1
    ).map(tuple),
)
CASTS = st.builds(
    Cast, st.text(max_size=8), st.text(max_size=8), COUNTS, FORMAT_NAMES, FORMAT_NAMES, COUNTS
)
FINDINGS = st.builds(
    Finding,
    severity=st.sampled_from(SEVERITIES),
    text=st.text(max_size=8),
    module=st.text(max_size=8),
    remedy=st.text(max_size=8),
)
REPORTS = st.builds(
    Report,
    script=st.text(max_size=8),
    policy=st.text(max_size=8),
    versions=st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=2).map(tuple),
    device=st.text(max_size=8),
    date=st.text(max_size=8),
    steps=st.lists(REPORTED_STEPS, max_size=2).map(tuple),
    sampled=st.lists(st.integers(1, 9), max_size=2).map(tuple),
    diagnosis=DIAGNOSES,
    ranges=RANGES,
    power=st.integers(-30, 30),
    casts=st.lists(CASTS, max_size=2).map(tuple),
    findings=st.lists(FINDINGS, max_size=2).map(tuple),
    error=st.text(max_size=8),
)
