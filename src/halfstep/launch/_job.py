"""What the process of one run is asked to do."""

import json
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Job:
    """One script, one policy, one seed.

    Args:
        script: The script as the user wrote it, for `sys.argv[0]`, or the name of a module.
        args: What follows it in `sys.argv`.
        policy: The policy's text.
        seed: What the random generators are seeded with.
        events_fd: The file descriptor that the run writes its events to.
        module: Whether `script` names a module.
        task: What the process does with it: "train"; "memory", to train it for a few steps and look
            at what it keeps; "model", to measure what it builds.
        optimizer: What a model is trained with that does not say so itself.
        every: At each how many steps to look closely.
        steps: After how many steps to stop, 0 for not at all.
        overrides: Whether the policy wins over what the script itself asks for.
        seconds: About how long to measure.
        budget: How far an operation may be from float32.
    """

    script: str
    args: tuple[str, ...]
    policy: str
    seed: int
    events_fd: int
    module: bool = False
    task: str = "train"
    optimizer: str = ""
    every: int = 0
    steps: int = 0
    overrides: bool = True
    seconds: float = 0.0
    budget: float = 0.0

    def to_text(self) -> str:
        """Returns the job as one command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Returns the job that `to_text` wrote.

        Example:
            >>> job = Job(script="a.py", args=("-v",), policy="float32", seed=0, events_fd=3)
            >>> Job.from_text(job.to_text()) == job
            True
        """
        data = json.loads(text)
        return cls(**data | {"args": tuple(data["args"])})
